"""What the optimizer's readers and writers find between one backward and the next: the faults of the review, entry by entry."""
import copy
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW, Muon
from torch.optim.lr_scheduler import StepLR

from zero_nb.launch import run
from zero_nb.optimizer import ZeroRedundancyOptimizer
from zero_nb.overlap import overlap
from zero_nb.parallel import Parallel, data_parallel
from zero_nb.process_group import Group, two_level
from zero_nb.train import TrainConfig, save_checkpoint

SMALL = {"bucket_cap_mb": 0.002, "cut_mb": 0.004}  # buckets of 2 kB, larger parameters in pieces of 4 kB: several of each in small models
MODES = {  # how the optimizer's steps are taken
    "step": None,
    "overlap": (overlap, {}),
    "interleaved": (overlap, {"interleaved": True}),
    "data_parallel": (data_parallel, {"hidden": False, **SMALL}),
    "hidden": (data_parallel, {"hidden": True, **SMALL}),
    "hidden interleaved": (data_parallel, {"hidden": True, "interleaved": True, **SMALL}),
}


def network(dtype=torch.float32) -> nn.Module:
    """Small and large parameters, of one and of two dimensions."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 50, bias=False), nn.LayerNorm(50), nn.Linear(50, 5)).to(dtype)


def attach(mode, model, make):
    """Give the model to call, the optimizer, and what takes its steps, if anything does."""
    if MODES[mode] is None or MODES[mode][0] is overlap:
        wrapped = DDP(model, gradient_as_bucket_view=True, bucket_cap_mb=0.004)
        zero = make(model)
        return wrapped, zero, overlap(wrapped, zero, **MODES[mode][1]) if MODES[mode] else None
    zero = make(model)
    return model, zero, data_parallel(model, zero, **MODES[mode][1])


def batch(step, dtype=torch.float32):
    return torch.randn(6, 12, generator=torch.Generator().manual_seed(1000 * step + dist.get_rank())).to(dtype)


def iterate(model, zero, step, dtype=torch.float32):
    model(batch(step, dtype)).float().square().mean().backward()
    zero.step()
    zero.zero_grad()


def told(f):
    try: return f() and None
    except Exception as e: return f"{type(e).__name__}: {e}"


def refused(loss, x) -> bool: return "inplace operation" in (told(lambda: torch.autograd.grad(loss, x)) or "")


PLACEMENTS = {f"{shard}{'-views' if views else ''}-{cap}": {"shard": shard, "parameters_as_bucket_view": views, "bucket_cap_mb": cap}
              for shard in ("even", "whole") for views in (False, True) for cap in (1.0, 0.0005)}


def kept_graphs(mode, unsharded):
    """Per placement, which parameters a step has not marked as written, and layers whose backward goes on with what a step has overwritten."""
    out = {}
    for name, options in PLACEMENTS.items():
        def make(model, options=options): return (AdamW if unsharded else ZeroRedundancyOptimizer)(
            model.parameters(), *(() if unsharded else (AdamW,)), lr=1e-2, **({} if unsharded else options))
        module = network()
        model, zero, _ = attach(mode, module, make)
        for step in range(4): iterate(model, zero, step)
        layers = [module[0], module[2], module[4]]
        inputs = [torch.ones(3, layer.in_features, requires_grad=True) for layer in layers]
        kept = [layer(x).square().sum() for layer, x in zip(layers, inputs, strict=True)]
        before = [p._version for p in module.parameters()]
        iterate(model, zero, 5)
        went_on = [i for i, (loss, x) in enumerate(zip(kept, inputs, strict=True)) if not refused(loss, x)]
        out[name] = went_on, [i for i, (p, v) in enumerate(zip(module.parameters(), before, strict=True)) if p._version == v]
    return out


@pytest.mark.parametrize("mode", MODES)
def test_L4_a_graph_kept_over_a_step_is_an_error_on_every_rank(mode):
    expected = {name: ([], []) for name in PLACEMENTS}
    assert run(2, kept_graphs, mode, False) == [expected, expected]


def test_L4_as_with_the_unsharded_optimizer():
    assert run(2, kept_graphs, "step", True) == [{name: ([], []) for name in PLACEMENTS}] * 2


def masters(model, nodes=None): return ZeroRedundancyOptimizer(model.parameters(), AdamW, nodes, lr=1e-2, master_dtype=torch.float32)
def muon_adamw(model, nodes=None):
    found = list(model.parameters())
    return ZeroRedundancyOptimizer([{"params": [p for p in found if p.dim() == 2], "optimizer_class": Muon, "lr": 0.02},
                                    {"params": [p for p in found if p.dim() != 2]}], AdamW, nodes, lr=1e-2)


def consolidated(zero, *_):
    zero.consolidate_state_dict(to=None)
    return copy.deepcopy(zero.state_dict())


def loaded(zero, *_):
    saved = consolidated(zero)
    zero.load_state_dict(saved)


def loaded_old(zero, module, handle, old): zero.load_state_dict(copy.deepcopy(old))
def copied(zero, *_): return [p.detach().clone() for group in copy.deepcopy(zero).param_groups for p in group["params"]]
def pickled(zero, *_): return [p.detach().clone() for group in pickle.loads(pickle.dumps(zero)).param_groups for p in group["params"]]
def reduced(zero, *_): return [p.detach().clone() for group in zero.__getstate__()["param_groups"] for p in group["params"]]
def stepped_here(zero, *_): return [key.detach().clone() for state in zero.state.values() for key in state if isinstance(key, torch.Tensor)]
def frozen(zero, module, handle, *_):  # which DDP does not take
    if isinstance(handle, Parallel): next(iter(module.parameters())).requires_grad_(False)


def detached(zero, module, handle, *_):
    if handle is not None: handle.detach()
    return consolidated(zero)


def left(zero, module, handle, *_):  # an exception that every rank sees ends the block
    if handle is None: return None
    try:
        with handle: raise KeyboardInterrupt
    except KeyboardInterrupt: pass
    return consolidated(zero)


def seen(zero, *_):  # as an exponential moving average reads them
    return [p.detach().clone() for group in zero.param_groups for p in group["params"]]


def added(zero, module, handle, *_):
    if handle is not None: return told(lambda: zero.add_param_group({"params": [nn.Parameter(torch.ones(3))]}))
    extra = nn.Parameter(torch.ones(3, dtype=next(iter(module.parameters())).dtype))
    zero.add_param_group({"params": [extra]})
    return consolidated(zero)


def in_hooks(zero, *_):  # which a user may read anything in
    found = []
    for register in (zero.register_state_dict_pre_hook, zero.register_load_state_dict_pre_hook): register(lambda *_: found.append(seen(zero)))
    for call in (zero.state_dict, lambda: zero.load_state_dict({"state": {}, "param_groups": []})): told(call)
    return found


READERS = [consolidated, loaded, loaded_old, copied, pickled, reduced, stepped_here, frozen, detached, left, added, in_hooks]
SETUPS = {"masters": (masters, torch.bfloat16, False), "Muon and AdamW": (muon_adamw, torch.float32, False),
          "two levels": (masters, torch.bfloat16, True), "Muon and AdamW on two levels": (muon_adamw, torch.float32, True)}


def history(mode, setup, reader, waits):
    """Train, read right after a step or after a wait, and train on; give what was read and the parameters at the end."""
    make, dtype, levels = SETUPS[setup]
    nodes, module = two_level(2) if levels else None, network(dtype)
    model, zero, handle = attach(mode, module, lambda model: make(model, nodes))
    old = None
    for step in range(4):
        if step == 3: old = consolidated(zero)
        iterate(model, zero, step, dtype)
    if waits and handle is not None: handle.wait()
    if waits: [p.detach().sum() for p in module.parameters()]
    found = reader(zero, module, handle, old)
    if reader is not left:  # which leaves a step half done
        for step in range(5, 7): iterate(model, zero, step, dtype)
    return found, [p.detach().clone() for p in module.parameters()]


def same(these, those) -> bool:
    if isinstance(these, torch.Tensor): return these.dtype == those.dtype and torch.equal(these, those)
    if isinstance(these, dict): return these.keys() == those.keys() and all(same(these[key], those[key]) for key in these)
    if isinstance(these, (list, tuple)): return len(these) == len(those) and all(map(same, these, those))
    return these == those


def too_early(mode, setup, readers): return [f.__name__ for f in readers if not same(history(mode, setup, f, False), history(mode, setup, f, True))]


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("mode", MODES)
def test_H1_who_reads_right_after_a_step_reads_what_comes_after_a_wait(mode, setup):
    size, readers = 4 if SETUPS[setup][2] else 2, READERS if "hidden" in mode else [consolidated, seen, loaded, detached]
    assert run(size, too_early, mode, setup, readers) == [[]] * size


def resumed(mode, setup, attached, folder):
    """Save with the training job's function right after a step, train on, and do the same from the file; give both ends."""
    make, dtype, levels = SETUPS[setup]
    nodes = two_level(2) if levels else None
    def side():
        module = network(dtype)
        model, zero, _ = attach(mode, module, lambda model: make(model, nodes))
        return SimpleNamespace(model=module, call=model, optimizer=zero, schedule=StepLR(zero, 2, 0.5), config=TrainConfig(out=folder))
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
    if attached: train(again, range(20, 23))  # what was trained before a load does not matter
    again.model.load_state_dict(state["model"])
    again.optimizer.load_state_dict(state["optimizer"])
    again.schedule.load_state_dict(state["schedule"])
    train(again, range(5, 9))
    return [[p.detach().clone() for p in one.model.parameters()] for one in (first, again)], [group["lr"] for group in again.optimizer.param_groups]


