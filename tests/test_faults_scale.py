"""Work for each step, messages and memory, from 2 ranks to 16,384."""

import itertools
import time
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from common import caught
from common.counting import calls, results
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import zero_nb
from zero_nb.backward.data_parallelism import data_parallel
from zero_nb.backward.ddp_buckets import plan_buckets
from zero_nb.backward.ddp_overlap import overlap
from zero_nb.comm import payloads
from zero_nb.comm.calls import Parts
from zero_nb.comm.coalescing import coalescing_manager
from zero_nb.comm.groups import Group
from zero_nb.comm.launch import run
from zero_nb.comm.payloads import exchange_bytes, gather_bytes
from zero_nb.comm.recording import record
from zero_nb.comm.simulation import simulate
from zero_nb.comm.subgroups import two_level
from zero_nb.optim import state_runs
from zero_nb.plan.span_moves import moves

MANY = 16_384  # ranks


def layers(count: int, width: int) -> nn.Module:
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(count)])


def adamw(model: nn.Module, group: Group) -> zero_nb.ZeroRedundancyOptimizer:
    return zero_nb.ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, group, lr=1e-3, bucket_cap_mb=0.1
    )


def muon(model: nn.Module, group: Group) -> zero_nb.ZeroRedundancyOptimizer:
    weights = [p for p in model.parameters() if p.ndim == 2]
    biases = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": weights, "optimizer_class": torch.optim.Muon}, {"params": biases}]
    return zero_nb.ZeroRedundancyOptimizer(
        groups, torch.optim.AdamW, group, lr=1e-3, bucket_cap_mb=0.3
    )


def greedy(model: nn.Module, group: Group) -> zero_nb.ZeroRedundancyOptimizer:
    return zero_nb.ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, group, lr=1e-3, bucket_cap_mb=0.3, shard="greedy"
    )


class Work(NamedTuple):
    """What a call takes on the host."""

    calls: int
    results: int  # tensors that operators give, views among them

    def grown(self, before):
        return max(self.calls / before.calls, self.results / before.results)


def a_steady_step(size: int, way: str, count: int = 24, width: int = 130, make=adamw):
    """Train on one of `size` simulated ranks; work and collectives of a later step, and the bytes they send."""
    torch.manual_seed(0)
    with simulate(size, 0) as pg:
        model = layers(count, width)
        ddp = model if way == "parallel" else DDP(model, process_group=pg, bucket_cap_mb=0.06)
        zero = make(model, pg)
        if way == "parallel":
            data_parallel(model, zero, bucket_cap_mb=0.1 if make is adamw else 0.3)
        elif way != "step":
            overlap(ddp, zero, interleaved=way == "interleaved")
        x = torch.ones(2, width)

        def iterate():
            ddp(x).square().mean().backward()
            zero.step()
            zero.zero_grad()

        for _ in range(4):
            iterate()
        with pg.recording() as log:
            iterate()
        return Work(calls(iterate), results(iterate)), log.count(), log.wire


@pytest.mark.parametrize(
    ("way", "count"),
    [("step", 24), ("overlap", 24), ("interleaved", 24), ("parallel", 24), ("parallel", 96)],
)
def test_H6_a_steady_step_does_not_depend_on_the_number_of_ranks(way, count):
    few, collectives, wire = a_steady_step(8, way, count)
    many, same, more = a_steady_step(MANY, way, count)
    assert (
        same == collectives
        and min(collectives.values()) >= (10 if count < 96 else 96)  # buckets
        and set(collectives) <= {"all_reduce", "reduce_scatter", "all_gather"}
    )
    assert many.grown(few) <= 1.2, (few, many)
    assert more <= 1.3 * wire * 8 / 7 + 64 * MANY * sum(collectives.values()), (
        "at most 16 elements of padding for each rank and collective"
    )


