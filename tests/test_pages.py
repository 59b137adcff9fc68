"""The pages of the site: every link leads somewhere, and a browser shows them on a desk, on a phone
and in the dark."""

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from unittest.mock import patch

import pytest
import yaml
from common.browser import needs_browser, new_page

ROOT = Path(__file__).parents[1]


PROCESS = """
import gc
from nbdev.serve import proc_nbs
gc.disable() # the shell of each notebook lives until the end, and little of it is garbage
proc_nbs(n_workers=0, force=True)
gc.freeze() # each shell collects garbage at exit: 200 times, a quarter of a second each
"""


@pytest.fixture(scope="module")
def processed() -> Path:
    """Give the folder of the notebooks as nbdev hands them to Quarto."""
    subprocess.run([sys.executable, "-c", PROCESS], cwd=ROOT, check=True, stderr=subprocess.PIPE)
    return ROOT / "_proc"


class Links(HTMLParser):
    """The links and anchors of a page."""

    def __init__(self):
        super().__init__()
        self.links, self.anchors = [], set()

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if "id" in attrs:
            self.anchors.add(attrs["id"].lower())  # as the site spells them
        if tag == "a" and attrs.get("href"):
            self.links.append(attrs["href"])


def linked(path: Path) -> Links:
    """Read the links and anchors of a notebook's prose and outputs; code has none."""
    from nbconvert.filters import markdown2html

    page = Links()
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        found = [output.get("data", {}) for output in cell.get("outputs", ())]
        if cell["cell_type"] == "markdown":
            found = [{"text/markdown": cell["source"]}]
        for data in found:
            page.feed("".join(data.get("text/html", "")))
            page.feed(markdown2html("".join(data.get("text/markdown", ""))))
    page.close()
    return page


def notebooks(folder: Path) -> list[str]:
    """Give the notebooks below a folder, but for those that Jupyter keeps."""
    found = sorted(folder.rglob("*.ipynb"))
    return [
        str(path.relative_to(folder)) for path in found if ".ipynb_checkpoints" not in path.parts
    ]


def broken_links(pages: dict[str, Links], name: str) -> list[str]:
    """Give the links of a page that lead to no page, file or anchor of the site."""
    broken = []
    for link in pages[name].links:
        if link.startswith(("http:", "https:", "mailto:", "data:")):
            continue
        path, _, anchor = link.partition("#")
        target = os.path.normpath(os.path.join(os.path.dirname(name), path)) if path else name
        target = target.replace(".html", ".ipynb")
        known = target in pages or (ROOT / "nbs" / target).exists()
        if not known or (
            anchor and target in pages and anchor.lower() not in pages[target].anchors
        ):
            broken.append(link)
    return broken


def test_every_notebook_becomes_a_page_whose_links_lead_somewhere(processed):
    names = notebooks(processed)
    assert names == notebooks(ROOT / "nbs") and len(names) > 20
    pages = {name: linked(processed / name) for name in names}
    assert {name: broken for name in names if (broken := broken_links(pages, name))} == {}


def test_the_sidebar_lists_every_notebook():
    sidebar = (ROOT / "nbs" / "sidebar.yml").read_text(encoding="utf-8")
    names = notebooks(ROOT / "nbs")
    assert len(names) > 20 and [name for name in names if name not in sidebar] == []


# What the site's theme (Bootstrap) says of a page, as far as its width goes, and a dark page.
THEME = """
body { margin: 0; font: 16px/1.5 sans-serif; color: #212529; background: #fff }
main { max-width: 850px; margin: auto; padding: 0 24px }
img { max-width: 100%; height: auto }
pre { font-size: 14px; overflow: auto }
@media (prefers-color-scheme: dark) { body { color: #dee2e6; background: #222 } }
"""
PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>{style}</style><body class="quarto-light"><main>{body}</main>{script}</html>"""


class Unparsed(str):
    """A page in which nbconvert finds nothing to add: alternative texts are tested below."""

    def __new__(cls, html: str, features: str) -> "Unparsed":
        return super().__new__(cls, html)

    def select(self, selector: str) -> list:
        return []


@pytest.fixture(scope="module", params=["first half", "other half"])
def site(request, processed, tmp_path_factory) -> dict[str, str]:
    """Make pages of half of the notebooks, with the site's own style, and give their addresses by name."""
    import nbformat
    from nbconvert import HTMLExporter

    exporter = HTMLExporter(template_name="basic")
    # Two thirds of nbconvert's time goes into cleaning and parsing what it has written itself.
    exporter.register_filter("clean_html", lambda html: html)
    ours = yaml.safe_load((processed / "_quarto.yml").read_text(encoding="utf-8"))["format"]["html"]
    script = ours["include-after-body"]["text"]
    style = THEME + (processed / ours["css"]).read_text(encoding="utf-8")
    folder = tmp_path_factory.mktemp("site")
    made = {}
    half = slice(request.param != "first half", None, 2)
    for i, name in enumerate(notebooks(processed)[half]):
        notebook = nbformat.read(processed / name, as_version=4)
        with patch("nbconvert.exporters.html.BeautifulSoup", Unparsed):
            body, _ = exporter.from_notebook_node(notebook)
        path = folder / f"{i}.html"
        text = PAGE.format(title=name, style=style, body=body, script=script)
        path.write_text(text, encoding="utf-8")
        made[name] = path.as_uri()
    return made


