"""Code written for torch's class runs with ours, and ours passes for a torch optimizer wherever one is taken."""

import copy
import functools
import inspect
import pickle

import pytest
import torch
import torch.distributed as dist
from common import caught_error, largest_gap
from common.dropin import agree, flat, network, train
from common.saving import saved_and_loaded
from common.training import stepped_once
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW

from zero_nb.comm.launch import run
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer

# ---- the face of torch's class ----


def test_the_constructors_arguments_are_torchs_in_torchs_order():
    torchs, ours = (
        list(inspect.signature(kind).parameters.values())
        for kind in (TorchZero, ZeroRedundancyOptimizer)
    )
    positional = [p for p in torchs if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [(p.name, p.default) for p in ours[: len(positional)]] == [
        (p.name, p.default) for p in positional
    ]
    assert all(
        p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in ours[len(positional) :]
    )  # ours come after, and only by keyword


def test_methods_take_what_torchs_take():
    for name, method in inspect.getmembers(TorchZero, inspect.isfunction):
        if name.startswith("_"):
            continue
        theirs, ours = (
            inspect.signature(method),
            inspect.signature(getattr(ZeroRedundancyOptimizer, name)),
        )
        assert [(p.name.strip("_"), p.kind, p.default) for p in ours.parameters.values()] == [
            (p.name.strip("_"), p.kind, p.default) for p in theirs.parameters.values()
        ], name


def test_every_public_attribute_is_there():
    def attributes():
        kinds = [
            kind(network().parameters(), AdamW, lr=0.1)
            for kind in (TorchZero, ZeroRedundancyOptimizer)
        ]
        torchs, ours = ({name for name in dir(zero) if not name.startswith("_")} for zero in kinds)
        same = [
            all(getattr(zero, name) == getattr(kinds[0], name) for zero in kinds)
            for name in (
                "rank",
                "global_rank",
                "world_size",
                "parameters_as_bucket_view",
                "process_group",
                "join_process_group",
                "join_device",
                "initialized",
            )
        ]
        return (
            torchs - ours,
            same,
            [set(zero.param_groups[0]) - {"params"} for zero in kinds],
            [type(zero.optim) for zero in kinds],
        )

    for missing, same, (theirs, ours), classes in run(2, attributes):
        assert not missing and all(same) and classes == [AdamW, AdamW]
        assert theirs == ours


SCRIPT = """
import copy, torch, torch.distributed as dist
from common.dropin import batches, flat, network
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW, lr_scheduler

def script(Zero, group):
    model = DDP(network())
    optimizer = Zero(model.parameters(), AdamW, group, VIEWS, False, lr=1e-2, weight_decay=0.1)
    scheduler = lr_scheduler.StepLR(optimizer, 1, gamma=0.8)
    extra = nn.Parameter(torch.ones(7))
    losses = []
    for step, batch in enumerate(batches(6)):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        if step == 3: optimizer.add_param_group({"params": [extra], "lr": 0.3, "weight_decay": 0.0})
        def closure():
            loss = model(batch).square().mean() + (extra * (1 + step)).sum()
            loss.backward()
            return loss
        if step == 4: extra.grad = None
        losses.append(optimizer.step(closure) if step < 5 else (closure(), optimizer.step())[0])
        scheduler.step()
    state = None
    optimizer.consolidate_state_dict(to=1)
    if optimizer.rank == 1: state = optimizer.state_dict()
    box = [state]
    dist.broadcast_object_list(box, src=1)
    optimizer.load_state_dict(copy.deepcopy(box[0]))
    model.zero_grad()
    model(batches(1, seed=9)[0]).sum().backward()
    optimizer.step()
    rates = [group["lr"] for group in optimizer.param_groups]
    return flat([*model.parameters(), extra]), [float(l) for l in losses], box[0], rates
"""


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("views", [False, True])
def test_a_script_for_torchs_class_runs_unchanged(size, views):
    def both():
        space = {"VIEWS": views}
        exec(SCRIPT, space)
        return [
            space["script"](kind, dist.group.WORLD) for kind in (TorchZero, ZeroRedundancyOptimizer)
        ]

    for rank in run(size, both):
        (params, losses, state, lrs), (our_params, our_losses, our_state, our_lrs) = rank
        assert (
            largest_gap(params, our_params) < 1e-6
            and losses == pytest.approx(our_losses, rel=1e-5)
            and lrs == our_lrs
        )
        plain = lambda groups: [{k: v for k, v in g.items() if k != "foreach"} for g in groups]
        assert plain(state["param_groups"]) == plain(our_state["param_groups"])
        assert list(state["state"]) == list(our_state["state"])
        for i, entry in state["state"].items():
            assert {k: tuple(v.shape) for k, v in entry.items()} == {
                k: tuple(v.shape) for k, v in our_state["state"][i].items()
            }
            assert all(largest_gap(v, our_state["state"][i][k]) < 1e-6 for k, v in entry.items())


def test_state_moves_between_torchs_class_and_ours():
    def move(source, target):
        model = DDP(network())
        zero = source(model.parameters(), AdamW, lr=1e-2)
        train(model, zero, 3)
        zero.consolidate_state_dict(0)
        box = [zero.state_dict() if zero.rank == 0 else None]
        dist.broadcast_object_list(box)
        other = DDP(network())
        other.load_state_dict(model.state_dict())
        there = target(other.parameters(), AdamW, lr=1e-2)
        there.load_state_dict(copy.deepcopy(box[0]))
        return largest_gap(train(model, zero, 3), train(other, there, 3))

    for kinds in ((TorchZero, ZeroRedundancyOptimizer), (ZeroRedundancyOptimizer, TorchZero)):
        assert max(run(2, move, *kinds)) < 1e-6


def sparse():
    return nn.Parameter(torch.zeros(3, 3).to_sparse())


SITUATIONS = {
    "one tensor": lambda kind: kind(torch.zeros(3), AdamW),
    "not iterable": lambda kind: kind(3, AdamW),
    "empty": lambda kind: kind([], AdamW),
    "both kinds": lambda kind: kind([nn.Parameter(torch.zeros(3)), {"params": []}], AdamW),
    "numbers": lambda kind: kind([1, 2], AdamW),
    "no key": lambda kind: kind([{"lr": 1.0}], AdamW),
    "sparse": lambda kind: kind([sparse()], AdamW),
    "functional": lambda kind: kind(
        network().parameters(),
        __import__("torch.distributed.optim").distributed.optim._FunctionalAdam,
    ),
    "not consolidated": lambda kind: stepped_once(kind(network().parameters(), AdamW)).state_dict(),
    "option": lambda kind: kind(network().parameters(), AdamW, momentun=1),
    "rate": lambda kind: kind(network().parameters(), AdamW, lr=-1.0),
    "twice": lambda kind: kind(
        [{"params": [w := nn.Parameter(torch.zeros(3))]}, {"params": [w]}], AdamW
    ),
    "not a leaf": lambda kind: kind([nn.Parameter(torch.zeros(3)) * 2], AdamW),
    "groups": (
        lambda kind: kind(network().parameters(), AdamW).load_state_dict(
            {"state": {}, "param_groups": []}
        )
    ),
    "sizes": (
        lambda kind: kind(network().parameters(), AdamW).load_state_dict(
            {"state": {}, "param_groups": [{"params": [0]}]}
        )
    ),
    "later group": (
        lambda kind: kind(network().parameters(), AdamW).add_param_group(
            [nn.Parameter(torch.zeros(3))]
        )
    ),
    "closure": lambda kind: kind(network().parameters(), AdamW).step(closure="loss"),
    "keyword": lambda kind: kind(network().parameters(), AdamW).step(rate=1),
    "group": lambda kind: kind(network().parameters(), AdamW, process_group="gloo"),
}


OTHER = {
    "one tensor": "TypeError",
    "group": "ValueError",
}  # torch's own of "group" is whatever fails first


def test_errors_are_of_torchs_type():
    def raised():
        return {
            name: [
                caught_error(functools.partial(f, kind))
                for kind in (TorchZero, ZeroRedundancyOptimizer)
            ]
            for name, f in SITUATIONS.items()
        }

    for rank in run(2, raised):
        for name, (theirs, ours) in rank.items():
            assert theirs is not None and ours is not None, name
            assert ours[0] == OTHER.get(name, theirs[0]), (name, theirs, ours)


def test_overlap_with_ddp_may_be_asked_for_and_changes_nothing_until_a_hook_is_there():
    def trained():
        model = network()
        zero = ZeroRedundancyOptimizer(model.parameters(), AdamW, overlap_with_ddp=True)
        before = [p.detach().clone() for p in model.parameters()]
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        zero.step()
        return all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))

    assert run(2, trained) == [True, True]


