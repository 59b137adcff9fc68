"""Execute the notebooks, and compare what they show with what is stored: `make notebooks`.

What a page shows must be what its code gives. Text is compared word by word, numbers to four digits
(processors add up in different orders), figures by their words, by where each of their shapes lies,
to a pixel, and by its colour. Cells whose output depends on the clock, or on which process comes first, say
`#| measured: true`; they are executed, and what the text says of them is an assertion beside them.
An assertion of how times compare says `#| times: true`: it holds on the machine that has stored them,
and without it nothing is stored. On another machine one that does not hold is told, and is no error.
Cells that show what rounding leaves say `#| rounding: true`; of a figure the words are compared alone,
and of a text all but the numbers, which another processor's order of additions changes.
Names that are new each time (of temporary files, of the cell that a line is in), colours of a
terminal, the version of matplotlib, and tokens a second do not count. On another Python the notebooks
are executed, and nothing is compared: the main job's text is Python's own library, and tracebacks and
warnings differ.

Those that take long run each second to fifth day, all of them with `ZERO_NB_ALL=1`.

`tests/notebooks.py --store NOTEBOOK` stores what came where it differs; of what is measured all or
nothing, so that it is of one run.
"""

import argparse
import gc
import importlib
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import platform
import re
import sys
import tempfile
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from itertools import chain, zip_longest
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import nbformat
from common.sampling import resting_today, write_costs
from execnb.nbio import read_nb
from execnb.shell import CaptureShell

ROOT = Path(__file__).parents[1]
NBS = ROOT / "nbs"
STORED_BY = "3.11"  # version of the Python that has executed what is stored
COMPARES = platform.python_version().startswith(f"{STORED_BY}.")
# what is new each time, and what stands in its place
PASSING = {
    r"\x1b\[[\d;?]*[A-Za-z]": "",  # colours
    rf"{re.escape(tempfile.gettempdir())}/tmp\w+": "TEMP",
    r"<ipython-input-[^>]*>|<In \[\d+\]>|(?<![\w/])(\d+|\.\.\.)\.py(?=:\d)": "CELL",
    r"[\d,.]+ tokens/s": "MEASURED tokens/s",
    r"Matplotlib v[\d.]+": "Matplotlib",
    r"(checksum|says) [0-9a-f]{8}\b": r"\1 CRC",  # of trained numbers, which differ between processors
}
NUMBER = re.compile(r"-?\d+\.?\d*(?:e[-+]?\d+)?")
SHAPES = "\nshapes\n"  # stands before what `shapes` gives, in the text of a figure
PLACES = ("x", "y", "width", "height", "d", "points", "transform")  # where a figure draws
PLACES += ("x1", "y1", "x2", "y2", "cx", "cy", "r")
SHAPE = re.compile(r"<([a-z]\w*)\b([^>]*)>")
PLACE = re.compile(rf"""\s({"|".join(PLACES)})=["']([^"']*)["']""")
PAINT = re.compile(
    r"""[\s"';](fill|stroke)(?:=["']|:\s*)([^"';]*)"""
)  # an attribute, or in a style
HEX_COLOUR = re.compile(r"#(?:[0-9a-f]{6}|[0-9a-f]{3})\b", re.I)
COORDINATE = re.compile(r"-?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?")
PIXEL = 1.0  # by which versions of matplotlib, and sums in another order, may move a shape

LIMITS = (2, 4, 10, 30)  # seconds of the processor: a notebook that takes 30 runs each fifth day

