"""Make the API reference, `nbs/reference.md`, and `nbs/llms.txt` from the package's public names."""

import ast
import json
import re
import subprocess
import sys
from configparser import ConfigParser
from functools import cache
from pathlib import Path
from textwrap import dedent, indent, wrap
from typing import NamedTuple

from slicing import self_contained, statements

import zero_nb

ROOT = Path(__file__).parents[1]
NBS = ROOT / "nbs"
JOIN = "https://docs.pytorch.org/docs/stable/distributed.algorithms.join.html"
TORCHS = {"JoinHook": JOIN, "Joinable": JOIN}  # public names that are torch's own
LONGEST = 20  # lines of an example
MEMBERS = "Its methods and attributes:"
TYPES = """## Types in signatures

What a function above takes or returns, by name. Import such a type from the module that its source link names,
`zero_nb.plan.policies` for `Policy`; one without fields or `__init__` here is made by the package only.
"""
INTERNAL = {  # methods and attributes without an underscore that the package's own modules use
    name: frozenset(members.split())
    for name, members in {
        "ZeroRedundancyOptimizer": """settings groups driver attach detach show_steps wait_for_driver
            giving_state_dicts groups_to_save replan move_to history note_step is_first_step
            checked_first_step""",
        "Join": "silent_participants device make_participants",
        "Written": "fields from_fields",
        "BucketPlan": "homes mark",
        "InBackward": "step_plan step remove_markers settings load_settings leave optimizer",
        "DataParallel": """before_forward backward_began before_reduction after_step after_backward
            follow add_observer remove_observer leave_torchs_join""",
        "DdpOverlap": "before_forward backward_began on_bucket following",
        "RecordingGroup": "follow",
        "_PassingGroup": "getBackendName getGroupName getGroupDesc abort shutdown",
        "SwitchedHook": "__call__",
        "Work": "precedes pass_on",
        "Coalesced": "start add mark_agreed add_exchange",
        "Saving": "start",
        "Events": "note_start note_end forget",
    }.items()
}
SHOWN = {"classmethod", "staticmethod", "contextmanager"}  # decorators that callers need to know of
HANDLES = ("Coalesced", "RecordingGroup")  # types whose fields only the package reads
PROPERTY_TYPES = {  # of what is written as `property(lambda self: ...)`
    **dict.fromkeys(("world_size", "numel", "itemsize", "nbytes", "padding"), "int"),
    **dict.fromkeys(("rows", "columns"), "tuple[tuple[int, ...], ...]"),
    "loads": "tuple[int, ...]",
    "imbalance": "float",
    "mark": "str",
    "equal": "bool",
    "params": "tuple[ParamSpec, ...]",
    "history": "History",
    "join_device": "torch.device",
    "join_process_group": "ProcessGroup",
}
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


@cache
def every_module() -> dict[str, Module]:
    """Give the modules that are made from chapters, by dotted name."""
    chapters = {}
    for path in sorted(NBS.rglob("*.ipynb")):
        found = re.search(r"#\| default_exp ([\w.]+)", path.read_text(encoding="utf-8"))
        if found and ".ipynb_checkpoints" not in path.parts:
            chapters[found[1]] = str(path.relative_to(NBS))
    texts = {m: (ROOT / "zero_nb" / f"{m.replace('.', '/')}.py") for m in chapters}
    return {
        m: Module(m, chapters[m], path.read_text(encoding="utf-8")) for m, path in texts.items()
    }


def modules() -> dict[str, Module]:
    """Give the modules with public names, in the order of `zero_nb`."""
    return {name: every_module()[name] for name in zero_nb._MODULES}


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
    kinds = (*FUNCTIONS, ast.ClassDef)
    found = {}
    for module in every_module().values():
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
    return fields_of(*bases_of(node)[0]) if bases_of(node) else []


def attribute(name: str, kind: str, about: str | None) -> str:
    """Give a property as its type and what it is: behind it where there is room, else above it."""
    said = " ".join((about or "").split("\n\n")[0].split())
    line = f"{name}: {kind}"
    if len(line) + len(said) + 4 > 100:
        return "\n".join([*(f"# {row}" for row in wrap(said, 98)), line])
    return f"{line}  # {said}" if said else line


