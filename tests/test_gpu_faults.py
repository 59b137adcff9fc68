"""On a GPU: what the review of faults could only read, with a side stream that lags and an allocator
that hands freed memory on at once."""

import copy

import pytest
import torch
import torch.distributed as dist
from common import gpu
from common.devices import GPU, cuda
from common.gpu import Lagging, Net, batches, flat, gap, gap_of_states
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW

from zero_nb.backward.data_parallelism import data_parallel
from zero_nb.backward.ddp_overlap import overlap
from zero_nb.checkpoint.async_save import AsyncCheckpointer
from zero_nb.checkpoint.full import full_state_dict, load_full_state_dict
from zero_nb.checkpoint.sharded import load_sharded, save_sharded
from zero_nb.comm.calls import Call, Parts
from zero_nb.comm.coalescing import _natively, coalescing_manager
from zero_nb.comm.ending import abort, fail
from zero_nb.comm.groups import Group
from zero_nb.comm.launch import run
from zero_nb.comm.objects import broadcast_object_list
from zero_nb.comm.simulation import simulate
from zero_nb.join.join import Join
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer

# ---- C2: a side stream that lags ----

STEPS = 6
IN_BACKWARD = [
    "zero1-overlap",
    "zero1-overlap, interleaved",
    "zero2",
    "zero2-interleaved",
    "zero2, hidden",
    "zero2-interleaved, hidden",
]
BF16 = torch.bfloat16
USES = {
    "plain": {},
    "norm": {"max_grad_norm": 0.05},
    "unused": {"unused": True},
    "accumulation": {"micro": 3},
    "checkpoints": {"checkpoints": True},
    "masters": {"dtype": BF16, "masters": True},
}


def uses_of(mode):
    return {name: use for name, use in USES.items() if name != "norm" or "inter" not in mode}


def train(
    mode, size=1, kind=Lagging, dtype=torch.float64, micro=1, masters=False, steps=STEPS, **setup
):
    """Train with a side stream of a kind (None: as it is); the parameters, and how often it slept."""
    net = Net(setup.pop("checkpoints", False)).to(gpu.DEVICE, dtype)
    unused = setup.get("unused", False)
    with gpu.group_of(size) as group:
        make = lambda module: gpu.adamw(module, group, masters)
        attached = gpu.attach(mode, net, make, group, **setup)
        stream = gpu.lag(attached.handle, kind) if kind else None
        for step, inputs in enumerate(batches(steps, dtype, micro)):
            gpu.backward(attached, inputs, gpu.skipped(step, unused))
            gpu.take_step(attached)
        attached.handle.detach()
        torch.cuda.synchronize()
        return flat(net.parameters()), stream.sleeps if stream else 0


def beside_plain(mode, **use):
    """Give how far a lagging stream leads from a plain optimizer, and how often it slept."""
    params, sleeps = train(mode, **use)
    return gap(params, gpu.train_plain(STEPS, **use)), sleeps


def beside_itself(mode, **use):
    """Give how far a lagging stream leads one of eight ranks from the same training without it."""
    params, sleeps = train(mode, 8, **use)
    return gap(params, train(mode, 8, None, **use)[0]), sleeps


def compared(how, **use):
    return how(**use)


@cuda
@pytest.mark.parametrize("mode", IN_BACKWARD)
def test_C2_a_side_stream_may_lag(mode):
    cases = {
        (name, how.__name__): {"mode": mode, "how": how, **use}
        for name, use in uses_of(mode).items()
        # with DDP a plan follows the first step, and state would come from ranks that are not there
        for how in (beside_plain, *([beside_itself] if "zero2" in mode else []))
    }
    found = gpu.each_on_gpu(compared, cases)
    for name, value in found.items():
        assert not isinstance(value, str), (name, value)
        off, sleeps = value
        assert off < 1e-9 and sleeps >= STEPS, (name, value)


class Forgetful(Lagging):
    """Does not record what the allocator must keep for it."""

    def keep(self, tensor, stream=None):
        pass


class Hasty(Lagging):
    """Does not let other streams wait for it."""

    def wait(self, event=None):
        pass


