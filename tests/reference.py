"""Make the API reference, `nbs/reference.md`, and `nbs/llms.txt` from the package's public names."""

import ast
import json
import re
import subprocess
import sys
from configparser import ConfigParser
from functools import cache
from pathlib import Path
from textwrap import dedent, indent
from typing import NamedTuple

from slicing import self_contained, statements

import zero_nb

ROOT = Path(__file__).parents[1]
NBS = ROOT / "nbs"
JOIN = "https://docs.pytorch.org/docs/stable/distributed.algorithms.join.html"
TORCHS = {"JoinHook": JOIN, "Joinable": JOIN}  # public names that are torch's own
LONGEST = 20  # lines of an example
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
HEAD = """# API reference

> Every public name, by module: arguments with types, shapes and units, errors, source, and an example

Made from the package by `make export`; edit the chapters. All names are imported from `zero_nb` itself.
An example is a cell of a chapter that uses the name, with the imports and definitions that it needs: each runs
by itself.
The modules have more names, for each other; those may change without notice.
"""


class Module(NamedTuple):
    """A module of the package, and the notebook that it is made from."""

    name: str  # dotted, inside the package
    chapter: str  # path below `nbs`
    text: str

    def node(self, name: str) -> ast.FunctionDef | ast.ClassDef | None:
        """Find a definition at the top of the module."""
        kinds = (*FUNCTIONS, ast.ClassDef)
        found = (n for n in ast.parse(self.text).body if isinstance(n, kinds) and n.name == name)
        return next(found, None)

    def lines(self, first: int, last: int) -> str:
        """Give lines of the module, counted from 1, without what indents all of them."""
        rows = self.text.splitlines()[first - 1 : last]
        return dedent("\n".join(rows)).rstrip()


@cache
def cells(chapter: str) -> list[str]:
    """Give the sources of a notebook's code cells."""
    found = json.loads((NBS / chapter).read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == "code"]


def modules() -> dict[str, Module]:
    """Give the modules with public names, in the order of `zero_nb`."""
    chapters = {}
    for path in NBS.rglob("*.ipynb"):
        found = re.search(r"#\| default_exp ([\w.]+)", path.read_text(encoding="utf-8"))
        if found and ".ipynb_checkpoints" not in path.parts:
            chapters[found[1]] = str(path.relative_to(NBS))
    texts = {m: (ROOT / "zero_nb" / f"{m.replace('.', '/')}.py") for m in zero_nb._MODULES}
    return {
        m: Module(m, chapters[m], path.read_text(encoding="utf-8")) for m, path in texts.items()
    }


def head_of(module: Module, node: ast.FunctionDef) -> str:
    """Give a function's first lines, with what its arguments say of themselves."""
    return module.lines(node.lineno, node.body[0].lineno - 1)


def first_sentence(text: str | None) -> str:
    """Give the first sentence of a docstring, on one line."""
    whole = " ".join((text or "").split("\n\n")[0].split())
    return re.split(r"(?<=[.;]) (?=[A-Z`])", whole)[0].rstrip(";")


@cache
def package() -> dict[str, Module]:
    """Give the module of each definition; no two modules have one name at the top."""
    found = {}
    for path in sorted((ROOT / "zero_nb").rglob("*.py")):
        module = Module(path.stem, "", path.read_text(encoding="utf-8"))
        kinds = (*FUNCTIONS, ast.ClassDef)
        tops = ast.parse(module.text).body
        found |= {node.name: module for node in tops if isinstance(node, kinds)}
    return found


