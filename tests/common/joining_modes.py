"""Models that are trained in a `Join` block, with steps inside backward."""

import torch
from torch.optim import AdamW

from common import largest_gap, run_each
from common.modes import MODES, VARIANTS, Mode
from zero_nb.backward.data_parallelism import data_parallel
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer

ORDERS = {
    "model first": lambda model, zero: [model, zero],
    "optimizer first": lambda model, zero: [zero, model],
    "model alone": lambda model, _: [model],
}


def prepared(mode, net, kind=AdamW, group=None, zero=None, ddp=None, parallel=None, **options):
    """Give the network as it is called, its optimizer, what is joined, and the handle of the steps."""

    def make(model):
        return ZeroRedundancyOptimizer(net.parameters(), kind, group, lr=1e-2, **(zero or {}))

    ddp = {"bucket_cap_mb": 1e-4, **(ddp or {})}
    parallel = {"bucket_cap_mb": 1e-4, "cut_mb": 25.0, **(parallel or {})}
    made = EVERY[mode].attach(net, make, group, ddp, parallel, **options)
    return made.call, made.optimizer, made.joinable, made.handle


def same(ranks, wanted, eps=1e-6, state=None):
    """All ranks hold the same, to the bit, and what is wanted."""
    for params, fine, buffers, mine in ranks:
        assert (
            fine
            and largest_gap(params, ranks[0][0]) == 0
            and all(map(torch.equal, buffers, ranks[0][2]))
        )
        assert largest_gap(params, wanted) < eps, largest_gap(params, wanted)
        for i, found in (state or {}).items():
            for key, value in found.items():
                assert (
                    largest_gap(
                        torch.as_tensor(value, dtype=torch.float64),
                        torch.as_tensor(mine[i][key]).double(),
                    )
                    < eps
                ), (i, key)


EVERY = {
    **{name: mode for name, mode in MODES.items() if mode.attaches},
    **VARIANTS,
    "zero2, one bucket": Mode(False, data_parallel, {"bucket_cap_mb": 8.0}),
    "zero2, looks for unused": Mode(False, data_parallel, {"find_unused_parameters": True}),
}
KEEPS_MEANS = {"zero1-overlap, a hook of the user's"}  # gradients that their hook has averaged stay
# one of each way in which a bucket lives
FEW = ["zero1-overlap", "zero1-overlap, interleaved", "zero2", "zero2-interleaved, hidden"]


def in_modes(size, f, *args, modes=FEW, **kwargs):
    """Run a function in several modes; what the ranks returned, by mode."""
    return run_each(size, lambda mode: f(mode, *args, **kwargs), {mode: (mode,) for mode in modes})


SETTINGS = [
    {"static_graph": True},
    {"find_unused_parameters": True},
    {"gradient_as_bucket_view": True},
]
