"""What the optimizer's readers and writers find between one backward and the next: the faults of
the review, entry by entry."""

import copy
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from common import caught, run_each
from common.faulty_steps import batch, network, refused
from common.modes import MODES
from common.optimizers import drop_last_parameter
from common.readers import READERS, consolidated, left
from common.sampling import SEED, covering
from torch import nn
from torch.optim import SGD, AdamW, Muon
from torch.optim.lr_scheduler import StepLR

from zero_nb.apps.checkpoints import save_checkpoint
from zero_nb.apps.config import TrainConfig
from zero_nb.apps.text import PLAIN_BYTES
from zero_nb.comm.groups import Group
from zero_nb.comm.launch import run
from zero_nb.comm.subgroups import two_level
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer
from zero_nb.plan.shards import ShardPlan, Span


def attach(mode, model, make):
    """Give the model to call, the optimizer, and what takes its steps, if anything does."""
    made = MODES[mode].attach(model, make, ddp={"gradient_as_bucket_view": True})
    return made.call, made.optimizer, made.handle


def iterate(model, zero, step, dtype=torch.float32):
    model(batch(step, dtype)).float().square().mean().backward()
    zero.step()
    zero.zero_grad()


PLACEMENTS = {
    f"{shard}{'-views' if views else ''}-{cap}": {
        "shard": shard,
        "parameters_as_bucket_view": views,
        "bucket_cap_mb": cap,
    }
    for shard in ("even", "whole")
    for views in (False, True)
    for cap in (1.0, 0.0005)
}


def kept_graphs(mode, unsharded):
    """Per placement, which parameters a step has not marked as written, and layers whose backward
    goes on with what a step has overwritten."""
    out = {}
    for name, options in PLACEMENTS.items():

        def make(model, options=options):
            if unsharded:
                return AdamW(model.parameters(), lr=1e-2)
            return ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=1e-2, **options)

        module = network()
        model, zero, _ = attach(mode, module, make)
        for step in range(4):
            iterate(model, zero, step)
        layers = [module[0], module[2], module[4]]
        inputs = [torch.ones(3, layer.in_features, requires_grad=True) for layer in layers]
        kept = [layer(x).square().sum() for layer, x in zip(layers, inputs, strict=True)]
        before = [p._version for p in module.parameters()]
        iterate(model, zero, 5)
        went_on = [
            i for i, (loss, x) in enumerate(zip(kept, inputs, strict=True)) if not refused(loss, x)
        ]
        out[name] = (
            went_on,
            [
                i
                for i, (p, v) in enumerate(zip(module.parameters(), before, strict=True))
                if p._version == v
            ],
        )
    return out


@pytest.mark.turns(2)
@pytest.mark.parametrize("mode", MODES)
def test_L4_a_graph_kept_over_a_step_is_an_error_on_every_rank(mode):
    expected = {name: ([], []) for name in PLACEMENTS}
    assert run(2, kept_graphs, mode, False) == [expected, expected]


def test_L4_as_with_the_unsharded_optimizer():
    assert run(2, kept_graphs, "zero1", True) == [{name: ([], []) for name in PLACEMENTS}] * 2


def masters(model, nodes=None):
    return ZeroRedundancyOptimizer(
        model.parameters(), AdamW, nodes, lr=1e-2, master_dtype=torch.float32
    )


def muon_adamw(model, nodes=None):
    found = list(model.parameters())
    return ZeroRedundancyOptimizer(
        [
            {"params": [p for p in found if p.dim() == 2], "optimizer_class": Muon, "lr": 0.02},
            {"params": [p for p in found if p.dim() != 2]},
        ],
        AdamW,
        nodes,
        lr=1e-2,
    )


SETUPS = {
    "masters": (masters, torch.bfloat16, False),
    "Muon and AdamW": (muon_adamw, torch.float32, False),
    "two levels": (masters, torch.bfloat16, True),
    "Muon and AdamW on two levels": (muon_adamw, torch.float32, True),
}


def history(mode, setup, reader, waits):
    """Train, read right after a step or after a wait, and train on; give what was read and the
    parameters at the end."""
    make, dtype, levels = SETUPS[setup]
    nodes, module = two_level(2) if levels else None, network(dtype)
    model, zero, handle = attach(mode, module, lambda model: make(model, nodes))
    old = None
    for step in range(4):
        if step == 3:
            old = consolidated(zero)
        iterate(model, zero, step, dtype)
    if waits and handle is not None:
        handle.wait()
    if waits:
        [p.detach().sum() for p in module.parameters()]
    found = reader(zero, module, handle, old)
    if reader is not left:  # which leaves a step half done
        for step in range(5, 7):
            iterate(model, zero, step, dtype)
    return found, [p.detach().clone() for p in module.parameters()]


