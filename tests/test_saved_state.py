"""What a checkpoint has decides what an optimizer loads: state that is not there yet, that is frozen,
that was never used, in groups that fit or do not."""

import copy
import re
from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import caught_error, run_each
from common.devices import GPU, cuda
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel as DDP

from zero_nb import (
    AsyncCheckpointer,
    ZeroRedundancyOptimizer,
    full_optim_state_dict,
    full_state_dict,
    load_sharded,
    overlap,
    run,
    save_sharded,
    shard_full_optim_state_dict,
    two_level,
)

CLASSES = {
    "AdamW": (optim.AdamW, {}),
    "amsgrad": (optim.Adam, {"amsgrad": True}),
    "NAdam": (optim.NAdam, {}),
    "RAdam": (optim.RAdam, {}),
    "Adagrad": (optim.Adagrad, {"initial_accumulator_value": 0.1}),
    "RMSprop": (optim.RMSprop, {"centered": True, "momentum": 0.9}),
    "Rprop": (optim.Rprop, {}),
    "ASGD": (optim.ASGD, {"t0": 2}),
    "momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "Adafactor": (optim.Adafactor, {}),
}


class Layers(nn.Module):
    """Runs the layers that it is told to."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.still, self.last = (nn.Linear(6, 6).double() for _ in range(3))

    def forward(self, x, still=True):
        x = self.first(x).tanh()
        return self.last(self.still(x) if still else x)


def train(model, optimizer, steps, still=True):
    for i in steps:
        optimizer.zero_grad()
        model(torch.full((2, 6), 0.1 * i + 0.3).double(), still).square().mean().backward()
        optimizer.step()


def values(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def steps_of(zero):
    return {i: int(state["step"]) for i, state in full_state_dict(zero, None)["state"].items()}


def from_its_own_state_dict(name, again):
    kind, options = CLASSES[name]
    model = Layers()
    zero = ZeroRedundancyOptimizer(model.parameters(), kind, state_dict_type="sharded", **options)
    if again:
        zero.load_state_dict(zero.state_dict())
    train(model, zero, range(3))
    return values(model)


def test_the_state_that_is_to_come_is_that_of_no_step():
    cases = {(name, again): (name, again) for name in CLASSES for again in (False, True)}
    found = run_each(2, from_its_own_state_dict, cases)
    for name in CLASSES:  # torch casts NAdam's product of momenta when it is loaded
        tolerance = 1e-9 if name == "NAdam" else 0
        torch.testing.assert_close(
            found[name, True][0], found[name, False][0], rtol=0, atol=tolerance
        )


def through_dcp(kind, full, attached, name):
    """Let torch read the state before the first step and set what it got, then train."""
    optimizer_class, options = CLASSES[name]
    model = DDP(Layers())
    kind, options = {"state_dict_type": kind}, {"lr": 1e-2, **options}
    zero = ZeroRedundancyOptimizer(model.parameters(), optimizer_class, **kind, **options)
    if attached:
        overlap(model, zero)
    whole = StateDictOptions(full_state_dict=full)
    got = []
    said = caught_error(lambda: got.append(get_optimizer_state_dict(model, zero, options=whole)))
    for state_dict in got:
        set_optimizer_state_dict(model, zero, state_dict, options=whole)
    plain = Layers()
    train(model, zero, range(3))
    train(plain, optimizer_class(plain.parameters(), **options), range(3))
    values_of = [type(value) for s in got for d in s["state"].values() for value in d.values()]
    gap = (values(model) - values(plain)).abs().max().item()
    return gap, said and said[1], sorted({kind.__name__ for kind in values_of})


def test_torchs_functions_step_nothing_before_the_first_step():
    kinds = ("consolidated", "full", "sharded")
    names = ("AdamW", "momentum", "Adagrad")
    cases = {case: case for case in product(kinds, (False, True), (False, True), names)}
    for (kind, full, *_), found in run_each(2, through_dcp, cases).items():
        for gap, said, types in found:
            assert gap < 1e-12
            if kind == "consolidated":
                assert "holds no consolidated state" in said
            else:
                parts = kind == "sharded" and not full
                assert said is None and types == ["TensorShard" if parts else "Tensor"]


def one_step(kind, state_dict, params):
    """Load a state dict into an optimizer and train; give the parameters, or None for what cannot."""
    zero = kind(params)
    try:
        zero.load_state_dict(copy.deepcopy(state_dict))
        params[0].grad = torch.ones_like(params[0])
        zero.step()
    except Exception as error:
        return type(error), params
    return None, params


def loads_other_classes():
    """Load the state of each class into each, plain and sharded; give the pairs that go differently."""
    wrong = []
    for (one, (before, options)), (other, (after, theirs)) in product(CLASSES.items(), repeat=2):
        weight = nn.Parameter(torch.arange(6.0).view(2, 3))
        plain = before([weight], **options)
        weight.grad = torch.ones_like(weight)
        plain.step()

        def sharded(params, after=after, theirs=theirs):
            return ZeroRedundancyOptimizer(params, after, **theirs)

        def unsharded(params, after=after, theirs=theirs):
            return after(params, **theirs)

        start = weight.detach().clone()
        failed, [want] = one_step(unsharded, plain.state_dict(), [nn.Parameter(start.clone())])
        refused, [got] = one_step(sharded, plain.state_dict(), [nn.Parameter(start.clone())])
        fits = refused is None and torch.allclose(got, want) if failed is None else refused
        if not (fits is True or (fits is ValueError and got.equal(start))):
            wrong.append((one, other, failed, refused))
    return wrong


def loads_a_folder_of_another_class(folder):
    model = Layers()
    zero = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW)
    train(model, zero, range(2))
    save_sharded(folder / "one", model, zero)
    other = Layers(1)
    mine = ZeroRedundancyOptimizer(other.parameters(), optim.NAdam)
    train(other, mine, range(1))
    before = values(other), full_state_dict(mine, None)
    said = caught_error(lambda: load_sharded(folder / "one", other, mine))
    after = full_state_dict(mine, None)["state"]
    same = [
        torch.equal(v, after[i][k]) for i, s in before[1]["state"].items() for k, v in s.items()
    ]
    return said, torch.equal(before[0], values(other)) and all(same)


def test_state_of_another_class_trains_as_torch_does_or_changes_nothing(folder):
    assert run(2, loads_other_classes) == [[], []]
    for (kind, text), unchanged in run(2, loads_a_folder_of_another_class, folder):
        assert kind == "ValueError" and "no 'momentum_decay'" in text and unchanged


def asks_on_one_rank_only():
    model = Layers()
    zero = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, state_dict_type="full")
    train(model, zero, range(1))
    if dist.get_rank() == 0:
        return caught_error(zero.state_dict)
    return caught_error(model.zero_grad)


def test_a_full_state_dict_on_one_rank_only_is_named_as_the_call_it_is():
    (kind, text), _ = run(2, asks_on_one_rank_only, group_timeout=2)
    assert kind == "RuntimeError" and "state_dict() of type 'full', which all ranks must" in text


def saves_what_is_trained(folder, master, frozen):
    """Save a model of which a layer never has a gradient, in folders and by torch."""
    model = Layers().to(torch.bfloat16 if master else torch.float64)
    model.still.requires_grad_(not frozen)
    zero = ZeroRedundancyOptimizer(
        model.parameters(), optim.AdamW, master_dtype=master, state_dict_type="sharded"
    )
    for p in (*model.first.parameters(), *model.last.parameters()):
        p.grad = torch.ones_like(p)
    zero.step()
    save_sharded(folder / "ours", model, zero)
    dcp.save({"zero": zero.state_dict()}, checkpoint_id=folder / "dcp")


def loads_what_was_trained(folder, master, frozen):
    found = []
    for way in ("ours", "dcp"):
        model = Layers(1).to(torch.bfloat16 if master else torch.float64)
        model.still.requires_grad_(not frozen)
        zero = ZeroRedundancyOptimizer(
            model.parameters(), optim.AdamW, master_dtype=master, state_dict_type="sharded"
        )
        if way == "ours":
            load_sharded(folder / way, model, zero)
        elif frozen:  # of a layer that could be trained torch wants state
            state = {"zero": zero.state_dict()}
            dcp.load(state, checkpoint_id=folder / way)
            zero.load_state_dict(state["zero"])
        else:
            continue
        found.append(sorted(steps_of(zero)))
    return found


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)])
def test_a_layer_without_gradients_has_no_state(folder, sizes):
    for i, (master, frozen) in enumerate(product((None, torch.float32), (False, True))):
        case = folder / str(i)
        case.mkdir(parents=True)
        run(sizes[0], saves_what_is_trained, case, master, frozen)
        for found in run(sizes[1], loads_what_was_trained, case, master, frozen):
            assert found == [[0, 1, 4, 5]] * (2 if frozen else 1), (master, frozen)


def gathers_to(receivers):
    zero = ZeroRedundancyOptimizer(Layers().parameters(), optim.AdamW, state_dict_type="full")
    return [caught_error(lambda to=to: zero.consolidate_state_dict(to)) for to in receivers]


def test_who_receives_is_checked_for_every_type():
    for number, kind, right in run(2, gathers_to, (7, "one", 1)):
        assert number[0] == "ValueError" and "0 to 1, got 7" in number[1]
        assert kind[0] == "TypeError" and "got 'one'" in kind[1] and right is None


def before_the_first_step(folder, sharded):
    def make():
        model = Layers()
        kind = optim.AdamW
        made = ZeroRedundancyOptimizer if sharded else (lambda params, kind, **o: kind(params, **o))
        return model, made(model.parameters(), kind, lr=1e-2)

    model, optimizer = make()
    save_sharded(folder / f"{sharded}", model, optimizer)
    train(model, optimizer, range(3))
    other, resumed = make()
    train(other, resumed, range(2))  # what it has is given up
    load_sharded(folder / f"{sharded}", other, resumed)
    train(other, resumed, range(3))
    return (values(model) - values(other)).abs().max().item()


@pytest.mark.parametrize("sharded", [True, False])
def test_no_state_is_saved_before_the_first_step(folder, sharded):
    assert run(2, before_the_first_step, folder, sharded) == [0.0, 0.0]
    assert b"exp_avg" not in (folder / f"{sharded}" / ".metadata").read_bytes()


def saves(folder, name, unused):
    """Train for two steps without a layer, or freeze it after two, and save after three."""
    model = Layers()
    zero = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, lr=1e-2)
    train(model, zero, range(2), still=not unused)
    model.still.requires_grad_(unused)
    train(model, zero, range(2, 3), still=not unused)
    save_sharded(folder / name, model, zero)
    return goes_on(model, zero)


def goes_on(model, zero):
    """Use and train all layers."""
    model.still.requires_grad_(True)
    train(model, zero, range(3, 5))
    return values(model), steps_of(zero)


def loads(folder, name, frozen, warm):
    model = Layers(1)
    zero = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, lr=1.0)
    train(model, zero, range(4 * warm))
    model.still.requires_grad_(not frozen)
    load_sharded(folder / name, model, zero)
    return goes_on(model, zero)


@pytest.mark.parametrize("unused", [True, False], ids=["unused", "frozen"])
def test_state_of_some_parameters_is_loaded_by_optimizers_that_train_others(folder, unused):
    wanted, counts = run(2, saves, folder, "one", unused)[0]
    assert [counts[i] for i in (0, 2)] == [5, 2 if unused else 4]
    for size in (1, 2, 3):
        cases = {(f, w): (folder, "one", f, w) for f in (False, True) for w in (False, True)}
        for case, found in run_each(size, loads, cases).items():
            for got, steps in found:
                torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12, msg=f"{size} {case}")
                assert steps == counts, (size, case)


def in_groups(model, form):
    named = dict(model.named_parameters())
    weights = {k: p for k, p in named.items() if p.dim() == 2}
    rest = {k: p for k, p in named.items() if p.dim() == 1}
    if form == "turned":
        weights = dict(reversed(weights.items()))
    if form == "one":
        return [{"params": [*named.items()]}]
    if form == "moved":
        rest["first.weight"] = weights.pop("first.weight")
    groups = [{"params": [*weights.items()], "lr": 0.1}, {"params": [*rest.items()], "lr": 0.2}]
    return groups[::-1] if form == "turned" else groups


def loads_groups(folder, form):
    model = Layers()
    zero = ZeroRedundancyOptimizer(in_groups(model, "two"), optim.AdamW)
    train(model, zero, range(2))
    save_sharded(folder / form, model, zero)
    other = Layers(1)
    mine = ZeroRedundancyOptimizer(in_groups(other, form), optim.AdamW, lr=1.0)
    before = values(other)
    said = caught_error(lambda: load_sharded(folder / form, other, mine))
    unchanged = torch.equal(before, values(other)) and full_state_dict(mine, None)["state"] == {}
    if form != "turned":
        return said, unchanged
    ours, theirs = (full_state_dict(each, None, "name")["state"] for each in (zero, mine))
    equal = [torch.equal(ours[name]["exp_avg"], theirs[name]["exp_avg"]) for name in ours]
    return [group["lr"] for group in mine.param_groups], all(equal)


def test_groups_are_found_by_their_names_or_refused_before_anything_is_loaded(folder):
    cases = {form: (folder, form) for form in ("turned", "one", "moved")}
    found = run_each(2, loads_groups, cases)
    assert found["turned"] == [([0.2, 0.1], True)] * 2
    for form, words in (
        ("one", "param group 0 must have one 'lr'"),
        ("moved", "param group 1 must have one 'lr'"),
    ):
        for (kind, text), unchanged in found[form]:
            assert kind == "ValueError" and words in text and unchanged, (form, text)


def gets_a_group():
    model = Layers()
    zero = ZeroRedundancyOptimizer(model.first.parameters(), optim.AdamW)
    through = DDP(model, find_unused_parameters=True)
    through(torch.ones(2, 6).double()).sum().backward()
    zero.step()
    every = [full_optim_state_dict(through, zero, key_by_name=True)]
    dist.broadcast_object_list(every)
    zero.load_state_dict(shard_full_optim_state_dict(every[0], model, model.first.parameters()))
    zero.add_param_group({"params": model.last.parameters()})
    alone = caught_error(lambda: shard_full_optim_state_dict({}, model))
    return sorted(every[0]["state"]), alone


def held_with_two_levels():
    model = Layers()
    zero = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, two_level(2))
    train(DDP(model), zero, range(1))
    return len(full_optim_state_dict(model, zero).get("state", ()))


def test_with_two_levels_one_rank_has_the_full_state_dict():
    assert run(4, held_with_two_levels) == [6, 0, 0, 0]


def test_torchs_full_state_dict_functions_know_a_wrapped_model_and_leave_no_names():
    for names, (kind, text) in run(2, gets_a_group):
        assert names == ["first.bias", "first.weight"]
        assert kind == "ValueError" and "broadcast it to all ranks" in text


class Turning(optim.SGD):
    """Keeps a complex value for each element of a real parameter."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for p in (p for group in self.param_groups for p in group["params"]):
            turned = self.state[p].setdefault("turned", torch.zeros_like(p, dtype=torch.complex64))
            turned.add_(p.grad * (1 + 2j))


