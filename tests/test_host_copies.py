"""What lies on another device and travels over gloo: copies on the CPU move, no other memory."""

import pytest
import torch
import torch.distributed as dist
from common import flatten
from common.gloo_calls import DTYPES, differing, pretend, results, trained
from common.modes import MODES

from zero_nb.comm.groups import Group
from zero_nb.comm.launch import run
from zero_nb.comm.native import unserved
from zero_nb.comm.recording import record
from zero_nb.optim.driver import check_backends


def copied(dtypes, recorded):
    """Run every call on the CPU, and then as if its tensors lay elsewhere."""
    wanted = [results("cpu", dtype) for dtype in dtypes]
    copies, moved = pretend()
    got = [results("cpu", dtype, recorded) for dtype in dtypes]
    assert moved and copies.issuperset(moved), "memory of a caller was moved"
    return [differing(*pair) for pair in zip(wanted, got, strict=True)]


@pytest.mark.turns(3)
@pytest.mark.parametrize("dtypes", [DTYPES[:3], DTYPES[3:]], ids=str)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_call_gives_what_it_gives_on_the_cpu(way, ranks, dtypes):
    assert run(ranks, copied, dtypes, False) == [[[]] * len(dtypes)] * ranks


def test_a_group_that_records_copies_too():
    assert run(2, copied, DTYPES[:1], True) == [[[]]] * 2


def relayed(dtypes):
    from zero_nb.comm import relays

    relays._host = lambda: f"{dist.get_rank() // 2:08x}"
    return copied(dtypes, False)


def test_copies_are_passed_on_from_host_to_host(monkeypatch):
    monkeypatch.setenv("ZERO_NB_MEMORY", "0")
    assert run(4, relayed, DTYPES[:1]) == [[[]]] * 4


def arrive_late():
    """Look at tensors between the start of a collective and `wait`."""
    copies, _ = pretend()
    group = Group()
    x, y = torch.ones(6) * (group.group_rank + 1), torch.full((6,), float(group.group_rank + 1))
    works = [group.reduce_scatter(x, [2, 4], async_op=True), group.all_gather(y, async_op=True)]
    before = x.tolist(), y.tolist()
    x[:], y[:] = -1.0, -2.0  # what was sent has left
    for work in works:
        work.wait()
    return before, x.tolist(), y.tolist(), len(copies)


def test_only_what_arrives_is_written():
    found = run(2, arrive_late)
    assert [before for before, *_ in found] == [([n] * 6, [n] * 6) for n in (1.0, 2.0)]
    assert found[0][1:] == ([3.0, 3.0, -1.0, -1.0, -1.0, -1.0], [-2.0] * 3 + [2.0] * 3, 2)
    assert found[1][1:] == ([-1.0, -1.0, 3.0, 3.0, 3.0, 3.0], [1.0] * 3 + [-2.0] * 3, 2)


def parameters_travel():
    """Move parameters, which autograd watches, and whose values a graph has saved."""
    pretend()
    group = Group()
    p = torch.nn.Parameter(torch.ones(4) * (group.group_rank + 1))
    loss = (p * p).sum()
    group.all_gather(p)
    loss.backward()  # no version was counted, as with messages between CPUs
    group.reduce_scatter(p)
    group.exchange([(p[:2], 1 - group.group_rank)], [(p[2:], 1 - group.group_rank)])
    return p.is_leaf, p.grad.tolist()


def test_parameters_travel_apart_from_autograd():
    assert run(2, parameters_travel) == [(True, [2.0, 2.0, 4.0, 4.0])] * 2


def noted_relay():
    """Start a relayed reduce-scatter of a tensor with gaps, and give what may have parts to pass on."""
    from zero_nb.comm import relays
    from zero_nb.comm.work import _UNFINISHED

    relays._host = lambda: f"{dist.get_rank() // 2:08x}"
    group = Group()
    x, y = torch.ones(8)[::2], torch.ones(4)
    counts = []
    for tensor in (x, y):
        work = group.reduce_scatter(tensor, relay=True, async_op=True)
        counts.append(len(_UNFINISHED))
        work.wait()
        _UNFINISHED.clear()
    return counts


def test_a_copy_of_a_tensor_with_gaps_is_passed_on(monkeypatch):
    monkeypatch.setenv("ZERO_NB_MEMORY", "0")
    assert run(4, noted_relay) == [[1, 1]] * 4


def refused():
    """Use a group that serves a device by gloo, and the CPU not at all."""
    group = Group()
    group.backends = {"meta": "gloo"}
    x, said = torch.empty(4, device="meta"), []
    for call in (
        lambda: group.all_gather(x),
        lambda: group.send(x, 1 - group.group_rank),
        lambda: check_backends(group, [x]),
    ):
        with pytest.raises(ValueError, match="initialize the process group with") as caught:
            call()
        said.append(str(caught.value))
    return said


def test_gloo_without_a_backend_for_the_cpu_is_refused_on_all_ranks():
    for said in run(2, refused):
        assert all("backend='gloo' or 'cpu:gloo,meta:gloo'" in text for text in said), said


def test_the_backends_that_torch_gives_to_gloo():
    def served(backends):
        group = Group(dist.new_group(backend=backends))
        return [bool(unserved(group, torch.device(device))) for device in ("cpu", "cuda:0", "meta")]

    for backends, wanted in {
        None: [False, False, True],
        "cpu:gloo,cuda:gloo": [False, False, True],
        "cuda:gloo": [True, True, True],
    }.items():
        assert run(2, served, backends) == [wanted] * 2


def every_mode(nodes):
    """Train by DDP, and then in every mode as if all tensors lay elsewhere; give the largest gaps."""
    wanted = flatten(trained("cpu", nodes=nodes))
    copies, moved = pretend()
    gaps = {}
    for mode in MODES:
        got = flatten(trained("cpu", mode, nodes))
        gaps[mode] = (got - wanted).abs().max().item()
    assert moved and copies.issuperset(moved), "memory of a caller was moved"
    return {mode: gap for mode, gap in gaps.items() if not gap < 1e-9}


@pytest.mark.parametrize(("ranks", "nodes"), [(2, False), (3, False), (4, True)])
def test_every_mode_learns_what_ddp_learns(ranks, nodes):
    assert run(ranks, every_mode, nodes) == [{}] * ranks


def logged(elsewhere):
    """Record a reduce-scatter and an all-gather."""
    if elsewhere:
        pretend()
    recording = record()
    group = Group(recording)
    x = torch.ones(6)
    group.reduce_scatter(x, [2, 4])
    group.all_gather(x, [2, 4])
    return [(event.kind, event.bytes, event.wire) for event in recording.log]


def test_a_log_shows_the_same(way):
    assert run(2, logged, True) == run(2, logged, False)
