"""Optimizer classes that nobody knows, by what their options hold: a trial leaves it as it is."""

import random
from functools import partial
from itertools import count

import numpy as np
import pytest
import torch
import torch.distributed as dist
from common import caught
from torch import nn
from torch.optim import Optimizer

from zero_nb.backward.data_parallelism import data_parallel
from zero_nb.checkpoint.resharding import reshard
from zero_nb.comm.groups import Group
from zero_nb.comm.launch import run
from zero_nb.comm.subgroups import split
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer


class Noisy(Optimizer):
    """Gradient descent that asks its option for a number: for each parameter, or once in a step."""

    def __init__(self, params, lr=0.1, source=None, once=False):
        super().__init__(params, {"lr": lr})
        self.source = source
        self.once = once

    @torch.no_grad()
    def step(self, closure=None):
        scale = 1.0
        for i, p in enumerate(p for group in self.param_groups for p in group["params"]):
            if i == 0 or not self.once:
                scale = drawn(self.source)
            if p.grad is not None:
                p.sub_(p.grad * scale, alpha=0.1)


class InGroups(Noisy):
    """Keeps the option in its groups."""

    def __init__(self, params, lr=0.1, source=None):
        Optimizer.__init__(self, params, {"lr": lr, "source": source})
        self.once = False

    @property
    def source(self):
        return self.param_groups[0]["source"]


def drawn(source):
    """Ask whatever an option may be for a number."""
    if isinstance(source, dict):
        return drawn(source["inner"][0])
    if isinstance(source, torch.Generator):
        return torch.rand((), generator=source).item()
    if callable(source):
        return source()
    return next(source) if hasattr(source, "__next__") else source.random()


class Rates:
    """Numbers that depend on how often they were asked for."""

    def __init__(self):
        self.calls = 0

    def __call__(self):
        self.calls += 1
        return 1.0 / self.calls


class Drawing:
    """Keeps a generator as an attribute."""

    def __init__(self):
        self.generator = random.Random(3)

    def __call__(self):
        return self.generator.random()


def of_python():
    made = random.Random(3)
    return made, made.getstate


def of_numpy():
    made = np.random.default_rng(3)
    return made, lambda: str(made.bit_generator.state)


def of_old_numpy():
    made = np.random.RandomState(3)
    return made, lambda: [np.asarray(part).tolist() for part in made.get_state()]


def of_torch():
    made = torch.Generator().manual_seed(3)
    return made, lambda: made.get_state().tolist()


def in_a_container():
    made, state = of_torch()
    return {"inner": [made]}, state


def in_a_function():
    made, state = of_python()
    return lambda: made.random(), state


def in_an_object():
    made = Drawing()
    return made, made.generator.getstate


SHARED = random.Random(3)


def in_a_global():
    SHARED.seed(3)
    return lambda: SHARED.random(), SHARED.getstate


def in_a_method():
    made, state = of_python()
    return made.random, state


GENERATORS = [
    of_python,
    of_numpy,
    of_old_numpy,
    of_torch,
    in_a_container,
    in_a_function,
    in_a_global,
    in_a_method,
    in_an_object,
]


def params():
    return nn.Linear(3, 3).parameters()


def tried(kind, made, **options):
    """Make a sharded optimizer; give its error, and whether the option is as before."""
    source, state = made()
    before = state()
    said = caught(
        lambda: ZeroRedundancyOptimizer(params(), kind, source=source, **options) and None
    )
    return said, state() == before


@pytest.mark.parametrize("made", GENERATORS)
@pytest.mark.parametrize("kind", [Noisy, InGroups])
def test_a_trial_leaves_a_generator_among_the_options_as_it_is_and_refuses_its_use(made, kind):
    said, same = tried(kind, made)
    assert same and "draws random numbers from an option" in said


@pytest.mark.parametrize("made", GENERATORS)
def test_one_number_a_step_for_all_parameters_is_refused_too(made):
    said, same = tried(Noisy, made, once=True)
    assert same and "draws random numbers from an option" in said


