"""`data_parallel` against DDP where models read parameters past their modules."""

import copy
import functools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import caught, flatten
from common.parallel import MODES, SMALL, base, batch, linear
from common.saving import saved_and_loaded
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import prune
from torch.optim import SGD, Adamax, AdamW
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from zero_nb.backward import parallel_backward
from zero_nb.backward.arriving import Search
from zero_nb.backward.data_parallelism import data_parallel
from zero_nb.comm.launch import run
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer


class Listed(nn.Module):
    """Reads parameters by a list that it keeps."""

    def __init__(self):
        super().__init__()
        self.body = base()
        self.weights = [p for p in self.body.parameters() if p.dim() == 2]

    def forward(self, x):
        for w in self.weights:
            x = F.linear(x, w).tanh()
        return x + sum(p.sum() for p in self.body.parameters() if p.dim() == 1)


class Owner:
    """A plain object, neither a module nor a container."""

    def __init__(self, weight):
        self.weight = weight

    def __call__(self, x):
        return F.linear(x, self.weight)


def with_partial():
    model = base()
    model[2].forward = functools.partial(F.linear, weight=model[2].weight, bias=model[2].bias)
    return model


def with_object():
    model = base()
    model[0].forward = Owner(model[0].weight)
    model[0].bias.requires_grad_(False)
    return model


def with_closure():
    model = base()
    weight = model[4].weight

    class Closed(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            return self.model(F.linear(x, weight))

    return Closed()


def with_hook():
    model = base()
    weight = model[4].weight
    model[0].register_forward_hook(lambda module, args, output: output @ weight)
    return model


def with_view():
    model = base()
    model.register_buffer("view", model[4].weight.detach()[:4], persistent=False)
    model.register_forward_pre_hook(lambda module, args: args[0] + module.view.sum())
    return model


class Recurrent(nn.Module):
    """Torch's own module that keeps a list of its parameters. It compares it with the parameters
    before it reads it, which is nothing to rely on."""

    def __init__(self):
        super().__init__()
        self.body, self.rnn = base(), nn.LSTM(8, 8, batch_first=True).double()

    def forward(self, x):
        return self.body(self.rnn(x[None])[0][0])


def with_script():
    return nn.Sequential(linear(), torch.jit.script(linear()), linear())


def with_trace():
    return nn.Sequential(
        linear(),
        torch.jit.trace(nn.Sequential(linear(), nn.Tanh()), torch.ones(2, 8).double()),
        linear(),
    )


class Twice(nn.Module):
    def forward(self, w):
        return 2 * w


def with_parametrize():
    model = base()
    nn.utils.parametrize.register_parametrization(model[0], "weight", Twice())
    nn.utils.parametrizations.weight_norm(model[2])
    return model


# models whose forward reads a parameter past its module, and models that do not
PAST = {
    "list": Listed,
    "partial": with_partial,
    "object": with_object,
    "closure": with_closure,
    "hook": with_hook,
    "view": with_view,
    "LSTM": Recurrent,
    "script": with_script,
    "trace": with_trace,
}


RIGHT = {"plain": base, "parametrize": with_parametrize}


def train(
    make, kind, look=lambda model, optimizer: [], forward=None, prepare=None, steps=5, **setup
):
    """Train by DDP or data_parallel; give outputs, what `look` sees after each step, and the parameters."""
    torch.manual_seed(0)
    model = make()
    held = prepare(model) if prepare else None
    if kind == "DDP":
        wrapped, optimizer = DDP(model), AdamW(model.parameters(), lr=0.05, foreach=False)
    else:
        wrapped, optimizer = (
            model,
            ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=0.05, foreach=False),
        )
        data_parallel(model, optimizer, **SMALL, **setup)
    seen = []
    for i in range(steps):
        output = forward(wrapped, held, batch(i)) if forward else wrapped(batch(i))
        (output.square().mean() + 0.01 * output.sum()).backward()
        optimizer.step()
        seen += [output.detach().clone(), *look(model, held if held is not None else optimizer)]
        optimizer.zero_grad()
    return [*seen, flatten(model.parameters())]


