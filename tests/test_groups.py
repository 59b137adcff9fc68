"""Groups: how ranks are named, and how groups are made, ended, aborted and left."""

import multiprocessing
import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from common import caught_error
from common.one_collective import start
from common.versions import KEEPS_ORDER
from common.waiting import stop
from torch.distributed.device_mesh import init_device_mesh

from zero_nb.comm.agreement import agree, agreeing
from zero_nb.comm.ending import abort, destroy, fail
from zero_nb.comm.groups import Group
from zero_nb.comm.launch import run
from zero_nb.comm.objects import broadcast_object_list
from zero_nb.comm.ranks import get_global_rank, get_group_rank, get_process_group_ranks
from zero_nb.comm.simulation import simulate
from zero_nb.comm.subgroups import clone, split, two_level
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer


def check_of_outsider(group):
    """Compare the errors on a rank that is not in a group with torch's."""
    for call, words in (
        (get_group_rank, "Global rank 17 is not part of group -100"),
        (get_global_rank, "Group rank 17 is not part of group -100"),
    ):
        for f in (call, getattr(dist, call.__name__)):
            kind, message = caught_error(lambda f=f: f(group, 17))
            assert kind == "ValueError" and words in message, message
    return caught_error(lambda: get_process_group_ranks(group))


def check_of_member(group):
    for given in (group, Group(group)):
        ranks = get_process_group_ranks(given)
        assert ranks == dist.get_process_group_ranks(group) and type(ranks) is list
        assert [get_group_rank(given, r) for r in ranks] == list(range(len(ranks)))
        assert [get_global_rank(given, r) for r in range(len(ranks))] == ranks
        for call, rank in (
            (get_global_rank, len(ranks)),
            (get_global_rank, -1),
            (get_group_rank, 17),
        ):
            assert caught_error(lambda c=call, g=given, r=rank: c(g, r))[0] == "ValueError"


def translate():
    said = []
    for ranks in (None, [2, 3], [0, 3], [1]):
        group = None if ranks is None else dist.new_group(ranks)
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            said.append(check_of_outsider(group))
        else:
            check_of_member(group)
    return said


def test_translation_is_torchs_and_checks_more():
    for rank, said in enumerate(run(4, translate)):
        assert len(said) == 3 - [[2, 3], [0, 3], [1]].__str__().count(str(rank))
        words = f"Global rank {rank} is not part of group"
        assert all(kind == "ValueError" and words in message for kind, message in said)


def test_translation_without_a_job():
    assert (get_process_group_ranks(), get_global_rank(None, 0), get_group_rank(None, 0)) == (
        [0],
        0,
        0,
    )
    with pytest.raises(ValueError, match="not initialized"):
        get_process_group_ranks(object())


def nested():
    outer = split(Group(), [[3, 1, 2]])
    if outer is None:
        return None
    inner = split(outer, [[2], [1, 0]])
    x = torch.tensor([float(inner.global_rank)])
    inner.all_reduce(x)
    return outer.ranks, inner.ranks, inner.group_rank, x.item()


@pytest.mark.skipif(not KEEPS_ORDER, reason="this torch sorts the ranks of a group")
def test_nested_groups():
    first, *others = run(4, nested)
    assert first is None
    assert {outer for outer, *_ in others} == {(3, 1, 2)}
    assert others[0][1:] == ((1, 3), 0, 4.0)
    assert all(total == sum(inner) for _, inner, _, total in others)


def nested_where_torch_sorts():
    """Split where `new_group` is as in torch 2.9."""

    def new_group(ranks, timeout, backend, *, use_local_synchronization):
        return made(ranks, timeout, backend, use_local_synchronization=use_local_synchronization)

    made = dist.new_group
    dist.new_group = new_group
    return caught_error(nested), split(Group(), [[1, 3], [0, 2]]).ranks


def test_an_order_that_torch_does_not_keep_is_refused():
    for rank, ((kind, said), ranks) in enumerate(run(4, nested_where_torch_sorts)):
        assert kind == "ValueError" and "sorts the ranks" in said and "[3, 1, 2]" in said
        assert ranks == ((0, 2), (1, 3))[rank % 2]


