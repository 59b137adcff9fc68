"""Cut out of a notebook what one of its cells needs, so that the cell runs by itself."""

import ast
import builtins
import re
import symtable
from collections.abc import Iterator, Sequence
from copy import deepcopy

import zero_nb

WITHOUT_EFFECT = ("test_", "draw_", "print")  # functions that change none of what they are given


def statements(source: str) -> list[ast.stmt]:
    """Give the statements of a cell; of one that is no Python, such as a magic's, none."""
    try:
        return ast.parse(source).body
    except SyntaxError:
        return []


class Generators(ast.NodeTransformer):
    """Puts a generator in the place of each comprehension: from Python 3.12 on, only that has a table of
    its own, and the names that a comprehension binds look as if the statement read them."""

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp) -> ast.AST:
        self.generic_visit(node)
        return ast.GeneratorExp(node.elt, node.generators)

    visit_SetComp = visit_ListComp

    def visit_DictComp(self, node: ast.DictComp) -> ast.AST:
        self.generic_visit(node)
        return ast.GeneratorExp(ast.Tuple([node.key, node.value], ast.Load()), node.generators)


def table_of(node: ast.stmt) -> symtable.SymbolTable:
    return symtable.symtable(ast.unparse(Generators().visit(deepcopy(node))), "cell", "exec")


def bound(node: ast.stmt) -> set[str]:
    """Give the names that a statement gives a value."""
    top = table_of(node)
    return {s.get_name() for s in top.get_symbols() if s.is_assigned() or s.is_imported()}


def read(node: ast.stmt) -> set[str]:
    """Give the names outside a statement that it uses, or that its functions use when called."""
    found = set()
    tables = [table_of(node)]
    while tables:
        table = tables.pop()
        top = table.get_type() == "module"
        symbols = (s for s in table.get_symbols() if s.is_referenced())
        found |= {s.get_name() for s in symbols if s.is_global() or top}
        tables += table.get_children()
    own = bound(node) if not isinstance(node, ast.Assign | ast.AugAssign) else set()
    return found - own - {*dir(builtins)}


def changes(node: ast.stmt, names: set[str], shown: bool) -> bool:
    """Tell whether a statement changes one of some values: sets a part of it, calls its method, or
    calls a function with it, other than to show what comes, at the end of a cell."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = [t for t in node.targets if isinstance(t, ast.Attribute | ast.Subscript)]
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        call = node.value
        if isinstance(call.func, ast.Attribute):
            targets = [call.func]
        elif isinstance(call.func, ast.Name):
            acts = not call.func.id.startswith(WITHOUT_EFFECT) and not shown
            targets = call.args if acts or call.func.id == "run" else []
    for target in targets:
        while isinstance(target, ast.Attribute | ast.Subscript | ast.Call):
            target = target.func if isinstance(target, ast.Call) else target.value
        if isinstance(target, ast.Name) and target.id in names:
            return True
    return False


def imports(node: ast.stmt, names: set[str]) -> Iterator[tuple[str, str]]:
    """Give the imports among some names, as the module and what is imported of it."""
    for alias in getattr(node, "names", ()):
        name = alias.asname or alias.name.split(".")[0]
        if name in names:
            text = alias.name + (f" as {alias.asname}" if alias.asname else "")
            module = getattr(node, "module", None) or ""
            public = module.startswith("zero_nb.") and alias.name in zero_nb.__all__
            yield ("zero_nb" if public else module), text


def exported_from(module: str, name: str) -> str:
    """Give the module that a user imports a name of the chapter from."""
    return "zero_nb" if name in zero_nb.__all__ else f"zero_nb.{module}"


def self_contained(
    cells: Sequence[str],  # sources of a chapter's code cells, up to the one that is cut out
    module: str,  # that the chapter exports to, dotted, inside the package
) -> str:
    """Give the last of some cells with the imports and definitions of others that it needs."""
    *before, source = cells
    needed: set[str] = set()
    for node in reversed(statements(source)):
        needed = (needed - bound(node)) | read(node)
    wanted: dict[str, set[str]] = {}
    definitions: list[str] = []
    for cell in reversed(before):
        lines = cell.splitlines()
        for n, node in enumerate(reversed(statements(cell))):
            names = bound(node) & needed
            if not names and not changes(node, needed, shown=n == 0):
                continue
            if isinstance(node, ast.Import | ast.ImportFrom):
                for origin, text in imports(node, names):
                    wanted.setdefault(origin, set()).add(text)
            elif re.search(r"^#\| export", cell, re.M):
                for name in names:
                    wanted.setdefault(exported_from(module, name), set()).add(name)
            else:
                first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
                definitions.insert(0, "\n".join(lines[first - 1 : node.end_lineno]))
                needed |= read(node)
            needed -= names if names != {"_"} else set()
    return assembled(wanted, definitions, source)


def assembled(wanted: dict[str, set[str]], definitions: list[str], source: str) -> str:
    """Write imports, definitions and a cell below each other."""
    plain = sorted(f"import {text}" for text in wanted.pop("", ()))
    lines = [*plain, *(f"from {m} import {', '.join(sorted(wanted[m]))}" for m in sorted(wanted))]
    parts = ["\n".join(lines)]
    for text in definitions:
        spaced = text.startswith(("def ", "class ", "@", "async "))
        parts[-1:] = [parts[-1], text] if spaced or len(parts) == 1 else [f"{parts[-1]}\n{text}"]
    return "\n\n".join(part for part in [*parts, source] if part)
