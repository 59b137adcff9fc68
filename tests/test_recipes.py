"""The recipes of CONTRIBUTING.md, each done once: a policy, a transport, an optimizer family, a driver."""

import os
import time
from functools import partial

import torch
import torch.distributed as dist
from common import caught
from torch import nn

from zero_nb import (
    Group,
    ParamSpec,
    ShardPlan,
    Span,
    ZeroRedundancyOptimizer,
    data_parallel,
    overlap,
    run,
)
from zero_nb.backward.ddp_buckets import plan_buckets
from zero_nb.backward.engine import InBackward, StepEngine, start_mean
from zero_nb.backward.watch import BackwardWatch, on_backward_end
from zero_nb.comm import transport
from zero_nb.optim.driver import AfterBackward, StepOptions
from zero_nb.optim.iteration import Iteration, make_step_plan


def gradients(model: nn.Module, step: int) -> None:
    """Put the same gradients on every rank, as DDP would."""
    for i, p in enumerate(model.parameters()):
        p.grad = torch.linspace(-1, 1, p.numel()).reshape(p.shape) * (step + i + 1)


def train(make_optimizer) -> list[torch.Tensor]:
    """Take three steps of a small model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3, bias=False))
    optimizer = make_optimizer(model.parameters())
    for step in range(3):
        gradients(model, step)
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


# ---- a policy: a function from parameters and a world size to a plan ----


def round_robin(specs, world_size, *, loads=None):
    """Give whole parameters to the ranks in turn."""
    shards = [[] for _ in range(world_size)]
    for i, spec in enumerate(specs):
        if spec.trainable:
            shards[i % world_size].append(Span(i, 0, spec.numel))
    return ShardPlan(specs, shards)


def test_a_policy_is_a_function():
    plan = round_robin([ParamSpec("a", (4,)), ParamSpec("b", (2, 3)), ParamSpec("c", (5,))], 2)
    assert [[span.param for span in shard] for shard in plan.shards] == [[0, 2], [1]]

    def owned():
        kept = []

        def sharded(params):
            kept.append(ZeroRedundancyOptimizer(params, torch.optim.Adam, shard=round_robin))
            return kept[0]

        return train(sharded), sum(len(s) for s in kept[0].optim.state.values())

    expected = train(torch.optim.Adam)
    for trained, _ in (results := run(2, owned)):
        torch.testing.assert_close(trained, expected)
    assert all(entries for _, entries in results)


# ---- a transport: an object that moves parts between the ranks of a group, and a way to connect ----


class Files:
    """Moves tensors through files: the slowest transport there is, and the shortest."""

    def __init__(self, folder, meeting):
        self.folder, self.meeting = folder, meeting
        self.turn = 0
        self.moved = []  # kinds of collectives, in order

    def _path(self, turn, rank):
        return f"{self.folder}/{turn}-{rank}.pt"

    def _exchange(self, parts):
        """Give what each rank brought, once all have."""
        self.turn += 1
        turn, path = self.turn, self._path(self.turn, self.meeting.rank)
        torch.save(parts, path + ".part")
        os.replace(path + ".part", path)  # whole, or not there
        yield
        paths = [self._path(turn, rank) for rank in range(len(self.meeting.ranks))]
        end = time.monotonic() + self.meeting.limit
        while not all(map(os.path.exists, paths)):
            if time.monotonic() > end:
                raise RuntimeError(f"collective {turn}: a rank did not come")
            yield
        return [torch.load(path) for path in paths]

    def reduce_scatter(self, parts):
        self.moved.append("reduce_scatter")
        brought = yield from self._exchange([part.clone() for part in parts])
        mine = parts[self.meeting.rank]
        mine.copy_(torch.stack([one[self.meeting.rank] for one in brought]).sum(0))

    def all_gather(self, parts):
        self.moved.append("all_gather")
        brought = yield from self._exchange([parts[self.meeting.rank].clone()])
        for part, (came,) in zip(parts, brought, strict=True):
            part.copy_(came)

    def close(self):
        pass


def test_a_transport_is_registered(tmp_path):
    def moved():
        made = []

        def connect(meeting):
            refusal = "" if dist.get_backend() == "gloo" else "only gloo is served"
            if said := meeting.agree(refusal):
                raise transport.Unavailable(said)
            made.append(Files(meeting.propose(str(tmp_path)), meeting))
            return made[0]

        transport.register(
            "files", connect
        )  # asked before shared memory, which is registered already
        trained = train(lambda params: ZeroRedundancyOptimizer(params, torch.optim.Adam))
        flat = torch.arange(4.0)
        Group().reduce_scatter(flat)
        return trained, made[0].moved, flat.chunk(2)[dist.get_rank()]

    expected = train(torch.optim.Adam)
    for rank, (trained, kinds, mine) in enumerate(run(2, moved)):
        torch.testing.assert_close(trained, expected)
        assert "all_gather" in kinds and kinds[-1] == "reduce_scatter"
        assert mine.tolist() == [[0, 2], [4, 6]][rank]


def test_a_transport_that_refuses_leaves_the_group_to_those_registered_before():
    def moved():
        asked = []

        def never(meeting):
            asked.append(meeting.rank)
            raise transport.Unavailable(meeting.agree("no such hardware"))

        transport.register("wishes", never)
        flat = torch.arange(4.0)
        group = Group()
        group.reduce_scatter(flat)
        return asked, type(group._traffic.transports[0]).__name__, flat.chunk(2)[group.group_rank]

    for rank, (asked, name, mine) in enumerate(run(2, moved)):
        assert asked == [rank] and name == "SharedMemory"
        assert mine.tolist() == [[0, 2], [4, 6]][rank]


def test_a_transport_that_refuses_without_a_vote_leaves_the_next_one_its_own_proposals():
    def moved():
        def never(meeting):
            meeting.propose("a machine of mine")  # all read the same, and need no vote to refuse
            raise transport.Unavailable("not on this machine")

        transport.register("wishes", never)
        flat = torch.arange(4.0)
        group = Group()
        group.reduce_scatter(flat)
        return type(group._traffic.transports[0]).__name__, flat.chunk(2)[group.group_rank].tolist()

    assert run(2, moved) == [("SharedMemory", [0, 2]), ("SharedMemory", [4, 6])]


def test_a_transport_that_one_rank_alone_registers_is_named_on_all():
    def moved():
        if dist.get_rank() == 0:
            transport.register("wishes", lambda meeting: meeting.agree(""))
        return caught(lambda: Group().reduce_scatter(torch.arange(4.0)))

    mine, other = run(2, moved, group_timeout=3.0)
    assert "reach each other by wishes, a transport that all ranks have to register" in mine
    assert "by shared memory, a transport that all ranks have to register" in other


# ---- an optimizer family: its class, and how it may be cut ----


class SignMomentum(torch.optim.Optimizer):
    """Steps each element by the sign of its momentum."""

    def __init__(self, params, lr=0.01, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state.setdefault("momentum", torch.zeros_like(p)).lerp_(p.grad, 1 - group["beta"])
                p.sub_(state["momentum"].sign(), alpha=group["lr"])


class RowNorm(SignMomentum):
    """Divides by the norm of the whole parameter, so that parameters must stay whole."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad / p.grad.norm(), alpha=group["lr"])