def test_a_clone_is_apart():
    def cloned():
        g = Group()
        twin = clone(g, timeout=timedelta(seconds=7))
        a, b = torch.ones(4), torch.ones(4)
        works = [g.reduce_scatter(a, async_op=True), twin.reduce_scatter(b, async_op=True)]
        for work in works:
            work.wait()
        destroy(twin)
        g.all_reduce(a)
        return (
            twin.ranks == g.ranks,
            twin.process_group is not g.process_group,
            caught_error(lambda: twin.all_reduce(b))[1],
        )

    assert run(2, cloned) == [(True, True, "this process group was destroyed; make a new one")] * 2


def test_splits_that_cannot_be():
    def bad():
        g = Group()
        return [
            caught_error(call)
            for call in (
                lambda: split(g, [[0, 1], [1]]),
                lambda: split(g, [[0, 5]]),
                lambda: split(g, [[g.group_rank]]),
                lambda: two_level(2),
                lambda: two_level(0),
                lambda: g.all_reduce(torch.ones(1)),
            )
        ]

    for errors in run(3, bad):
        assert [e and e[0] for e in errors] == ["ValueError"] * 5 + [None]
        said = ["one part only", "[5] are not in", "disagree", "divide the 3", "divide the 3"]
        for (_, message), words in zip(errors[:5], said, strict=True):
            assert words in message


def test_split_of_a_process_alone():
    assert (
        split(Group(), [[0]]).size == 1
        and clone(Group()).ranks == (0,)
        and two_level(1).shard.size == 1
    )


def eager(nccl):
    """Make groups of some ranks where the default group is bound to a device; `nccl`: and would connect over NCCL."""
    whole = Group()
    if nccl:
        whole.backends = {"cpu": "gloo", "cuda": "nccl"}
    dist.group.WORLD.bound_device_id = torch.device("cuda", 0)
    if nccl:
        return [
            caught_error(lambda: split(whole, [[0, 1]])),
            caught_error(lambda: split(whole, [[0], [1]])),
        ]
    if (part := split(whole, [[0, 2]])) is None:
        return None
    part.all_reduce(x := torch.ones(3))
    return x.tolist()


def test_groups_that_would_wait_for_others_to_connect_are_refused():
    for found in run(3, eager, True, timeout=30):
        assert all("all 3 ranks together, and these have 2" in str(said) for said in found), found
    assert run(3, eager, False, timeout=30) == [[2.0] * 3, None, [2.0] * 3]


COLLECTIVES = [
    "all_reduce",
    "broadcast",
    "reduce_scatter",
    "all_gather",
    "gather",
    "scatter",
    "all_to_all",
    "exchange",
    "coalescing",
]


def bereaved(rank: int, store: str, kind: str, after: float) -> str:
    """Run a collective over and over; rank 2 of 3 is killed meanwhile. Returns what the others are told."""
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=3, timeout=timedelta(seconds=3)
    )
    g, x, said = Group(), torch.zeros(3 << 18), ""
    start(g, kind, x)
    if rank == 2:
        threading.Timer(after, os.kill, [os.getpid(), signal.SIGKILL]).start()
    try:
        while True:
            start(g, kind, x)
    except RuntimeError as error:
        said = str(error)
    destroy(g)
    destroy(g)
    return said


def names(kind: str, said: str) -> bool:
    what = {
        "exchange": f"sending {3 << 18} float32 to group rank",
        "coalescing": "the coalescing block at one_collective.py",
    }.get(kind, kind)
    return what in said and "failed:" in said


@pytest.mark.turns(3)
@pytest.mark.parametrize("kind", COLLECTIVES)
def test_a_peer_killed_during_a_collective(kind, tmp_path):
    """Every other rank says what was running, in time: six jobs for each of nine kinds."""
    fork = multiprocessing.get_context("fork")
    heard = {(job, rank): fork.SimpleQueue() for job in range(6) for rank in range(3)}

    def live(job, rank):
        torch.set_num_threads(1)  # threads of the parent's pool are not here
        heard[job, rank].put(bereaved(rank, str(tmp_path / str(job)), kind, 0.1 * (1 + job)))
        os._exit(0)

    ranks = {key: fork.Process(target=live, args=key) for key in heard}
    for process in ranks.values():
        process.start()
    for process in ranks.values():
        process.join(60)
    codes = {key: process.exitcode for key, process in ranks.items()}
    for process in ranks.values():
        process.kill()
    assert codes == {(job, rank): -signal.SIGKILL if rank == 2 else 0 for job, rank in ranks}
    assert all(names(kind, heard[job, rank].get()) for job, rank in heard if rank < 2)


