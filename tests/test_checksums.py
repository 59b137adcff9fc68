"""Changes that keep sums of words: signs, exchanges and shifts of rows, columns and blocks, in every dtype; and
tensors that do not lie in memory as one run."""

import pytest
import torch
from common import run_each
from common.modes import MODES
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from zero_nb import ZeroRedundancyOptimizer, run, watch_divergence
from zero_nb.verify.checksums import DigestPlan, digests
from zero_nb.verify.divergence import DivergenceError

LANES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.float8_e5m2, torch.complex64, torch.complex128, torch.int64, torch.uint8),
)
SHAPES = ((8, 16), (33, 31), (128, 1024), (257, 255), (1024, 64))


def chess(rows, columns):
    return (torch.arange(rows)[:, None] + torch.arange(columns)) % 2


def parts(rows, columns):
    """Give masks of a matrix by name: lines, blocks and patterns of even and odd numbers of elements."""
    every = slice(None)
    cuts = {f"column {i}": (every, slice(i, i + 1)) for i in range(9)}
    cuts |= {f"{n} columns": (every, slice(3, 3 + n)) for n in (2, 5)}
    cuts |= {f"{n} rows": (slice(4, 4 + n), every) for n in (1, 2, 3)}
    cuts |= {f"block of {n}": (slice(1, 1 + n), slice(2, 2 + n)) for n in (2, 3, 7)}
    cuts |= {"whole": (every, every), "half": (slice(rows // 2), every)}
    cuts |= {"every second row": (slice(None, None, 2), every)}
    found = {"chess board": chess(rows, columns) == 0}
    for name, cut in cuts.items():
        found[name] = torch.zeros(rows, columns, dtype=torch.bool)
        found[name][cut] = True
    return found


def numbers(kind, rows, columns):
    if kind == "random":
        return 40 * torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    if kind == "one in each row":
        return torch.eye(1024)[:rows, :columns]
    return {
        "zeros": torch.zeros(rows, columns),
        "signs": chess(rows, columns) * 2.0 - 1,
        "0 and 2": chess(rows, columns) * 2.0,
    }[kind]


def changes(lanes, signed):
    """Give what may become of a matrix of integers, by name."""
    for name, mask in parts(*lanes.shape).items():
        if signed:
            yield f"signs of {name}", lanes.where(~mask, lanes ^ torch.iinfo(lanes.dtype).min)
        yield f"zeros in {name}", lanes.masked_fill(mask, 0)
        yield f"complement of {name}", lanes.where(~mask, ~lanes)
    for name, axes in (("rows", 0), ("columns", 1)):
        for one, other in ((0, 1), (1, 7), (2, 5)):
            places = torch.arange(lanes.shape[axes])
            places[[one, other]] = places[[other, one]]
            yield f"exchange of {name} {one}, {other}", lanes.index_select(axes, places)
        for by in (1, 2, 8):
            yield f"roll of {name} by {by}", lanes.roll(by, axes)
    yield "roll", lanes.roll(1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_digests_see_changes_that_keep_sums(dtype):
    missed = []
    for shape in SHAPES:
        for kind in ("random", "zeros", "signs", "0 and 2", "one in each row"):
            values = numbers(kind, *shape).abs() if dtype == torch.uint8 else numbers(kind, *shape)
            made = values.to(dtype)
            real = torch.view_as_real(made) if dtype.is_complex else made
            lanes = real.view(LANES[real.element_size()]).flatten(1)
            before = digests([lanes])
            assert torch.equal(before, digests([made]))
            for what, changed in changes(lanes, signed=dtype.is_floating_point or dtype.is_complex):
                if not torch.equal(changed, lanes) and torch.equal(digests([changed]), before):
                    missed.append((shape, kind, what))
    assert missed == []


def test_digests_see_words_that_change_places_anywhere_in_a_row():
    words = torch.zeros(16, 1024, dtype=torch.int64)  # large, in rows of 1,024 words
    words[3, 0] = -(1 << 63)
    found = [digests([words.roll(i, 1)]).item() for i in range(1024)]
    assert len(set(found)) == 1024


def negated(dtype, column):
    torch.manual_seed(0)
    model = nn.Linear(256, 256, dtype=dtype)
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    call = DDP(model)
    if torch.distributed.get_rank() == 1:
        with torch.no_grad():
            model.weight[:, column].neg_()
    try:
        watch_divergence(call, zero, every=1)
    except Exception as error:
        return str(error)
    return None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("column", [2, 3])
def test_a_watch_sees_the_sign_of_a_column(dtype, column):
    for said in run(2, negated, dtype, column):
        assert said is not None and "parameter weight on ranks 0, 1" in said


COMPLEX = torch.complex64
NOT_IN_ONE_RUN = {
    "every second": lambda: torch.zeros(8)[::2],
    "one of two": lambda: torch.zeros(2)[::2],
    "column": lambda: torch.zeros(4, 2)[:, 0],
    "columns": lambda: torch.zeros(4, 4)[:, :2],
    "bytes": lambda: torch.zeros(8, dtype=torch.uint8)[::2],
    "many columns": lambda: torch.zeros(300, 400)[:, 1:300],
    "many bytes": lambda: torch.zeros(400_000, dtype=torch.uint8)[::2],
    "expanded": lambda: torch.zeros(1).expand(4),
    "expanded rows": lambda: torch.zeros(1, 4).expand(300, 4),
    "conjugated": lambda: torch.zeros(6, dtype=COMPLEX).conj(),
    "negated": lambda: torch.zeros(6, dtype=COMPLEX).conj().imag,
}


@pytest.mark.parametrize("name", NOT_IN_ONE_RUN)
def test_a_plan_reads_what_a_tensor_holds_now(name):
    tensor = NOT_IN_ONE_RUN[name]()
    plan = DigestPlan([torch.ones(5), tensor, torch.zeros(0)])
    before = plan.digests()
    tensor[0] = 5
    after = plan.digests()
    assert (before != after).tolist() == [False, True, False]
    copied = tensor.contiguous().resolve_conj().resolve_neg().clone()
    assert after[1] == digests([copied])[0]


class Running(nn.Module):
    """Updates a buffer with gaps in each forward, and has another one that training writes."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(12, 4)
        self.register_buffer("stats", NOT_IN_ONE_RUN[kind]())
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        with torch.no_grad():
            self.stats.add_(1)
        return self.layer(x)


def running(mode, kind, does):
    """Train and, before some steps, write one buffer or flip bits of the other one on rank 1."""
    model = Running(kind)

    def make(module):
        return ZeroRedundancyOptimizer(model.named_parameters(), torch.optim.AdamW, lr=0.1)

    training = MODES[mode].attach(model, make)
    watch_divergence(training.call, training.optimizer, every=1)
    for step in range(1, 6):
        training.optimizer.zero_grad()
        training.call(torch.ones(2, 12)).sum().backward()
        if does == "writes":
            model.seen.add_(1)
        if does == "flips" and step == 3 and torch.distributed.get_rank() == 1:
            model.stats.data[1] = -1
        try:
            training.optimizer.step()
            training.optimizer.wait_for_driver()
        except DivergenceError as error:
            return step, error.found[0].name, error.found[0].ranks
    return None


def test_a_watch_reads_buffers_with_gaps_as_they_are_now():
    kinds = ("column", "columns")
    modes = ("zero1", "zero2")
    ways = [(mode, kind, does) for mode in modes for kind in kinds for does in ("writes", "flips")]
    for way, found in run_each(2, running, {way: way for way in ways}).items():
        step = 4 if way[0] == "zero2" else 3  # whose step 3 is taken inside backward
        expected = (step, f"stats, before step {step}", (1,)) if way[2] == "flips" else None
        assert found == [expected] * 2, (way, found)
