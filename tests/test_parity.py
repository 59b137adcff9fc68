"""Agreement of values against every way to differ, and parity against every way to be wrong."""

import math
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from common import caught_error, run_each
from torch.distributed.device_mesh import init_device_mesh

from zero_nb import Group, assert_same, run
from zero_nb.comm.recording import record

RANK = dist.get_rank


@dataclass
class Config:
    depth: int
    note: str = ""


def weights(*changes):
    """Give a tensor with some elements changed on rank 1."""
    w = torch.arange(70_000.0).reshape(7, 100, 100)
    for index in changes if RANK() == 1 else ():
        w[index] = -1.0
    return w


def nan(bits):
    return torch.tensor([bits], dtype=torch.int32).view(torch.float32)


# what a rank has, and what the error says on all of them
DIFFERENCES = {
    "a number": (lambda: {"lr": 0.1 + RANK()}, "['lr'] (float): rank 0 has 0.1, rank 1 has 1.1"),
    "a type": (lambda: [1, 2 if RANK() else 2.0], "[1]: rank 0 has float, rank 1 has int"),
    "a flag and a number": (lambda: 1 if RANK() else True, "the value: rank 0 has bool"),
    "the sign of zero": (lambda: -0.0 if RANK() else 0.0, "rank 0 has 0.0, rank 1 has -0.0"),
    "a key": (lambda: {"ab"[RANK()]: 1}, "rank 0 has ['a'] (int), rank 1 has ['b'] (int)"),
    "a missing entry": (lambda: [[1], [2]][: 2 - RANK()], "rank 0 has list of 2, rank 1 has list"),
    "a field": (lambda: Config(3, "ab"[RANK()]), ".note (str): rank 0 has 'a', rank 1 has 'b'"),
    "a long text": (
        lambda: "é" * 500 + "xy"[RANK()] + "z" * 500,
        "the value, character 500 (str of 1001)",
    ),
    "a dtype": (
        lambda: torch.zeros(2, dtype=torch.float64 if RANK() else torch.float32),
        "rank 0 has float32 [2] on cpu, rank 1 has float64 [2] on cpu",
    ),
    "a shape": (lambda: torch.zeros(2, 3 + RANK()), "rank 0 has float32 [2, 3] on cpu"),
    "an element": (
        lambda: [weights((3, 50, 7), (6, 0, 0))],
        "[0][3, 50, 7] (float32 [7, 100, 100] on cpu): rank 0 has 35007.0",
    ),
    "the first element": (lambda: weights((0, 0, 0)), "the value[0, 0, 0]"),
    "the last element": (lambda: weights((6, 99, 99)), "the value[6, 99, 99]"),
    "a transposed one": (lambda: weights((3, 50, 7)).mT, "the value[3, 7, 50]"),
    "of no dimension": (lambda: torch.tensor(float(RANK())), "the value (float32 [] on cpu)"),
    "bits of a nan": (lambda: nan(0x7FC00000 + RANK()), "rank 1 has nan (bits 7fc00001)"),
    "half precision": (
        lambda: torch.ones(9, dtype=torch.bfloat16) * (1 + RANK() / 128),
        "rank 0 has 1.0 (bits 3f80), rank 1 has 1.0078125 (bits 3f81)",
    ),
    "complex": (lambda: torch.full((2,), RANK() * 1j).conj(), "rank 1 has -1j"),
    "a truth value": (lambda: torch.tensor([True, RANK() == 0]), "[1] (bool [2] on cpu)"),
}
SAME = {
    "keys in another order": lambda: dict([("a", 1), ("b", 2)][:: 1 - 2 * (RANK() % 2)]),
    "nan": lambda: [math.nan, nan(0x7FC00000)],
    "strides": lambda: torch.ones(3, 2) if RANK() else torch.ones(2, 3).mT,
    "a set": lambda: set("abc") if RANK() else set("cba"),
    "nothing": lambda: None,
    "no elements": lambda: torch.empty(0, 3),
    "all kinds": lambda: (1, "x", b"y", 1j, torch.float32, Config(1), range(3), {(1, 2): []}),
}
REFUSED = {
    "an object": (object, "TypeError", "[1] is of type object, which cannot be compared"),
    "a module": (lambda: torch.nn.Linear(1, 1), "TypeError", "of a module its state_dict()"),
    "sparse": (lambda: torch.eye(2).to_sparse(), "TypeError", "only dense tensors"),
    "meta": (lambda: torch.empty(2, device="meta"), "TypeError", "meta tensor"),
    "a subclass": (lambda: Tagged([1.0]), "TypeError", "Tagged, whose elements"),
    "a strange key": (lambda: {object(): 1}, "TypeError", "a key of type object"),
    "itself": (lambda: looped(), "ValueError", "it lies in itself"),
}


