"""Changes that keep sums of words: signs, exchanges and shifts of rows, columns and blocks, in every dtype."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from zero_nb import ZeroRedundancyOptimizer, run, watch_divergence
from zero_nb.verify.checksums import digests

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