LOOK = """() => {
    const found = []
    const width = document.scrollingElement.scrollWidth
    if (width > innerWidth) found.push(`is ${width} px wide on ${innerWidth}`)
    for (const figure of document.querySelectorAll("main img, main svg")) {
        const box = figure.getBoundingClientRect()
        if (box.width < 20 || box.height < 20 || figure.naturalWidth === 0)
            found.push(`shows a figure as ${box.width} by ${box.height} px`)
        for (const text of figure.querySelectorAll("text")) {
            const size = text.getScreenCTM().a * parseFloat(getComputedStyle(text).fontSize)
            if (text.textContent && size < 9) found.push(`writes "${text.textContent}" in ${size} px`)
        }
    }
    return found.slice(0, 3)
}"""


@pytest.mark.turns(2, name="pages")
@needs_browser("opens the site's pages in a real browser")
def test_pages_fit_a_desk_and_a_phone_and_need_no_network(site):
    wrong, asked = {}, set()

    def answer(route):
        if not route.request.url.startswith(("file:", "data:")):
            asked.add((page.title(), route.request.url))
            return route.abort()
        return route.continue_()

    with new_page() as page:
        page.route("**/*", answer)
        for name, address in site.items():
            page.goto(address)
            for width in (1280, 390):
                page.set_viewport_size({"width": width, "height": 900})
                if found := page.evaluate(LOOK):
                    wrong[name, width] = found
    assert wrong == {} and asked == set()


# The colour in a figure's corner on black and on white, and the colours of texts that lie on the page.
IN_THE_DARK = """async () => {
    const found = []
    for (const image of document.querySelectorAll("main img")) {
        await image.decode()
        const canvas = document.createElement("canvas")
        canvas.width = image.naturalWidth
        canvas.height = image.naturalHeight
        const ink = canvas.getContext("2d")
        ink.drawImage(image, 0, 0)
        const [x, y] = [canvas.width - 2, canvas.height - 2]
        if (ink.getImageData(x, y, 1, 1).data[3] < 255) found.push("shows a figure with no background")
    }
    for (const text of document.querySelectorAll("main svg text")) {
        const own = getComputedStyle(text.closest("svg")).backgroundColor
        if (own === "rgba(0, 0, 0, 0)" && getComputedStyle(text).fill !== getComputedStyle(document.body).color)
            found.push(`writes "${text.textContent}" in ${getComputedStyle(text).fill}`)
    }
    return found.slice(0, 3)
}"""


@pytest.mark.turns(2, name="pages")
@needs_browser("opens the site's pages in a real browser")
def test_figures_are_read_on_a_dark_page(site):
    """An image has a background of its own; what is drawn into the page takes the page's colour."""
    wrong = {}
    with new_page(color_scheme="dark") as page:
        for name, address in site.items():
            page.goto(address)
            if found := page.evaluate(IN_THE_DARK):
                wrong[name] = found
    assert wrong == {}


FIGURES = {"image/png", "image/svg+xml"}


def shows_a_figure(cell: dict) -> bool:
    """Tell whether an output of a cell is a picture."""
    found = [output.get("data", {}) for output in cell.get("outputs", ())]
    return any(
        FIGURES & set(data) or "<svg" in "".join(data.get("text/html", ())) for data in found
    )


def test_a_still_figure_follows_a_widget():
    """No page shows a widget: it would load scripts from the network, and needs a kernel."""
    widgets = []
    for name in notebooks(ROOT / "nbs"):
        notebook = json.loads((ROOT / "nbs" / name).read_text(encoding="utf-8"))
        assert "widgets" not in notebook["metadata"], name
        code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        for cell, following in zip(code, [*code[1:], {}], strict=True):
            kinds = {kind for output in cell["outputs"] for kind in output.get("data", ())}
            assert not any("widget" in kind for kind in kinds), name
            last = "".join(cell["source"]).splitlines()[-1:]
            if last in (["explorer()"], ["player(schedule, cost)"]):
                widgets.append(name)
                assert cell["outputs"] == [] and shows_a_figure(following), name
    assert len(widgets) > 2


def test_images_are_described():
    """Quarto gives an image the words of its cell's `fig-alt`; pictures drawn into the page have a
    label of their own."""
    silent = []
    for name in notebooks(ROOT / "nbs"):
        cells = json.loads((ROOT / "nbs" / name).read_text(encoding="utf-8"))["cells"]
        for cell in cells:
            kinds = {kind for o in cell.get("outputs", ()) for kind in o.get("data", ())}
            words = re.search(r"^#\| fig-alt: (?=.{30})[^:#]+$", "".join(cell["source"]), re.M)
            if FIGURES & kinds and not words:
                silent.append((name, cell["id"]))
    assert silent == []
