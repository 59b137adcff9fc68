"""The API reference and `llms.txt`: every public name, with what a caller needs to know of it."""

import ast
import importlib
import multiprocessing
import os
import re
import traceback
from collections.abc import Sequence
from pathlib import Path

import pytest
from notebooks import ALREADY_IMPORTED
from reference import (
    INTERNAL,
    MEMBERS,
    NBS,
    PROPERTY_TYPES,
    TORCHS,
    TYPES,
    aliases,
    cells,
    every_module,
    example,
    marked,
    modules,
    names_in,
    package,
    settings,
    signatures,
)

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
    named, described = (re.findall(r"^### (\w+)$", part, re.M) for part in PAGE.split(TYPES[:22]))
    assert named == zero_nb.__all__ and described == sorted(set(described) - set(named))
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


def untyped(signature: str) -> list[str]:
    """Name what a block of code defines without a type."""
    found = []
    for node in ast.walk(ast.parse(signature)):
        if isinstance(node, ast.FunctionDef):
            given = [*node.args.args, *node.args.kwonlyargs]
            bare = [a.arg for a in given if a.annotation is None and a.arg not in ("self", "cls")]
            found += [f"{node.name}({name})" for name in bare]
            found += [node.name] if node.returns is None and node.name != "__init__" else []
    return found


def test_every_method_and_attribute_has_its_types():
    """A line such as `reduce_scatter(flat, sizes)` does not say what may be given."""
    names = set(re.findall(r"^### (\w+)$", PAGE, re.M)) - set(TORCHS)
    shown = {name: signatures(section(name)) for name in names}
    assert {n: untyped(text) for n, texts in shown.items() for text in texts if untyped(text)} == {}
    bare = [line for line in PAGE.splitlines() if re.match(r"- `\w+(\(.*\))?`", line)]
    assert bare == [] and len(signatures(section("Group"))) == 2


def test_each_type_in_a_signature_has_an_entry():
    names = [name for name in re.findall(r"^### (\w+)$", PAGE, re.M) if name not in TORCHS]
    used = {word for name in names for text in signatures(section(name)) for word in names_in(text)}
    assert {"Policy", "Estimate", "BufferMode", "GroupsLike"} <= used
    assert (used & {*package(), *aliases()}) - set(names) == set()


def test_no_type_in_a_signature_is_private():
    """A reader looks each type up: on this page, in Python's documentation, or in torch's."""
    names = [name for name in re.findall(r"^### (\w+)$", PAGE, re.M) if name not in TORCHS]
    used = {name: set().union(*map(names_in, signatures(section(name)))) for name in names}
    assert {
        n: types for n, words in used.items() if (types := re.findall(r"\b_\w+", " ".join(words)))
    } == {}
    ours = {word for name in names for word in used[name] if of_this_package(word)}
    assert {"ReturnedT", "WrittenT", "Policy"} <= ours <= set(names)


def of_this_package(word: str) -> bool:
    """Whether a module of the package gives a value this name: a class, an alias or a variable of types."""
    modules = [importlib.import_module(f"zero_nb.{name}") for name in every_module()]
    found = [vars(module)[word] for module in modules if word in vars(module)]
    ours = [getattr(one, "__module__", "").startswith("zero_nb") for one in found]
    return word in aliases() or any(ours)


def test_what_only_the_package_uses_is_not_listed():
    for name, hidden in INTERNAL.items():
        texts = [text for text in PAGE.split("\n### ") if text.startswith(f"{name}\n")]
        listed = texts[0].split(MEMBERS)[-1] if texts and MEMBERS in texts[0] else ""
        assert not [one for one in hidden if re.search(rf"^(def )?{one}\b", listed, re.M)], name
        defined = ast.unparse(package()[name].node(name))
        assert [one for one in hidden if not re.search(rf"\b{one}\b", defined)] == [], name


def test_properties_are_of_the_types_that_the_page_says():
    tiny = (zero_nb.ParamSpec("weight", (4, 2)), zero_nb.ParamSpec("bias", (3,)))
    plan = zero_nb.even(tiny, 2)
    packed = zero_nb.pack(tiny, 2)
    grid = zero_nb.Grid(2, 2)
    objects = [tiny[0], plan, packed, packed.buckets[0], grid, zero_nb.GridPlan(plan, grid)]
    of = {"int": int, "float": (int, float), "str": str, "bool": bool, "tuple": Sequence}
    checked = set()
    for one in objects:
        for name, text in PROPERTY_TYPES.items():
            if isinstance(getattr(type(one), name, None), property):
                assert isinstance(getattr(one, name), of[text.partition("[")[0]]), (one, name)
                checked.add(name)
    assert {"world_size", "rows", "loads", "imbalance", "mark", "equal", "params"} <= checked


def block(name: str) -> str:
    """Give the example of a name, as the page has it."""
    found = re.findall(r"^```python\n(.*?)\n```$", section(name), re.M | re.S)
    others = (name not in TORCHS) + (MEMBERS in section(name))
    return found[-1] if len(found) > others else ""


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
