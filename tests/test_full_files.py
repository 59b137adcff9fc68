"""Full state dicts that do not fit, or change while they are read: an error on every rank, and what it says."""

import gc
import os
import pickle
import re
from collections import Counter, OrderedDict
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy

import numpy as np
import pytest
import torch
import torch.distributed as dist
from common import caught
from torch import nn
from torch.optim import AdamW

from zero_nb.apps.peak_memory import peak_bytes
from zero_nb.checkpoint import checksums
from zero_nb.checkpoint.convert import convert_checkpoint, verify_checkpoint
from zero_nb.checkpoint.full import (
    full_state_dict,
    load_full_state_dict,
    read_full,
    shard_full_optim_state_dict,
)
from zero_nb.comm.launch import run
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer

RANKS = 2


class Grown(nn.Module):
    """Two layers of one shape, of which the first is given up."""

    def __init__(self):
        super().__init__()
        self.old = nn.Linear(3, 3)
        self.new = nn.Linear(3, 3)

    def of(self, layer):
        return [(name, p) for name, p in self.named_parameters() if name.startswith(layer)]


def one_group_less(names):
    """Give a state dict of both layers without the group of the first, whose state is left."""
    model = Grown()
    groups = [{"params": model.of("old")}, {"params": model.of("new")}]
    optimizer = AdamW(groups)
    for name, p in model.named_parameters():
        p.grad = torch.full_like(p, 9.0 if name.startswith("old") else 1.0)
    optimizer.step()
    full = optimizer.state_dict()
    left = full["param_groups"][1]
    if not names:
        left = {key: value for key, value in left.items() if key != "param_names"}
    return {**full, "param_groups": [left]}


def load_what_is_left(path):
    zero = ZeroRedundancyOptimizer([{"params": Grown().of("new")}], AdamW)
    full = torch.load(path)
    return [
        caught(lambda: load_full_state_dict(zero, path)),
        caught(lambda: load_full_state_dict(zero, full)),
        caught(lambda: zero.load_state_dict(full)),
    ]


@pytest.mark.parametrize("names", [True, False])
def test_state_that_a_dropped_group_left_is_an_error_with_and_without_names(folder, names):
    full = one_group_less(names)
    torch.save(full, folder / "left.pt")
    for said in run(RANKS, load_what_is_left, folder / "left.pt"):
        for words in said:
            assert re.search("ValueError.*has state of 0, which is in none of its groups", words)
    with pytest.raises(ValueError, match="in none of its param groups"):
        verify_checkpoint(folder / "left.pt")
    model = Grown()
    group = {"params": [p for _, p in model.of("new")]}
    if names:
        with pytest.raises(ValueError, match="state of 0, which is in none of its groups"):
            shard_full_optim_state_dict(full, model, [group])


def named(layers, **changes):
    optimizer = AdamW(layers.named_parameters())
    for p in layers.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    full = optimizer.state_dict()
    return {**full, "param_groups": [{**full["param_groups"][0], **changes}]}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"params": [0]}, "'param_names' of param group 0 must be a list of 1 texts"),
        ({"params": [0, 1, 2]}, "'param_names' of param group 0 must be a list of 3 texts"),
        (
            {"param_names": ["weight", 1]},
            "'param_names' of param group 0 must be a list of 2 texts",
        ),
        ({"param_names": ["weight", "weight"]}, "has name 'weight' 2 times in its param groups"),
        ({"params": [0, 0]}, "has parameter 0 2 times in its param groups"),
    ],
)
def test_names_that_are_not_those_of_the_parameters_are_told_as_verify_does(folder, changes, words):
    path = folder / "names.pt"
    torch.save(named(nn.Linear(3, 3), **changes), path)

    def load():
        zero = ZeroRedundancyOptimizer(nn.Linear(3, 3).named_parameters(), AdamW)
        return caught(lambda: load_full_state_dict(zero, path))

    for said in run(RANKS, load):
        assert said.startswith("ValueError") and words in said and str(path) in said
    for read in (verify_checkpoint, lambda path: convert_checkpoint(path, folder / "other.pt")):
        with pytest.raises(ValueError, match=re.escape(words)):
            read(path)


LAYERS = 6


