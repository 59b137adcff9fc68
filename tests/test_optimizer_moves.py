"""What may change between steps: parameters that freeze, thaw, move or have no gradient, and their state with them."""

import copy
import gc
import itertools
from functools import partial

import pytest
import torch
import torch.distributed as dist
from common import caught_error, run_each
from common.afresh import measures_memory, run_afresh
from common.counting import calls
from common.training import difference
from torch import nn

from zero_nb import full_state_dict, save_sharded
from zero_nb.apps.peak_memory import peak_bytes
from zero_nb.backward.ddp_buckets import plan_buckets
from zero_nb.comm.launch import run
from zero_nb.comm.recording import record
from zero_nb.comm.simulation import simulate
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer
from zero_nb.optim.param_specs import group_specs
from zero_nb.optim.pieces import Piece
from zero_nb.plan.policies import even
from zero_nb.plan.shards import ShardPlan, Span


def small(count=7):
    """Parameters of many sizes, some of which share a bucket; two are cut at most world sizes."""
    torch.manual_seed(3)
    return [
        nn.Parameter(torch.randn(shape))
        for shape in ((50, 7), (3,), (20, 20), (5, 9), (), (300,), (64, 8))[:count]
    ]


KINDS = {
    "AdamW": (torch.optim.AdamW, {}, {}),
    "AdamW, views": (torch.optim.AdamW, {}, {"parameters_as_bucket_view": True}),
    "AdamW, small buckets": (torch.optim.AdamW, {}, {"bucket_cap_mb": 0.001}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}, {}),
    "ASGD": (torch.optim.ASGD, {}, {}),
    "NAdam": (torch.optim.NAdam, {}, {}),
    "Adagrad": (torch.optim.Adagrad, {}, {"parameters_as_bucket_view": True}),
    "whole": (torch.optim.AdamW, {}, {"shard": "whole"}),
    "Adafactor": (torch.optim.Adafactor, {}, {}),
}


def shapes_in(state_dict):
    return {
        i: {k: torch.as_tensor(v).shape for k, v in s.items()}
        for i, s in state_dict["state"].items()
    }


def beside_plain(scenario, steps=9):
    """Step every kind beside the plain optimizer while `scenario` changes both sets of parameters;
    give the differences and what is saved at the end."""
    out = {}
    for name, (kind, options, how) in KINDS.items():
        ours, theirs = small(), small()
        zero, plain = (
            ZeroRedundancyOptimizer(ours, kind, lr=0.01, **options, **how),
            kind(theirs, lr=0.01, **options),
        )
        for step in range(steps):
            torch.manual_seed(step)
            for i, (p, q) in enumerate(zip(ours, theirs, strict=True)):
                grad = torch.randn(p.shape)
                for x in (p, q):
                    scenario(step, i, x)
                    x.grad = (
                        torch.empty_like(x).copy_(grad)  # laid out as autograd does
                        if x.requires_grad and not (scenario is absent and absent(step, i, x))
                        else None
                    )
            zero.step()
            plain.step()
        zero.consolidate_state_dict()
        saved, want = zero.state_dict() if dist.get_rank() == 0 else None, plain.state_dict()
        same = saved is None or shapes_in(saved) == shapes_in(want)
        steps_of = saved is None or {i: s.get("step") for i, s in saved["state"].items()} == {
            i: s.get("step") for i, s in want["state"].items()
        }
        out[name] = (
            difference(ours, theirs),
            same,
            steps_of,
            torch.cat([p.detach().flatten() for p in ours]),
        )
    return out


def absent(step, i, p):
    """Leave some parameters without gradient in some steps."""
    return (step * 5 + i * 3) % 7 < 2


def frozen(step, i, p):
    """Freeze some at first, some later, and let some come back."""
    if step == 0:
        p.requires_grad_(i not in (1, 5))
    if step == 3:
        p.requires_grad_(i != 2)
    if step == 5:
        p.requires_grad_(i in (0, 5))
    if step == 7:
        p.requires_grad_(True)


def moved(step, i, p):
    """Replace the memory of some."""
    if step in (2, 6) and i % 2:
        p.data = p.data.clone()


def relaid(step, i, p):
    """Store matrices by columns, some of them frozen at first, and later by rows again."""
    if step == 0:
        p.requires_grad_(i != 6)
    if step == 4:
        p.requires_grad_(True)
    if step in (2, 6) and p.dim() == 2:
        p.data = p.data.t().contiguous().t() if step == 2 else p.data.contiguous()


