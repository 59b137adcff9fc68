"""Notebooks in a real JupyterLab, driven in a real browser."""

import shutil
import subprocess
from pathlib import Path

import pytest
from common.browser import needs_browser, new_page
from common.lab import jupyterlab, notebook
from common.waiting import wait_for

from zero_nb.plan.charts import explore

ROOT = Path(__file__).parents[1]
GUIDES = ROOT / "nbs" / "guides"
DRAWN = ROOT / "nbs" / "plan" / "23_draw.ipynb"
GUIDE = GUIDES / "01_drop_in.ipynb"
NEEDS = ("jupyterlab", "ipywidgets")
EXPLORER = notebook(
    "from zero_nb.plan.charts import explorer\nexplorer()",
    "from zero_nb.plan.player import make_player\nfrom zero_nb.plan.schedule import make_schedule\n"
    "make_player(make_schedule(4, 'zero2-interleaved'), lambda e: 0.004)",
)
ENDLESS = notebook(
    "%load_ext zero_nb.comm.launch",
    "%%torchrun --nproc 2\nimport itertools, time\nfrom zero_nb import report_step\n"
    "for step in itertools.count(1): report_step(step=step, loss=3 / step); time.sleep(0.1)",
    "%%torchrun --nproc 2\nimport torch, torch.distributed as dist\nx = torch.ones(1)\ndist.all_reduce(x)\nx.item()",
    "%torchrun_stop",
)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """Run a JupyterLab with the explorer, the drop-in guide, and a cell that does not end."""
    folder = tmp_path_factory.mktemp("lab")
    for path in (GUIDE, GUIDES / "drop_in.py", DRAWN):
        shutil.copy(path, folder)
    (folder / "explorer.ipynb").write_text(EXPLORER)
    (folder / "endless.ipynb").write_text(ENDLESS)
    with jupyterlab(folder) as made:
        yield made
    wait_for(lambda: not made.processes())  # nothing outlives the server


def failures(cells: list[dict]) -> list[str]:
    """Give the errors that cells have ended with."""
    outputs = (output for cell in cells for output in cell["outputs"])
    return [f"{o['ename']}: {o['evalue']}" for o in outputs if o["output_type"] == "error"]


@needs_browser("drives the explorer in a real JupyterLab", *NEEDS)
def test_the_slider_moves_the_picture(lab):
    with new_page(viewport={"width": 1400, "height": 900}) as page:
        lab.open(page, "explorer.ipynb")
        page.locator(".jp-Notebook .jp-Cell .cm-content").first.click()
        page.keyboard.press("Shift+Enter")
        picture = page.locator(".jp-OutputArea svg[aria-label*='gpt2-xl']").first
        picture.wait_for(timeout=60_000)
        before = picture.get_attribute("aria-label")
        assert "8 ranks" in before and "23.2 GiB" not in before
        shot = picture.screenshot()
        ranks = page.locator(".widget-hslider", has_text="ranks").locator(".noUi-handle")
        ranks.focus()
        for _ in range(2):
            page.keyboard.press("ArrowRight")
        page.wait_for_selector(".jp-OutputArea svg[aria-label*='32 ranks']", timeout=20_000)
        after = page.locator(".jp-OutputArea svg[aria-label*='gpt2-xl']").first
        assert (
            after.get_attribute("aria-label") == explore(ranks=32).label
            and after.screenshot() != shot
        )
        # the other widget: a step, and the rest of the iteration by its player
        page.locator(".jp-Notebook .jp-Cell .cm-content").nth(1).click()
        page.keyboard.press("Shift+Enter")
        page.locator(".jp-OutputArea svg[aria-label^='0 ms: 0:GRAD;']").wait_for(timeout=20_000)
        page.locator(".jp-OutputArea button[title='forth']").click()
        page.locator(".jp-OutputArea svg[aria-label^='4 ms: 0:RS, 1:GRAD;']").wait_for()
        page.locator(".jp-OutputArea .widget-play button").first.click()
        page.locator(".jp-OutputArea svg[aria-label*=': nothing;']").wait_for(timeout=30_000)