def wide(sharded=True, seed=0):
    """Make a model of some tensors that a rank reads one by one, and step it once."""
    torch.manual_seed(seed)
    model = nn.Sequential(*[nn.Linear(50, 50) for _ in range(LAYERS)])
    params = model.named_parameters()
    optimizer = ZeroRedundancyOptimizer(params, AdamW) if sharded else AdamW(params)
    for p in model.parameters():
        p.grad = torch.full_like(p, seed + 1.0)
    optimizer.step()
    return model, optimizer


def cut_off_at_read(path, number):
    """Load a file of which rank 0 cuts all but the beginning off, before a read of its elements."""
    _, zero = wide(seed=1)
    before = full_state_dict(zero, None)
    reads = []
    read_run = checksums.read_run

    def read(file, start, run):
        if len(reads) == number:
            os.truncate(path, 4096)
        reads.append(start)
        return read_run(file, start, run)

    load_state_dict = ZeroRedundancyOptimizer.load_state_dict

    # no rank reads before the cut where it comes before the first read
    def load(zero, state_dict):
        dist.barrier()
        if dist.get_rank() == 0:
            checksums.read_run = read
            if not number:
                os.truncate(path, 4096)
        dist.barrier()
        return load_state_dict(zero, state_dict)

    ZeroRedundancyOptimizer.load_state_dict = load  # of this process, which ends after this
    said = caught(lambda: load_full_state_dict(zero, path))
    after = full_state_dict(zero, None)
    same = all(
        torch.equal(after["state"][i][key], value)
        for i, values in before["state"].items()
        for key, value in values.items()
    )
    return said, same


@pytest.mark.parametrize("number", [0, 1, 5])
def test_a_file_that_is_cut_off_while_it_is_loaded_is_an_error_on_every_rank(folder, number):
    path = folder / "cut.pt"
    torch.save(wide(sharded=False)[1].state_dict(), path)
    for said, same in run(RANKS, cut_off_at_read, path, number):
        assert re.match("OSError.*was cut off at 4096 bytes while it was loaded", said), said
        assert str(path) in said and same


@pytest.mark.parametrize("source", ["source.pt", "source.safetensors", "sharded", "deepspeed"])
@pytest.mark.parametrize("form", ["full", "safetensors", "sharded", "deepspeed"])
def test_a_file_that_is_cut_off_while_it_is_converted_is_an_error(folder, source, form):
    model, adamw = wide(sharded=False)
    weights = {"model": model.state_dict(), "optimizer": adamw.state_dict()}
    torch.save(weights, folder / "source.pt")
    source = folder / source
    if source.suffix != ".pt":
        convert_checkpoint(folder / "source.pt", source, None if source.suffix else source.name)
    before = sorted(folder.iterdir())

    def cut(nbytes):
        files = [source] if source.is_file() else [p for p in source.rglob("*") if p.is_file()]
        for path in files:
            os.truncate(path, min(4096, path.stat().st_size))

    [said] = run(
        1,
        lambda: caught(
            lambda: convert_checkpoint(source, folder / "other", form, check=False, advance=cut)
        ),
    )
    assert re.match("OSError.*was cut off at 4096 bytes while it was loaded", said), said
    assert sorted(folder.iterdir()) == before


def peak_of_a_load(path, ranks):
    model = nn.Sequential(*[nn.Linear(2000, 2000) for _ in range(5)])
    zero = ZeroRedundancyOptimizer(model.named_parameters(), AdamW)
    own = 2 * 4 * sum(p.numel() for p in model.parameters()) / ranks
    return peak_bytes(torch.device("cpu"), lambda: load_full_state_dict(zero, path)) - own


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="Linux tells the peak")
def test_a_rank_loads_its_part_of_a_file_in_the_memory_of_that_part(folder):
    model = nn.Sequential(*[nn.Linear(2000, 2000) for _ in range(5)])
    optimizer = AdamW(model.named_parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    torch.save(optimizer.state_dict(), folder / "large.pt")  # 153 MiB
    for besides in run(RANKS, peak_of_a_load, folder / "large.pt", RANKS):
        assert besides < 64e6, besides


UNUSUAL = {
    "expanded": lambda: torch.ones(3).expand(2, 3),
    "turned": lambda: torch.arange(6.0).view(2, 3).t(),
    "a view that begins later": lambda: torch.arange(9.0).view(3, 3)[1:, 1:],
    "conjugate": lambda: torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(4), 0.5, 0, torch.qint8),
    "empty": lambda: torch.empty(0, 4),
    "one element": lambda: torch.tensor([[7.0]]),
}


