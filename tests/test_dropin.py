"""Code written for torch's class runs with ours, and ours passes for a torch optimizer wherever one is taken."""

import copy
import functools
import inspect
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from common import caught_error, largest_gap
from common.devices import GPU, cuda
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.parallel.distributed import _MixedPrecision
from torch.optim import SGD, AdamW, lr_scheduler, swa_utils

from zero_nb.comm.launch import run
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer
from zero_nb.optim.rules import ELEMENTWISE
from zero_nb.optim.state_dict_check import ELEMENTS, OPTIONAL


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5))


def batches(steps, seed=0):
    data = torch.Generator().manual_seed(
        seed + 100 * dist.get_rank() if dist.is_initialized() else seed
    )
    return [torch.randn(4, 6, generator=data) for _ in range(steps)]


def train(model, optimizer, steps=5, after=lambda: None):
    for batch in batches(steps):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        after()
    return flat(model.parameters())


def flat(params):
    return torch.cat([p.detach().flatten().float() for p in params])


def agree(*values):
    return all(v.equal(values[0]) if torch.is_tensor(v) else v == values[0] for v in values)


# ---- the face of torch's class ----


def test_the_constructors_arguments_are_torchs_in_torchs_order():
    torchs, ours = (
        list(inspect.signature(kind).parameters.values())
        for kind in (TorchZero, ZeroRedundancyOptimizer)
    )
    positional = [p for p in torchs if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [(p.name, p.default) for p in ours[: len(positional)]] == [
        (p.name, p.default) for p in positional
    ]
    assert all(
        p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in ours[len(positional) :]
    )  # ours come after, and only by keyword


def test_methods_take_what_torchs_take():
    for name, method in inspect.getmembers(TorchZero, inspect.isfunction):
        if name.startswith("_"):
            continue
        theirs, ours = (
            inspect.signature(method),
            inspect.signature(getattr(ZeroRedundancyOptimizer, name)),
        )
        assert [(p.name.strip("_"), p.kind, p.default) for p in ours.parameters.values()] == [
            (p.name.strip("_"), p.kind, p.default) for p in theirs.parameters.values()
        ], name


def test_every_public_attribute_is_there():
    def attributes():
        kinds = [
            kind(network().parameters(), AdamW, lr=0.1)
            for kind in (TorchZero, ZeroRedundancyOptimizer)
        ]
        torchs, ours = ({name for name in dir(zero) if not name.startswith("_")} for zero in kinds)
        same = [
            all(getattr(zero, name) == getattr(kinds[0], name) for zero in kinds)
            for name in (
                "rank",
                "global_rank",
                "world_size",
                "parameters_as_bucket_view",
                "process_group",
                "join_process_group",
                "join_device",
                "initialized",
            )
        ]
        return (
            torchs - ours,
            same,
            [set(zero.param_groups[0]) - {"params"} for zero in kinds],
            [type(zero.optim) for zero in kinds],
        )

    for missing, same, (theirs, ours), classes in run(2, attributes):
        assert not missing and all(same) and classes == [AdamW, AdamW]
        assert theirs == ours


SCRIPT = """
def script(Zero, group):
    model = DDP(network())
    optimizer = Zero(model.parameters(), AdamW, group, VIEWS, False, lr=1e-2, weight_decay=0.1)
    scheduler = lr_scheduler.StepLR(optimizer, 1, gamma=0.8)
    extra = nn.Parameter(torch.ones(7))
    losses = []
    for step, batch in enumerate(batches(6)):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        if step == 3: optimizer.add_param_group({"params": [extra], "lr": 0.3, "weight_decay": 0.0})
        def closure():
            loss = model(batch).square().mean() + (extra * (1 + step)).sum()
            loss.backward()
            return loss
        if step == 4: extra.grad = None
        losses.append(optimizer.step(closure) if step < 5 else (closure(), optimizer.step())[0])
        scheduler.step()
    state = None
    optimizer.consolidate_state_dict(to=1)
    if optimizer.rank == 1: state = optimizer.state_dict()
    box = [state]
    dist.broadcast_object_list(box, src=1)
    optimizer.load_state_dict(copy.deepcopy(box[0]))
    model.zero_grad()
    model(batches(1, seed=9)[0]).sum().backward()
    optimizer.step()
    rates = [group["lr"] for group in optimizer.param_groups]
    return flat([*model.parameters(), extra]), [float(l) for l in losses], box[0], rates
"""


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("views", [False, True])
def test_a_script_for_torchs_class_runs_unchanged(size, views):
    def both():
        space = {**globals(), "VIEWS": views}
        exec(SCRIPT, space)
        return [
            space["script"](kind, dist.group.WORLD) for kind in (TorchZero, ZeroRedundancyOptimizer)
        ]

    for rank in run(size, both):
        (params, losses, state, lrs), (our_params, our_losses, our_state, our_lrs) = rank
        assert (
            largest_gap(params, our_params) < 1e-6
            and losses == pytest.approx(our_losses, rel=1e-5)
            and lrs == our_lrs
        )
        plain = lambda groups: [{k: v for k, v in g.items() if k != "foreach"} for g in groups]
        assert plain(state["param_groups"]) == plain(our_state["param_groups"])
        assert list(state["state"]) == list(our_state["state"])
        for i, entry in state["state"].items():
            assert {k: tuple(v.shape) for k, v in entry.items()} == {
                k: tuple(v.shape) for k, v in our_state["state"][i].items()
            }
            assert all(largest_gap(v, our_state["state"][i][k]) < 1e-6 for k, v in entry.items())


def test_state_moves_between_torchs_class_and_ours():
    def move(source, target):
        model = DDP(network())
        zero = source(model.parameters(), AdamW, lr=1e-2)
        train(model, zero, 3)
        zero.consolidate_state_dict(0)
        box = [zero.state_dict() if zero.rank == 0 else None]
        dist.broadcast_object_list(box)
        other = DDP(network())
        other.load_state_dict(model.state_dict())
        there = target(other.parameters(), AdamW, lr=1e-2)
        there.load_state_dict(copy.deepcopy(box[0]))
        return largest_gap(train(model, zero, 3), train(other, there, 3))

    for kinds in ((TorchZero, ZeroRedundancyOptimizer), (ZeroRedundancyOptimizer, TorchZero)):
        assert max(run(2, move, *kinds)) < 1e-6


def sparse():
    return nn.Parameter(torch.zeros(3, 3).to_sparse())


def stepped_once(optimizer):
    optimizer.step()
    return optimizer


SITUATIONS = {
    "one tensor": lambda kind: kind(torch.zeros(3), AdamW),
    "not iterable": lambda kind: kind(3, AdamW),
    "empty": lambda kind: kind([], AdamW),
    "both kinds": lambda kind: kind([nn.Parameter(torch.zeros(3)), {"params": []}], AdamW),
    "numbers": lambda kind: kind([1, 2], AdamW),
    "no key": lambda kind: kind([{"lr": 1.0}], AdamW),
    "sparse": lambda kind: kind([sparse()], AdamW),
    "functional": lambda kind: kind(
        network().parameters(),
        __import__("torch.distributed.optim").distributed.optim._FunctionalAdam,
    ),
    "not consolidated": lambda kind: stepped_once(kind(network().parameters(), AdamW)).state_dict(),
    "option": lambda kind: kind(network().parameters(), AdamW, momentun=1),
    "rate": lambda kind: kind(network().parameters(), AdamW, lr=-1.0),
    "twice": lambda kind: kind(
        [{"params": [w := nn.Parameter(torch.zeros(3))]}, {"params": [w]}], AdamW
    ),
    "not a leaf": lambda kind: kind([nn.Parameter(torch.zeros(3)) * 2], AdamW),
    "groups": (
        lambda kind: kind(network().parameters(), AdamW).load_state_dict(
            {"state": {}, "param_groups": []}
        )
    ),
    "sizes": (
        lambda kind: kind(network().parameters(), AdamW).load_state_dict(
            {"state": {}, "param_groups": [{"params": [0]}]}
        )
    ),
    "later group": (
        lambda kind: kind(network().parameters(), AdamW).add_param_group(
            [nn.Parameter(torch.zeros(3))]
        )
    ),
    "closure": lambda kind: kind(network().parameters(), AdamW).step(closure="loss"),
    "keyword": lambda kind: kind(network().parameters(), AdamW).step(rate=1),
    "group": lambda kind: kind(network().parameters(), AdamW, process_group="gloo"),
}
OTHER = {
    "one tensor": "TypeError",
    "group": "ValueError",
}  # torch's own of "group" is whatever fails first


def test_errors_are_of_torchs_type():
    def raised():
        return {
            name: [
                caught_error(functools.partial(f, kind))
                for kind in (TorchZero, ZeroRedundancyOptimizer)
            ]
            for name, f in SITUATIONS.items()
        }

    for rank in run(2, raised):
        for name, (theirs, ours) in rank.items():
            assert theirs is not None and ours is not None, name
            assert ours[0] == OTHER.get(name, theirs[0]), (name, theirs, ours)


def test_overlap_with_ddp_may_be_asked_for_and_changes_nothing_until_a_hook_is_there():
    def trained():
        model = network()
        zero = ZeroRedundancyOptimizer(model.parameters(), AdamW, overlap_with_ddp=True)
        before = [p.detach().clone() for p in model.parameters()]
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        zero.step()
        return all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))

    assert run(2, trained) == [True, True]


