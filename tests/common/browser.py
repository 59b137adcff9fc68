"""A real browser, where the machine has one."""

import importlib.util
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

NAMES = "chromium", "chromium-browser", "google-chrome"
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)


def needs_browser(
    what: str,  # the test does, for the reason of a skip
    *modules: str,  # that it imports, besides playwright
) -> pytest.MarkDecorator:
    """Skip a test where there is no browser, or no module to drive it."""
    missing = ["chromium"] * (CHROMIUM is None)
    missing += [name for name in ("playwright", *modules) if not importlib.util.find_spec(name)]
    reason = f"{what}, and needs {', '.join(missing)}, which `make pytest` installs where it can"
    return pytest.mark.skipif(bool(missing), reason=reason)


@contextmanager
def new_page(**options: Any) -> Iterator[Any]:
    """Open a browser with one empty page; options are those of playwright's `new_page`."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser.new_page(**options)
        browser.close()