def same(these, those) -> bool:
    if isinstance(these, torch.Tensor):
        return these.dtype == those.dtype and torch.equal(these, those)
    if isinstance(these, dict):
        return these.keys() == those.keys() and all(same(these[key], those[key]) for key in these)
    if isinstance(these, (list, tuple)):
        return len(these) == len(those) and all(map(same, these, those))
    return these == those


def too_early(mode, setup, reader):
    return not same(*(history(mode, setup, READERS[reader], waits) for waits in (False, True)))


def has_to_wait(mode, setup, reader):
    """Tell whether a mode may leave parameters on their way, or a reader may be called in any."""
    return "hidden" in mode or reader in ("consolidated", "loaded", "detached")


def test_H1_who_reads_right_after_a_step_reads_what_comes_after_a_wait():
    print(f"ZERO_NB_SEED={SEED}")
    cases = covering(([*MODES], [*SETUPS], [*READERS]), Random(SEED), has_to_wait)
    assert 48 <= len(cases) < 100
    for size, levels in ((2, False), (4, True)):
        mine = {case: case for case in cases if SETUPS[case[1]][2] is levels}
        found = run_each(size, too_early, mine, timeout=300)
        assert {case for case, early in found.items() if any(early)} == set()


def resumed(mode, setup, attached, folder):
    """Save with the training job's function right after a step, train on, and do the same from the
    file; give both ends."""
    make, dtype, levels = SETUPS[setup]
    nodes = two_level(2) if levels else None

    def side():
        module = network(dtype)
        model, zero, _ = attach(mode, module, lambda model: make(model, nodes))
        return SimpleNamespace(
            model=module,
            call=model,
            optimizer=zero,
            schedule=StepLR(zero, 2, 0.5),
            config=TrainConfig(out=folder),
            vocabulary=PLAIN_BYTES,
        )

    def train(side, steps):
        for step in steps:
            iterate(side.call, side.optimizer, step, dtype)
            side.schedule.step()

    first = side()
    train(first, range(5))
    save_checkpoint(first, SimpleNamespace(losses={}, held_out={}), 5, Group())
    train(first, range(5, 9))
    dist.barrier()
    state = torch.load(Path(folder, "checkpoint.pt"), weights_only=True)
    again = side()
    if attached:
        train(again, range(20, 23))  # what was trained before a load does not matter
    again.model.load_state_dict(state["model"])
    again.optimizer.load_state_dict(state["optimizer"])
    again.schedule.load_state_dict(state["schedule"])
    train(again, range(5, 9))
    params = [[p.detach().clone() for p in one.model.parameters()] for one in (first, again)]
    return params, [group["lr"] for group in again.optimizer.param_groups]


def test_H1_a_job_that_saved_right_after_a_step_resumes_bit_for_bit(tmp_path):
    print(f"ZERO_NB_SEED={SEED}")
    # DDP itself adds up in another order in its first iteration
    stays = lambda mode, setup, attached: attached or (mode, setup) != ("zero1", "two levels")
    setups = ["masters", "Muon and AdamW", "two levels"]
    cases = covering(([*MODES], setups, [False, True]), Random(SEED), stays)
    for size, levels in ((2, False), (4, True)):
        mine = {
            case: (*case, f"{tmp_path}/{i}")
            for i, case in enumerate(cases)
            if SETUPS[case[1]][2] is levels
        }
        for case, ranks in run_each(size, resumed, mine, timeout=300).items():
            for (first, again), _ in ranks:
                assert same(first, again), case


# ---- who reads or writes what between `backward` and the next `backward`, without a driver ----


def pair(dtype=torch.float32, wide=None, kind=AdamW, **options):
    """Make a model with the sharded optimizer, and the same with the unsharded one, which takes
    gradients and steps in `wide`."""
    ours, plain = network(dtype), network(dtype).to(wide or dtype)
    return (
        ours,
        plain,
        ZeroRedundancyOptimizer(ours.parameters(), kind, lr=1e-2, **options),
        kind(plain.parameters(), lr=1e-2),
    )