@pytest.mark.turns(2)
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter"])
def test_a_process_whose_peer_was_killed_exits_normally(starter, kind, tmp_path):
    code = """
import sys
sys.path.insert(0, sys.argv[1])
from test_groups import bereaved
print(bereaved(rank, *sys.argv[2:], 0.3))
"""
    arguments = (str(Path(__file__).parent), str(tmp_path / "store"), kind)
    ranks = starter.run(code, tmp_path, size=3, arguments=arguments)
    assert [rank.code for rank in ranks] == [0, 0, -signal.SIGKILL]
    assert all(names(kind, rank.stdout) for rank in ranks[:2])


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("known", [True, False])
def test_abort_frees_a_stuck_rank(known):
    """Stuck in a collective that is known, or where a new one is compared."""

    def stuck(kind):
        g, x = clone(Group(), timeout=timedelta(seconds=60)), torch.zeros(3 << 18)
        if known:
            start(g, kind, x)
        dist.barrier()
        if g.group_rank == 0:
            dist.barrier()  # stays away from the collective until the others are free
            return None, None
        timer = threading.Timer(0.3, abort, [g])
        timer.start()
        begin = time.monotonic()
        said = caught_error(lambda: start(g, kind, x))
        dist.barrier()
        timer.join()
        return said, time.monotonic() - begin < 30

    ranks = run(3, lambda: {kind: stuck(kind) for kind in COLLECTIVES})
    at_comparison = "failed" if known else "the group was aborted, while rank"
    for kind in COLLECTIVES:
        first, *others = [found[kind] for found in ranks]
        assert first == (None, None)
        assert any(said for said, _ in others), kind
        for said, early in others:
            if kind in ("gather", "scatter", "broadcast", "exchange") and said is None:
                continue  # nothing of it was stuck on this rank
            assert early and said[0] == "RuntimeError", (kind, said)
            assert "failed" in said[1] or at_comparison in said[1], (kind, said)


def test_ended_groups_say_so():
    def ended():
        g, x = Group(), torch.ones(2)
        one, two = clone(g), clone(g)
        abort(one)
        abort(one)
        destroy(two)
        destroy(two)
        dist.barrier()
        dist.destroy_process_group()
        destroy(g)
        abort(Group())  # alone again, where both do nothing
        destroy(Group())
        return caught_error(lambda: one.all_reduce(x)), caught_error(lambda: two.all_reduce(x))

    for aborted, destroyed in run(2, ended):
        assert aborted == ("RuntimeError", "this process group was aborted; make a new one")
        assert destroyed == ("RuntimeError", "this process group was destroyed; make a new one")


def test_destroy_at_interpreter_exit_with_a_live_ddp(starter, tmp_path):
    code = """
import atexit, sys
from torch.nn.parallel import DistributedDataParallel
from zero_nb.comm.ending import destroy
from zero_nb.comm.groups import Group
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
atexit.register(destroy, Group())
ddp = DistributedDataParallel(torch.nn.Linear(4, 4))
ddp(torch.ones(2, 4)).sum().backward()
"""
    for job in range(3):
        ranks = starter.run(code, tmp_path, arguments=(str(tmp_path / str(job)),))
        assert [rank.code for rank in ranks] == [0, 0], ranks


def test_the_device_of_a_tensor_chooses_the_backend():
    def several():
        import torch.testing._internal.distributed.fake_pg

        g = Group(dist.new_group(backend="cpu:gloo,cuda:fake"))
        x, objects = torch.full((4,), float(g.group_rank)), [g.group_rank]
        g.all_gather(x)  # by gloo
        broadcast_object_list(objects, group=g)  # bytes travel on the CPU
        return (
            g.backends,
            g.backend(torch.device("cuda", 1)),
            x.tolist(),
            objects,
            clone(g).backends == g.backends,
        )

    assert (
        run(2, several)
        == [({"cpu": "gloo", "cuda": "fake"}, "fake", [0.0, 0.0, 1.0, 1.0], [0], True)] * 2
    )


def abort_after_another():
    """Be stuck with rank 2 when rank 0, the peer before this one, has closed its connections already."""
    group, rank, said = Group(dist.new_group()), dist.get_rank(), []
    group.all_reduce(torch.ones(1))  # connections are there
    dist.barrier()
    if rank == 0:
        abort(group)
    dist.barrier()
    if rank == 1:
        stuck = threading.Thread(
            target=lambda: said.append(caught_error(lambda: group.recv(torch.ones(1), 2)))
        )
        stuck.start()
        time.sleep(0.5)
        abort(group)
        stuck.join(30)
    dist.barrier()
    return said


