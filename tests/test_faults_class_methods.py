"""Optimizer classes of a user's, by what they do beside `step`: constructors, closures, and methods
that they override or add."""

import copy

import pytest
import torch
import torch.distributed as dist
from common import caught, flatten
from test_faults_class_names import attach, network
from torch.optim import SGD, Optimizer

from zero_nb.comm.launch import run
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer

MODES = ["zero1", "zero1-overlap", "zero1-overlap, interleaved", "zero2"]


class Sharpness(SGD):
    """With a closure, steps by gradients at another place, which the closure gives."""

    @torch.no_grad()
    def step(self, closure=None):
        if closure is None:
            return super().step()
        closure = torch.enable_grad()(closure)
        loss = closure()
        params = [p for group in self.param_groups for p in group["params"]]
        moved = [p.grad.sign() * 0.1 for p in params]
        torch._foreach_add_(params, moved)
        closure()
        torch._foreach_sub_(params, moved)
        super().step()
        return loss


class Halves(SGD):
    """Steps half as far with a closure."""

    def step(self, closure=None):
        loss = None if closure is None else closure()
        for p in self.param_groups[0]["params"] if closure else ():
            p.grad.mul_(0.5)
        super().step()
        return loss


class Once(SGD):
    """Calls a closure once."""


class Never(SGD):
    """Takes a closure and leaves it."""

    def step(self, closure=None):
        super().step()


def with_closure(kind, mode):
    module = network()
    zero = ZeroRedundancyOptimizer(module.parameters(), kind, lr=0.1)
    model = attach(mode, module, zero)
    calls = []

    def closure():
        calls.append(1)
        zero.zero_grad()
        loss = model(torch.ones(4, 12)).square().mean()
        loss.backward()
        return loss

    return caught(lambda: [zero.step(closure) for _ in range(3)] and None), len(calls)


@pytest.mark.parametrize("mode", MODES)
def test_a_class_that_a_closure_makes_step_otherwise_is_refused_with_one(mode):
    def every():
        return [with_closure(kind, mode) for kind in (Sharpness, Halves, Once, Never)]

    for sharp, halves, once, never in run(2, every):
        assert "Sharpness calls a closure 2 times in a step" in sharp[0] and sharp[1] == 0
        assert "Halves steps otherwise with a closure" in halves[0] and halves[1] == 0
        assert once == never == (None, 3)


class Clamps(SGD):
    @torch.no_grad()
    def zero_grad(self, set_to_none=True):
        for p in self.param_groups[0]["params"]:
            p.clamp_(-0.2, 0.2)
        super().zero_grad(set_to_none)


class Fills(SGD):
    def zero_grad(self, set_to_none=False):
        super().zero_grad(set_to_none)


class Counts(SGD):
    """Counts steps, and saves the count beside the state."""

    steps = 0

    def step(self, closure=None):
        self.steps += 1
        super().step()

    def state_dict(self):
        return {**super().state_dict(), "steps": self.steps}

    def load_state_dict(self, state_dict):
        self.steps = state_dict["steps"]
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "steps"})


class CountsInGroups(Counts):
    def state_dict(self):
        saved = Optimizer.state_dict(self)
        for group in saved["param_groups"]:
            group["steps"] = self.steps
        return saved


class Scales(SGD):
    def state_dict(self):
        saved = copy.deepcopy(super().state_dict())
        for values in saved["state"].values():
            values["momentum_buffer"] *= 2
        return saved


METHODS = {
    Clamps: "Clamps has a zero_grad() that does more",
    CountsInGroups: "CountsInGroups has a state_dict() that gives another 'param_groups'",
    Scales: "Scales has a state_dict() that gives another 'state'",
}


def test_methods_that_no_rank_would_call_are_refused_if_they_matter():
    def every():
        def make(kind, **options):
            return caught(
                lambda: (
                    ZeroRedundancyOptimizer(
                        network().parameters(), kind, lr=0.1, momentum=0.9, **options
                    )
                    and None
                )
            )

        refused = {kind: make(kind) for kind in METHODS}
        fine = [make(kind) for kind in (Fills, Counts)]
        return refused, fine, make(Clamps, trust_optimizer_class=True)

    for refused, fine, trusted in run(2, every):
        assert fine == [None, None] and trusted is None
        for kind, words in METHODS.items():
            assert f"optimizer_class {words}" in refused[kind]


