"""Every collective of a group, and every mode of training, on any device; and gloo on the CPU as if all
tensors lay on another device."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW

from common.models import network
from common.modes import MODES
from zero_nb.comm import collectives, exchange
from zero_nb.comm.coalescing import coalescing_manager
from zero_nb.comm.groups import Group
from zero_nb.comm.recording import record
from zero_nb.comm.shared_memory import SharedMemory
from zero_nb.comm.subgroups import two_level
from zero_nb.optim.optimizer import ZeroRedundancyOptimizer

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.int16, torch.complex64)


class Maker:
    """Makes tensors of small whole numbers, which differ between ranks and whose sums are exact."""

    def __init__(self, group, device, dtype):
        self.group, self.device, self.dtype = group, device, dtype
        self.made = []

    def __call__(self, numel):
        values = torch.arange(numel) % 7 + self.group.group_rank
        self.made.append(values.to(self.dtype).to(self.device, copy=True))
        return self.made[-1]


def layouts(n):  # sizes of parts of n ranks
    def each(size):
        return [size(rank) for rank in range(n)]

    return {
        "equal": [5] * n,
        "a rule": [5] * (n - 1) + [2],
        "uneven": each(lambda rank: 3 * rank % 7 + 1),
        "some empty": each(lambda rank: (rank % 2) * 4),
        "one owner": [0] * (n - 1) + [9],
        "large": each(lambda rank: 40_000 + 3 * rank),
    }


def of_halves(make, sizes, relay=False, async_op=False):
    group = make.group
    x, y = make(sum(sizes)), make(sum(sizes))
    work = group.reduce_scatter(x, sizes, relay=relay, async_op=async_op)
    work.wait()
    group.all_gather(y, sizes, relay=relay, async_op=async_op).wait()
    return [x.split(sizes)[group.group_rank], y]


def halves(make):
    return [
        t
        for sizes in layouts(make.group.size).values()
        for relay in (False, True)
        for async_op in (False, True)
        for t in of_halves(make, sizes, relay, async_op)
    ]


def wholes(make):
    group = make.group
    x, grid, number = make(11), make(12).view(3, 4), make(1).view(())
    gaps = make(12).view(3, 4).t()
    group.all_reduce(x)
    group.all_reduce(grid, async_op=True).wait()
    group.all_reduce(number)
    group.all_reduce(gaps)
    sent = [make(11) for _ in range(group.size)]
    for root, tensor in enumerate(sent):
        group.broadcast(tensor, root, async_op=root % 2 == 0).wait()
    return [x, grid, number, gaps, *sent]


def gaps(make):  # tensors of which every second element is in the call
    group = make.group
    sizes = layouts(group.size)["uneven"]
    x, y = (make(2 * sum(sizes))[::2] for _ in range(2))
    group.reduce_scatter(x, sizes, relay=True, async_op=True).wait()
    group.all_gather(y, sizes, relay=True, async_op=True).wait()
    return [x.split(sizes)[group.group_rank], y]


def rooted(make):
    group, found = make.group, []
    for root in range(group.size):
        for sizes in (layouts(group.size)[name] for name in ("equal", "uneven", "some empty")):
            gathered, scattered = make(sum(sizes)), make(sum(sizes))
            group.gather(gathered, root, sizes, async_op=root == 0).wait()
            group.scatter(scattered, root, sizes).wait()
            found += [gathered, scattered]
    return found


def all_to_all(make):
    group = make.group
    n, rank = group.size, group.group_rank
    received = [source + rank for source in range(n)]
    sent = [rank + target for target in range(n)]
    even, uneven = make(4 * n), make(sum(received))
    group.all_to_all(even, make(4 * n))
    group.all_to_all(uneven, make(sum(sent)), received, sent, async_op=True).wait()
    return [even, uneven]


def messages(make):
    group = make.group
    n, rank = group.size, group.group_rank
    came = [make(6), make(6), make(8)]
    ahead, behind = (rank + 1) % n, (rank - 1) % n
    sends = [(make(6) + i, ahead) for i in range(2)]
    group.exchange(sends, [(t, behind) for t in came[:2]], async_op=True).wait()
    if rank == 0:
        group.send(make(8), 1)
    if rank == 1:
        group.recv(came[2], 0)
    return came


def block(make, async_ops):
    group = make.group
    n, rank = group.size, group.group_rank
    sums, parts, gathered, sent = ([make(3 * n) for _ in range(3)] for _ in range(4))
    sizes = layouts(n)["uneven"]
    long, came = make(sum(sizes)), make(5)
    with coalescing_manager(group, async_ops=async_ops) as coalesced:
        for x in sums:
            group.all_reduce(x)
        for x in parts:
            group.reduce_scatter(x)
        group.reduce_scatter(long, sizes)
        for x in gathered:
            group.all_gather(x)
        for x in sent:
            group.broadcast(x, n - 1)
        group.send(make(5), (rank + 1) % n)
        group.recv(came, (rank - 1) % n)
    coalesced.wait()
    owned = [x.chunk(n)[rank] for x in parts]
    return [*sums, *owned, long.split(sizes)[rank], *gathered, *sent, came]


def together(make):  # many under way at once
    group = make.group
    sizes = layouts(group.size)["uneven"]
    sums, parts, gathered = (
        [make(size) for _ in range(3)] for size in (13, sum(sizes), sum(sizes))
    )
    works = [
        work
        for x, y, z in zip(sums, parts, gathered, strict=True)
        for work in (
            group.all_reduce(x, async_op=True),
            group.reduce_scatter(y, sizes, async_op=True),
            group.all_gather(z, sizes, async_op=True),
        )
    ]
    for work in works:
        work.wait()
    return [*sums, *(x.split(sizes)[group.group_rank] for x in parts), *gathered]


CALLS = {
    "wholes": wholes,
    "halves": halves,
    "gaps": gaps,
    "rooted": rooted,
    "all_to_all": all_to_all,
    "messages": messages,
    "block": lambda make: block(make, False),
    "async block": lambda make: block(make, True),
    "together": together,
}


def results(device, dtype, recorded=False) -> dict[str, list[Tensor]]:
    """Run every call, and give what it left in tensors, on the CPU."""
    group = Group(record() if recorded else None)
    return {
        name: [t.detach().cpu().clone() for t in call(Maker(group, device, dtype))]
        for name, call in CALLS.items()
    }


def differing(wanted, got) -> list[str]:
    """Name the calls whose results differ."""
    return [
        name
        for name, tensors in wanted.items()
        if not all(a.equal(b) for a, b in zip(tensors, got[name], strict=True))
    ]


def pretend() -> tuple[set[int], list[int]]:
    """Take all tensors of this process for a GPU's, apart from the copies that gloo moves; give the
    addresses of the copies, and of what is sent or moved by shared memory from now on."""
    copies: set[int] = set()
    kept, moved = [], []

    def host_like(tensor):
        kept.append(torch.empty_like(tensor.data, memory_format=torch.contiguous_format))
        copies.add(kept[-1].untyped_storage().data_ptr())
        return kept[-1]

    def off_host(tensor):
        return tensor.untyped_storage().data_ptr() not in copies

    def watch(owner, name, tensors):
        real = getattr(owner, name)

        def watched(*args, **kwargs):
            moved.extend(t.untyped_storage().data_ptr() for t in tensors(*args))
            return real(*args, **kwargs)

        setattr(owner, name, watched)

    exchange._host_like = host_like
    exchange._off_host = collectives._off_host = off_host
    asked = collectives._transport  # gives none to a GPU's tensor
    collectives._transport = lambda group, tensor: (
        None if off_host(tensor) else asked(group, tensor)
    )
    watch(dist, "isend", lambda tensor, *_: [tensor])
    for name in ("reduce_scatter", "all_gather"):
        watch(SharedMemory, name, lambda _, parts: [part for part in parts if part.numel()])
    return copies, moved


def trained(device, mode=None, nodes=False, steps=4, dtype=torch.float64, **options) -> nn.Module:
    """Train a network of uneven parts, in a mode or (None) by DDP with the plain optimizer."""
    module = network().to(dtype).to(device)
    levels = two_level(2) if nodes else None

    def make(model):
        return ZeroRedundancyOptimizer(
            model.parameters(), AdamW, levels, lr=1e-2, bucket_cap_mb=0.002, **options
        )

    if mode is None:
        call = DDP(module, bucket_cap_mb=0.004)
        optimizer = AdamW(module.parameters(), lr=1e-2)
    else:
        attached = MODES[mode].attach(module, make)
        call, optimizer = attached.call, attached.optimizer
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        x = torch.randn(6, 12, generator=data, dtype=torch.float64).to(dtype).to(device)
        optimizer.zero_grad()
        call(x).square().mean().backward()
        optimizer.step()
    if mode is not None:
        optimizer.wait_for_driver()
    module.optimizer, module.call = [optimizer], [call]  # lists: no submodules
    return module
