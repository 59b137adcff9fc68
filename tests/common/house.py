"""The house rules of classes, functions and statements: each gives what breaks it."""

import ast
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "zero_nb"
TESTS = ROOT / "tests"
TORCHS = {"grad", "data", "requires_grad", "__class__"}  # attributes that torch's objects have too
MAKERS = {"__init__", "__post_init__", "__new__", "__setstate__"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
CHOICES = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.IfExp)


def parsed() -> dict[str, ast.Module]:
    """Give the syntax tree of each exported module, by dotted name inside the package."""
    paths = [p for p in PACKAGE.rglob("*.py") if p.name not in ("__init__.py", "_modidx.py")]
    trees = {}
    for path in sorted(paths):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        trees[name] = ast.parse(path.read_text(encoding="utf-8"))
    return trees


TREES: dict[str, ast.Module] = {}  # of the package, while tests of the house run


def named(body: ast.AST, inside: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Give all functions and classes below a node with their qualified names."""
    for node in ast.iter_child_nodes(body):
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            name = f"{inside}.{node.name}".lstrip(".")
            yield name, node
            yield from named(node, name)
        else:
            yield from named(node, inside)


def definitions(kind: type | tuple) -> Iterator[tuple[str, str, ast.AST]]:
    """Give module, qualified name and node of every definition of a kind."""
    for module, tree in TREES.items():
        for name, node in named(tree):
            if isinstance(node, kind):
                yield module, name, node


def length(node: ast.AST) -> int:
    """Give the lines of a definition, without its decorators."""
    return node.end_lineno - node.lineno + 1


def targets(node: ast.AST) -> Iterator[ast.expr]:
    """Give what one statement assigns to, tuples taken apart."""
    found = list(node.targets) if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    while found:
        target = found.pop()
        if isinstance(target, (ast.Tuple, ast.List)):
            found += target.elts
        elif isinstance(target, ast.Starred):
            found.append(target.value)
        elif target is not None:
            yield target


def assigned(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Give every attribute that is assigned below a node."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.For, ast.withitem)):
            if isinstance(node, ast.withitem):
                node = ast.Assign([node.optional_vars] if node.optional_vars else [])
            yield from (t for t in targets(node) if isinstance(t, ast.Attribute))


def owner(attribute: ast.Attribute) -> str:
    """Give the name before the dot, or nothing where it is an expression."""
    return attribute.value.id if isinstance(attribute.value, ast.Name) else ""


def methods(node: ast.ClassDef) -> Iterator[ast.FunctionDef]:
    return (n for n in node.body if isinstance(n, FUNCTIONS))


def names_in(module: str) -> dict[str, str]:
    """Give what names of ours mean in a module, `module.Name` or `module`: its own classes, and what it imports."""
    tree = TREES[module]
    found = {n.name: f"{module}.{n.name}" for n in ast.walk(tree) if isinstance(n, ast.ClassDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            room = module.split(".")[0] if node.level == 1 else ""
            inside = (node.module or "").removeprefix("zero_nb").lstrip(".")
            origin = ".".join(filter(None, [room, inside]))
            found |= {a.asname or a.name: f"{origin}.{a.name}".lstrip(".") for a in node.names}
    return found


def deep_classes() -> Iterator[str]:
    """A class of ours has one class of ours above it, or none; a protocol may have more."""
    classes = {
        f"{module}.{node.name}": (module, node)
        for module, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    names = {module: names_in(module) for module in TREES}

    def bases(key: str) -> list[str]:
        module, node = classes[key]
        texts = [ast.unparse(base).split("[")[0] for base in node.bases]
        heads = [text.partition(".") for text in texts]
        return [names[module].get(head, head) + dot + rest for head, dot, rest in heads]

    def above(key: str) -> set[str]:
        ours = [base for base in bases(key) if base in classes and base != key]
        return {*ours}.union(*map(above, ours))

    for key in classes:
        if len(above(key)) > 1 and "typing.Protocol" not in bases(key):
            yield ":".join(key.rsplit(".", 1))


def long_functions() -> Iterator[str]:
    """A function has at most 40 lines, beside its documented parameters."""
    for module, name, node in definitions(FUNCTIONS):
        if node.end_lineno - node.body[0].lineno + 1 > 40:
            yield f"{module}:{name}"


def long_classes() -> Iterator[str]:
    """A class has at most 150 lines, but for the optimizer, whose whole interface is one class."""
    for module, name, node in definitions(ast.ClassDef):
        if length(node) > 150 and name != "ZeroRedundancyOptimizer":
            yield f"{module}:{name}"


COLLECTIONS = r"(weakref\.)?(list|dict|set|deque|Counter|defaultdict|bytearray|Weak\w+)\b"
CHANGES = {
    "append",
    "extend",
    "insert",
    "remove",
    "pop",
    "clear",
    "sort",
    "reverse",
    "add",
    "discard",
}
CHANGES |= {
    "update",
    "setdefault",
    "popitem",
    "popleft",
    "appendleft",
    "extendleft",
    "rotate",
    "subtract",
}
CHANGES |= {
    "move_to_end",
    "difference_update",
    "intersection_update",
    "symmetric_difference_update",
}


def begins_with(node: ast.ClassDef) -> Iterator[tuple[str, ast.expr | None, ast.expr | None]]:
    """Give each attribute that a class or its constructor sets, with its annotation and its value."""
    for n in node.body:
        if isinstance(n, (ast.Assign, ast.AnnAssign)):
            for target in targets(n):
                yield ast.unparse(target), getattr(n, "annotation", None), n.value
    for method in methods(node):
        for n in ast.walk(method) if method.name in MAKERS else ():
            if isinstance(n, (ast.Assign, ast.AnnAssign)):
                for target in targets(n):
                    if isinstance(target, ast.Attribute) and owner(target) == "self":
                        yield target.attr, getattr(n, "annotation", None), n.value


def collections_of(node: ast.ClassDef) -> set[str]:
    """Give the attributes of a class that are lists, dicts, sets and the like, as far as its text tells."""
    shown = (ast.List, ast.ListComp, ast.Dict, ast.DictComp, ast.Set, ast.SetComp)
    found = set()
    for name, annotation, value in begins_with(node):
        texts = [ast.unparse(n) for n in (annotation, value) if n is not None]
        if isinstance(value, shown) or any(re.match(COLLECTIONS, text) for text in texts):
            found.add(name)
    return found


def changing(node: ast.ClassDef) -> set[str]:
    """Give the attributes that methods of a class change after it was made, collections included."""
    held = collections_of(node)
    found = set()
    for method in methods(node):
        if method.name in MAKERS:
            continue
        found |= {a.attr for a in assigned(method) if owner(a) == "self"}
        found |= {a.attr for a in written_items(method) if owner(a) == "self"}
        for n in ast.walk(method):
            if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute):
                what = n.func.value
                if isinstance(what, ast.Attribute) and owner(what) == "self":
                    found |= {what.attr} if n.func.attr in CHANGES and what.attr in held else set()
    return found


def many_attributes() -> Iterator[str]:
    """At most ten attributes of an object change after it was made; a collection changes with what is in it."""
    for module, name, node in definitions(ast.ClassDef):
        if len(changing(node)) > 10:
            yield f"{module}:{name}"


def is_boolean(value: ast.expr | None) -> bool:
    """Whether an expression is true or false by its form."""
    if isinstance(value, ast.Call):
        return ast.unparse(value.func) in ("bool", "any", "all", "isinstance", "hasattr")
    if isinstance(value, ast.BoolOp):
        return any(map(is_boolean, value.values))
    constant = isinstance(value, ast.Constant) and isinstance(value.value, bool)
    negated = isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.Not)
    return constant or negated or isinstance(value, ast.Compare)


def changing_booleans(node: ast.ClassDef) -> set[str]:
    """Give the attributes that methods of a class set to true or false after it was made."""
    found = set()
    for name, annotation, value in begins_with(node):
        if is_boolean(value) or (annotation is not None and ast.unparse(annotation) == "bool"):
            found.add(name)
    for method in methods(node):
        for n in ast.walk(method):
            if isinstance(n, (ast.Assign, ast.AnnAssign)) and is_boolean(n.value):
                found |= {a.attr for a in targets(n) if isinstance(a, ast.Attribute)}
    return found & changing(node)


def several_booleans() -> Iterator[str]:
    """At most one boolean of an object changes: states that exclude each other have names."""
    for module, name, node in definitions(ast.ClassDef):
        if len(changing_booleans(node)) > 1:
            yield f"{module}:{name}"


TORCHS_ITEMS = {
    "state",
    "param_groups",
}  # of `torch.optim` optimizers, which a step and a load change


def made_here(node: ast.FunctionDef) -> set[str]:
    """Give the names of objects that `__new__` makes, whose attributes it sets."""
    if node.name != "__new__":
        return set()
    assigns = [n for n in ast.walk(node) if isinstance(n, (ast.Assign, ast.AnnAssign))]
    makes = [
        n
        for n in assigns
        if isinstance(n.value, ast.Call) and "cls" in map(ast.unparse, n.value.args)
    ]
    return {t.id for n in makes for t in targets(n) if isinstance(t, ast.Name)}


def written_items(node: ast.AST) -> Iterator[ast.Attribute]:
    """Give every attribute one of whose items is assigned or deleted below a node."""
    for n in ast.walk(node):
        found: list[ast.expr] = list(n.targets) if isinstance(n, ast.Delete) else []
        if isinstance(n, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.For)):
            found = [*targets(n)]
        for target in found:
            inside = target
            while isinstance(inside, ast.Subscript):
                inside = inside.value
            if isinstance(inside, ast.Attribute) and (
                inside is not target or isinstance(n, ast.Delete)
            ):
                yield inside


def set_by_name(node: ast.AST) -> Iterator[str]:
    """Give the objects whose attributes `setattr` or `delattr` writes below a node."""
    for n in ast.walk(node):
        if isinstance(n, ast.Call) and n.args:
            called = ast.unparse(n.func).removeprefix("object.").strip("_")
            if called in ("setattr", "delattr"):
                yield ast.unparse(n.args[0])


def foreign_assignments() -> Iterator[str]:
    """No function assigns an attribute of another object of ours, an item of one, or one by `setattr`."""
    ours = set()
    for _, _, node in definitions(ast.ClassDef):
        ours |= {a.attr for m in methods(node) for a in assigned(m) if owner(a) == "self"}
        names = [
            t for n in node.body if isinstance(n, (ast.Assign, ast.AnnAssign)) for t in targets(n)
        ]
        ours |= {t.id for t in names if isinstance(t, ast.Name)}
    for module, name, node in definitions(FUNCTIONS):
        own = {"self", "cls"} | made_here(node)
        for a in assigned(node):
            if owner(a) not in own and a.attr in ours - TORCHS:
                yield f"{module}:{name} {ast.unparse(a)}"
        for a in written_items(node):
            if owner(a) not in own and a.attr in ours - TORCHS_ITEMS:
                yield f"{module}:{name} {ast.unparse(a)}[...]"
        for other in set_by_name(node):
            if other not in own:
                yield f"{module}:{name} setattr({other}, ...)"


def held_by_others(value: ast.AST | None, own: set[str], held: set[str]) -> str:
    """Give the expression of a collection, or of an item of one, that another object holds; "" if it is none."""
    while isinstance(value, ast.Subscript):
        value = value.value
    if isinstance(value, ast.Attribute) and owner(value) not in own and value.attr in held:
        return ast.unparse(value)
    return ""


def names_for_held(node: ast.AST, own: set[str], held: set[str]) -> dict[str, str]:
    """Give the local names of a function for collections that other objects hold."""
    found = {}
    for n in ast.walk(node):
        if isinstance(n, (ast.Assign, ast.AnnAssign, ast.NamedExpr)):
            for target in targets(n):
                if isinstance(target, ast.Name) and held_by_others(n.value, own, held):
                    found[target.id] = held_by_others(n.value, own, held)
    return found


def changed_collections(node: ast.AST) -> Iterator[ast.expr]:
    """Give what a call of a changing method, an assignment of an item or `del` changes below a node.

    The value of `add` or `append` is `None`: a call whose value is kept is a method of ours."""
    kept = {id(n.value) for n in ast.walk(node) if isinstance(n, (ast.Assign, ast.Return))}
    for n in ast.walk(node):
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute):
            returns = n.func.attr.startswith(("pop", "setdefault"))
            if n.func.attr in CHANGES and (returns or id(n) not in kept):
                yield n.func.value
        elif isinstance(n, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.For)):
            yield from (t for t in targets(n) if isinstance(t, ast.Subscript))
        elif isinstance(n, ast.Delete):
            yield from (t for t in n.targets if isinstance(t, ast.Subscript))


def foreign_changes() -> Iterator[str]:
    """No code outside a class changes a list, dict or set that its objects hold: their methods do.

    A name for such a collection is followed inside the function that gives it."""
    held = set().union(*(collections_of(node) for _, _, node in definitions(ast.ClassDef)))
    held -= TORCHS_ITEMS
    for module, name, node in definitions(FUNCTIONS):
        own = {"self", "cls"} | made_here(node)
        names = names_for_held(node, own, held)
        for changed in changed_collections(node):
            what = held_by_others(changed, own, held)
            while isinstance(changed, ast.Subscript):
                changed = changed.value
            what = what or names.get(ast.unparse(changed), "")
            if what:
                yield f"{module}:{name} {what}"


def shared_names() -> Iterator[str]:
    """A name at the top of a module is at the top of no other."""
    places = defaultdict(set)
    for module, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
                places[node.name].add(module)
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                for target in targets(node):
                    if isinstance(target, ast.Name) and not target.id.startswith("__"):
                        places[target.id].add(module)
    for name, modules in places.items():
        if len(modules) > 1:
            yield f"{name}: {', '.join(sorted(modules))}"


def names_of_modules() -> Iterator[str]:
    """No function or class has the name of a module, which an import would hide or find in its place."""
    modules = {module.split(".")[-1] for module in TREES}
    for module, tree in TREES.items():
        for node in tree.body:
            named_so = isinstance(node, (*FUNCTIONS, ast.ClassDef)) and node.name in modules
            if named_so:
                yield f"{module}:{node.name}"


def parts(statement: ast.stmt) -> Iterator[ast.AST]:
    """Give the nodes of a statement, without those of the statements inside it."""
    for node in ast.iter_child_nodes(statement):
        if isinstance(node, (ast.stmt, ast.excepthandler, ast.match_case)):
            continue
        yield node
        yield from parts(node)


def crowded(tree: ast.AST) -> Iterator[ast.stmt]:
    """Give the statements below a node that hold more than two comprehensions or conditional expressions."""
    for node in ast.walk(tree):
        is_whole = isinstance(node, ast.stmt) and not isinstance(node, (*FUNCTIONS, ast.ClassDef))
        if is_whole and sum(isinstance(part, CHOICES) for part in parts(node)) > 2:
            yield node


def crowded_statements() -> Iterator[str]:
    """A statement holds at most two comprehensions or conditional expressions."""
    for module, tree in TREES.items():
        yield from (f"{module}:{node.lineno}" for node in crowded(tree))


def crowded_tests() -> Iterator[str]:
    """So it is in tests."""
    for path in sorted(TESTS.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        yield from (f"{path.relative_to(TESTS)}:{node.lineno}" for node in crowded(tree))


def cells_of_notebooks() -> Iterator[tuple[str, str, str]]:
    """Give the place, the kind and the text of each cell."""
    paths = [p for p in (ROOT / "nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts]
    for path in paths:
        for number, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
            yield f"{path.stem}[{number}]", cell["cell_type"], "".join(cell["source"])


def crowded_cells() -> Iterator[str]:
    """So it is in the cells of notebooks that are not exported."""
    for place, kind, text in cells_of_notebooks():
        if kind != "code" or re.match(r"%%|#\|\s*export", text):
            continue
        tree = ast.parse(re.sub(r"^\s*[%!].*", "", text, flags=re.M))
        yield from (f"{place}:{node.lineno}" for node in crowded(tree))


BY_1024 = re.compile(r"/ ?(?:2 ?\*\* ?[1-4]0|1024|MIB)\b|>> ?[1-4]0\b")
BY_1000 = re.compile(r"/ ?(?:1e(?:3|6|9|12)|10 ?\*\* ?(?:3|6|9|12)|1_?000(?:_000)*)\b")
UNIT = re.compile(r"(?<![A-Za-z\d_])([kKMGT])(i?)B\b")  # as a word: 24GB is a value of an option


def wrong_units(kind: str, text: str) -> set[str]:
    """Give the units of a cell that are not what its code divides by: MiB are 2**20 bytes, MB 10**6; KB is neither."""
    thousands, twos = (kind == "code" and by.search(text) for by in (BY_1000, BY_1024))
    sizes = re.search(r"<< ?[1-4]0\b", text)  # of what is there, in MiB
    wrong = {"": twos and not thousands, "i": thousands and not twos and not sizes}
    found = UNIT.findall(text)
    return {f"{letter}{i}B" for letter, i in found if wrong[i] or letter + i == "K"}


def units_of_another_size() -> Iterator[str]:
    """Bytes over 2**20 are MiB, bytes over 10**6 are MB, and so on."""
    for place, kind, text in cells_of_notebooks():
        yield from (f"{place}: {unit}" for unit in sorted(wrong_units(kind, text)))


def paired_assignments() -> Iterator[str]:
    """A statement assigns one thing, but where it exchanges values."""
    for module, name, node in definitions(FUNCTIONS):
        inner = {id(n) for _, f in named(node) for n in ast.walk(f)}
        for n in ast.walk(node):
            if not isinstance(n, ast.Assign) or id(n) in inner or len(n.targets) > 1:
                continue
            if isinstance(n.targets[0], ast.Tuple) and isinstance(n.value, ast.Tuple):
                left = {ast.unparse(t) for t in n.targets[0].elts}
                right = {ast.unparse(v) for v in ast.walk(n.value) if isinstance(v, ast.expr)}
                if not left & right:
                    yield f"{module}:{name}"
                    break


def swallowed_options() -> Iterator[str]:
    """A public function spells its keyword arguments out."""
    for module, name, node in definitions(FUNCTIONS):
        public = not any(part.startswith("_") for part in name.split("."))
        passes_on = node.args.vararg is not None  # the arguments of a function that it calls
        if public and node.args.kwarg is not None and not passes_on and "." not in name:
            yield f"{module}:{name} **{node.args.kwarg.arg}"


def patched() -> Iterator[str]:
    """No exported method is added to a class from outside."""
    for module, name, node in definitions(FUNCTIONS):
        if any("patch" in ast.unparse(d) for d in node.decorator_list):
            yield f"{module}:{name}"


def functions_by_reference() -> dict[str, set[str]]:
    """Give, of each module, how its text refers to functions of ours: its own, imported, or of an imported module."""
    tops = {
        module: {node.name for node in tree.body if isinstance(node, FUNCTIONS)}
        for module, tree in TREES.items()
    }
    found = {}
    for module, tree in TREES.items():
        found[module] = set(tops[module])
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom):
                continue
            room = module.split(".")[0] if node.level == 1 else ""
            origin = ".".join(filter(None, [room, (node.module or "").removeprefix("zero_nb.")]))
            for alias in node.names:
                name, whole = alias.asname or alias.name, f"{origin}.{alias.name}"
                found[module] |= {name} if alias.name in tops.get(origin, ()) else set()
                found[module] |= {f"{name}.{function}" for function in tops.get(whole, ())}
    return found


def bound_functions() -> Iterator[str]:
    """A class defines its methods: it binds no function from outside, which readers and type checkers lose."""
    functions = functions_by_reference()
    for module, name, node in definitions(ast.ClassDef):
        for statement in node.body:
            if isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None:
                value = ast.unparse(statement.value)
                if value in functions[module]:
                    yield f"{module}:{name} {ast.unparse(statement)}"


# Where methods are bound to a class at the top of a module, and why.
BOUND_IN_LOOPS = {
    "comm.recording:_PassingGroup": "passes on every collective that torch's ProcessGroup has",
    "comm.simulation:_Alone": "answers every collective that torch's ProcessGroup has",
    "comm.tape:RecordedWork": "passes on what torch's Work has, more in newer versions",
}


def top_statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """Give the statements that run when a module is imported, but for those of functions and classes."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.stmt) and not isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            yield node
            yield from top_statements(node)


def bound_at_the_top() -> Iterator[str]:
    """No module binds attributes of a class beside it, by `setattr` or by assignment."""
    for module, tree in TREES.items():
        found = set()
        for node in top_statements(tree):
            found |= {owner(t) for t in targets(node) if isinstance(t, ast.Attribute)}
            calls = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
            found |= set(set_by_name(node)) if calls else set()
        yield from (f"{module}:{n}" for n in found if f"{module}:{n}" not in BOUND_IN_LOOPS)


# Properties made of a lambda, which a type checker takes for `Any`, and why they stay.
PROPERTIES_WITHOUT_TYPE = {
    "backward.data_parallelism:DataParallel join_device": "the class has its 150 lines",
    "backward.data_parallelism:DataParallel join_process_group": "the same",
    "optim.optimizer:ZeroRedundancyOptimizer history": "the chapter has its 400 lines of code",
    "optim.pieces:Piece numel": "the same",
}


def properties_without_type() -> Iterator[str]:
    """A property is a decorated method, whose result has a type; of a lambda it would be `Any` to a type checker."""
    for module, name, node in definitions(ast.ClassDef):
        for statement in node.body:
            value = getattr(statement, "value", None)
            if not isinstance(value, ast.Call):
                continue
            made = ast.unparse(value.func).split(".")[-1] in ("property", "cached_property")
            lambdas = any(isinstance(n, ast.Lambda) for n in ast.walk(value))
            for target in targets(statement) if made and lambdas else ():
                place = f"{module}:{name} {ast.unparse(target)}"
                if place not in PROPERTIES_WITHOUT_TYPE:
                    yield place


def long_test_files() -> Iterator[str]:
    """A test file has at most 700 lines."""
    for path in sorted(TESTS.glob("test_*.py")):
        if len(path.read_text(encoding="utf-8").splitlines()) > 700:
            yield path.name


def docstring_length(node: ast.AST) -> int:
    """Give the lines of a function's docstring."""
    return length(node.body[0]) if ast.get_docstring(node) is not None else 0


def long_test_functions() -> Iterator[str]:
    """A function of the tests has at most 40 lines, with the functions inside it, beside decorators and docstring."""
    for path in sorted(TESTS.rglob("*.py")):
        for name, node in named(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, FUNCTIONS) and length(node) - docstring_length(node) > 40:
                yield f"{path.relative_to(TESTS)}:{name}"


RULES = (
    deep_classes,
    long_functions,
    long_classes,
    many_attributes,
    several_booleans,
    foreign_assignments,
    foreign_changes,
    shared_names,
    names_of_modules,
    units_of_another_size,
    crowded_statements,
    crowded_cells,
    crowded_tests,
    paired_assignments,
    swallowed_options,
    patched,
    bound_functions,
    bound_at_the_top,
    properties_without_type,
    long_test_files,
    long_test_functions,
)
