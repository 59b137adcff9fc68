"""What ranks report is shown while they work, whole and never half, in a real kernel too."""

import multiprocessing
import re
import threading

import pytest
import torch

from zero_nb.comm.launch import run
from zero_nb.comm.live import RankTable, _reporters, report_step, report_to
from zero_nb.comm.reaper import NamelessFiles


@pytest.fixture
def page():
    """Let this process report to a file, and give its path."""
    files = NamelessFiles(1)
    report_to(files.paths[0])
    yield files.paths[0]
    _reporters.clear()
    files.close()


def test_nothing_is_read_where_nobody_watches():
    def f():
        report_step(loss="no number", tokens=None)

    run(1, f)


def test_every_report_that_is_seen_is_whole():
    files = NamelessFiles(1)
    enough = multiprocessing.get_context("fork").Event()  # reports have been seen

    def writes():
        report_to(files.inherited[0])
        i = 0
        while i < 1000 or not enough.is_set():
            i += 1
            report_step(step=i, tokens=3, more={"x" * (i % 50 + 1): i / 2})
        return i

    table = RankTable(files.paths)
    seen = []
    ended = threading.Event()

    def reads():
        while not ended.is_set():
            table.update()
            seen.extend(report for report in table.seen[0][-1:] if report not in seen[-1:])
            if len(seen) > 100:
                enough.set()

    reader = threading.Thread(target=reads)
    reader.start()
    [written] = run(1, writes)
    ended.set()
    reader.join()
    table.close(running=False)
    assert table.seen[0][-1].count == written
    for report in [*seen, *table.seen[0]]:
        i = report.numbers["step"]
        assert (report.count, report.tokens) == (i, 3 * i)
        assert report.numbers["x" * (i % 50 + 1)] == i / 2


def test_threads_may_report_together(page):
    table = RankTable([page])
    threads = [
        threading.Thread(target=lambda: [report_step(tokens=2) for _ in range(500)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    table.close(running=False)
    assert (table.seen[0][-1].count, table.seen[0][-1].tokens) == (2000, 4000)


def test_a_long_run_is_kept_short_and_its_curve_whole(page):
    table = RankTable([page])
    for i in range(3000):
        report_step(loss=float(i))
        table.update()
    counts = [report.count for report in table.seen[0]]
    assert len(counts) <= 400 and counts[0] == 1 and counts[-100:] == [*range(2901, 3001)]
    assert 'aria-label="loss, from 0 to 2999"' in table._repr_html_()
    table.close(running=False)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"loss": torch.ones(2, 1)}, r"loss of report_step must be .* of shape \(2, 1\)"),
        ({"tokens": "many"}, "tokens of report_step must be .* got 'many'"),
        ({"more": {"phase": 1j}}, "phase of report_step must be"),
    ],
)
def test_what_is_no_number(page, given, text):
    with pytest.raises(TypeError, match=text):
        report_step(**given)


def test_names_are_text_and_not_html(page):
    table = RankTable([page])
    report_step(step=1, more={"<script>": torch.tensor(2)})
    table.close(running=False)
    assert "<script>" not in table._repr_html_() and "&lt;script&gt;" in table._repr_html_()
    assert table.rows()[1][1:3] == ["1", "2"]


def outputs(client, source, seen=lambda kind, content: None):
    """Execute a cell, and give the kinds and contents of its messages, each also to `seen` at once."""
    request = client.execute(source)
    found = []
    while True:
        message = client.get_iopub_msg(timeout=60)
        if message["parent_header"].get("msg_id") != request:
            continue
        found.append((message["msg_type"], message["content"]))
        seen(*found[-1])
        if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
            return found


def check_a_cell_that_reports(client, go):
    """Rank 1 goes on when the test has seen its first report."""

    def seen(kind, content):
        if "data" in content and re.search(r"1 +7 +2.5", content["data"]["text/plain"]):
            go.touch()

    cell = f"""%%torchrun --nproc 2 --keep
import os, time
from zero_nb import report_step
rank = int(os.environ["RANK"])
while rank == 0 and not os.path.exists({str(go)!r}): time.sleep(0.01)
report_step(step=7, loss=2.5)
print("a")
while not os.path.exists({str(go)!r}): time.sleep(0.01)
time.sleep(0.6)
report_step(step=8, loss=1.5)
print("b")
"""
    found = outputs(client, cell, seen)
    kinds = [kind for kind, _ in found]
    first = next(content for kind, content in found if kind == "display_data")
    assert re.search("0 +none\n", first["data"]["text/plain"])
    assert "update_display_data" in kinds and "error" not in kinds
    # rank 1 had printed first: at the end all is shown anew, lines in rank order
    after = found[kinds.index("clear_output") + 1 :]
    shown = [content["data"] for kind, content in after if kind == "display_data"]
    text = "".join(content["text"] for kind, content in after if kind == "stream")
    assert text == "[rank0] a\n[rank0] b\n[rank1] a\n[rank1] b\n"
    rows = [line.split() for line in shown[-1]["text/plain"].splitlines()]
    assert [row[:3] for row in rows] == [
        ["rank", "step", "loss"],
        ["0", "8", "1.5"],
        ["1", "8", "1.5"],
    ]
    assert "last" not in rows[0] and "<svg" in shown[-1]["text/html"]


def check_a_rank_that_is_killed(client, reported):
    """The table says how old the last report of a rank is that is gone."""
    cell = f"""%%torchrun --keep
while rank and not os.path.exists({str(reported)!r}): time.sleep(0.01)
if rank: os.kill(os.getpid(), 9)
report_step(step=9)
open({str(reported)!r}, "w").close()
"""
    found = outputs(client, cell)
    shown = [content["data"] for kind, content in found if "display_data" in kind]
    assert "s ago" in shown[-1]["text/plain"] and "none" in shown[-1]["text/plain"]
    [error] = [content for kind, content in found if kind == "error"]
    assert "SIGKILL" in "\n".join(error["traceback"])


def test_a_table_changes_while_the_ranks_work(tmp_path, manager):
    manager.start_kernel(cwd=str(tmp_path))
    client = manager.blocking_client()
    client.start_channels()
    client.wait_for_ready(timeout=60)
    outputs(client, "%load_ext zero_nb.comm.launch")
    check_a_cell_that_reports(client, tmp_path / "go")
    check_a_rank_that_is_killed(client, tmp_path / "reported")
