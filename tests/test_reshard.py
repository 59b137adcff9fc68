"""State that moves in memory to other ranks or another plan, and training that goes on as without it."""

from random import Random

import pytest
import torch
import torch.distributed as dist
from common import caught, flatten, largest_gap, network
from common.saving import RECIPES, Recipe, inputs
from common.versions import KEEPS_ORDER
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW, NAdam

from zero_nb import ZeroRedundancyOptimizer, data_parallel, reshard, run, watch_divergence
from zero_nb.backward.ddp_overlap import overlap
from zero_nb.comm.groups import Group
from zero_nb.comm.recording import record
from zero_nb.comm.subgroups import split, two_level
from zero_nb.plan.policies import even
from zero_nb.plan.shards import ShardPlan, Span
from zero_nb.plan.span_moves import moves

SOME = [(0, 1, 2), (2, 3), (3, 1, 0), (1,), (0, 2), (0, 1, 2, 3), (3, 2, 1, 0)]


def group_of(ranks):
    """Make a group of some ranks, in any order that torch keeps; on the others, what `new_group` gives them."""
    made = split(Group(), [ranks if KEEPS_ORDER else sorted(ranks)])
    return dist.GroupMember.NON_GROUP_MEMBER if made is None else made


def step(model, optimizer, x):
    """Step on a gradient that is the same on all ranks."""
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def saved(optimizer):
    """Give the whole state and the options, of a group of any size."""
    with optimizer.giving_state_dicts("full"):
        full = optimizer.state_dict()
    state = {
        (i, key): value.double() if isinstance(value, torch.Tensor) else value
        for i, values in full["state"].items()
        for key, value in values.items()
    }
    return state, [{k: v for k, v in g.items() if k != "params"} for g in full["param_groups"]]


def history(recipe, changes, seed):
    """Train, with a change of ranks or of plan before each step but the first."""
    model = recipe.model()
    if dist.get_rank() == 3:  # was not there at first
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(3)
    mine = group_of_one()
    there = group_of((0, 1, 2)) if changes else None
    member = there is not dist.GroupMember.NON_GROUP_MEMBER
    optimizer = make(recipe, model, there if member else mine)
    found = []
    for i, x in enumerate(inputs(recipe, seed, 7)):
        if changes and i:
            kind, value = changes[i - 1]
            if kind == "ranks":
                there = value if value is None else group_of(value)
                member = there is not dist.GroupMember.NON_GROUP_MEMBER
                reshard(optimizer, there)
            elif kind == "levels":
                reshard(optimizer, two_level(2))
                member = True
            elif member:
                reshard(optimizer, **{kind: value})
        if member:
            step(model, optimizer, x)
            found = [p.detach().double() for p in model.parameters()]
            state = saved(optimizer)
        elif not optimizer.shards:
            for refused in (optimizer.state_dict, optimizer.step, lambda: reshard(optimizer)):
                with pytest.raises(RuntimeError, match="has left this optimizer"):
                    refused()
    return (found, *state) if member else None


def group_of_one():
    return split(Group(), [[rank] for rank in range(dist.get_world_size())])


def make(recipe, model, group):
    params = list(model.parameters())
    options = dict(recipe.options)
    if recipe.muon:
        matrices = [p for p in params if p.dim() == 2]
        rest = [p for p in params if p.dim() != 2]
        muon = {"params": matrices, "optimizer_class": torch.optim.Muon, "lr": 1e-2}
        params = [muon, {"params": rest, "lr": 1e-2}]
    return ZeroRedundancyOptimizer(params, recipe.kind, group, bucket_cap_mb=0.002, **options)


def draw_changes(random, elementwise):
    policies = ["whole", "greedy", "auto", *["even"] * elementwise]
    changes = []
    for _ in range(6):
        kind = random.choice(["ranks", "ranks", "levels", "shard", "bucket_cap_mb"])
        value = {
            "ranks": random.choice([None, *SOME]),
            "levels": None,
            "shard": random.choice(policies),
            "bucket_cap_mb": random.choice([0.0001, 0.01, 25.0]),
        }[kind]
        changes.append((kind, value))
    changes[-1] = ("ranks", random.choice([None, *SOME]))
    return changes


