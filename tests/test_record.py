"""A recorded group does what the group does, and its log is exact."""

import _thread
import inspect
import pickle
import subprocess
import sys
import threading
from datetime import timedelta
from fractions import Fraction
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from common.waiting import wait_for
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.distributed_c10d import _coalescing_manager, _get_process_group_store, _world
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

import zero_nb
from zero_nb.backward.data_parallelism import data_parallel
from zero_nb.backward.ddp_overlap import overlap
from zero_nb.comm.agreement import agree
from zero_nb.comm.groups import Group
from zero_nb.comm.launch import run
from zero_nb.comm.objects import broadcast_object_list, gather_object, scatter_object_list
from zero_nb.comm.payloads import exchange_bytes
from zero_nb.comm.recording import RecordingGroup, record
from zero_nb.comm.simulation import simulate


def share(size: int, nbytes: int, times: int = 1) -> Fraction:
    return Fraction(times * (size - 1) * nbytes, size)


def world() -> list[int]:
    return [
        len(t)
        for t in (
            _world.pg_map,
            _world.pg_names,
            _world.pg_group_ranks,
            _world.pg_backend_config,
            _world.pg_to_tag,
        )
    ]


def collectives(group, async_op):
    """Do every kind of collective; returns all results and what should be in the log."""
    x, works, results = torch.arange(12.0) + 100 * dist.get_rank(group), [], []

    def do(f, result, *args, **kwargs):
        works.append(f(*args, group=group, async_op=async_op, **kwargs))
        results.append(result)

    of_one_tensor(do, group, x)
    of_a_part_for_each_rank(do, group, x)
    works.append(dist.barrier(group, async_op=async_op))
    for work in works:
        if async_op:
            assert isinstance(work, dist.Work)
            work.wait()
    if dist.get_world_size(group) > 1:
        results.append(sent_around(group, x))
    objects = [None] * dist.get_world_size(group)
    dist.all_gather_object(objects, {"rank": dist.get_rank(group)}, group=group)
    return results + objects


def of_one_tensor(do, group, x):
    """All ranks start from a tensor, or end with one; the last one is the root."""
    ranks, t = dist.get_process_group_ranks(group), x.clone()
    do(dist.all_reduce, t, t)
    t = x.clone()
    do(dist.broadcast, t, t, src=ranks[-1])
    t = x.clone()
    do(dist.reduce, t if dist.get_rank(group) == len(ranks) - 1 else None, t, dst=ranks[-1])


def of_a_part_for_each_rank(do, group, x):
    """Each rank has a part of what all have, or one for each of the others."""
    ranks, rank = dist.get_process_group_ranks(group), dist.get_rank(group)
    n = len(ranks)

    def parts():
        return [torch.full((3,), float(10 * rank + k)) for k in range(n)]

    def empty():
        return [torch.zeros(12) for _ in range(n)]

    out = empty()
    do(dist.all_gather, out, out, x.clone())
    flat = torch.zeros(12 * n)
    do(dist.all_gather_into_tensor, flat, flat, x.clone())
    out = torch.zeros(3)
    do(dist.reduce_scatter, out, out, parts())
    out = torch.zeros(3)
    do(dist.reduce_scatter_tensor, out, out, torch.cat(parts()))
    out = torch.zeros(3 * n)
    do(dist.all_to_all_single, out, out, torch.cat(parts()))
    out = empty() if rank == 0 else None
    do(dist.gather, out, x.clone(), out, dst=ranks[0])
    out = torch.zeros(3)
    do(dist.scatter, out, out, parts() if rank == n - 1 else None, src=ranks[-1])


def sent_around(group, x):
    """Send to the next rank, and receive from the one before."""
    ranks, rank, got = dist.get_process_group_ranks(group), dist.get_rank(group), torch.zeros(12)
    ops = [
        dist.isend(x.clone(), ranks[(rank + 1) % len(ranks)], group, 5),
        dist.irecv(got, ranks[rank - 1], group, 5),
    ]
    for op in ops:
        op.wait()
    return got