def save_complex_state(folder):
    """Step with complex state, and give what each way to save says, and the weights after one more step."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    zero = ZeroRedundancyOptimizer(model.parameters(), Turning, lr=0.1, trust_optimizer_class=True)

    def step():
        model(torch.ones(2, 4)).sum().backward()
        zero.step()

    def state_dict(kind):
        with zero.giving_state_dicts(kind):
            zero.state_dict()

    step()
    ways = (
        zero.consolidate_state_dict,
        lambda: full_state_dict(zero, None),
        lambda: full_state_dict(zero, folder / "full.pt"),
        lambda: save_sharded(folder / "sharded", model, zero),
        lambda: AsyncCheckpointer(model, zero).save(folder / "later").wait(),
        lambda: state_dict("full"),
        lambda: state_dict("sharded"),
    )
    said = [caught_error(way) for way in ways]
    step()
    return said


def test_complex_state_of_a_real_parameter_is_refused_before_it_is_saved(tmp_path):
    for said in run(2, save_complex_state, tmp_path):
        for kind, words in said:
            assert kind == "ValueError" and "'turned' of parameter 0 must be real" in words, said
            assert "got torch.complex64" in words
    assert [*tmp_path.iterdir()] == []


def one_rank_stays_away():
    model = nn.Linear(3, 2)
    zero = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, state_dict_type="full")
    model(torch.ones(1, 3)).sum().backward()
    zero.step()
    return None if dist.get_rank() == 1 else caught_error(zero.state_dict)


def test_a_full_state_dict_names_the_rank_that_did_not_come():
    for rank, said in enumerate(run(3, one_rank_stays_away, group_timeout=2)):
        if rank != 1:
            assert said[0] == "RuntimeError" and said[1].startswith("rank 1 did not arrive"), said


class KeepsBest(optim.SGD):
    """Keeps a value of no parameter, of any kind."""

    def __init__(self, params, lr=0.1, best=None):
        super().__init__(params, lr=lr)
        self.best = best

    def step(self, closure=None):
        self.state["best"] = self.best()
        return super().step(closure)


def nan(dtype=torch.float32):
    return torch.tensor([1.0, float("nan"), 0.0], dtype=dtype)


BEST = {
    "a number": lambda: float("nan"),
    "complex": lambda: complex(1.0, float("nan")),
    "a tensor": nan,
    "half precision": lambda: nan(torch.bfloat16),
    "in a list": lambda: [{"loss": float("nan")}, (nan(),)],
    "sparse": lambda: torch.eye(3).to_sparse(),
    "signed zeros": lambda: torch.tensor(-0.0 if dist.get_rank() else 0.0),
}
OTHER = {
    "numbers": lambda: [float("nan"), 1.0, 2.0][dist.get_rank()],
    "dtypes": lambda: torch.ones(2, dtype=[torch.float32, torch.float64][dist.get_rank() % 2]),
    "shapes": lambda: torch.ones(1 + dist.get_rank()),
    "values": lambda: nan() * (1 + dist.get_rank()),
    "layouts": lambda: torch.eye(3) if dist.get_rank() else torch.eye(3).to_sparse(),
    "sparse values": lambda: (torch.eye(3) * (1 + dist.get_rank())).to_sparse(),
}


def bring_best(best, device="cpu", kind="full"):
    p = nn.Parameter(torch.ones(4, device=device))
    zero = ZeroRedundancyOptimizer(
        [p], KeepsBest, best=best, trust_optimizer_class=True, state_dict_type=kind
    )
    p.grad = torch.ones_like(p)
    zero.step()
    said = caught_error(zero.state_dict)
    return said, None if said else zero.state_dict()["state"]["best"]


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_state_of_no_parameter_may_be_nan(size, kind):
    cases = {k: (v, "cpu", kind) for k, v in BEST.items()}
    for name, found in run_each(size, bring_best, cases).items():
        assert [said for said, _ in found] == [None] * size, (name, found)
    assert all(torch.isnan(one[1]) for _, one in run(size, bring_best, nan))


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_state_of_no_parameter_that_differs_is_refused_on_every_rank(kind):
    cases = {k: (v, "cpu", kind) for k, v in OTHER.items()}
    for name, found in run_each(3, bring_best, cases).items():
        for said, _ in found:
            assert said and said[0] == "ValueError", (name, found)
            assert "rank 0 has \"state 'best', of no parameter: " in said[1], name
            assert re.search(", rank [12] has \"state 'best', of no parameter: ", said[1]), name


@cuda
def test_state_of_no_parameter_may_be_on_a_gpu():
    def every():
        return bring_best(lambda: nan().cuda(), "cuda")

    [(said, best)] = run(1, every, backend=GPU)
    assert said is None and torch.isnan(best[1])
