"""A folder that was saved with one policy, bucket size and master dtype is loaded with any other; what a save sends."""

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from zero_nb.checkpoint.full import full_state_dict
from zero_nb.checkpoint.sharded import load_sharded, save_sharded
from zero_nb.comm.launch import run
from zero_nb.comm.recording import record
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer

OPTIONS = {
    "even": {"shard": "even"},
    "whole": {"shard": "whole"},
    "greedy": {"shard": "greedy"},
    "small buckets": {"bucket_cap_mb": 1e-4},
    "views": {"parameters_as_bucket_view": True},
}
SAVED = (
    (None, "even"),
    (torch.float32, "even"),
    (torch.float32, "whole"),
    (torch.float64, "small buckets"),
)


def make(seed, master, options):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(12, 33), nn.Tanh(), nn.Linear(33, 7)).bfloat16()
    given = {"lr": 1e-2, "master_dtype": master, **OPTIONS[options]}
    return model, ZeroRedundancyOptimizer(model.named_parameters(), AdamW, **given)


def step(model, zero, seed):
    data = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=data).to(p.dtype)
    zero.step()
    return [p.detach().clone() for p in model.parameters()]


def save(path, master, options):
    model, zero = make(0, master, options)
    for seed in range(3):
        weights = step(model, zero, seed)
    save_sharded(path, model, zero)
    return full_state_dict(zero, None)["state"], weights, step(model, zero, 9)


def load_with_all(path):
    found = {}
    for master in (None, torch.float32, torch.float64):
        for options in OPTIONS:
            model, zero = make(1, master, options)
            load_sharded(path, model, zero)
            state = full_state_dict(zero, None)["state"]
            weights = [p.detach().clone() for p in model.parameters()]
            found[master, options] = state, weights, step(model, zero, 9)
    return found


@pytest.mark.turns(4)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("master", "options"), SAVED, ids=str)
def test_a_folder_is_loaded_with_any_policy_bucket_size_and_master_dtype(
    folder, master, options, ranks
):
    [(saved, weights, after), *_] = run(2, save, folder / "one", master, options)
    for found in run(ranks, load_with_all, folder / "one"):
        assert len(found) == 3 * len(OPTIONS)
        for (wide, _), (state, got, later) in found.items():
            assert all(map(torch.equal, weights, got))
            for index, values in saved.items():
                own = state[index]
                assert own.keys() - {"master_param"} == values.keys() - {"master_param"}
                assert ("master_param" in own) == (wide is not None)
                copy = {"master_param": weights[index], **values}
                for key, value in own.items():
                    kept = value.dtype if key == "step" else wide or torch.bfloat16
                    assert value.dtype == kept and torch.equal(value, copy[key].to(kept)), key
            if master in (None, wide):
                assert all(map(torch.equal, after, later))


def bytes_of_a_save(path):
    with record() as group:
        model = nn.Linear(500, 500)  # 1 MB
        zero = ZeroRedundancyOptimizer(model.named_parameters(), AdamW, group)
        model(torch.ones(1, 500)).sum().backward()
        zero.step()
        with group.recording() as log:
            save_sharded(path, model, zero, 1)
        return sum(event.bytes for event in log if event.parent is None)


def test_a_sharded_save_sends_no_tensors(folder):
    for sent in run(2, bytes_of_a_save, folder / "one"):
        assert 0 < sent < 10_000, sent
