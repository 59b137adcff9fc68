"""Each cell of the tables "who reads and writes what" has tests: which ones, and that they exist."""

import importlib
import itertools
import re
from collections import defaultdict
from collections.abc import Iterator

import nbformat
from common.house import ROOT
from test_modes import FEATURES, launches

from zero_nb.plan.schedule import METHODS

# ---- the tables ----

# a mode's names in tests: in common/overlapping, and the package's own elsewhere
NAMES = {
    "step": ("step", "zero1"),
    "overlap": ("overlap", "zero1-overlap"),
    "interleaved": ("interleaved", "zero1-overlap, interleaved"),
    "data_parallel": ("parallel", "zero2"),
    "data_parallel interleaved": ("parallel interleaved", "zero2-interleaved"),
    "data_parallel hidden": ("parallel hidden", "zero2, hidden"),
    "data_parallel hidden interleaved": (
        "parallel hidden interleaved",
        "zero2-interleaved, hidden",
    ),
}
OVERLAP = ["overlap", "interleaved"]
PARALLEL = [name for name in NAMES if "data_parallel" in name]
DRIVEN = OVERLAP + PARALLEL
CLIPS = ["overlap", "data_parallel", "data_parallel hidden"]


def table_under(notebook: str, title: str) -> tuple[list[str], list[str]]:
    """Give the heads of the columns and of the rows of the first table under a title."""
    found = nbformat.read(ROOT / f"nbs/backward/{notebook}.ipynb", 4).cells
    text = "\n".join(cell.source for cell in found if cell.cell_type == "markdown")
    lines = text.partition(f"\n{title}\n")[2].partition("\n| ")[2].splitlines()
    table = itertools.takewhile(lambda line: line.startswith("|"), ["| " + lines[0], *lines[1:]])
    cells = [[as_words(cell) for cell in line.strip("|").split("|")] for line in table]
    return cells[0][1:], [row[0] for row in cells[2:]]


