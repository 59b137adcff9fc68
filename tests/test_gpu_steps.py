"""On a GPU: what a step waits for, where its state is, and that it is the step of the plain class."""

import functools

import pytest
import torch
from common import gpu
from common.devices import cuda
from common.gpu import Net, batches, flat, gap, gap_of_states
from common.modes import MODES
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.parallel.distributed import _MixedPrecision
from torch.optim import AdamW, Muon

from zero_nb.backward.data_parallelism import data_parallel
from zero_nb.checkpoint.full import full_state_dict, load_full_state_dict
from zero_nb.comm.launch import run
from zero_nb.comm.objects import broadcast_object_list
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer
from zero_nb.optim.rules import ELEMENTWISE, FUSED, PARAMETERWISE, choose_fused

BF16 = torch.bfloat16
SIZES = (1, 8)
IN_BACKWARD = [mode for mode in MODES if mode != "zero1"]


# ---- no step waits for the device ----


def placed(shard, kernel, views):
    """Give the options of an optimizer with one kernel, or with torch's default."""
    kernels = {"fused": None} if kernel != "fused" else {}
    if kernel:
        kernels[kernel] = True
    return {"options": {"shard": shard, "parameters_as_bucket_view": views, **kernels}}


DROP_IN = {
    f"{shard}, {kernel or 'default'}{', views' if views else ''}": placed(shard, kernel, views)
    for shard in ("whole", "even")
    for kernel in ("foreach", "fused", "capturable", None)
    for views in (False, True)
}
DRIVERS = {
    "plain": {},
    "accumulation": {"micro": 3},
    "checkpoints": {"checkpoints": True},
    "norm": {"setup": {"max_grad_norm": 0.05}},
    "reduce_dtype": {"setup": {"reduce_dtype": BF16}},
    "masters": {"dtype": BF16, "options": {"masters": True}},
    "masters, norm": {
        "dtype": BF16,
        "options": {"masters": True},
        "setup": {"max_grad_norm": 0.05, "reduce_dtype": torch.float32},
    },
    "capturable": {"options": {"capturable": True, "fused": None}},
    "buffers": {"norm": True},
}


def unwaiting(
    mode,
    size=1,
    dtype=torch.float32,
    micro=1,
    options=None,
    setup=None,
    checkpoints=False,
    norm=False,
):
    """Train, from the fifth iteration on where it is an error to wait for the device; tell whether
    the parameters have moved, and are finite where all that is gathered comes from this rank."""
    net = Net(checkpoints, norm).to(gpu.DEVICE, dtype)
    with gpu.group_of(size) as group:
        make = lambda module: gpu.adamw(module, group, **(options or {}))
        attached = gpu.attach(mode, net, make, group, **(setup or {}))
        before = flat(net.parameters()).clone()
        for step, inputs in enumerate(batches(7, dtype, micro)):
            with gpu.refusing_to_wait(step > 3):  # the first iterations plan, and agree
                gpu.backward(attached, inputs)
                gpu.take_step(attached)
        if attached.handle:
            attached.handle.detach()
        after = flat(net.parameters())
        return (size > 1 or bool(after.isfinite().all())) and not after.equal(before)


@cuda
@pytest.mark.parametrize("size", SIZES)
def test_a_drop_in_step_does_not_wait(size):
    cases = {name: {"mode": "zero1", "size": size, **how} for name, how in DROP_IN.items()}
    cases["masters"] = {"mode": "zero1", "size": size, **DRIVERS["masters"]}
    assert gpu.each_on_gpu(unwaiting, cases) == dict.fromkeys(cases, True)


@cuda
@pytest.mark.parametrize("size", SIZES)
def test_a_step_in_backward_does_not_wait(size):
    cases = {
        (mode, name): {"mode": mode, "size": size, **how}
        for mode in IN_BACKWARD
        for name, how in DRIVERS.items()
        if "inter" not in mode or "norm" not in name
    }
    assert gpu.each_on_gpu(unwaiting, cases) == dict.fromkeys(cases, True)


def read_on_the_host():
    x = torch.ones(3, device=gpu.DEVICE)
    for read in (lambda: x.tolist(), lambda: torch.tensor([1.0], device=gpu.DEVICE)):
        with gpu.refusing_to_wait():
            try:
                read()
            except RuntimeError:
                continue
        return False
    return True