def same_state(found, wanted, exact):
    """Compare whole states; in bfloat16 a last digit may round the other way."""
    state, options = found
    other, others = wanted
    assert state.keys() == other.keys()
    assert options == others
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            assert torch.allclose(value, other[key], rtol=exact, atol=exact), key
        else:
            assert value == other[key], key


@pytest.mark.turns(2)
@pytest.mark.parametrize("name", [name for name in RECIPES if name != "one element, stride 2"])
def test_histories_of_ranks_and_plans_train_what_one_process_trains(name):
    recipe = RECIPES[name]
    exact = 1e-5 if recipe.model().state_dict().popitem()[1].dtype == torch.bfloat16 else 1e-9
    elementwise = name not in ("Adafactor", "Muon and AdamW")
    [(alone, *state)] = run(1, history, recipe, [], 5)
    for seed in range(1 + (name == "AdamW")):
        changes = draw_changes(Random(f"{name} {seed}"), elementwise)
        for got in run(4, history, recipe, changes, 5):
            if got is None:
                continue
            gap = max(largest_gap(a, b) for a, b in zip(got[0], alone, strict=True))
            assert gap <= (0.01 if exact > 1e-6 else 1e-9), changes
            same_state(got[1:], state, exact)


def frozen_history(changes):
    """Train all, freeze some and add a group, change the ranks, thaw."""
    model = nn.Sequential(network(), nn.Linear(5, 0), nn.Linear(0, 3)).double()
    layers = list(model[0].parameters())
    rest = list(model[1:].parameters())
    optimizer = ZeroRedundancyOptimizer(layers, AdamW, lr=1e-2, bucket_cap_mb=0.001)
    optimizer.add_param_group({"params": rest, "lr": 3e-2})
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1 / (1 + i))
    member = True
    for i, x in enumerate(inputs(Recipe(), 1, 8)):
        frozen = 2 <= i < 5
        for p in (layers[0], layers[2]):
            p.requires_grad_(not frozen)
        if i in changes:
            there = group_of(changes[i])
            member = there is not dist.GroupMember.NON_GROUP_MEMBER
            reshard(optimizer, there)
        if not member:
            schedule.step()  # a schedule counts for itself
            continue
        optimizer.zero_grad()
        (model(x).square().mean() + model[0](x).square().mean()).backward()
        optimizer.step()
        schedule.step()
    if not member:
        return None
    return flatten(model), saved(optimizer), [g["lr"] for g in optimizer.param_groups]


def test_frozen_parameters_added_groups_and_parameters_without_elements_move_too():
    [(alone, state, rates)] = run(1, frozen_history, {})
    for changes in (
        {3: (0, 2), 6: (0, 1, 2)},
        {2: (1, 2), 4: (2, 0, 1), 7: (1,)},
        {1: (0,), 5: (0, 2, 1)},
    ):
        found = [got for got in run(3, frozen_history, changes) if got is not None]
        assert found
        for params, whole, other in found:
            assert largest_gap(params, alone) < 1e-9
            same_state(whole, state, 1e-9)
            assert other == rates


def numbers_of_a_state():
    """Let a rank join whose state has numbers that bfloat16 cannot hold."""
    torch.manual_seed(0)
    model = nn.Linear(9, 5).bfloat16()
    mine = group_of_one()
    member = dist.get_rank() == 0
    optimizer = ZeroRedundancyOptimizer(model.parameters(), NAdam, mine, lr=1e-2)
    for _ in range(3):
        if member:
            step(model, optimizer, torch.ones(2, 9, dtype=torch.bfloat16))
    reshard(optimizer, None)
    with optimizer.giving_state_dicts("full"):
        full = optimizer.state_dict()
    local = [
        float(state["mu_product"]) for state in optimizer.optim.state.values() if "step" in state
    ]
    return {float(state["mu_product"]) for state in full["state"].values()}, local


def test_numbers_keep_their_digits_on_a_rank_that_joins():
    (first, mine), (second, theirs) = run(2, numbers_of_a_state)
    assert first == second == {*mine, *theirs}
    assert len(first) == 1


