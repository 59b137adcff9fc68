"""Process groups that do not have every collective."""

import torch
import torch.distributed as dist
from common import caught_error

from zero_nb.comm.groups import Group
from zero_nb.comm.launch import run
from zero_nb.comm.native import _named


class Few(dist.ProcessGroup if dist.is_available() else object):
    """A backend with nothing but broadcast and all-reduce, made of gloo's."""

    def __init__(self, inner):
        super().__init__(inner.rank(), inner.size())
        self.inner = inner

    def getBackendName(self):
        return "few"

    def allreduce(self, *args):
        return self.inner.allreduce(*args)

    def broadcast(self, *args):
        return self.inner.broadcast(*args)


def with_backend(make):
    """Give the group of a backend that `make` makes of a gloo group."""
    inner = dist.new_group()
    dist.Backend.register_backend("few", lambda *args: make(inner), devices=["cpu"])
    return Group(dist.new_group(backend="few"))


def test_a_backend_with_broadcast_and_all_reduce_only():
    def few():
        g = with_backend(Few)
        flat, whole = torch.full((6,), float(g.group_rank)), torch.arange(7.0)
        g.all_gather(flat)
        g.reduce_scatter(whole, [1, 2, 4])
        return g.backends["cpu"], flat.tolist(), whole.split([1, 2, 4])[g.group_rank].tolist()

    got = run(3, few)
    assert {backend for backend, *_ in got} == {"few"} and all(
        flat == [0, 0, 1, 1, 2, 2] for _, flat, _ in got
    )
    assert [part for *_, part in got] == [[0.0], [3.0, 6.0], [9.0, 12.0, 15.0, 18.0]]


class Grumpy(Few):
    """Refuses the halves in words of its own."""

    calls = 0

    def refuse(self, *args):
        self.calls, _ = self.calls + 1, self.no()

    def no(self):
        raise RuntimeError("not today")

    def __getattribute__(self, name):
        if name.startswith(
            (
                "all_gather_single",
                "_allgather_base",
                "reduce_scatter_single",
                "_reduce_scatter_base",
            )
        ):
            return self.refuse
        return super().__getattribute__(name)


class Tired(Few):
    """Has the halves, and fails at the second."""

    def __init__(self, inner):
        super().__init__(inner)
        self.calls = 0

    def gather(self, *args):
        self.calls += 1
        if self.calls > 1:
            raise RuntimeError("this backend does not support being called twice")
        return (
            self.inner.all_gather_single(*args)
            if hasattr(self.inner, "all_gather_single")
            else self.inner._allgather_base(*args)
        )

    def all_gather_single(self, *args):
        return self.gather(*args)

    def _allgather_base(self, *args):
        return self.gather(*args)


def test_what_a_backend_refuses_is_asked_for_once():
    def refused():
        g, sums = with_backend(Grumpy), []
        for _ in range(3):
            flat = torch.full((6,), float(g.group_rank))
            g.reduce_scatter(flat)
            g.all_gather(flat)
            sums.append(flat.tolist())
        return sums, list(g._traffic.lacks.values())

    assert run(2, refused) == [([[1.0] * 6] * 3, [True, True])] * 2


def test_a_failure_of_what_a_backend_has_is_an_error():
    def fails():
        g = with_backend(Tired)
        return [caught_error(lambda: g.all_gather(torch.ones(4))), list(g._traffic.lacks.values())]

    for (kind, message), lacks in run(2, fails):
        assert (
            kind == "RuntimeError"
            and "all_gather of 4 float32 failed: this backend does not support being called twice"
            in message
            and lacks == [False]
        )


def test_both_spellings_of_torch_are_found():
    class Old:
        def reduce_scatter_tensor():
            return "old"

    class New(Old):
        def reduce_scatter_single():
            return "new"

    assert [_named(m, "reduce_scatter_single", "reduce_scatter_tensor")() for m in (Old, New)] == [
        "old",
        "new",
    ]
