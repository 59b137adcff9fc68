"""Sharded checkpoints, from any number of ranks to any other: what comes back, and what a save and a load
read, copy and hold."""

import itertools
import math
import sys

import pytest
import torch
import torch.distributed as dist
from common.modes import MODES
from common.saving import RECIPES, begin, check, inputs, limit_of, parameters, train, two_layers
from common.sharded_saving import stepped
from torch import nn
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW
from torch.utils._python_dispatch import TorchDispatchMode

from zero_nb.apps.peak_memory import peak_bytes
from zero_nb.checkpoint.checksums import read_stored
from zero_nb.checkpoint.folder import FolderReader, read_manifest
from zero_nb.checkpoint.full import full_state_dict
from zero_nb.checkpoint.sharded import load_sharded, save_sharded
from zero_nb.checkpoint.skeleton import tight
from zero_nb.comm import relays
from zero_nb.comm.launch import run
from zero_nb.comm.subgroups import two_level
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer


def save(folder, recipe, mode):
    attached = begin(recipe, mode)
    train(attached, inputs(recipe, 1))
    save_sharded(folder, attached.call, attached.optimizer, 3, {"seen": [3, 0.5, None]})
    assert attached.optimizer.state_dict_type == "consolidated"
    train(attached, inputs(recipe, 2))
    return parameters(attached)


def load(folder, recipe, mode, machines):
    relays._host = lambda: f"{dist.get_rank() % machines:08}"
    attached = begin(recipe, mode)
    assert load_sharded(folder, attached.call, attached.optimizer) == {"seen": [3, 0.5, None]}
    train(attached, inputs(recipe, 2))
    return parameters(attached)


def round_trip(folder, recipe, modes, ranks, machines=1):
    [wanted, *_] = run(ranks[0], save, folder, recipe, modes[0])
    assert read_manifest(folder)["world_size"] == ranks[0]
    for got in run(ranks[1], load, folder, recipe, modes[1], machines):
        check(wanted, got, limit_of(recipe))


@pytest.mark.turns(4)
@pytest.mark.parametrize("ranks", [*itertools.product((1, 2, 3, 4), repeat=2)], ids=str)
def test_any_number_of_ranks_goes_on_at_any_other(folder, ranks):
    round_trip(folder / "one", RECIPES["Muon and AdamW"], ("zero1", "zero1"), ranks)


@pytest.mark.turns(3)
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_goes_on_in_the_next_one(folder, mode):
    modes = [*MODES]
    other = modes[(modes.index(mode) + 1) % len(modes)]
    round_trip(folder / "one", RECIPES["AdamW"], (mode, other), (2, 3), machines=2)


@pytest.mark.turns(3)
@pytest.mark.parametrize("name", RECIPES)
def test_every_class_goes_on(folder, name):
    round_trip(folder / "one", RECIPES[name], ("zero2", "zero1-overlap"), (3, 2), machines=2)


def reads(folder, machines, views, moves=False):
    """Load a model of which a part is not trained, and count the elements of it that are read."""
    rank = dist.get_rank()
    relays._host = lambda: f"{rank % machines:08}"

    def make(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.Linear(30, 10))
        model[0].weight.data = model[0].weight.data.t().contiguous().t()  # by columns
        model[2].weight.requires_grad_(False)
        trained = [p for p in model.parameters() if p.requires_grad]
        return model, ZeroRedundancyOptimizer(trained, AdamW, parameters_as_bucket_view=views)

    def step(model, zero):
        model(torch.ones(4, 20)).square().mean().backward()
        zero.step()

    model, zero = make(0)
    step(model, zero)
    save_sharded(folder, model, zero)
    again, other = make(1)
    if moves and rank == 0:  # its buckets are not where its parameters are
        again[0].bias.data = again[0].bias.data.clone()
    read = dict[str, int]()
    real = FolderReader._read_item

    def counting(reader, file, info, item, planner):
        name = item.dest_index.fqn
        if item.type != LoadItemType.BYTE_IO:
            read[name] = read.get(name, 0) + math.prod(item.lengths)
        real(reader, file, info, item, planner)

    FolderReader._read_item = counting
    load_sharded(folder, again, other)
    same = again.state_dict()
    assert all(torch.equal(value, same[key]) for key, value in model.state_dict().items())
    of_model = {key: n for key, n in read.items() if key.startswith("model.")}
    whole = {f"model.{key}": value.numel() for key, value in same.items()}
    owned = sum(len(run) for bucket in other.shards[0].buckets for run in bucket.mine)
    trained = [f"model.{n}" for n, p in again.named_parameters() if p.requires_grad]
    return of_model, whole, trained, owned