def same(make, **options):
    """Whether all that is seen equals what is seen with DDP, bit for bit."""
    setup = {k: options.pop(k) for k in ("interleaved", "hidden") if k in options}
    reference, ours = train(make, "DDP", **options), train(make, "ours", **options, **setup)
    return len(reference) == len(ours) and all(
        torch.equal(a, b) for a, b in zip(reference, ours, strict=True)
    )


def readers(early):
    return {name: same(make, interleaved=early) for name, make in {**PAST, **RIGHT}.items()}


@pytest.mark.parametrize("early", [False, True])
def test_H2_models_that_read_past_their_modules_train_as_with_DDP(early):
    for rank in run(2, readers, early):
        assert all(rank.values()), rank


def averaged(model, held):
    held.update_parameters(model)
    return [flatten(held.parameters())]


def mean_of(tensors):  # an average of weights over tensors that were there before
    tensors, means = list(tensors), []

    def update():
        if not means:
            means.extend(t.detach().clone() for t in tensors)
        for mean, t in zip(means, tensors, strict=True):
            mean.lerp_(t.detach(), 0.5)
        return [flatten(means)]

    return update


def regular(model, params, x):
    return 0.1 * sum(p.square().sum() for p in params) + model(x)


def functional(wrapped, params, x):
    """Call the module, or what DDP wraps, with tensors that were looked up before training."""
    with torch.no_grad():
        other = torch.func.functional_call(getattr(wrapped, "module", wrapped), params, (x,))
    return other + wrapped(x)


def grouped(model, optimizer):
    return [flatten(p for group in optimizer.param_groups for p in group["params"])]


def in_dicts(model, optimizer):
    held = [m._parameters for m in model.modules() if m._parameters]
    return [flatten({**params, **dict(params)}.values()) for params in held]


# who reads parameters after a step: what is made before training, and what is seen
LOOKS = {
    "kept": {
        "prepare": lambda model: list(model.parameters()),
        "look": lambda model, held: [flatten(held)],
    },
    "data": {
        "prepare": lambda model: [p.data for p in model.parameters()],
        "look": lambda model, held: [flatten(held)],
    },
    "mean": {
        "prepare": lambda model: mean_of(model.parameters()),
        "look": lambda model, held: held(),
    },
    "param_groups": {"look": grouped},
    "regulariser": {"prepare": lambda model: list(model.parameters()), "forward": regular},
    "functional_call": {
        "prepare": lambda model: dict(model.named_parameters()),
        "forward": functional,
    },
    "numpy": {
        "prepare": lambda model: model[0].weight.detach().numpy(),
        "look": lambda model, held: [torch.tensor(held)],
    },
    "SWA": {"prepare": AveragedModel, "look": averaged},
    "EMA": {
        "prepare": lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5)),
        "look": averaged,
    },
    "deepcopy": {"look": lambda model, optimizer: [flatten(copy.deepcopy(model).parameters())]},
    "copy": {"look": lambda model, optimizer: [flatten(copy.copy(model).parameters())]},
    "save": {"look": lambda model, optimizer: [flatten(saved_and_loaded(model).parameters())]},
    "state_dict": {"look": lambda model, optimizer: [flatten(model.state_dict().values())]},
    "dicts": {"look": in_dicts},
    "vector": {
        "look": lambda model, optimizer: [
            nn.utils.parameters_to_vector(model.parameters()).detach()
        ]
    },
}


PAST_MODULES = (
    "kept",
    "data",
    "mean",
    "param_groups",
    "regulariser",
    "numpy",
)  # which ask no module; functional_call looks up what it replaces


def lookers(names, **setup):
    return {name: same(base, **LOOKS[name], **setup) for name in names}