def given(*models, step=0, lacking=()):
    """Give models of one shape the same gradients, as DDP leaves them."""
    for model in models:
        chance = torch.Generator().manual_seed(step)
        for i, p in enumerate(model.parameters()):
            grad = torch.randn(p.shape, generator=chance).bfloat16().to(p.dtype)
            p.grad = None if i in lacking else grad


def apart(ours, plain) -> float:
    return max(
        (p - q.to(p.dtype)).abs().max().item()
        for p, q in zip(ours.parameters(), plain.parameters(), strict=True)
    )


def both_step(ours, plain, zero, torchs, steps):
    for step in steps:
        given(ours, plain, step=step)
        zero.step()
        torchs.step()


def each(change, first=None):
    """Make the same change to all parameters of a model, or to the first few."""

    def changed(model):
        for p in [*model.parameters()][:first]:
            change(p)

    return changed


@torch.no_grad()
def write(p):
    p.fill_(0.5)


def move(p):
    p.data = p.data.clone() * 2


def halve_by_loading(model):
    model.load_state_dict({k: v / 2 for k, v in model.state_dict().items()})


def freeze_with_zeros(p):
    p.requires_grad_(False)
    p.grad.zero_()


def drop_gradient(p):
    p.grad = None


WRITES = {
    "written": each(write),
    "a copy written through data": each(lambda p: p.data.fill_(0.5)),
    "moved": each(move),
    "loaded into the model": halve_by_loading,
}  # before gradients are there
CHANGES = {
    "gradients changed": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    "gradients added up": each(lambda p: p.grad.add_(p.grad)),
    "frozen after backward": each(lambda p: p.requires_grad_(False), 1),
    "frozen, gradients zero": each(freeze_with_zeros, 2),
    "unfrozen, no gradient": each(drop_gradient, 2),
}  # while they are there


def set_options(*optimizers):
    for group in [group for optimizer in optimizers for group in optimizer.param_groups]:
        group.update(lr=0.3, betas=(0.5, 0.6), weight_decay=0.2)


def append_a_parameter(zero):
    zero.param_groups[0]["params"].append(nn.Parameter(torch.ones(3)))


EDITS = {
    "a group edited": drop_last_parameter,
    "a parameter appended": append_a_parameter,
    "a group away": lambda zero: zero.param_groups.clear(),
}  # which the next step refuses
STATES = {
    "state set": lambda zero: setattr(zero, "state", {}),
    "state cleared": lambda zero: zero.state.clear(),
}  # which are refused at once


def between(what):
    """Do something between two steps, with both optimizers; how far they are apart after more
    steps, and what was said."""

    def nothing(_):
        pass

    wide = torch.float32 if what in ("written", "a copy written through data") else None
    ours, plain, zero, torchs = pair(
        torch.bfloat16 if wide else torch.float32, wide, **({"master_dtype": wide} if wide else {})
    )
    both_step(ours, plain, zero, torchs, range(3))
    for model in (ours, plain):
        WRITES.get(what, nothing)(model)
    given(ours, plain, step=3)
    for model in (ours, plain):
        CHANGES.get(what, nothing)(model)
    if what == "options":
        set_options(zero, torchs)
    EDITS.get(what, nothing)(zero)
    said = caught(lambda: STATES.get(what, nothing)(zero))
    before = torch.get_rng_state()
    grads = [None if p.grad is None else p.grad.clone() for p in ours.parameters()]
    said = said or caught(zero.step)
    same = torch.equal(before, torch.get_rng_state()) and all(
        p.grad is None if grad is None else p.grad is not None and p.grad.equal(grad)
        for p, grad in zip(ours.parameters(), grads, strict=True)
    )
    if not said:
        torchs.step()
        both_step(ours, plain, zero, torchs, range(4, 6))
    return said, apart(ours, plain), same


TAKEN = [
    "nothing",
    "written",
    "moved",
    "loaded into the model",
    "gradients changed",
    "gradients added up",
    "frozen after backward",
    "frozen, gradients zero",
    "unfrozen, no gradient",
    "options",
]
REFUSED = {
    "a group edited": "add_param_group",
    "a parameter appended": "add_param_group",
    "a group away": "add_param_group",
    "state set": "load_state_dict",
    "state cleared": "clear",
}


def all_between():
    return {what: between(what) for what in (*TAKEN, *REFUSED, "a copy written through data")}