class WideMomentum(torch.optim.Optimizer):
    """Keeps a momentum of float32 for parameters of lower precision."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for p in [p for group in self.param_groups for p in group["params"]]:
            if p.grad is None:
                continue
            state = self.state[p]
            momentum = state.setdefault("momentum", torch.zeros_like(p, dtype=torch.float32))
            momentum.mul_(0.9).add_(p.grad.float(), alpha=0.37)
            p.sub_((0.01 * momentum).to(p.dtype))


def wide_state():
    """Move a state of float32 whose parameters are bfloat16: from whole ones to parts, and on."""
    torch.manual_seed(0)
    model = nn.Linear(5, 5).bfloat16()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), WideMomentum)
    for _ in range(2):
        step(model, optimizer, torch.full((1, 5), 0.777, dtype=torch.bfloat16))
    before, _ = saved(optimizer)
    after = []
    for shard in ("even", "whole", "even"):
        reshard(optimizer, shard=shard)
        after.append(saved(optimizer)[0])
    return before, after


def test_state_of_more_digits_than_its_parameters_keeps_them():
    for before, after in run(2, wide_state):
        momentum = before[0, "momentum"]
        assert not torch.equal(momentum, momentum.bfloat16().double())
        for state in after:
            assert all(torch.equal(state[key], value) for key, value in before.items())


def frozen_without_state():
    """Freeze parameters of a class that has no state, and change the ranks again and again."""
    params = [nn.Parameter(torch.ones(6 + i).double()) for i in range(5)]
    optimizer = ZeroRedundancyOptimizer(params, SGD, lr=0.25)
    count = 0
    for i, ranks in enumerate([None, None, (0, 1), (2, 1, 0), (2,), (1, 2), None]):
        there = None if ranks is None else group_of(ranks)
        if i:
            reshard(optimizer, there)
        for p in params[:3]:
            p.requires_grad_(i % 6 == 0)  # thawed at last
        if there is dist.GroupMember.NON_GROUP_MEMBER:
            continue
        for p in params:
            p.grad = torch.ones_like(p) if p.requires_grad else None
        optimizer.step()
        count += 1
    return [p.unique().tolist() for p in params], count


def test_frozen_parameters_without_state_move_as_others_do():
    for values, _ in run(3, frozen_without_state, timeout=30):
        assert values == [[0.5]] * 3 + [[1 - 7 * 0.25]] * 2


def loaded_while_away():
    """A rank leaves; the others load the state of no step; it comes back."""
    model = network()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=1e-2)
    fresh = optimizer.state_dict()
    batches = inputs(Recipe(), 3, 2)
    step(model, optimizer, batches[0])
    reshard(optimizer, group_of((0,)))
    if dist.get_rank() == 0:
        optimizer.load_state_dict(fresh)
    reshard(optimizer, None)
    empty, _ = saved(optimizer)
    step(model, optimizer, batches[1])
    return empty, {float(value) for (_, key), value in saved(optimizer)[0].items() if key == "step"}


def test_a_rank_that_comes_back_forgets_steps_that_the_others_have_undone():
    assert run(2, loaded_while_away, timeout=30) == [({}, {1.0})] * 2


def before_any_step():
    model = network()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=1e-2)
    reshard(optimizer, group_of((1, 0, 2)))
    reshard(optimizer, shard="whole")
    for x in inputs(Recipe(), 3, 2):
        step(model, optimizer, x)
    return flatten(model), optimizer.rank, [*optimizer.shards[0].plan.loads]


def test_an_optimizer_that_was_not_stepped_takes_the_new_ranks():
    found = run(3, before_any_step)
    assert [rank for _, rank, _ in found] == ([1, 0, 2] if KEEPS_ORDER else [0, 1, 2])
    assert all(torch.equal(params, found[0][0]) for params, _, _ in found)
    assert sorted(found[0][2]) != [found[0][2][0]] * 3  # whole parameters are of unequal size


def with_overlap(mode):
    """Go on in a mode that steps inside backward, before and after; on fewer ranks, then on all."""
    model = network()
    there = None
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, there, lr=1e-2)
    found = []
    for i, x in enumerate(inputs(Recipe(), 2, 6)):
        if i % 2 == 0:
            group = [None, (0, 1), None][i // 2]
            there = None if group is None else group_of(group)
            if i:
                reshard(optimizer, there)
            if there is dist.GroupMember.NON_GROUP_MEMBER:
                continue
            pg = None if there is None else there.process_group
            if mode == "zero2":
                attached = data_parallel(model, optimizer)
                call = model
            else:
                call = DDP(model, process_group=pg)
                attached = overlap(
                    call, optimizer, interleaved=mode == "zero1-overlap, interleaved"
                )
        elif there is dist.GroupMember.NON_GROUP_MEMBER:
            continue
        optimizer.zero_grad()
        call(x).square().mean().backward()
        optimizer.step()
        if i % 2:
            attached.detach()
            found = flatten(model)
    return found


@pytest.mark.parametrize("mode", ["zero1-overlap", "zero1-overlap, interleaved", "zero2"])
def test_modes_that_step_in_backward_go_on_after_it(mode):
    [alone] = run(1, plain_steps)
    for got in run(3, with_overlap, mode):
        assert largest_gap(got, alone) < 1e-9


def plain_steps():
    model = network()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    for x in inputs(Recipe(), 2, 6):
        step(model, optimizer, x)
    return flatten(model)


def bytes_sent(ranks, shard):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(80, 50 + 7 * i) for i in range(8)])
    group = record()
    params = list(model.parameters())
    optimizer = ZeroRedundancyOptimizer(params, AdamW, group, lr=1e-2)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    old = optimizer.shards[0].plan.shard_plan
    there = group_of(ranks)
    with group.recording() as log:
        reshard(optimizer, there, shard=shard, callers=group)
    if optimizer.shards:
        new = optimizer.shards[0].plan.shard_plan
        return float(log.wire), old, new
    return float(log.wire), old, None


@pytest.mark.parametrize(
    "ranks, shard", [((0, 1, 2), None), ((2, 0), "whole"), ((0, 1, 2, 3), "greedy")], ids=str
)
def test_what_travels_is_what_the_plans_say(ranks, shard):
    every = run(4, bytes_sent, ranks, shard)
    old = every[0][1]
    new = next(plan for _, _, plan in every if plan is not None)
    seats = dict(enumerate(ranks if KEEPS_ORDER else sorted(ranks)))
    elements = sum(m.numel for m in moves_in_job(old, new, seats))
    sent = sum(wire for wire, _, _ in every)
    assert 8 * elements <= sent <= 8 * elements + 40_000  # headers, agreements, checks


def parameters_sent(before, after):
    """Grow with a class that keeps no state, so that parameters alone travel; each rank has others."""
    rank = dist.get_rank()
    model = nn.Linear(400, 300)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(float(rank in before) or -1.0 - rank)
    holds = group_of(before)
    member = holds is not dist.GroupMember.NON_GROUP_MEMBER
    mine = group_of_one()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, holds if member else mine, lr=0.1)
    if member:
        model(torch.zeros(1, 400)).sum().mul(0).backward()
        optimizer.step()
    there = group_of(after)
    group = record()
    with group.recording() as log:
        reshard(optimizer, there, callers=group)
    return float(log.wire) / (4 * 401 * 300), flatten(model).unique().tolist()


@pytest.mark.parametrize(
    "before, after, sends",
    [
        ((0, 1), (0, 1, 2, 3, 4), [2, 1, 0, 0, 0]),
        ((3,), (0, 4), [0, 0, 0, 2, 0]),  # and leaves
        ((0, 1, 2), (4, 3, 2), [1, 1, 0, 0, 0]),
    ],
)
def test_parameters_travel_once_to_each_rank_that_lacks_them(before, after, sends):
    found = run(5, parameters_sent, before, after)
    for rank, ((sent, values), wanted) in enumerate(zip(found, sends, strict=True)):
        assert wanted <= sent < wanted + 0.05, (rank, sent)
        assert values == [1.0 if rank in before + after else -1.0 - rank]


def moves_in_job(old, new, seats):
    """List what must move, where the new plan's ranks are other ranks of the job."""
    size = old.world_size
    at = {rank: place for place, rank in seats.items()}
    shards = [new.shards[at[rank]] if rank in at else () for rank in range(size)]
    return moves(old, ShardPlan(new.params, tuple(shards)))


