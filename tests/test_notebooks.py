"""What `make notebooks` takes for a difference between a stored output and a new one, and what not."""

import json
import re
from pathlib import Path
from tempfile import gettempdir

import nbformat
import pytest
from notebooks import (
    COMPARES,
    STORED_BY,
    differences,
    in_processes,
    is_measured,
    lasting,
    same,
    shows_rounding,
)


def text(words):
    return {"output_type": "execute_result", "data": {"text/plain": [words]}}


def printed(words):
    return {"output_type": "stream", "name": "stdout", "text": [words]}


def figure(*shapes):
    page = f"<svg>{''.join(f'<{shape}/>' for shape in shapes)}<text>MiB</text></svg>"
    return {
        "output_type": "display_data",
        "data": {"image/svg+xml": page, "text/plain": "a figure"},
    }


@pytest.mark.parametrize(
    ("stored", "new"),
    [
        ("'DDP: 4 bytes'", "'ZeRO: 4 bytes'"),
        ("3 collectives", "4 collectives"),  # a count is a count
        ("0.5012", "0.5023"),
        ("1e-04", "2e-04"),
        ("4e-08", "0"),  # equal bits are a claim
        ("4e-08", "4e-02"),
        ("[1.5, 2.5]", "[1.5]"),
    ],
)
def test_a_difference_is_found(stored, new):
    assert not same(stored, new) and not same(new, stored)
    assert [*differences([text(stored)], [text(new)])]


@pytest.mark.parametrize(
    ("stored", "new"),
    [
        ("loss 2.837301", "loss 2.837300"),
        ("gap 4.47e-08", "gap 3e-08"),  # rounding, which another processor does in another order
        (f"{gettempdir()}/tmpabc12/step-60", f"{gettempdir()}/tmpz9y8x7/step-60"),
        ("at 3315861104.py:10", "at <ipython-input-1-93a69cb76f48>:10"),
        ("2.5909  20,762 tokens/s", "2.5909  45,281 tokens/s"),
        ("\x1b[3mcheckpoint\x1b[0m", "checkpoint"),
    ],
)
def test_what_is_new_each_time_is_none(stored, new):
    assert same(lasting(stored), lasting(new))
    assert not [*differences([printed(stored)], [printed(new)])]


def test_a_line_of_a_file_is_not_a_cell():
    assert not same(lasting("at train.py:10"), lasting("at other.py:10"))


def test_a_figure_is_what_it_is_made_of():
    assert not [*differences([figure("rect", "rect")], [figure("rect", "rect")])]
    assert [*differences([figure("rect", "rect")], [figure("rect")])]


STORED = Path(__file__).parents[1] / "nbs"


def figure_cells(notebook):
    cells = json.loads((STORED / notebook).read_text(encoding="utf-8"))["cells"]
    drawn = (c["outputs"] for c in cells if "image/svg+xml" in json.dumps(c.get("outputs", [])))
    return [*drawn]


@pytest.mark.parametrize(
    ("notebook", "pattern", "instead"),
    [
        ("start/00_why.ipynb", r'(<rect [^>]*?\bwidth=)"[^"]*"', r'\1"7"'),  # ours
        ("guides/01_drop_in.ipynb", r'(<path [^>]*?\bd=)"[^"]*"', r'\1"M0 0"'),  # matplotlib's
        ("guides/01_drop_in.ipynb", r'(<use [^>]*?\by=)"[^"]*"', r'\1"9"'),
    ],
)
def test_a_shape_of_another_size_is_noticed(notebook, pattern, instead):
    found = figure_cells(notebook)
    assert found
    for outputs in found:
        other = re.sub(pattern, instead, "".join(outputs[0]["data"]["image/svg+xml"]))
        changed = [{**outputs[0], "data": {"image/svg+xml": other}}]
        assert not [*differences(outputs, outputs)]
        assert [*differences(outputs, changed)], notebook


@pytest.mark.parametrize("notebook", ["start/00_why.ipynb", "guides/02_which_mode.ipynb"])
def test_a_figure_in_other_colours_is_noticed(notebook):
    """Captions say "look at the green bar"."""
    for outputs in figure_cells(notebook):
        page = "".join(outputs[0]["data"]["image/svg+xml"])
        colours = {*re.findall(r"(?:fill|stroke)(?:=[\"']|: *)(#[0-9a-f]{6})", page)}
        assert colours
        for colour in colours:
            other = page.replace(colour, "#010203")
            assert [*differences(outputs, [{**outputs[0], "data": {"image/svg+xml": other}}])], (
                colour
            )