@pytest.mark.parametrize(
    "copied",
    [lambda zero: pickle.loads(pickle.dumps(zero)), copy.deepcopy, lambda zero: torch_saved(zero)],
)
def test_a_copy_holds_what_torchs_holds_and_says_what_it_lacks(copied):
    def shells():
        zeros = [
            kind(network().parameters(), AdamW, lr=0.5)
            for kind in (TorchZero, ZeroRedundancyOptimizer)
        ]
        for zero in zeros:
            for p in zero.param_groups[0]["params"]:
                p.grad = torch.ones_like(p)
            zero.step()
        theirs, ours = map(copied, zeros)
        same = all(
            a.equal(b)
            for a, b in zip(
                theirs.param_groups[0]["params"], ours.param_groups[0]["params"], strict=True
            )
        )
        ours.zero_grad()
        stateless = "state" not in vars(ours) and ours.state == {}
        return (
            same,
            theirs.param_groups[0]["lr"] == ours.param_groups[0]["lr"] == 0.5,
            repr(ours) == repr(theirs),
            stateless,
            caught_error(ours.step),
        )

    for same, rates, shown, stateless, (kind, message) in run(2, shells):
        assert (
            same
            and rates
            and shown
            and stateless
            and kind == "AttributeError"
            and "make a new one and load a state dict" in message
        )


