"""What nbdev does to a notebook for the site, beside its own processors: `procs` in settings.ini."""

import json
import re
from html import unescape

CELL_MAGIC = re.compile(r"%%\w")
PHONE = 342  # pixels that a phone's page has for a figure
LEAST = 9  # pixels of a letter


def keep_cell_magic(cell) -> None:
    """Show the line `%%torchrun`, which nbdev's `clean_magics` takes away: without it a cell reads
    as one of the notebook's own process.

    Quarto reads options (`#| ...`) at the beginning of a cell only, so they go before the line. It
    colours a cell in the language that nbdev has found for it: that of the notebook, Python."""
    if cell.cell_type != "code" or not CELL_MAGIC.match(cell.source or ""):
        return
    magic, *body = cell.source.splitlines()
    options = [line for line in body if line.startswith("#|")]
    code = [line for line in body if not line.startswith("#|")]
    cell.source = "\n".join([*options, magic, *code])


def describe_figure(cell) -> None:
    """Give Quarto the labels of figures that their cell does not describe, and let those scroll on a
    phone whose letters would be too small if the page made them fit. Quarto gives each figure of a cell
    all its words."""
    if cell.cell_type != "code":
        return
    figures = [
        "".join(output["data"]["image/svg+xml"])
        for output in cell.get("outputs", ())
        if "image/svg+xml" in output.get("data", {})
    ]
    options = []
    labels = re.findall(r'<svg [^>]*aria-label="([^"]*)"', "".join(figures))
    if labels and not re.search(r"^#\| fig-alt:", cell.source, re.M):
        words = "; ".join(unescape(label) for label in dict.fromkeys(labels))
        options.append(f"#| fig-alt: {json.dumps(words, ensure_ascii=False)}")
    if any(legible_width(svg) > PHONE for svg in figures):
        options.append("#| classes: scrolls")
    cell.source = "\n".join([*options, cell.source])


def legible_width(svg: str) -> float:  # pixels
    """Tell how narrow a figure may be drawn, by its smallest letters."""
    width = re.search(r'<svg [^>]*viewBox="0 0 ([\d.]+)', svg)
    sizes = re.findall(r"font(?:-size)?(?:=\"|:[^;\"]*?)([\d.]+)", svg)
    return float(width[1]) * LEAST / min(map(float, sizes)) if width and sizes else 0