@pytest.mark.parametrize("kind", UNUSUAL)
def test_a_tensor_of_any_kind_is_read_from_a_file(folder, kind):
    value = UNUSUAL[kind]()
    other = torch.arange(4.0)
    torch.save({"state": {0: [value, other]}, "param_groups": ()}, folder / "kind.pt")
    (folder / "kind.pt").rename(folder / "other.pt")
    found, beside = read_full(folder / "other.pt")["state"][0]
    (folder / "other.pt").unlink()
    assert found.layout == value.layout and found.shape == value.shape
    dense = (
        v.dequantize() if v.is_quantized else v.to_dense().resolve_conj() for v in (found, value)
    )
    assert torch.equal(*dense) and torch.equal(beside, other)


def test_a_tensor_that_is_read_when_it_is_used_does_what_a_tensor_does(folder):
    value = torch.arange(24.0).view(4, 6)
    torch.save({"state": {0: value}, "param_groups": []}, folder / "late.pt")
    late = read_full(folder / "late.pt")["state"][0]
    (folder / "late.pt").unlink()
    for use in (
        lambda t: t.t()[1:, ::2].flatten(),
        lambda t: torch.cat([t, t.double(), torch.zeros(1, 6)]),
        lambda t: torch.cat([t, t], dim=1),
        lambda t: torch.stack([row.sum() for row in t]),
        lambda t: torch.zeros(3, 4, 6).copy_(t),
        lambda t: torch.zeros(4, 6, dtype=torch.int64).copy_(t),
        lambda t: t.split(2)[1].to(torch.bfloat16),
        lambda t: deepcopy(t).add_(1),
        lambda t: t[2:].clone().numpy(),
        lambda t: pickle.loads(pickle.dumps(t)),
        lambda t: torch.tensor(t[1].tolist()),
        lambda t: torch.where(t > 3, t, -t),
    ):
        assert torch.equal(torch.as_tensor(use(late)), torch.as_tensor(use(value)))
    with pytest.raises(RuntimeError, match=r"change a clone\(\) of it"):
        late[0].zero_()


@pytest.mark.filterwarnings("error")
def test_the_file_is_open_as_long_as_a_tensor_of_it_is_used(folder):
    torch.save({"state": {0: torch.ones(9)}, "param_groups": []}, folder / "held.pt")
    count = lambda: len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0
    before = count()
    full = read_full(folder / "held.pt")
    part = full["state"][0][3:]
    del full
    assert part.sum() == 6 and count() == before + (count() > 0)
    del part
    gc.collect()
    assert count() == before


def no_safetensors(path):
    _, zero = wide()
    said = caught(lambda: full_state_dict(zero, path))
    full_state_dict(zero, path.with_suffix(".pt"))
    return said


def test_a_full_state_dict_is_not_written_under_the_name_of_another_format(folder):
    for said in run(RANKS, no_safetensors, folder / "last.safetensors"):
        assert re.match("ValueError.*last.safetensors.*zero-nb ckpt convert", said), said
    assert [path.name for path in folder.iterdir()] == ["last.pt"]


WRITES = {
    "a list": lambda t: torch._foreach_mul_([t], 2),
    "an item": lambda t: t.__setitem__(0, 1.0),
    "out": lambda t: torch.add(torch.ones(4, 6), 1, out=t),
    "a part": lambda t: t[1:].zero_(),
    "shared": lambda t: t.share_memory_(),
    "applied": lambda t: t.apply_(abs),
    "mapped": lambda t: t.map_(torch.ones(4, 6), max),
    "mapped with two": lambda t: t.map2_(torch.ones(4, 6), torch.ones(4, 6), max),
    "data": lambda t: setattr(t, "data", torch.zeros(4, 6)),
    "numbers of complex ones": lambda t: torch.view_as_complex(t.view(4, 3, 2)).real.zero_(),
}