@pytest.mark.parametrize("way", ["step", "parallel"])
@pytest.mark.parametrize("make", [muon, greedy])
def test_H6_a_step_of_whole_parameters_has_one_collective_for_each_owner_at_most(make, way):
    """A parameter that is not cut goes to its one owner and comes from it: filled up to one size for each of
    many ranks, it would be sent as often as there are ranks."""
    (_, few, _), (once, some, wire), (again, many, more) = (
        a_steady_step(size, way, count=12, make=make) for size in (8, 1024, MANY)
    )
    assert many == some and again.grown(once) <= 1.02, (once, again)
    parameters = 24  # each is brought from one owner, and in "parallel" its gradient to that one
    owned = {"broadcast": parameters, "reduce": parameters * (way == "parallel")}
    assert all(many.get(kind, 0) <= most for kind, most in owned.items()), many
    assert sum(many.values()) > sum(few.values())  # which the changelog and guides/04 say
    filled = many.get("all_gather", 0) + many.get("reduce_scatter", 0)
    assert more <= 1.01 * wire + 64 * MANY * filled, (
        "as above, where parameters are cut: Muon's biases"
    )


# ---- comparing collectives before they are sent ----


class Sizes(nn.Module):
    """Parameters of as many sizes, each a bucket of its own."""

    def __init__(self, count):
        super().__init__()
        self.some = nn.ParameterList([nn.Parameter(torch.ones(160 + 16 * i)) for i in range(count)])

    def forward(self, x):
        return sum((p * x).sum() for p in self.some)


def agreements_of(groups) -> int:
    """Count what this rank has agreed on in its groups, and in the one that two levels were made from."""
    together = getattr(groups, "together", None)
    return sum(group._agreements.turn for group in ([*groups, together] if together else groups))


def agreements(way: str, nodes: bool, count: int):
    """Make an optimizer, load its state and train; unlike buckets, agreements, and requests of this
    rank but for looks."""
    from zero_nb.comm.store import _Notes

    levels, asked = two_level(2) if nodes else (Group(),), []
    before = agreements_of(levels)
    ask = _Notes._ask

    def counted(self, request, key, *values):
        if values and values[0] != "\0":
            asked.append(key)  # else it is a look
        return ask(self, request, key, *values)

    _Notes._ask = counted
    model = Sizes(count)
    ddp = model if way == "parallel" else DDP(model, bucket_cap_mb=1e-4)
    zero = zero_nb.ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, levels if nodes else None, lr=0.1, bucket_cap_mb=1e-4
    )
    zero.load_state_dict(
        {"state": {}, "param_groups": [{**zero.param_groups[0], "params": [*range(count)]}]}
    )
    if way == "parallel":
        data_parallel(model, zero, bucket_cap_mb=1e-4, reduce_dtype=torch.bfloat16)
    elif way != "step":
        overlap(ddp, zero, interleaved=way == "interleaved")
    for _ in range(3):
        ddp(1.0).backward()
        zero.step()
        zero.zero_grad()
    unlike = {bucket.sizes for shard in zero.shards for bucket in shard.buckets}
    return len(unlike), agreements_of(levels) - before, len(asked)


@pytest.mark.parametrize(
    ("way", "nodes", "most"),
    [
        ("step", False, 3),
        ("step", True, 3),
        ("overlap", False, 10),
        ("interleaved", True, 10),
        ("parallel", False, 14),
        ("parallel", True, 14),
    ],
)
def test_H6_unlike_buckets_of_a_plan_are_not_compared_one_by_one(way, nodes, most):
    few, many = (
        run(4 if nodes else 2, agreements, way, nodes, count, timeout=60) for count in (3, 97)
    )
    for (_, turns, _), (unlike, same, requests) in zip(few, many, strict=True):
        assert unlike >= 97 and same == turns <= most and requests <= 8 * turns + 16, (
            unlike,
            turns,
            same,
            requests,
        )


def agreements_by_phase(way: str, nodes: bool, loads: bool):
    """Agreements of making, loading, attaching, and each of three iterations, on this rank."""
    levels = two_level(2) if nodes else (Group(),)
    model = Sizes(12)
    ddp = model if way == "parallel" else DDP(model, bucket_cap_mb=1e-4)
    counts = [agreements_of(levels)]

    def note():
        counts.append(agreements_of(levels))

    zero = zero_nb.ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, levels if nodes else None, lr=0.1, bucket_cap_mb=1e-4
    )
    note()
    moments = {
        i: {"step": torch.tensor(5.0), "exp_avg": p.detach(), "exp_avg_sq": p.detach()}
        for i, p in enumerate(model.parameters())
    }
    given = [{**zero.param_groups[0], "params": [*range(12)]}]
    zero.load_state_dict({"state": moments if loads else {}, "param_groups": given})
    note()
    if way == "parallel":
        data_parallel(model, zero, bucket_cap_mb=1e-4)
    elif way != "step":
        overlap(ddp, zero, interleaved=way == "interleaved")
    note()
    for _ in range(3):
        ddp(1.0).backward()
        zero.step()
        zero.zero_grad()
        note()
    return [after - before for before, after in itertools.pairwise(counts)]