@pytest.mark.parametrize("setup", ["masters", "Muon and AdamW", "two levels"])
@pytest.mark.parametrize("mode", MODES)
def test_H1_a_job_that_saved_right_after_a_step_resumes_bit_for_bit(mode, setup, tmp_path):
    for attached in (True,) if (mode, setup) == ("step", "two levels") else (False, True):  # DDP itself adds up in another order in its first iteration
        for (first, again), _ in run(4 if SETUPS[setup][2] else 2, resumed, mode, setup, attached, str(tmp_path)): assert same(first, again), attached


class Takes(SGD):
    """An optimizer of which `closure` is not called, as of classes that pass it on."""

    def step(self, closure=None):
        super().step()
        return "no closure" if closure is None else closure


class Doubles(SGD):
    """An optimizer that always returns something."""

    def step(self, closure=None): return (super().step(closure), 2)


def closures():
    """Find for which closures `step` does otherwise than with torch's class."""
    from torch.distributed.optim import ZeroRedundancyOptimizer as Torchs
    found = []
    for make in (Torchs, ZeroRedundancyOptimizer):
        for kind in (AdamW, SGD, Takes, Doubles):
            for closure in (None, 5, 0, False, "x", (), *([lambda: torch.tensor(3.0)] if kind in (SGD, AdamW) else [])):
                model, outcome = DDP(network()), []
                zero = make(model.parameters(), kind, lr=0.1)
                for _ in range(2):  # the first step, and a later one, which ranks do not agree on
                    model(batch(0)).square().mean().backward()
                    given = told(lambda: outcome.append(zero.step(closure) if closure is not None else zero.step()))  # noqa: B023
                    outcome.append((given or "").replace("rank 0: ", ""))
                found.append((kind.__name__, str(closure)[:9], str(outcome), [p.detach().clone() for p in model.parameters()]))
    half, apart = len(found) // 2, []
    for torchs, ours in zip(found[:half], found[half:], strict=True):
        close = all(torch.allclose(a, b, atol=1e-5) for a, b in zip(torchs[3], ours[3], strict=True))
        if torchs[:3] != ours[:3] or not close: apart.append((ours[:3], torchs[:3]))
    return apart