class Unused(Noisy):
    """Has the option and draws nothing."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.1)


@pytest.mark.parametrize("made", GENERATORS)
def test_a_generator_that_no_step_uses_is_no_trouble(made):
    assert tried(Unused, made) == (None, True)


def asked(made):
    """Give what an option is in the optimizer, and what it was asked for before the first step."""
    source = made()
    zero = ZeroRedundancyOptimizer(params(), Noisy, source=source, once=True)
    same = zero.optim.source is source
    return same, drawn(source), drawn(made())


@pytest.mark.parametrize("made", [Rates, lambda: count(1)])
def test_an_option_that_counts_its_uses_has_counted_none_of_a_trial(made):
    same, given, fresh = asked(made)
    assert same and given == fresh


def attached():
    source = Rates()
    model = nn.Linear(3, 3)
    zero = ZeroRedundancyOptimizer(model.parameters(), Noisy, source=source, once=True)
    before = source.calls
    data_parallel(model, zero)
    return before, source.calls


def test_an_attached_engine_tries_without_using_the_option_either():
    assert run(2, attached) == [(0, 0)] * 2


def state_read_early():
    """Read the state of parameters before the first step, of a class that draws from its option."""
    source, rates = random.Random(3), Rates()
    zero = ZeroRedundancyOptimizer(
        params(), Both, source=source, rates=rates, trust_optimizer_class=True
    )
    before = source.getstate()
    kept = [len(zero.state[p]) for p in zero.param_groups[0]["params"]]
    return kept, source.getstate() == before, rates.calls


class Both(Noisy):
    """Draws from one option, asks another, and keeps what it got."""

    def __init__(self, params, lr=0.1, source=None, rates=None):
        super().__init__(params, lr, source)
        self.rates = rates

    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p]["kept"] = torch.tensor(self.source.random() * self.rates())


def test_the_state_to_come_is_told_without_using_options():
    assert state_read_early() == ([1, 1], True, 0)


class Counted(Unused):
    """Counts the tensors that all its optimizers have stepped."""

    stepped = 0

    def step(self, closure=None):
        given = [p for group in self.param_groups for p in group["params"]]
        Counted.stepped += sum(p.grad is not None for p in given)
        super().step()


def test_a_trial_steps_no_tensor_more_often_than_its_questions_need():
    """Counted: 2 kinds of parameters, in float64 and in float32, and the constructor's question."""
    ZeroRedundancyOptimizer(params(), Counted)
    assert Counted.stepped <= 400


def coarse(graph, inputs):
    """Compile as a backend does that computes in fewer bits."""
    return lambda *args: tuple(t.bfloat16().float() for t in graph(*args))


@torch.compile(backend=coarse, dynamic=True)
def scaled(grad):
    return grad * 0.3