def same(a, b):
    if isinstance(a, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a.equal(b) if isinstance(a, torch.Tensor) else a == b


def expected_events(n, rank):
    """Give kind, bytes, and bytes on the wire of what `collectives` does."""
    events = [
        ("all_reduce", 48, share(n, 48, 2)),
        ("broadcast", 48, share(n, 48)),
        ("reduce", 48, share(n, 48)),
        ("all_gather", 48 * n, share(n, 48 * n)),
        ("all_gather", 48 * n, share(n, 48 * n)),
        ("reduce_scatter", 12 * n, share(n, 12 * n)),
        ("reduce_scatter", 12 * n, share(n, 12 * n)),
        ("all_to_all", 12 * n, share(n, 12 * n)),
        ("gather", 48 * n, 0 if rank == 0 else 48),
        ("scatter", 12 * n, 12 * (n - 1) if rank == n - 1 else 0),
        ("barrier", 0, 0),
    ]
    return events + ([("send", 48, 48), ("recv", 48, 0)] if n > 1 else [])


def plain_and_recorded(ranks, async_op):
    group = dist.new_group(ranks) if ranks else None
    if ranks and dist.get_rank() not in ranks:
        return None
    plain, before = collectives(group, async_op), world()
    with record(group) as recorded, record(recorded) as twice:
        assert isinstance(recorded, dist.ProcessGroup) and not recorded.simulated
        assert dist.get_process_group_ranks(recorded) == dist.get_process_group_ranks(group)
        assert dist.get_backend(recorded) == "gloo" and str(
            dist.get_backend_config(recorded)
        ) == str(dist.get_backend_config(group))
        seen, again = collectives(recorded, async_op), collectives(twice, async_op)
        logs = recorded.log, twice.log
    assert world() == before
    n, rank = recorded.size(), recorded.rank()
    half = len(logs[0]) // 2
    assert same(plain, seen) and same(plain, again)
    assert str(logs[0][:half]) == str(logs[0][half:]) == str(logs[1])
    assert all(
        e.end is not None and e.end >= e.start and not e.error and e.parent is None for e in logs[0]
    )
    assert {e.site for e in logs[0]} <= {
        f"test_record.py:{k}"
        for k in range(inspect.getsourcelines(collectives)[1], inspect.getsourcelines(same)[1])
    }
    expected = expected_events(n, rank)
    assert [(e.kind, e.bytes, e.wire) for e in logs[1]][: len(expected)] == expected
    return True


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_collective(size, async_op):
    assert run(size, plain_and_recorded, None, async_op) == [True] * size


@pytest.mark.parametrize("ranks", [[2, 3], [3, 1], [1], [3, 0, 2]])
def test_subgroups(ranks):
    assert [r for r in run(4, plain_and_recorded, ranks, True) if r] == [True] * len(ranks)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.unused = (
            nn.ModuleList(nn.Linear(32, 32) for _ in range(4)),
            nn.Linear(8, 8),
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x


HOOKS = {
    "none": None,
    "allreduce": default_hooks.allreduce_hook,
    "fp16": default_hooks.fp16_compress_hook,
}


def python_hook(group, bucket):  # a hook of a user: its line is the call site, its future a chain
    work = dist.all_reduce(bucket.buffer().div_(group.size()), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def trained(kind, hook):
    kwargs = {
        "unused": {"find_unused_parameters": True},
        "static": {"static_graph": True},
        "view": {"gradient_as_bucket_view": True},
    }.get(kind, {})
    outcomes = []
    for group in (dist.group.WORLD, record()):
        torch.manual_seed(0)
        model = Net()
        if kind != "unused":
            del model.unused
        ddp = DDP(model, process_group=group, bucket_cap_mb=0.01, **kwargs)
        if hook:
            ddp.register_comm_hook(group, python_hook if hook == "python" else HOOKS[hook])
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
        for k in range(4):
            torch.manual_seed(10 * k + dist.get_rank())
            ddp(torch.randn(4, 32)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        outcomes.append(torch.cat([p.detach().flatten() for p in ddp.parameters()]))
    log = group.log
    wanted = 4 * 4 * (32 * 32 + 32) * (2 if hook == "fp16" else 4)
    reductions = log.only("all_reduce")
    floats = [e for e in reductions if e.dtype in ("float32", "float16")]
    if kind != "unused":
        assert sum(e.bytes for e in floats) == wanted and sum(e.wire for e in floats) == share(
            group.size(), wanted, 2
        )
    assert len(floats) == {"unused": 8, "static": 6}.get(kind, 7) and all(
        e.end and not e.error for e in log
    ), log.text()
    if hook == "python":
        assert all(
            e.site == f"test_record.py:{inspect.getsourcelines(python_hook)[1] + 1}" for e in floats
        )
    return outcomes[0].equal(outcomes[1])


@pytest.mark.turns(3)
@pytest.mark.parametrize("hook", [None, "allreduce", "fp16", "python"])
@pytest.mark.parametrize("kind", ["plain", "unused", "static", "view"])
def test_ddp_trains_alike(kind, hook):
    assert run(2, trained, kind, hook) == [True, True]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ddp_on_more_ranks(size):
    assert run(size, trained, "plain", None) == [True] * size


def zero_redundancy():
    results = []
    for group in (dist.group.WORLD, record()):
        torch.manual_seed(0)
        ddp = DDP(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), process_group=group)
        optimizer = ZeroRedundancyOptimizer(
            ddp.parameters(), torch.optim.AdamW, process_group=group, lr=0.1
        )
        for _ in range(3):
            ddp(torch.full((2, 16), 1.0 + dist.get_rank())).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.consolidate_state_dict(0)
        results.append(torch.cat([p.detach().flatten() for p in ddp.parameters()]))
    return results[0].equal(results[1]) and group.log.count()["all_reduce"] == 3


def test_torchs_sharded_optimizer():
    assert run(2, zero_redundancy) == [True, True]


def rings(size):
    with record() as pg:
        g = Group(pg)
        x = torch.arange(12 * size, dtype=torch.float32) + g.group_rank
        g.reduce_scatter(x)
        g.all_gather(x)
        agree(g, "the tensor", [str(x.tolist())])
        log = pg.log
    n = 48 * size
    assert log.count() == {"reduce_scatter": 1, "all_gather": 1} and log.bytes() == 2 * n
    assert log.only("send").wire == log.wire == share(size, n, 2)
    assert all(e.parent == log[0].number for e in log[1 : 2 * size - 1]) and all(
        e.parent == log[2 * size - 1].number for e in log[2 * size :]
    )
    assert log[0].start <= log[1].start and log[0].end >= max(e.end for e in log[1 : 2 * size - 1])
    assert str(log).count("\n  send") == 2 * (size - 1)
    return x.equal((torch.arange(12 * size) * size + sum(range(size))).float())


@pytest.mark.parametrize("size", [2, 3, 4])
def test_rings_send_what_the_formula_says(size, monkeypatch):
    monkeypatch.setenv("ZERO_NB_MEMORY", "0")
    assert run(size, rings, size) == [True] * size


def interleaved():
    """Two followed collectives in turn, and one that breaks off."""
    with simulate(4) as pg:

        def steps(n):
            for k in range(n):
                dist.send(torch.ones(n), 1, pg)
                yield
                if k == 2:
                    raise KeyError("broken")

        a, b = pg.follow("one", torch.ones(1), steps(1)), pg.follow("two", torch.ones(1), steps(2))
        next(a), next(b), next(a, None), next(b), next(b, None)
        with pytest.raises(KeyError):
            list(pg.follow("three", torch.ones(1), steps(3)))
        dist.send(torch.ones(1), 1, pg)
        log = pg.log
        assert [(e.kind, e.parent and log[e.parent].kind) for e in log if e.kind != "send"] == [
            ("one", None),
            ("two", None),
            ("three", None),
        ]
        assert [e.parent for e in log] == [None, 0, None, 2, 2, None, 5, 5, 5, None]
        assert [e.error for e in log if e.error] == ["KeyError"] and all(e.end for e in log)
        assert log.wire == 4 * (1 + 2 + 2 + 3 + 3 + 3 + 1)
    return True


def test_followed_collectives_interleave():
    assert interleaved()


def errors():
    with record() as pg:
        before = str(pg.log)
        for error, bad in (
            (RuntimeError, lambda: dist.all_gather([torch.ones(2)] * 2, torch.ones(3), group=pg)),
            (TypeError, lambda: pg.broadcast(3)),
            (TypeError, lambda: pg.allreduce()),
            (RuntimeError, lambda: pg.broadcast(torch.ones(1), 9)),
        ):
            with pytest.raises(error):
                bad()
            assert str(pg.log) == before
        rank = dist.get_rank()
        if rank == 0:  # nobody sends
            work = dist.irecv(torch.ones(3), 1, pg)
            assert pg.log[-1].end is None
            with pytest.raises(RuntimeError):
                work.wait(timedelta(milliseconds=200))
            assert pg.log[-1].error == "RuntimeError" and pg.log[-1].end
    with pytest.raises(RuntimeError, match="closed recording group"):
        pg.allreduce([torch.ones(1)])
    with pytest.raises(ValueError, match="world group"):
        dist.all_reduce(torch.ones(1), group=pg)
    pg.close()
    return True


def test_errors_are_torchs_and_leave_the_log_consistent():
    assert run(2, errors) == [True, True]


def reuse():
    before, names = world(), []
    for _ in range(3):
        pg = record()
        names.append(pg.group_name)
        dist.all_reduce(torch.ones(1), group=pg)
        assert _get_process_group_store(pg) is not _get_process_group_store(dist.group.WORLD)
        dist.destroy_process_group(pg)
        assert world() == before and len(pg.log) == 1
        pg.close()
        pg.close()
    dist.all_reduce(torch.ones(1))  # the wrapped group's backend goes on
    kept = record()
    dist.destroy_process_group()  # the whole job
    assert kept.closed
    kept.close()
    with pytest.raises(RuntimeError, match="init_process_group"):
        record()
    return len(set(names))


def test_closing_and_reusing():
    assert run(2, reuse) == [3, 3]


def some_record():
    pg = record() if dist.get_rank() == 0 else dist.group.WORLD
    x = torch.ones(3)
    dist.all_reduce(x, group=pg)
    return x.tolist()


def test_only_one_rank_records():
    assert run(3, some_record) == [[3.0] * 3] * 3


def views():
    pg = record()
    dist.all_reduce(torch.ones(4), group=pg)
    with pg.recording() as log, pg.recording() as inner:
        work = dist.all_reduce(torch.ones(2, dtype=torch.int64), group=pg, async_op=True)
    work.wait()
    dist.broadcast(torch.ones(1), 0, group=pg)
    assert (len(pg.log), len(log), len(inner)) == (3, 1, 1) and log[0].end and log[0] == pg.log[1]
    assert (
        pg.log.count() == {"all_reduce": 2, "broadcast": 1}
        and pg.log.bytes() == 36
        and pg.log.only("broadcast").bytes() == 4
    )
    assert [e.number for e in pg.log[1:]] == [1, 2] and pickle.loads(pickle.dumps(pg.log)).text(
        sites=True
    ) == pg.log.text(sites=True)
    assert (
        "<td>all_reduce</td>" in pg.log._repr_html_()
        and "all_reduce" in pg.log.timeline()._repr_svg_()
    )
    with _coalescing_manager(pg, async_ops=True) as cm:
        for _ in range(3):
            dist.all_reduce(torch.ones(5), group=pg)
    cm.wait()
    assert (pg.log[-1].tensors, pg.log[-1].bytes) == (3, 60)
    pg.log.clear()
    assert len(pg.log) == 0 and pg.log.wire == 0 and pg.log.timeline()
    return True


def test_views_of_a_log():
    assert run(2, views) == [True, True]


def threads():
    pgs = [record() for _ in range(4)]

    def many(pg):
        for _ in range(50):
            dist.all_reduce(torch.ones(10), group=pg)

    # one thread for each group of its own; the backend below is shared, so only one rank takes part
    alone = [threading.Thread(target=many, args=(pg,)) for pg in pgs]
    for t in alone:
        t.start()
    for t in alone:
        t.join()
    shared = [threading.Thread(target=many, args=(pgs[0],)) for _ in range(4)]
    for t in shared:
        t.start()
    for t in shared:
        t.join()
    numbers = [e.number for e in pgs[0].log]
    ended = all(e.end for pg in pgs for e in pg.log)
    return [len(pg.log) for pg in pgs], ended, numbers == list(range(250))


def test_threads():
    assert run(1, threads) == [([250, 50, 50, 50], True, True)]


def test_simulated_group_is_the_default_one_until_closed():
    assert not dist.is_initialized()
    with simulate(1024, 1000) as pg:
        assert (
            pg.simulated
            and dist.get_rank() == dist.get_rank(pg) == 1000
            and dist.get_world_size() == 1024
        )
        assert (
            dist.get_process_group_ranks(pg) == list(range(1024)) and dist.get_backend(pg) == "fake"
        )
        assert dist.get_global_rank(pg, 5) == 5 and Group().size == 1024
    assert not dist.is_initialized() and world() == [0] * 5 and not _world.tags_to_pg
    with simulate(3):
        pass


def test_simulated_collectives_follow_the_rule():
    with simulate(4, 2) as pg:
        x, n = torch.arange(8.0), 4
        for f in (
            lambda t: dist.all_reduce(t),
            lambda t: dist.broadcast(t, 0),
            lambda t: dist.reduce(t, 0),
            lambda t: dist.recv(t, 1),
        ):
            f(t := x.clone())
            assert t.equal(x)
        dist.all_gather(out := [torch.zeros(8) for _ in range(n)], x)
        assert all(o.equal(x) for o in out)
        g, flat = Group(pg), torch.arange(8.0)
        g.all_gather(flat)
        assert flat.tolist() == [4.0, 5.0] * 4
        g.reduce_scatter(flat := torch.arange(8.0))
        assert flat[4:6].tolist() == [4.0, 5.0]
        g.all_gather(flat := torch.arange(9.0), [2, 1, 2, 4])
        assert flat.tolist() == [3.0, 4.0, 3.0, 3.0, 4.0, 3.0, 4.0, 0.0, 0.0]
        g.reduce_scatter(flat := torch.arange(9.0), [2, 1, 2, 4])
        assert flat[3:5].tolist() == [3.0, 4.0]
        dist.all_to_all_single(out := torch.zeros(8), x)
        assert out.equal(x)
        dist.gather(x, None, dst=0)
        dist.scatter(out := torch.ones(2), None, src=0)
        assert out.tolist() == [1.0, 1.0]
        objects = [None] * 4
        dist.all_gather_object(objects, "me")
        assert objects == ["me"] * 4
        work = dist.all_reduce(x, async_op=True)
        assert (
            work.is_completed()
            and work.is_success()
            and work.get_future().value()[0] is x
            and work.wait()
        )
        dist.barrier()
        assert all(e.end is not None for e in pg.log)


@pytest.mark.parametrize("size", [1, 7, 1024])
def test_ddp_over_a_simulated_group(size):
    with simulate(size) as pg:
        model = nn.Linear(64, 64)
        ddp = DDP(model, process_group=pg, find_unused_parameters=True)
        x = torch.randn(4, 64)
        with pg.recording() as log:
            ddp(x).sum().backward()
        assert torch.allclose(
            model.bias.grad, torch.full((64,), 4 / size)
        )  # the others contributed zeros
        assert log.only("all_reduce")[0].wire == share(size, 4 * (64 * 64 + 64), 2)


@pytest.mark.turns(3)
@pytest.mark.parametrize("way", ["step", "overlap", "interleaved", "parallel"])
@pytest.mark.parametrize("size,rank", [(1, 0), (2, 1), (3, 0), (7, 3), (1000, 17)])
def test_every_way_to_train_runs_over_simulated_ranks_and_moves_what_it_would(size, rank, way):
    with simulate(size, rank) as pg:
        model = nn.Sequential(nn.Linear(33, 47), nn.ReLU(), nn.Linear(47, 5), nn.Linear(5, 301))
        ddp = model if way == "parallel" else DDP(model, process_group=pg)
        zero = zero_nb.ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, pg, lr=0.1)
        if way == "parallel":
            data_parallel(model, zero)
        elif way != "step":
            overlap(ddp, zero, interleaved=way == "interleaved")
        for _ in range(4):  # buckets settle in the second, and state moves
            before = [p.detach().clone() for p in model.parameters()]
            with pg.recording() as log:
                ddp(torch.ones(4, 33)).sum().backward()
                zero.step()
            zero.zero_grad()
        assert any(not p.equal(old) for p, old in zip(model.parameters(), before, strict=True))
        numel = sum(p.numel() for p in model.parameters())
        padded = (
            sum(bucket.sizes.padded for shard in zero.shards for bucket in shard.buckets)
            if size > 1
            else numel
        )
        assert numel <= padded <= numel + 16 * size, (
            "simulated ranks get equal parts, as those of NCCL do"
        )
        assert log.wire == (
            share(size, 4 * numel, 2) if way == "step" else share(size, 4 * padded)
        ) + share(size, 4 * padded)
        zero.consolidate_state_dict(to=rank)
        assert zero.state_dict()["state"]


@pytest.mark.parametrize("rank", [0, 2])
def test_objects_among_simulated_ranks_follow_the_rule(rank):
    with simulate(3, rank) as pg:
        broadcast_object_list(mine := ["mine"], group=pg)
        gather_object("mine", found := [None] * 3 if rank == 0 else None, group=pg)
        scatter_object_list(given := [None], ["a", "b", "c"] if rank == 0 else None, group=pg)
        exchanged = exchange_bytes(Group(pg), {0: b"a", 1: b"bb", 2: b"ccc"}, range(3))
    assert (
        mine == ["mine"]
        and found == (["mine"] * 3 if rank == 0 else None)
        and given == ["a" if rank == 0 else None]
    )
    assert [bytes(exchanged[peer]) for peer in range(3)] == [
        b"a" * (rank == 0),
        b"",
        b"ccc" * (rank == 2),
    ]


def simulated_in_a_job():
    before = world()
    with simulate(16, 5) as pg:
        ok = dist.get_rank(pg) == 5 and sorted(dist.get_process_group_ranks(pg)) == list(range(16))
        dist.all_reduce(torch.ones(1), group=pg)
    dist.all_reduce(x := torch.ones(1))
    return ok and world() == before and x.item() == 2


def test_simulated_inside_a_real_job():
    assert run(2, simulated_in_a_job) == [True, True]


def test_a_collective_that_a_thread_without_callers_starts_is_in_the_log():
    """On a GPU, backward runs in threads of autograd, where Python's stack is the call itself."""
    with simulate(2) as group:
        _thread.start_new_thread(group.allreduce, ([torch.ones(3)],))
        (event,) = wait_for(lambda: list(group.log.events), 20)
        assert (event.kind, event.bytes, event.site) == ("all_reduce", 12, "backward")


@pytest.mark.parametrize(
    ("size", "group_rank", "wrong"),
    [(0, 0, "size must be"), (4, 4, "group_rank must be"), (4, -1, "group_rank must be")],
)
def test_simulating_a_rank_that_is_not_there(size, group_rank, wrong):
    with pytest.raises(ValueError, match=wrong):
        simulate(size, group_rank)
    assert not dist.is_initialized()


def test_importing_needs_no_distributed():
    code = """
import torch.distributed as dist
dist.is_available = lambda: False
import zero_nb
for make in (zero_nb.record, lambda: zero_nb.simulate(2)):
    try: make()
    except RuntimeError as e: assert "without torch.distributed" in str(e) and "\\n" not in str(e)
    else: raise SystemExit("no error")
"""
    assert (
        subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1]).returncode == 0
    )


