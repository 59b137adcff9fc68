"""A stand-in for NCCL on CPU, made of gloo, that keeps NCCL's rules where gloo is kinder.

`nccl_like()`, called on every rank inside `zero_nb.comm.launch.run`, gives a `Group` of all ranks whose
backend is named "nccl". The groups that `split` and
`clone` make of it, `torch.distributed.new_group(backend="cpu:nccl")` and a second `Group` of the
same process group have the stand-in as well. Its rules:

1. **Works return at once.** A collective runs later, on a thread that plays NCCL's stream.
`work.wait()` does not block the host: it orders the current
   stream behind the work. Until then the result is full of NaN (whole numbers: of the dtype's
   largest number). `synchronize()` plays
   `torch.cuda.current_stream().synchronize()`: it blocks until every work that was *waited for* is
   done, and only then writes their results. A result that
   was never waited for stays NaN. With `nccl_like(host_waits=True)`, `wait` calls `synchronize`
   itself: CPU code then finds the result after `wait`, as CUDA
   code finds it on its stream. Run the whole package that way, and use the default to see what is read too early.
2. **Blocks do not nest.** No call of a `_start_coalescing` ... `_end_coalescing` block runs before
the block ends. Torch's `all_gather` and `reduce_scatter` of
   lists of unequal sizes open a block of their own. Inside a block, the end of the inner one makes
   torch forget the outer one: `_end_coalescing` then returns
   None, and the inner block's work and all later ones of the outer block wait for nothing. To wait
   for a work inside its block is an error here; with NCCL it
   returns at once and orders nothing.
3. **The first use of a communicator connects all its ranks**: all must come, all with collectives
or all with messages. Where some send while others call
   nothing, NCCL hangs; where others start with a collective, torch calls it undefined. Here both
   are a `RuntimeError` that begins "NCCL stand-in". A single
   `send` or `recv` outside `batch_isend_irecv` and outside a block has a communicator of its own,
   of two ranks, as with NCCL.
4. **Errors do not travel.** A work whose peer has failed or left never ends and raises nothing:
`synchronize` blocks until this rank calls `abort()`. It then
   returns, with NaN in the results. After that, every call raises.
5. **NCCL has few dtypes.** A call with another one (complex, whole numbers of 16 bits, 8-bit
floats) is a `TypeError`, in the middle of a block as well.

There is no watchdog: nothing here ends by itself. `process_group.launches` lists the names of the
calls of each launch. In the rank's process the names
`ProcessGroupNCCL` and `is_nccl_available` of torch's module are replaced, so the stand-in refuses
to be made anywhere but in a forked rank of `run`.
"""

import multiprocessing
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from inspect import unwrap
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero_nb.comm.groups import Group

_c10d: Any = dist.distributed_c10d
_CHANGED = threading.Condition()
_STREAMS: list["_Stream"] = []  # of all communicators of this process
_PENDING: list["_Op"] = []  # whose results are not there yet, in the order of their calls
_NO_LIMIT = timedelta(hours=1)  # of gloo underneath; a NCCL kernel has none
_DTYPES = {
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.bool,
}