@pytest.mark.parametrize("early", [False, True])
def test_H2_what_is_read_after_a_step_is_what_it_is_with_DDP(early):
    for rank in run(2, lookers, LOOKS, interleaved=early):
        assert all(rank.values()), rank


def pruned(model, x):
    prune.l1_unstructured(model[0], "weight", amount=0.3)
    return model(x)


def stacked(model, x):
    """Call an ensemble of the model and a copy of it."""
    shape, (params, buffers) = (
        copy.deepcopy(model).to("meta"),
        torch.func.stack_module_state([model, copy.deepcopy(model)]),
    )
    return torch.func.vmap(lambda p, b: torch.func.functional_call(shape, (p, b), (x,)))(
        params, buffers
    )


def in_a_thread(model, x):
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(model, x).result()


# what users do with a model in the middle of training
USED = {
    "jit.trace": lambda model, x: torch.jit.trace(model, x)(x),
    "fx": lambda model, x: torch.fx.symbolic_trace(model)(x),
    "compile": lambda model, x: torch.compile(model, backend="eager")(x),
    "prune": pruned,
    "stack": stacked,
    "thread": in_a_thread,
    "part": lambda model, x: model[:3](x),
    "inside": lambda model, x: nn.Sequential(model, nn.Tanh())(x),
    "share": lambda model, x: model.share_memory()(x),
    "keep_vars": lambda model, x: flatten(model.state_dict(keep_vars=True).values()),
    "bytes": lambda model, x: torch.cat(
        [
            torch.frombuffer(bytearray(t.numpy().tobytes()), dtype=t.dtype)
            for t in model.state_dict().values()
        ]
    ),
}


def used(**setup):
    """Use a model after some steps in each way, with DDP and without; are what comes of it and the
    parameters after a further step equal?"""
    equal = {}
    for name, use in USED.items():

        def look(model, optimizer, use=use):
            return [use(model, batch(99, 0))]

        outcomes = [
            train(base, kind, look, steps=2, **more)
            for kind, more in (("DDP", {}), ("ours", setup))
        ]
        equal[name] = all(map(torch.equal, *outcomes))
    model = base()
    data_parallel(model, ZeroRedundancyOptimizer(model.parameters(), AdamW), **setup)
    return equal, [
        caught(lambda: torch.jit.script(model)),
        caught(lambda: torch.jit.script(copy.deepcopy(model))),
    ]


@pytest.mark.usefixtures("compiler")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["zero2", "zero2-interleaved, hidden"])
def test_H2_models_are_used_in_the_middle_of_training_as_with_DDP(mode):
    for equal, scripted in run(2, functools.partial(used, **MODES[mode]), timeout=100):
        assert all(equal.values()), equal
        assert all(
            "torch.jit.script cannot compile the hooks of overlap, data_parallel" in words
            for words in scripted
        )


def refused():
    def made(make):
        model = make()
        return caught(
            lambda: data_parallel(
                model, ZeroRedundancyOptimizer(model.parameters(), AdamW), hidden=True
            )
        )

    return {name: made(make) for name, make in {**PAST, **RIGHT}.items()}


def test_H2_models_that_read_past_their_modules_cannot_hide_gathers():
    for rank in run(2, refused):
        assert [name for name, words in rank.items() if words is None] == list(RIGHT), rank
        for name in PAST:
            assert rank[name].startswith(
                "ValueError: hidden=True needs every reader of a parameter to go through its"
                " module, and "
            ), rank[name]
            assert rank[name].endswith("; leave hidden=True out")


def refused_on_one():
    model = base()
    if dist.get_rank() == 1:
        model[0].kept = [model[2].weight]
    return caught(
        lambda: data_parallel(
            model, ZeroRedundancyOptimizer(model.parameters(), AdamW), hidden=True
        )
    )


