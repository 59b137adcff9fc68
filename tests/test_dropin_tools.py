"""What takes an optimizer takes ours: schedulers, scalers, clipping, hooks, compilers, averages."""

import functools
import inspect

import pytest
import torch
import torch.distributed as dist
from common import largest_gap
from common.dropin import batches, flat, network, train
from common.modes import MODES
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW, lr_scheduler, swa_utils

from zero_nb.comm.launch import run
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer

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


def hook_state_dicts(zero, seen):
    """Register hooks that write down what they see; two change the state dict that passes."""

    def other_rate(optimizer, state):
        return {**state, "param_groups": [{**state["param_groups"][0], "lr": 0.5}]}

    def loaded(optimizer):
        seen.append(("loaded", optimizer.optim.param_groups[0]["params"] != []))

    return [
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
        zero.register_load_state_dict_pre_hook(other_rate),
        zero.register_load_state_dict_post_hook(loaded),
    ]


def test_state_dict_hooks_see_the_whole_state_dict_once():
    def hooked():
        zero, seen = ZeroRedundancyOptimizer(network().parameters(), AdamW), []
        for p in zero.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        zero.step()
        handles = hook_state_dicts(zero, seen)
        zero.consolidate_state_dict(None)
        nothing = list(seen)
        state = zero.state_dict()
        zero.load_state_dict(state)
        for handle in handles:
            handle.remove()
        zero.consolidate_state_dict(None)
        rates = zero.param_groups[0]["lr"], state["param_groups"][0]["lr"]
        return nothing, seen, "extra" in zero.state_dict(), *rates

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


def compiled_step(attached, backend):
    """Compile forward, backward and step together."""

    @torch.compile(backend=backend)
    def step(batch):
        attached.optimizer.zero_grad()
        loss = attached.call(batch).square().mean()
        loss.backward()
        attached.optimizer.step()
        return loss

    return step


def compiled_steps(mode, backend):
    """Give how far a compiled training step is from plain DDP without a compiler."""
    torch._dynamo.reset()
    plain, ours = DDP(network()), network()
    optimizer = AdamW(plain.parameters(), lr=1e-2)
    attached = MODES[mode].attach(
        ours,
        lambda model: ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=1e-2),
        ddp={"bucket_cap_mb": 25},  # smaller ones are more than DDP compiles
    )
    step = compiled_step(attached, backend)
    for batch in batches(4):
        optimizer.zero_grad()
        loss = plain(batch).square().mean()
        loss.backward()
        optimizer.step()
        assert abs(float(step(batch) - loss)) < 1e-6
    return largest_gap(flat(plain.parameters()), flat(ours.parameters()))


COMPILED = [*((mode, "eager") for mode in MODES), ("zero1-overlap", "aot_eager")]


@pytest.mark.usefixtures("compiler")
def test_a_whole_training_step_is_compiled_in_every_mode():
    for rank in run(2, lambda: [compiled_steps(*case) for case in COMPILED]):
        assert max(rank) < 1e-6, dict(zip(COMPILED, rank, strict=True))


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