@dataclass(eq=False)
class _Op:
    """One call: what it reads, as it was when called, and where its results belong."""

    name: str
    reads: list[Tensor]
    writes: list[Tensor]
    run: Callable[[Any, list[Tensor]], list[Tensor]]  # gloo, what is read -> what is to be written
    peer: int | None = None  # of a message
    staged: list[Tensor] = field(default_factory=list)
    results: list[Tensor] = field(default_factory=list)
    behind: list[tuple[Tensor, "_Op", int]] = field(
        default_factory=list
    )  # bytes of `staged` that come from a result on its way
    stream: Any = None
    position: int = 0  # of its launch in the stream; 0: not launched

    def stage(self, stream: "_Stream") -> None:
        """Take what is read, and spoil what is written."""
        for tensor in (*self.reads, *self.writes):
            if tensor.dtype not in _DTYPES:
                raise TypeError(
                    "Input tensor data type is not supported for NCCL process group:"
                    f" {tensor.dtype}"
                )
            if not tensor.is_contiguous():
                raise ValueError("NCCL stand-in: Tensors must be contiguous")
        self.stream = stream
        self.staged = [tensor.detach().clone() for tensor in self.reads]
        for tensor, staged in zip(self.reads, self.staged, strict=True):
            for earlier in _PENDING:
                for i, written in enumerate(earlier.writes):
                    self._follow(tensor, staged, earlier, i, written)
        with torch.no_grad():
            for tensor in self.writes:
                tensor.fill_(_spoilt(tensor.dtype))
        _PENDING.append(self)

    def _follow(
        self, tensor: Tensor, staged: Tensor, earlier: "_Op", i: int, written: Tensor
    ) -> None:
        start = max(tensor.data_ptr(), written.data_ptr())
        stop = min(tensor.data_ptr() + tensor.nbytes, written.data_ptr() + written.nbytes)
        if start >= stop:
            return
        ordered = earlier.stream is self.stream or 0 < earlier.position <= earlier.stream.ordered
        if not earlier.position:
            raise RuntimeError(
                f"NCCL stand-in: {self.name} reads what {earlier.name}, in the same block, writes;"
                " NCCL knows no order in a block"
            )
        if not ordered:
            raise RuntimeError(
                f"NCCL stand-in: {self.name} reads what {earlier.name} of another communicator"
                " writes, and nobody waited for that"
            )
        part = _bytes(staged)[start - tensor.data_ptr() : stop - tensor.data_ptr()]
        self.behind.append((part, earlier, i * (1 << 48) + start - written.data_ptr()))

    def start(self, inner: Any) -> list[Any]:
        """Begin on the stream's thread; give gloo's handles, of a message."""
        for part, earlier, where in self.behind:
            with _CHANGED:
                _CHANGED.wait_for(lambda earlier=earlier: earlier.results or earlier.stream.aborted)
            if not earlier.results:
                raise RuntimeError("aborted")
            i, first = divmod(where, 1 << 48)
            part.copy_(_bytes(earlier.results[i])[first : first + len(part)])
        out = self.run(inner, self.staged)
        if self.peer is None:
            self.results = out
        return out if self.peer is not None else []


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _spoilt(dtype: torch.dtype) -> Any:
    if dtype is torch.bool:
        return True
    return float("nan") if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).max


class _Stream:
    """The stream of one communicator: launches run on it one after the other, until one cannot end."""

    def __init__(self, inner: Any):
        self.inner = inner
        self.queue: list[list[_Op]] = []
        self.launched, self.completed, self.ordered = (
            0,
            0,
            0,
        )  # launches: begun, ended, and those that the current stream waits for
        self.aborted, self.stuck = False, ""  # why a launch cannot end
        _STREAMS.append(self)
        threading.Thread(target=self._work, daemon=True).start()

    def launch(self, ops: Sequence[_Op]) -> None:
        with _CHANGED:
            self.launched += 1
            for op in ops:
                op.position = self.launched
            self.queue.append(list(ops))
            _CHANGED.notify_all()

    def _work(self) -> None:
        while True:
            with _CHANGED:
                _CHANGED.wait_for(lambda: self.queue or self.aborted)
            if self.aborted:
                return
            try:
                self._run(self.queue.pop(0))
            except (
                RuntimeError
            ) as error:  # a peer is gone: the kernel runs for ever, and nobody is told
                self.stuck = str(error)
                return
            with _CHANGED:
                self.completed += 1
                _CHANGED.notify_all()

    def _run(self, ops: list[_Op]) -> None:
        messages = [(op, op.start(self.inner)) for op in ops if op.peer is not None]
        for op in ops:
            if op.peer is None:
                op.start(self.inner)
        for op, works in messages:
            for work in works:
                work.wait()
            op.results = op.staged if op.writes else []