@pytest.mark.parametrize(
    "copied",
    [lambda zero: pickle.loads(pickle.dumps(zero)), copy.deepcopy, saved_and_loaded],
)
def test_a_copy_holds_what_torchs_holds_and_says_what_it_lacks(copied):
    def shells():
        zeros = [
            kind(network().parameters(), AdamW, lr=0.5)
            for kind in (TorchZero, ZeroRedundancyOptimizer)
        ]
        for zero in zeros:
            for p in zero.param_groups[0]["params"]:
                p.grad = torch.ones_like(p)
            zero.step()
        theirs, ours = map(copied, zeros)
        same = all(
            a.equal(b)
            for a, b in zip(
                theirs.param_groups[0]["params"], ours.param_groups[0]["params"], strict=True
            )
        )
        ours.zero_grad()
        stateless = "state" not in vars(ours) and ours.state == {}
        return (
            same,
            theirs.param_groups[0]["lr"] == ours.param_groups[0]["lr"] == 0.5,
            repr(ours) == repr(theirs),
            stateless,
            caught_error(ours.step),
        )

    for same, rates, shown, stateless, (kind, message) in run(2, shells):
        assert (
            same
            and rates
            and shown
            and stateless
            and kind == "AttributeError"
            and "make a new one and load a state dict" in message
        )


