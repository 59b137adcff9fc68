"""The pages of the site: every link leads somewhere, and a browser shows them on a desk, on a phone
and in the dark."""

import base64
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html import escape
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import urlsplit
from urllib.request import url2pathname

import pytest
import yaml
from common.browser import needs_browser, new_page
from common.sampling import today
from PIL import Image

from zero_nb.plan.draw import draw_shards
from zero_nb.plan.policies import even
from zero_nb.plan.specs import ParamSpec

ROOT = Path(__file__).parents[1]


PROCESS = """
import gc, sys
sys.path.insert(0, "tests") # where the site's own processor is
from nbdev.serve import proc_nbs
gc.disable() # the shell of each notebook lives until the end, and little of it is garbage
proc_nbs(n_workers=0, force=True)
gc.freeze() # each shell collects garbage at exit: 200 times, a quarter of a second each
"""


@pytest.fixture(scope="module")
def processed() -> Path:
    """Give the folder of the notebooks as nbdev hands them to Quarto."""
    done = subprocess.run(
        [sys.executable, "-c", PROCESS], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    assert done.returncode == 0, done.stderr
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
    """Read the links and anchors of a page of markdown, or of a notebook's prose and outputs; code
    has none."""
    from nbconvert.filters import markdown2html

    page = Links()
    if path.suffix == ".md":
        page.feed(markdown2html(path.read_text(encoding="utf-8")))
        return page
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


@pytest.mark.daily
def test_every_notebook_becomes_a_page_whose_links_lead_somewhere(processed):
    names = notebooks(processed)
    assert names == notebooks(ROOT / "nbs") and len(names) > 20
    pages = {name: linked(processed / name) for name in names}
    pages["reference.md"] = linked(processed / "reference.md")
    assert len(pages["reference.md"].links) > 100
    assert {name: broken for name in pages if (broken := broken_links(pages, name))} == {}


def test_the_sidebar_lists_every_notebook():
    sidebar = (ROOT / "nbs" / "sidebar.yml").read_text(encoding="utf-8")
    names = notebooks(ROOT / "nbs")
    assert len(names) > 20 and [name for name in names if name not in sidebar] == []


# What the site's themes (Bootstrap's cosmo and darkly) say of a page: its width and its colours.
THEME = """
body { margin: 0; font: 16px/1.5 sans-serif; color: #212529; background: #fff }
main { max-width: 850px; margin: auto; padding: 0 24px }
img { max-width: 100%; height: auto }
pre { font-size: 14px; overflow: auto }
a { color: #2780e3 }
code { color: #e83e8c }
pre code { color: inherit }
@media (prefers-color-scheme: dark) {
  body { color: #dee2e6; background: #222 }
  a { color: #00bc8c }
}
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


def describe_images(notebook: Any) -> Iterator[str]:
    """Give images the words and the class of their cell, as Quarto does. nbconvert has no place for
    those of SVG: give the beginning of each one's tag."""
    drawn = []
    for cell in notebook.cells:
        options = re.findall(r"^#\| (fig-alt|classes): (.+)$", cell.source, re.M)
        said = {name: escape(yaml.safe_load(words)) for name, words in options}
        kinds = [kind for output in cell.get("outputs", ()) for kind in output.get("data", ())]
        tag = f'<img class="{said.get("classes", "")}" alt="{said.get("fig-alt", "")}" '
        drawn += [tag] * kinds.count("image/svg+xml")
    return iter(drawn)


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
        drawn = describe_images(notebook)
        notebook.metadata["language_info"] = {"name": "python"}  # in which Quarto colours a cell
        with patch("nbconvert.exporters.html.BeautifulSoup", Unparsed):
            body, _ = exporter.from_notebook_node(notebook)
        body = re.sub('<img (?=src="data:image/svg)', lambda _: next(drawn), body)
        path = folder / f"{i}.html"
        text = PAGE.format(title=name, style=style, body=body, script=script)
        path.write_text(text, encoding="utf-8")
        made[name] = path.as_uri()
    return made


def for_ranks(folder: Path) -> dict[str, list[dict]]:
    """Give the cells of each notebook that run under `%%torchrun`."""
    found = {}
    for name in notebooks(folder):
        cells = json.loads((folder / name).read_text(encoding="utf-8"))["cells"]
        code = (cell for cell in cells if cell["cell_type"] == "code")
        found[name] = [c for c in code if re.search("^%%torchrun", "".join(c["source"]), re.M)]
    return {name: cells for name, cells in found.items() if cells}


def test_cells_for_ranks_keep_their_magic_and_are_python(processed):
    """Quarto colours a cell in its `language`, and takes options from its first lines only."""
    ours, shown = for_ranks(ROOT / "nbs"), for_ranks(processed)
    assert len(ours) > 10
    assert {n: len(c) for n, c in shown.items()} == {n: len(c) for n, c in ours.items()}
    for name, cells in shown.items():
        for cell in cells:
            before, _, after = "".join(cell["source"]).partition("%%torchrun")
            assert re.fullmatch(r"(#\|.*\n)*", before) and "#|" not in after, name
            assert cell["metadata"]["language"] == "python", name


@pytest.mark.turns(2, name="pages")
def test_cells_for_ranks_are_coloured_as_python(site, processed):
    for name in set(for_ranks(processed)) & set(site):
        text = Path(url2pathname(urlsplit(site[name]).path)).read_text(encoding="utf-8")
        blocks = [b for b in re.findall("(?s)<pre>.*?</pre>", text) if ">torchrun</span>" in b]
        assert blocks and all(block.count('<span class="n') > 2 for block in blocks), name


LOOK = r"""() => {
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
        if (!figure.src?.startsWith("data:image/svg")) continue
        const drawn = new DOMParser().parseFromString(atob(figure.src.split(",")[1]), "image/svg+xml")
        const root = drawn.documentElement
        const scale = box.width / root.getAttribute("viewBox").split(" ")[2]
        for (const text of drawn.querySelectorAll("text, tspan")) {
            const own = text.getAttribute("font-size") || /([\d.]+)px/.exec(text.getAttribute("style"))?.[1]
            const inherited = text.tagName === "text" && root.getAttribute("font-size") || 99
            const size = scale * (own || inherited)
            if (text.textContent && size < 8.9) found.push(`writes "${text.textContent}" in ${size} px`)
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


@pytest.mark.parametrize("system", ["light", "dark"])
@needs_browser("looks at a figure in a real browser")
def test_a_figure_follows_the_page_that_the_reader_chose(tmp_path, system):
    """Quarto's switch gives the page a class; the reader's system need not be of the same mind."""
    style = (ROOT / "nbs" / "styles.css").read_text(encoding="utf-8")
    drawn = base64.b64encode(
        draw_shards(even([ParamSpec("weight", (100,))], 2))._repr_svg_().encode()
    ).decode()
    body = f'<img src="data:image/svg+xml;base64,{drawn}">'
    corners = {}
    with new_page(color_scheme=system) as page:
        for chosen in ("light", "dark"):
            page.set_content(
                f'<style>{style}</style><body class="quarto-{chosen}"><main>{body}</main>'
            )
            shot = Image.open(io.BytesIO(page.locator("img").screenshot())).convert("L")
            corners[chosen] = shot.getpixel((1, 1))
    assert corners["light"] > 240 and corners["dark"] < 40


# What axe looks at, with code and drawings as one element each: it takes its time for every element.
SHAPE = (
    "aria-allowed-attr",
    "aria-valid-attr",
    "duplicate-id-aria",
    "empty-heading",
    "heading-order",
    "image-alt",
    "link-name",
    "list",
    "listitem",
    "page-has-heading-one",
    "role-img-alt",
    "scrollable-region-focusable",
    "svg-img-alt",
    "th-has-data-cells",
)
AXE = """async rules => {
    for (const code of document.querySelectorAll("pre")) code.textContent = code.textContent
    for (const drawing of document.querySelectorAll("svg"))
        drawing.replaceChildren(...drawing.querySelectorAll(":scope > title"))
    const only = {runOnly: {type: "rule", values: rules}, resultTypes: ["violations"]}
    const {violations} = await axe.run("main", only)
    return violations.flatMap(({id, nodes}) => nodes.map(({html}) => `${id}: ${html.slice(0, 150)}`))
}"""


def found_by_axe(page: Any, scheme: str) -> list[str]:
    """Give what axe finds on the page that is open; what does not depend on colours only once."""
    page.emulate_media(color_scheme=scheme)
    page.evaluate("scheme => { document.body.className = `quarto-${scheme}` }", scheme)
    return page.evaluate(AXE, ["color-contrast", *(SHAPE if scheme == "light" else ())])


@pytest.mark.turns(2, name="pages")
@needs_browser("runs axe on the site's pages in a real browser", "axe_playwright_python")
def test_axe_finds_nothing(site):
    """Two seconds of the processor a page: some of them on a day, another part on the next."""
    axe = files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")
    turns = (
        1 if os.environ.get("ZERO_NB_ALL") else 21
    )  # odd: each half of the pages meets each part
    chosen = today("axe", len(site), turns)
    wrong = {}
    with new_page(viewport={"width": 1280, "height": 900}) as page:
        for name in (name for i, name in enumerate(site) if i in chosen):
            page.goto(site[name])
            page.evaluate(axe)
            if found := [*found_by_axe(page, "light"), *found_by_axe(page, "dark")]:
                wrong[name] = found[:3]
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
            if last in (["explorer()"], ["make_player(schedule, cost)"]):
                widgets.append(name)
                assert cell["outputs"] == [] and shows_a_figure(following), name
    assert len(widgets) > 2


def labelled(cell: dict) -> bool:
    """Tell whether the figures of a cell have labels, which tests/processors.py gives to the site."""
    shown = [
        output["data"] for output in cell["outputs"] if FIGURES & output.get("data", {}).keys()
    ]
    drawn = ["".join(data.get("image/svg+xml", "")) for data in shown]
    return all(re.search('<svg [^>]*aria-label="[^"]{10}', svg) for svg in drawn)


def test_images_are_described():
    """Quarto gives an image the words of its cell's `fig-alt`; pictures of ours have a label of
    their own."""
    silent = []
    for name in notebooks(ROOT / "nbs"):
        cells = json.loads((ROOT / "nbs" / name).read_text(encoding="utf-8"))["cells"]
        for cell in cells:
            kinds = {kind for o in cell.get("outputs", ()) for kind in o.get("data", ())}
            words = re.search(r"^#\| fig-alt: (?=.{30})[^:#]+$", "".join(cell["source"]), re.M)
            if FIGURES & kinds and not words and not labelled(cell):
                silent.append((name, cell["id"]))
    assert silent == []