def test_H2_what_one_rank_finds_all_ranks_raise():
    assert all(
        "leads to a parameter by its attribute 'kept'" in words for words in run(2, refused_on_one)
    )


def more_refused():
    """Give what is found of one way to a parameter each."""

    def shared(model):
        model[2].weight.data = model[0].weight.data

    def param_hook(model):
        model[0].weight.register_hook(lambda grad: grad)

    def of_class(model):
        class Own(nn.Sequential):
            held = (model[0].weight,)

        model.__class__ = Own

    def other_module(model):
        tied = linear()
        tied.weight = model[0].weight
        model[2].others = [tied]

    def generator(model):
        model[0].left = (p for p in list(model.parameters()))

    found = {}
    for change in (shared, param_hook, of_class, other_module, generator):
        change(model := base())
        found[change.__name__] = Search(model, list(model.parameters())).unseen_reader()
    return found


def test_H2_every_way_to_a_parameter_is_found():
    found = more_refused()
    assert all(found.values()), found


@pytest.mark.filterwarnings("ignore")
def test_H2_models_of_every_day_may_hide_gathers():
    models = {
        "transformer": nn.Transformer(8, 2, 1, 1, 16),
        "convolution": nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)),
        "old weight_norm": nn.utils.weight_norm(nn.Linear(3, 3)),
        "embedding": nn.EmbeddingBag(5, 3),
        "list": nn.ParameterList([torch.ones(2)]),
        "views of one": nn.Linear(3, 3),
    }
    memory = torch.zeros(12)
    models["views of one"].weight.data, models["views of one"].bias.data = (
        memory[:9].view(3, 3),
        memory[9:],
    )
    models["tied"] = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    models["tied"][1].weight = models["tied"][0].weight
    found = {
        name: Search(model, list(model.parameters())).unseen_reader()
        for name, model in models.items()
    }
    assert not any(found.values()), found


# they hold what was made of a parameter; `data_parallel` refuses the models among them
EARLIER = {"view", "data", "numpy", "script", "trace"}


def not_numbers(early):
    """Train and look where gathers are hidden although somebody reads past the modules: is a NaN seen?"""
    Search.unseen_reader = lambda self: ""
    setup = {"interleaved": early, "hidden": True}
    found = {
        name: train(make, "ours", **setup) for name, make in PAST.items() if name != "LSTM"
    }  # which looks its list up
    found |= {name: train(base, "ours", **LOOKS[name], **setup) for name in PAST_MODULES}
    return {name: any(t.isnan().any() for t in seen) for name, seen in found.items()}


@pytest.mark.parametrize("early", [False, True])
def test_H2_who_does_not_wait_finds_NaN(early):
    for rank in run(2, not_numbers, early):
        assert {name for name, found in rank.items() if not found} == EARLIER


class Average:
    """An average of weights over the optimizer's param groups, as EMA classes make it."""

    def __init__(self, zero):
        self.params = [p for group in zero.param_groups for p in group["params"]]

    def read(self):
        return flatten(self.params).isnan()


def averages(early, waits):
    torch.manual_seed(0)
    model = base()
    zero = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=0.05)
    average = Average(zero)
    handle = data_parallel(model, zero, interleaved=early, hidden=True, **SMALL)
    found = []
    for i in range(3):
        model(batch(i)).square().mean().backward()
        zero.step()
        if waits:
            handle.wait()
        found.append(average.read())
        zero.zero_grad()
    written = caught(lambda: average.params[0].data.add_(1))
    handle.detach()
    return found, written, average.read().any().item()


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_H2_an_average_of_weights_is_NaN_and_never_old(early, waits):
    for found, written, afterwards in run(2, averages, early, waits):
        assert all(read.all() != waits and read.any() != waits for read in found)
        assert ("more than one element of the written-to tensor" in (written or "")) != waits
        assert not afterwards