# by the process that forks one for each notebook: most of them would import these, for 3 s
ALREADY_IMPORTED = (
    *("torch", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.optim"),
    *("matplotlib.pyplot", "zero_nb.optim.optimizer"),
)


def shown(outputs: list[dict[str, Any]]) -> list[str]:
    """Give what a reader sees of a cell, in an order that does not depend on who wrote first."""
    streams: dict[str, str] = {}
    found = []
    for output in outputs:
        if output["output_type"] == "stream":
            name = output["name"]
            streams[name] = streams.get(name, "") + "".join(output["text"])
        else:
            found.append(text_of(output.get("data", {})))
    found += [f"{name}: {text.strip()}" for name, text in streams.items() if text.strip()]
    return sorted(map(lasting, found))


def lasting(text: str) -> str:
    """Take out of a text what is new each time."""
    for pattern, instead in PASSING.items():
        text = re.sub(pattern, instead, text)
    return text


def text_of(data: dict[str, Any]) -> str:
    """Give an output as one text: its kind, and what a reader sees."""
    for kind in ("text/markdown", "text/html", "image/svg+xml"):
        if kind in data:
            return f"{kind}: {outline(''.join(data[kind])).strip()}"
    if "image/png" in data:
        return "image/png"  # drawn from what other cells show
    return f"text/plain: {''.join(data.get('text/plain', '')).strip()}"


def outline(page: str) -> str:
    """Give the words of a page, how often it has each tag, and its shapes: what a figure is made of."""
    tags = Counter(re.findall(r"<([a-z]\w*)", page))
    words = " ".join(re.sub(r"<style.*?</style>|<[^>]*>", " ", page, flags=re.S).split())
    drawn = shapes(page)
    end = SHAPES + "\n".join(drawn) if drawn else ""
    return f"{sorted(tags.items())} {words}{end}" if tags else page


def shapes(page: str) -> list[str]:
    """Give the tags of a page that say where they draw or in which colour, each with both."""
    found = ((tag, PLACE.findall(rest) + painted(rest)) for tag, rest in SHAPE.findall(page))
    return [f"{tag} {' '.join(f'{k}={v}' for k, v in sorted(at))}" for tag, at in found if at]


def painted(attributes: str) -> list[tuple[str, str]]:
    """Give the colours of a tag. Numbers stand in place of hexadecimal digits, since a colour that is
    computed may differ by one of 255 on another processor."""
    return [(kind, HEX_COLOUR.sub(in_numbers, what)) for kind, what in PAINT.findall(attributes)]


def in_numbers(colour: re.Match[str]) -> str:
    """Write `#f80` or `#ff8800` as `rgb 255 136 0`."""
    digits = colour[0][1:]
    if len(digits) == 3:
        digits = "".join(2 * each for each in digits)
    pairs = digits[:2], digits[2:4], digits[4:]
    return " ".join(["rgb", *(str(int(pair, 16)) for pair in pairs)])


def same(stored: str, new: str) -> bool:
    """Tell whether two texts are equal but for the last digits of numbers that are no integers, and all
    digits of what rounding leaves, which is below 1e-5; and the shapes of figures, to a pixel, and
    their colours."""
    stored, _, stored_shapes = stored.partition(SHAPES)
    new, _, new_shapes = new.partition(SHAPES)
    if any(moved(stored_shapes, new_shapes)):
        return False
    if stored == new:
        return True
    first, second = NUMBER.findall(stored), NUMBER.findall(new)
    if NUMBER.sub("#", stored) != NUMBER.sub("#", new) or len(first) != len(second):
        return False
    return all(map(close, first, second))


def moved(stored: str, new: str) -> Iterator[str]:
    """Name the shapes that do not lie where they lay, or have another colour."""
    for old, now in zip_longest(stored.splitlines(), new.splitlines(), fillvalue="none"):
        before, after = COORDINATE.findall(old), COORDINATE.findall(now)
        alike = COORDINATE.sub("#", old) == COORDINATE.sub("#", now)
        pairs = zip(map(float, before), map(float, after), strict=False)
        if not alike or any(abs(a - b) > PIXEL for a, b in pairs):
            yield f"{old}\nis now\n{now}"


def close(a: str, b: str) -> bool:
    """Tell whether two numbers are equal but for what another processor would change."""
    x, y = float(a), float(b)
    fractions = {*".e"} & {*a} and {*".e"} & {*b}
    both_rounding = min(abs(x), abs(y)) > 0 and max(abs(x), abs(y)) < 1e-5
    return a == b or bool(fractions and (math.isclose(x, y, rel_tol=1e-4) or both_rounding))


def differences(
    before: list[dict[str, Any]],
    after: list[dict[str, Any]],
    measured: bool = False,
    rounding: bool = False,
) -> Iterator[str]:
    """Name the outputs of a cell that are not what is stored; of what is measured, of another kind;
    of what rounding leaves, other words."""
    stored, new = shown(before), shown(after)
    if rounding:
        stored, new = (list(map(without_rounding, found)) for found in (stored, new))
    if measured:
        stored, new = ([text.partition(":")[0] for text in found] for found in (stored, new))
    if len(stored) != len(new):
        yield f"{len(stored)} outputs are stored and {len(new)} came: {stored} and {new}"
        return
    for old, now in zip(stored, new, strict=True):
        if not same(old, now):
            (words, _, before), (new_words, _, after) = old.partition(SHAPES), now.partition(SHAPES)
            shifted = [*moved(before, after)]
            told = f"\n{len(shifted)} shapes moved; {shifted[0]}" if shifted else ""
            yield f"stored:\n{words}\nnew:\n{new_words}{told}"


def without_rounding(text: str) -> str:
    """Leave the words of a figure; of a text, leave all but the numbers."""
    words, is_figure, _ = text.partition(SHAPES)
    return words if is_figure else NUMBER.sub("#", words)


def is_measured(cell: Any) -> bool:
    """Tell whether what a cell shows may be different each time."""
    return bool(re.search(r"^#\|\s*measured:\s*true", "".join(cell["source"]), re.M))


def shows_rounding(cell: Any) -> bool:
    """Tell whether a cell shows what rounding leaves, which another processor does in another order."""
    return bool(re.search(r"^#\|\s*rounding:\s*true", "".join(cell["source"]), re.M))


def compares_times(cell: Any) -> bool:
    """Tell whether a cell asserts how the times compare that another one has measured."""
    return bool(re.search(r"^#\|\s*times:\s*true", "".join(cell["source"]), re.M))


def skipped(cell: Any) -> bool:
    """Tell whether a cell is not executed."""
    return cell.cell_type != "code" or bool(re.search(r"^#\|\s*eval:\s*false", cell.source, re.M))


def store(path: Path, new: dict[int, list[dict[str, Any]]], different: set[int]) -> None:
    """Write the outputs of cells that differ into a notebook; if one of those is measured, of all that are."""
    notebook = nbformat.read(path, as_version=4)
    measured = any(is_measured(notebook.cells[i]) for i in different)
    for i, outputs in new.items():
        cell = notebook.cells[i]
        if i in different or (measured and is_measured(cell)):
            cell.outputs = nbformat.from_dict(outputs)
    nbformat.write(notebook, path)


class Result(NamedTuple):
    """What came of executing a notebook."""

    wrong: str  # errors, and outputs that are not what is stored
    slower: list[str]  # assertions of times that do not hold here
    seconds: float  # of the processor


def execute(path: Path, storing: bool = False) -> Result:
    """Execute a notebook in its folder."""
    if not storing:  # a test that all of it runs takes less than a measurement
        os.environ["IN_TEST"] = "1"
    sys.path.insert(0, str(ROOT))
    os.chdir(path.parent)
    stored = json.loads(path.read_text(encoding="utf-8"))
    wrong: list[str] = []
    slower: list[str] = []
    new: dict[int, list[dict[str, Any]]] = {}
    different: set[int] = set()

    def compare(cell: Any) -> None:
        if not storing and compares_times(cell) and isinstance(shell.exc, AssertionError):
            slower.append(f"{path.stem}: {cell.source.splitlines()[-1].strip()}")
            shell.exc = None
            return
        if not COMPARES:
            return
        before = stored["cells"][cell.idx_].get("outputs", [])
        new[cell.idx_] = json.loads(json.dumps(cell.get("outputs", []), default=dict))
        how = is_measured(cell), shows_rounding(cell)
        if found := [*differences(before, new[cell.idx_], *how)]:
            different.add(cell.idx_)
            wrong.extend(f"cell {cell.idx_}: {text}" for text in found)

    shell = CaptureShell(path)
    try:
        shell.run_all(read_nb(path), exc_stop=True, preproc=skipped, postproc=compare)
    except BaseException as error:
        wrong.append(shell.prettytb(fname=path))
        wrong.append(str(getattr(error, "stderr", None) or ""))  # of a process that was started
    else:
        if storing and different:
            store(path, new, different)
            wrong.clear()
    return Result("\n".join(filter(None, wrong)), slower, sum(os.times()[:4]))


def send_result(path: Path, storing: bool, to: Connection) -> None:
    """Execute a notebook, and send what came of it."""
    to.send(tuple(execute(path, storing)))  # a notebook's shell has taken the place of this module


def in_processes(
    paths: Sequence[Path], workers: int, storing: bool
) -> Iterator[tuple[Path, Result]]:
    """Execute each notebook in a process of its own: torch starts threads that a process keeps, and
    after which ranks cannot be forked from it."""
    context = multiprocessing.get_context("fork")
    todo = deque(paths)
    running = dict[Connection, tuple[Path, Any]]()
    while todo or running:
        while todo and len(running) < workers:
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=send_result, args=(todo[0], storing, theirs))
            process.start()
            theirs.close()
            running[ours] = todo.popleft(), process
        for ours in multiprocessing.connection.wait([*running]):
            path, process = running.pop(ours)
            try:
                found = Result(*ours.recv())
            except EOFError:
                found = Result("its process died", [], 0.0)
            process.join()
            yield path, found


