"""The house rules hold, and find what they are for."""

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterator
from unittest.mock import patch

import pytest
from common.house import (
    BOUND_IN_LOOPS,
    FUNCTIONS,
    PROPERTIES_WITHOUT_TYPE,
    ROOT,
    RULES,
    TREES,
    bound_at_the_top,
    changing,
    changing_booleans,
    crowded_statements,
    deep_classes,
    definitions,
    foreign_assignments,
    foreign_changes,
    many_attributes,
    names_of_modules,
    parsed,
    properties_without_type,
    several_booleans,
    wrong_units,
)

pytestmark = pytest.mark.xdist_group("house")  # one worker of `make quick` parses the modules


@pytest.fixture(scope="module", autouse=True)
def trees() -> Iterator[None]:
    """Hold the trees while these tests run: ranks of other tests are forked, and 50 MB more take them longer."""
    TREES.update(parsed())
    yield
    TREES.clear()


@pytest.mark.daily
@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.__name__)
def test_house_rule(rule):
    assert sorted(rule()) == [], rule.__doc__


def test_groups_have_types():
    """What is accepted as a process group has a type: `GroupLike`, `GroupsLike`, or torch's own."""
    untyped = set()
    for module, name, node in definitions(FUNCTIONS):
        public = not any(part.startswith("_") and part != "__init__" for part in name.split("."))
        arguments = [*node.args.args, *node.args.kwonlyargs]
        groups = [a for a in arguments if a.arg in ("group", "process_group") and a.annotation]
        if public and not module.startswith("apps.") and any(map(is_any, groups)):
            untyped.add(f"{module}:{name}")
    # a param group; and DDP's group, which torch types as if it were never None
    assert untyped == {
        "optim.arguments:read_group",
        "backward.comm_hook:CommHookSwitch.__init__",
    }


def test_functions_in_the_table_of_contributing_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.split("## Where a gradient becomes a step")[1].split("\n## ")[0]
    named_there = set(re.findall(r"`(\w+)/(\w+):([\w.]+)`", table))
    ours = {(*module.split("."), name) for module, name, _ in definitions(FUNCTIONS)}
    assert len(named_there) > 30 and named_there - ours == set()


ANY_LIMITS = {
    "plan": 8,
    "comm": 23,
    "optim": 51,
    "backward": 39,
    "join": 62,
    "checkpoint": 51,
    "verify": 24,
    "integrations": 16,
    "apps": 15,
}  # bare `Any` in the signatures of public functions, by folder


def is_any(argument: ast.arg) -> bool:
    """Whether a parameter is typed as a bare `Any`."""
    return isinstance(argument.annotation, ast.Name) and argument.annotation.id == "Any"


def bare_any(node: ast.FunctionDef) -> int:
    """Count the parameters and results of a function that are typed as a bare `Any`."""
    arguments = node.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    types = [argument.annotation for argument in every] + [node.returns]
    return sum(isinstance(t, ast.Name) and t.id == "Any" for t in types)


def test_bare_any_in_public_signatures_gets_no_more():
    """Lower a limit when types have taken the place of some; `Any` is right for what a user's code gives or gets."""
    found = Counter()
    for module, name, node in definitions(FUNCTIONS):
        if not any(part.startswith("_") and part != "__init__" for part in name.split(".")):
            found[module.split(".")[0]] += bare_any(node)
    assert {room: n for room, n in found.items() if n > ANY_LIMITS[room]} == {}, (
        f"limits {ANY_LIMITS}"
    )


def found(rule: Callable[[], Iterator[str]], **texts: str) -> list[str]:
    """Give what a rule finds in modules of these texts, whose names have `_` for a dot."""
    trees = {name.replace("_", "."): ast.parse(text) for name, text in texts.items()}
    with patch.dict(TREES, trees, clear=True):
        return sorted(rule())


LADDER = "class A: ...\nclass B(A): ...\n"