def moved_later():
    """Parametrize a layer between two steps: its parameter moves to another module, and waits there."""
    outcomes = []
    for setup in ({}, {"hidden": True}):
        torch.manual_seed(0)
        model = base()
        data_parallel(
            model, ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=0.05), **SMALL, **setup
        )
        for i in range(5):
            if i == 2:
                nn.utils.parametrize.register_parametrization(model[2], "weight", Twice())
            if i == 4:
                nn.utils.parametrize.remove_parametrizations(
                    model[2], "weight", leave_parametrized=False
                )
            model(batch(i)).square().mean().backward()
        outcomes.append(flatten(model.parameters()))
    return torch.equal(*outcomes)


def test_H2_a_parameter_may_move_to_another_module():
    assert all(run(2, moved_later))


# ---- parameters without elements ----


class WithEmpty(nn.Module):
    """A model with a parameter that has no elements, and is first or last to get its gradient."""

    def __init__(self, first):
        super().__init__()
        torch.manual_seed(0)
        self.empty = nn.Parameter(torch.zeros(0))
        self.layers, self.first = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), first

    def forward(self, x, uses):
        empty = self.empty.sum() if uses else 0
        return (self.layers(x) + empty).sum() if self.first else self.layers(x + empty).sum()


def count_steps(setup, first, added):
    """Give each parameter's number of steps, of DDP (`setup` is None) or `data_parallel`."""
    model = WithEmpty(first)
    if setup is None:
        optimizer = Adamax(model.parameters())
        called = handle = DDP(model, find_unused_parameters=True)
    else:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), Adamax)
        handle = data_parallel(model, optimizer, find_unused_parameters=True, **SMALL, **setup)
        called = model
    for i in range(6):
        uses = i % 3 == 0 and dist.get_rank() == 1
        if added:
            with handle.no_sync():
                called(torch.ones(2, 6), uses).backward()
        called(torch.ones(2, 6), uses and not added).backward()
        optimizer.step()
        optimizer.zero_grad()
    if setup is not None:
        optimizer.consolidate_state_dict(None)
    state = optimizer.state_dict()["state"]
    return {i: float(values["step"]) for i, values in state.items()}


def test_a_parameter_without_elements_is_stepped_where_it_is_used():
    def counted(first, added):
        return [count_steps(setup, first, added) for setup in (None, *MODES.values())]

    for case in ((first, added) for first in (False, True) for added in (False, True)):
        for wanted, *found in run(2, counted, *case):
            assert wanted[0] == 2.0 and wanted[1] == 6.0
            assert found == [wanted] * len(MODES), (case, found)


# ---- H6: which parameters are used, where buckets are stepped during backward ----


def order_of_counts(lag):
    """Give when each bucket's count of users starts and is read, in an iteration with planned buckets."""
    events, real = [], parallel_backward.count_used

    def noting(groups, used, device):
        bucket = sum(what == "start" for what, _ in events)
        events.append(("start", bucket))
        finish = real(groups, used, device)

        def read():
            events.append(("read", bucket))
            return finish()

        return read

    module = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
    zero = ZeroRedundancyOptimizer(module.parameters(), SGD, lr=0.1)
    data_parallel(
        module, zero, interleaved=True, lag=lag, find_unused_parameters=True, bucket_cap_mb=0.001
    )
    for _ in range(3):
        events.clear()
        parallel_backward.count_used = noting
        try:
            module(torch.ones(2, 16)).sum().backward()
        finally:
            parallel_backward.count_used = real
        zero.step()
        zero.zero_grad()
    return events


@pytest.mark.parametrize("lag", [1, 2])
def test_a_count_of_users_is_read_when_later_buckets_have_started(lag):
    for events in run(2, order_of_counts, lag):
        buckets = sum(what == "start" for what, _ in events)
        assert buckets >= 6 and len(events) == 2 * buckets
        for bucket in range(buckets - lag):
            assert events.index(("read", bucket)) > events.index(("start", bucket + lag))