def test_functions_of_the_package_are_not_hidden_by_modules():
    """Importing a module binds its name in its package, in the place of a function of that name."""
    code = (
        "import importlib, pkgutil, types, zero_nb\n"
        "for module in pkgutil.walk_packages(zero_nb.__path__, 'zero_nb.'):\n"
        "    importlib.import_module(module.name)\n"
        "found = [getattr(zero_nb, name) for name in zero_nb.__all__]\n"
        "assert not [f for f in found if isinstance(f, types.ModuleType)]"
    )
    root = Path(__file__).parents[1]
    assert subprocess.run([sys.executable, "-c", code], cwd=root).returncode == 0


def test_exit_without_closing(starter, tmp_path):
    (ended,) = starter.run("import zero_nb; zero_nb.simulate(8)", tmp_path, size=1)
    assert ended.code == 0, ended


def test_it_is_a_process_group():
    assert issubclass(RecordingGroup, dist.ProcessGroup)


LEAVES = """
import sys, zero_nb
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
group = zero_nb.record()
if rank == 0 or sys.argv[2] == "both": work = dist.all_reduce(torch.ones(1 << 20), async_op=True, group=group)
"""


@pytest.mark.parametrize("who", ["both", "one"])
def test_exit_while_a_collective_is_in_flight(starter, tmp_path, who):
    """Torch's thread calls back while the interpreter is there; that of a rank whose peer never came, too."""
    for job in range(3):
        ranks = starter.run(LEAVES, tmp_path, arguments=(str(tmp_path / str(job)), who))
        assert [rank.code for rank in ranks] == [0, 0], ranks
