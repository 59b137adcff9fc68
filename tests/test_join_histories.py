"""Join: whatever happens in blocks and between them, in any order: what one process that sees all
data would have made of it."""

import random
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW, lr_scheduler

from zero_nb.backward.data_parallelism import data_parallel
from zero_nb.backward.ddp_overlap import overlap
from zero_nb.comm.launch import run
from zero_nb.join.join import Join
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer

CLASSES = [
    (AdamW, {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-3}),
    (SGD, {"lr": 0.1, "momentum": 0.9}),
]
DDP_MODES = ["plain", "zero", "unused"]
MODES = [
    *DDP_MODES,
    "overlap",
    "interleaved",
    "parallel",
    "parallel interleaved",
    "parallel hidden",
    "parallel hidden interleaved unused",
]


class Early(Exception):
    """Ends the loops of all ranks that have data."""


class Segment:
    """What happens next: a block, a loop in which all ranks have equal data, or an evaluation on one rank."""

    def __init__(self, chance, size, mode):
        self.kind = chance.choice(["block"] * 6 + ["equal"] * 2 + ["alone"])
        self.seed = chance.randrange(1 << 30)
        longest = chance.choice([1, 3, 6])
        self.lengths = (
            [chance.randint(0, longest) for _ in range(size)]
            if self.kind == "block"
            else [chance.randint(1, 3)] * size
        )
        self.sizes = [chance.randint(1, 4) for _ in range(size)]  # samples in each batch of a rank
        self.by = (
            chance.choice(["world_size", "active", "samples"])
            if self.kind == "block"
            else "world_size"
        )
        self.policy = chance.choice(["shadow"] * 6 + ["stop", "raise"])
        self.loads = chance.random() < 0.3  # by join.loader
        self.every = chance.choice([1, 1, 2, 3])
        self.no_sync = (
            mode not in DDP_MODES or chance.random() < 0.5
        )  # else gradients add up in synchronised backwards
        self.fails = (
            chance.randint(0, longest)
            if chance.random() < 0.1 and self.policy == "shadow"
            else None
        )  # iteration in which all with data raise
        self.nested = chance.random() < 0.1 and self.policy == "shadow"
        self.turned = chance.random() < 0.5
        self.looks = chance.random() < 0.2  # evaluates in between

    def used(self):
        """Count iterations of each rank, and tell whether the loops end with an error."""
        lengths = self.lengths
        if self.kind != "block" or self.policy == "shadow" or len(set(lengths)) == 1:
            used, ends = list(lengths), False
        else:
            used, ends = (
                [min(lengths) if not (self.policy == "raise" and self.loads) else 0] * len(lengths),
                self.policy == "raise",
            )
        if self.kind == "block" and self.fails is not None and self.fails < max(used):
            used, ends = [min(n, self.fails) for n in used], True
        return used, ends

    def batches(self, rank):
        data = torch.Generator().manual_seed(self.seed + rank)
        return [
            torch.randn(self.sizes[rank], 4, generator=data, dtype=torch.float64)
            for _ in range(self.lengths[rank])
        ]


class History:
    """A model, how it is trained, and what happens to it."""

    def __init__(self, seed, size):
        self.chance, self.size = random.Random(seed), size
        torch.manual_seed(seed)
        self.mode = self.chance.choice(MODES)
        self.norm = self.chance.random() < 0.25
        self.net = nn.Sequential(
            nn.Linear(4, 5),
            *([nn.BatchNorm1d(5, track_running_stats=True)] if self.norm else []),
            nn.Tanh(),
            nn.Linear(5, 3),
        ).double()
        self.kind, self.options = self.chance.choice(CLASSES)
        self.zero_first = self.chance.random() < 0.4
        self.to_none = self.chance.random() < 0.7
        self.zero_between = self.zero_first and self.chance.random() < 0.3  # forward and backward
        self.clips = "interleaved" not in self.mode and self.chance.random() < 0.25
        self.averages = self.chance.random() < 0.3  # statistics
        self.bucket_cap_mb = self.chance.choice([25, 1e-4])
        self.schedules = self.chance.random() < 0.3
        self.views = self.chance.random() < 0.3
        self.segments = [
            Segment(self.chance, size, self.mode) for _ in range(self.chance.randint(2, 5))
        ]
        for segment in self.segments:
            if self.norm:
                segment.sizes = [n + 1 for n in segment.sizes]
            if self.schedules:
                segment.fails = None  # after an error schedulers are where their ranks left them

    def zero(self, optimizer):
        optimizer.zero_grad(set_to_none=self.to_none)


class Reference(History):
    """One process that sees the union of the data."""

    def play(self):
        self.optimizer = self.kind(self.net.parameters(), **self.options)
        self.scheduler = lr_scheduler.ExponentialLR(self.optimizer, 0.9) if self.schedules else None
        for segment in self.segments:
            if segment.kind == "alone":
                continue
            used, fails = segment.used()
            data = [segment.batches(rank) for rank in range(self.size)]
            for k in range(max(used)):
                self.iterate(
                    segment,
                    k,
                    [(mine[k], rank) for rank, mine in enumerate(data) if used[rank] > k],
                )
            if fails:
                self.zero(self.optimizer)
        return torch.cat([p.detach().flatten() for p in self.net.parameters()])

    def iterate(self, segment, k, there):
        if self.zero_first and k % segment.every == 0:
            self.zero(self.optimizer)
        losses = [(self.net(x).square().mean(), len(x)) for x, _ in there]
        if segment.by == "samples":
            loss = sum(one * n for one, n in losses) / sum(n for _, n in losses)
        else:
            loss = sum(one for one, _ in losses) / (
                len(there) if segment.by == "active" else self.size
            )
        loss.backward()
        if (k + 1) % segment.every:
            return
        if self.clips:
            nn.utils.clip_grad_norm_(self.net.parameters(), 0.1)
        self.optimizer.step()
        if not self.zero_first:
            self.zero(self.optimizer)
        if self.scheduler:
            self.scheduler.step()


