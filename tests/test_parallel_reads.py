"""What reads parameters that `data_parallel` gathers, what its gradients hold, and what it sends."""

import contextlib
import copy
import io
import itertools

import pytest
import torch
import torch.distributed as dist
from common import flatten, network
from common.afresh import measures_memory, run_afresh
from common.models import Opposite
from common.modes import SMALL
from common.parallel_training import PARALLEL, batch, one_adamw, replicas, sharded
from torch import nn
from torch.optim import SGD

from zero_nb.apps.peak_memory import peak_bytes
from zero_nb.backward.data_parallelism import data_parallel
from zero_nb.comm.launch import run
from zero_nb.comm.recording import record


def unpickled(data):
    return torch.load(io.BytesIO(data), weights_only=False)


def saved(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    return file.getvalue()


def by_loading(model):
    """Load, which copies into the parameters that are on their way: what comes afterwards must not overwrite it."""
    state = network().state_dict()
    with torch.no_grad():
        for value in state.values():
            value.mul_(2).add_(1)
    model.load_state_dict(state)
    return model(batch(50))


def by_setting(model):
    with torch.no_grad():
        for module in (model[0], model[4]):
            module.weight.fill_(3.0)
    return model(batch(50))


def by_casting(model):
    model.float()
    out = model(batch(50).float()).double()
    model.double()
    return out


READS = {
    "state_dict": lambda m: flatten(m.state_dict().values()),
    "parameters": lambda m: flatten(m.parameters()),
    "one of parameters": lambda m: next(iter(m.parameters())),
    "last of parameters": lambda m: list(m.parameters())[-1],
    "named_parameters": lambda m: flatten(p for _, p in m.named_parameters()),
    "get_parameter": lambda m: m.get_parameter("2.weight"),
    "weight": lambda m: m[0].weight,
    "bias": lambda m: m[4].bias,
    "deepcopy": lambda m: flatten(copy.deepcopy(m).parameters()),
    "pickle": lambda m: flatten(unpickled(saved(m)).parameters()),
    "pickled state": lambda m: flatten(unpickled(saved(m.state_dict())).values()),
    "forward": lambda m: m(batch(50)),
    "part": lambda m: m[2](batch(50, width=40)),
    "load_state_dict": by_loading,
    "set": by_setting,
    "cast": by_casting,
    "functional_call": lambda m: torch.func.functional_call(
        m, {"0.bias": torch.ones(40).double()}, (batch(50),)
    ),
    "grad of input": lambda m: torch.autograd.grad(m(x := batch(50).requires_grad_()).sum(), x)[0],
    "vector": lambda m: nn.utils.parameters_to_vector(m.parameters()),
    "apply": lambda m: m.apply(lambda x: None)[3].weight,
    "children": lambda m: flatten(p for c in m.children() for p in c.parameters()),
    "repeated": lambda m: flatten([*m.parameters(), *m.parameters()]),
    "compared": lambda m: (m[4]._parameters == {}, dict.get(m[4]._parameters, "bias"))[1],
    "printed": lambda m: (repr(m[4]._parameters), dict.get(m[4]._parameters, "bias"))[1],
}


def reading(name, hidden, early, evaluates):
    model = network()
    zero = sharded(one_adamw(model))
    data_parallel(model, zero, hidden=hidden, interleaved=early, **SMALL)
    for i in range(2):
        model(batch(i)).square().mean().backward()
    if evaluates:
        model.eval()
    with torch.no_grad() if evaluates else contextlib.nullcontext():
        seen = READS[name](model).detach().clone()
    return seen, flatten(model.parameters())


def reads():
    wrong = []
    for name in READS:
        for early in (False, True):
            evaluates = early and name != "grad of input"
            (a, b), (c, d) = (reading(name, hidden, early, evaluates) for hidden in (False, True))
            if not (torch.equal(a, c) and torch.equal(b, d)):
                wrong.append((name, early))
    return wrong


def test_no_read_is_stale():
    assert run(2, reads) == [[]] * 2


def one_reads(early):
    """Rank 0 reads what the others do not, and they meet it elsewhere."""
    model = network()
    data_parallel(model, sharded(one_adamw(model)), interleaved=early, hidden=True, **SMALL)
    for i in range(4):
        model(batch(i)).square().mean().backward()
        if dist.get_rank() == i % 3:
            saved(model.state_dict())
        dist.barrier()
        order = list(model) if dist.get_rank() else reversed(list(model))
        for layer in order:
            list(layer.parameters())
    return replicas(model)


@pytest.mark.parametrize("early", [False, True])
def test_one_rank_may_read_alone(early):
    assert all(run(3, one_reads, early, timeout=30))


def left_out():
    out = []
    for calls in (True, False):
        model = network()
        zero = sharded(one_adamw(model))
        data_parallel(model, zero, **SMALL)
        for i in range(4):
            model(batch(i)).square().mean().backward()
            if calls:
                zero.step()
            if calls:
                zero.zero_grad()
        out.append(flatten(model.parameters()))
    return torch.equal(*out)


def test_step_may_be_left_out():
    assert all(run(2, left_out))


def chain(layers=12, width=64):
    torch.manual_seed(9)
    return nn.Sequential(*(nn.Linear(width, width + (i == -1)) for i in range(layers)))


def living(early, opposite):
    model = Opposite(*reversed(chain())) if opposite else chain()
    zero = sharded(one_adamw(model))
    handle = data_parallel(model, zero, interleaved=early, hidden=False, bucket_cap_mb=0.016, lag=1)
    params, most, plans = list(model.parameters()), [0] * 5, [handle.step_plan.shard.plan]
    step = 0

    def look(param):
        most[step] = max(most[step], sum(p.grad is not None for p in params))

    for p in params:
        p.register_post_accumulate_grad_hook(look)
    for step in range(5):
        model(batch(step, width=64, dtype=torch.float32)).square().mean().backward()
        plans.append(handle.step_plan.shard.plan)
    return most, len(params), [a is not b for a, b in itertools.pairwise(plans)]


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("opposite", [False, True])
def test_gradients_live_for_a_bucket(early, opposite):
    for most, count, changes in run(2, living, early, opposite):
        assert max(most[1:]) <= 4, "a bucket of weights, and the biases that wait for theirs"
        assert most[0] > count / 2 if opposite else most[0] <= 4, (
            "in the first iteration, those that come out of turn wait"
        )
        assert changes == [
            opposite,
            False,
            False,
            False,
            False,
        ], "plans are made anew for them alone"


def first_peak(early):
    def train():
        model = nn.Sequential(*(nn.Linear(1400, 1400) for _ in range(20)))
        data_parallel(
            model,
            sharded([{"params": model.parameters(), "optimizer_class": SGD}]),
            interleaved=early,
        )
        model(torch.ones(1, 1400)).sum().backward()

    return peak_bytes(torch.device("cpu"), train) / (20 * 1401 * 1400 * 4)


@measures_memory
def test_the_first_iteration_does_not_hold_all_gradients(monkeypatch):
    monkeypatch.setenv(
        "ZERO_NB_MEMORY", "0"
    )  # the system counts a page of shared memory in every process that has read it
    for peak in itertools.chain(*run_afresh(4, "test_parallel_reads.first_peak", False, True)):
        # parameters; a quarter of averages, of what is stepped, and, up to five of twenty, of gradients on their way
        assert 1.25 < peak < 1.85, "gradients that wait for the end would make it 2 at least"


def vocabulary(early, pieces=4):
    def train():
        model = nn.Linear(2000, 4800, bias=False)
        data_parallel(
            model,
            sharded(one_adamw(model)),
            interleaved=early,
            cut_mb=model.weight.nbytes / 2**20 / pieces,
        )
        for _ in range(4):
            model(torch.ones(1, 2000)).sum().backward()

    return peak_bytes(torch.device("cpu"), train) / (2000 * 4800 * 4)


@pytest.mark.turns(2)
@measures_memory
@pytest.mark.usefixtures("small_pool", "way")
def test_a_gradient_that_is_cut_in_a_few_pieces_is_reduced_where_it_lies():
    after, inside = run_afresh(2, "test_parallel_reads.vocabulary", False, True)
    # a parameter, its gradient, half of two moments, and, if steps come at the end, of an average;
    # messages bring 6 MB for each of four pieces, and a copy of the gradient would be another 38 MB
    assert all(3.5 <= peak < 4.2 for peak in after), after
    assert all(3.0 <= peak < 3.7 for peak in inside), inside


NETWORK = {"reduce_scatter": "RS", "all_gather": "AG"}


def uneven_chain():
    torch.manual_seed(9)
    sizes = [12, 40, 56, 24, 72, 8, 4]
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))


