"""What comes too late where backward steps: parameters that are written before `step` is called, a
second step, the backward of a second loss."""

import copy

import pytest
import torch
import torch.distributed as dist
from common import caught_error, flatten
from common.overlapping import HIDDEN, MODES, Blocks, attach, data, plainly
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW
from torch.optim.swa_utils import AveragedModel

from zero_nb.backward.ddp_overlap import overlap
from zero_nb.comm.launch import run
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer

LATE = "was written between backward() and step()"


def made(mode, kind=SGD, **options):
    """Give a module, its optimizer, the model to call, and the handle."""
    module = Blocks()
    zero = ZeroRedundancyOptimizer(module.parameters(), kind, lr=0.1, **options)
    return module, zero, *attach(mode, module, zero)


@torch.no_grad()
def decayed(module, zero):
    for p in module.parameters():
        p.mul_(0.9)


@torch.no_grad()
def clamped_at_once(module, zero):
    torch._foreach_clamp_max_(list(module.parameters()), 0.1)


@torch.no_grad()
def one_element(module, zero):
    module.layers[2].bias[0] = 1.0


@torch.no_grad()
def without_asking_its_module(module, zero):
    zero.wait_for_driver()
    zero.param_groups[0]["params"][-1].add_(1.0)


def loaded(module, zero):
    module.load_state_dict({k: v / 2 for k, v in module.state_dict().items()})


@torch.no_grad()
def other_memory(module, zero):
    module.layers[0].bias.set_(torch.zeros(6, dtype=torch.float64))


def by_a_hook(module, zero):
    zero.register_step_pre_hook(lambda *_: decayed(module, zero))


WRITES = [decayed, clamped_at_once, one_element, without_asking_its_module]
WRITES += [loaded, by_a_hook]


def writes_of(mode):  # DDP does not find a parameter that `set_` has given other memory
    return [*WRITES, other_memory] if "parallel" in mode else WRITES


def written_late(mode):
    """Write parameters between backward and step; what step says, and whether training goes on."""
    found = {}
    for write in writes_of(mode):
        module, zero, model, handle = made(mode)
        for step in range(3):
            plainly(model, step)
            if step == 1:
                write(module, zero)
            said = caught_error(zero.step)
            zero.zero_grad()
            if step == 1:
                found[write.__name__] = said
                zero._optimizer_step_pre_hooks.clear()
            elif said is not None:
                found[write.__name__] = ("in another step", said)
        handle.wait()
    return found


@pytest.mark.parametrize("mode", MODES + HIDDEN)
def test_parameters_that_are_written_between_backward_and_step_are_an_error(mode):
    for found in run(2, written_late, mode):
        assert list(found) == [write.__name__ for write in writes_of(mode)]
        for name, (kind, said) in found.items():
            assert kind == "RuntimeError" and LATE in said and "Write" in said, (name, kind, said)
        assert "group 0 parameter 5" in found["one_element"][1]


def written_on_one(mode):
    module, zero, model, _ = made(mode)
    errors = []
    for step in range(5):
        errors.append(caught_error(lambda step=step: plainly(model, step)))
        if step == 3 and dist.get_rank() == 0:  # DDP broadcasts in the second forward
            decayed(module, zero)
        errors.append(caught_error(zero.step))
        zero.zero_grad()
    return [error for error in errors if error is not None]


@pytest.mark.parametrize("mode", ["overlap", "parallel", "parallel hidden"])
def test_what_one_rank_writes_is_told_to_the_others(mode):
    first, second = run(2, written_on_one, mode)
    assert LATE in first[0][1]
    assert "rank 0" in second[0][1] and LATE in second[0][1]


def averaged(module, zero):
    vars(zero).setdefault("ema", AveragedModel(copy.deepcopy(module))).update_parameters(module)


def saved(module, zero):
    module.state_dict()
    copy.deepcopy(module)
    zero.consolidate_state_dict(to=None)
    zero.state_dict()


def loaded_state(module, zero):
    zero.consolidate_state_dict(to=None)
    zero.load_state_dict(copy.deepcopy(zero.state_dict()))


def evaluated(module, zero):
    with torch.no_grad():
        module(data(99))


def moved(module, zero):
    module.to(torch.float64)
    module.to("cpu", memory_format=torch.channels_last)


def frozen(module, zero):
    with torch.no_grad():
        module.layers[4].weight.mul_(0.5)  # backward does not step it


READS = [averaged, saved, loaded_state, evaluated, moved, frozen]
OPTIONS = {"plain": {}, "views": {"parameters_as_bucket_view": True}, "whole": {"shard": "whole"}}


def read_between(mode):
    """Do between backward and step what leaves the stepped parameters as they are; all that is said."""
    found = {}
    for name, options in OPTIONS.items():
        torch.manual_seed(0)
        module = Blocks()
        module.layers[4].requires_grad_(False)
        zero = ZeroRedundancyOptimizer(module.parameters(), AdamW, lr=0.1, **options)
        model, _ = attach(mode, module, zero)
        for step, read in enumerate([*READS, *READS]):
            plainly(model, step)
            read(module, zero)
            found[name, read.__name__, step] = caught_error(zero.step)
            decayed(module, zero)  # after it, parameters may be written
            zero.zero_grad(set_to_none=step % 2 == 0)
    return {k: said for k, said in found.items() if said is not None}


