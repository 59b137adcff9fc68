"""The API reference and `llms.txt`: every public name, with what a caller needs to know of it."""

import importlib
import multiprocessing
import os
import re
import traceback
from pathlib import Path

import pytest
from notebooks import ALREADY_IMPORTED
from reference import NBS, TORCHS, cells, example, marked, modules, settings

import zero_nb

PAGE = (NBS / "reference.md").read_text(encoding="utf-8")
LLMS = (NBS / "llms.txt").read_text(encoding="utf-8")
PUBLIC = [(module, name) for module, names in zero_nb._MODULES.items() for name in names]
OURS = [(module, name) for module, name in PUBLIC if name not in TORCHS]
CHECKS_NOTHING = {  # values made by the package, an error, and a decorator
    "Attendance",
    "DivergenceError",
    "Span",
    "shadowed_by",
}
LONGEST_BLOCK = (
    50  # lines of an example that are not empty, with the imports and definitions that it needs
)
FIRST_MET = (  # of which an example shows what they do, and no error
    *("ZeroRedundancyOptimizer", "overlap", "data_parallel", "run", "two_level", "estimate"),
    *("full_state_dict", "load_full_state_dict", "save_sharded", "load_sharded", "reshard"),
    *("AsyncCheckpointer", "convert_checkpoint", "Join", "JoinHook", "Joinable", "compare"),
    *("assert_parity", "watch_divergence", "memory_report", "report_step", "Span"),
    "hook_with_zero_step",
)


def section(name: str) -> str:
    """Give what the page says of a name."""
    return re.split(r"^##", PAGE.split(f"\n### {name}\n")[1], maxsplit=1, flags=re.M)[0]


def test_each_public_name_is_there_once():
    assert re.findall(r"^### (\w+)$", PAGE, re.M) == zero_nb.__all__
    assert re.findall(r"reference\.html#(\w+)", LLMS) == [n.lower() for n in zero_nb.__all__]
    assert re.findall(r"^## zero_nb\.([\w.]+)$", PAGE, re.M) == list(zero_nb._MODULES)


@pytest.mark.parametrize(("module", "name"), OURS)
def test_it_says_what_may_be_given_and_what_goes_wrong(module, name):
    text = section(name)
    assert re.search(rf"^```python\n(?:@.*\n)*(?:def|class) {name}\b", text, re.M)
    assert re.search(r"\b[Rr]aises?\b|Error`", text) or name in CHECKS_NOTHING
    assert example(modules()[module], name) in text and block(name)


@pytest.mark.parametrize(("module", "name"), OURS)
def test_its_links_lead_to_where_it_is_defined(module, name):
    chapter, anchor, url = re.search(
        r"\[chapter\]\((.+)#(\w+)\) · \[source\]\((.+)\)", section(name)
    ).groups()
    exported = "\n".join(s for s in cells(chapter) if s.startswith("#| export"))
    assert re.search(rf"^(?:def|class) {name}\b", exported, re.M) and anchor == name.lower()
    path = url.removeprefix(f"{settings()['git_url']}/blob/main/")
    assert (NBS.parent / path).is_file() and path == f"zero_nb/{module.replace('.', '/')}.py"


def block(name: str) -> str:
    """Give the example of a name, as the page has it."""
    found = re.findall(r"^```python\n(.*?)\n```$", section(name), re.M | re.S)
    return found[-1] if len(found) > (name not in TORCHS) else ""


def ended(code: str, folder: Path) -> int | None:
    """Run an example in a process of its own, which has no names, and give how it ended."""

    def example_alone() -> None:
        os.chdir(folder)
        os.environ["MPLBACKEND"] = "agg"
        try:
            exec(compile(code, "example", "exec"), {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=example_alone)
    process.start()
    process.join(100)
    process.kill()
    return process.exitcode


def test_what_is_left_to_define_is_noticed(tmp_path):
    assert ended("import torch\ntorch.ones(2)", tmp_path) == 0
    assert ended("assert ones(2)", tmp_path) == 1


@pytest.fixture(scope="module")
def imported():
    """Import what the examples would each import, before their processes are forked."""
    for module in ALREADY_IMPORTED:
        importlib.import_module(module)


@pytest.mark.usefixtures("imported")
@pytest.mark.parametrize("name", zero_nb.__all__)
def test_each_example_runs_by_itself(name, tmp_path):
    code = block(name)
    assert name in code and len(re.findall(r"^.+$", code, re.M)) <= LONGEST_BLOCK
    assert ended(code, tmp_path) == 0


def test_the_examples_of_what_users_meet_first_are_chosen():
    assert set(FIRST_MET) <= set(zero_nb.__all__) and set(marked()) <= set(zero_nb.__all__)
    wrong = [name for name in FIRST_MET if re.search(r"test_fail|except|\b_[a-z]", block(name))]
    assert wrong == []


def test_llms_txt_lists_every_page():
    """Its form: a title, a summary, and lists of links below headings (llmstxt.org)."""
    lines = [line for line in LLMS.splitlines() if line]
    assert lines[0].startswith("# ") and lines[1].startswith("> ")
    assert all(re.match(r"## \S|- \[[^]]+\]\(https://\S+\): \S", line) for line in lines[2:])
    listed = re.findall(r"/blob/main/nbs/(\S+\.ipynb)\)", LLMS)
    chapters = {str(p.relative_to(NBS)) for p in NBS.glob("*/*.ipynb")} | {"differences.ipynb"}
    assert set(listed) == chapters and len(listed) == len(chapters)