def stub_of(module: Module, node: ast.FunctionDef, name: str = "") -> str:
    """Give a method as a user calls it, with its docstring; a property as its type and what it is."""
    kinds = {ast.unparse(d).split(".")[-1] for d in node.decorator_list}
    about = ast.get_docstring(node)
    if kinds & {"property", "cached_property"}:
        kind = ast.unparse(node.returns) if node.returns else "Any"
        return attribute(node.name, kind, about)
    above = [f"@{kind}" for kind in sorted(kinds & SHOWN)]
    head = re.sub(
        rf"\bdef {node.name}\b", f"def {name or node.name}", head_of(module, node), count=1
    )
    return "\n".join([*above, head, indent(f'"""{about}"""', "    ") if about else "    ..."])


def stub_of_assigned(inner: ast.stmt) -> str:
    """Give what a class has by an assignment: a property, or a function of the package."""
    value = getattr(inner, "value", None)
    if not isinstance(inner, ast.Assign) or not isinstance(inner.targets[0], ast.Name):
        return ""
    name = inner.targets[0].id
    if ast.unparse(value).startswith("property("):
        doc = {k.arg: k.value.value for k in value.keywords if k.arg == "doc"}
        return attribute(name, PROPERTY_TYPES[name], doc.get("doc"))
    if isinstance(value, ast.Attribute) and (own := package().get(value.attr)):
        return stub_of(own, own.node(value.attr), name)  # its first argument is the object
    return ""


def bases_of(node: ast.ClassDef) -> list[tuple[Module, ast.ClassDef]]:
    """Give a class's bases that are the package's own."""
    names = [ast.unparse(base) for base in node.bases if ast.unparse(base) in package()]
    return [(package()[name], package()[name].node(name)) for name in names]


def internal(node: ast.ClassDef) -> frozenset[str]:
    """Give the names of members that are no user's, of a class and its bases."""
    return INTERNAL.get(node.name, frozenset()).union(*[internal(b) for _, b in bases_of(node)])


def members(module: Module, node: ast.ClassDef, hidden: frozenset[str]) -> list[str]:
    """Give each method and property of a class but those hidden; those of its bases come last."""
    found = {}
    for inner in node.body:
        if isinstance(inner, FUNCTIONS) and (inner.name[0] != "_" or inner.name == "__call__"):
            kinds = {ast.unparse(d).split(".")[-1] for d in inner.decorator_list}
            if not kinds & {"setter", "overload"}:
                found[inner.name] = stub_of(module, inner)
        elif text := stub_of_assigned(inner):
            found[inner.targets[0].id] = text
    stubs = [text for name, text in found.items() if name not in hidden]
    for above, base in bases_of(node):
        stubs += members(above, base, hidden | frozenset(found))
    return stubs


def joined(stubs: list[str]) -> str:
    """Write members as one block: attributes first, with no line between them."""
    attributes = [text for text in stubs if re.match(r"(# .*\n)*\w+: ", text)]
    methods = [text for text in stubs if text not in attributes]
    return formatted("\n\n".join(["\n".join(attributes), *methods]).strip()).rstrip()


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


def links_to(module: Module, name: str, *, anchor: bool = True) -> str:
    """Link the chapter and the source of a definition."""
    url = f"{settings()['git_url']}/blob/main/zero_nb/{module.name.replace('.', '/')}.py"
    place = f"#{name.lower()}" if anchor else ""
    return f"[chapter]({module.chapter}{place}) · [source]({url})"


def described(module: Module, node: ast.stmt, *, made: bool) -> list[str]:
    """Describe a function or class: how it is called (unless the package makes it), and its members."""
    is_class = isinstance(node, ast.ClassDef)
    heads = [head_of(module, node)] if not is_class else fields_of(module, node) if made else []
    title = [f"class {node.name}:"] if is_class else []
    code = "\n".join([*title, *(indent(text, "    " * len(title)) for text in heads)])
    if is_class and not heads:
        code = formatted(f"{code}\n    ...").rstrip()
    parts = [f"```python\n{code}\n```", ast.get_docstring(node) or ""]
    if is_class and (stubs := members(module, node, internal(node))):
        parts.append(f"{MEMBERS}\n\n```python\n{joined(stubs)}\n```")
    return [part for part in parts if part]