def synchronize() -> None:
    """Return when the current stream has come to its end: the works that were waited for are done,
    or aborted, and their results are there."""
    with _CHANGED:
        _CHANGED.wait_for(lambda: all(s.aborted or s.completed >= s.ordered for s in _STREAMS))
    with torch.no_grad():
        for op in [op for op in _PENDING if 0 < op.position <= op.stream.ordered]:
            _PENDING.remove(op)
            if op.position <= op.stream.completed:
                for tensor, result in zip(op.writes, op.results, strict=True):
                    tensor.data.copy_(result)  # no kernel raises the version of what it writes


class _Work(dist.Work if dist.is_available() else object):  # type: ignore[misc]
    """What a launch returns: `wait` orders the current stream behind it."""

    def __init__(self, stream: _Stream, host_waits: bool):
        super().__init__()
        self.stream, self.host_waits = stream, host_waits
        self.upto: int | None = None  # launches of the stream; None: inside a block

    def wait(self, *args: Any) -> bool:
        if self.upto is None:
            raise RuntimeError(
                "NCCL stand-in: waited inside the block, where NCCL has nothing to wait for; wait"
                " for the block instead"
            )
        self.stream.ordered = max(self.stream.ordered, self.upto)
        if self.host_waits:
            synchronize()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self.upto is not None and self.stream.completed >= self.upto


