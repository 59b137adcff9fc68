"""A stand-in for CUDA streams on a CPU: who reads and writes which memory on which stream, and what
the caching allocator would do with it.

Kernels run at once and in the order of the program; what is checked is the order that the streams,
events and `record_stream` calls promise.
Each stream has a vector clock. A fault is a read or write that is not ordered after a write of
another stream (or a write after a read), and memory
that is let go while another stream may still use it: the allocator gives it to the next kernel of
the stream that allocated it.

    world = World()
    handle.engine.stream = WatchedStream(world)
    with world: train()
    assert not world.faults
"""

import threading
from contextlib import contextmanager

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from zero_nb.comm import collectives
from zero_nb.optim.driver import SideStream


class Event:
    """A point in the work of a stream, and all that is ordered before it."""

    def __init__(self, clock):
        self.clock = dict(clock)


class Stream:
    """A queue of kernels, with the interface of `torch.cuda.Stream`."""

    def __init__(self, world, name):
        self.world, self.name, self.clock = world, name, {name: 0}
        world.streams.append(self)

    def record_event(self):
        return Event(self.clock)

    def wait_event(self, event):
        self.world.collect()  # what was let go before this wait is judged by what was known before it
        for name, time in event.clock.items():
            self.clock[name] = max(self.clock.get(name, 0), time)

    def wait_stream(self, other):
        self.wait_event(other.record_event())

    def follows(self, name, time):
        """Tell whether work of a stream is done before what comes next here."""
        return self.clock.get(name, 0) >= time


class Memory:
    """A storage: the stream that allocated it (None: it was there before), who has used it, and the
    streams that it was recorded for."""

    def __init__(self, storage, owner):
        self.ref, self.owner, self.recorded = StorageWeakRef(storage), owner, []
        self.uses = {}  # (stream, whether it writes, first byte, end): (time, operation), of the last such use


def extent(tensor):
    """Give the first byte of a tensor, and one past the last."""
    last = (
        sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if tensor.numel()
        else -1
    )
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