def test_a_family_is_tried_before_it_is_trusted():
    def cut(optimizer_class, shard):
        try:
            return train(
                lambda params: ZeroRedundancyOptimizer(params, optimizer_class, shard=shard)
            )
        except ValueError as error:
            return str(error)

    for optimizer_class in (SignMomentum, RowNorm):
        expected = train(optimizer_class)
        for trained in run(2, cut, optimizer_class, "auto"):
            torch.testing.assert_close(trained, expected)
    for trained in run(2, cut, SignMomentum, "even"):
        torch.testing.assert_close(trained, train(SignMomentum))
    assert all("RowNorm" in said for said in run(2, cut, RowNorm, "even"))


# ---- a driver: what takes an optimizer's steps ----


class SkipsNotFinite:
    """Steps after backward, unless a gradient is infinite or NaN."""

    steps_in_backward = False

    def __init__(self, optimizer):
        self.optimizer, self.inner = optimizer, AfterBackward(optimizer)
        optimizer.attach(self)

    def step(self, kwargs):
        grads = [p.grad for p in self.optimizer.params()]  # averaged: the same on all ranks
        return self.inner.step(kwargs) if all(g.isfinite().all() for g in grads) else None

    def wait(self, param=None):
        pass  # the inner one's parameters are there when `step` returns

    def detach(self):
        self.optimizer.detach(self)