class Trained(History):
    """The same on several ranks."""

    def __init__(self, seed, size, group):
        super().__init__(seed, size)
        self.group, self.rank = group, dist.get_rank(group)

    def play(self):
        net, mode, clip = self.net, self.mode, {"max_grad_norm": 0.1} if self.clips else {}
        if mode == "plain":
            self.optimizer = self.kind(net.parameters(), **self.options)
        else:
            self.optimizer = ZeroRedundancyOptimizer(
                net.parameters(), self.kind, self.group, **self.options
            )
        handle = None
        if mode.startswith("parallel"):
            way = {
                "interleaved": "interleaved" in mode,
                "hidden": "hidden" in mode,
                "find_unused_parameters": "unused" in mode,
            }
            way["buffers"] = "average" if self.averages else "broadcast"
            handle = data_parallel(
                net, self.optimizer, bucket_cap_mb=self.bucket_cap_mb, **way, **clip
            )
            self.model, self.joinable = net, handle
        else:
            ddp = {
                "gradient_as_bucket_view": self.views,
                "find_unused_parameters": mode == "unused",
                "bucket_cap_mb": self.bucket_cap_mb,
            }
            self.model = self.joinable = DDP(net, process_group=self.group, **ddp)
            if mode not in DDP_MODES:
                handle = overlap(
                    self.model, self.optimizer, interleaved=mode == "interleaved", **clip
                )
        self.scheduler = lr_scheduler.ExponentialLR(self.optimizer, 0.9) if self.schedules else None
        self.drives = handle is not None
        self.buffers = []
        for segment in self.segments:
            getattr(self, segment.kind)(segment)
        if handle:
            handle.detach()
        return torch.cat([p.detach().flatten() for p in net.parameters()]), self.buffers

    def alone(self, segment):
        if self.rank:
            return
        net = self.net.eval()
        with torch.no_grad():
            net.forward(torch.ones(2, 4, dtype=torch.float64))  # past hooks, which send buffers
        net.train()

    def equal(self, segment):
        self.loop(segment, segment.batches(self.rank))

    def block(self, segment):
        joinables = [self.joinable, self.optimizer]
        if segment.turned:
            joinables.reverse()
        if self.scheduler:
            joinables.append(self.scheduler)
        clip = (
            {"before_step": lambda optimizer: nn.utils.clip_grad_norm_(self.net.parameters(), 0.1)}
            if self.clips and not self.drives
            else {}
        )
        join = Join(joinables, divide_by=segment.by, policy=segment.policy, **clip)
        data = segment.batches(self.rank)
        fails = segment.used()[1]
        said = ""
        try:
            with join:
                if segment.nested and min(segment.lengths):
                    with Join(joinables, divide_by=segment.by, **clip):
                        self.loop(segment, data[:1])
                    self.loop(segment, data[1:], 1)
                else:
                    self.loop(segment, join.loader(data) if segment.loads else data)
        except (Early, RuntimeError) as error:
            said = str(error)
            if not fails:
                raise
        assert bool(said) == fails, "a block fails on all ranks or on none"
        if not fails:
            self.buffers += [b.clone() for b in self.net.buffers()]
        elif not self.zero_first:
            self.zero(self.optimizer)

    def loop(self, segment, data, first=0):
        for k, x in enumerate(data, first):
            if segment.kind == "block" and segment.fails == k:
                raise Early(f"iteration {k}")
            if self.zero_first and not self.zero_between and k % segment.every == 0:
                self.zero(self.optimizer)
            last = (k + 1) % segment.every == 0
            if segment.looks and not self.norm:
                with torch.no_grad():
                    self.model(x)
            with nullcontext() if last or not segment.no_sync else self.joinable.no_sync():
                out = self.model(x)
                if self.zero_between and k % segment.every == 0:
                    self.zero(self.optimizer)
                out.square().mean().backward()
            if not last:
                continue
            if self.clips and not self.drives and segment.kind != "block":
                nn.utils.clip_grad_norm_(self.net.parameters(), 0.1)
            self.optimizer.step()
            if not self.zero_first:
                self.zero(self.optimizer)
            if self.scheduler:
                self.scheduler.step()


def play(seeds, size, others):
    """Go through histories on all ranks but the first few, which take no part."""
    group = dist.new_group(range(others, others + size)) if others else dist.group.WORLD
    return (
        [Trained(seed, size, group).play() for seed in seeds] if dist.get_rank() >= others else []
    )


def apart(seed, size, ranks):
    """How far the ranks are from one process."""
    wanted = Reference(seed, size).play()
    for _, buffers in ranks:
        assert all(map(torch.equal, buffers, ranks[0][1])), (
            seed,
            "buffers differ at the end of a block",
        )
    return max((params - wanted).abs().max().item() for params, _ in ranks)


@pytest.mark.turns(4)
@pytest.mark.parametrize("first", range(0, 40, 10))
@pytest.mark.parametrize(("size", "others"), [(2, 0), (3, 0), (4, 0), (2, 2)])
def test_any_history_of_blocks_ends_where_one_process_ends(size, others, first):
    """Ten histories of ranks that are a group of their own where there are others."""
    first += 100 * (size + others)
    seeds = range(first, first + 10)
    ranks = run(others + size, play, seeds, size, others, timeout=300)[others:]
    for i, seed in enumerate(seeds):
        assert apart(seed, size, [rank[i] for rank in ranks]) < 1e-12, (
            seed,
            vars(Reference(seed, size)),
        )