def entry(module: Module, name: str) -> str:
    """Describe a public name."""
    if name in TORCHS:
        about = f"[torch's own class]({TORCHS[name]}), passed on."
        return f"### {name}\n\n{about}\n\n{example(None, name)}".rstrip() + "\n"
    parts = [f"### {name}", links_to(module, name)]
    parts += described(module, module.node(name), made=True)
    if shown := example(module, name):
        parts.append(shown)
    return "\n\n".join(parts) + "\n"


@cache
def aliases() -> dict[str, tuple[Module, ast.stmt]]:
    """Find the names that the package gives to types, such as `GroupLike`, and variables of types."""
    found = {}
    for module in every_module().values():
        for node in ast.parse(module.text).body:
            target = getattr(node, "target", (getattr(node, "targets", None) or [None])[0])
            name = getattr(target, "id", "").lstrip("_")
            is_type = name[:1].isupper() and not name.isupper()
            if is_type and node.value:
                found[target.id] = (module, node)
    return found


def names_in(signature: str) -> set[str]:
    """Give the names of types in code of the page: annotations, and what an alias stands for."""
    tree = ast.parse(signature)
    found = []
    for node in ast.walk(tree):
        found += [getattr(node, "annotation", None), getattr(node, "returns", None)]
    found += [n.value for n in tree.body if isinstance(n, ast.Assign)]
    walked = [n for a in found if a for n in ast.walk(a) if "Literal" not in ast.unparse(a)]
    texts = [n.value for n in walked if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    quoted = [word for text in texts for word in re.findall(r"\w+", text)]
    return {n.id for n in walked if isinstance(n, ast.Name)} | set(quoted)


def signatures(text: str) -> list[str]:
    """Give the code of an entry without its example, with a body where only a head is shown."""
    blocks = re.findall(r"^```python\n(.*?)\n```$", text, re.M | re.S)[: 1 + (MEMBERS in text)]
    is_head = re.compile(r"[)\w\]\"]:(  # .*)?$")
    return [f"{b}\n        ..." if is_head.search(b.splitlines()[-1]) else b for b in blocks]


def type_entry(name: str, users: list[str]) -> str:
    """Describe a type that stands in signatures, and link those."""
    stands = ", ".join(f"[`{user}`](#{user.lower()})" for user in users if user != name)
    about = f"In signatures of {stands}."
    if name in aliases():
        module, node = aliases()[name]
        first = node.lineno
        above = module.text.splitlines()[: first - 1]
        while (
            above
            and above.pop().startswith("# ")
            and not module.lines(first - 1, first - 1).startswith("# %%")
        ):
            first -= 1
        code = f"```python\n{module.lines(first, node.end_lineno)}\n```"
        return f"### {name}\n\n{links_to(module, name, anchor=False)}\n\n{code}\n\n{about}\n"
    module = package()[name]
    node = module.node(name)
    written = any(getattr(inner, "name", "") == "__init__" for inner in node.body)
    parts = described(module, node, made=not written and name not in HANDLES)
    return "\n\n".join([f"### {name}", links_to(module, name), *parts, about]) + "\n"


def types(entries: dict[str, str]) -> dict[str, str]:
    """Describe what stands in signatures of public names and is no public name itself."""
    found: dict[str, str] = {}
    users: dict[str, list[str]] = {}
    todo = list(entries.items())
    while todo:
        for user, text in todo:
            for name in set().union(*map(names_in, signatures(text))) - set(entries):
                if name in package() or name in aliases():
                    users.setdefault(name, []).append(user)
        todo = [(name, type_entry(name, users[name])) for name in sorted(set(users) - set(found))]
        found |= dict(todo)
    return {name: type_entry(name, sorted(set(users[name]))) for name in sorted(found)}


def settings() -> dict[str, str]:
    """Read the project's metadata."""
    parser = ConfigParser(delimiters=["="])
    parser.read(ROOT / "settings.ini", encoding="utf-8")
    return dict(parser["DEFAULT"])


def reference() -> str:
    """Write the page."""
    sections = [HEAD]
    entries = {}
    for module in modules().values():
        about = ast.get_docstring(ast.parse(module.text))
        sections.append(f"## zero_nb.{module.name}\n\n{about}\n")
        own = {name: entry(module, name) for name in zero_nb._MODULES[module.name]}
        sections += own.values()
        entries |= own
    return "\n".join([*sections, TYPES, *types(entries).values()])


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