def test_an_optimizer_has_one_driver():
    def refused(kind):
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        ddp = nn.parallel.DistributedDataParallel(model)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)
        attach = {"overlap": lambda: overlap(ddp, optimizer)}
        attach["data_parallel"] = lambda: data_parallel(model, optimizer)
        driver = SkipsNotFinite(optimizer)
        shard = optimizer.shards[0]
        calls = [
            attach[kind],
            lambda: SkipsNotFinite(optimizer),
            lambda: optimizer.attach(object()),
        ]
        said = list(map(caught, calls))
        hooks = [*model._forward_hooks, *ddp._forward_hooks, *ddp._comm_hooks]
        untouched = not hooks and optimizer.shards[0] is shard
        driver.detach()
        attach[kind]().detach()
        return said, untouched

    for kind in ("overlap", "data_parallel"):
        for (theirs, second, bare), untouched in run(2, refused, kind):
            assert "a SkipsNotFinite takes the optimizer's steps; detach that first" in theirs
            assert "the optimizer has a driver already" in second and untouched
            assert "lacks steps_in_backward" in bare


def test_a_driver_may_decide_whether_to_step():
    def skipping():
        weight = nn.Parameter(torch.zeros(6))
        optimizer = ZeroRedundancyOptimizer([weight], torch.optim.SGD, lr=1.0)
        driver = SkipsNotFinite(optimizer)
        seen = []
        for value in (1.0, float("nan"), 2.0):
            weight.grad = torch.full((6,), value)
            optimizer.step()
            seen.append(weight.tolist())
        driver.detach()
        weight.grad = torch.full((6,), 4.0)
        optimizer.step()
        return seen, weight.tolist()

    for seen, last in run(2, skipping):
        assert seen == [[-1.0] * 6, [-1.0] * 6, [-3.0] * 6] and last == [-7.0] * 6


class WhenBackwardEnds(InBackward):
    """Averages and steps the parameters of a plain module at the end of each backward: the parts
    of `overlap` and `data_parallel`, without their buckets."""

    def __init__(self, module, optimizer):
        self.engine = StepEngine(optimizer, StepOptions())
        self.groups = optimizer.groups
        everything = [list(range(len(self.engine.params)))]
        make = partial(plan_buckets, optimizer, everything)
        shard = optimizer.replan(optimizer.shards, "for one bucket", make)
        self.plan = make_step_plan(optimizer, shard)
        self.watch = BackwardWatch(module, self, self.groups)
        optimizer.attach(self)

    @property
    def step_plan(self):
        return self.plan

    def before_forward(self, module):
        self.remove_markers()

    def backward_began(self):
        on_backward_end(self.finish, self.groups)

    @torch.no_grad()
    def finish(self):
        params = self.engine.params
        unused = [False] * len(params)
        iteration = Iteration(self.plan, self, unused)
        for i, bucket in enumerate(self.plan.shard.buckets):
            slots = bucket.bucket.slots
            parts = [params[s.param].grad.flatten()[s.start : s.stop] for s in slots]
            iteration.arrive(i, torch.cat(parts))
        stepped = iteration.finish()
        for p in params:
            p.grad = None
        self.engine.note_step()
        self.engine.mark_gradients(unused, stepped)

    def start(self, i, gradient):  # of the iteration's `GradientReducer`, as what follows
        return start_mean(self.plan.shard.buckets[i], gradient)

    def release(self, i):
        pass

    def step(self, kwargs):
        self.engine.check_call(kwargs)


def test_a_driver_may_step_inside_backward():
    def compared(inside):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3, bias=False))
        trained = model if inside else nn.parallel.DistributedDataParallel(model)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)
        driver = WhenBackwardEnds(model, optimizer) if inside else None
        for step in range(4):
            if inside and step == 3:
                driver.detach()
                trained = nn.parallel.DistributedDataParallel(model)
            data = torch.full((2, 5), 1.0 + step + dist.get_rank())
            trained(data).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    for inside, beside in zip(run(2, compared, True), run(2, compared, False), strict=True):
        torch.testing.assert_close(inside, beside)
