"""Render the README and its pictures from nbs/index.ipynb: `python tests/readme.py`."""

import re
from pathlib import Path

import nbformat
from nbconvert import MarkdownExporter

ROOT = Path(__file__).parents[1]


def readme() -> dict[str, str]:
    """Give the files to write, by path: the index notebook as markdown, and its pictures, since
    code hosts show no inline SVG."""
    notebook = nbformat.read(ROOT / "nbs" / "index.ipynb", as_version=4)
    notebook.metadata["language_info"] = {"name": "python"}  # a cleaned notebook does not say so
    for cell in notebook.cells:
        if cell.source.startswith("#| echo: false"):
            cell.metadata["transient"] = {"remove_source": True}
    text, _ = MarkdownExporter().from_notebook_node(notebook)
    files = {}

    def picture(match: re.Match) -> str:
        path = f"nbs/images/index-{len(files) + 1}.svg"
        files[path] = (
            match[0].replace('fill="currentColor" role', 'fill="#888" color="#888" role') + "\n"
        )  # grey reads on light and on dark
        label = re.search(r'aria-label="([^"]*)"', match[0])
        return f"![{label[1] if label else 'figure'}]({path})"

    text = re.sub(r"<svg .*?</svg>", picture, text, flags=re.S)
    text = re.sub(r"\]\(([\w/]+\.ipynb)(#[^)]*)?\)", r"](nbs/\1)", text)
    text = re.sub(r"\n{3,}", "\n\n", text)
    files["README.md"] = (
        "<!-- made from nbs/index.ipynb by `make export`; edit the notebook -->\n\n"
        + text.strip()
        + "\n"
    )
    return files


if __name__ == "__main__":
    for path, text in readme().items():
        (ROOT / path).parent.mkdir(exist_ok=True)
        (ROOT / path).write_text(text, encoding="utf-8")
