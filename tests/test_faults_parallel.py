"""Faults of `data_parallel` found by review: each test is named after the entry that it mends."""

import contextlib
import copy
import functools
import io
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import caught, flatten
from stream_standin import NetworkWork, Stream, WatchedStream, World
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import prune
from torch.optim import SGD, AdamW, Muon
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

from zero_nb.backward.arriving import Search
from zero_nb.backward.data_parallel import data_parallel
from zero_nb.backward.ddp_overlap import overlap
from zero_nb.comm.launch import run
from zero_nb.comm.subgroups import two_level
from zero_nb.join.join import Join
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer

SMALL = {"bucket_cap_mb": 0.0005}  # buckets of 500 bytes: several in a model of this page
MODES = {
    f"{'interleaved' if early else 'after'}{'-hidden' if hidden else ''}": {
        "interleaved": early,
        **({"hidden": True} if hidden else {}),
    }
    for early in (False, True)
    for hidden in (False, True)
}


def batch(step, rank=None):
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(
        6, 8, generator=torch.Generator().manual_seed(1000 * step + rank), dtype=torch.float64
    )


def linear():
    return nn.Linear(8, 8).double()


def base():
    return nn.Sequential(linear(), nn.Tanh(), linear(), nn.Tanh(), linear())


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
    setup = {k: options.pop(k) for k in ("interleaved", "hidden", "check_reads") if k in options}
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


def unpickled(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


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
    "param_groups": {
        "look": lambda model, optimizer: [
            flatten(p for group in optimizer.param_groups for p in group["params"])
        ]
    },
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
    "save": {"look": lambda model, optimizer: [flatten(unpickled(model).parameters())]},
    "state_dict": {"look": lambda model, optimizer: [flatten(model.state_dict().values())]},
    "dicts": {
        "look": lambda model, optimizer: [
            flatten({**m._parameters, **dict(m._parameters)}.values())
            for m in model.modules()
            if m._parameters
        ]
    },
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
@pytest.mark.parametrize("mode", ["after", "interleaved-hidden"])
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


def not_numbers(early):
    """Train and look where gathers are hidden although somebody reads past the modules: is a NaN seen?"""
    Search.unseen_reader = lambda self: ""
    setup = {"interleaved": early, "hidden": True, "check_reads": True}
    found = {
        name: train(make, "ours", **setup) for name, make in PAST.items() if name != "LSTM"
    }  # which looks its list up
    found |= {name: train(base, "ours", **LOOKS[name], **setup) for name in PAST_MODULES}
    return {name: any(t.isnan().any() for t in seen) for name, seen in found.items()}


@pytest.mark.parametrize("early", [False, True])
def test_H2_check_reads_shows_who_does_not_wait(early):
    for rank in run(2, not_numbers, early):
        assert all(rank.values()), rank


def right_with_checks(early):
    seen = {
        name: same(make, interleaved=early, hidden=True, check_reads=True)
        for name, make in RIGHT.items()
    }
    return seen | lookers(
        [name for name in LOOKS if name not in PAST_MODULES],
        interleaved=early,
        hidden=True,
        check_reads=True,
    )


@pytest.mark.parametrize("early", [False, True])
def test_H2_who_asks_a_module_sees_what_DDP_shows_with_check_reads_too(early):
    for rank in run(2, right_with_checks, early):
        assert all(rank.values()), rank


def moved_later():
    """Parametrize a layer between two steps: its parameter moves to another module, and waits there."""
    outcomes = []
    for setup in ({}, {"hidden": True, "check_reads": True}):
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


def test_H2_check_reads_without_hidden_is_refused():
    def made():
        return caught(
            lambda: data_parallel(
                model := base(),
                ZeroRedundancyOptimizer(model.parameters(), AdamW),
                check_reads=True,
            )
        )

    assert all("and without hidden=True they need not" in words for words in run(2, made))


class Reading(Dataset):
    """Gives what it sees of a model, through its modules and past them."""

    def __init__(self, model):
        self.model, self.kept = model, list(model.parameters())

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.stack(
            [
                flatten(self.model.parameters()),
                flatten(self.kept),
                flatten(self.model.state_dict().values()),
            ]
        )


def loaded(setup):
    """Start workers that read the model as soon as backward has returned."""
    torch.manual_seed(0)
    model = base()
    data_parallel(
        model,
        zero := ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=0.05, foreach=False),
        **SMALL,
        **setup,
    )
    dataset, right = Reading(model), []
    for i in range(4):
        model(batch(i)).square().mean().backward()
        rows = torch.cat(
            list(
                DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="fork")
            )
        )
        right.append(torch.equal(rows, flatten(model.parameters()).expand_as(rows)))
        zero.step()
    return right


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("mode", MODES)
def test_M3_workers_of_a_loader_read_the_parameters_after_the_step(mode):
    assert run(2, loaded, MODES[mode], timeout=60) == [[True] * 4] * 2