@pytest.mark.parametrize("loads", [False, True])
@pytest.mark.parametrize("nodes", [False, True])
@pytest.mark.parametrize(
    ("way", "counts"),
    [
        ("step", [1, 1, 0, 1, 0, 0]),
        ("overlap", [1, 1, 1, 2, 1, 0]),  # DDP makes other buckets in the second iteration
        ("interleaved", [1, 1, 1, 2, 1, 0]),
        ("parallel", [1, 1, 1, 1, 0, 0]),
    ],
)
def test_H6_ranks_agree_a_few_times_until_they_train(way, counts, nodes, loads):
    size = 4 if nodes else 2
    assert run(size, agreements_by_phase, way, nodes, loads, timeout=60) == [counts] * size


def agreements_to_arrange():
    world = Group()
    before = world._agreements.turn
    levels = two_level(2, world)
    return [world._agreements.turn - before, *(group._agreements.turn for group in levels)]


def test_H6_two_levels_are_arranged_in_four_agreements():
    """What is asked, the names of both groups at once, and the first meeting in each."""
    assert run(4, agreements_to_arrange) == [[2, 1, 1]] * 4


# ---- unequal parts on NCCL ----

DIVISIONS = [
    [7, 7, 2],
    [7, 7, 7],
    [1, 2, 3],
    [0, 9, 0],
    [0, 100, 3],
    [4, 0, 0],
    [40, 1, 1],
    [0, 0, 0],
]


def in_turn_and_in_blocks():
    """Reduce and gather unequal parts over NCCL's rules, one by one and in a block; compare with gloo."""
    from nccl_like import nccl_like

    twin, plain, wrong = nccl_like(host_waits=True), Group(), []

    def full(sizes, i):
        return (torch.arange(float(sum(sizes))) + i) * (plain.group_rank + 1)

    def start(group, tensors, async_op=True):
        works = [
            group.reduce_scatter(t, sizes, async_op=async_op)
            for t, sizes in zip(tensors[0], DIVISIONS, strict=True)
        ]
        return works + [
            group.all_gather(t, sizes, async_op=async_op)
            for t, sizes in zip(tensors[1], DIVISIONS, strict=True)
        ]

    def inputs():
        return [[full(sizes, i) for i, sizes in enumerate(DIVISIONS)] for _ in range(2)]

    for block in (False, True):
        ours, want = inputs(), inputs()
        works = start(plain, want)
        if not block:
            works += start(twin, ours)
        else:
            with coalescing_manager(twin, async_ops=True) as cm:
                start(twin, ours, async_op=False)
            works.append(cm)
        for work in works:
            work.wait()
        for i, sizes in enumerate(DIVISIONS):
            mine = slice(sum(sizes[: plain.group_rank]), sum(sizes[: plain.group_rank + 1]))
            if not ours[0][i][mine].equal(want[0][i][mine]):
                wrong.append((block, "reduce_scatter", sizes, ours[0][i], want[0][i]))
            if not ours[1][i].equal(want[1][i]):
                wrong.append((block, "all_gather", sizes, ours[1][i], want[1][i]))
    return wrong, {name for launch in twin.process_group.launches for name in launch}


def test_H7_unequal_parts_in_a_block_are_waited_for():
    for wrong, names in run(3, in_turn_and_in_blocks, timeout=90):
        assert not wrong and not names & {"allgather", "reduce_scatter"}, (wrong, names)