def fields_of(module: Module, node: ast.ClassDef) -> list[str]:
    """Give how an object is made: the fields of a dataclass or a named tuple, or `__init__`."""
    for inner in node.body:
        if isinstance(inner, FUNCTIONS) and inner.name == "__init__":
            return [head_of(module, inner)]
    fields = [n for n in node.body if isinstance(n, ast.AnnAssign)]
    if fields:
        begins = [
            min([n.lineno, *(d.lineno for d in getattr(n, "decorator_list", ()))])
            for n in node.body
        ]
        later = (line for line in begins if line > fields[-1].lineno)
        return [module.lines(fields[0].lineno, next(later, node.end_lineno + 1) - 1)]
    above = (package().get(ast.unparse(base)) for base in node.bases)
    found = [(m, m.node(ast.unparse(b))) for m, b in zip(above, node.bases, strict=True) if m]
    return fields_of(*found[0]) if found else []


def members(node: ast.ClassDef) -> list[str]:
    """Give a line for each public method and property of a class."""
    found = []
    for inner in node.body:
        if isinstance(inner, FUNCTIONS) and inner.name[0] != "_":
            kinds = {ast.unparse(d).split(".")[-1] for d in inner.decorator_list}
            if kinds & {"setter", "overload"}:
                continue
            names = [a.arg for a in (*inner.args.posonlyargs, *inner.args.args)][1:]
            call = "" if "property" in kinds else f"({', '.join(names)})"
            found.append(f"- `{inner.name}{call}`: {first_sentence(ast.get_docstring(inner))}")
        value = getattr(inner, "value", None)
        if isinstance(inner, ast.Assign) and ast.unparse(value).startswith("property("):
            doc = {k.arg: k.value.value for k in value.keywords if k.arg == "doc"}
            found.append(f"- `{inner.targets[0].id}`: {first_sentence(doc.get('doc'))}")
        elif isinstance(value, ast.Attribute) and (own := package().get(value.attr)):
            function = own.node(value.attr)  # whose first argument is the object
            names = ", ".join(a.arg for a in function.args.args[1:])
            about = first_sentence(ast.get_docstring(function))
            found.append(f"- `{inner.targets[0].id}({names})`: {about}")
    return [line.removesuffix(": ") for line in found]


def code_of(source: str) -> str:
    """Give a cell without its directives."""
    return "\n".join(row for row in source.splitlines() if not row.startswith("#|")).strip()


def uses(source: str, name: str) -> bool:
    """Tell whether a cell is a short example of a name: calls it, or an attribute of it."""
    if "#| export" in source or len(code_of(source).splitlines()) > LONGEST:
        return False
    nodes = [inner for node in statements(code_of(source)) for inner in ast.walk(node)]
    used = [getattr(n, "func", getattr(n, "value", None)) for n in nodes]
    return any(isinstance(node, ast.Name) and node.id == name for node in used)


@cache
def marked() -> dict[str, tuple[str, int]]:
    """Find the cells that say `#| reference: name, ...`: those are the examples of the names."""
    found = {}
    for path in sorted(NBS.glob("*/*.ipynb")):
        chapter = str(path.relative_to(NBS))
        for i, source in enumerate(cells(chapter)):
            for names in re.findall(r"^#\| reference: (.+)$", source, re.M):
                found |= dict.fromkeys(names.split(", "), (chapter, i))
    return found


def find_example(module: Module | None, name: str) -> tuple[str, int] | None:
    """Find the cell that is the example of a name, as its chapter and number: the one that says so,
    else the first short one that uses it, of its chapter or of the chapters after it."""
    if name in marked() or module is None:
        return marked().get(name)
    others = sorted(str(p.relative_to(NBS)) for p in NBS.glob("*/*.ipynb"))
    places = ((c, i) for c in (module.chapter, *others) for i in range(len(cells(c))))
    return next((at for at in places if uses(cells(at[0])[at[1]], name)), None)


def exports_to(chapter: str) -> str:
    """Give the dotted name of the module that a chapter exports to, if it does."""
    found = re.search(r"#\| default_exp ([\w.]+)", "\n".join(cells(chapter)))
    return found[1] if found else ""