def caught_in(what, *more):
    model = network()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=1e-2)
    batches = inputs(Recipe(), 3, 4)
    for x in batches[:2]:
        step(model, optimizer, x)
    before = saved(optimizer)
    said = caught(lambda: what(model, optimizer, *more))
    same_state(saved(optimizer), before, 0.0)
    for x in batches[2:]:
        step(model, optimizer, x)
    return said, flatten(model)


def attached(model, optimizer):
    handle = overlap(DDP(model), optimizer)
    try:
        reshard(optimizer, group_of((0,)))
    finally:
        handle.detach()


def watched(model, optimizer):
    with watch_divergence(model, optimizer):
        reshard(optimizer, group_of((0,)))


def other_model(model, optimizer):
    mine = group_of_one()
    if dist.get_rank():
        wrong = nn.Linear(3, 2).double()
        optimizer = ZeroRedundancyOptimizer(wrong.parameters(), AdamW, mine)
    reshard(optimizer, None)


def other_policy(model, optimizer):
    reshard(optimizer, shard="whole" if dist.get_rank() else "greedy")


def policy_that_differs(model, optimizer):
    rank = dist.get_rank()

    def policy(specs, world_size, *, loads=None):
        plan = even(specs, world_size)
        return ShardPlan(plan.params, plan.shards[::-1]) if rank else plan

    reshard(optimizer, shard=policy)