class World(TorchDispatchMode):
    """Streams, memory and faults; as a context, follows all operations of a thread and of its backwards."""

    def __init__(self):
        super().__init__()
        self.streams = []
        self.main, self.networks = Stream(self, "main"), {}
        self.local, self.memory, self.faults = threading.local(), {}, []
        self.kernels = 0

    # ---- the runtime, in the place of `torch.cuda`
    def Stream(self, device=None):
        return Stream(self, "side")

    def current_stream(self, device=None):
        return getattr(self.local, "stream", self.main)

    @contextmanager
    def stream(self, stream):
        """Run kernels on a stream."""
        before, self.local.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self.local.stream = before

    # ---- memory
    def known(self, tensor, owner=None):
        """Give what is noted of a tensor's memory; None where it has none of its own, as a marker
        in the place of a gradient."""
        if (
            type(tensor) not in (torch.Tensor, torch.nn.Parameter)
            or tensor.layout is not torch.strided
        ):
            return None
        storage = tensor.untyped_storage()
        found = self.memory.get(storage._cdata)
        if found is None:
            found = self.memory[storage._cdata] = Memory(storage, owner)
        return found

    def use(self, tensor, writes, what, stream=None):
        """Note a use, and check that it is ordered after those that it must not overtake."""
        stream = stream or self.current_stream()
        memory, (start, end) = self.known(tensor), extent(tensor)
        if memory is None or start == end:
            return
        for (name, wrote, first, last), (time, other) in memory.uses.items():
            if (
                name != stream.name
                and (writes or wrote)
                and first < end
                and start < last
                and not stream.follows(name, time)
            ):
                mine, theirs = ("writes" if w else "reads" for w in (writes, wrote))
                self.fault(
                    f"{what} {mine} on {stream.name} what {other} {theirs} on {name}: nothing"
                    " orders them"
                )
        memory.uses[stream.name, writes, start, end] = stream.clock[stream.name], what

    def record(self, tensor, stream):
        """Note `tensor.record_stream(stream)`."""
        if (memory := self.known(tensor)) is not None and stream not in memory.recorded:
            memory.recorded.append(stream)

    def collect(self):
        """Find memory that was let go, and check that the allocator may give it away."""
        for key, memory in list(self.memory.items()):
            if not memory.ref.expired():
                continue
            del self.memory[key]
            if memory.owner is None:
                continue
            safe = (memory.owner, *memory.recorded)
            for (name, wrote, _, _), (time, what) in memory.uses.items():
                if not any(stream.follows(name, time) for stream in safe):
                    self.fault(
                        f"memory of {memory.owner.name} is let go that {what}"
                        f" {'writes' if wrote else 'reads'} on {name}, and is not recorded for it"
                    )

    def fault(self, words):
        if words not in self.faults:
            self.faults.append(words)

    # ---- kernels
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run an operation, and note what it reads and writes."""
        self.collect()
        schema, what = func._schema, func.overloadpacket.__name__
        given = [
            (arg, args[i] if i < len(args) else (kwargs or {}).get(arg.name))
            for i, arg in enumerate(schema.arguments)
        ]
        is_view = any(
            r.alias_info is not None and not r.alias_info.is_write for r in schema.returns
        )
        touches = not (is_view or what.startswith(("empty", "new_empty", "is_", "sym_")))
        if touches:
            stream = self.current_stream()
            stream.clock[stream.name] += 1
            self.kernels += 1
            for arg, value in given:
                writes = arg.alias_info is not None and arg.alias_info.is_write
                for t in tree_leaves(value):
                    if isinstance(t, torch.Tensor):
                        self.use(t, writes, what)
        if (
            what == "_local_scalar_dense"
        ):  # the host waits, and whatever it starts later on any stream comes after
            for other in self.streams:
                other.wait_stream(self.current_stream())
        result = func(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, torch.Tensor) and self.is_new(t):
                self.known(t, self.current_stream())
                if touches:
                    self.use(t, True, what)
        return result

    def is_new(self, tensor):
        return (
            type(tensor) is torch.Tensor
            and tensor.layout is torch.strided
            and tensor.untyped_storage()._cdata not in self.memory
        )

    # ---- collectives, as NCCL runs them: on a stream of the group's own, which waits for the one that starts them
    def network(self, group):
        key = str(group)
        if key not in self.networks:
            self.networks[key] = Stream(self, f"network {len(self.networks)}")
        return self.networks[key]

    def collective(self, group, name, original, tensor, *args, **options):
        if collectives._block(group) is not None:  # runs at the end of the block
            self.use(tensor, True, name)
            return original(group, tensor, *args, **options)
        network = self.network(group)
        network.wait_stream(self.current_stream())
        network.clock[network.name] += 1
        mine = slice(None)
        if name == "all_gather":
            sizes = (
                args[0]
                if args and args[0] is not None
                else [tensor.numel() // group.size] * group.size
            )
            sizes = list(getattr(sizes, "parts", sizes))
            mine = slice(sum(sizes[: group.group_rank]), sum(sizes[: group.group_rank + 1]))
            with _disable_current_modes():
                parts = tensor[: mine.start], tensor[mine], tensor[mine.stop :]
            for part, writes in zip(parts, (True, False, True), strict=True):
                self.use(part, writes, name, network)
        else:
            self.use(tensor, True, name, network)
        with _disable_current_modes():
            original(group, tensor, *args, **{**options, "async_op": False})
        work = NetworkWork(self, tensor, network)
        if not options.get("async_op"):
            work.wait()
        return work

    @contextmanager
    def networked(self):
        """Run the collectives of the package on the network's stream."""
        kind, names = (
            collectives,  # which `Group` calls, and the optimizer
            ("all_reduce", "broadcast", "reduce_scatter", "all_gather"),
        )
        originals = {name: getattr(kind, name) for name in names}

        def replaced(name):
            return lambda group, tensor, *args, **options: self.collective(
                group, name, originals[name], tensor, *args, **options
            )

        for name in names:
            setattr(kind, name, replaced(name))
        try:
            yield
        finally:
            for name in names:
                setattr(kind, name, originals[name])

    def __exit__(self, *error):
        super().__exit__(*error)
        self.collect()


class NetworkWork:
    """A collective on the network's stream: `wait` orders the current stream after it, and the
    tensor is kept until then, as by NCCL's work."""

    done = False

    def __init__(self, world, tensor, network):
        self.world, self.tensor, self.event = world, tensor, network.record_event()

    def wait(self):
        self.world.current_stream().wait_event(self.event)
        self.tensor, self.done = None, True


class WatchedStream(SideStream):
    """The package's own seam, over a world's streams."""

    def __init__(self, world):
        super().__init__(torch.device("cpu"), world)
        self.world = world

    def keep(self, tensor, stream=None):
        self.world.record(tensor, stream or self.stream)