@pytest.mark.parametrize(
    ("text", "deep"),
    [
        ("from .one import B\nclass C(B): ...", True),
        ("from ..room.one import B as D\nclass C(D[int]): ...", True),
        ("from . import one\nclass C(one.B): ...", True),
        ("from .. import room\nclass C(room.one.B): ...", True),
        ("from .one import A\nclass D: ...\nclass C(A, D): ...", True),  # two of ours
        ("from .one import A\nclass C(A, dict): ...", False),
        ("from . import one\nclass C(one.A): ...", False),
        ("from typing import Protocol\nfrom .one import B\nclass C(B, Protocol): ...", False),
        ("from other.one import B\nclass C(B): ...", False),
    ],
)
def test_a_class_of_ours_above_another_is_found_by_any_of_its_names(text, deep):
    assert found(deep_classes, room_one=LADDER, room_two=text) == ["room.two:C"] * deep


OURS = "class Box:\n    kept = False\n    def __init__(self):\n        self.x = 0\n        self.items = {}\n"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("def f(o):\n    o.x = 1", "f o.x"),
        ("def f(o):\n    o.kept = True", "f o.kept"),
        ("def f(o):\n    setattr(o, 'x', 1)", "f setattr(o, ...)"),
        ("def f(o):\n    object.__setattr__(o, 'x', 1)", "f setattr(o, ...)"),
        ("def f(o):\n    o.items[1] = 2", "f o.items[...]"),
        ("def f(o):\n    o.items[1][2] += 2", "f o.items[...]"),
        ("def f(o):\n    del o.items[1]", "f o.items[...]"),
        ("class C:\n    def __init__(self, o):\n        o.x = self", "C.__init__ o.x"),
        ("class C:\n    def __new__(cls, o):\n        o.x = 1", "C.__new__ o.x"),
        ("class C:\n    def __new__(cls):\n        m = super().__new__(cls)\n        m.x = 1", ""),
        ("class C:\n    def __init__(self):\n        self.x = self.items[1] = 2", ""),
        ("class C:\n    def f(self):\n        object.__setattr__(self, 'x', 1)", ""),
        ("def f(o):\n    o.unknown = 1\n    o[1] = 2\n    o.grad = None", ""),
    ],
)
def test_an_assignment_to_another_object_is_found_in_any_form(text, what):
    assert found(foreign_assignments, room_one=OURS, room_two=text) == [f"room.two:{what}"] * bool(
        what
    )


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("def f(o):\n    o.items.update(a=1)", "f o.items"),
        ("def f(o):\n    return o.items.pop(1)", "f o.items"),
        ("def f(o):\n    o.x.items[1].append(2)", "f o.x.items"),
        ("def f(o):\n    found = o.items\n    found.clear()", "f o.items"),
        ("def f(o):\n    found = o.items\n    found[1] = 2", "f o.items"),
        ("def f(o):\n    found = o.items\n    del found[1][2]", "f o.items"),
        ("def f(o):\n    if found := o.items[1]:\n        found.add(2)", "f o.items"),
        ("class C:\n    def f(self):\n        self.o.items.clear()", "C.f self.o.items"),
        ("class C:\n    def f(self):\n        self.items.clear()\n        self.items[1] = 2", ""),
        ("def f(o):\n    found = [*o.items]\n    found.append(1)", ""),
        (
            "def f(o):\n    record = o.items.add(1)",
            "",
        ),  # `add` of a class of ours: it gives something
        ("def f(o):\n    o.state.pop(1)\n    o.unknown.append(1)", ""),
    ],
)
def test_a_change_of_what_another_object_holds_is_found_in_any_form(text, what):
    assert found(foreign_changes, room_one=OURS, room_two=text) == [f"room.two:{what}"] * bool(what)


CHANGING = """
class Box:
    known: set[int]
    words: dict[str, int] = field(default_factory=dict)
    def __init__(self, helper):
        self.rows = []
        self.helper = helper
        self.untouched = []
        self.untouched.append(1)
    def f(self):
        self.a = self.b = 1
        self.c[1] = 2
        del self.d[1:], self.e
        self.rows.append(1)
        self.known.add(self.untouched[0])
        self.words.update(a=1)
        self.helper.add(1)
        self.helper.rows.append(1)
"""


def test_a_collection_changes_with_what_is_in_it():
    node = ast.parse(CHANGING).body[0]
    assert changing(node) == {"a", "b", "c", "d", "e", "rows", "known", "words"}
    many = "class C:\n    def f(self):\n" + "".join(f"        self.x{i} = 1\n" for i in range(10))
    assert found(many_attributes, room_one=many) == []
    more = f"{many}        self.rows[0] = 1\n"
    assert found(many_attributes, room_one=more) == ["room.one:C"]