def measures(path: Path) -> bool:
    """Tell whether a notebook measures, and so runs with none beside it: what its text says of times
    must not depend on what another one does on the same cores."""
    return any(map(is_measured, json.loads(path.read_text(encoding="utf-8"))["cells"]))


def in_turns(paths: Sequence[Path], workers: int, storing: bool) -> Iterator[tuple[Path, Result]]:
    """Execute the notebooks that measure last, one at a time."""
    alone = [path for path in paths if measures(path)]
    yield from in_processes([path for path in paths if path not in alone], workers, storing)
    yield from in_processes(alone, 1, storing)


def name_of(path: Path) -> str:
    """Give the name under which the costs of a notebook are stored."""
    return path.relative_to(ROOT).as_posix()


def todays() -> list[Path]:
    """Give the notebooks that have their turn."""
    every = [path for path in NBS.rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts]
    if os.environ.get("ZERO_NB_ALL"):
        return every
    late = resting_today(map(name_of, every), LIMITS)
    return [path for path in every if name_of(path) not in late]


def show_results(results: dict[Path, Result]) -> None:
    """Print how long each notebook took and which times compare otherwise here; end with what is wrong."""
    for path in sorted(results, key=lambda path: -results[path].seconds):
        print(f"{path.relative_to(NBS)}: {results[path].seconds:.0f} s")
    for claim in chain.from_iterable(result.slower for result in results.values()):
        print(f"times compare otherwise on this machine: {claim}")
    failed = [path for path, result in results.items() if result.wrong]
    for path in failed:
        print(f"{'=' * 75}\n{path.relative_to(NBS)}\n{results[path].wrong}", file=sys.stderr)
    if failed:
        names = ", ".join(str(path.relative_to(NBS)) for path in failed)
        sys.exit(f"{len(failed)} of {len(results)} notebooks failed: {names}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", type=Path, help="(default: those that have their turn)")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="(default: 2)")
    parser.add_argument("--store", action="store_true", help="store what came where it differs")
    parser.add_argument("--write-costs", action="store_true", help="write tests/costs.json")
    given = parser.parse_args()
    paths = sorted(path.absolute() for path in given.paths or todays())
    # threads of one notebook's torch that wait for each other do not keep a core from another notebook
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for module in ALREADY_IMPORTED:
        importlib.import_module(module)
    from common.huge_pages import collapse_memory  # after the policy: it imports torch

    gc.collect()
    gc.freeze()  # each notebook's shell looks for garbage when it ends
    collapse_memory()  # the notebooks are forked from this process, and their ranks from them

    results = dict(sorted(in_turns(paths, given.workers, given.store)))
    if given.write_costs:
        write_costs({name_of(path): result.seconds for path, result in results.items()})
    show_results(results)
    if not COMPARES:
        print(f"{len(paths)} notebooks ran; what they show is compared on Python {STORED_BY} only")
        return
    cells = [c for p in paths for c in json.loads(p.read_text(encoding="utf-8"))["cells"]]
    shows = [cell for cell in cells if cell.get("outputs")]
    measured = sum(map(is_measured, shows))
    print(
        f"{len(paths)} notebooks ran; {len(shows) - measured} cells show what is stored, and"
        f" {measured} measure"
    )


if __name__ == "__main__":
    main()