def lost(model, optimizer):
    group_of((0,))
    reshard(optimizer, dist.GroupMember.NON_GROUP_MEMBER)


def not_all_call(model, optimizer):
    """The new group is of all ranks, and those that call are one each."""
    reshard(optimizer, None, callers=group_of_one())


def two_trainings(model, optimizer):
    other = network()
    mine = ZeroRedundancyOptimizer(other.parameters(), AdamW, group_of_one(), lr=1e-2)
    for x in inputs(Recipe(), 9, 1 + dist.get_rank()):
        step(other, mine, x)
    reshard(mine, None)


def called_by_some(model, optimizer):
    """A rank that holds state is not among the callers, and does not call."""
    there = group_of((1,))
    if dist.get_rank():
        reshard(optimizer, there, callers=there)
    else:
        raise ValueError("all ranks that hold state must call reshard()")


def other_strides(model, optimizer):
    """Elements are counted in memory order, which is another on the rank that joins."""
    layer = nn.Conv2d(4, 6, 3).double()
    if dist.get_rank() == 0:
        layer = layer.to(memory_format=torch.channels_last)
    mine = ZeroRedundancyOptimizer(layer.parameters(), AdamW, group_of_one(), lr=1e-2)
    if dist.get_rank() == 0:
        step(layer, mine, torch.ones(1, 4, 5, 5).double())
    reshard(mine, None)


def other_groups(model, optimizer):
    """Each rank has two groups, and puts another parameter into the first."""
    params = [nn.Parameter(torch.ones(6)) for _ in range(3)]
    first = 1 + dist.get_rank()
    groups = [{"params": params[:first], "lr": 0.1}, {"params": params[first:], "lr": 0.2}]
    reshard(ZeroRedundancyOptimizer(groups, AdamW, group_of_one()), None)


def cut_in_another_way(model, optimizer):
    """A rank joins by a class's own rule those that shard by a function."""

    def policy(specs, world_size, *, loads=None):
        return even(specs, world_size)

    other = network()
    shard = "auto" if dist.get_rank() else policy
    mine = ZeroRedundancyOptimizer(other.parameters(), AdamW, group_of_one(), shard=shard)
    if dist.get_rank() == 0:
        step(other, mine, inputs(Recipe(), 3, 1)[0])
    reshard(mine, None)


def no_group_for_new_group(model, optimizer):
    """A rank outside the new group says `None`, which are all ranks."""
    other = network()
    mine = ZeroRedundancyOptimizer(other.parameters(), AdamW, group_of_one())
    there = group_of((0,))
    if dist.get_rank() == 0:
        step(other, mine, inputs(Recipe(), 3, 1)[0])
    reshard(mine, None if dist.get_rank() else there)


def added_after_leaving(model, optimizer):
    """A rank that has left holds nothing that a group could be added to."""
    other = network()
    mine = ZeroRedundancyOptimizer(other.parameters(), AdamW)
    reshard(mine, group_of((0,)))
    if dist.get_rank() == 0:
        raise RuntimeError("has left this optimizer")
    mine.add_param_group({"params": [nn.Parameter(torch.ones(3))]})