class ScheduleFree(Optimizer):
    """Schedule-free gradient descent: the average is in the parameters after `eval`."""

    def __init__(self, params, lr=0.5, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": True})

    @torch.no_grad()
    def switch(self, trains, weight):
        for group in self.param_groups:
            for p in group["params"] if group["train_mode"] != trains else ():
                if "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], weight(group["beta"]))
            group["train_mode"] = trains

    def eval(self):
        self.switch(False, lambda beta: 1 - 1 / beta)

    def train(self):
        self.switch(True, lambda beta: 1 - beta)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            share = 1 / group["k"]
            for p in (p for p in group["params"] if p.grad is not None):
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, share).add_(
                    p.grad, alpha=group["lr"] * (group["beta"] * (1 - share) - 1)
                )
                z.sub_(p.grad, alpha=group["lr"])


class Unnoted(ScheduleFree):
    """Notes its mode in no group."""

    trains = True

    @torch.no_grad()
    def switch(self, trains, weight):
        for p in self.param_groups[0]["params"] if self.trains != trains else ():
            p.lerp_(self.state[p]["z"], weight(0.9))
        self.trains = trains


def schedule_free(mode, **options):
    """Train sharded and unsharded, and switch to the average and back; give what differs in each
    mode, how far the two lie apart, and how many gathers calls of `train` take that change nothing."""
    ours, plain = network(), network()
    zero = ZeroRedundancyOptimizer(ours.parameters(), ScheduleFree, **options)
    model = attach(mode, ours, zero)
    optimizer = ScheduleFree(plain.parameters())
    found = []
    for step in range(6):
        for module, one in ((model, zero), (plain, optimizer)):
            one.train()
            one.train()
            one.zero_grad()
            module(torch.ones(4, 12) * step).square().mean().backward()
            one.step()
        if step % 2:
            before = flatten(ours) if not zero.wait_for_driver() else None
            zero.eval()
            optimizer.eval()
            apart = float((flatten(ours) - flatten(plain)).abs().max())
            found.append((apart, float((before - flatten(ours)).abs().max())))
    return found, zero.param_groups[0]["train_mode"]


WAYS = [(mode, {}) for mode in MODES] + [
    ("zero1", {"parameters_as_bucket_view": True}),
    ("zero1", {"shard": "even"}),
    ("zero1", {"master_dtype": torch.float64}),
]


@pytest.mark.parametrize("size", [2, 3])
def test_classes_with_train_and_eval_switch_on_all_ranks(size):
    def every():
        return [schedule_free(mode, **options) for mode, options in WAYS]

    for ways in run(size, every):
        for found, trains in ways:
            assert not trains
            assert all(apart < 2e-6 and moved > 1e-4 for apart, moved in found), found


def ask():
    params = network().parameters
    kinds = (SGD, ScheduleFree, Unnoted)
    errors = [
        caught(lambda kind=kind: ZeroRedundancyOptimizer(params(), kind, lr=0.1) and None)
        for kind in kinds
    ]
    has = [hasattr(ZeroRedundancyOptimizer(params(), kind, lr=0.1), "eval") for kind in kinds[:2]]
    zero = ZeroRedundancyOptimizer(params(), ScheduleFree)
    sent = []
    gather = zero.group.all_gather
    zero.group.all_gather = lambda *args, **kwargs: sent.append(1) or gather(*args, **kwargs)
    zero.train()
    unchanged = len(sent)
    zero.eval()
    return errors, has, unchanged, dist.get_rank()


def test_train_and_eval_are_there_only_if_the_class_has_them_and_gather_only_what_changed():
    for errors, has, unchanged, _ in run(2, ask):
        assert errors[:2] == [None, None] and has == [False, True] and unchanged == 0
        assert (
            "Unnoted has eval() that changes parameters and notes it in no param group" in errors[2]
        )


