"""What nbdev does to a notebook for the site, beside its own processors: `procs` in settings.ini."""

import re

CELL_MAGIC = re.compile(r"%%\w")


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