@pytest.mark.parametrize(
    ("stored", "new", "noticed"),
    [
        ("rect x='3' fill='#59a14f'", "rect x='3' fill='#e15759'", True),
        ("rect x='3' fill='#59a14f'", "rect fill='#59a14f' x='3'", False),
        ("rect x='3' fill='#59a14f'", "rect x='3' fill='#58a250'", False),  # by one of 255
        ("rect x='3' fill='#fff'", "rect x='3' fill='#FFFFFF'", False),
        ("path d='M3 4' style='stroke: #000000'", "path d='M3 4' style='stroke: #59a14f'", True),
        ("path d='M3 4' style='stroke: #000000'", "path d='M3 4' style='fill: #000000'", True),
        ("path d='M3 4' style='fill: none'", "path d='M3 4' style='fill: red'", True),
        ("g style='fill: #59a14f'", "g style='fill: #e15759'", True),  # of what it holds
        ("rect x='3' stroke-width='2'", "rect x='3' stroke-width='3'", False),
        ("rect x='3' height='40'", "rect x='3' height='42'", True),
        ("rect x='3' height='40'", "rect x='3' height='40.6'", False),  # below a pixel
        ("rect height='40' x='3'", "rect x='3' height='40'", False),
        ("path d='M3 40.5L7 9'", "path d='M 3 40 L 7 9'", True),  # is written in another way
        ("path d='M3 40.5L7 9'", "path d='M3 40L7 9'", False),
        ("path d='M3 40.5L7 9'", "path d='M3 40.5L7 9L9 9'", True),
        ("circle r='2'", "circle cx='2'", True),
    ],
)
def test_a_pixel_is_too_little_to_notice(stored, new, noticed):
    assert bool([*differences([figure(stored)], [figure(new)])]) is noticed


def test_of_a_text_of_rounding_all_but_numbers_is_compared():
    stored, other, wrong = (
        [{"output_type": "execute_result", "data": {"text/plain": text}}]
        for text in ("2,737 of 5,873 differ", "2,755 of 5,873 differ", "2,737 of 5,873 agree")
    )
    assert [*differences(stored, other)] and not [*differences(stored, other, rounding=True)]
    assert [*differences(stored, wrong, rounding=True)]


def test_of_a_figure_of_rounding_the_words_are_compared():
    stored, moved = [figure("rect x='3'")], [figure("rect x='9'")]
    assert [*differences(stored, moved)] and not [*differences(stored, moved, rounding=True)]
    assert [*differences(stored, [figure("rect", "rect")], rounding=True)]
    marked = [
        path.relative_to(STORED).as_posix()
        for path in sorted(STORED.rglob("*.ipynb"))
        if any(map(shows_rounding, json.loads(path.read_text(encoding="utf-8"))["cells"]))
    ]
    assert marked == [
        "guides/06_accumulation.ipynb",
        "start/02_by_hand_checked.ipynb",
        "verify/04_parity.ipynb",
    ]


def test_of_what_is_measured_the_kind_is_compared():
    assert not [*differences([text("0.3 s")], [text("0.4 s")], measured=True)]
    assert [*differences([text("0.3 s")], [figure("rect")], measured=True)]
    assert [*differences([text("0.3 s")], [], measured=True)]


def test_who_writes_first_does_not_matter():
    assert not [*differences([printed("a"), text("b")], [text("b"), printed("a")])]
    assert not [*differences([printed("a\n"), printed("b\n")], [printed("a\nb\n")])]


@pytest.mark.parametrize(
    ("source", "measured"),
    [
        ("#| measured: true\nseconds(f)", True),
        ("#| code-fold: true\n#| measured: true\nf()", True),
        ('"#| measured: true"', False),
        ("f()  #| measured: true", False),
    ],
)
def test_a_cell_says_so_in_a_line_of_its_own(source, measured):
    assert is_measured({"source": source}) is measured


def executed(folder, claim, storing=False):
    """Execute a notebook that measures and then claims something; give what came, and what is stored."""
    path = folder / "claims.ipynb"
    cells = ["#| measured: true\ntook = 2, 1\ntook", claim, "1 + 1"]
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbformat.write(nb, path)
    ((_, result),) = in_processes([path], 1, storing)
    outputs = [cell["outputs"] for cell in json.loads(path.read_text())["cells"]]
    return result, [len(output) for output in outputs]


compared = pytest.mark.skipif(
    not COMPARES, reason=f"outputs are compared, and stored, on Python {STORED_BY} only"
)
SLOWER = "assert took[0] < took[1]"
HERE = f"#| times: true\n{SLOWER}"  # does not hold on this machine


@compared
@pytest.mark.parametrize(
    ("claim", "told", "wrong"),
    [
        (HERE, [f"claims: {SLOWER}"], "cell 2: 0 outputs are stored and 1 came"),  # and goes on
        (SLOWER, [], "AssertionError"),
        ("#| times: true\nassert took[2]", [], "IndexError"),
        ("#| times: true\nassert took[0] > took[1]", [], "cell 2"),
    ],
)
def test_times_that_compare_otherwise_are_told(tmp_path, claim, told, wrong):
    result, _ = executed(tmp_path, claim)
    assert result.slower == told
    assert wrong in result.wrong
    assert ("AssertionError" in result.wrong) is (wrong == "AssertionError")


@compared
@pytest.mark.parametrize(("claim", "stored"), [(HERE, 0), (HERE.replace("<", ">"), 1)])
def test_times_are_stored_only_as_the_text_says(tmp_path, claim, stored):
    result, outputs = executed(tmp_path, claim, storing=True)
    assert outputs == [stored, 0, stored]
    assert ("AssertionError" in result.wrong) is (not stored)
    assert result.slower == []