def test_a_closure_that_is_not_callable_reaches_the_local_optimizer_as_with_torchs_class():
    assert run(2, closures) == [[], []]


class Breaks(AdamW):
    """Steps its first parameter only, and raises, when it is told to; tensors are stepped one by one."""

    ranks = ()

    def __init__(self, params, **options): super().__init__(params, foreach=False, fused=False, **options)
    def step(self, closure=None):
        if dist.get_rank() not in Breaks.ranks: return super().step(closure)
        grads = [p.grad for group in self.param_groups for p in group["params"]][1:]
        for p in [p for group in self.param_groups for p in group["params"]][1:]: p.grad = None
        super().step(closure)
        for p, grad in zip([p for group in self.param_groups for p in group["params"]][1:], grads, strict=True): p.grad = grad
        raise OverflowError("this rank has broken")


def replicas_agree(module):
    mine = torch.cat([p.detach().flatten() for p in module.parameters()])
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return all(torch.equal(mine, other) for other in every)


def broken(shard, views, dtype, breaks):
    """Go through steps of which some break on some ranks; for each what was raised, and whether replicas agree after it."""
    module, found = network(dtype), []
    zero = ZeroRedundancyOptimizer(module.parameters(), Breaks, lr=0.1, shard=shard, parameters_as_bucket_view=views, trust_optimizer_class=True,
                                   master_dtype=torch.float32 if dtype == torch.bfloat16 else None)
    for step, ranks in enumerate(breaks):
        Breaks.ranks = ranks
        if step == 4: module[0].weight.requires_grad_(False)
        for i, p in enumerate(module.parameters()):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * step + i)).to(p.dtype) if p.requires_grad else None
        raised = told(zero.step)
        found.append((raised, replicas_agree(module)))
    zero.consolidate_state_dict(to=None)
    zero.load_state_dict(zero.state_dict())
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shard", ["even", "whole"])
@pytest.mark.parametrize("views", [False, True])
def test_replicas_agree_after_a_step_that_failed_on_all_ranks_or_in_the_first_step_on_one(shard, views, dtype):
    breaks = [(1,), (0, 1), (), (0, 1), (0, 1), (), ()]  # the first step, which ranks agree on; later ones; twice in a row, the second time frozen
    ranks = run(2, broken, shard, views, dtype, breaks)
    for rank, found in enumerate(ranks):
        assert [same for _, same in found] == [True] * len(breaks), [same for _, same in found]
        assert [bool(raised) for raised, _ in found] == [bool(b) for b in breaks]
        assert all("has broken" in raised for raised, _ in found if raised), rank


def lone(levels, catches):
    """Break on one rank in a later step; what each rank gets then, and from what it does after it."""
    module = network()
    zero = ZeroRedundancyOptimizer(module.parameters(), Breaks, two_level(2) if levels else None, lr=0.1, trust_optimizer_class=True)
    found = []
    for step in range(4):
        Breaks.ranks = (1,) if step == 2 else ()
        for p in module.parameters(): p.grad = torch.ones_like(p)
        raised = told(zero.step)
        if raised: found.append(raised)
        if raised and not catches: raise RuntimeError(raised)
    return found


@pytest.mark.parametrize("levels", [False, True])
def test_a_step_that_fails_on_one_rank_alone_is_an_error_on_all(levels, way):
    ranks = run(4 if levels else 2, lone, levels, True, timeout=60)
    assert ranks[1][0] == "OverflowError: this rank has broken"
    assert len(ranks[0]) == 2 and "rank 1 failed with OverflowError: this rank has broken" in ranks[0][0]  # and so does the step after it
    assert all(words.startswith("RuntimeError") for rank in ranks for words in rank[1:])
    if not levels:
        with pytest.raises(RuntimeError, match="has broken"): run(2, lone, False, False, timeout=60)
