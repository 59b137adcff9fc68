"""The ways to train that the package offers, by the names of `zero_nb.plan.schedule.METHODS`."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

from zero_nb.backward.data_parallelism import data_parallel
from zero_nb.backward.ddp_overlap import overlap
from zero_nb.backward.torch_hooks import hook_with_zero_step, hook_with_zero_step_interleaved

# buckets of 2 KiB, larger parameters in pieces of 4 KiB: several of each in small models
SMALL = {"bucket_cap_mb": 0.002, "cut_mb": 0.004}


def average_gradients(state: Any, bucket: Any) -> Any:
    """Average gradients in a comm hook that only its user knows."""
    return default_hooks.allreduce_hook(state, bucket)


@dataclass(frozen=True)
class Mode:
    """One way to train; `attach` prepares a model and its optimizer for it."""

    wraps: bool = True  # the model in DDP
    attaches: Callable[..., Any] | None = None  # the driver to model and optimizer; None: no driver
    options: dict[str, Any] = field(default_factory=dict)  # of `attaches`
    registers: bool = False  # `attaches` makes a comm hook, which its user registers

    @property
    def interleaved(self) -> bool:
        hooks = self.attaches is hook_with_zero_step_interleaved
        return hooks or bool(self.options.get("interleaved"))

    def attach(
        self,
        module: nn.Module,
        make: Callable[[nn.Module], Any],  # the optimizer of a model
        group: dist.ProcessGroup | None = None,
        ddp: dict[str, Any] | None = None,  # options of DDP, where the mode uses it
        parallel: dict[str, Any]
        | None = None,  # options of `data_parallel`, where the mode uses it
        **options: Any,  # of `overlap` and `data_parallel`
    ) -> "Attached":
        if not self.wraps:
            zero = make(module)
            given = {**SMALL, **(parallel or {}), **self.options, **options}
            handle = self.attaches(module, zero, **given)
            return Attached(module, zero, handle, handle)
        model = DDP(module, process_group=group, **{"bucket_cap_mb": 0.004, **(ddp or {})})
        zero = make(model)
        if self.attaches is None:
            return Attached(model, zero, None, model)
        given = {**self.options, **options}
        if "hook" in given:
            given.setdefault("state", group)
        if not self.registers:
            return Attached(model, zero, self.attaches(model, zero, **given), model)
        hook = self.attaches(default_hooks.allreduce_hook, model, zero, **given)
        model.register_comm_hook(None, hook)
        return Attached(model, zero, hook.overlap, model)


@dataclass(frozen=True)
class Attached:
    """A model that is trained in a mode."""

    call: nn.Module  # what is called: the module, or the DDP around it
    optimizer: Any
    handle: Any  # of the driver; None: steps are taken by `optimizer.step()`
    joinable: Any  # what `Join` takes, and what has `no_sync`

    def no_sync(self) -> AbstractContextManager[None]:
        return self.joinable.no_sync()


INTERLEAVED = {"interleaved": True}
HIDDEN = {"hidden": True}
MODES = {
    "zero1": Mode(),
    "zero1-overlap": Mode(attaches=overlap),
    "zero1-overlap, interleaved": Mode(attaches=overlap, options=INTERLEAVED),
    "zero2": Mode(False, data_parallel),
    "zero2-interleaved": Mode(False, data_parallel, INTERLEAVED),
    "zero2, hidden": Mode(False, data_parallel, HIDDEN),
    "zero2-interleaved, hidden": Mode(False, data_parallel, {**HIDDEN, **INTERLEAVED}),
}
# the same drivers, reached or set in another way
VARIANTS = {
    "zero1-overlap, a hook of the user's": Mode(
        attaches=overlap, options={"hook": average_gradients}
    ),
    "zero1-overlap, as a hook": Mode(attaches=hook_with_zero_step, registers=True),
    "zero1-overlap, interleaved, as a hook": Mode(
        attaches=hook_with_zero_step_interleaved, registers=True
    ),
    "zero1-overlap, interleaved, lag 0": Mode(attaches=overlap, options={**INTERLEAVED, "lag": 0}),
    "zero2-interleaved, hidden, lag 3": Mode(
        False, data_parallel, {**HIDDEN, **INTERLEAVED, "lag": 3}
    ),
}