class NcclLike(dist.ProcessGroup if dist.is_available() else object):  # type: ignore[misc]
    """The stand-in's process group. See the module's docstring."""

    host_waits, first_use_limit = False, 20.0
    supports_coalescing = True

    class Options:
        """In the place of ProcessGroupNCCL.Options."""

    def __init__(self, store: Any, rank: int, size: int, options: Any):
        super().__init__(rank, size)
        self.store, self.inner = store, dist.ProcessGroupGloo(store, rank, size, timeout=_NO_LIMIT)
        self.stream, self.pairs = _Stream(self.inner), dict[int, _Stream]()
        self.connected, self.ended, self.first_use = False, False, ""
        self._name = getattr(options, "group_name", "nccl_like")
        self.launches: list[list[str]] = []
        self.open, self.active, self.used = (
            0,
            False,
            False,
        )  # blocks that are open; whether calls belong to one; whether one did
        self.block: list[_Op] = []
        self.inside: list[_Work] = []  # works of the block's calls
        self.left = 0  # messages of `batch_isend_irecv` still to come

    def getBackendName(self) -> str:
        return "nccl"

    def getGroupName(self) -> str:
        return self._name

    def getGroupDesc(self) -> str:
        return "a stand-in for NCCL"

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def _set_sequence_number_for_group(self) -> None:
        pass

    def shutdown(self) -> None:
        self.abort()

    def abort(self) -> None:
        """End what this rank has begun; the peers are told nothing."""
        self.ended = True
        with _CHANGED:
            for stream in (self.stream, *self.pairs.values()):
                stream.aborted = True
            _CHANGED.notify_all()

    def _start_coalescing(self, device: Any = None) -> None:
        self.open, self.active, self.used = self.open + 1, True, False

    def _end_coalescing(self, device: Any = None) -> Any:
        self.open, self.active = self.open - 1, False
        work = _Work(self.stream, self.host_waits) if self.used else None
        self.used = False
        if work and self.open:
            work.upto = self.stream.launched  # its event is recorded before anything runs
        if self.open == 0 and self.block:
            block, self.block = self.block, []
            self._launch(block)
        if work and work.upto is None:
            work.upto = self.stream.launched
        return work

    def _launch(self, ops: list[_Op]) -> None:
        if not self.connected:
            self._connect("messages" if all(op.peer is not None for op in ops) else "collectives")
        self.launches.append([op.name for op in ops])
        self.stream.launch(ops)

    def _call(self, op: _Op) -> _Work:
        if self.ended:
            raise RuntimeError(
                f"NCCL stand-in: NCCL communicator was aborted on rank {self.rank()}"
            )
        work = _Work(self.stream, self.host_waits)
        op.stage(self.stream)
        if self.open:
            self.block.append(op)
            if self.active:
                self.used = True
            else:
                work.upto = (
                    self.stream.launched
                )  # the block has forgotten that it is one: its event comes too early
            return work
        self._launch([op])
        work.upto = self.stream.launched
        return work

    def _connect(self, kind: str) -> None:
        """Meet all ranks, as the first use of a communicator does."""
        n, store, deadline = self.size(), self.store, time.monotonic() + self.first_use_limit
        self.first_use = (
            self.first_use or kind
        )  # what is tried again after an error is not the first any more
        store.set(f"first/{self.rank()}", self.first_use)
        while missing := [rank for rank in range(n) if not store.check([f"first/{rank}"])]:
            if self.ended:
                raise RuntimeError(
                    f"NCCL stand-in: NCCL communicator was aborted on rank {self.rank()}"
                )
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"NCCL stand-in: rank {self.rank()} uses a communicator of {n} ranks for the"
                    f" first time, with {kind}, and ranks {missing} do not: NCCL would hang. Let"
                    " all ranks call a collective first"
                )
            time.sleep(0.005)
        kinds = {rank: store.get(f"first/{rank}").decode() for rank in range(n)}
        if len(set(kinds.values())) > 1:
            raise RuntimeError(
                "NCCL stand-in: the first use of a communicator differs between its ranks,"
                f" {kinds}, which torch calls undefined. Let all ranks call a collective first"
            )
        self.connected = True

    # ---- collectives ----

    def allreduce(self, tensors: Any, options: Any = None) -> _Work:
        (tensor,) = _listed(tensors)
        return self._call(
            _Op(
                "allreduce",
                [tensor],
                [tensor],
                lambda gloo, staged: [_sum(gloo, staged[0], options)],
            )
        )

    def reduce(self, tensors: Any, options: Any) -> _Work:
        (tensor,) = _listed(tensors)
        mine = options.rootRank == self.rank()
        return self._call(
            _Op(
                "reduce",
                [tensor],
                [tensor][:mine],
                lambda gloo, staged: [_sum(gloo, staged[0], options)][:mine],
            )
        )

    def broadcast(self, tensors: Any, options: Any) -> _Work:
        (tensor,) = _listed(tensors)
        return self._broadcast(tensor, tensor, options.rootRank)

    def _broadcast(self, output: Tensor, source: Tensor, root: int) -> _Work:
        mine = root == self.rank()
        writes = [] if mine and output.data_ptr() == source.data_ptr() else [output]
        return self._call(
            _Op(
                "broadcast",
                [source if mine else output],
                writes,
                lambda gloo, staged: [_sent(gloo, staged[0], root)][: len(writes)],
            )
        )

    def allgather(self, outputs: Any, inputs: Any, options: Any = None) -> _Work:
        (output,), (source,) = (
            outputs if isinstance(outputs[0], (list, tuple)) else [outputs],
            _listed(inputs),
        )
        if len({part.numel() for part in output}) == 1:
            return self._gather("allgather", list(output), source)
        return self._nested(
            lambda: [self._broadcast(part, source, root) for root, part in enumerate(output)]
        )

    def _gather(self, name: str, output: list[Tensor], source: Tensor) -> _Work:
        writes = [part for part in output if part.data_ptr() != source.data_ptr()]

        def run(gloo: Any, staged: list[Tensor]) -> list[Tensor]:
            gathered = [
                _sent(gloo, staged[0].clone(), root).view(part.shape)
                for root, part in enumerate(output)
            ]
            return [
                got
                for got, part in zip(gathered, output, strict=True)
                if part.data_ptr() != source.data_ptr()
            ]

        return self._call(_Op(name, [source], writes, run))

    def all_gather_single(self, output: Tensor, source: Tensor, options: Any = None) -> _Work:
        return self._gather(
            "all_gather_single",
            list(output.view(-1).chunk(self.size())) if output.numel() else [output] * self.size(),
            source,
        )

    _allgather_base = all_gather_single

    def reduce_scatter(self, outputs: Any, inputs: Any, options: Any = None) -> _Work:
        (output,), (source,) = (
            _listed(outputs),
            inputs if isinstance(inputs[0], (list, tuple)) else [inputs],
        )
        if len({part.numel() for part in source}) == 1:
            return self._scatter("reduce_scatter", output, list(source), options)

        def reduce(root: int, part: Tensor) -> _Work:
            mine = root == self.rank()
            return self._call(
                _Op(
                    "reduce",
                    [part],
                    [output] if mine else [],
                    lambda gloo, staged: [_sum(gloo, staged[0], options)][:mine],
                )
            )

        return self._nested(lambda: [reduce(root, part) for root, part in enumerate(source)])

    def _scatter(self, name: str, output: Tensor, source: list[Tensor], options: Any) -> _Work:
        return self._call(
            _Op(
                name,
                source,
                [output],
                lambda gloo, staged: [
                    [_sum(gloo, part, options) for part in staged][self.rank()].view(output.shape)
                ],
            )
        )

    def reduce_scatter_single(self, output: Tensor, source: Tensor, options: Any = None) -> _Work:
        return self._scatter(
            "reduce_scatter_single",
            output,
            list(source.view(-1).chunk(self.size())) if source.numel() else [source] * self.size(),
            options,
        )

    _reduce_scatter_base = reduce_scatter_single

    def alltoall_base(
        self,
        output: Tensor,
        source: Tensor,
        output_sizes: Any,
        source_sizes: Any,
        options: Any = None,
    ) -> _Work:
        def run(gloo: Any, staged: list[Tensor]) -> list[Tensor]:
            row = (
                source.nbytes // max(1, len(source))
                if source.numel()
                else output.nbytes // max(1, len(output))
                if output.numel()
                else 0
            )
            result = torch.empty_like(output)
            even = [len(source) // self.size()] * self.size()
            takes, gives = (
                [row * size for size in sizes or even] for sizes in (output_sizes, source_sizes)
            )
            gloo.alltoall_base(
                _bytes(result), _bytes(staged[0]), takes, gives, dist.AllToAllOptions()
            ).wait()
            return [result]

        return self._call(_Op("alltoall_base", [source], [output], run))

    all_to_all_single = alltoall_base

    def alltoall(self, outputs: list[Tensor], sources: list[Tensor], options: Any = None) -> _Work:
        def run(gloo: Any, staged: list[Tensor]) -> list[Tensor]:
            result = torch.empty(sum(part.nbytes for part in outputs), dtype=torch.uint8)
            sizes = [part.nbytes for part in outputs]
            gloo.alltoall_base(
                result,
                torch.cat([_bytes(part) for part in staged]),
                sizes,
                [part.nbytes for part in sources],
                dist.AllToAllOptions(),
            ).wait()
            return [
                got.view(part.dtype).view(part.shape)
                for got, part in zip(result.split(sizes), outputs, strict=True)
            ]

        return self._call(_Op("alltoall", list(sources), list(outputs), run))

    def barrier(self, options: Any = None) -> _Work:
        work = self.allreduce([torch.zeros(1)])
        work.wait()
        synchronize()  # NCCL's barrier blocks the host
        return work

    def allreduce_coalesced(self, tensors: list[Tensor], options: Any = None) -> _Work:
        return self._nested(lambda: [self.allreduce([tensor], options) for tensor in tensors])

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], options: Any = None
    ) -> _Work:
        return self._nested(
            lambda: [self.all_gather_single(*pair) for pair in zip(outputs, inputs, strict=True)]
        )

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], options: Any = None
    ) -> _Work:
        return self._nested(
            lambda: [
                self.reduce_scatter_single(*pair, options)
                for pair in zip(outputs, inputs, strict=True)
            ]
        )

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _nested(self, calls: Callable[[], Any]) -> _Work:
        """Run calls in a block of their own, perhaps inside another one."""
        self._start_coalescing()
        calls()
        return self._end_coalescing()

    # ---- messages ----

    def send(self, tensors: Any, peer: int, tag: int = 0) -> _Work:
        (tensor,) = _listed(tensors)
        return self._message(
            _Op(
                "send",
                [tensor],
                [],
                lambda gloo, staged: [gloo.send([_bytes(staged[0])], peer, 0)],
                peer,
            )
        )

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> _Work:
        (tensor,) = _listed(tensors)
        return self._message(
            _Op(
                "recv",
                [tensor],
                [tensor],
                lambda gloo, staged: [gloo.recv([_bytes(staged[0])], peer, 0)],
                peer,
            )
        )

    def _message(self, op: _Op) -> _Work:
        if not self.left and (batch := _batch()):
            self.left = batch
            self._start_coalescing()
        if self.left:
            return self._of_batch(op)
        if self.open:
            return self._call(op)
        if self.ended:
            raise RuntimeError(
                f"NCCL stand-in: NCCL communicator was aborted on rank {self.rank()}"
            )
        stream = self._pair(op.peer)
        op.stage(stream)
        stream.launch([op])
        work = _Work(stream, self.host_waits)
        work.upto = stream.launched
        return work

    def _of_batch(self, op: _Op) -> _Work:
        work = self._call(op)
        self.inside.append(work)
        self.left -= 1
        if self.left == 0:
            inside, self.inside = self.inside, []
            ended = self._end_coalescing()
            for work in inside:
                work.upto = ended.upto
        return work

    def _pair(self, peer: Any) -> _Stream:
        if peer not in self.pairs:
            pair = sorted((self.rank(), peer))
            store = dist.PrefixStore(f"pair/{pair}/", self.store)
            self.pairs[peer] = _Stream(
                _PairGloo(
                    dist.ProcessGroupGloo(store, pair.index(self.rank()), 2, timeout=_NO_LIMIT),
                    1 - pair.index(self.rank()),
                )
            )
        return self.pairs[peer]


