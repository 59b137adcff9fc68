"""What each chapter that builds the package has: question, errors, comparison, exercises, links."""

import ast
import json
import re
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

NBS = Path(__file__).parents[1] / "nbs"
ROOMS = ("comm", "plan", "optim", "backward", "join", "checkpoint", "verify", "integrations")
WAY_IN = ("start", "guides")  # what a reader meets first; what these build is not exported
FIRST = 6  # cells, in whose prose the question stands
EXERCISES = 3  # at least, each with an answer
MOST_CELLS_OF_A_GUIDE = 29
MOST_WITHOUT_A_LOOK = 0  # figures; the limit only falls
NBS_PATHS = [path.relative_to(NBS) for path in sorted(NBS.rglob("*.ipynb"))]

# A chapter that shows what goes wrong under another heading: that heading, and why it has another.
UNDER_ANOTHER_HEADING: dict[str, tuple[str, str]] = {
    "comm/35_reaper.ipynb": (
        "What is not caught",
        "it is what ends processes when others go wrong",
    ),
    "start/00_why.ipynb": ("A map of the book", "it computes, and calls nothing that can fail"),
    "guides/04_muon.ipynb": (
        "Two optimizers, and what is wrong with that",
        "its errors are those of the naive version",
    ),
    "guides/12_debugging.ipynb": (
        "What each of three ranks reports",
        "all of it is what goes wrong",
    ),
    "guides/14_coming_from.ipynb": ("What we do not do", "it says what a reader would miss"),
    "differences.ipynb": ("Side by side", "it runs what goes wrong with torch's class"),
}

# A chapter that is a comparison from its first line to its last.
ALL_COMPARISON = {"differences.ipynb": "The differences"}

# Other projects, as comparisons name them.
OTHERS = re.compile(
    r"(?<![\w/-])(?:[Tt]orch|PyTorch|DDP|FSDP[12]?|DTensor|DCP|c10d|NCCL|Gloo|gloo|MPI|Megatron|DeepSpeed"
    r"|[Ff]airscale|Horovod|[Aa]ccelerate|[Tt]ransformers|Lightning|[Ss]afetensors|Perfetto"
    r"|[Mm]atplotlib|Ray|JAX|Dask|[Jj]oblib|IPython|[Pp]ytest|Triton|torchtitan|torchrun)(?![\w-])"
)
CODE = re.compile(r"```.*?```|`+[^`\n]*`+", re.S)
LINK = re.compile(r"\]\(https://[^)\s]+\)")

Cell = dict[str, Any]


def cells_of(chapter: str) -> list[Cell]:
    found = json.loads((NBS / chapter).read_text(encoding="utf-8"))["cells"]
    return [
        {"kind": c["cell_type"], "text": "".join(c["source"]), "figures": figures_of(c)}
        for c in found
    ]


def figures_of(cell: dict[str, Any]) -> list[str]:
    """Give the figures that a cell has stored, as SVG."""
    data = [output.get("data", {}) for output in cell.get("outputs", [])]
    return ["".join(each["image/svg+xml"]) for each in data if "image/svg+xml" in each]


def prose(cells: list[Cell]) -> str:
    return "\n\n".join(c["text"] for c in cells if c["kind"] == "markdown")


def section(cells: list[Cell], title: str) -> str | None:
    """Give the prose of a section, or None where no heading has the title."""
    found = re.search(rf"^## {title}\b.*?$(.*?)(?=^## |\Z)", prose(cells), re.M | re.S)
    return found and found[1]


def asks(cells: list[Cell]) -> bool:
    """Whether the first cells ask the question that the chapter answers."""
    return "?" in CODE.sub("", prose(cells[:FIRST]))


def shows_what_goes_wrong(cells: list[Cell], title: str = "What goes wrong") -> bool:
    return section(cells, title) is not None


def compares(cells: list[Cell]) -> bool:
    return section(cells, "How it compares") is not None


def links_what_it_compares(cells: list[Cell]) -> bool:
    """Whether a comparison with others leads to one of them."""
    text = section(cells, "How it compares") or ""
    return not OTHERS.search(text) or bool(LINK.search(text))