def hidden_model(**setup):
    torch.manual_seed(0)
    model = base()
    handle = data_parallel(
        model,
        ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=0.05),
        hidden=True,
        **SMALL,
        **setup,
    )
    for i in range(3):
        model(batch(i)).square().mean().backward()
    return model, handle


def in_child(f):
    """Call a function in a forked process; what it returns, as text."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        try:
            os.write(writing, str(f()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with open(reading, "rb") as file:
        return file.read().decode()


def forked():
    model, handle = hidden_model()
    assert not handle.arriving.done, "some parameters are on their way"
    seen = in_child(lambda: float(flatten(model.parameters()).sum()))
    return seen == str(float(flatten(model.parameters()).sum())), handle.arriving.done


def test_M3_a_process_waits_for_its_parameters_before_it_forks():
    assert run(2, forked) == [(True, True)] * 2


def forked_all_the_same():
    model, handle = hidden_model()
    pending = handle.arriving
    handle.arriving = None  # as if a fork had come between
    before = in_child(
        lambda: setattr(handle, "arriving", pending) or caught(lambda: model[0].weight)
    )
    handle.arriving = pending
    return before, replicas(model)


def replicas(model):
    mine = flatten(model.parameters())
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return all(torch.equal(mine, other) for other in every)


def test_M3_a_child_that_is_forked_between_raises_at_once():
    for words, equal in run(2, forked_all_the_same, timeout=30):
        assert (
            words.startswith("RuntimeError: process ")
            and "was forked while parameters" in words
            and "call handle.wait() before you fork" in words
        )
        assert equal


def threads():
    """Four threads read all parameters at once, in different orders."""
    return [threads_once(bool(i % 2)) for i in range(8)]


def threads_once(early):
    model, handle = hidden_model(interleaved=early)
    seen, barrier = [], threading.Barrier(4)

    def read(order):
        barrier.wait()
        for layer in order:
            list(layer.parameters())
        seen.append(flatten(model.parameters()))

    every = [
        threading.Thread(target=read, args=(order,))
        for order in (list(model), list(model)[::-1], [model[2], model[0]], [])
    ]
    for thread in every:
        thread.start()
    for thread in every:
        thread.join()
    return (
        len(seen) == 4
        and all(torch.equal(a, seen[0]) for a in seen)
        and replicas(model)
        and handle.arriving.done
    )


def test_H1_several_threads_may_read_parameters_on_their_way():
    assert run(2, threads, timeout=60) == [[True] * 8] * 2


def interrupted():
    """End a wait with an error: later ones must not take parameters that never came."""
    model, handle = hidden_model()

    class Broken:
        done = False

        def wait(self):
            raise KeyboardInterrupt

    works = handle.arriving.works
    handle.arriving.works = [works[0], Broken(), *works[2:]]
    try:
        list(model.parameters())
    except KeyboardInterrupt:
        pass
    else:
        return "nothing was raised"
    words = [caught(lambda: flatten(model.parameters())), caught(handle.wait)]
    for work in works:
        work.wait()
    dist.barrier()  # a forward that fails ends what other ranks are waiting for
    return [*words, caught(lambda: model(batch(9)))]


def test_H1_after_an_exception_parameters_that_never_came_are_not_read():
    for words in run(2, interrupted):
        assert all(
            "some parameters never arrived on this rank: waiting for them ended with"
            " KeyboardInterrupt()" in said
            for said in words
        ), words


def normed():
    return nn.Sequential(linear(), nn.BatchNorm1d(8).double(), nn.ReLU(), linear())


FORWARDS = (
    "train",
    "train",
    "train no_sync",
    "train no_sync",
    "train no_grad",
    "eval",
    "eval no_sync",
    "eval no_grad",
    "eval inference_mode",
)


def buffered(seed):
    """Run forwards of every kind in random order, both ways; are outputs and buffers equal on this
    rank after each, and parameters after each step?"""
    draw = random.Random(seed)
    torch.manual_seed(0)
    one, other = normed(), normed()
    other.load_state_dict(one.state_dict())
    ddp, ours = (
        DDP(one),
        data_parallel(
            other,
            ZeroRedundancyOptimizer(other.parameters(), AdamW, lr=0.05, foreach=False),
            **SMALL,
        ),
    )
    optimizer, equal, history = AdamW(one.parameters(), lr=0.05, foreach=False), [], []
    for i in range(20):
        history.append(what := draw.choice(FORWARDS))
        mode, _, kind = what.partition(" ")
        outputs = []
        for net, no_sync in ((ddp, ddp.no_sync), (other, ours.no_sync)):
            net.train(mode == "train")
            with {
                "no_sync": no_sync,
                "no_grad": torch.no_grad,
                "inference_mode": torch.inference_mode,
            }.get(kind, contextlib.nullcontext)():
                outputs.append(net(batch(i)))
                if outputs[-1].requires_grad:
                    outputs[-1].square().mean().backward()
        equal.append(
            torch.equal(*outputs) and all(map(torch.equal, one.buffers(), other.buffers()))
        )
        if not kind:
            optimizer.step()
            optimizer.zero_grad()
            equal.append(all(map(torch.equal, one.parameters(), other.parameters())))
    return history, equal


@pytest.mark.parametrize("seed", range(6))
def test_buffers_are_those_of_DDP_after_every_kind_of_forward(seed):
    for history, equal in run(2, buffered, seed):
        assert all(equal), (history, equal)


def in_a_block(seed):
    """Run forwards of every kind in a block in which one rank runs out of data, and after it; are
    outputs and buffers those of DDP?"""
    draw = random.Random(seed)
    inside, after = draw.choices(FORWARDS, k=8), draw.choices(FORWARDS, k=6)
    outcomes = []
    for kind in ("DDP", "ours"):
        torch.manual_seed(0)
        net = model = normed()
        if kind == "DDP":
            handle, optimizer = (net := DDP(model)), SGD(model.parameters(), lr=0.05)
        else:
            handle = data_parallel(
                model,
                optimizer := ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.05),
                **SMALL,
            )
        seen = []

        def forward(what, i, net=net, model=model, optimizer=optimizer, handle=handle, seen=seen):
            mode, _, kind = what.partition(" ")
            net.train(mode == "train")
            with {
                "no_sync": handle.no_sync,
                "no_grad": torch.no_grad,
                "inference_mode": torch.inference_mode,
            }.get(kind, contextlib.nullcontext)():
                output = net(batch(i))
                if output.requires_grad:
                    output.square().mean().backward()
            seen.extend((output.detach(), flatten(model.buffers())))
            if kind:
                return
            optimizer.step()
            optimizer.zero_grad()

        with Join([handle]):
            for i, what in enumerate(inside[: 5 if dist.get_rank() else None]):
                forward(what, i)
        optimizer.zero_grad()
        for i, what in enumerate(after):
            forward(what, 20 + i)
        outcomes.append(seen)
    return inside, after, [torch.equal(*pair) for pair in zip(*outcomes, strict=True)]


@pytest.mark.parametrize("seed", range(6))
def test_buffers_are_those_of_DDP_in_a_block_of_Join_and_after_it(seed):
    for inside, after, equal in run(2, in_a_block, seed):
        assert all(equal), (inside, after, equal)


def two_forwards():
    """Two forwards before one backward, which has saved the buffers that the second one sends."""
    outcomes = []
    for kind in ("DDP", "ours"):
        torch.manual_seed(0)
        net = (model := normed()).eval()
        if kind == "DDP":
            net, optimizer = DDP(model), AdamW(model.parameters(), lr=0.05, foreach=False)
        else:
            data_parallel(
                model,
                optimizer := ZeroRedundancyOptimizer(
                    model.parameters(), AdamW, lr=0.05, foreach=False
                ),
                **SMALL,
            )
        (net(batch(0)).square().mean() + net(batch(1)).square().mean()).backward()
        optimizer.step()
        outcomes.append(flatten(model.parameters()))
    return torch.equal(*outcomes)


def test_buffers_may_be_sent_again_before_backward():
    assert all(run(2, two_forwards))


def evaluated_alone():
    """One rank evaluates while the others wait, in the middle of training; all that it sees, and
    the parameters and buffers at the end."""
    outcomes = []
    for kind in ("DDP", "ours", "copy", "forward"):
        torch.manual_seed(0)
        net = model = normed()
        if kind == "DDP":
            net, optimizer = DDP(model), AdamW(model.parameters(), lr=0.05, foreach=False)
        else:
            data_parallel(
                model,
                optimizer := ZeroRedundancyOptimizer(
                    model.parameters(), AdamW, lr=0.05, foreach=False
                ),
                **SMALL,
            )
        seen = []
        for i in range(4):
            net(batch(i)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if i == 1 and dist.get_rank() == 0:
                looked = (copy.deepcopy(model) if kind == "copy" else net).eval()
                look = looked.forward if kind == "forward" else looked
                with torch.no_grad():
                    seen += [look(batch(10 + j)) for j in range(3)]
                net.train()
            if kind in ("copy", "forward"):
                dist.barrier()  # which send nothing
        outcomes.append([*seen, flatten(model.parameters()), flatten(model.buffers())])
    return [all(map(torch.equal, outcomes[0], other)) for other in outcomes[1:]]


def test_the_first_rank_may_evaluate_alone_as_with_DDP():
    assert run(2, evaluated_alone, timeout=60) == [[True] * 3] * 2


def scheduled(i, model, optimizer, scheduler):
    """Write the learning rate for the next step, after this one."""
    optimizer.step()
    scheduler.step()


def scheduled_alone(i, model, optimizer, scheduler):
    """Write it where no step is called, since backward has taken it."""
    if isinstance(optimizer, AdamW):
        optimizer.step()
    scheduler.step()


def clamped(i, model, optimizer, scheduler):
    """Write parameters after the step."""
    optimizer.step()
    with torch.no_grad():
        for p in model.parameters():
            p.clamp_(-0.3, 0.3)


def loaded_again(i, model, optimizer, scheduler):
    """Go back to the parameters and the state of the optimizer that were there some steps before."""
    optimizer.step()
    held = vars(optimizer).setdefault("held", [])
    if isinstance(optimizer, ZeroRedundancyOptimizer) and i in (1, 3):
        optimizer.consolidate_state_dict(to=None)
    if i == 1:
        held.extend(copy.deepcopy((model.state_dict(), optimizer.state_dict())))
    if i == 3:
        model.load_state_dict(held[0])
        optimizer.load_state_dict(copy.deepcopy(held[1]))


def frozen(i, model, optimizer, scheduler):
    """Freeze a layer, and train it again."""
    optimizer.step()
    if i in (1, 3):
        model[0].requires_grad_(i == 3)


LOOPS = {f.__name__: f for f in (scheduled, scheduled_alone, clamped, loaded_again, frozen)}


def looped(kind, loop, micro=1, **setup):
    """Train with a loop that writes something between a backward and the next; give the parameters."""
    torch.manual_seed(0)
    net = model = base()
    if kind == "DDP":
        optimizer = AdamW(model.parameters(), lr=0.05, foreach=False)
    else:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=0.05, foreach=False)
    if kind != "data_parallel":
        net = DDP(model, bucket_cap_mb=0.0005)
    handle = net
    if kind == "data_parallel":
        handle = data_parallel(model, optimizer, **SMALL, **setup)
    elif kind == "overlap":
        overlap(net, optimizer, **setup)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for i in range(6):
        for m in range(micro - 1):
            with handle.no_sync():
                net(batch(10 * i + m)).square().mean().backward()
            for p in model.parameters():
                p.grad.mul_(0.5)  # what was added up on this rank may be read and changed
        if kind == "DDP" and loop is frozen and i in (2, 4):
            net = DDP(model, bucket_cap_mb=0.0005)  # which does not see it otherwise
        net(batch(10 * i + 9)).square().mean().backward()
        loop(i, model, optimizer, scheduler)
        optimizer.zero_grad()
    return flatten(model.parameters())


def looped_in_every_mode(loop, micro):
    wanted, found = looped("DDP", LOOPS[loop], micro), {}
    for name, setup in MODES.items():
        found[name] = looped("data_parallel", LOOPS[loop], micro, **setup)
        if "hidden" not in name and loop != "frozen":
            found[f"overlap {name}"] = looped("overlap", LOOPS[loop], micro, **setup)
    return {name: float((wanted - params).abs().max()) for name, params in found.items()}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")
@pytest.mark.parametrize("loop,micro", [*((loop, 1) for loop in LOOPS), ("scheduled", 3)])
def test_what_is_written_between_two_backwards_counts_as_with_DDP(loop, micro):
    for rank in run(2, looped_in_every_mode, loop, micro):
        assert all(far < 1e-12 for far in rank.values()), rank


class Mixed(nn.Module):
    """Uses other parameters on other batches."""

    def __init__(self):
        super().__init__()
        self.body, self.last, self.norm = base(), linear(), nn.BatchNorm1d(8).double()

    def forward(self, x):
        return self.last(self.body(x)) if x[0, 0] > 0 else self.norm(self.body(x))


def by_norm(handle, model, zero, world):
    assert float(handle.grad_norm) > 0 and (2 * handle.grad_norm).isfinite()


def by_waiting(handle, model, zero, world):
    flatten([handle.wait(), *model.parameters()][1:])


def by_consolidating(handle, model, zero, world):
    zero.consolidate_state_dict(to=None)


def by_users(handle, model, zero, world):
    """Read on two streams that both follow the one that called backward; the second must not rely
    on what the first waited for."""
    now = world.main.record_event()
    for stream in (Stream(world, "first"), Stream(world, "second")):
        stream.wait_event(now)
        with world.stream(stream):
            flatten(model.parameters())
        world.main.wait_stream(stream)


def halved():
    return base().bfloat16()


def two_classes(model):
    found = list(model.parameters())
    return [
        {"params": [p for p in found if p.dim() == 2], "optimizer_class": Muon, "lr": 0.02},
        {"params": [p for p in found if p.dim() != 2]},
    ]


USES = {
    "plain": {},
    "norm": {"max_grad_norm": 0.1, "look": by_norm},
    "scaler": {"scaled": True},
    "accumulation": {"micro": 3},
    "unused": {"make": Mixed, "micro": 2, "find_unused_parameters": True},
    "users": {"look": by_users},
    "wait": {"look": by_waiting},
    "consolidate": {"look": by_consolidating},
    "reduce_dtype": {"reduce_dtype": torch.float32},
    "buffers": {"make": normed},
    "Muon + AdamW": {"groups": two_classes},
    "masters": {
        "make": halved,
        "options": {"master_dtype": torch.float32},
        "look": by_consolidating,
    },
    "levels": {"nodes": True, "look": by_consolidating},
    "levels, unused": {"nodes": True, "make": Mixed, "micro": 2, "find_unused_parameters": True},
    "all": {
        "make": halved,
        "groups": two_classes,
        "options": {"master_dtype": torch.float32},
        "nodes": True,
        "micro": 2,
    },
}


def on_streams(
    kind="data_parallel",
    make=base,
    groups=nn.Module.parameters,
    options=None,
    nodes=False,
    micro=1,
    look=None,
    scaled=False,
    keeps=True,
    find_unused_parameters=False,
    **setup,
):
    """Train with a stand-in for streams; give its faults."""
    torch.manual_seed(0)
    model, scaler = make(), torch.amp.GradScaler("cpu", init_scale=8.0) if scaled else None
    dtype = next(model.parameters()).dtype
    zero = ZeroRedundancyOptimizer(
        groups(model),
        AdamW,
        two_level(2) if nodes else None,
        lr=0.05,
        bucket_cap_mb=0.0005,
        **(options or {}),
    )
    net = (
        model
        if kind == "data_parallel"
        else DDP(model, bucket_cap_mb=0.0005, find_unused_parameters=find_unused_parameters)
    )
    if kind == "data_parallel":
        handle = data_parallel(
            net,
            zero,
            scaler=scaler,
            find_unused_parameters=find_unused_parameters,
            **SMALL,
            **setup,
        )
    else:
        handle = overlap(net, zero, scaler=scaler, **setup) if kind == "overlap" else None
    world = World()
    if handle:
        handle.engine.stream = WatchedStream(world)
    if not keeps:
        handle.engine.stream.keep = lambda tensor, stream=None: None
    with world, world.networked():
        for i in range(5):
            for m in range(micro):
                with (
                    (handle if kind == "data_parallel" else net).no_sync()
                    if m < micro - 1
                    else contextlib.nullcontext()
                ):
                    loss = net(batch(10 * i + m).to(dtype)).square().mean()
                    (scaler.scale(loss) if scaler else loss).backward()
            if look and handle:
                look(handle, model, zero, world)
            if scaler:
                scaler.step(zero)
                scaler.update()
            else:
                zero.step()
            if look and not handle:
                look(handle, model, zero, world)
            zero.zero_grad()
        if handle:
            handle.wait()
    assert world.kernels > 100
    return world.faults


def streams_of(use):
    """Give the faults of one use in every mode that knows it."""
    how, found = USES[use], {}
    for name, setup in MODES.items():
        if use in ("norm", "scaler") and setup["interleaved"]:
            continue
        found[name] = on_streams(**how, **setup)
        if use != "users" and "hidden" not in name:
            found[f"overlap {name}"] = on_streams("overlap", **how, **setup)
    if use not in ("norm", "users", "wait", "reduce_dtype"):
        found["step"] = on_streams("step", **how)
    return found


@pytest.mark.parametrize("use", USES)
def test_C2_M11_all_that_is_read_is_there_and_nothing_is_let_go_too_early(use):
    for rank in run(4 if USES[use].get("nodes") else 2, streams_of, use):
        assert not any(rank.values()), rank


def test_C2_the_stand_in_sees_gradients_that_are_let_go_unrecorded():
    (words,) = {tuple(faults) for faults in run(2, lambda: on_streams(keeps=False))}
    assert words == (
        "memory of main is let go that _foreach_copy_ reads on side, and is not recorded for it",
    )


def careless(kind, nodes):
    """Train with waits that order nothing, of a collective and of the side stream; are there faults?"""
    seen, wait = [], NetworkWork.wait
    NetworkWork.wait = lambda work: setattr(work, "done", True)
    seen.append(on_streams(kind, nodes=nodes))
    NetworkWork.wait = wait
    if kind != "step":
        WatchedStream.wait = lambda stream, event=None: None
        seen.append(on_streams(kind, nodes=nodes))
        del WatchedStream.wait
    return [bool(faults) for faults in seen]


@pytest.mark.parametrize("kind", ["data_parallel", "overlap", "step"])
def test_C2_the_stand_in_sees_waits_that_order_nothing(kind):
    for nodes in (False, True):
        assert all(all(rank) for rank in run(4 if nodes else 2, careless, kind, nodes))


def unordered():
    world = World()
    side = Stream(world, "side")

    def faults():
        found, world.faults = world.faults, []
        return found

    with world:
        a = torch.ones(4)
        with world.stream(side):
            b = a + 1
        yield "read without an event", faults(), 1
        side.wait_stream(world.main)
        with world.stream(side):
            b = a + 1
        yield "read after one", faults(), 0
        a.add_(1)
        yield "write over what is read", faults(), 1
        world.main.wait_stream(side)
        a.add_(1)
        b.sum()
        yield "write after an event", faults(), 0
        side.wait_stream(world.main)
        with world.stream(side):
            a + 1
        del a
        world.collect()
        yield "let go unrecorded", faults(), 1
        c = torch.ones(4)
        side.wait_stream(world.main)
        with world.stream(side):
            c + 1
        world.record(c, side)
        del c
        world.collect()
        yield "let go recorded", faults(), 0


def test_the_stand_in_finds_what_streams_do_not_order():
    for what, found, count in unordered():
        assert len(found) == count, (what, found)