@cuda
def test_C2_a_lagging_stream_shows_what_is_let_go_or_read_too_early():
    cases = {kind.__name__: {"mode": "zero2", "kind": kind} for kind in (Forgetful, Hasty)}
    for name, (off, sleeps) in gpu.each_on_gpu(beside_plain, cases).items():
        assert sleeps >= STEPS and not off < 1e-9, (name, off)  # NaN, too


def norms(mode):
    """Give the norms that are read right after each backward, and those of the plain gradients."""
    net, found, wanted = Net().to(gpu.DEVICE, torch.float64), [], []
    attached = gpu.attach(mode, net, gpu.adamw, max_grad_norm=1e9)
    gpu.lag(attached.handle)
    for inputs in batches(4):
        twin = Net().to(gpu.DEVICE, torch.float64)
        twin.load_state_dict(copy.deepcopy(net.state_dict()))
        twin(inputs[0]).square().mean().backward()
        gpu.backward(attached, inputs)
        found.append(float(attached.handle.grad_norm))
        wanted.append(float(nn.utils.get_total_norm([p.grad for p in twin.parameters()])))
        gpu.take_step(attached)
    return max(abs(a - b) for a, b in zip(found, wanted, strict=True))


@cuda
def test_M11_the_norm_of_a_lagging_stream_is_read_in_time():
    modes = [m for m in IN_BACKWARD if "inter" not in m]
    found = gpu.each_on_gpu(norms, {mode: {"mode": mode} for mode in modes})
    assert all(isinstance(off, float) and off < 1e-9 for off in found.values()), found


# ---- H1: checkpoints of a stream that lags ----


def consolidated(net, zero):
    zero.consolidate_state_dict(to=None)
    return zero.state_dict()["state"]


def whole(net, zero):
    return full_state_dict(zero, None)["state"]


def of_model(net, zero):
    return {0: {k: v.detach().clone() for k, v in net.state_dict().items()}}


def after_a_step(mode, read, size):
    """Give how far what is read right after a step is from what is read when the device is idle."""
    net = Net().to(gpu.DEVICE, BF16)
    with gpu.group_of(size) as group:
        attached = gpu.attach(mode, net, lambda module: gpu.adamw(module, group, True), group)
        gpu.lag(attached.handle)
        gaps = []
        for inputs in batches(4, BF16):
            gpu.backward(attached, inputs)
            attached.optimizer.step()
            early = read(net, attached.optimizer)
            attached.handle.wait()
            torch.cuda.synchronize()
            gaps.append(gap_of_states(early, read(net, attached.optimizer)))
            attached.optimizer.zero_grad()
        return max(gaps)


@cuda
def test_H1_a_state_that_is_read_right_after_a_step_is_that_of_the_step():
    cases = {
        (mode, read.__name__, size): {"mode": mode, "read": read, "size": size}
        for read, size in ((consolidated, 1), (whole, 1), (of_model, 1), (of_model, 8))
        for mode in IN_BACKWARD
        if size == 1 or "zero2" in mode
    }
    assert gpu.each_on_gpu(after_a_step, cases) == dict.fromkeys(cases, 0.0)


def saved_while_training(mode, folder):
    """Save at once after a step and train on, and save when the device is idle; load both."""
    loaded = []
    for name in ("async", "idle"):
        net = Net().to(gpu.DEVICE, BF16)
        attached = gpu.attach(mode, net, lambda module: gpu.adamw(module, None, True))
        gpu.lag(attached.handle)
        saver = AsyncCheckpointer(net, attached.optimizer)
        for step, inputs in enumerate(batches(5, BF16)):
            gpu.backward(attached, inputs)
            gpu.take_step(attached)
            if step == 2 and name == "async":
                saver.save(folder / name)
            elif step == 2:
                attached.handle.wait()
                torch.cuda.synchronize()
                save_sharded(folder / name, net, attached.optimizer)
        saver.close()
        other = Net().to(gpu.DEVICE, BF16)
        nn.init.zeros_(other.head.weight)
        zero = gpu.adamw(other, None, True)
        load_sharded(folder / name, other, zero)
        loaded.append((flat(other.parameters()), consolidated(other, zero)))
    (one, state), (two, states) = loaded
    return gap(one, two), gap_of_states(state, states)