def test_H6_parts_are_three_numbers_where_they_follow_a_rule():
    rule = Parts.of([16] * 12_500 + [0] * (MANY - 12_500))
    assert (
        rule == Parts(MANY, 200_000, 16)
        and rule.part(12_499) == (199_984, 200_000)
        and rule.part(MANY - 1) == (200_000, 200_000)
    )
    assert (
        len(str(rule)) < 100
        and rule.padded == 16 * MANY
        and sum(rule) == 200_000
        and len(rule) == MANY
    )
    odd = [3, 0, 5] * 1000
    listed = Parts.of(odd)
    assert (
        [*listed] == odd
        and listed.part(2) == (3, 8)
        and listed.part(1) == (3, 3)
        and len(str(listed)) < 200
    )
    assert str(listed) != str(Parts.of([3, 0, 5] * 999 + [3, 5, 0])), "what differs reads otherwise"


def compiled():
    group = Group()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def f(x):
        y = x * 2
        group.reduce_scatter(y)
        group.all_gather(y)
        return y + 1

    return f(torch.ones(4)).tolist()


@pytest.mark.usefixtures("compiler")
def test_a_compiler_follows_equal_parts():
    assert run(2, compiled) == [[5.0] * 4] * 2


# ---- state that moves ----


def messages_of_a_move(size: int, group_rank: int, count: int = 24, width: int = 130):
    """Change the plan of an optimizer with state on one of `size` simulated ranks; what was called
    for it, and how often."""
    with simulate(size, group_rank) as pg:
        model = layers(count, width)
        zero = zero_nb.ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, pg, lr=1e-3, bucket_cap_mb=0.1
        )
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        zero.step()
        given = [list(range(i, i + 6)) for i in range(0, 2 * count, 6)]
        with pg.recording() as log:
            count_of_calls = calls(
                lambda: zero.replan(
                    zero.shards, "to see what moves", lambda: plan_buckets(zero, given)
                )
            )
        return log.count(), count_of_calls


@pytest.mark.parametrize("group_rank", [0, 5])
def test_H6_state_moves_between_neighbours_only(group_rank):
    _, few = messages_of_a_move(8, group_rank)
    many, more = messages_of_a_move(MANY, group_rank)
    assert set(many) <= {"send", "recv", "all_reduce"} and sum(many.values()) <= 4 * 24 + 1, (
        "two messages for each rank with which a bucket is shared"
    )
    assert more <= 4 * few, (few, more)


def moved(count, width):
    """Change a plan on real ranks; messages and bytes of this rank, and what `moves` says of them."""
    with record() as pg:
        torch.manual_seed(0)
        model = layers(count, width)
        zero = zero_nb.ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, pg, lr=1e-3, bucket_cap_mb=0.1
        )
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        zero.step()
        old, me = zero.shards[0].plan.shard_plan, dist.get_rank()
        given = [list(range(i, i + 6)) for i in range(0, 2 * count, 6)]
        with pg.recording() as log:
            zero.replan(zero.shards, "to see what moves", lambda: plan_buckets(zero, given))
        mine = [move for move in moves(old, zero.shards[0].plan.shard_plan) if move.source == me]
        sends = log.only("send")
        sent = sum(e.bytes for e in sends)
        destinations = {move.destination for move in mine}
        return log.count(), len(sends), sent, len(destinations), sum(move.numel for move in mine)


def test_H6_state_that_moves_is_what_the_plans_say(monkeypatch):
    monkeypatch.setenv("ZERO_NB_MEMORY", "0")
    for kinds, messages, nbytes, neighbours, elements in run(4, moved, 12, 130):
        assert set(kinds) == {"send", "recv", "all_reduce"} and kinds["all_reduce"] == 1, (
            "that looks whether all parts are there"
        )
        assert messages == 2 * neighbours > 0
        assert 8 * elements <= nbytes <= 8 * elements + 8_000 * neighbours, (
            "two numbers for each element, and what it takes to pickle them"
        )


# ---- bytes ----


def in_pieces():
    """Gather and broadcast much more than one piece; the largest tensor that was sent, and the state that came."""
    payloads.PIECE = state_runs.MESSAGE = state_runs._ALONE = 10_000
    with record() as pg:
        torch.manual_seed(0)
        model = layers(3, 100)
        zero = zero_nb.ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, pg, lr=1e-3)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        zero.step()
        with pg.recording() as log:
            zero.consolidate_state_dict(to=None)
        whole = torch.cat([s["exp_avg"].flatten() for s in zero.state_dict()["state"].values()])
        return max(e.bytes for e in log if e.dtype == "uint8"), len(whole), whole.unique().tolist()