@pytest.mark.parametrize("views", [False, True], ids=["apart", "views"])
def test_on_several_machines_a_rank_reads_the_parameters_it_owns(folder, views):
    every = run(3, reads, folder / "one", 3, views)
    _, whole, trained, _ = every[0]
    total = {name: sum(read.get(name, 0) for read, *_ in every) for name in whole}
    for name, numel in whole.items():
        assert total[name] == (numel if name in trained else 3 * numel), name
    for read, _, _, owned in every:
        assert (
            sum(read.get(name, 0) for name in trained) == owned < 0.4 * sum(map(whole.get, trained))
        )


@pytest.mark.parametrize(("machines", "moves"), [(1, False), (3, True)])
def test_on_one_machine_or_where_one_rank_has_moved_parameters_each_reads_all(
    folder, machines, moves
):
    for read, whole, *_ in run(3, reads, folder / "one", machines, False, moves):
        assert read == whole


def two_steps(folder, loads, model, optimizer):
    """Load or do not, take two steps, and save if nothing was loaded."""
    if loads:
        load_sharded(folder, model, optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(4, 12, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
    if not loads:
        save_sharded(folder, model, optimizer, 2)


def many_small(folder):
    """Save what lies in buckets, and count what is copied for it, but for single numbers."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(20, 20) for _ in range(20)])
    zero = ZeroRedundancyOptimizer(model.parameters(), AdamW, parameters_as_bucket_view=True)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    zero.step()
    copied = []
    real = torch.Tensor.clone
    torch.Tensor.clone = lambda tensor, **options: copied.append(tensor) or real(tensor, **options)
    try:
        save_sharded(folder, model, zero)
    finally:
        torch.Tensor.clone = real
    return sum(tensor.dim() > 0 for tensor in copied)


def test_nothing_is_copied_for_a_save(folder):
    assert run(2, many_small, folder / "one") == [0, 0]


class Joins(TorchDispatchMode):
    """Counts the elements that `torch.cat` copies."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.cat.default:
            self.elements += found.numel()
        return found


def loaded_twice(folder):
    """Load into an optimizer without state, and into the same one after a step."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(20, 20) for _ in range(20)])
    zero = ZeroRedundancyOptimizer(model.parameters(), AdamW)

    def step():
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        zero.step()

    def state():
        zero.consolidate_state_dict(to=None)
        return [value["exp_avg"] for value in zero.state_dict()["state"].values()]

    step()
    save_sharded(folder, model, zero)
    saved = state()
    zero = ZeroRedundancyOptimizer(model.parameters(), AdamW)
    for _ in range(2):
        with Joins() as joins:
            load_sharded(folder, model, zero)
        assert joins.elements == 0
        assert all(map(torch.equal, saved, state()))
        step()
        assert not any(map(torch.equal, saved, state()))


def test_nothing_is_copied_for_a_load(folder):
    run(2, loaded_twice, folder / "one")


def memory_of_a_load(folder):
    model = nn.ModuleList(nn.Linear(1000, 4000) for _ in range(3))
    zero = ZeroRedundancyOptimizer(model.parameters(), AdamW)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    zero.step()
    save_sharded(folder, model, zero)
    load_sharded(folder, model, zero)  # loads the code that it runs
    return peak_bytes(torch.device("cpu"), lambda: load_sharded(folder, model, zero))


@pytest.mark.skipif(sys.platform != "linux", reason="the high-water mark is Linux's")
def test_a_load_holds_less_than_a_box(folder):
    assert run(1, memory_of_a_load, folder / "one")[0] < 4e6  # of 144, in boxes of 16


def memory_of_a_cast(path):
    numbers = torch.arange(8_000_000.0)
    path.write_bytes(numbers.numpy().tobytes())
    target = torch.zeros(8_000_000, dtype=torch.float64)
    stored = torch.empty_like(numbers, device="meta")
    with open(path, "rb", buffering=0) as file:
        found = peak_bytes(torch.device("cpu"), lambda: read_stored(stored, file, 0, target))
    return found, torch.equal(target, numbers.double())


@pytest.mark.skipif(sys.platform != "linux", reason="the high-water mark is Linux's")
def test_a_tensor_in_another_dtype_goes_through_a_small_buffer(folder):
    held, same = run(1, memory_of_a_cast, folder / "one")[0]
    assert held < 10e6 and same  # of 32


def versions_of_a_load(folder):
    model, zero = stepped()
    save_sharded(folder, model, zero)
    before = [p._version for p in model.parameters()]
    load_sharded(folder, model, zero)
    return before, [p._version for p in model.parameters()]


def test_autograd_sees_what_a_load_has_written(folder):
    """A file's bytes are read into the memory of parameters, where torch does not count them."""
    before, after = run(1, versions_of_a_load, folder / "one")[0]
    assert all(a < b for a, b in zip(before, after, strict=True)), (before, after)


def given_twice():
    """Load one state dict, of the state to come, twice: a user may have kept it to begin anew."""
    model = two_layers()
    zero = ZeroRedundancyOptimizer(model.parameters(), AdamW, state_dict_type="sharded")
    kept = zero.state_dict()
    for _ in range(2):
        zero.load_state_dict(kept)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        zero.step()
        now = zero.state_dict()["state"]
        runs = [run for value in now.values() for run in value["exp_avg"].runs]
        assert all(run.allclose(torch.full_like(run, 0.1)) for run in runs)


def test_a_state_dict_that_the_user_has_is_copied():
    run(2, given_twice)


def test_a_tight_tensor_is_the_same_memory_and_nothing_else():
    memory = torch.arange(240.0)
    images = memory[24:144].view(2, 5, 4, 3).permute(0, 3, 1, 2)  # channels last
    for value in (memory[3:9], images, memory[7], memory[9:9], memory[::2][1:2]):
        found = tight(value)
        assert found.equal(value) and found.stride() == value.stride()
        assert found.untyped_storage().nbytes() == value.nbytes
        found.mul_(-1)
        assert found.equal(value)
    with_gaps = memory[::2]
    assert tight(with_gaps).data_ptr() == with_gaps.data_ptr()


def fsdp(folder, loads):
    model = two_layers()
    fully_shard(model)
    two_steps(folder, loads, model, AdamW(model.parameters(), lr=1e-2))
    return [p.full_tensor().detach() for p in model.parameters()]


def ours(folder, loads):
    model = two_layers()
    zero = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=1e-2)
    two_steps(folder, loads, model, zero)
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("ways", [(fsdp, ours), (ours, fsdp)], ids=["to ours", "to FSDP2"])
def test_checkpoints_of_fsdp2_and_ours_are_alike(folder, ways):
    run(2, ways[0], folder / "one", False)
    [wanted, *_] = run(2, ways[1], folder / "one", True)
    run(3, ways[1], folder / "two", False)  # its own
    [again, *_] = run(2, ways[0], folder / "two", True)
    check(wanted, again)


def in_groups(parent):
    """Two jobs in one: ranks 0 and 2, and ranks 1 and 3, each with a checkpoint of its own."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = groups[rank % 2]
    folder = parent / f"of-{rank % 2}"

    def make():
        torch.manual_seed(rank % 2)
        model = two_layers()
        with torch.no_grad():
            model[0].bias += rank % 2
        return model, ZeroRedundancyOptimizer(model.parameters(), AdamW, mine, lr=1e-2)

    def step(model, zero):
        model(torch.ones(4, 12, dtype=torch.float64)).square().mean().backward()
        zero.step()
        zero.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    model, zero = make()
    step(model, zero)
    save_sharded(folder, model, zero, 1, extra=rank % 2, process_group=mine)
    wanted = step(model, zero)
    again, other = make()
    extra = load_sharded(folder, again, other, process_group=mine)
    return extra, wanted, step(again, other), read_manifest(folder)["world_size"]


def test_groups_of_ranks_save_and_load_on_their_own(folder):
    for rank, (extra, wanted, got, size) in enumerate(run(4, in_groups, folder)):
        assert (extra, size) == (rank % 2, 2)
        assert all(torch.equal(a, b) for a, b in zip(wanted, got, strict=True))


def saves_again(folder):
    """Save two levels of ranks, load that, and a state dict whose keys differ in order; save each."""

    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 20))
        return model, ZeroRedundancyOptimizer(model.parameters(), AdamW, two_level(2))

    model, zero = make()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    zero.step()
    save_sharded(folder / "first", model, zero)
    wanted = full_state_dict(zero, to=None)
    again, other = make()
    load_sharded(folder / "first", again, other)
    save_sharded(folder / "second", again, other)
    resumed = full_state_dict(other, to=None)
    turned = {i: dict(reversed(values.items())) for i, values in wanted["state"].items() if i % 2}
    other.load_state_dict({**wanted, "state": wanted["state"] | turned})
    return wanted, resumed, full_state_dict(other, to=None)


def test_state_is_saved_again_whatever_the_order_of_its_keys(folder):
    for wanted, *others in run(4, saves_again, folder):
        for got in others:
            for index, values in wanted["state"].items():
                assert [*got["state"][index]] == [*values]
                assert all(torch.equal(got["state"][index][key], values[key]) for key in values)