def switches_otherwise(how):
    """Change an option on rank 1 alone, or param groups, and switch to the average."""
    zero = ZeroRedundancyOptimizer(network().parameters(), ScheduleFree)
    group = zero.param_groups[0]
    if dist.get_rank():
        group.update({"train_mode": False} if how == "differs" else {"params": group["params"][:1]})
    said = caught(zero.eval)
    total = torch.ones(1)
    zero.group.all_reduce(total)
    return said, total.item()


@pytest.mark.parametrize(
    ("how", "words"), [("differs", "train_mode"), ("fails", "param_groups hold 1 parameters")]
)
def test_options_that_are_wrong_on_one_rank_are_an_error_of_eval_on_all(how, words):
    for said, total in run(2, switches_otherwise, how, timeout=30):
        assert said and words in said and total == 2.0


MOVES = {
    "cloned": lambda p: p.data.clone(),
    "another layout": lambda p: p.data.t().contiguous().t() if p.dim() == 2 else p.data,
}


def ways_to(move):
    """List what DDP takes part in only where parameters keep their strides: it gives other
    gradients after it was made for the old ones."""
    return [way for way in WAYS if move == "cloned" or "overlap" not in way[0]]


def moved_between(mode, move, **options):
    """Step, move the parameters, and switch to the average, back and on; give how far that is
    from the same unsharded after each call, and how often a plan was made in calls that move nothing."""
    ours, plain = network(), network()
    zero = ZeroRedundancyOptimizer(ours.parameters(), ScheduleFree, **options)
    bare = mode == "zero1" and move != "cloned"  # the ranks have the same gradients
    model = ours if bare else attach(mode, ours, zero)
    optimizer = ScheduleFree(plain.parameters())
    apart, idle, plans, replan = [], [], [], zero.replan
    zero.replan = lambda *args, **kwargs: plans.append(1) or replan(*args, **kwargs)

    def both(call):
        call(model, zero), call(plain, optimizer)
        zero.wait_for_driver()
        apart.append(float((flatten(ours) - flatten(plain)).abs().max()))

    def step(module, one):
        one.zero_grad()
        module(torch.ones(4, 12) * len(apart)).square().mean().backward()
        one.step()

    for _ in range(3):
        both(step), both(step)
        before = [p.data for p in ours.parameters()]
        for p in ours.parameters():
            p.data = MOVES[move](p)
        both(lambda _, one: one.eval())
        count = len(plans)
        both(lambda _, one: one.train())
        idle.append(len(plans) - count)
        both(lambda _, one: one.eval())
        if mode != "zero1":  # back to where the engine had planned them
            for p, data in zip(ours.parameters(), before, strict=True):
                p.data = data.copy_(p)
        both(lambda _, one: one.train())
    both(step)
    return apart, idle, flatten(ours)


@pytest.mark.parametrize("move", MOVES)
def test_train_and_eval_follow_parameters_that_have_moved(move):
    ways = ways_to(move)

    def every():
        return [moved_between(mode, move, **options) for mode, options in ways]

    for (mode, options), *ranks in zip(ways, *run(2, every, timeout=200), strict=True):
        for apart, idle, _ in ranks:
            assert max(apart) < 2e-6 and not any(idle), (mode, options, apart, idle)
        assert torch.equal(ranks[0][2], ranks[1][2]), (mode, options)


def frozen_before():
    """Freeze a parameter and switch before the next step: the class changes it like the others."""
    ours, plain = network(), network()
    zero = ZeroRedundancyOptimizer(ours.parameters(), ScheduleFree)
    optimizer = ScheduleFree(plain.parameters())
    for module, one in ((ours, zero), (plain, optimizer)):
        for _ in range(2):
            one.zero_grad()
            module(torch.ones(4, 12)).square().mean().backward()
            one.step()
        next(module.parameters()).requires_grad_(False)
        one.eval()
    return float((flatten(ours) - flatten(plain)).abs().max())


def test_a_parameter_that_is_frozen_since_the_last_step_is_switched_too():
    assert all(apart < 2e-6 for apart in run(2, frozen_before))