@pytest.mark.parametrize("mode", MODES + HIDDEN)
def test_what_reads_and_moves_parameters_before_step_goes_on(mode):
    assert run(2, read_between, mode) == [{}] * 2


def copied(mode):
    """Step float32 copies of parameters that a target network follows between backward and step."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(6, 6, dtype=torch.bfloat16) for _ in range(4)))
    target = copy.deepcopy(module).requires_grad_(False)
    copies = {"master_dtype": torch.float32}
    zero = ZeroRedundancyOptimizer(module.parameters(), AdamW, lr=0.1, **copies)
    model, _ = attach(mode, module, zero)
    said = []
    for step in range(6):
        model(data(step).bfloat16()).square().mean().backward()
        for p, q in zip(target.parameters(), module.parameters(), strict=True):
            p.lerp_(q.detach(), 0.1)
        said.append(caught_error(zero.step))
        with torch.no_grad():
            for p in module.parameters():
                p.clamp_(-1, 1)
        zero.zero_grad()
    return [error for error in said if error is not None]


@pytest.mark.parametrize("mode", MODES + HIDDEN)
def test_copies_and_a_network_that_follows_go_on(mode):
    assert run(2, copied, mode) == [[]] * 2


def stepped_again(mode):
    """Call step twice for one backward; then in every way in which nothing is stepped twice."""
    module, zero, model, _ = made(mode)
    first = [caught_error(zero.step)]  # no backward yet
    plainly(model, 0)
    first += [caught_error(zero.step)]
    twice = caught_error(zero.step)
    zero.zero_grad()
    right = [caught_error(zero.step)]  # there is nothing to step, as with torch.optim
    for step, cleared in enumerate((zero.zero_grad, module.zero_grad, zero.zero_grad)):
        plainly(model, step)
        right.append(caught_error(zero.step))
        cleared()
        right.append(caught_error(zero.step))

    def closure():
        zero.zero_grad()
        loss = model(data(7)).square().mean()
        loss.backward()
        return loss

    right += [caught_error(lambda: zero.step(closure)) for _ in range(2)]
    for p in module.parameters():
        p.grad = None
    right.append(caught_error(zero.step))
    return twice, [error for error in first + right if error is not None]


@pytest.mark.parametrize("mode", MODES + HIDDEN)
def test_a_second_step_after_one_backward_is_an_error(mode):
    for (kind, said), others in run(2, stepped_again, mode):
        assert kind == "RuntimeError" and "step() was called again" in said
        assert others == []


def kept_averages(mode, adds):
    """Step with averages that a hook of the user's leaves, twice, or add up what is never cleared."""
    plain, ours = (DDP(Blocks(), bucket_cap_mb=0.0003) for _ in range(2))
    optimizer = SGD(plain.parameters(), lr=0.1)
    zero = ZeroRedundancyOptimizer(ours.parameters(), SGD, lr=0.1)

    def hook(state, bucket):
        return default_hooks.allreduce_hook(None, bucket)

    overlap(ours, zero, hook=hook, interleaved=mode == "interleaved")
    for step in range(3):
        for model, o in ((plain, optimizer), (ours, zero)):
            plainly(model, step)
            o.step()
            if not adds:
                o.zero_grad()
    far = (flatten(plain.parameters()) - flatten(ours.parameters())).abs().max().item()
    plainly(ours, 3)
    zero.step()
    return far < 1e-12, caught_error(zero.step)


@pytest.mark.parametrize("mode", MODES[:2])
@pytest.mark.parametrize("adds", [False, True])
def test_averages_that_a_hook_leaves_add_up_and_are_not_stepped_twice(mode, adds):
    for same, (_, said) in run(2, kept_averages, mode, adds):
        assert same and "step() was called again" in said


def two_losses(mode):
    """Two losses of one forward: with a backward each, and together."""
    module = nn.Linear(6, 6).double()  # whose backward does not read what a step has written
    zero = ZeroRedundancyOptimizer(module.parameters(), SGD, lr=0.1)
    model, _ = attach(mode, module, zero)
    y = model(data(0))
    y.sum().backward(retain_graph=True)
    y.square().sum().backward()
    said = caught_error(zero.step)
    zero.zero_grad()
    y = model(data(1))
    (y.sum() + y.square().sum()).backward()
    together = caught_error(zero.step)
    return said, together


@pytest.mark.parametrize("mode", MODES + HIDDEN)
def test_the_backward_of_a_second_loss_is_an_error_of_step(mode):
    word = "taken 2 steps" if "parallel" in mode else "or others came, which is too late"
    for (kind, said), together in run(2, two_losses, mode):
        assert kind == "RuntimeError" and word in said and "no_sync()" in said
        assert together is None