def example(module: Module | None, name: str) -> str:
    """Give the example of a name, with what it needs to run by itself."""
    at = find_example(module, name)
    if at is None:
        return ""
    chapter, i = at
    where = "" if module and chapter == module.chapter else f"In [{chapter}]({chapter}):\n\n"
    sources = [*cells(chapter)[:i], code_of(cells(chapter)[i])]
    source = formatted(self_contained(sources, exports_to(chapter)))
    return f"{where}```python\n{source}```"


def formatted(source: str) -> str:
    """Lay code out as ruff does, which looks at the page."""
    command = [
        sys.executable,
        "-m",
        "ruff",
        "format",
        "--quiet",
        "--stdin-filename",
        "page.py",
        "-",
    ]
    return subprocess.run(
        command, input=source, capture_output=True, check=True, encoding="utf-8", cwd=ROOT
    ).stdout


def entry(module: Module, name: str) -> str:
    """Describe a public name."""
    if name in TORCHS:
        about = f"[torch's own class]({TORCHS[name]}), passed on."
        return f"### {name}\n\n{about}\n\n{example(None, name)}".rstrip() + "\n"
    node = module.node(name)
    url = f"{settings()['git_url']}/blob/main/zero_nb/{module.name.replace('.', '/')}.py"
    links = f"[chapter]({module.chapter}#{name.lower()}) · [source]({url})"
    is_class = isinstance(node, ast.ClassDef)
    made = fields_of(module, node) if is_class else [head_of(module, node)]
    title = [f"class {name}:"] if is_class else []
    code = "\n".join([*title, *(indent(text, "    " * len(title)) for text in made)])
    parts = [f"### {name}", links, f"```python\n{code}\n```", ast.get_docstring(node)]
    if is_class and (listed := members(node)):
        parts.append("\n".join(listed))
    if shown := example(module, name):
        parts.append(shown)
    return "\n\n".join(parts) + "\n"


def settings() -> dict[str, str]:
    """Read the project's metadata."""
    parser = ConfigParser(delimiters=["="])
    parser.read(ROOT / "settings.ini", encoding="utf-8")
    return dict(parser["DEFAULT"])


def reference() -> str:
    """Write the page."""
    sections = [HEAD]
    for module in modules().values():
        about = ast.get_docstring(ast.parse(module.text))
        sections.append(f"## zero_nb.{module.name}\n\n{about}\n")
        sections += [entry(module, name) for name in zero_nb._MODULES[module.name]]
    return "\n".join(sections)


def llms() -> str:
    """Write the site's contents for language models, in the form of llmstxt.org."""
    own = settings()
    site = own["doc_host"] + own["doc_baseurl"]
    lines = [f"# {own['title']}", "", f"> {own['description']}", "", "## API", ""]
    lines.append(f"- [Reference]({site}/reference.html): every public name, by module")
    for module in modules().values():
        for name in zero_nb._MODULES[module.name]:
            node = module.node(name)
            about = first_sentence(ast.get_docstring(node)) if node else "torch's own class."
            lines.append(f"- [{name}]({site}/reference.html#{name.lower()}): {about}")
    index = json.loads((NBS / own["readme_nb"]).read_text(encoding="utf-8"))["cells"]
    text = "\n".join("".join(cell["source"]) for cell in index if cell["cell_type"] == "markdown")
    raw = f"{own['git_url']}/blob/{own['branch']}/{own['nbs_path']}"
    for line in text[text.index("## The notebooks") :].splitlines():
        if section := re.match(r"\| \*\*(.+)\*\* \| \|", line):
            lines += ["", f"## {section[1]}", ""]
        elif row := re.match(r"\| \[([^]]+)\]\(([^)]+)\) \| (.+) \|$", line):
            about = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", row[3])
            lines.append(f"- [{row[1]}]({raw}/{row[2]}): {about}")
    return "\n".join(lines) + "\n"


def made() -> dict[str, str]:
    """Give the files to write, by path."""
    return {"nbs/reference.md": reference(), "nbs/llms.txt": llms()}