@cuda
def test_to_read_on_the_host_and_to_send_a_list_is_to_wait():
    assert gpu.on_gpu(read_on_the_host)


def scaled_waits(mode):
    """Count how often the host waits in each iteration with a GradScaler; `mode` None: of torch."""
    net, scaler = Net().to(gpu.DEVICE), torch.amp.GradScaler(gpu.DEVICE, init_scale=8.0)
    if mode is None:
        optimizer = AdamW(net.parameters(), lr=gpu.LR, foreach=True)
        attached = MODES["zero1"].attach(net, lambda module: optimizer, ddp={"bucket_cap_mb": 1})
    else:
        scaling = {} if mode == "zero1" else {"scaler": scaler}
        attached = gpu.attach(
            mode, net, functools.partial(gpu.adamw, fused=None, foreach=True), **scaling
        )
    counts = []
    for inputs in batches(8, torch.float32):
        found = []
        with gpu.counting_waits(found):
            gpu.backward(attached, inputs, scaler=scaler)
            gpu.take_step(attached, scaler)
        counts.append(len(found))
    return max(counts[4:])


@cuda
def test_M9_a_scaler_waits_as_often_as_torchs_and_twice_more_in_backward():
    modes = [None, *[m for m in MODES if "inter" not in m]]
    found = gpu.each_on_gpu(scaled_waits, {mode: {"mode": mode} for mode in modes})
    plain = found.pop(None)
    assert plain == 1 and found.pop("zero1") == plain, found
    # in backward the scale is read once, and then whether all averages are finite; the scaler
    # itself asks again when it is told to step
    assert set(found.values()) == {plain + 2}, found


# ---- state stays where it is ----


def resumed(mode, size, through):
    """Train, save, load into another pair and train both on: how far they are apart, if no part of
    the state is of other ranks, and where the counts of steps and the moments are."""
    make = functools.partial(gpu.adamw, fused=None, capturable=True)
    with gpu.group_of(size) as group:
        pairs = []
        for _ in range(2):
            net = Net().to(gpu.DEVICE, torch.float64)
            pairs.append((net, gpu.attach(mode, net, lambda m: make(m, group), group)))
        (net, one), (other, two) = pairs
        for inputs in batches(3):
            gpu.backward(one, inputs)
            gpu.take_step(one)
        one.optimizer.consolidate_state_dict(to=None)
        two.optimizer.load_state_dict(through(one.optimizer.state_dict()))
        other.load_state_dict(net.state_dict())
        for inputs in batches(3):
            for each in (one, two):
                gpu.backward(each, inputs)
                gpu.take_step(each)
        for each in (one, two):
            if each.handle:
                each.handle.detach()
        found = {
            (key, value.device.type)
            for each in (one, two)
            for state in each.optimizer.optim.state.values()
            for key, value in state.items()
        }
        off = gap(flat(net.parameters()), flat(other.parameters())) if size == 1 else 0.0
        return off, found