@cuda
def test_H1_a_checkpoint_is_written_while_a_lagging_stream_goes_on(folder):
    modes = ("zero1-overlap", "zero2", "zero2, hidden")
    cases = {mode: {"mode": mode, "folder": folder / mode} for mode in modes}
    for case in cases.values():
        case["folder"].mkdir()
    assert gpu.each_on_gpu(saved_while_training, cases) == dict.fromkeys(modes, (0.0, 0.0))


# ---- H7: uneven parts in a coalescing block ----

MANY = 1 << 24


def uneven_on_nccl():
    """Gather and reduce parts that are filled up, in one of NCCL's own blocks; read at once."""
    group, found = Group(), []
    for kind in ("all_gather", "reduce_scatter"):
        for numel in (5, MANY):
            garbage = [torch.full((numel + 8,), torch.nan, device=gpu.DEVICE) for _ in range(4)]
            del garbage  # what a block allocates and reads too early is NaN
            tensors = [torch.arange(numel, device=gpu.DEVICE) + float(i) for i in range(2)]
            calls = [Call(kind, t, Parts(1, numel, numel + 8)) for t in tensors]
            torch.cuda._sleep(gpu.CYCLES)
            for _ in _natively(group, calls):
                pass
            read = [t.clone() for t in tensors]
            wanted = [torch.arange(numel, device=gpu.DEVICE) + float(i) for i in range(2)]
            found.append(all(a.equal(b) for a, b in zip(read, wanted, strict=True)))
    return found


@cuda
def test_H7_uneven_parts_in_a_block_of_nccl_are_waited_for():
    assert gpu.on_gpu(uneven_on_nccl) == [True] * 4


def uneven_blocks():
    """Coalesce uneven parts in a group of three without peers, on a stream of its own; read at once."""
    with simulate(3, 1) as pg, torch.cuda.stream(torch.cuda.Stream()):
        group, sizes = Group(pg), [4, 3, 1]
        torch.cuda._sleep(gpu.CYCLES)
        made = [torch.arange(8.0, device=gpu.DEVICE) + 10 * i for i in range(4)]
        with coalescing_manager(group):
            group.all_gather(made[0], sizes)
            group.all_gather(made[1], sizes)
            group.reduce_scatter(made[2], sizes)
            group.all_reduce(made[3])
        return [t.tolist() for t in made]


@cuda
def test_H7_uneven_parts_in_a_block_without_peers():
    first, second, third, fourth = gpu.on_gpu(uneven_blocks)
    assert first[4:7] == [4.0, 5.0, 6.0] and second[4:7] == [14.0, 15.0, 16.0]
    assert third[4:7] == [24.0, 25.0, 26.0] and fourth == [30.0 + i for i in range(8)]


# ---- parameters that are not used ----


def unused_waits(mode):
    """Count how often the host waits for the device in each of the last iterations, and the buckets."""
    net = Net().to(gpu.DEVICE, torch.float64)
    attached = gpu.attach(mode, net, gpu.adamw, unused=True)
    counts = []
    for step, inputs in enumerate(batches(8)):
        found = []
        with gpu.counting_waits(found):
            gpu.backward(attached, inputs, gpu.skipped(step, True))
            gpu.take_step(attached)
        counts.append(len(found))
    handle = attached.handle
    return counts[4:], len(handle.step_plan.shard.buckets) if handle else 0


@cuda
def test_looking_for_unused_parameters_waits_twice_or_twice_a_bucket():
    modes = ["zero1", *IN_BACKWARD]
    found = gpu.each_on_gpu(unused_waits, {mode: {"mode": mode} for mode in modes})
    assert not any(isinstance(value, str) for value in found.values()), found
    of_ddp = max(found["zero1"][0])  # DDP's own; without DDP there are none
    for mode in IN_BACKWARD:
        counts, buckets = found[mode]
        most = 2 * buckets if "inter" in mode else 2
        assert max(counts) <= most + (of_ddp if mode.startswith("zero1") else 0), (found, mode)


# ---- another default device ----