def written(step, i, p):
    """Write into some, as loading a checkpoint of the model does."""
    with torch.no_grad():
        if step in (0, 4) and i % 3:
            p.mul_(-2.0)


@pytest.mark.turns(4)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("scenario", [absent, frozen, moved, relaid, written])
def test_what_may_change_between_steps(scenario, size):
    ranks = run(size, beside_plain, scenario)
    for name in KINDS:
        assert max(rank[name][0] for rank in ranks) <= 2e-6, name
        assert all(rank[name][1] for rank in ranks), f"{name}: the state has other keys or shapes"
        assert all(rank[name][2] for rank in ranks), f"{name}: step counts differ"
        assert all(rank[name][3].equal(ranks[0][name][3]) for rank in ranks), (
            f"{name}: replicas differ"
        )


def read_and_loaded_between(how, master):
    """Change the memory format of a model, and save and load the state before the next step."""
    torch.manual_seed(0)
    weight, other = nn.Parameter(torch.randn(6, 50)), nn.Parameter(torch.randn(7))
    if master:
        weight, other = (nn.Parameter(p.detach().bfloat16()) for p in (weight, other))
    copies = [nn.Parameter(p.detach().float()) for p in (weight, other)]
    zero = ZeroRedundancyOptimizer(
        [weight, other], torch.optim.AdamW, lr=0.1, master_dtype=master, **how
    )
    plain = torch.optim.AdamW(copies, lr=0.1)
    found = []
    for step in range(6):
        grads = [torch.randn(p.shape).to(weight.dtype) for p in copies]
        for p, q, g in zip((weight, other), copies, grads, strict=True):
            p.grad, q.grad = torch.empty_like(p).copy_(g), g.float()
        zero.step()
        plain.step()
        if step in (1, 3):
            by_columns = step == 1
            weight.data = (
                weight.data.t().contiguous().t() if by_columns else weight.data.contiguous()
            )
            saved = full_state_dict(zero, None)
            rows = {i: {k: v.contiguous() for k, v in s.items()} for i, s in saved["state"].items()}
            for i, p in enumerate(copies):
                want = dict(plain.state[p])
                if master:
                    want["master_param"] = p.detach()
                found += [difference([want[k]], [v]) for k, v in rows[i].items()]
            if not by_columns:  # in another layout than the parameter's
                rows[0] = {k: v.t().contiguous().t() if v.dim() else v for k, v in rows[0].items()}
            zero.load_state_dict({**saved, "state": rows})
    return max(found), difference([p.detach().float() for p in (weight, other)], copies)


@pytest.mark.parametrize("size", [1, 2])
def test_state_follows_its_parameters_into_another_memory_format(size):
    cases = {
        (shard, master): ({"shard": shard}, master)
        for shard in ("auto", "whole")
        for master in (None, torch.float32)
    }
    for (_, master), ranks in run_each(size, read_and_loaded_between, cases).items():
        for state, params in ranks:
            assert state < 1e-6 and params < (1e-2 if master else 1e-6), (state, params)


READS = {
    "consolidated": lambda zero, model, folder: zero.consolidate_state_dict(),
    "full": lambda zero, model, folder: full_state_dict(zero),
    "sharded": lambda zero, model, folder: save_sharded(folder, model, zero),
    "replanned": lambda zero, model, folder: None,  # of two param groups one after the other
}


def gradients(ours, theirs):
    """Give parameters and their copies equal gradients, laid out as autograd does."""
    for p, q in zip(ours, theirs, strict=True):
        grad = torch.randn(p.shape)
        p.grad = torch.empty_like(p).copy_(grad)
        q.grad = torch.empty_like(q).copy_(grad)