def traffic(setup):
    model, group = uneven_chain(), record()
    zero = sharded(one_adamw(model), group)
    handle, logs = data_parallel(model, zero, bucket_cap_mb=0.002, **setup), []
    for i in range(5):
        model(batch(i, dtype=torch.float32)).square().mean().backward()
        zero.step()
        list(model.parameters())
        logs.append(list(group.log.collectives()))
        wire = group.log.wire
        group.log.clear()
    buckets = handle.step_plan.shard.plan.buckets
    sizes = [b.nbytes if hasattr(b, "nbytes") else b.numel * 4 for b in buckets]
    assert len(set(sizes)) == len(sizes) > 2, "buckets are told apart by their size"
    seen = [
        tuple(f"{sizes.index(e.bytes)}:{NETWORK.get(e.kind, e.kind)}" for e in log)
        for log in logs[2:]
    ]
    return seen, handle.schedule.collectives, wire, sum(p.numel() * 4 for p in model.parameters())


@pytest.mark.turns(2)
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("mode", PARALLEL)
def test_traffic_is_that_of_ddp_in_the_order_of_the_schedule(mode):
    size = 3
    ranks = run(size, traffic, PARALLEL[mode])
    for seen, planned, *_ in ranks:
        assert all(order == planned == ranks[0][1] for order in seen)
    assert (
        sum(wire for _, _, wire, _ in ranks) == 2 * (size - 1) * ranks[0][3]
    )  # parts are rounded to 16 elements, so ranks differ a little