def exercises(cells: list[Cell]) -> tuple[int, int]:
    """Count the exercises, and the folded cells below them that run an answer: tests/notebooks.py
    compares what they show with what is stored."""
    questions, _, _ = (section(cells, "Exercises") or "").partition("The answers are")
    starts = [i for i, c in enumerate(cells) if re.search(r"^## Exercises\b", c["text"], re.M)]
    below = cells[starts[0] :] if starts else []
    folded = [c["text"] for c in below if c["kind"] == "code" and "#| code-fold: true" in c["text"]]
    return len(re.findall(r"^\d+\. ", questions, re.M)), len(folded)


def answers_exercises(cells: list[Cell]) -> bool:
    asked, answered = exercises(cells)
    return EXERCISES <= asked <= answered


CHAPTERS = {
    name: cells_of(name)
    for room in (*WAY_IN, *ROOMS)
    for name in sorted(f"{room}/{path.name}" for path in (NBS / room).glob("*.ipynb"))
}
CHAPTERS |= {name: cells_of(name) for name in ALL_COMPARISON}


@pytest.mark.parametrize("has", [asks, links_what_it_compares, answers_exercises])
def test_each_chapter_has(has):
    missing = [name for name, cells in CHAPTERS.items() if not has(cells)]
    assert missing == []


def test_no_heading_stands_directly_above_code():
    """A reader is told why a cell is there before the cell."""
    bare = []
    for path in NBS_PATHS:
        cells = cells_of(str(path))
        for cell, below in pairwise(cells):
            last = (cell["text"].strip().splitlines() or [""])[-1]
            if cell["kind"] == "markdown" and below["kind"] == "code" and last.startswith("##"):
                bare.append(f"{path}: {last}")
    assert not bare, bare


def test_exercises_are_answered_in_words():
    silent = []
    for path in NBS_PATHS:
        for cell in cells_of(str(path)):
            _, found, answers = cell["text"].partition("The answers are in the folded cells below")
            if found and len(answers.split()) < 2 * EXERCISES:
                silent.append(str(path))
    assert not silent, silent


def test_each_chapter_compares():
    missing = [name for name, cells in CHAPTERS.items() if not compares(cells)]
    assert missing == sorted(ALL_COMPARISON)
    for name, title in ALL_COMPARISON.items():
        assert LINK.search(section(CHAPTERS[name], title) or ""), name


def test_a_guide_is_short():
    sizes = {name: len(cells) for name, cells in CHAPTERS.items() if name.startswith("guides/")}
    longer = {name: size for name, size in sizes.items() if size > MOST_CELLS_OF_A_GUIDE}
    assert len(sizes) > 12 and longer == {}