def converted_and_read(read, kind, folder):
    """Convert a model to another memory format between two steps, read its state, and step on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3))
    twin = copy.deepcopy(model)
    zero = ZeroRedundancyOptimizer(model[0].parameters(), kind, lr=0.01)
    zero.add_param_group({"params": model[1].parameters()})
    plain = kind(twin.parameters(), lr=0.01)
    for step in range(4):
        gradients(model.parameters(), twin.parameters())
        zero.step()
        plain.step()
        form = (torch.channels_last, torch.contiguous_format)[step % 2]
        for module in (model, twin):
            module.to(memory_format=form)
        READS[read](zero, model, folder / f"{dist.get_world_size()} {step}")
    zero.consolidate_state_dict(None)
    whole = zero.state_dict()["state"]
    state = [whole[i]["step"] for i in whole]
    return difference(model.parameters(), twin.parameters()), state


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad])
@pytest.mark.parametrize("read", READS)
def test_state_of_whole_parameters_follows_them_before_the_next_step(folder, read, kind, size):
    """A fused kernel reads a parameter and its state in the order of memory, and they lay in two orders."""
    for gap, steps in run(size, converted_and_read, read, kind, folder):
        assert gap < 1e-6 and steps == [4] * 4


class KeepsMoments(torch.optim.Optimizer):
    """Keeps its moments in a list, too, and steps by those of the list."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})
        self.moments = []

    @torch.no_grad()
    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"]]
        if not self.moments:
            self.moments = [torch.zeros_like(p) for p in params]
            for p, moment in zip(params, self.moments, strict=True):
                self.state[p]["moment"] = moment
        for p, moment in zip(params, self.moments, strict=True):
            p.sub_(moment.mul_(0.9).add_(p.grad), alpha=0.01)


def kept_elsewhere():
    """Convert a model whose optimizer holds its state in two places."""
    torch.manual_seed(0)
    model = nn.Conv2d(3, 8, 3)
    zero = ZeroRedundancyOptimizer(
        model.parameters(), KeepsMoments, shard="whole", trust_optimizer_class=True
    )
    for _ in range(3):
        gradients(model.parameters(), model.parameters())
        zero.step()
        model.to(memory_format=torch.channels_last)
        zero.consolidate_state_dict()
    optim = zero.local.by_class[KeepsMoments]
    return [
        optim.state[p]["moment"] is m
        for p, m in zip(model.parameters(), optim.moments, strict=True)
    ]


def test_a_class_that_holds_its_state_elsewhere_too_goes_on_in_another_memory_format():
    assert run(1, kept_elsewhere) == [[True, True]]


def test_a_step_that_fails_changes_nothing_and_can_be_repeated():
    def fails():
        params = small()
        zero = ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=1.0)
        for p in params:
            p.grad = torch.ones_like(p)
        zero.param_groups[0]["lr"] = "high"
        message = caught_error(zero.step)
        same = all(p.equal(q) for p, q in zip(params, small(), strict=True))
        with torch.no_grad():
            params[0].zero_()
        zero.param_groups[0]["lr"] = 1.0
        zero.step()
        return (
            message is not None,
            same,
            params[0].equal(-torch.ones(50, 7)),
            params[1].equal(small()[1] - 1),
        )

    assert run(2, fails) == [(True,) * 4] * 2


def test_each_device_of_a_process_has_a_name_that_is_the_same_on_all_ranks():
    class Elsewhere:  # what a plan asks of a parameter
        layout, shape, dtype, requires_grad = torch.strided, (2,), torch.float32, True

        def __init__(self, device):
            self.device = torch.device(device)

        def is_contiguous(self):
            return True

    def names(*devices):
        return [spec.device for spec in group_specs([{"params": [*map(Elsewhere, devices)]}])]

    assert (
        names("cuda:0", "cuda:1", "cpu", "cuda:0")
        == names("cuda:2", "cuda:3", "cpu", "cuda:2")
        == ["cuda", "cuda+1", "cpu", "cuda"]
    )


@pytest.mark.parametrize("size", [2, 3])
def test_a_frozen_parameter_costs_nothing_and_keeps_its_state(size):
    def freeze():
        params = [nn.Parameter(torch.zeros(1000)) for _ in range(2)]
        zero = ZeroRedundancyOptimizer(params, torch.optim.AdamW, record(), lr=0.1)
        sent, held = [], []
        for trainable in (True, False, True):
            params[1].requires_grad_(trainable)
            for p in params:
                p.grad = torch.ones(1000) if p.requires_grad else None
            zero.step()  # plans anew where something changed
            zero.zero_grad()
            for p in params:
                p.grad = torch.ones(1000) if p.requires_grad else None
            with zero.process_group.recording() as log:
                zero.step()
            sent.append(float(log.wire))
            held.append(
                sum(v.numel() for s in zero.optim.state.values() for v in s.values() if v.dim())
            )
        zero.consolidate_state_dict()
        return (
            sent,
            held,
            (
                [int(s["step"]) for s in zero.state_dict()["state"].values()]
                if dist.get_rank() == 0
                else [6, 4]
            ),
        )

    for sent, held, steps in run(size, freeze):
        assert sent[0] == pytest.approx(2 * sent[1], rel=0.1) and sent[2] == sent[0]
        assert held[1] == pytest.approx(2 * 1000 / size, abs=32) and held[0] == held[
            2
        ] == pytest.approx(4 * 1000 / size, abs=32)
        assert steps == [6, 4]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_froze_in_groups_that_came_apart_finds_its_state_when_all_thaws_at_once(size):
    def freeze():
        params = [nn.Parameter(torch.zeros(300)) for _ in range(4)]
        zero = ZeroRedundancyOptimizer(params[:2], torch.optim.AdamW, lr=0.1)
        zero.add_param_group({"params": params[2:]})
        for trainable in (True, False, True):
            for p in params[1::2]:
                p.requires_grad_(trainable)
            for _ in range(2):
                for p in params:
                    p.grad = torch.ones(300) if p.requires_grad else None
                zero.step()
        zero.consolidate_state_dict(to=None)
        return [int(s["step"]) for s in zero.state_dict()["state"].values()]

    assert run(size, freeze) == [[6, 4, 6, 4]] * size


