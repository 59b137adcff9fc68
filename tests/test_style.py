"""The house style, where a machine can check it."""

import ast
import importlib
import inspect
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_origin, get_type_hints

import pytest

import zero_nb

ROOT = Path(__file__).parents[1]
ROOMS = (
    "plan",
    "comm",
    "optim",
    "backward",
    "join",
    "checkpoint",
    "verify",
    "integrations",
    "apps",
)  # a room imports those before it
NOTEBOOKS = sorted(
    (p for p in (ROOT / "nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts),
    key=lambda p: (ROOMS.index(p.parent.name) if p.parent.name in ROOMS else -1, p.name),
)


def cells(path: Path) -> list[str]:
    """Give the sources of the code cells that are not empty."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    return [
        s
        for c in notebook["cells"]
        if c["cell_type"] == "code" and (s := "".join(c["source"]).strip())
    ]


def exported(path: Path) -> list[str]:
    """Give the sources of the cells that become the module."""
    return [s for s in cells(path) if re.match(r"#\|\s*exporti?\b", s)]


def module_of(path: Path) -> str | None:
    """Give the name of the module a notebook makes, if it makes one."""
    found = [m[1] for s in cells(path) if (m := re.match(r"#\|\s*default_exp\s+(\S+)", s))]
    return found[0] if found else None


MODULES = {m: p for p in NOTEBOOKS if (m := module_of(p))}  # in the order of imports
PLANS = [m for m in MODULES if m.startswith("plan.")]


def source_of(module: str) -> str:
    """Give the text of a module, by its dotted name inside the package."""
    return (ROOT / "zero_nb" / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")


def imports(module: str, top_level: bool = False) -> set[str]:
    """Give the absolute names a module imports, anywhere or at its top level."""
    tree = ast.parse(source_of(module))
    out = set()
    for node in tree.body if top_level else ast.walk(tree):
        if isinstance(node, ast.Import):
            out |= {a.name for a in node.names}
        if isinstance(node, ast.ImportFrom):
            above = f"zero_nb.{module}".split(".")[: -node.level] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            full = {f"{base}.{a.name}" for a in node.names}
            out |= {name for name in full if name.removeprefix("zero_nb.") in MODULES} or {base}
    return out


def siblings(module: str, top_level: bool = False) -> set[str]:
    """Give the modules of the package that a module imports."""
    found = imports(module, top_level)
    return {n.removeprefix("zero_nb.") for n in found if n.startswith("zero_nb.")}


@pytest.mark.parametrize("module", PLANS)
def test_plans_import_the_standard_library_and_each_other(module):
    allowed = sys.stdlib_module_names | {"zero_nb"}
    assert {name.split(".")[0] for name in imports(module, top_level=True)} <= allowed
    assert siblings(module, top_level=True) <= set(PLANS)


@pytest.mark.parametrize("module", PLANS)
def test_plans_need_no_torch(module):
    code = f"import sys, zero_nb.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize("module", MODULES)
def test_no_module_imports_a_later_one(module):
    order = list(MODULES)
    assert all(order.index(s) < order.index(module) for s in siblings(module)), siblings(module)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_exported_cells_hold_a_few_functions_or_one_class(path):
    for source in exported(path):
        assert not re.search(r"^\s*from .* import \*", source, re.M)
        classes = {n.name for n in ast.parse(source).body if isinstance(n, ast.ClassDef)}
        whole_interface = "ZeroRedundancyOptimizer" in classes  # one class, however long
        assert len(source.splitlines()) <= 155 or whole_interface, source[:200]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebooks_have_title_subtitle_and_no_stored_error(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert re.match(r"# \S.*\n\n?> \S", "".join(notebook["cells"][0]["source"]))
    outputs = [o for c in notebook["cells"] for o in c.get("outputs", [])]
    assert not any(o["output_type"] == "error" for o in outputs)
    assert all(
        len("".join(png)) <= 70_000 for o in outputs if (png := o.get("data", {}).get("image/png"))
    )  # base64 of about 50 kB


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_cells_that_import_do_nothing_else(path):
    """Building the site executes cells with imports, so a mixed one would run without the cells before it."""
    for source in cells(path):
        if re.match(r"%|#\|\s*export", source):
            continue
        kinds = {
            isinstance(node, (ast.Import, ast.ImportFrom))
            for node in ast.parse(re.sub(r"^%.*", "", source, flags=re.M)).body
        }
        assert len(kinds) < 2, source


MAKERS = (
    *(
        "arange",
        "as_tensor",
        "asarray",
        "empty",
        "eye",
        "full",
        "linspace",
        "ones",
        "rand",
        "randint",
    ),
    *("randn", "randperm", "scalar_tensor", "tensor", "zeros"),
)
# by function: what each of its calls says, because a setting of the process says it otherwise
SAID = {name: {"device"} for name in MAKERS} | {"load": {"weights_only", "mmap"}}


@pytest.mark.parametrize("module", [m for m in MODULES if not m.startswith("apps.")])
def test_no_default_of_torch_decides_where_a_tensor_is_or_how_a_file_is_read(module):
    tree = ast.parse(source_of(module))
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func)
        if name.startswith("torch.") and name[6:] in SAID:
            said = {keyword.arg for keyword in call.keywords}
            assert None in said or SAID[name[6:]] <= said, (
                f"line {call.lineno}: {ast.unparse(call)}"
            )


def test_collectives_are_spelled_where_ways_are_made():
    names = (
        r"all_reduce|broadcast|reduce_scatter\w*|all_gather\w*|all_to_all\w*"
        r"|isend|irecv|send|recv|barrier|gather|scatter"
    )
    spelled = {"native", "messages", "relays", "exchange", "ending", "launch"}
    for module in set(MODULES) - {f"comm.{name}" for name in spelled}:
        text = source_of(module)
        assert not re.search(rf"\b(dist|distributed)\.({names})\(", text), module


@pytest.mark.parametrize("module", MODULES)
def test_public_names_are_documented_and_typed(module):
    loaded = importlib.import_module(f"zero_nb.{module}")
    for name in loaded.__all__:
        thing = getattr(loaded, name)
        if get_origin(thing) or not (inspect.isclass(thing) or inspect.isfunction(thing)):
            continue
        assert inspect.getdoc(thing), f"{module}.{name} has no docstring"
        if inspect.isfunction(thing):
            signature = inspect.signature(thing)
            assert signature.return_annotation is not inspect.Signature.empty, (
                f"{module}.{name} does not say what it returns"
            )
            assert all(p.annotation is not p.empty for p in signature.parameters.values()), (
                f"{module}.{name} has an untyped parameter"
            )


def files(folder: Path, ending: str) -> dict[str, str]:
    """Give the texts below a folder by their relative paths."""
    paths = [p for p in folder.rglob(ending) if ".ipynb_checkpoints" not in p.parts]
    return {str(p.relative_to(folder)): p.read_text(encoding="utf-8") for p in paths}


def made_by(command: str, folder: Path) -> Path:
    """Run a command of nbdev on a copy of the notebooks and modules."""
    for name in ("nbs", "zero_nb"):
        unneeded = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints", "benchmark")
        shutil.copytree(ROOT / name, folder / name, ignore=unneeded)
    for name in ("settings.ini", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    program = Path(sys.executable).parent / command
    subprocess.run([program], cwd=folder, check=True, capture_output=True)
    return folder


def compare(made: dict[str, str], ours: dict[str, str]) -> None:
    """Compare texts of files by their names."""
    assert sorted(made) == sorted(ours)
    for name in ours:
        assert made[name] == ours[name], f"{name}: run `make export`"


@pytest.mark.daily
def test_modules_are_what_the_notebooks_export(tmp_path):
    made = made_by("nbdev_export", tmp_path)
    compare(files(made / "zero_nb", "*.py"), files(ROOT / "zero_nb", "*.py"))


@pytest.mark.whole
def test_notebooks_are_clean(tmp_path):
    made = made_by("nbdev_clean", tmp_path)
    compare(files(made / "nbs", "*.ipynb"), files(ROOT / "nbs", "*.ipynb"))


def test_exported_names_resolve():
    import zero_nb

    tree = ast.parse((ROOT / "zero_nb" / "__init__.py").read_text(encoding="utf-8"))
    typed = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level
        for alias in node.names
    }
    assert sorted(zero_nb.__all__) == sorted(typed)  # what type checkers see is what there is
    assert not any(module.startswith("apps") for module in zero_nb._MODULES)  # programs, no library
    assert all(getattr(zero_nb, name) is not None for name in zero_nb.__all__)
    with pytest.raises(AttributeError, match="nonsense"):
        zero_nb.nonsense


@pytest.mark.parametrize("name", zero_nb.__all__)
def test_annotations_of_public_names_can_be_read(name):
    """As nbdev's `show_doc`, Sphinx and others do."""
    public = getattr(zero_nb, name)
    own = vars(public).values() if isinstance(public, type) else ()
    for what in filter(inspect.isfunction, (public, *own)):
        inspect.signature(what, eval_str=True)
        get_type_hints(what)  # evaluates what an alias says as text, too, as pydantic does
