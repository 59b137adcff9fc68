"""The API reference and `llms.txt`: every public name, with what a caller needs to know of it."""

import re

import pytest
from reference import NBS, TORCHS, cells, example, modules, settings

import zero_nb

PAGE = (NBS / "reference.md").read_text(encoding="utf-8")
LLMS = (NBS / "llms.txt").read_text(encoding="utf-8")
PUBLIC = [(module, name) for module, names in zero_nb._MODULES.items() for name in names]
OURS = [(module, name) for module, name in PUBLIC if name not in TORCHS]
CHECKS_NOTHING = {  # values made by the package, an error, and a decorator
    "Attendance",
    "DivergenceError",
    "Span",
    "shadowed_by",
}


def section(name: str) -> str:
    """Give what the page says of a name."""
    return re.split(r"^##", PAGE.split(f"\n### {name}\n")[1], maxsplit=1, flags=re.M)[0]


def test_each_public_name_is_there_once():
    assert re.findall(r"^### (\w+)$", PAGE, re.M) == zero_nb.__all__
    assert re.findall(r"reference\.html#(\w+)", LLMS) == [n.lower() for n in zero_nb.__all__]
    assert re.findall(r"^## zero_nb\.([\w.]+)$", PAGE, re.M) == list(zero_nb._MODULES)


@pytest.mark.parametrize(("module", "name"), OURS)
def test_it_says_what_may_be_given_and_what_goes_wrong(module, name):
    text = section(name)
    assert re.search(rf"^```python\n(?:@.*\n)*(?:def|class) {name}\b", text, re.M)
    assert re.search(r"\b[Rr]aises?\b|Error`", text) or name in CHECKS_NOTHING
    assert example(modules()[module], name) in text


@pytest.mark.parametrize(("module", "name"), OURS)
def test_its_links_lead_to_where_it_is_defined(module, name):
    chapter, anchor, url = re.search(
        r"\[chapter\]\((.+)#(\w+)\) · \[source\]\((.+)\)", section(name)
    ).groups()
    exported = "\n".join(s for s in cells(chapter) if s.startswith("#| export"))
    assert re.search(rf"^(?:def|class) {name}\b", exported, re.M) and anchor == name.lower()
    path = url.removeprefix(f"{settings()['git_url']}/blob/main/")
    assert (NBS.parent / path).is_file() and path == f"zero_nb/{module.replace('.', '/')}.py"


def test_llms_txt_lists_every_page():
    """Its form: a title, a summary, and lists of links below headings (llmstxt.org)."""
    lines = [line for line in LLMS.splitlines() if line]
    assert lines[0].startswith("# ") and lines[1].startswith("> ")
    assert all(re.match(r"## \S|- \[[^]]+\]\(https://\S+\): \S", line) for line in lines[2:])
    listed = re.findall(r"/blob/main/nbs/(\S+\.ipynb)\)", LLMS)
    chapters = {str(p.relative_to(NBS)) for p in NBS.glob("*/*.ipynb")} | {"differences.ipynb"}
    assert set(listed) == chapters and len(listed) == len(chapters)