def test_M8_state_travels_in_pieces():
    for largest, elements, values in run(3, in_pieces):
        assert largest <= 10_000 and elements == 3 * 10_100 and len(values) == 1


def in_turn():
    """Gather from four ranks to a receiver that is slow after the first; which ranks had begun to send by then."""
    group, me = Group(), dist.get_rank()
    store = dist.distributed_c10d._get_process_group_store(group.process_group)
    send = Group.send

    def told(self, tensor, to, **kwargs):
        store.set(f"sends {me}", "")
        return send(self, tensor, to, **kwargs)

    Group.send = told
    begun, parts = [], []
    for part in gather_bytes(group, bytearray([me] * 1000), to=0):
        parts.append(bytes(part))
        if len(parts) == 2:
            time.sleep(0.5)
            begun = [rank for rank in range(1, 5) if store.check([f"sends {rank}"])]
    return begun, parts


def test_M8_ranks_begin_to_send_when_it_is_their_turn():
    (begun, parts), *_ = run(5, in_turn)
    assert set(begun) <= {1, 2} and parts == [bytes([rank] * 1000) for rank in range(5)]


def given_up():
    """Stop to read after the second of four ranks."""
    group = Group()
    said = ""
    try:
        for i, _ in enumerate(gather_bytes(group, bytearray(10), to=0)):
            if i == 1:
                break
    except RuntimeError as error:
        said = str(error)
    dist.barrier()
    again = [bytes(part) for part in gather_bytes(group, bytearray([dist.get_rank()]), to=3)]
    return said, again


def test_M8_ranks_learn_that_their_turn_never_comes():
    for rank, (said, again) in enumerate(run(5, given_up, timeout=60)):
        assert ("rank 0 has stopped to read" in said) == (rank > 2) and again == (
            [bytes([r]) for r in range(5)] if rank == 3 else []
        )


# ---- messages on NCCL ----


def first_messages():
    """Use a group over NCCL's rules for the first time, in several ways."""
    from nccl_like import nccl_like

    from zero_nb.comm.groups import connect
    from zero_nb.comm.subgroups import clone

    group, me = nccl_like(host_waits=True), dist.get_rank()
    x = torch.full((2,), float(me))
    pair = (
        [
            caught(lambda: group.send(x, 1) if me == 0 else group.recv(x, 0)),
            caught(lambda: group.exchange([(x, 1 - me)], [])),
        ]
        if me < 2
        else []
    )
    dist.barrier()
    launched = len(group.process_group.launches)
    connect(group, x.device)
    if me < 2:
        group.send(x, 1) if me == 0 else group.recv(x, 0)
    flat = torch.full((3,), float(me))
    other = clone(group)
    other.gather(flat, 0, [1, 0, 2])
    last = clone(group)
    came = exchange_bytes(last, {2: b"zero"} if me == 0 else {}, [0] if me == 2 else [])
    return (
        pair,
        launched,
        x.tolist(),
        flat.tolist(),
        {peer: bytes(data) for peer, data in came.items()},
    )


def test_M10_messages_of_some_ranks_are_not_the_first_use_of_a_group():
    found = run(3, first_messages, timeout=60)
    for pair, launched, *_ in found:
        assert launched == 0 and all(
            said.startswith("RuntimeError") and "call connect(group, 'cpu')" in said
            for said in pair
        ), pair
    assert (
        found[1][2] == [0.0, 0.0] and found[0][3] == [0.0, 2.0, 2.0] and found[2][4] == {0: b"zero"}
    )


def bound():
    """Where bytes travel in groups that have no backend for the CPU."""
    group = Group()
    group.backends = {"cuda": "nccl"}
    near = payloads.byte_device(group, torch.device("cuda", 3))
    dist.group.WORLD.bound_device_id = torch.device("cuda", 1)
    found = payloads.byte_device(group), payloads.byte_device(group, torch.device("cpu"))
    group.backends = {"xpu": "xccl"}
    other = payloads.byte_device(group, torch.device("xpu", 2))
    group.backends = {"cuda": "nccl", "cpu": "gloo"}
    return [
        str(device)
        for device in (near, *found, other, payloads.byte_device(group, torch.device("cuda", 3)))
    ]