TWO_BOOLEANS = """
class Box:
    a = False
    b: bool
    fixed = True
    def __init__(self, b):
        self.b = b
        self.number = 0
        self.made = True
    def f(self, more):
        self.a = True
        self.b |= more
        self.number += 1 < 2
        self.c = not more
        self.d = self.a and more in (1, 2)
        self.e = more and 1
"""


def test_booleans_that_change_are_found_by_their_values():
    node = ast.parse(TWO_BOOLEANS).body[0]
    assert changing_booleans(node) == {"a", "b", "c", "d"}
    assert found(several_booleans, room_one=TWO_BOOLEANS) == ["room.one:Box"]


@pytest.mark.parametrize(
    ("text", "whether"),
    [
        ("class C: ...\nfor n in names:\n    if n:\n        setattr(C, n, f)", True),
        ("class C: ...\nC.f = f", True),
        ("class C:\n    def f(self):\n        self.x = 1\nx = C()", False),
        ("def f(o):\n    setattr(o, n, 1)", False),
    ],
)
def test_a_method_bound_at_the_top_of_a_module_is_found(text, whether):
    assert found(bound_at_the_top, room_one=text) == ["room.one:C"] * whether


def test_exceptions_for_bound_methods_are_needed():
    with patch.dict(BOUND_IN_LOOPS, clear=True):
        needed = set(bound_at_the_top())
    assert needed == set(BOUND_IN_LOOPS)


PROPERTIES = """
class Box:
    a = property(lambda self: 1, doc="One.")
    b: int = functools.cached_property(lambda self: 2)
    c = property(operator.itemgetter(0))
    @property
    def d(self) -> int:
        return 1
"""


def test_a_property_of_a_lambda_is_found():
    assert found(properties_without_type, room_one=PROPERTIES) == [
        "room.one:Box a",
        "room.one:Box b",
    ]


def test_exceptions_for_properties_are_needed():
    with patch.dict(PROPERTIES_WITHOUT_TYPE, clear=True):
        needed = set(properties_without_type())
    assert needed == set(PROPERTIES_WITHOUT_TYPE)


@pytest.mark.parametrize(
    "text",
    [
        "x = [i for i in a], [i for i in b], [i for i in c]",
        "class C:\n    x = {i: [j if j else 0 for j in i] for i in a}",
        "def f():\n    return [i for i in a], [i for i in b], [i for i in c]",
        "if [i for i in a] and [i for i in b] and [i for i in c]:\n    pass",
    ],
)
def test_a_crowded_statement_is_found_wherever_it_is(text):
    assert len(found(crowded_statements, room_one=text)) == 1
    fewer = text.replace("[i for i in c]", "c").replace("j if j else 0", "j")
    assert found(crowded_statements, room_one=fewer) == []


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ('f"{n / 2**20:.1f} MB"', {"MB"}),
        ('f"{n >> 30} GB"', {"GB"}),
        ('f"{n / 1e6:.1f} MiB"', {"MiB"}),
        ('f"{n / 1000} KiB"', {"KiB"}),
        ('f"{n / 2**20:.1f} MiB"', set()),
        ('f"{n / 1e6:.1f} MB"', set()),
        ('f"{n / 2**30:.1f} GiB fit in 80GB"', set()),  # a value of an option
        ("# 12 KB", {"KB"}),
    ],
)
def test_a_unit_of_another_size_is_found(text, wrong):
    assert wrong_units("code", text) == wrong
    assert wrong_units("markdown", text) == wrong & {"KB"}


def test_a_function_with_the_name_of_any_module_is_found():
    text = "def one(): ...\nclass two: ...\ndef three(): ..."
    names = found(names_of_modules, room_one=text, hall_two="")
    assert names == ["room.one:one", "room.one:two"]
    assert found(names_of_modules, room_moves="def moves(): ...") == ["room.moves:moves"]
    assert found(names_of_modules, room_moves="", hall_two="def moves(): ...") == ["hall.two:moves"]