def as_words(cell: str) -> str:
    return re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", re.sub(r"[*`]", "", cell)).strip()


def cells_of_the_notebooks() -> Iterator[tuple[str, str]]:
    """Give the mode and the row of each cell: options of `data_parallel` that have a column go together."""
    modes, rows = table_under("07_ddp_overlap", "## Who reads and writes what")
    yield from itertools.product(modes, rows)
    title = "## What may be read and written until the next backward"
    columns, rows = table_under("16_data_parallelism", title)
    options = sorted(name.removesuffix("=True") for name in columns if name.endswith("=True"))
    for chosen in itertools.product((False, True), repeat=len(options)):
        words = ["data_parallel", *itertools.compress(options, chosen)]
        yield from itertools.product([" ".join(words)], rows)


CELLS: defaultdict[tuple[str, str], list[str]] = defaultdict(list)


def cell(row: str, modes: list[str], *tests: str) -> None:
    """Note tests of a row in some modes; `{mode}` and `{method}`: the mode's name there."""
    for name in modes:
        mode, method = NAMES[name]
        CELLS[name, row] += [test.format(mode=mode, method=method) for test in tests]


def trains(row: str, modes: list[str], feature: str) -> None:
    """Note the launches of tests/test_modes.py that train a feature in some modes."""
    for name in modes:
        mode = NAMES[name][1]
        for launch in launches():
            fits = mode in launch.modes and FEATURES[feature].fits(launch.modes[mode])
            if launch.feature == feature and fits:
                CELLS[name, row].append(f"modes::every_mode_trains_as_ddp[{launch}]")


BETWEEN = "faults_optimizer::what_is_read_and_written_between_two_backwards_is_taken_or_refused[2]"
STREAMS = "faults_streams::C2_M11_all_that_is_read_is_there_and_nothing_is_let_go_too_early"
SAVED = "faults_overlap::what_is_saved_between_backward_and_step_is_the_step_whole[{mode}]"
READS = "faults_late::what_reads_and_moves_parameters_before_step_goes_on[{mode}]"
RANDOM = "faults_overlap::random_numbers_and_buffers_are_those_of_ddp[{mode}]"
AT_ONCE = "faults_optimizer::H1_who_reads_right_after_a_step_reads_what_comes_after_a_wait"
LOOPS = "faults_between::what_is_written_between_two_backwards_counts_as_with_DDP"
FORWARDS = "faults_between::buffers_are_those_of_DDP_after_every_kind_of_forward"
LOADED = "faults_cells::a_state_that_is_loaded_between_backward_and_step_is_that_after_the_step"
HOOKS = (
    "faults_cells::hooks_write_parameters_as_with_ddp_and_an_unknown_class_draws_nothing[{mode}]"
)

row = "parameters"
cell(row, ["step", *DRIVEN], HOOKS)
cell(row, ["step"], BETWEEN, "faults_cells::what_is_written_before_step_counts_as_in_torch")
cell(row, ["step", *DRIVEN], f"{STREAMS}[plain]")
cell(row, ["step", *DRIVEN], "faults_cells::parameters_are_those_of_ddp_to_every_reader[{mode}]")
cell(
    row,
    ["step", *DRIVEN],
    "faults_optimizer::L4_a_graph_kept_over_a_step_is_an_error_on_every_rank[{method}]",
    "faults_cells::what_backward_reads_past_a_gradient_is_right_or_an_error[{mode}]",
)
cell(
    row,
    DRIVEN,
    SAVED,
    READS,
    f"{LOOPS}[clamped-1]",
    "faults_late::parameters_that_are_written_between_backward_and_step_are_an_error[{mode}]",
    "faults_late::copies_and_a_network_that_follows_go_on[{mode}]",
)
for early in ("", " interleaved"):
    cell(
        row,
        [f"data_parallel{early}"],
        f"faults_parallel::H2_what_is_read_after_a_step_is_what_it_is_with_DDP[{bool(early)}]",
        f"faults_parallel::H2_models_that_read_past_their_modules_train_as_with_DDP[{bool(early)}]",
    )
    cell(
        row,
        [f"data_parallel hidden{early}"],
        f"faults_parallel::H2_who_does_not_wait_finds_NaN[{bool(early)}]",
        f"faults_parallel::H2_an_average_of_weights_is_NaN_and_never_old[False-{bool(early)}]",
        "parallel_reads::no_read_is_stale",
        f"parallel_reads::one_rank_may_read_alone[{bool(early)}]",
    )

row = ".grad"
cell(row, ["step"], BETWEEN)
trains(row, ["step", *DRIVEN], "gradients are written")
trains(row, ["step"], "clipped")
cell(
    row,
    DRIVEN,
    "faults_gradients::H4_what_reads_gradients_after_backward_is_told_what_to_write[{mode}]",
    "faults_gradients::H4_gradients_that_are_taken_away_or_put_there_are_an_error_of_step[{mode}]",
    "faults_gradients::H4_a_step_that_is_left_out_was_taken_and_the_next_call_says_so[{mode}]",
    "faults_late::a_second_step_after_one_backward_is_an_error[{mode}]",
    "faults_late::the_backward_of_a_second_loss_is_an_error_of_step[{mode}]",
    f"{LOOPS}[scheduled-3]",
)
cell(
    row,
    OVERLAP,
    "faults_gradients::H4_averages_that_a_hook_of_the_users_left_may_be_read_but_not_changed[{mode}]",
    "faults_late::averages_that_a_hook_leaves_add_up_and_are_not_stepped_twice[False-{mode}]",
    "faults_cells::averages_of_a_hook_that_are_taken_away_or_not_averaged_are_an_error[{mode}]",
)
cell(row, PARALLEL, "faults_cells::hooks_read_and_change_what_is_added_up_as_with_ddp[{mode}]")

for row in ("optimizer state", "optimizer state, copies in another dtype"):
    modes = ["step", *OVERLAP] if row == "optimizer state" else PARALLEL
    cell(row, modes, AT_ONCE, "faults_cells::groups_and_options_are_those_of_the_step[{mode}]")
    cell(row, [mode for mode in modes if mode in DRIVEN], SAVED, READS)
    cell(row, modes, f"{LOADED}[{{mode}}]")
    trains(row, modes, "state is reloaded")
    trains(row, modes, "master copies")
cell("optimizer state", ["step"], BETWEEN)

row = "buffers"
for number in range(2):
    cell(row, ["step", *DRIVEN], f"{FORWARDS}[{{method}}-{number}]")
cell(row, ["step", *DRIVEN], RANDOM)
cell(row, PARALLEL, "faults_between::the_first_rank_may_evaluate_alone_as_with_DDP[{method}]")

cell("random numbers", ["step", *OVERLAP], RANDOM, HOOKS)
cell("random numbers", ["step"], BETWEEN)
cell("random state", PARALLEL, RANDOM, HOOKS)

trains("scaler", ["step", "overlap"], "scaled")
trains("grad_norm, the scale of a GradScaler", CLIPS[1:], "scaled")
for row, modes in (
    ("scaler", CLIPS[:1]),
    ("grad_norm, the scale of a GradScaler", CLIPS[1:]),
):
    cell(
        row,
        modes,
        f"{STREAMS}[norm]",
        f"{STREAMS}[scaler]",
        f"{STREAMS}[scaler that skips]",
        "faults_overlap::M9_a_scale_is_read_once_a_step[{mode}]",
        "faults_gradients::H4_a_scaler_that_is_not_given_is_told_and_one_that_is_given_works[{mode}]",
        "faults_cells::norms_are_those_of_ddp_and_stay_what_they_were[{mode}]",
    )
cell(
    "scaler",
    ["interleaved"],
    "overlap_errors::what_cannot_work_is_refused_on_every_rank_and_leaves_nothing_behind",
    "faults_cells::what_needs_all_gradients_is_refused_where_buckets_are_stepped_before[{mode}]",
)
cell(
    "grad_norm, the scale of a GradScaler",
    [mode for mode in PARALLEL if "interleaved" in mode],
    "faults_cells::what_needs_all_gradients_is_refused_where_buckets_are_stepped_before[{mode}]",
)

for row, modes in (("options, scheduler", OVERLAP), ("learning rates", PARALLEL)):
    cell(
        row,
        modes,
        "faults_overlap::options_that_are_changed_between_backward_and_step_are_an_error[{mode}]",
        "faults_overlap::options_that_are_written_while_backward_runs_are_an_error[{mode}]",
        "faults_overlap::a_learning_rate_in_a_tensor_may_be_changed_after_step[{mode}]",
        "faults_overlap::hooks_of_the_optimizers_step_run_after_it[{mode}]",
        "faults_cells::a_group_that_is_edited_is_an_error_where_step_is_not_called[{mode}]",
        "faults_cells::groups_and_options_are_those_of_the_step[{mode}]",
        f"{LOOPS}[scheduled-1]",
    )
cell(
    "options, scheduler",
    ["step"],
    BETWEEN,
    "faults_cells::groups_and_options_are_those_of_the_step[{mode}]",
)
trains("options, scheduler", ["step"], "schedule")

row = "DDP's buckets"
trains(row, ["step", *OVERLAP], "accumulation in views")
cell(row, ["step", *OVERLAP], f"{STREAMS}[accumulation]")
cell(
    row, OVERLAP, f"{STREAMS}[plain]", "overlap_buckets::many_iterations_end_and_replicas_agree[2]"
)

row = "a forked process"
cell(
    row,
    PARALLEL,
    "faults_waiting::M3_workers_of_a_loader_read_the_parameters_after_the_step[{method}]",
)
cell(row, PARALLEL[2:3], "faults_waiting::M3_a_process_waits_for_its_parameters_before_it_forks")

row = "another thread or stream"
cell(row, PARALLEL, f"{STREAMS}[users]")
cell(row, PARALLEL, "faults_cells::parameters_are_those_of_ddp_to_every_reader[{mode}]")
cell(row, PARALLEL[2:], "faults_waiting::H1_several_threads_may_read_parameters_on_their_way")


# ---- that they exist ----


def names_of_cases(test: object) -> set[str]:
    """Give what stands in the brackets of a test's cases, but for the way; "" where that is nothing."""
    marks = [mark for mark in getattr(test, "pytestmark", ()) if mark.name == "parametrize"]
    parts = []
    for mark in marks:
        write = mark.kwargs.get("ids")
        values = [getattr(value, "values", value) for value in mark.args[1]]
        if isinstance(write, list):
            parts.append(write)
            continue
        rows = [value if isinstance(value, tuple) else (value,) for value in values]
        parts.append(["-".join(map(write or str, row)) for row in rows])
    return {"-".join(case) for case in itertools.product(*parts)}


def modes_of_cases(test: object) -> set[str]:
    """Give the names of modes that a test is parametrised by; none where it is not."""
    known = {name for names in NAMES.values() for name in names}
    found: set[str] = set()
    for mark in getattr(test, "pytestmark", ()):
        values = {*map(str, mark.args[1])} if mark.name == "parametrize" else set()
        found |= values if values <= known else set()
    return found


def trouble_of(test_id: str, mode: str) -> str:
    """Tell what is wrong with the name of a test in the table."""
    file, _, name = test_id.partition("::")
    function, _, case = name.removesuffix("]").partition("[")
    test = getattr(importlib.import_module(f"test_{file}"), f"test_{function}", None)
    if test is None:
        return "there is no such test"
    if case not in names_of_cases(test):
        return f"its cases are {sorted(names_of_cases(test))}"
    modes = modes_of_cases(test)
    named = [name for name in modes if re.search(rf"(^|-){name}(-|$)", case)]
    if named and max(named, key=len) not in NAMES[mode]:
        return f"it is about {max(named, key=len)}"
    return ""


def test_every_cell_of_both_tables_has_tests():
    assert set(cells_of_the_notebooks()) == {key for key, tests in CELLS.items() if tests}


def test_the_tables_have_every_mode_of_the_planner():
    methods = {names[1] for names in NAMES.values()}
    assert methods | {"ddp"} >= METHODS.keys()
    assert {mode for mode, _ in cells_of_the_notebooks()} == NAMES.keys()


def test_every_test_that_the_table_names_exists_and_is_of_the_cells_mode():
    found = {
        (mode, test): trouble
        for (mode, _), tests in CELLS.items()
        for test in tests
        if (trouble := trouble_of(test, mode))
    }
    assert found == {}


def test_what_does_not_exist_is_found():
    late = "faults_late::parameters_that_are_written_between_backward_and_step_are_an_error"
    assert trouble_of(f"{late}[overlap]", "overlap") == ""
    assert "no such test" in trouble_of("faults_late::nothing", "overlap")
    assert "its cases are" in trouble_of(f"{late}[zero1]", "step")
    assert "its cases are" in trouble_of(late, "overlap")
    assert "it is about overlap" in trouble_of(f"{late}[overlap]", "interleaved")
    assert "it is about zero2-interleaved, hidden" in trouble_of(
        f"{FORWARDS}[zero2-interleaved, hidden-0]", "data_parallel interleaved"
    )