@pytest.mark.parametrize("how", WRITES)
def test_whatever_would_change_what_is_in_a_file_is_refused(folder, how):
    torch.save({"state": {0: torch.ones(4, 6)}, "param_groups": []}, folder / "late.pt")
    late = read_full(folder / "late.pt")["state"][0]
    with pytest.raises(RuntimeError, match=r"late.pt each time it is used; change a clone\(\)"):
        WRITES[how](late)


@pytest.mark.parametrize("read", [lambda t: t.numpy(), np.asarray, lambda t: t[1:].numpy()])
def test_an_array_of_what_is_in_a_file_is_read_only_and_a_copy_is_not(folder, read):
    torch.save({"state": {0: torch.ones(4, 6)}, "param_groups": []}, folder / "late.pt")
    late = read_full(folder / "late.pt")["state"][0]
    with pytest.raises(ValueError, match="read-only"):
        read(late)[0] = 2
    for copy in (np.array(late), np.asarray(late, dtype=np.float64), read(late).copy()):
        copy[0] = 2
    assert torch.equal(late, torch.ones(4, 6))


@pytest.mark.parametrize("kind", [{"foreach": True}, {"fused": True}, {"foreach": False}])
def test_a_plain_optimizer_does_not_lose_its_steps_in_a_file(folder, kind):
    p = nn.Parameter(torch.ones(4, 6))
    p.grad = torch.ones(4, 6)
    optimizer = AdamW([p], **kind)
    optimizer.step()
    torch.save(optimizer.state_dict(), folder / "plain.pt")
    optimizer.load_state_dict(read_full(folder / "plain.pt"))
    with pytest.raises(RuntimeError, match=r"change a clone\(\)"):
        optimizer.step()


COMPUTED = (
    lambda t: t.conj() + 0,
    lambda t: t @ t.mH,
    lambda t: t.imag + t.conj().imag,
    lambda t: t.view(torch.float32),
    lambda t: torch.view_as_real(t),
)


def test_a_view_that_is_computed_and_a_cast_under_inference_mode_are_right(folder):
    values = [torch.randn(4, 4, dtype=torch.complex64), torch.randn(64).bfloat16()]
    torch.save({"state": {0: values}, "param_groups": []}, folder / "late.pt")
    late, half = read_full(folder / "late.pt")["state"][0]
    for use in COMPUTED:
        assert torch.equal(use(late), use(values[0]))
    with torch.inference_mode():
        for use in (*COMPUTED, lambda t: t.reshape(-1), lambda t: t.contiguous()[1:]):
            assert torch.equal(use(late).resolve_conj(), use(values[0]).resolve_conj())
        assert torch.equal(half.float().norm(), values[1].float().norm())


def test_numpy_and_dlpack_get_the_elements(folder):
    value = torch.arange(24.0).view(4, 6)
    torch.save({"state": {0: value}, "param_groups": []}, folder / "late.pt")
    late = read_full(folder / "late.pt")["state"][0]
    for use in (lambda t: t.numpy(), np.asarray, np.from_dlpack, torch.from_dlpack):
        assert torch.equal(torch.as_tensor(use(late)), value)
    assert torch.equal(torch.cat([torch.empty(0), late.flatten()]), value.flatten())


def test_what_is_no_plain_dict_list_or_tuple_is_read_as_torch_reads_it(folder):
    pair = torch.ones(3)
    saved = {
        "ordered": OrderedDict(a=torch.ones(2)),
        "size": torch.Size([2, 3]),
        "parameter": nn.Parameter(torch.ones(2)),
        "twice": [pair, pair],
    }
    torch.save({"state": {0: saved}, "param_groups": []}, folder / "kinds.pt")
    found = read_full(folder / "kinds.pt")["state"][0]
    assert {key: type(value) for key, value in found.items()} == {
        key: type(value) for key, value in saved.items()
    }
    assert found["twice"][0] is found["twice"][1] and found["parameter"].requires_grad
    torch.save({"state": {0: {"twice": [pair, pair]}}, "param_groups": []}, folder / "twice.pt")
    one, other = read_full(folder / "twice.pt")["state"][0]["twice"]
    assert one is other and type(one) is checksums.FileTensor