def test_no_output_names_a_folder_of_the_machine_that_ran_it():
    found = {}
    for path in sorted(NBS.rglob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        outputs = json.dumps([cell["outputs"] for cell in cells if cell["cell_type"] == "code"])
        if paths := re.findall(r"/(?:tmp|root|home|usr|work)/[^\s\"\\]*", outputs):
            found[path.relative_to(NBS).as_posix()] = paths
    assert found == {}


CLAIM = re.compile(r"test_(?:eq|close|fail|ne)|assert_\w+")


def parsed(text: str) -> ast.Module:
    """Parse a code cell without its magics."""
    lines = ["" if line.lstrip().startswith(("%", "!")) else line for line in text.splitlines()]
    return ast.parse("\n".join(lines))


def kept_names(texts: Iterable[str]) -> set[str]:
    """Give the names that code cells assign or define, or bring from the ranks of `%%torchrun`."""
    nodes = [node for text in texts for node in ast.walk(parsed(text))]
    stored = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    defined = {n.name for n in nodes if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    brought = {name for text in texts for name in re.findall(r"^%%.*--out (\w+)", text, re.M)}
    return stored | defined | brought


def asserts(text: str, kept: set[str]) -> bool:  # kept: names of what the notebook computes
    """Whether a cell asserts something of what its notebook computes: `assert True` is no claim."""
    claims: list[ast.AST] = []
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.Assert):
            claims.append(node.test)
        elif isinstance(node, ast.Call) and CLAIM.fullmatch(ast.unparse(node.func)):
            claims.extend(node.args)
    names = (n.id for claim in claims for n in ast.walk(claim) if isinstance(n, ast.Name))
    return not kept.isdisjoint(names)


MEASURED = re.compile(r"^#\|\s*measured:\s*true", re.M)
STATED = re.compile(r"test_(?:eq|close|fail|ne)")  # `assert_parity` computes what it asserts
FUNCTIONS = (ast.FunctionDef, ast.ClassDef, ast.Lambda)


def outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    """Give what runs when the cell does."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, FUNCTIONS):
            yield from outside_functions(child)


def names_of(nodes: Iterable[ast.AST], *contexts: type[ast.expr_context]) -> set[str]:
    return {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, contexts)}


def values_of(text: str) -> set[str]:
    """Name the values that a cell leaves to the cells after it."""
    brought = re.findall(r"^%%.*--out (\w+)", text, re.M)
    return names_of(outside_functions(parsed(text)), ast.Store).union(brought)


def claims_itself(text: str) -> bool:
    """Whether a cell asserts something, other than in a function that it defines."""
    return any(
        isinstance(node, ast.Assert)
        or (isinstance(node, ast.Call) and STATED.fullmatch(ast.unparse(node.func)))
        for node in outside_functions(parsed(text))
    )


def measured_without_a_claim(cells: list[Cell]) -> list[int]:
    """Number the code cells that measure, and assert something themselves, or whose claim does not
    stand in the next code cell that does not measure. That cell asserts something, and reads a value
    that the measuring cell has left; where this one draws, a value that it has drawn will do."""
    code = [c["text"] for c in cells if c["kind"] == "code"]
    kept, left, found = kept_names(code), set[str](), []
    for i, text in enumerate(code):
        left |= values_of(text)
        if not MEASURED.search(text):
            continue
        claim = next((other for other in code[i + 1 :] if not MEASURED.search(other)), "")
        own = values_of(text)
        if not own or "#| fig-alt:" in text:
            own |= left & names_of(ast.walk(parsed(text)), ast.Load)
        read = names_of(ast.walk(parsed(claim)), ast.Load)
        if claims_itself(text) or not asserts(claim, kept) or read.isdisjoint(own):
            found.append(i)
    return found


def test_what_is_measured_is_asserted_in_a_cell_of_its_own():
    """What the text says of a number that differs each time is an assertion beside the sentence."""
    every = {path: cells_of(path.as_posix()) for path in NBS_PATHS}
    found = {path.as_posix(): measured_without_a_claim(every[path]) for path in NBS_PATHS}
    assert {path: cells for path, cells in found.items() if cells} == {}
    assert sum(bool(MEASURED.search(c["text"])) for cells in every.values() for c in cells) > 80


MEASURES = "#| measured: true\nx = f()"


@pytest.mark.parametrize(
    ("cells", "whether"),
    [
        ((MEASURES, "words", "#|\nassert x"), True),
        ((MEASURES, "#|\ny = x + 1\nassert y"), True),
        ((f"{MEASURES}\nassert x", "#|\nassert x"), False),  # in the cell that measures
        ((f"{MEASURES}\ntest_eq(x, 1)", "#|\nassert x"), False),
        ((f"{MEASURES}\nfor y in x:\n    assert y", "#|\nassert x"), False),
        ((f"{MEASURES}\ndef g():\n    assert x", "#|\nassert x"), True),  # where it is called
        (("#| measured: true\nf()", "#|\nassert f()"), False),  # measured anew
        ((MEASURES, "#|\nz = 1\nassert z"), False),  # of another value
        ((MEASURES, "#|\ng()", "#|\nassert x"), False),  # too late
        ((MEASURES, "#|\n#| measured: true\ndraw(x)", "#|\nassert x"), True),
        (("#|\nw = 1", f"#| fig-alt: words\n{MEASURES}\ndraw(w)", "#|\nassert w"), True),
        ((MEASURES,), False),
        *(
            ((MEASURES, f"#|\n{empty}"), False)
            for empty in ("assert True", "assert 1 < 2, x", "test_eq(1, 1)", "assert len('x')")
        ),
    ],
)
def test_a_claim_stands_beside_what_it_is_about(cells, whether):
    assert (measured_without_a_claim(made(*cells)) == []) is whether


TIMES = re.compile(r"^#\|\s*times:\s*true", re.M)


def more_than_times(cells: list[Cell]) -> list[int]:
    """Number the code cells that say `times: true` and do anything but assert: another machine may
    leave out what follows an assertion that does not hold there."""
    code = [c["text"] for c in cells if c["kind"] == "code"]
    asserts_only = (ast.Assert, ast.Assign, ast.For)
    return [
        i
        for i, text in enumerate(code)
        if TIMES.search(text)
        and not (
            claims_itself(text) and all(isinstance(s, asserts_only) for s in parsed(text).body)
        )
    ]


def test_a_cell_of_times_only_asserts():
    every = [cells_of(path.as_posix()) for path in NBS_PATHS]
    assert [*filter(None, map(more_than_times, every))] == []
    assert sum(bool(TIMES.search(c["text"])) for cells in every for c in cells) > 20


@pytest.mark.parametrize(
    ("cell", "whether"),
    [
        ("assert x < y", True),
        ("room = 2\nfor x in y:\n    assert x < room", True),
        ("test_eq(x, y)", False),
        ("assert x < y\nx.clear()", False),
        ("x = 1", False),
    ],
)
def test_what_a_cell_of_times_may_do(cell, whether):
    assert (more_than_times(made(f"#| times: true\n{cell}")) == []) is whether


TITLE = re.compile(r"^#{1,3} ", re.M)


def figures_without_a_look(cells: list[dict[str, Any]]) -> list[int]:
    """Number the cells that show a figure, other than of classes, in whose section no sentence says
    what to look at. A section begins below its title, which may stand in the middle of a cell, and
    ends at the next one."""
    texts = ["".join(cell["source"]) for cell in cells]
    kinds = [cell["cell_type"] for cell in cells]
    titles = [i for i, t in enumerate(texts) if kinds[i] == "markdown" and TITLE.search(t)]
    found = []
    for i, cell in enumerate(cells):
        if "image/svg+xml" in json.dumps(cell.get("outputs", [])) and "draw_boxes(" not in texts[i]:
            first = max((at for at in titles if at < i), default=0)
            last = min((at for at in titles if at > i), default=len(cells))
            words = [texts[at] for at in range(first + 1, last) if kinds[at] == "markdown"]
            words.append(TITLE.split(texts[first])[-1])
            words += [TITLE.split(texts[last])[0]] if last < len(cells) else []
            if not re.search(r"\blook at\b", "\n".join(words), re.I):
                found.append(i)
    return found


def test_each_figure_has_a_sentence_that_says_what_to_look_at():
    every = {p: json.loads((NBS / p).read_text(encoding="utf-8"))["cells"] for p in NBS_PATHS}
    found = [f"{path}, cell {i}" for path in every for i in figures_without_a_look(every[path])]
    assert len(found) <= MOST_WITHOUT_A_LOOK, found


@pytest.mark.parametrize(
    ("before", "after", "whether"),
    [
        ("# Title\n\nLook at the bar.", "## Next", True),
        ("# Title", "Look at the bar.\n\n## Next", True),
        ("# Title", "## Next\n\nLook at the bar.", False),
        ("# Title", "It overlooks at least one.", False),
        ("Look at the bar above.\n\n## Title", "Words.", False),
    ],
)
def test_a_look_stands_in_the_section_of_the_figure(before, after, whether):
    shown = {"cell_type": "code", "source": "draw()", "outputs": [{"data": {"image/svg+xml": ""}}]}
    words = [{"cell_type": "markdown", "source": text} for text in (before, after)]
    assert figures_without_a_look([words[0], shown, words[1]]) == ([] if whether else [1])


def test_no_figure_is_hidden_from_the_site():
    """A cell with `#| hide` is not on the site, nor is its output; `#| echo: false` hides the code."""
    hidden = []
    for path in NBS_PATHS:
        cells = json.loads((NBS / path).read_text(encoding="utf-8"))["cells"]
        for i, cell in enumerate(cells):
            is_hidden = re.search(r"^#\|\s*hide\b", "".join(cell["source"]), re.M)
            if is_hidden and re.search("image/(svg|png)", json.dumps(cell.get("outputs", []))):
                hidden.append(f"{path}, cell {i}")
    assert hidden == []


SVG = "{http://www.w3.org/2000/svg}"
NUMERIC = re.compile(r"[\u2212+-]?[\d.,]+(?:e[+-]?\d+)?|[\d.,]+ ?[kKMG%]?")


def words_in(group: ElementTree.Element) -> list[str]:
    found = ("".join(text.itertext()).strip() for text in group.iter(f"{SVG}text"))
    return [text for text in found if text]


def axes_without_a_title(page: str) -> list[str]:
    """Name the axes of a figure of matplotlib whose ticks are numbers, and no words say of what."""
    found = []
    for axis in ElementTree.fromstring(page).iter(f"{SVG}g"):
        if not axis.get("id", "").startswith("matplotlib.axis"):
            continue
        is_tick = [re.match("[xy]tick", part.get("id", "")) is not None for part in axis]
        parts = [words_in(part) for part in axis]
        ticks = [w for words, tick in zip(parts, is_tick, strict=True) if tick for w in words]
        title = [w for words, tick in zip(parts, is_tick, strict=True) if not tick for w in words]
        if (
            ticks
            and all(map(NUMERIC.fullmatch, ticks))
            and not re.search("[A-Za-z]", "".join(title))
        ):
            found.append(f"{axis.get('id')}: {ticks}")
    return found


def test_each_axis_of_numbers_has_a_title():
    found, drawn = {}, 0
    for path in NBS_PATHS:
        cells = json.loads((NBS / path).read_text(encoding="utf-8"))["cells"]
        pages = [page for c in cells for page in figures_of(c) if "matplotlib.axis" in page]
        drawn += len(pages)
        if bare := [axis for page in pages for axis in axes_without_a_title(page.strip())]:
            found[path.as_posix()] = bare
    assert drawn > 50 and found == {}


def test_each_chapter_shows_what_goes_wrong():
    assert len(CHAPTERS) > 155 and set(UNDER_ANOTHER_HEADING) <= set(CHAPTERS)
    titles = {name: title for name, (title, _) in UNDER_ANOTHER_HEADING.items()}
    missing = [
        name
        for name, cells in CHAPTERS.items()
        if not shows_what_goes_wrong(cells, titles.get(name, "What goes wrong"))
    ]
    assert missing == []
    needless = [name for name in titles if shows_what_goes_wrong(CHAPTERS[name])]
    assert needless == []


MOST_CLASSES = 3  # of a chapter whose first cells show no map of them


def pictures(cell: Cell) -> list[str]:
    """Give the words of each picture of a cell: drawn boxes, as stored, or a drawing of text."""
    if cell["kind"] == "markdown":
        return re.findall(r"^```text\n(.*?)^```", cell["text"], re.M | re.S)
    if "draw_boxes(" not in cell["text"]:
        return []
    return [" ".join(words_in(ElementTree.fromstring(svg))) for svg in cell["figures"]]


def has_a_map(cells: list[Cell]) -> bool:
    """Whether one picture near the title names every class that the chapter exports.

    The private ones too: a reader of the module meets them as well, a picture of all of them stays
    readable (nine classes at most), and one that leaves some out does not say which. Picture means
    drawn boxes or a tree of text; its own words are read, and not the call that draws it, so neither
    a drawing of something else nor names in the prose pass. Several pictures that share the names
    are no map: who holds whom is seen in one."""
    names = set(classes(cells))
    near = [picture for cell in cells[: FIRST + 5] for picture in pictures(cell)]
    return any(names <= set(re.findall(r"\w+", picture)) for picture in near)


def classes(cells: list[Cell]) -> list[str]:
    """Name the classes that a chapter exports, in their order."""
    exported = [c["text"] for c in cells if re.match(r"#\|\s*export", c["text"])]
    return [name for text in exported for name in re.findall(r"^class (\w+)", text, re.M)]


def test_a_chapter_of_several_classes_begins_with_a_map_of_them():
    several = {name: c for name, c in CHAPTERS.items() if len(classes(c)) > MOST_CLASSES}
    assert len(several) > 20
    assert [name for name, cells in several.items() if not has_a_map(cells)] == []


def made(*texts: str) -> list[Cell]:
    """Make cells; those that begin with `#|` are code."""
    kinds = ["code" if text.startswith("#|") else "markdown" for text in texts]
    pairs = zip(kinds, texts, strict=True)
    return [{"kind": kind, "text": text, "figures": []} for kind, text in pairs]


QUESTIONS = "## Exercises\n\n1. One?\n2. Two?\n3. Three?\n\nThe answers are below.\n\n1. A.\n2. B."
ANSWER = "#| code-fold: true\nassert 1 < 2"


def test_a_question_in_code_or_too_late_is_none():
    assert asks(made("# Title", "Which rank?"))
    assert not asks(made("# Title", "`Which rank?`", "```text\n?\n```"))
    assert not asks(made(*["Words."] * FIRST, "Which rank?"))


def test_a_comparison_with_others_needs_a_link_of_its_own():
    link = "[torch](https://example.org/torch)"
    assert links_what_it_compares(made("## How it compares\n\nA list takes 28 bytes."))
    assert links_what_it_compares(made(f"## How it compares\n\nBeside {link}, faster."))
    assert not links_what_it_compares(made("## How it compares\n\nFSDP2 has none."))
    assert not links_what_it_compares(made("## How it compares\n\nHow `torch.optim` does it."))
    elsewhere = made(f"{link}\n\n## How it compares\n\nTorch's class.\n\n## Exercises\n\n{link}")
    assert not links_what_it_compares(elsewhere)
    assert not compares(made("# How it compares", "They compare."))


@pytest.mark.parametrize(
    ("cells", "whether"),
    [
        ([QUESTIONS, ANSWER, ANSWER, "#| code-fold: true\ntest_eq(f(), 3)"], True),
        ([QUESTIONS, ANSWER, ANSWER], False),
        ([QUESTIONS, ANSWER, ANSWER, "#| measured: true\nassert True"], False),
        ([ANSWER, QUESTIONS, ANSWER, ANSWER], False),
        ([QUESTIONS.replace("3. Three?\n", ""), ANSWER, ANSWER, ANSWER], False),
        ([ANSWER, ANSWER, ANSWER], False),
    ],
)
def test_an_answer_is_a_folded_cell_below_that_asserts(cells, whether):
    assert answers_exercises(made(*cells)) is whether


def drawing(*names: str, code: str = "draw_boxes(boxes, arrows)") -> Cell:
    boxes = "".join(f"<text>{name}</text>" for name in names)
    svg = f'<svg xmlns="http://www.w3.org/2000/svg">{boxes}</svg>'
    return {"kind": "code", "text": code, "figures": [svg]}


def test_a_map_near_the_title_names_every_class():
    four = "#| export\nclass A: ...\nclass B: ...\nclass C: ...\nclass _D(A): ..."
    title, exported = made("# Title", four)
    assert classes(made("# Title", four, "class E: ...")) == ["A", "B", "C", "_D"]
    assert has_a_map([title, drawing("A", "B", "C, _D", "E"), exported])
    assert has_a_map([*made("Look:\n\n```text\nA -> B\n C\n _D\n```", four)])
    for other in (
        [title, drawing("A", "B", "C"), exported],
        [
            title,
            drawing("A", "B", "C", "D", code="boxes = {'_D': ()}; draw_boxes(boxes)"),
            exported,
        ],
        [title, drawing("A", "B"), drawing("C", "_D"), exported],
        [title, drawing("A", "B", "C", "_D", code="draw_life()"), exported],
        [*made("A, B, C and _D", "```text\nA -> B\n```", four)],
        [title, *made(*["Words."] * 10), drawing("A", "B", "C", "_D"), exported],
    ):
        assert not has_a_map(other), other