class Tagged(torch.Tensor):
    """A tensor of a user's class."""


def looped():
    value = []
    value.append(value)
    return value


def compare(make):
    return caught_error(lambda: assert_same(None, make(), "the setup"))


def test_what_differs_is_named_on_all_ranks():
    cases = {name: (make,) for name, (make, _) in DIFFERENCES.items()}
    for name, found in run_each(2, compare, cases).items():
        kind, text = found[0]
        assert found == [(kind, text)] * 2 and kind == "AssertionError", (name, found)
        assert "the setup differs: rank 1 from rank 0, first at " in text, (name, text)
        assert DIFFERENCES[name][1] in text, (name, text)


def test_what_is_the_same_is_no_error():
    cases = {name: (make,) for name, make in SAME.items()}
    assert run_each(3, compare, cases) == {name: [None] * 3 for name in SAME}


@pytest.mark.parametrize("where", [0, 1])
def test_what_cannot_be_compared_is_refused_on_all_ranks(where):
    def one(make):
        return compare(lambda: [0, make() if RANK() == where else 1])

    cases = {name: (make,) for name, (make, *_) in REFUSED.items()}
    for name, found in run_each(2, one, cases).items():
        _, kind, text = REFUSED[name]
        assert [error[0] for error in found] == [kind] * 2, (name, found)
        assert all(text in error[1] for error in found), (name, found)


def test_the_ranks_that_differ_from_most_are_named():
    def several():
        return caught_error(lambda: assert_same(None, {"seed": [7, 1, 1, 7, 1][RANK()]}, "seeds"))

    for _, text in run(5, several):
        assert "seeds differs: ranks 0, 3 from ranks 1, 2, 4, first at ['seed']" in text
        assert "rank 1 has 1, rank 0 has 7" in text


def test_groups_and_meshes_name_global_ranks():
    def inside():
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        value = RANK() == 3
        calls = {
            "group": lambda: assert_same(Group(pairs[RANK() // 2]), value, "it"),
            "torch's": lambda: assert_same(pairs[RANK() // 2], value, "it"),
            "mesh": lambda: assert_same(mesh, value, "it"),
            "line": lambda: assert_same(mesh["b"], value, "it"),
            "same": lambda: assert_same(mesh, 1, "it"),
        }
        return {name: caught_error(call) for name, call in calls.items()}

    ranks = run(4, inside)
    for name in ("group", "torch's", "line"):
        assert [found[name] for found in ranks[:2]] == [None, None]
        assert all("rank 3 from rank 2" in found[name][1] for found in ranks[2:])
    assert all(found["mesh"][0] == "AssertionError" for found in ranks)
    assert all("rank 3" in found["mesh"][1] for found in ranks)
    assert [found["same"] for found in ranks] == [None] * 4


def test_another_call_elsewhere_is_an_error_on_both():
    def apart():
        return caught_error(lambda: assert_same(None, 1, f"the value of rank {RANK()}"))

    for kind, text in run(2, apart):
        assert kind == "ValueError" and "ranks disagree on what comes next" in text


def test_tensors_are_not_sent():
    def traffic():
        group = record()
        large = torch.zeros(4_000_000)
        assert_same(group, large, "zeros")
        same = sum(event.bytes for event in group.log)
        large[-1] = RANK()
        found = caught_error(lambda: assert_same(group, large, "zeros"))
        assert "the value[3999999]" in found[1]
        return same, sum(event.bytes for event in group.log)

    for same, different in run(2, traffic):
        assert 0 < same < 1000 and different < 100_000  # of 16 MB


def test_a_process_alone_agrees_with_itself():
    assert_same(None, {"a": torch.ones(3)}, "it")
    with pytest.raises(TypeError, match="cannot be compared"):
        assert_same(None, object(), "it")