class Compiled(Optimizer):
    """Gradient descent whose arithmetic is compiled, which it is not where operations are watched."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(scaled(p.grad), alpha=group["lr"])


class CompiledTogether(Compiled):
    """The same, for parameters that are not independent."""

    @torch.no_grad()
    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        nn.utils.clip_grad_norm_(params, 1.0)
        super().step()


def made_of(kind):
    return caught(lambda: ZeroRedundancyOptimizer(nn.Linear(8, 6).parameters(), kind))


def test_a_class_whose_arithmetic_is_compiled_is_compared_with_itself_compiled():
    assert run(2, made_of, Compiled) == [None, None]
    for said in run(2, made_of, CompiledTogether):
        assert "steps a parameter differently together with others and alone" in said


class Scheduled(Optimizer):
    """Gradient descent with a factor that an option gives, or a tensor."""

    def __init__(self, params, lr=0.1, option=None):
        super().__init__(params, {"lr": lr, "option": option})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.sub_(p.grad, alpha=0.1)


def elsewhere(params):
    """Options that are the same on all ranks, and printed otherwise: by address, or by device."""
    kept = [object() for _ in range(1 + 1000 * dist.get_rank())]  # addresses differ from here on
    device = torch.device("meta", dist.get_rank())
    other = [torch.zeros(1), *kept]
    return {
        "function": lambda t: 1.0,
        "partial": partial(max, 1.0),
        "generator": (float(i) for i in range(3)),
        "object": Rates(),
        "random": random.Random(0),
        "ids": {id(params[1])},
        "ids in a list": [id(params[1])],
        "rates by id": {id(params[1]): 0.5},
        "ids of others": {id(other[0]), id(other[-1])},
        "names": {"bias", "norm", "head"},
        "nested": {"of": [(lambda: 1, {"a": {id(params[0])}})]},
        "tensor on a device": torch.empty((), device=device).as_subclass(OnDevice),
    }


class OnDevice(torch.Tensor):
    """A tensor on a device of which each rank has another, as far as its words say."""

    def __repr__(self, **_):
        return f"tensor(0.001, device='cuda:{dist.get_rank()}')"


def made_elsewhere():
    found = {}
    for name in elsewhere([None, None]):
        params = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(3))]
        options = {"option": elsewhere(params)[name], "trust_optimizer_class": True}

        def do(params=params, options=options):
            zero = ZeroRedundancyOptimizer(params, Scheduled, **options)
            zero.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
            params[0].requires_grad_(False)  # plans anew
            params[1].grad = torch.ones(3)
            zero.step()

        found[name] = caught(do)
    return found


def test_options_that_are_printed_by_address_or_device_are_the_same_on_all_ranks():
    for found in run(2, made_elsewhere):
        assert found == dict.fromkeys(found)


def first(t):
    return t


def made_otherwise():
    params = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(3))]
    rank = dist.get_rank()
    options = {
        "text": ("a", "b"),
        "list": ([1, 2], [1, 3]),
        "dict": ({"a": {"b": 1}}, {"a": {"b": 2}}),
        "tensor": (torch.tensor(0.1), torch.tensor(0.10001)),
        "shape": (torch.ones(2), torch.ones(3)),
        "dtype": (torch.float16, torch.bfloat16),
        "names": ({"a", "b"}, {"a", "c"}),
        "ids": ({id(params[0])}, {id(params[1])}),
        "class": (Noisy, Rates),
        "kind": ([1], (1,)),
        "function": (lambda t: t, first),
    }
    return {
        name: caught(
            lambda pair=pair: (
                ZeroRedundancyOptimizer(
                    params, Scheduled, option=pair[rank], trust_optimizer_class=True
                )
                and None
            )
        )
        for name, pair in options.items()
    }


def test_options_that_differ_are_refused_in_their_words():
    for found in run(2, made_otherwise):
        for name, said in found.items():
            assert said and "ValueError: ranks disagree on making" in said, (name, said)
            words = said.replace("\\", "")
            assert "group 0: Scheduled {'lr': 0.1, 'option': " in words, words
        assert "'option': 'a'" in found["text"] and "'option': [1, 3]" in found["list"]


def joins_with_a_rate_on_a_device():
    """Rank 1 joins, and is told of a rate that lies on a device which rank 0 alone has."""
    rank = dist.get_rank()
    rate = torch.tensor(0.25)

    def tag(storage):
        return f"standin:{rank}" if storage.data_ptr() == rate.data_ptr() else None

    def restore(storage, location):
        if not location.startswith("standin:"):
            return None
        if location != f"standin:{rank}":
            raise RuntimeError(f"rank {rank} has no {location}")
        return storage

    torch.serialization.register_package(1, tag, restore)
    alone = Group(split(Group(), [[0], [1]]).process_group)
    p = nn.Parameter(torch.ones(4))
    zero = ZeroRedundancyOptimizer([p], Scheduled, alone, lr=rate if rank == 0 else 0.1)
    p.grad = torch.ones(4)
    if rank == 0:
        zero.step()
    reshard(zero, dist.group.WORLD)
    zero.step()
    return zero.param_groups[0]["lr"]


def test_a_rank_that_joins_has_tensors_among_the_options_on_its_own_device():
    found = run(2, joins_with_a_rate_on_a_device)
    assert found == [torch.tensor(0.25)] * 2