class Keeper(torch.optim.SGD):
    """Keeps something of its own in the state of some parameters."""

    kept: object = None

    def step(self, closure=None):
        super().step()
        for p in self.param_groups[0]["params"][:1]:
            self.state[p]["kept"] = self.kept


@pytest.mark.parametrize(
    "kept, fine",
    [
        (type("History", (), {}), False),
        (lambda: 1, False),
        ({"a": [1, (2.0, "b")], "c": torch.ones(2)}, True),
        (torch.float16, True),
        (None, True),
    ],
    ids=["class", "function", "containers", "dtype", "None"],
)
def test_state_that_no_other_rank_would_read_is_an_error_on_every_rank_at_once(kept, fine):
    def keep():
        Keeper.kept = kept
        params = [nn.Parameter(torch.ones(5, 3)) for _ in range(4)]
        zero = ZeroRedundancyOptimizer(params, Keeper, lr=0.1, shard="whole")
        for p in params:
            p.grad = torch.ones_like(p)
        zero.step()
        found = [caught_error(zero.consolidate_state_dict)]
        params[3].requires_grad_(False)
        params[3].grad = None
        return [
            *found,
            caught_error(zero.step),
            caught_error(lambda: zero.group.all_reduce(torch.ones(1))),
        ]

    for saving, moving, after in run(2, keep, group_timeout=20):
        assert after is None and (saving is moving is None) == fine
        for kind, message in (saving, moving) if not fine else ():
            assert (
                kind == "TypeError"
                and "state 'kept' of parameter" in message
                and "plain values" in message
            )


def moved(view):
    def made():
        params = [nn.Parameter(torch.zeros(1000, 500)) for _ in range(24)]
        zero = ZeroRedundancyOptimizer(
            params, torch.optim.AdamW, lr=0.1, parameters_as_bucket_view=view
        )
        for p in params:
            p.grad = torch.ones_like(p)
        zero.step()
        zero.zero_grad()
        return params, zero

    peak_bytes(
        torch.device("cpu"), lambda: None
    )  # what is made from here on goes back to the system when it is let go
    params, zero = made()
    peaks = []
    for width in (2, 3, 1):  # the state of a rank is as large as the parameters
        runs = [list(range(24))[i : i + width] for i in range(0, 24, width)][::-1]
        plan = partial(plan_buckets, zero, runs)
        peaks.append(
            peak_bytes(
                torch.device("cpu"),
                lambda plan=plan: zero.replan(zero.shards, "to measure it", plan),
            )
        )
        gc.collect()
    zero.consolidate_state_dict(to=None)
    same = all(
        s["exp_avg"].eq(s["exp_avg"][0, 0]).all() and int(s["step"]) == 1
        for s in zero.state_dict()["state"].values()
    )
    return [peak / sum(p.nbytes for p in params) for peak in peaks], same


@measures_memory
@pytest.mark.usefixtures("small_pool")
def test_state_moves_without_being_there_twice():
    for peaks, same in itertools.chain(*run_afresh(2, "test_optimizer_moves.moved", False, True)):
        assert max(peaks) < 1.0 and same, (
            peaks
        )  # all of it once more would be 1 for the state, and 1 for parameters that are views