def test_containers_keep_their_types_and_a_file_is_read_when_it_is_used(folder):
    value = torch.ones(3)
    named = OrderedDict(a=value)
    named._metadata = {"version": [value]}
    saved = {
        "ordered": named,
        "again": named,
        "counts": Counter(a=2),
        "set": {1, 2},
        "tensors": {value},
        "bytes": bytearray(b"ab"),
        "layout": torch.strided,
    }
    torch.save({"state": {0: saved}, "param_groups": []}, folder / "kinds.pt")
    found = read_full(folder / "kinds.pt")["state"][0]
    assert [*map(type, found.values())] == [*map(type, saved.values())]
    assert found["again"] is found["ordered"]
    for key in ("counts", "set", "bytes", "layout"):
        assert found[key] == saved[key]
    [late] = found["tensors"]
    assert type(late) is checksums.FileTensor and torch.equal(late, value)
    assert found["ordered"]["a"] is late
    assert found["ordered"]._metadata["version"] == [late]


def read_often(state, other):
    for _ in range(100):
        for i, value in other.items():
            if not torch.equal(state[i] + 0, value):
                return f"{i} is wrong"
    return ""


def test_threads_and_forked_ranks_may_read_one_file_at_once(folder):
    values = {i: torch.full((70_000,), float(i)) for i in range(4)}
    torch.save({"state": values, "param_groups": []}, folder / "many.pt")
    state = read_full(folder / "many.pt")["state"]
    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(read_often, state, values) for _ in range(4)]
    assert [each.result() for each in found] == [""] * 4
    assert run(3, read_often, state, values) == [""] * 3


def hooked(path):
    _, zero = wide()

    def doubles(_, state):
        for values in state["state"].values():
            values["exp_avg"].mul_(2)

    handle = zero.register_load_state_dict_pre_hook(doubles)
    load_full_state_dict(zero, path)
    handle.remove()
    return zero.consolidate_state_dict(to=None) or zero.state_dict()


def test_a_hook_of_the_users_may_change_what_is_loaded(folder):
    run(RANKS, lambda: full_state_dict(wide()[1], folder / "last.pt"))
    saved = torch.load(folder / "last.pt")["state"]
    for found in run(RANKS, hooked, folder / "last.pt"):
        for i, values in found["state"].items():
            assert torch.equal(values["exp_avg"], saved[i]["exp_avg"] * 2)


CHANGES = {
    "in place": lambda t: t.fill_(7),
    "data": lambda t: setattr(t, "data", torch.full_like(t, 7)),
    "numpy": lambda t: t.numpy().fill(7),
    "dlpack": lambda t: torch.from_dlpack(t).fill_(7),
}


def change(state, how):
    for values in state["state"].values():
        CHANGES[how](values["exp_avg"])


class Changing(ZeroRedundancyOptimizer):
    """Changes what is loaded before it is."""

    def load_state_dict(self, state_dict):
        change(state_dict, self.how)
        super().load_state_dict(state_dict)


def changed(path, how):
    """Load a file where a class, an object's own method and a hook change it; give what is loaded."""
    found = []
    for kind in (Changing, ZeroRedundancyOptimizer, ZeroRedundancyOptimizer):
        model = nn.Linear(50, 50)
        zero = kind(model.named_parameters(), AdamW)
        zero.how = how
        if len(found) == 1:
            load = zero.load_state_dict
            zero.load_state_dict = lambda state, load=load: (change(state, how), load(state))
        elif len(found) == 2:
            zero.register_load_state_dict_pre_hook(lambda _, state: change(state, how))
        load_full_state_dict(zero, path)
        state = full_state_dict(zero, None)["state"]
        found.append({n for values in state.values() for n in values["exp_avg"].unique().tolist()})
    return found


@pytest.mark.parametrize("how", CHANGES)
def test_code_of_the_users_may_change_what_is_loaded_from_a_file(folder, how):
    model = nn.Linear(50, 50)
    optimizer = AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    torch.save(optimizer.state_dict(), folder / "last.pt")
    assert run(RANKS, changed, folder / "last.pt", how) == [[{7.0}] * 3] * RANKS


def test_the_error_of_a_disk_names_the_file(tmp_path):
    (tmp_path / "a folder").mkdir()
    with open(tmp_path / "a file", "wb+") as file:
        os.dup2(os.open(tmp_path / "a folder", os.O_RDONLY), file.fileno())
        with pytest.raises(IsADirectoryError, match="a file"):
            checksums.read_run(file, 0, torch.empty(4))