@pytest.mark.parametrize("size", [1, 2])
def test_what_is_read_and_written_between_two_backwards_is_taken_or_refused(size):
    for found in run(size, all_between):
        for what in TAKEN:
            assert (
                found[what][0] is None
                and found[what][1] < (2**-6 if what == "written" else 1e-5)
                and found[what][2]  # neither the random state nor any `.grad` has changed
            ), (what, found[what])
        for what, words in REFUSED.items():
            assert words in (found[what][0] or ""), (what, found[what])
        assert found["a copy written through data"][1] > 0.1, (
            "the notebooks say that such a write is lost"
        )


def saved_late():
    """Consolidate, and change what a state dict holds before it is asked for."""
    model, _, zero, _ = pair()
    given(model)
    zero.step()
    zero.consolidate_state_dict(to=None)
    StepLR(zero, 1, 0.5).step()
    lr = zero.state_dict()["param_groups"][0]["lr"]
    zero.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    return lr, caught(zero.state_dict)


def test_a_state_dict_has_the_options_of_now_and_all_groups():
    for lr, said in run(2, saved_late):
        assert lr == 0.005 and "consolidate_state_dict" in said


def freeze_last(model):
    last = [*model.parameters()][-1]
    last.requires_grad_(False)
    last.grad = None  # a frozen parameter with a gradient is stepped, as by torch.optim


def uneven(first, what, options):
    """Step with a gradient that one rank lacks, in the first step or a later one, and then save or
    freeze; what each rank is told. `in turn`: rank 0 lacks it in the step after."""
    model, _, zero, _ = pair(**options)
    lacks = 1 if dist.get_rank() == 1 else 2 if what == "in turn" else -1
    said = []
    for step in range(4 - 3 * first):
        lacking = dist.get_rank() == 1 if first else step == lacks
        given(model, step=step, lacking=(2,) if lacking else ())  # the matrix of 40 x 50
        said.append(caught(zero.step))
    if first:
        return said[0]
    if what != "freeze":
        return caught(lambda: zero.consolidate_state_dict(to=0))
    given(model, step=5)
    freeze_last(model)
    return caught(zero.step)


@pytest.mark.parametrize(
    "first, what, options",
    [
        (True, "", {}),
        (False, "save", {}),
        (False, "freeze", {}),
        (False, "save", {"parameters_as_bucket_view": True}),
        (False, "freeze", {"bucket_cap_mb": 0.0005}),
        (False, "in turn", {}),  # each rank has stepped as often as the other one
        (False, "save", {"kind": SGD}),  # which has no state
        (False, "freeze", {"kind": SGD, "momentum": 0.9}),  # and this one no count
    ],
)
def test_a_gradient_that_some_ranks_lack_is_an_error_on_every_rank(first, what, options):
    counted = "kind" not in options and what != "in turn"
    parts = "have different step counts" if counted else "were stepped in different steps"
    words = "parameter 2 with" if first else f"parameter 2: its parts {parts}"
    for said in run(2, uneven, first, what, options):
        assert words in (said or "")


def refused_load(apart):
    """Leave parts of a parameter apart, or miss a step of it on all ranks, and then refuse a load."""
    model, _, zero, _ = pair(kind=SGD)
    given(model)
    zero.step()
    zero.consolidate_state_dict(to=None)
    state = zero.state_dict()
    second = dist.get_rank() == 1
    given(model, lacking=(2,) if second or not apart else ())
    zero.step()
    said = caught(lambda: zero.load_state_dict(state if second else {"no": 1}))
    return said, caught(lambda: zero.consolidate_state_dict(to=0))


@pytest.mark.parametrize("apart", [True, False])
def test_a_refused_load_forgets_no_missed_step(apart):
    for refusal, said in run(2, refused_load, apart):
        assert "a state dict must have" in refusal
        assert ("its parts were stepped in different steps" in (said or "")) == apart
        assert apart or said is None


def half_of_a_first_step():
    model, _, zero, _ = pair(kind=SGD, shard="even")
    given(model)
    if dist.get_rank() == 1:
        [*model.parameters()][2].grad = torch.ones(50, 40).to_sparse()
    said = caught(zero.step)
    given(model)
    return said, caught(zero.step), caught(lambda: zero.consolidate_state_dict(to=0))


def test_a_step_that_failed_on_one_rank_is_one_that_it_missed():
    """In the first step the others learn of it when they have stepped; there is no state to tell by."""
    for first, second, said in run(2, half_of_a_first_step):
        assert "sparse gradient" in first and second is None
        assert "its parts were stepped in different steps" in said