def by_default(mode, folder, device):
    """Train, save, load and train on, with new tensors made where the model is, or where they are."""
    torch.set_default_device(device)
    try:
        with torch.device("cpu"):  # a GPU draws other weights
            net = Net().to(gpu.DEVICE, torch.float64)
        attached = gpu.attach(mode, net, gpu.adamw)
        with Join([attached.joinable, attached.optimizer]):
            for inputs in batches(4):
                gpu.backward(attached, inputs)
                gpu.take_step(attached)
        zero = attached.optimizer
        save_sharded(folder / f"{mode} {device}", net, zero)
        full_state_dict(zero, folder / f"{mode} {device}.pt")
        other = Net().to(gpu.DEVICE, torch.float64)
        again = gpu.attach(mode, other, gpu.adamw)
        load_sharded(folder / f"{mode} {device}", other, again.optimizer)
        load_full_state_dict(again.optimizer, folder / f"{mode} {device}.pt")
        sent = [{"step": torch.ones(2, device="cpu")}]
        broadcast_object_list(sent, map_location=gpu.DEVICE)
        for inputs in batches(2):
            for each in (attached, again):
                gpu.backward(each, inputs)
                gpu.take_step(each)
        consolidated(other, again.optimizer)
        for each in (attached, again):
            if each.handle:
                each.handle.detach()
        return flat(net.parameters()).cpu(), flat(other.parameters()).cpu()
    finally:
        torch.set_default_device(None)


def beside_the_cpu(mode, folder):
    (one, loaded), (two, _) = [by_default(mode, folder, d) for d in (gpu.DEVICE, None)]
    return gap(one, two), gap(one, loaded)


@cuda
def test_L6_new_tensors_are_where_they_belong_with_a_default_device(folder):
    cases = {mode: {"mode": mode, "folder": folder} for mode in ("zero1", *IN_BACKWARD)}
    assert gpu.each_on_gpu(beside_the_cpu, cases) == dict.fromkeys(cases, (0.0, 0.0))


def own_class_by_default():
    """Shard a class that is tried first, with a closure, under a default device."""
    from common.optimizers import SignSGD

    torch.set_default_device(gpu.DEVICE)
    finals = []
    for make in (SignSGD, lambda p, **o: ZeroRedundancyOptimizer(p, SignSGD, **o)):
        net = Net()
        optimizer = make(net.parameters(), lr=0.01)
        for inputs in batches(3, torch.float32):
            optimizer.zero_grad()
            net(inputs[0]).square().mean().backward()
            optimizer.step()
        finals.append(flat(net.parameters()))
    return gap(*finals)


@cuda
def test_L6_a_class_of_the_users_is_tried_with_a_default_device():
    assert gpu.on_gpu(own_class_by_default) < 1e-6