def on_the_device(state_dict):
    """Do what torch.load does with map_location."""
    state = {
        i: {k: v.to(gpu.DEVICE) for k, v in values.items()}
        for i, values in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


@cuda
@pytest.mark.parametrize("size", SIZES)
def test_capturable_state_stays_on_the_device_through_saving_and_loading(size):
    cases = {
        (mode, through.__name__): {"mode": mode, "size": size, "through": through}
        for mode in MODES
        for through in (dict, on_the_device)
    }
    found = gpu.each_on_gpu(resumed, cases)
    where = {(key, gpu.DEVICE) for key in ("step", "exp_avg", "exp_avg_sq")}
    assert found == dict.fromkeys(cases, (0.0, where))


# ---- a step in a CUDA graph ----


def in_a_graph(size, dtype, captured, **options):
    """Take four steps, and three more in a graph or without one; the parameters."""
    net = Net().to(gpu.DEVICE, dtype)
    with gpu.group_of(size) as group:
        lr = torch.tensor(gpu.LR, device=gpu.DEVICE)
        zero = gpu.adamw(net, group, lr=lr, capturable=True, **{"fused": None, **options})
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for step in range(4):
                for p in net.parameters():
                    p.grad = torch.full_like(p, 1.0 + step)
                zero.step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        if captured:
            with torch.cuda.graph(graph):
                zero.step()
        for i in range(3):
            for p in net.parameters():
                p.grad.fill_(0.5 * (i - 1))
            graph.replay() if captured else zero.step()
        return flat(net.parameters()).clone()


def beside_a_graph(**case):
    return gap(in_a_graph(captured=True, **case), in_a_graph(captured=False, **case))


@cuda
def test_a_drop_in_step_in_a_graph_is_the_same_step():
    ways = {
        "foreach": {"dtype": torch.float64, "foreach": True},
        "fused": {"dtype": torch.float32, "fused": True},
        "views": {"dtype": torch.float64, "parameters_as_bucket_view": True},
        "masters": {"dtype": BF16, "masters": True},
        "masters, fused": {"dtype": BF16, "masters": True, "fused": True},
    }
    cases = {(name, n): {"size": n, **way} for name, way in ways.items() for n in SIZES}
    found = gpu.each_on_gpu(beside_a_graph, cases)
    assert all(isinstance(off, float) and off < 1e-6 for off in found.values()), found


# ---- DDP's own mixed precision ----


def mixed(make, param_dtype, reduce_dtype, bucket_view):
    """Train float32 parameters that DDP computes with in another dtype."""
    net = Net().to(gpu.DEVICE)
    precision = _MixedPrecision(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    model = DDP(
        net, bucket_cap_mb=1, gradient_as_bucket_view=bucket_view, mixed_precision=precision
    )
    optimizer = make(net.parameters(), lr=gpu.LR, fused=True)
    for (x,) in batches(6, torch.float32):
        torch.cuda.synchronize()  # DDP copies parameters on a stream that does not wait for the step
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return flat(net.parameters())


def attempt(make, case):
    try:
        return mixed(make, **case)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def mixed_both_ways(views=False, **case):
    """Give how far the sharded step is from the plain one, or the error that both have."""
    sharded = functools.partial(
        ZeroRedundancyOptimizer, optimizer_class=AdamW, parameters_as_bucket_view=views
    )
    finals = [attempt(make, case) for make in (AdamW, sharded)]
    if isinstance(finals[0], str) or isinstance(finals[1], str):
        return (0.0 if finals[0] == finals[1] else finals), None
    return gap(*finals), finals[1].dtype


@cuda
@pytest.mark.parametrize("views", [False, True])
def test_a_drop_in_step_beside_ddps_mixed_precision(views):
    cases = {
        (low, wide, bucket_view): {
            "param_dtype": low,
            "reduce_dtype": wide,
            "bucket_view": bucket_view,
            "views": views,
        }
        for low in (torch.float16, BF16)
        for wide in (None, low, torch.float32)
        for bucket_view in (False, True)
    }
    found = gpu.each_on_gpu(mixed_both_ways, cases)
    assert all(value[0] == 0.0 for value in found.values()), found
    assert (0.0, torch.float32) in found.values()


def swapped():
    """Step parameters that are of another dtype meanwhile and come back as DDP has noted them."""
    finals = []
    views = functools.partial(
        ZeroRedundancyOptimizer, optimizer_class=AdamW, parameters_as_bucket_view=True
    )
    for make in (AdamW, views):
        params = list(Net().parameters())
        for p in params:
            p._fp_param = p.data
        optimizer = make(params, lr=gpu.LR)
        for step in range(3):
            for p in params:
                p.data = p.data.bfloat16()  # in forward
            for p in params:
                p.data = p._fp_param  # when backward is over
                p.grad = torch.full_like(p, 1.0 + step)
            optimizer.step()
        finals.append(flat(params))
    return gap(*finals)


def test_parameters_in_buckets_come_back_from_ddps_mixed_precision():
    assert max(run(2, swapped)) < 1e-6


# ---- the classes of torch ----


def grads_of(params, step):
    """Give gradients that do not depend on the parameters."""
    data = torch.Generator("cpu").manual_seed(step)
    for p in params:
        made = torch.randn(p.shape, generator=data, device="cpu") / 8
        p.grad = made.to(gpu.DEVICE, p.dtype)


def groups_of(net, name):
    """Give the param groups of a class; Muon steps matrices, and AdamW the rest."""
    params = list(net.parameters())
    if name != "Muon":
        return params
    rest = {"optimizer_class": AdamW, "fused": True}
    return [
        {"params": [p for p in params if p.dim() == 2], "optimizer_class": Muon, "lr": 1e-2},
        {"params": [p for p in params if p.dim() != 2], "lr": 1e-2, **rest},
    ]


def options_of(name):
    """Choose the kernel that the package chooses; plain SGD would have no state."""
    probe = {"params": [nn.Parameter(torch.zeros(1, device=gpu.DEVICE))]}
    fused = choose_fused(getattr(torch.optim, name), probe)
    momentum = {"momentum": 0.9} if name == "SGD" else {}
    return {"lr": 1e-2, **momentum, **({} if fused is None else {"fused": fused})}


def plain_classes(net, name):
    """Make the plain optimizers of `groups_of`, and give the state of each parameter."""
    if name != "Muon":
        made = [getattr(torch.optim, name)(net.parameters(), **options_of(name))]
    else:
        made = [
            group.pop("optimizer_class")(group.pop("params"), **group)
            for group in groups_of(net, name)
        ]
    return made, lambda: {
        i: next(o.state[p] for o in made if p in o.state) for i, p in enumerate(net.parameters())
    }


def beside_a_class(name, dtype, size, views):
    """Give how far three sharded steps are from plain ones, in parameters and in state."""
    nets = [Net().to(gpu.DEVICE, dtype) for _ in range(2)]
    made, states = plain_classes(nets[0], name)
    kind = getattr(torch.optim, name)
    zero = ZeroRedundancyOptimizer(
        groups_of(nets[1], name), kind, parameters_as_bucket_view=views, **options_of(name)
    )
    in_backward = size == "zero2"
    handle = data_parallel(nets[1], zero, bucket_cap_mb=gpu.CAP) if in_backward else None
    for step, (x,) in enumerate(batches(3, dtype)):
        for net in nets:
            if in_backward:
                net(x).square().mean().backward()
            else:
                grads_of(net.parameters(), step)
        for optimizer in (*made, zero):
            optimizer.step()
        for net in nets:
            net.zero_grad()
    if handle:
        handle.detach()
    zero.consolidate_state_dict(to=None)
    plain, order = states(), [i for g in zero.state_dict()["param_groups"] for i in g["params"]]
    params = [p for g in zero.param_groups for p in g["params"]]
    place = {id(p): i for i, p in zip(order, params, strict=True)}
    saved = zero.state_dict()["state"]
    ours = {i: saved[place[id(p)]] for i, p in enumerate(nets[1].parameters())}
    return gap(*[flat(net.parameters()) for net in nets]), gap_of_states(plain, ours)


@cuda
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_three_steps_are_those_of_the_class(dtype):
    cases = {
        (name, size, views): {"name": name, "dtype": dtype, "size": size, "views": views}
        for name in sorted(ELEMENTWISE | PARAMETERWISE)
        for size, views in (("step", False), ("step", True), ("zero2", False))
    }
    found = gpu.each_on_gpu(beside_a_class, cases)
    # whole matrices may be multiplied, and their squares added up, in another order; a bfloat16
    # has 8 bits
    for name, value in found.items():
        limit = 1e-6 if name[0] in ELEMENTWISE else 1e-4
        limit = limit if dtype is torch.float32 else 2e-2
        assert not isinstance(value, str) and max(value) < limit, (name, value)
        assert all(off == off for off in value), (name, value)


@pytest.mark.parametrize("name", sorted(FUSED))
def test_a_fused_kernel_is_chosen_where_torch_has_it(name, monkeypatch):
    class OnTheGpu:
        device, dtype, is_cpu = torch.device("cuda", 0), torch.float32, False

    kind, group = getattr(torch.optim, name), {"params": [OnTheGpu()]}
    for version in ("2.11.0", "2.13.0"):
        monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
        fused = name != "Adagrad" or version == "2.13.0"
        assert choose_fused(kind, group) == (True if fused else None)


# ---- from and to the device ----


def saved_on_the_cpu(path):
    """Train on the CPU and save the whole state, as a file and as an object."""
    torch.manual_seed(0)
    net = Net()
    zero = gpu.adamw(net)
    for step in range(3):
        data = torch.Generator().manual_seed(step)
        net(torch.randn(gpu.WIDTH, gpu.WIDTH, generator=data)).square().mean().backward()
        zero.step()
        zero.zero_grad()
    full_state_dict(zero, path / "full.pt")
    zero.consolidate_state_dict(to=None)
    torch.save({"model": net.state_dict(), "optimizer": zero.state_dict()}, path / "both.pt")


def loaded_on_the_gpu(mode, path, how):
    """Load what ranks without a GPU have saved, and train on beside a plain AdamW that loads it."""
    both = torch.load(path / "both.pt", map_location=gpu.DEVICE if how == "device" else "cpu")
    nets = [Net().to(gpu.DEVICE) for _ in range(2)]
    for net in nets:
        net.load_state_dict(both["model"])
    plain = AdamW(nets[0].parameters(), lr=gpu.LR, fused=True)
    plain.load_state_dict(both["optimizer"])
    attached = gpu.attach(mode, nets[1], gpu.adamw)
    if how == "full":
        load_full_state_dict(attached.optimizer, path / "full.pt")
    else:
        sent = [both["optimizer"]]
        broadcast_object_list(sent, map_location=gpu.DEVICE)
        attached.optimizer.load_state_dict(sent[0])
    for inputs in batches(3, torch.float32):
        nets[0](inputs[0]).square().mean().backward()
        plain.step()
        plain.zero_grad()
        gpu.backward(attached, inputs)
        gpu.take_step(attached)
    if attached.handle:
        attached.handle.detach()
    attached.optimizer.consolidate_state_dict(to=None)
    found = attached.optimizer.state_dict()["state"]
    return gap(*[flat(net.parameters()) for net in nets]), gap_of_states(
        dict(plain.state_dict()["state"]), found
    )


@cuda
def test_a_state_of_ranks_without_a_gpu_goes_on_on_one(folder):
    run(1, saved_on_the_cpu, folder)
    cases = {
        (mode, how): {"mode": mode, "path": folder, "how": how}
        for mode in ("zero1", "zero1-overlap", "zero2", "zero2, hidden")
        for how in ("cpu", "device", "full")
    }
    found = gpu.each_on_gpu(loaded_on_the_gpu, cases)
    for name, value in found.items():
        assert not isinstance(value, str) and max(value) < 1e-6, (name, value)


def object_on_the_gpu():
    """Send tensors of the CPU to where `map_location` says, from a rank without peers."""
    with gpu.group_of(1):
        sent = [{"a": torch.arange(3.0), "b": [torch.ones(2)]}, 7]
        broadcast_object_list(sent, map_location=gpu.DEVICE)
        return sent[0]["a"].tolist(), sent[1]


@cuda
def test_objects_are_sent_from_a_rank_with_a_gpu():
    assert gpu.on_gpu(object_on_the_gpu) == ([0.0, 1.0, 2.0], 7)


# ---- a compiled model ----


def compiled(mode):
    """Train a compiled model; how far it is from the same training of a plain optimizer."""
    finals = []
    for sharded in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(gpu.WIDTH, 32), nn.Tanh(), nn.Linear(32, 3)).to(gpu.DEVICE)
        if not sharded:
            call, optimizer = net, AdamW(net.parameters(), lr=gpu.LR, fused=True)
        else:
            call, optimizer = net, gpu.adamw(net)
            if mode == "zero2":
                data_parallel(net, optimizer, bucket_cap_mb=0.005)
        call = torch.compile(call)
        for (x,) in batches(5, torch.float32):
            call(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch._dynamo.reset()
        finals.append(flat(net.parameters()))
    return gap(*finals)


@cuda
def test_a_compiled_model_is_trained_as_by_the_plain_optimizer():
    pytest.importorskip("triton")
    found = gpu.each_on_gpu(compiled, {mode: {"mode": mode} for mode in ("zero1", "zero2")})
    assert all(isinstance(off, float) and off < 1e-5 for off in found.values()), found