def test_a_master_copy_survives_freezing_and_missing_gradients():
    def steps():
        torch.manual_seed(0)
        low = [nn.Parameter(torch.randn(n, dtype=torch.bfloat16)) for n in (90, 5, 40)]
        high = [nn.Parameter(p.detach().float()) for p in low]
        zero = ZeroRedundancyOptimizer(
            low, torch.optim.AdamW, lr=1e-3, fused=False, foreach=False, master_dtype=torch.float32
        )
        plain, same = torch.optim.AdamW(high, lr=1e-3, foreach=False), []
        for step in range(10):
            low[2].requires_grad_(step not in (3, 4))
            for i, (p, q) in enumerate(zip(low, high, strict=True)):
                p.grad = (
                    None
                    if not p.requires_grad or (i == 1 and step % 4 == 2)
                    else torch.randn(p.shape).bfloat16()
                )
                q.grad = None if p.grad is None else p.grad.float()
            zero.step()
            plain.step()
            same.append(all(p.equal(q.bfloat16()) for p, q in zip(low, high, strict=True)))
        return same

    for size in (1, 2, 3):
        assert run(size, steps) == [[True] * 10] * size


def test_a_constructor_makes_a_few_calls_for_each_parameter_and_no_views_of_others_parameters():
    params = [nn.Parameter(torch.zeros(8)) for _ in range(3000)]
    plain = calls(lambda: torch.optim.AdamW(params, lr=0.1))
    with simulate(1024, 7) as many:
        for group, most in (
            (None, 4),
            (many, 6),
        ):  # of the plain one's: a planner of one object for each parameter made 18
            made = []
            found = calls(
                lambda group=group, made=made: made.append(
                    ZeroRedundancyOptimizer(params, torch.optim.AdamW, group, lr=0.1)
                )
            )
            assert found < most * plain, (found, plain)
    shard = made[0].shards[0]
    assert (
        not any("stretches" in vars(bucket) for bucket in shard.buckets)
        and sum(len(bucket.mine) for bucket in shard.buckets) <= 4
    )


def test_the_gradient_of_a_piece_that_is_cut_at_both_ends_is_the_same_the_quick_way():
    params = [nn.Parameter(torch.zeros(shape)) for shape in ((2, 3), (4,), (), (3, 3))]
    for p in params:
        p.grad = torch.rand(p.shape)
    params[3].grad = torch.rand(3, 3).t()  # its layout is not the parameter's
    for spans, quick in (
        ([Span(0, 2, 6), Span(1, 0, 4), Span(2, 0, 1), Span(3, 0, 5)], True),
        ([Span(0, 0, 6), Span(1, 0, 3), Span(2, 0, 1), Span(3, 0, 9)], False),
    ):
        flat = torch.zeros(sum(stop - start for _, start, stop in spans))
        piece = Piece(spans, params, flat, flat)
        assert piece._row_major is quick
        want = torch.cat(
            [p.grad.reshape(-1)[a:b] for p, (_, a, b) in zip(params, spans, strict=True)]
        )
        assert piece.gradient([p.grad for p in params]).tolist() == want.tolist()


def _freeze_and_thaw(shard):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3), nn.Linear(3, 2))
    frozen = model[0].weight
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2, shard=shard)
    for step in range(6):
        frozen.requires_grad_(not 2 <= step < 4)
        zero.zero_grad()
        model(torch.full((4, 7), 0.1 * step + 0.1)).square().mean().backward()
        zero.step()
    return [p.detach() for p in model.parameters()]


def _uneven_cuts(specs, world_size, *, loads=None):
    """A policy of the user's: cut every parameter after its first third."""
    spans = [Span(i, 0, spec.numel // 3) for i, spec in enumerate(specs)]
    rest = [Span(i, spec.numel // 3, spec.numel) for i, spec in enumerate(specs)]
    trained = [spec.trainable for spec in specs]
    parts = [
        tuple(s for s in part if trained[s.param] and s.numel)
        for part in (spans, rest, *[()] * (world_size - 2))
    ]
    return ShardPlan(tuple(specs), tuple(parts))


@pytest.mark.parametrize("policy", [even, _uneven_cuts], ids=["even", "uneven"])
def test_state_moves_where_a_policy_of_the_users_cuts(policy):
    """It was handed on uncut, and a piece had the state of more elements than its own."""
    [alone] = run(1, _freeze_and_thaw, "auto")
    for got in run(2, _freeze_and_thaw, policy):
        for a, b in zip(got, alone, strict=True):
            assert torch.allclose(a, b, rtol=0, atol=1e-7)
