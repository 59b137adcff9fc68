"""Steps that fail on some ranks, after which replicas agree and every rank has an error; closures that are none;
and parameters that the first rank gives to all."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from common import caught
from common.faulty_steps import batch, network, refused
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW

from zero_nb.backward.data_parallelism import data_parallel
from zero_nb.comm.launch import run
from zero_nb.comm.subgroups import two_level
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer


class Takes(SGD):
    """An optimizer of which `closure` is not called, as of classes that pass it on."""

    def step(self, closure=None):
        super().step()
        return "no closure" if closure is None else closure


class Doubles(SGD):
    """An optimizer that always returns something."""

    def step(self, closure=None):
        return (super().step(closure), 2)


def step_with(make, kind, closure):
    """Step twice, the second time without an agreement of ranks; what each call gave, and the parameters."""
    model, outcome = DDP(network()), []
    zero = make(model.parameters(), kind, lr=0.1)
    for _ in range(2):
        model(batch(0)).square().mean().backward()
        given = caught(
            lambda: outcome.append(zero.step(closure) if closure is not None else zero.step())
        )
        outcome.append((given or "").replace("rank 0: ", ""))
    said = kind.__name__, str(closure)[:9], str(outcome)
    return said, [p.detach().clone() for p in model.parameters()]


def closures():
    """Find for which closures `step` does otherwise than with torch's class."""
    from torch.distributed.optim import ZeroRedundancyOptimizer as Torchs

    found = []
    for make in (Torchs, ZeroRedundancyOptimizer):
        for kind in (AdamW, SGD, Takes, Doubles):
            callables = [lambda: torch.tensor(3.0)] if kind in (SGD, AdamW) else []
            given = (None, 5, 0, False, "x", (), *callables)
            found += [step_with(make, kind, closure) for closure in given]
    half, apart = len(found) // 2, []
    for torchs, ours in zip(found[:half], found[half:], strict=True):
        close = all(
            torch.allclose(a, b, atol=1e-5) for a, b in zip(torchs[1], ours[1], strict=True)
        )
        if torchs[0] != ours[0] or not close:
            apart.append((ours[0], torchs[0]))
    return apart


def test_a_closure_that_is_not_callable_reaches_the_local_optimizer_as_with_torchs_class():
    assert run(2, closures) == [[], []]


class Breaks(AdamW):
    """Steps its first parameter only, and raises, when it is told to; tensors are stepped one by one."""

    ranks = ()

    def __init__(self, params, **options):
        super().__init__(params, foreach=False, fused=False, **options)

    def step(self, closure=None):
        if dist.get_rank() not in Breaks.ranks:
            return super().step(closure)
        grads = [p.grad for group in self.param_groups for p in group["params"]][1:]
        for p in [p for group in self.param_groups for p in group["params"]][1:]:
            p.grad = None
        super().step(closure)
        for p, grad in zip(
            [p for group in self.param_groups for p in group["params"]][1:], grads, strict=True
        ):
            p.grad = grad
        raise OverflowError("this rank has broken")


def replicas_agree(module):
    mine = torch.cat([p.detach().flatten() for p in module.parameters()])
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return all(torch.equal(mine, other) for other in every)


def broken(shard, views, dtype, breaks):
    """Go through steps of which some break on some ranks; for each what was raised, and whether
    replicas agree after it."""
    module, found = network(dtype), []
    zero = ZeroRedundancyOptimizer(
        module.parameters(),
        Breaks,
        lr=0.1,
        shard=shard,
        parameters_as_bucket_view=views,
        trust_optimizer_class=True,
        master_dtype=torch.float32 if dtype == torch.bfloat16 else None,
    )
    for step, ranks in enumerate(breaks):
        Breaks.ranks = ranks
        if step == 4:
            module[0].weight.requires_grad_(False)
        for i, p in enumerate(module.parameters()):
            p.grad = (
                torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * step + i)).to(
                    p.dtype
                )
                if p.requires_grad
                else None
            )
        raised = caught(zero.step)
        found.append((raised, replicas_agree(module)))
    zero.consolidate_state_dict(to=None)
    zero.load_state_dict(zero.state_dict())
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shard", ["even", "whole"])
@pytest.mark.parametrize("views", [False, True])
def test_replicas_agree_after_a_step_that_failed_on_all_ranks_or_in_the_first_step_on_one(
    shard, views, dtype
):
    breaks = [
        (1,),
        (0, 1),
        (),
        (0, 1),
        (0, 1),
        (),
        (),
    ]  # the first step, which ranks agree on; later ones; twice in a row, the second time frozen
    ranks = run(2, broken, shard, views, dtype, breaks)
    for rank, found in enumerate(ranks):
        assert [same for _, same in found] == [True] * len(breaks), [same for _, same in found]
        assert [bool(raised) for raised, _ in found] == [bool(b) for b in breaks]
        assert all("has broken" in raised for raised, _ in found if raised), rank