def failing(mode):
    """Fail in backward, under a default device; the job must end with this error."""
    torch.set_default_device(gpu.DEVICE)
    net = Net().to(gpu.DEVICE, torch.float64)
    attached = gpu.attach(mode, net, gpu.adamw)
    for step, inputs in enumerate(batches(6)):
        if step == 4:
            net.layers[1].weight.register_hook(lambda gradient: 1 // 0)
        gpu.backward(attached, inputs)
        gpu.take_step(attached)


@cuda
@pytest.mark.parametrize("mode", ["zero1-overlap", "zero2", "zero2, hidden"])
def test_H5_L6_a_backward_that_fails_ends_the_job_with_its_error(mode):
    with pytest.raises((ZeroDivisionError, RuntimeError), match="by zero"):
        run(1, failing, mode, backend=GPU, timeout=60)


def ended():
    """Abort and fail groups of this rank on NCCL, which has run a collective."""
    torch.set_default_device(gpu.DEVICE)
    dist.all_reduce(torch.ones(1, device=gpu.DEVICE))
    said = []
    for end in (abort, lambda group: fail(group, ValueError("on purpose"))):
        group = Group(dist.new_group([0], backend=GPU))
        group.all_reduce(torch.ones(2, device=gpu.DEVICE))
        end(group)
        torch.cuda.synchronize()
        said.append(group.size)
    with simulate(4) as pg:
        group = Group(pg)
        fail(group, ValueError("on purpose"))
        with pytest.raises(RuntimeError) as caught:
            group.all_reduce(torch.ones(2, device=gpu.DEVICE))
        said.append("aborted" in str(caught.value))
    return said


@cuda
def test_H5_L6_groups_end_under_a_default_device():
    assert run(1, ended, backend=GPU, timeout=60) == [[1, 1, True]]


# ---- streams of the user's ----


def on_streams(mode, how):
    """Train on streams of the user's: `how` "all" of it, "backward" elsewhere than forward, or "read"
    on a second stream, with events as torch asks for them."""
    net = Net().to(gpu.DEVICE, torch.float64)
    attached = gpu.attach(mode, net, gpu.adamw)
    if attached.handle:
        gpu.lag(attached.handle)
    main, own = torch.cuda.current_stream(), torch.cuda.Stream()
    inputs, reads = batches(STEPS), []
    own.wait_stream(main)
    for (x,) in inputs:
        with torch.cuda.stream(own if how == "all" else main):
            loss = attached.call(x, ()).square().mean()
        own.wait_stream(main)
        with torch.cuda.stream(main if how == "read" else own):
            loss.backward()
            attached.optimizer.step()
            attached.optimizer.zero_grad()
        if how == "backward":
            main.wait_stream(own)
        if how == "read":
            own.wait_stream(main)
            with torch.cuda.stream(own):
                if attached.handle:
                    attached.handle.wait()
                reads.append(flat(net.parameters()))
            main.wait_stream(own)
    if attached.handle:
        attached.handle.detach()
    torch.cuda.synchronize()
    plain = gpu.train_plain(STEPS)
    off = gap(flat(net.parameters()), plain)
    return max(off, gap(reads[-1], plain)) if reads else off


@cuda
def test_training_on_streams_of_the_users():
    cases = {
        (mode, how): {"mode": mode, "how": how}
        for mode in ("zero1", *IN_BACKWARD)
        for how in ("all", "backward", "read")
    }
    found = gpu.each_on_gpu(on_streams, cases)
    assert all(isinstance(off, float) and off < 1e-9 for off in found.values()), found


# ---- DDP's own mixed precision ----


def refused(device):
    """Overlap a model with DDP's mixed precision, as far as DDP can be told without a GPU."""
    net = nn.Linear(4, 4).to(device)
    if device == "cpu":  # DDP makes events of the device, which a CPU has not
        model = DDP(net)
        model.mixed_precision = object()
    else:
        model = DDP(net, mixed_precision=DDP_MIXED(param_dtype=BF16))
    zero = ZeroRedundancyOptimizer(net.parameters(), SGD, lr=0.1)
    try:
        overlap(model, zero)
    except ValueError as error:
        return str(error)


DDP_MIXED = torch.nn.parallel.distributed._MixedPrecision


def test_overlap_refuses_ddps_mixed_precision_on_every_rank():
    assert all("DDP's own mixed precision" in said for said in run(2, refused, "cpu"))


@cuda
def test_overlap_refuses_ddps_mixed_precision_on_the_gpu():
    assert "DDP's own mixed precision" in gpu.on_gpu(refused, gpu.DEVICE)


# ---- a default device where there is no GPU ----


def there_and_back(folder):
    """Save and load with parameters on the CPU where new tensors have no memory; the parameters."""
    found = []
    for device in ("meta", None):
        torch.manual_seed(0)
        net, x = nn.Linear(8, 8), torch.ones(2, 8)
        other = copy.deepcopy(net)
        torch.set_default_device(device)
        try:
            optimizers = [
                ZeroRedundancyOptimizer(m.parameters(), AdamW, lr=0.1) for m in (net, other)
            ]
            net(x).square().mean().backward()
            optimizers[0].step()
            full_state_dict(optimizers[0], folder / f"{device}.pt")
            save_sharded(folder / f"{device}", net, optimizers[0])
            load_full_state_dict(optimizers[1], folder / f"{device}.pt")
            load_sharded(folder / f"{device}", other, optimizers[1])
            with data_parallel(other, optimizers[1]):
                other(x).square().mean().backward()
                optimizers[1].step()
        finally:
            torch.set_default_device(None)
        found.append(flat(other.parameters()))
    return bool(found[0].equal(found[1]))


def test_L6_files_are_read_into_memory_of_the_cpu_whatever_the_default_device(folder):
    assert run(2, there_and_back, folder) == [True, True]