def test_M11_bytes_travel_on_the_device_of_the_group_or_of_a_parameter():
    assert run(2, bound) == [["cuda:3", "cuda:1", "cuda:1", "xpu:2", "cpu"]] * 2


# ---- another default device ----


def trained(way: str, device: str | None):
    """Train with parameters on the CPU where new tensors are made elsewhere; the parameters."""
    torch.manual_seed(0)
    model, x = layers(3, 20), torch.randn(2, 5, 20)[dist.get_rank()]
    ddp = model if way == "parallel" else DDP(model, bucket_cap_mb=0.001)
    torch.set_default_device(device)
    try:
        zero = zero_nb.ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9
        )
        if way == "parallel":
            handle = data_parallel(model, zero, max_grad_norm=1.0)
        elif way != "step":
            handle = overlap(ddp, zero, interleaved=way == "interleaved")
        for _ in range(4):
            ddp(x).square().mean().backward()
            zero.step()
            zero.zero_grad()
        if way != "step":
            handle.detach()
        zero.consolidate_state_dict(to=None)
        zero.load_state_dict(zero.state_dict())
    finally:
        torch.set_default_device(None)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("memory", ["0", "1"])
@pytest.mark.parametrize("way", ["step", "overlap", "interleaved", "parallel"])
def test_L6_new_tensors_do_not_follow_the_default_device(way, memory, monkeypatch):
    monkeypatch.setenv("ZERO_NB_MEMORY", memory)
    plain, elsewhere = run(2, trained, way, None), run(2, trained, way, "meta")
    assert all(
        a.device.type == b.device.type == "cpu" and a.equal(b)
        for a, b in zip(plain, elsewhere, strict=True)
    )


# ---- training over NCCL's rules ----


def over_nccl(way: str, shard: str, views: bool):
    """Train over NCCL's rules and over gloo; the largest difference, and the collectives that NCCL was given."""
    from nccl_like import nccl_like

    twin, found = nccl_like(host_waits=True), []
    for group in (twin.process_group, dist.group.WORLD):
        torch.manual_seed(0)
        model, x = (
            nn.Sequential(nn.Linear(20, 31), nn.Linear(31, 300), nn.Linear(300, 7)),
            torch.randn(3, 5, 20)[dist.get_rank()],
        )
        ddp = (
            model
            if way == "parallel"
            else DDP(model, process_group=dist.group.WORLD, bucket_cap_mb=0.01)
        )
        zero = zero_nb.ZeroRedundancyOptimizer(
            model.parameters(),
            torch.optim.AdamW,
            group,
            views,
            shard=shard,
            lr=0.01,
            bucket_cap_mb=0.01,
        )
        if way == "parallel":
            handle = data_parallel(model, zero, bucket_cap_mb=0.01)
        elif way != "step":
            handle = overlap(ddp, zero, interleaved=way == "interleaved")
        for _ in range(4):
            ddp(x).square().mean().backward()
            zero.step()
            zero.zero_grad()
        if way != "step":
            handle.detach()
        zero.consolidate_state_dict(to=None)
        state = [s["exp_avg"].flatten() for s in zero.state_dict()["state"].values()]
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()] + state))
    return (found[0] - found[1]).abs().max().item(), {
        name for launch in twin.process_group.launches for name in launch
    }


@pytest.mark.turns(2)
@pytest.mark.parametrize(
    ("way", "shard", "views"),
    [
        ("step", "even", False),
        ("step", "even", True),
        ("step", "whole", False),
        ("overlap", "even", False),
        ("interleaved", "whole", False),
        ("parallel", "even", False),
        ("parallel", "whole", False),
    ],
)
def test_H6_training_over_nccl_is_that_over_gloo(way, shard, views):
    for difference, names in run(3, over_nccl, way, shard, views, timeout=120):
        assert difference < 1e-6 and not names & {"allgather", "reduce_scatter"}, (
            difference,
            names,
        )
