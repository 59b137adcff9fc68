"""Render the README and its pictures from nbs/index.ipynb, and the API reference from the package:
`python tests/readme.py`."""

import re
from pathlib import Path

import nbformat
from nbconvert import MarkdownExporter
from reference import made

ROOT = Path(__file__).parents[1]


def readme() -> dict[str, str]:
    """Give the files to write, by path: the index notebook as markdown, and its pictures, since
    code hosts show no inline SVG."""
    notebook = nbformat.read(ROOT / "nbs" / "index.ipynb", as_version=4)
    notebook.metadata["language_info"] = {"name": "python"}  # a cleaned notebook does not say so
    for cell in notebook.cells:
        if cell.source.startswith("#| echo: false"):
            cell.metadata["transient"] = {"remove_source": True}
    text, resources = MarkdownExporter().from_notebook_node(notebook)
    files = {}

    def plotted(match: re.Match) -> str:
        svg = resources["outputs"][match[1]].decode()
        cell = notebook.cells[int(match[1].split("_")[1])]
        alt = re.search(r"^#\| fig-alt: (.+)$", cell.source, re.M)
        alt = alt or re.search(r'aria-label="([^"]*)"', svg)
        path = f"nbs/images/index-{len(files) + 1}.svg"
        files[path] = svg.strip() + "\n"
        return f"![{alt[1]}]({path})"

    text = re.sub(r"!\[svg\]\((output_\w+\.svg)\)", plotted, text)
    text = re.sub(r"^ +$", "", text, flags=re.M)
    text = re.sub(r"\]\(([\w/]+\.(?:ipynb|md))(#[^)]*)?\)", r"](nbs/\1)", text)
    text = re.sub(r"\n{3,}", "\n\n", text)
    files["README.md"] = (
        "<!-- made from nbs/index.ipynb by `make export`; edit the notebook -->\n\n"
        + text.strip()
        + "\n"
    )
    return files


if __name__ == "__main__":
    for path, text in (readme() | made()).items():
        (ROOT / path).parent.mkdir(exist_ok=True)
        (ROOT / path).write_text(text, encoding="utf-8")