@pytest.mark.daily
def test_make_lab_trusts_every_notebook():
    """JupyterLab shows no SVG of a notebook that it does not know: not one figure of a fresh clone."""
    make = subprocess.run(
        ["make", "--no-print-directory", "-n", "lab"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    trust, lab = make.stdout.splitlines()[-2:]
    assert "jupyter trust" in trust and "jupyter lab" in lab
    given = {path for words in trust.split() if "*" in words for path in ROOT.glob(words)}
    assert given == {*(ROOT / "nbs").rglob("*.ipynb")} and len(given) > 100


@needs_browser("opens a notebook in a real JupyterLab", *NEEDS)
def test_figures_of_a_notebook_are_seen_before_it_has_run(lab):
    with new_page(viewport={"width": 1400, "height": 3000}) as page:
        lab.open(page, DRAWN.name)
        figure = page.locator(".jp-RenderedSVG img").first
        figure.wait_for(timeout=60_000)
        assert figure.evaluate("image => image.naturalWidth") > 100


@needs_browser("runs the drop-in guide in a real JupyterLab", *NEEDS)
def test_the_drop_in_guide_runs_from_top_to_bottom(lab):
    with new_page(viewport={"width": 1400, "height": 900}) as page:
        page.set_default_timeout(180_000)
        lab.open(page, GUIDE.name)
        page.evaluate("() => jupyterapp.commands.execute('notebook:run-all-cells')")
        cells = lab.saved(page, GUIDE.name)
    assert failures(cells) == []
    counts = [cell["execution_count"] for cell in cells]
    assert counts == [*range(1, len(cells) + 1)] and len(cells) > 10


# The colour of a word of a cell, where the editor has told it from what surrounds it, and of other text.
COLOUR = """([cell, word]) => {
    const editor = document.querySelectorAll(".jp-CodeCell .cm-content")[cell]
    const tokens = [...editor.querySelectorAll("span")].filter(each => each.textContent === word)
    return [...tokens.slice(0, 1), editor].map(each => getComputedStyle(each).color)
}"""


def wait_for_steps(page, rank: int) -> int:
    """Wait until the table of live ranks has a row of a rank with a step and a curve; give the step."""
    table = page.locator(".jp-OutputArea table", has_text="last report")
    row = table.locator("tbody tr").nth(rank)
    row.locator("svg[aria-label^='loss, from ']").wait_for(timeout=60_000)
    name, step, *_ = wait_for(row.locator("td").all_inner_texts)
    assert name == str(rank)
    return int(step)


@needs_browser("interrupts ranks in a real JupyterLab", *NEEDS)
def test_ranks_are_seen_live_until_an_interrupt_and_the_next_cell_starts_others(lab):
    def ranks():
        return [command for command in lab.processes() if "ipykernel" not in " ".join(command)]

    with new_page(viewport={"width": 1400, "height": 900}) as page:
        lab.open(page, "endless.ipynb")
        idle = len(ranks())  # the server
        for word in ("import", "for"):  # below `%%torchrun`, as in any other cell
            keyword, text = page.evaluate(COLOUR, [1, word])
            assert keyword != text
        page.locator(".jp-Notebook .jp-Cell .cm-content").first.click()
        page.keyboard.press("Shift+Enter")
        page.keyboard.press("Shift+Enter")
        begun = [wait_for_steps(page, rank) for rank in (0, 1)]
        wait_for(lambda: all(wait_for_steps(page, rank) > begun[rank] for rank in (0, 1)))
        assert len(ranks()) >= idle + 2
        page.locator("[data-jp-item-name='interrupt']").first.click()
        page.locator(".jp-OutputArea", has_text="KeyboardInterrupt").first.wait_for(timeout=60_000)
        wait_for(lambda: len(ranks()) == idle)
        page.locator(".jp-Notebook .jp-Cell .cm-content").nth(2).click()
        page.keyboard.press("Shift+Enter")
        page.locator(".jp-OutputArea", has_text="2.0").first.wait_for(timeout=60_000)
        page.keyboard.press("Shift+Enter")
        wait_for(lambda: len(ranks()) == idle)
        cells = lab.saved(page, "endless.ipynb")
    assert [each.split(":")[0] for each in failures(cells)] == ["KeyboardInterrupt"]