def test_abort_frees_a_rank_whatever_another_has_aborted():
    assert len(run(3, abort_after_another, timeout=60)[1]) == 1


def fails_as_messages_leave(count, numel):
    g, pids = clone(Group(), timeout=timedelta(seconds=10)), [None] * 2
    dist.all_gather_object(pids, os.getpid())
    tensors = [(torch.zeros(numel), 1 - g.group_rank) for _ in range(count)]
    dist.barrier()
    if g.group_rank == 0:
        work = g.exchange(tensors, [], async_op=True)
        dist.barrier()
        start = time.monotonic()
        return caught_error(work.wait), time.monotonic() - start
    dist.barrier()
    time.sleep(0.1)  # rank 0 waits
    stop(pids[0])  # it learns that rank 1 is ready only when rank 1 has gone on
    work = g.exchange([], tensors, async_op=True)
    threading.Timer(0.1, os.kill, (pids[0], signal.SIGCONT)).start()
    fail(g, ArithmeticError("the loss is not a number"))
    return caught_error(work.wait)


@pytest.mark.parametrize("count, numel", [(3, 10), (2, 1 << 22)])
def test_no_message_is_lost_on_its_way_to_a_rank_that_fails(count, numel):
    (error, seconds), _ = run(2, fails_as_messages_leave, count, numel, timeout=60)
    assert seconds < 5, (error, seconds)  # sent, or an error
    assert error is None or "the loss is not a number" in error[1]


def rows_of(nodes):
    one = Group()
    return caught_error(lambda: two_level(nodes if one.group_rank else 2))


@pytest.mark.parametrize("nodes", ["2", 2.0, None])
def test_rows_of_no_number_of_ranks_are_an_error_on_every_rank(nodes):
    for kind, said in run(2, rows_of, nodes):
        assert (
            kind == "TypeError" and f"must be ranks per node or a DeviceMesh, got {nodes!r}" in said
        )


def leaves_two_levels(way, meshed):
    """Let rank 3 leave while the others wait in an agreement; what they hear, and after how many seconds."""
    nodes = init_device_mesh("cpu", (2, 2)) if meshed else 2
    levels = two_level(nodes)
    agree(levels.together, "the start")  # all ranks hear of each other from here
    began = time.monotonic()

    def work():
        with agreeing(levels, "the setup"):
            if levels.shard.global_rank != 3:
                return
            if way == "raises":
                raise ArithmeticError("no number")
            if way == "interrupted":
                raise KeyboardInterrupt("no number")  # as Ctrl-C does
            fail(levels, ArithmeticError("no number"))

    try:
        error = caught_error(work)
    except KeyboardInterrupt:
        error = None
    seconds = time.monotonic() - began
    return error, seconds, caught_error(lambda: agree(levels.shard, "the next"))


@pytest.mark.parametrize("meshed", [False, True])
@pytest.mark.parametrize("way", ["raises", "fails", "interrupted"])
def test_all_nodes_hear_at_once_what_a_rank_says_that_leaves_two_levels(way, meshed):
    found = run(4, leaves_two_levels, way, meshed, timeout=60)
    for error, seconds, _ in found[:3]:
        assert error is not None and "no number" in error[1] and seconds < 5, (error, seconds)
    assert (found[2][2] is None) == (way == "raises")  # in the row of the rank that has left


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: simulate(1.5), "size must be an integer >= 1, ranks in the group, got 1.5"),
        (lambda: simulate(0), "got 0"),
        (lambda: simulate(2, 0.5), "group_rank must be in 0..1 in a group of 2, got 0.5"),
        (lambda: simulate(2, 2), "group_rank must be in 0..1 in a group of 2, got 2"),
    ],
)
def test_a_group_that_cannot_be_simulated_is_one_clear_error(call, says):
    with pytest.raises(ValueError) as caught:
        call()
    assert says in str(caught.value)


def test_a_rank_of_several_that_forgot_to_initialize_is_warned(monkeypatch):
    params = [*torch.nn.Linear(2, 2).parameters()]
    monkeypatch.setenv("WORLD_SIZE", "2")  # as a scheduler does, for what it starts
    ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.1)
    monkeypatch.setenv("RANK", "1")  # as torchrun does
    with pytest.warns(
        UserWarning, match=r"rank 1 of 2, but .* call init_process_group\(\)"
    ) as said:
        ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.1)
    assert said[0].filename == __file__