class _PairGloo:
    """Gloo between two ranks: whatever the peer's number is in the group, here it is the other one."""

    def __init__(self, inner: Any, other: int):
        self.inner, self.other = inner, other

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        return self.inner.send(tensors, self.other, tag)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        return self.inner.recv(tensors, self.other, tag)


def _batch() -> (
    int
):  # of the `batch_isend_irecv` that is running, or 0: torch opens no block for groups in Python
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is unwrap(_c10d.batch_isend_irecv).__code__:
            return len(frame.f_locals["p2p_op_list"])
        frame = frame.f_back  # type: ignore[assignment]
    return 0


def _listed(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _sum(gloo: Any, tensor: Tensor, options: Any) -> Tensor:
    op = getattr(options, "reduceOp", dist.ReduceOp.SUM)
    average = op == dist.ReduceOp.AVG
    own = dist.AllreduceOptions()
    own.reduceOp = dist.ReduceOp.SUM if average else op
    gloo.allreduce([tensor], own).wait()
    return tensor.div_(gloo.size()) if average else tensor


def _sent(gloo: Any, tensor: Tensor, root: int) -> Tensor:
    options = dist.BroadcastOptions()
    options.rootRank = root
    if tensor.numel():
        gloo.broadcast([_bytes(tensor)], options).wait()
    return tensor


def nccl_like(
    *,
    # `wait` returns when the result is there, as CUDA code sees it; else it only orders, and
    # `synchronize()` waits
    host_waits: bool = False,
    # seconds after which ranks that do not come to a communicator's first use are an error
    first_use_limit: float = 20.0,
    connect: bool = False,  # connect all ranks now, as the first collective does
) -> Group:
    """Give a group of all ranks over the stand-in; every rank calls this, inside `run`."""
    if multiprocessing.parent_process() is None:
        raise RuntimeError(
            "the NCCL stand-in is made on the ranks of run() only: it replaces names in torch"
        )
    _c10d.ProcessGroupNCCL = type(
        "ProcessGroupNCCL",
        (NcclLike,),
        {"host_waits": host_waits, "first_use_limit": first_use_limit},
    )
    _c10d.is_nccl_available = lambda: True
    group = Group(dist.new_group(backend="cpu:nccl"))
    if connect:
        group.process_group._connect("collectives")
    return group