def lone(levels, catches):
    """Break on one rank in a later step; what each rank gets then, and from what it does after it."""
    module = network()
    zero = ZeroRedundancyOptimizer(
        module.parameters(),
        Breaks,
        two_level(2) if levels else None,
        lr=0.1,
        trust_optimizer_class=True,
    )
    found = []
    for step in range(4):
        Breaks.ranks = (1,) if step == 2 else ()
        for p in module.parameters():
            p.grad = torch.ones_like(p)
        raised = caught(zero.step)
        if raised:
            found.append(raised)
        if raised and not catches:
            raise RuntimeError(raised)
    return found


@pytest.mark.parametrize("levels", [False, True])
def test_a_step_that_fails_on_one_rank_alone_is_an_error_on_all(levels, way):
    ranks = run(4 if levels else 2, lone, levels, True, timeout=60)
    assert ranks[1][0] == "OverflowError: this rank has broken"
    assert (
        len(ranks[0]) == 2
        and "rank 1 failed with OverflowError: this rank has broken" in ranks[0][0]
    )  # and so does the step after it
    assert all(words.startswith("RuntimeError") for rank in ranks for words in rank[1:])
    if not levels:
        with pytest.raises(RuntimeError, match="has broken"):
            run(2, lone, False, False, timeout=60)


def far_away(path):
    """Break on one rank in a later step, and stay alive until all others have heard of it; what
    each has heard, and in which step."""
    module, nodes = network(), two_level(2)
    model = DDP(module)
    zero = ZeroRedundancyOptimizer(
        module.parameters(), Breaks, nodes, lr=0.1, trust_optimizer_class=True
    )
    store = dist.FileStore(path, 4)
    for step in range(6):
        Breaks.ranks = (1,) if step == 2 else ()
        try:
            model(batch(step)).square().mean().backward()
            zero.step()
        except Exception as error:
            store.set(str(dist.get_rank()), "heard")
            store.wait(["0", "1", "2", "3"], timedelta(seconds=40))
            return step, f"{type(error).__name__}: {error}"
    return None


def test_a_step_that_fails_on_one_rank_reaches_other_nodes_in_their_next_collective(tmp_path):
    began = time.monotonic()
    ranks = run(4, far_away, str(tmp_path / "store"), timeout=60)
    assert time.monotonic() - began < 30, "no rank waits for a time limit"
    assert (
        ranks[1] == (2, "OverflowError: this rank has broken")
        and ranks[0][0] == 2
        and "rank 1 failed with OverflowError" in ranks[0][1]
    )
    assert [step for step, _ in ranks[2:]] == [
        3,
        3,
    ], "they have stepped, and hear of it in the next backward"


def taken_over(unsharded):
    """Per layer, whether backward refuses a graph that was made before all ranks got the first one's parameters."""
    module = nn.ModuleList(
        [nn.Linear(6, 5), nn.Linear(6, 300_000, bias=False)]
    )  # the second is larger than what is sent in one piece
    inputs = [torch.ones(2, 6, requires_grad=True) for _ in module]
    kept = [layer(x).square().sum() for layer, x in zip(module, inputs, strict=True)]
    if unsharded:
        DDP(module)
    else:
        data_parallel(module, ZeroRedundancyOptimizer(module.parameters(), AdamW), hidden=False)
    return [refused(loss, x) for loss, x in zip(kept, inputs, strict=True)]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("unsharded", [True, False])
def test_L4_parameters_that_come_from_the_first_rank_are_written_for_autograd(unsharded):
    assert run(2, taken_over, unsharded) == [[True, True]] * 2


def writing_closure():
    """Write an option in a closure; the parameters after a sharded and a plain step."""
    found = []
    for make in (ZeroRedundancyOptimizer, None):
        model = network()
        params = [*model.parameters()]
        optimizer = SGD(params, lr=0.1) if make is None else make(params, SGD, lr=0.1)
        for rate in (0.1, 0.7):

            def closure(params=params, group=optimizer.param_groups[0], rate=rate):
                for p in params:
                    p.grad = torch.ones_like(p)
                group["lr"] = rate
                return torch.tensor(1.0)

            optimizer.step(closure)
        found.append(torch.cat([p.detach().flatten() for p in params]))
    return found


def test_an_option_that_a_closure_writes_is_that_of_the_step_as_in_torch():
    for ours, plain in run(2, writing_closure):
        assert torch.equal(ours, plain)