def striped(specs, world_size, *, loads=None):
    """Give the first rank two parts of each parameter, and the second the one between them."""
    outer = []
    inner = []
    for i, spec in enumerate(specs):
        third = spec.numel // 3
        outer += [Span(i, 0, third), Span(i, 2 * third, spec.numel)]
        inner.append(Span(i, third, 2 * third))
    return ShardPlan(tuple(specs), (tuple(outer), tuple(inner)))


def missed_on_all(kind):
    model, _, zero, _ = pair(kind=kind, shard=striped)
    for step in range(3):
        given(model, step=step, lacking=(2,) if step == 1 else ())
        zero.step()
    return caught(lambda: zero.consolidate_state_dict(to=0))


@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_a_rank_with_two_parts_of_a_parameter_misses_a_step_of_it_once(kind):
    assert run(2, missed_on_all, kind) == [None, None]


def never(what):
    """Let one rank never step a parameter that the others step."""
    model, _, zero, _ = pair()
    given(model)
    for p in [*model.parameters()][:3]:
        p.grad = None
    zero.step()
    given(model, lacking=(2,) if dist.get_rank() == 1 else ())
    zero.step()
    if what == "save":
        return caught(lambda: zero.consolidate_state_dict(to=1))
    freeze_last(model)
    return caught(zero.step)


@pytest.mark.parametrize("what", ["save", "freeze"])
def test_state_of_a_part_of_a_parameter_is_an_error_on_every_rank(what):
    for said in run(2, never, what):
        assert "parameter 2: there is state" in (said or "") and "of its 2000 elements" in said


class Counts(SGD):
    """An optimizer with state of no parameter: beside that of parameters, and beside `state` in its state dict."""

    total = 0

    def step(self, closure=None):
        self.state["k"] = self.state.get("k", 0) + 1
        self.total += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(1 / self.total + 1 / self.state["k"])
        return super().step(closure)

    def state_dict(self):
        return {**super().state_dict(), "total": self.total}

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.total = state_dict.get("total", 0)


def counting(two):
    ours, plain = network(), network()

    def split(model):
        found = [*model.parameters()]
        return (
            [{"params": found[:3], "optimizer_class": AdamW}, {"params": found[3:]}]
            if two
            else found
        )

    def make():
        return ZeroRedundancyOptimizer(split(ours), Counts, lr=0.01)

    zero, torchs = make(), Counts([*plain.parameters()][3 if two else 0 :], lr=0.01)
    adam = AdamW([*plain.parameters()][:3]) if two else None
    for step in range(9):
        given(ours, plain, step=step, lacking=(0,) if step == 2 else ())
        next(iter(ours.parameters())).requires_grad_(step != 2)
        if step == 6:
            zero.consolidate_state_dict(to=None)
            state, zero = zero.state_dict(), make()
            zero.load_state_dict(state)
        zero.step()
        for optim in (torchs, adam) if two else (torchs,):
            optim.step()
    return apart(ours, plain)


@pytest.mark.parametrize("two", [False, True])
def test_state_of_no_parameter_is_moved_and_saved(two):
    assert max(run(2, counting, two)) < 1e-6


class Loads(AdamW):
    """Refuses to load on some ranks, after others have loaded."""

    ranks = ()

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        if dist.get_rank() in Loads.ranks:
            raise OverflowError("this rank has broken")


def half_loaded(setup):
    """Fail to load on one rank, and train on; how far it is from training that never tried, and
    what each rank heard."""
    make, dtype, levels = SETUPS[setup]
    nodes, ends = two_level(2) if levels else None, []
    for fails in (False, True):
        module = network(dtype)
        zero = make(module, nodes)
        group = {"params": [nn.Parameter(torch.ones(5, dtype=dtype))], "optimizer_class": Loads}
        zero.add_param_group(group)
        for step in range(6):
            given(module, step=step)
            group["params"][0].grad = torch.ones(5, dtype=dtype)
            if step == 2:
                old = consolidated(zero)
            Loads.ranks = (1,)
            if step == 4 and fails:
                said = [caught(lambda: zero.load_state_dict(copy.deepcopy(old))) for _ in range(2)]
            Loads.ranks = ()
            zero.step()
        ends.append([*(p.detach().clone() for p in module.parameters()), consolidated(zero)])
    return same(*ends), said


@pytest.mark.parametrize("setup", SETUPS)
def test_a_load_that_fails_on_one_rank_leaves_everything_on_all_as_it_was(setup):
    for unchanged, said in run(4 if SETUPS[setup][2] else 2, half_loaded, setup):
        assert unchanged and all("has broken" in (words or "") for words in said)