# ---- Join ----


class Gradients(Joinable):
    """Gives joined ranks the gradients that the others computed, which torch's DDP leaves out."""

    def __init__(self, model):
        super().__init__()
        self.model, self.seen = model, []
        model.register_comm_hook(self, Gradients.keep)

    def keep(self, bucket):
        params, sizes = bucket.parameters(), [p.numel() for p in bucket.parameters()]

        def done(future):
            total = future.value()[0] / dist.get_world_size()
            self.seen.append(
                [(p, g.view_as(p).clone()) for p, g in zip(params, total.split(sizes), strict=True)]
            )
            return total

        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(done)

    def join_hook(self, **kwargs):
        class Hook(JoinHook):
            def main_hook(hook):
                for p, g in self.seen.pop():
                    p.grad = g

        return Hook()

    @property
    def join_device(self):
        return torch.device("cpu")

    @property
    def join_process_group(self):
        return dist.group.WORLD


@pytest.mark.parametrize("how", [{}, {"shard": "whole"}, {"parameters_as_bucket_view": True}])
def test_uneven_inputs_under_torchs_join(how):
    def uneven():
        plain, sharded = DDP(network()), DDP(network())
        reference, zero = (
            AdamW(plain.parameters(), lr=1e-2),
            ZeroRedundancyOptimizer(sharded.parameters(), AdamW, lr=1e-2, **how),
        )
        setter, steps = Gradients(sharded), 3 + 2 * dist.get_rank()
        with Join([plain], divide_by_initial_world_size=True):
            train(plain, reference, steps)
        with Join([sharded, setter, zero], divide_by_initial_world_size=True):
            train(sharded, zero, steps)
        after = [float(s["step"]) for s in zero.optim.state.values()]
        return (
            isinstance(zero, Joinable),
            flat(plain.parameters()),
            flat(sharded.parameters()),
            after,
        )

    ranks = run(3, uneven)
    assert all(
        joinable and set(steps) == {7.0} for joinable, _, _, steps in ranks
    )  # a rank without data goes on stepping its shard
    assert agree(*(ours for _, _, ours, _ in ranks))
    assert largest_gap(ranks[2][1], ranks[2][2]) < 1e-6


def test_join_as_torchs_documentation_has_it_and_early_termination():
    def plainly():
        model = DDP(network())
        zero = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
        with Join([model, zero]):
            train(model, zero, 2 + dist.get_rank())
        params = flat(model.parameters())

        def stops():
            with Join([model, zero], throw_on_early_termination=True):
                train(model, zero, 2 + dist.get_rank())

        kind, message = caught_error(stops)
        alone = ZeroRedundancyOptimizer(network().parameters(), SGD, lr=0.1)
        for p in alone.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        with Join([alone]):  # the only participant counts for itself
            for _ in range(1 + dist.get_rank()):
                alone.step()
        return (
            params,
            kind,
            "exhausted" in message,
            caught_error(
                lambda: Join(
                    [zero, TorchZero(network().parameters(), SGD, dist.new_group(), lr=0.1)]
                )
            ),
        )

    ranks = run(2, plainly)
    assert agree(*(params for params, *_ in ranks))
    assert all(
        (kind, said) == ("RuntimeError", True) and "multiple process groups" in other[1]
        for _, kind, said, other in ranks
    )