def rows_that_differ(model, optimizer):
    """Each of two rows of one rank asks for another plan."""
    other = network()
    mine = ZeroRedundancyOptimizer(other.parameters(), AdamW, two_level(1))
    reshard(mine, shard="whole" if dist.get_rank() else "greedy")


def cut_a_matrix(model, optimizer):
    model = nn.Linear(6, 6).double()
    muon = ZeroRedundancyOptimizer([model.weight], torch.optim.Muon, lr=1e-2)
    reshard(muon, shard=lambda specs, n, loads=None: even(specs, n))


WRONG = {
    attached: "RuntimeError: reshard() moves state between steps after backward",
    watched: "RuntimeError: reshard() moves state that watch_divergence() compares",
    other_model: "group 0: AdamW, 7 parameters",
    other_policy: "shard=",
    policy_that_differs: "comparing plans for reshard()",
    lost: "ValueError: no rank is in the new group",
    not_all_call: "ValueError: all ranks that hold state must call reshard()",
    two_trainings: "ValueError: groups that hold state must have the same plan and the same steps",
    called_by_some: "ValueError: all ranks that hold state must call reshard()",
    other_strides: "strides (36, 1, 12, 4)",
    other_groups: "group 0: AdamW, 1 parameters",
    cut_in_another_way: "group 0 steps its parameters one by one",
    no_group_for_new_group: "ValueError: the ranks of the new group must be in one group each",
    added_after_leaving: "RuntimeError",
    rows_that_differ: "shard=",
    cut_a_matrix: "would not train as it does unsharded",
}


@pytest.mark.turns(4)
@pytest.mark.parametrize("what", WRONG, ids=lambda what: what.__name__)
def test_mistakes_are_errors_on_every_rank_and_change_nothing(what):
    [(_, alone)] = run(1, caught_in, lambda *_: None)
    for said, params in run(2, caught_in, what):
        assert said is not None and WRONG[what] in said
        assert largest_gap(params, alone) < 1e-9


def a_plan_of_its_own():
    model = network()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1, momentum=0.9)
    batches = inputs(Recipe(), 3, 4)
    for x in batches[:2]:
        step(model, optimizer, x)
    specs = optimizer.shards[0].plan.params
    spans = [[], [], []]  # the third rank owns nothing
    for i, spec in enumerate(specs):
        cut = spec.numel // 3
        spans[i % 2].append(Span(i, 0, cut))
        spans[1 - i % 2].append(Span(i, cut, spec.numel))
    plan = ShardPlan(tuple(specs), tuple(tuple(s for s in part if s.numel) for part in spans))
    reshard(optimizer, shard=plan)
    step(model, optimizer, batches[2])
    fewer = group_of((0, 2))
    said = caught(lambda: reshard(optimizer, fewer))
    step(model, optimizer, batches[3])
    return flatten(model), optimizer.shards[0].plan.shard_plan.shards == plan.shards, said


def test_a_plan_that_is_a_value_is_used_as_it_is():
    [alone] = run(1, momentum_steps)
    for params, same, said in run(3, a_plan_of_its_own):
        assert same and largest_gap(params, alone) < 1e-9
        assert "is for 3 ranks, and 2 share the state" in said


def momentum_steps():
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x in inputs(Recipe(), 3, 4):
        step(model, optimizer, x)
    return flatten(model)


def killed_in_the_middle(model, optimizer):
    """One rank fails while state moves; the others hear of it."""
    import zero_nb.checkpoint.resharding as chapter

    if dist.get_rank() == 1:
        keep = chapter.exchange_state

        def fail(*args):
            raise MemoryError("no room")

        chapter.exchange_state = fail
        try:
            reshard(optimizer, group_of((0, 1)))
        finally:
            chapter.exchange_state = keep
    else:
        reshard(optimizer, group_of((0, 1)))


def middle():
    torch.manual_seed(0)
    model = network()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=1e-2)
    step(model, optimizer, inputs(Recipe(), 3, 1)[0])
    return caught(lambda: killed_in_the_middle(model, optimizer))


def test_a_rank_that_fails_while_state_moves_ends_the_others():
    first, second, third = run(3, middle, timeout=60)
    assert "no room" in second
    for said in (first, third):
        assert "rank 1 failed with MemoryError: no room" in said, said