def torch_saved(zero):
    buffer = io.BytesIO()
    torch.save(zero, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


# ---- Join ----


class Gradients(Joinable):
    """Gives joined ranks the gradients that the others computed, which torch's DDP leaves out."""

    def __init__(self, model):
        super().__init__()
        self.model, self.seen = model, []
        model.register_comm_hook(self, Gradients.keep)

    def keep(self, bucket):
        params, sizes = bucket.parameters(), [p.numel() for p in bucket.parameters()]

        def done(future):
            total = future.value()[0] / dist.get_world_size()
            self.seen.append(
                [(p, g.view_as(p).clone()) for p, g in zip(params, total.split(sizes), strict=True)]
            )
            return total

        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(done)

    def join_hook(self, **kwargs):
        class Hook(JoinHook):
            def main_hook(hook):
                for p, g in self.seen.pop():
                    p.grad = g

        return Hook()

    @property
    def join_device(self):
        return torch.device("cpu")

    @property
    def join_process_group(self):
        return dist.group.WORLD


@pytest.mark.parametrize("how", [{}, {"shard": "whole"}, {"parameters_as_bucket_view": True}])
def test_uneven_inputs_under_torchs_join(how):
    def uneven():
        plain, sharded = DDP(network()), DDP(network())
        reference, zero = (
            AdamW(plain.parameters(), lr=1e-2),
            ZeroRedundancyOptimizer(sharded.parameters(), AdamW, lr=1e-2, **how),
        )
        setter, steps = Gradients(sharded), 3 + 2 * dist.get_rank()
        with Join([plain], divide_by_initial_world_size=True):
            train(plain, reference, steps)
        with Join([sharded, setter, zero], divide_by_initial_world_size=True):
            train(sharded, zero, steps)
        after = [float(s["step"]) for s in zero.optim.state.values()]
        return (
            isinstance(zero, Joinable),
            flat(plain.parameters()),
            flat(sharded.parameters()),
            after,
        )

    ranks = run(3, uneven)
    assert all(
        joinable and set(steps) == {7.0} for joinable, _, _, steps in ranks
    )  # a rank without data goes on stepping its shard
    assert agree(*(ours for _, _, ours, _ in ranks))
    assert largest_gap(ranks[2][1], ranks[2][2]) < 1e-6


def test_join_as_torchs_documentation_has_it_and_early_termination():
    def plainly():
        model = DDP(network())
        zero = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
        with Join([model, zero]):
            train(model, zero, 2 + dist.get_rank())
        params = flat(model.parameters())

        def stops():
            with Join([model, zero], throw_on_early_termination=True):
                train(model, zero, 2 + dist.get_rank())

        kind, message = caught_error(stops)
        alone = ZeroRedundancyOptimizer(network().parameters(), SGD, lr=0.1)
        for p in alone.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        with Join([alone]):  # the only participant counts for itself
            for _ in range(1 + dist.get_rank()):
                alone.step()
        return (
            params,
            kind,
            "exhausted" in message,
            caught_error(
                lambda: Join(
                    [zero, TorchZero(network().parameters(), SGD, dist.new_group(), lr=0.1)]
                )
            ),
        )

    ranks = run(2, plainly)
    assert agree(*(params for params, *_ in ranks))
    assert all(
        (kind, said) == ("RuntimeError", True) and "multiple process groups" in other[1]
        for _, kind, said, other in ranks
    )


# ---- everything that takes an optimizer ----

SCHEDULERS = {
    "LambdaLR": {"lr_lambda": lambda step: 0.9**step},
    "MultiplicativeLR": {"lr_lambda": lambda step: 0.9},
    "StepLR": {"step_size": 2},
    "MultiStepLR": {"milestones": [1, 3]},
    "ConstantLR": {},
    "LinearLR": {},
    "ExponentialLR": {"gamma": 0.8},
    "PolynomialLR": {},
    "CosineAnnealingLR": {"T_max": 4},
    "CosineAnnealingWarmRestarts": {"T_0": 3},
    "CyclicLR": {"base_lr": 1e-3, "max_lr": 1e-2},
    "OneCycleLR": {"max_lr": 0.1, "total_steps": 8},
    "ReduceLROnPlateau": {"patience": 0},
    "SWALR": {"swa_lr": 1e-3},
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}
KINDS = {
    name: kind
    for name, kind in {**vars(lr_scheduler), "SWALR": swa_utils.SWALR}.items()
    if inspect.isclass(kind)
    and issubclass(kind, lr_scheduler.LRScheduler)
    and kind is not lr_scheduler.LRScheduler
    and not name.startswith("_")
}


def schedule(kind, name, optimizer):
    make = SCHEDULERS[name]
    return make(optimizer) if callable(make) else kind(optimizer, **make)


def scheduled():
    out = {}
    for name, kind in KINDS.items():
        if name not in SCHEDULERS:
            continue
        rows = []
        for make in (
            AdamW,
            lambda params, **options: ZeroRedundancyOptimizer(params, AdamW, **options),
        ):
            model = DDP(network())
            optimizer = make(
                [
                    {"params": model.module[0].parameters()},
                    {"params": model.module[2].parameters(), "lr": 5e-3},
                ],
                lr=1e-2,
            )
            scheduler = schedule(kind, name, optimizer)
            rates = []

            def after(scheduler=scheduler, rates=rates, optimizer=optimizer):
                scheduler.step(*[1.0] * (type(scheduler).__name__ == "ReduceLROnPlateau"))
                rates.append(
                    [(g["lr"], g.get("betas"), g.get("initial_lr")) for g in optimizer.param_groups]
                )

            params = train(model, optimizer, 5, after)
            again = schedule(kind, name, optimizer)
            again.load_state_dict(scheduler.state_dict())
            rows.append((rates, params, getattr(again, "last_epoch", None)))
        (rates, params, epoch), (our_rates, our_params, our_epoch) = rows
        out[name] = (
            rates == our_rates,
            len({str(r) for r in rates}) > 1,
            largest_gap(params, our_params),
            epoch == our_epoch,
        )
    return out


@functools.cache
def schedules():
    return run(2, scheduled)


@pytest.mark.parametrize("name", KINDS)
def test_every_scheduler_schedules(name):
    assert name in SCHEDULERS, f"{name} is new in torch: say how it is made"
    for rank in schedules():
        same, changes, off, epoch = rank[name]
        assert same and off < 1e-6 and epoch
        assert changes or name == "ConstantLR"


def test_a_gradient_scaler_skips_on_all_ranks_when_one_has_an_inf():
    def scaled():
        model, plain = DDP(network()), DDP(network())
        rows = []
        for m, optimizer in (
            (plain, AdamW(plain.parameters(), lr=1e-2)),
            (model, ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=1e-2)),
        ):
            scaler, scales, moved = (
                torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2),
                [],
                [],
            )
            for step, batch in enumerate(batches(6)):
                optimizer.zero_grad()
                before = flat(m.parameters())
                loss = m(batch).square().sum()
                scaler.scale(loss * 3e38 if step == 2 and dist.get_rank() == 1 else loss).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(m.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                scales.append(scaler.get_scale())
                moved.append(not before.equal(flat(m.parameters())))
            rows.append((scales, moved, flat(m.parameters())))
        return rows

    for (scales, moved, params), (our_scales, our_moved, ours) in run(2, scaled):
        assert moved == our_moved == [True, True, False, True, True, True]
        assert scales == our_scales and scales[2] == scales[1] / 2
        assert largest_gap(params, ours) < 1e-6


def test_a_sharded_scaler_makes_ranks_agree_where_nothing_else_does():
    """Without DDP an inf may be on one rank only: torch's scaler for sharded training shares the finding."""

    def scaled():
        p = nn.Parameter(torch.ones(40))
        zero, scaler = (
            ZeroRedundancyOptimizer([p], SGD, lr=1.0),
            ShardedGradScaler("cpu", init_scale=2.0),
        )
        scaler.scale(torch.ones(1))
        p.grad = torch.full((40,), float("inf") if dist.get_rank() == 1 else 1.0)
        scaler.step(zero)
        scaler.update()
        return p.tolist(), scaler.get_scale()

    assert run(2, scaled) == [([1.0] * 40, 1.0)] * 2


def test_clipping_sees_all_gradients():
    def clipped():
        plain, sharded = DDP(network()), DDP(network())
        rows = []
        for model, optimizer in (
            (plain, SGD(plain.parameters(), lr=0.5)),
            (sharded, ZeroRedundancyOptimizer(sharded.parameters(), SGD, lr=0.5)),
        ):
            norms = []
            for batch in batches(3):
                optimizer.zero_grad()
                model(10 * batch).square().mean().backward()
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
                nn.utils.clip_grad_value_(model.parameters(), 0.05)
                optimizer.step()
            rows.append((norms, flat(model.parameters())))
        return rows

    for (norms, params), (our_norms, ours) in run(2, clipped):
        assert norms == pytest.approx(our_norms) and largest_gap(params, ours) < 1e-6


def test_step_hooks_get_what_the_call_got_and_can_be_removed():
    def hooked():
        zero, seen = ZeroRedundancyOptimizer(network().parameters(), SGD, lr=0.1), []
        before = zero.register_step_pre_hook(
            lambda optimizer, args, kwargs: seen.append(
                ("pre", optimizer is zero, len(args), sorted(kwargs))
            )
        )
        after = zero.register_step_post_hook(
            lambda optimizer, args, kwargs: seen.append(
                ("post", optimizer is zero, len(args), sorted(kwargs))
            )
        )
        changed = zero.register_step_pre_hook(
            lambda optimizer, args, kwargs: (args, {"closure": lambda: 7.0})
        )
        loss = zero.step()
        for handle in (before, after, changed):
            handle.remove()
        return loss, zero.step(), seen

    assert (
        run(2, hooked) == [(7.0, None, [("pre", True, 1, []), ("post", True, 1, ["closure"])])] * 2
    )


def test_state_dict_hooks_see_the_whole_state_dict_once():
    def hooked():
        zero, seen = ZeroRedundancyOptimizer(network().parameters(), AdamW), []
        for p in zero.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        zero.step()
        handles = [
            zero.register_state_dict_pre_hook(lambda optimizer: seen.append("pre")),
            zero.register_state_dict_post_hook(
                lambda optimizer, state: {**state, "extra": len(state["state"])}
            ),
            zero.register_state_dict_post_hook(
                lambda optimizer, state: seen.append(("post", state["extra"]))
            ),
            zero.register_load_state_dict_pre_hook(
                lambda optimizer, state: seen.append(("load", len(state["state"])))
            ),
            zero.register_load_state_dict_pre_hook(
                lambda optimizer, state: {
                    **state,
                    "param_groups": [{**state["param_groups"][0], "lr": 0.5}],
                }
            ),
            zero.register_load_state_dict_post_hook(
                lambda optimizer: seen.append(
                    ("loaded", optimizer.optim.param_groups[0]["params"] != [])
                )
            ),
        ]
        zero.consolidate_state_dict(None)
        nothing = list(seen)
        state = zero.state_dict()
        zero.load_state_dict(state)
        for handle in handles:
            handle.remove()
        zero.consolidate_state_dict(None)
        return (
            nothing,
            seen,
            "extra" in zero.state_dict(),
            zero.param_groups[0]["lr"],
            state["param_groups"][0]["lr"],
        )

    assert (
        run(2, hooked)
        == [([], ["pre", ("post", 4), ("load", 4), ("loaded", True)], False, 0.5, 1e-3)] * 2
    )


def test_hooks_cannot_reach_into_the_consolidated_state():
    def written():
        zero = ZeroRedundancyOptimizer(network().parameters(), AdamW)
        for p in zero.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        zero.step()
        zero.consolidate_state_dict(None)
        first = zero.state_dict()
        first["state"].clear()
        first["param_groups"][0]["lr"] = 9.0
        second = zero.state_dict()
        second["state"][0].clear()
        return (
            len(zero.state_dict()["state"][0]),
            zero.state_dict()["param_groups"][0]["lr"],
            zero.param_groups[0]["lr"],
        )

    assert run(2, written) == [(3, 1e-3, 1e-3)] * 2


@pytest.mark.usefixtures("compiler")
def test_a_compiled_model_trains_the_same():
    def compiled():
        plain, sharded = DDP(network()), network()
        zero = ZeroRedundancyOptimizer(
            sharded.parameters(), AdamW, lr=1e-2, parameters_as_bucket_view=True
        )
        reference = train(plain, AdamW(plain.parameters(), lr=1e-2))
        return largest_gap(reference, train(torch.compile(DDP(sharded), backend="eager"), zero))

    assert max(run(2, compiled)) < 1e-6


@pytest.mark.usefixtures("compiler")
def test_a_compiled_training_step_may_hold_the_optimizers():
    def compiled():
        plain, sharded, out = DDP(network()), DDP(network()), []
        for model, optimizer in (
            (plain, AdamW(plain.parameters(), lr=1e-2)),
            (sharded, ZeroRedundancyOptimizer(sharded.parameters(), AdamW, lr=1e-2)),
        ):
            step = torch.compile(optimizer.step, backend="eager")
            for batch in batches(3):
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                step()
            out.append(flat(model.parameters()))
        return largest_gap(*out)

    assert max(run(2, compiled)) < 1e-6


def test_averaged_models():
    def averaged():
        rows = []
        for make in (
            AdamW,
            lambda params, lr: ZeroRedundancyOptimizer(
                params, AdamW, lr=lr, parameters_as_bucket_view=True
            ),
        ):
            model = DDP(network())
            optimizer = make(model.parameters(), lr=1e-2)
            swa, ema = (
                swa_utils.AveragedModel(model.module),
                swa_utils.AveragedModel(
                    model.module, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9)
                ),
            )
            scheduler = swa_utils.SWALR(optimizer, swa_lr=1e-3, anneal_epochs=2)

            def after(model=model, swa=swa, ema=ema, scheduler=scheduler):
                for average in (swa, ema):
                    average.update_parameters(model.module)
                scheduler.step()

            train(model, optimizer, 6, after)
            rows.append(torch.cat([flat(swa.parameters()), flat(ema.parameters())]))
        return rows

    for reference, ours in run(2, averaged):
        assert largest_gap(reference, ours) < 1e-6


def test_it_shows_and_profiles_like_any_optimizer():
    def shown():
        plain, zero = (
            AdamW(network().parameters(), fused=True),
            ZeroRedundancyOptimizer(network().parameters(), AdamW, fused=True),
        )
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            zero.step(), zero.zero_grad()
        names = {event.key for event in profile.key_averages()}
        return repr(zero).replace("ZeroRedundancyOptimizer", "AdamW") == repr(plain), {
            name for name in names if "ZeroRedundancyOptimizer" in name
        }

    assert (
        run(2, shown)
        == [
            (
                True,
                {
                    "Optimizer.step#ZeroRedundancyOptimizer.step",
                    "Optimizer.zero_grad#ZeroRedundancyOptimizer.zero_grad",
                },
            )
        ]
        * 2
    )


# ---- what parameters and gradients can be ----


class Odd(nn.Module):
    """Tied, complex, channels-last, transposed, scalar, empty, double and unused parameters."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.head = nn.Embedding(6, 5), nn.Linear(5, 6, bias=False)
        self.head.weight = self.embed.weight
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.wave = nn.Parameter(torch.randn(7, dtype=torch.complex64))
        self.turned = nn.Parameter(torch.randn(5, 4).t())
        self.cube = nn.Parameter(torch.randn(2, 3, 4).permute(2, 0, 1))
        self.scale, self.empty = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.zeros(0, 3))
        self.fine, self.unused = (
            nn.Parameter(torch.randn(9, dtype=torch.float64)),
            nn.Parameter(torch.ones(4)),
        )

    def forward(self, x):
        x = (
            self.head(self.embed(x)).square().mean()
            + self.conv(torch.ones(1, 2, 5, 5)).square().mean()
            + (self.wave * self.wave.conj()).real.sum()
        )
        return (
            x + self.turned.cos().sum() + self.cube.sin().sum() + self.empty.sum()
        ) * self.scale + self.fine.square().sum().float()


@pytest.mark.parametrize(
    "how", [{}, {"shard": "whole"}, {"parameters_as_bucket_view": True}, {"bucket_cap_mb": 0.0001}]
)
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_odd_parameters(how, name):
    options = {
        "AdamW": {"lr": 1e-2, "foreach": False, "fused": False},
        "SGD": {"lr": 1e-2, "momentum": 0.9},
    }[name]

    def odd():
        plain, sharded = (
            DDP(Odd(), find_unused_parameters=True),
            DDP(Odd(), find_unused_parameters=True),
        )
        kind = getattr(torch.optim, name)
        rows = []
        zero = ZeroRedundancyOptimizer(sharded.parameters(), kind, **options, **how)
        for model, optimizer in ((plain, kind(plain.parameters(), **options)), (sharded, zero)):
            for step in range(4):
                optimizer.zero_grad(set_to_none=step % 2 == 0)
                model(torch.tensor([dist.get_rank(), 3, step])).backward()
                optimizer.step()
            rows.append([p.detach().clone() for p in model.parameters()])
        tied = sharded.module.head.weight is sharded.module.embed.weight
        strides = all(
            p.stride() == q.stride()
            for p, q in zip(plain.parameters(), sharded.parameters(), strict=True)
        )
        optimizer.consolidate_state_dict(None)
        shapes = all(
            v.shape == rows[0][i].shape
            for i, s in optimizer.state_dict()["state"].items()
            for v in s.values()
            if torch.is_tensor(v) and v.dim()
        )
        return (
            max((a - b).abs().max().item() for a, b in zip(*rows, strict=True) if a.numel()),
            tied,
            strides,
            shapes,
            rows[1],
        )

    ranks = run(3, odd)
    assert all(
        off < 1e-5 and tied and strides and shapes for off, tied, strides, shapes, _ in ranks
    )
    assert all(a.equal(b) for rank in ranks for a, b in zip(rank[4], ranks[0][4], strict=True))


@pytest.mark.parametrize("how", [{}, {"shard": "whole"}, {"parameters_as_bucket_view": True}])
def test_gradients_that_are_none(how):
    def sparing():
        a, b, c = (nn.Parameter(torch.ones(64)) for _ in range(3))
        zero = ZeroRedundancyOptimizer([a, b, c], AdamW, lr=0.5, weight_decay=0.0, **how)
        zero.step()  # none on all ranks
        first = [p.tolist() for p in (a, b, c)]
        a.grad, b.grad = torch.ones(64), torch.ones(64) if dist.get_rank() == 0 else None
        zero.step()
        try:
            zero.consolidate_state_dict(None)
        except RuntimeError as error:
            assert how.get("shard") != "whole" and "parameter 1: there is state" in str(error)
        else:
            assert how.get("shard") == "whole"  # its owner had a gradient
        return first, [p.tolist() for p in (a, b, c)]

    ranks = run(2, sparing)
    assert ranks[0] == ranks[1]  # whatever is missing on one rank, replicas agree
    first, (a, b, c) = ranks[0]
    assert first == [[1.0] * 64] * 3 and a == pytest.approx([0.5] * 64) and c == [1.0] * 64
    assert all(
        value == 1.0 or value == pytest.approx(0.5) for value in b
    )  # stepped by those who had a gradient


def low(device, mixed):
    """Train beside a float32 copy that sees the same gradients: DDP computes in bfloat16, or the
    model itself is bfloat16."""
    model = network().to(device) if mixed else network().bfloat16().to(device)
    reference = copy.deepcopy(model).float()
    ddp = (
        DDP(model, mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))
        if mixed
        else DDP(model)
    )
    zero = ZeroRedundancyOptimizer(
        ddp.parameters(), AdamW, lr=1e-2, foreach=False, fused=False, master_dtype=torch.float32
    )
    plain = AdamW(reference.parameters(), lr=1e-2, foreach=False)
    for batch in batches(5):
        zero.zero_grad()
        batch = batch.to(device, torch.float32 if mixed else torch.bfloat16)
        with torch.autocast(device, torch.bfloat16):
            loss = ddp(batch).float().square().mean()
        loss.backward()
        for p, q in zip(ddp.parameters(), reference.parameters(), strict=True):
            q.grad = p.grad.float()
        zero.step()
        plain.step()
    pairs = list(zip(ddp.parameters(), reference.parameters(), strict=True))
    return (
        pairs[0][0].dtype,
        all(p.equal(q.to(p.dtype)) for p, q in pairs),
        flat(ddp.parameters()).cpu(),
    )


def test_low_precision_with_float32_copies_under_autocast():
    ranks = run(2, low, "cpu", False)
    assert all(dtype == torch.bfloat16 and same for dtype, same, _ in ranks) and agree(
        *(params for *_, params in ranks)
    )


@cuda
@pytest.mark.parametrize("mixed", [False, True])
def test_low_precision_on_the_gpu(mixed):
    ((dtype, same, _),) = run(1, low, "cuda", mixed, backend=GPU)
    assert dtype == (torch.float32 if mixed else torch.bfloat16) and same


def gpu_steps(make, steps=4, device="cuda", **options):
    """Train on one GPU, with gradients that do not depend on the parameters."""
    model = network().to(device)
    optimizer = make(model.parameters(), **options)
    for step in range(steps):
        for p in model.parameters():
            p.grad = torch.full_like(p, 1.0 + step)
        optimizer.step()
    return model, optimizer


def sharded(params, **options):
    return ZeroRedundancyOptimizer(params, AdamW, **options)


@cuda
@pytest.mark.parametrize(
    "options", [{"capturable": True}, {"fused": True}, {"capturable": True, "fused": True}, {}]
)
def test_state_stays_on_the_gpu_through_saving_and_loading(options):
    def there_and_back():
        model, zero = gpu_steps(sharded, lr=1e-2, **options)
        zero.consolidate_state_dict()
        saved = zero.state_dict()
        devices = lambda state: sorted(
            {(k, v.device.type) for s in state.values() for k, v in s.items()}
        )
        other = sharded(model.parameters(), lr=1e-2, **options)
        other.load_state_dict(saved)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        other.step()
        return (
            devices(zero.optim.state),
            devices(other.optim.state),
            {d for _, d in devices(saved["state"])},
        )

    ((before, after, saved),) = run(1, there_and_back, backend=GPU)
    assert before == after and ("exp_avg", "cuda") in after and saved == {"cpu"}
    if options:
        assert ("step", "cuda") in after


@cuda
@pytest.mark.parametrize("views", [False, True])
def test_a_step_can_be_captured_in_a_graph(views):
    def captured():
        finals = []
        for make in (AdamW, functools.partial(sharded, parameters_as_bucket_view=views)):
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                model, optimizer = gpu_steps(
                    make, lr=torch.tensor(1e-2, device="cuda"), capturable=True
                )
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                optimizer.step()
            for i in range(3):
                for p in model.parameters():
                    p.grad.fill_(0.5 * i)
                graph.replay()
            finals.append(flat(model.parameters()))
        return largest_gap(*finals)

    assert run(1, captured, backend=GPU)[0] < 1e-6


@cuda
@pytest.mark.parametrize("how", [{}, {"parameters_as_bucket_view": True}, {"shard": "whole"}])
def test_a_step_does_not_wait_for_the_gpu(how):
    def watched():
        _, zero = gpu_steps(sharded, lr=1e-2, fused=True, **how)
        torch.cuda.set_sync_debug_mode("error")
        try:
            zero.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return True

    assert run(1, watched, backend=GPU) == [True]


@cuda
def test_several_devices_in_one_process():
    def spread():
        devices = ["cpu", *(f"cuda:{i}" for i in range(min(2, torch.cuda.device_count())))]
        rows = []
        for make in (AdamW, sharded):
            params = [
                nn.Parameter(torch.ones(n, device=device)) for n in (300, 7) for device in devices
            ]
            optimizer = make(params, lr=1e-2, foreach=False, fused=False)
            for step in range(3):
                for p in params:
                    p.grad = torch.full_like(p, 1.0 + step)
                optimizer.step()
            rows.append(flat([p.cpu() for p in params]))
        optimizer.consolidate_state_dict()
        return largest_gap(*rows), len(optimizer.state_dict()["state"]) == len(params)

    ((off, whole),) = run(1, spread, backend=GPU)
    assert off < 1e-6 and whole


@cuda
def test_a_gradient_scaler_on_the_gpu():
    def scaled():
        model = network().cuda()
        zero, scaler = (
            sharded(model.parameters(), lr=1e-2, fused=True),
            torch.amp.GradScaler("cuda", init_scale=8.0),
        )
        moved = []
        for poison in (1.0, 3e38, 1.0):
            zero.zero_grad()
            before = flat(model.parameters())
            scaler.scale(model(torch.ones(4, 6, device="cuda")).square().sum() * poison).backward()
            scaler.step(zero)
            scaler.update()
            moved.append(not before.equal(flat(model.parameters())))
        return moved, scaler.get_scale()

    assert run(1, scaled, backend=GPU) == [([True, False, True], 4.0)]


@pytest.mark.parametrize("name", sorted(ELEMENTWISE))
def test_the_keys_that_loading_asks_for_are_those_that_torch_keeps(name):
    kind = getattr(torch.optim, name)
    for option, key in ((None, None), *OPTIONAL.items()):
        if option is not None and option not in inspect.signature(kind).parameters:
            continue
        p = nn.Parameter(torch.zeros(2, 3))
        p.grad = torch.ones(2, 3)
        optimizer = kind([p], **({"lr": 0.1} | ({option: True} if option else {})))
        optimizer.step()
        state = optimizer.state[p]
        elements = {k for k, v in state.items() if torch.is_tensor(v) and v.shape == p.shape}
        assert elements == {*ELEMENTS[name], *([key] if key else [])} and ("step" in state) == (
            name != "SGD"
        )
