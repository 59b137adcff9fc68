"""Sharded optimizers for plain PyTorch data parallelism.

Public names load their module when first used, so that plans can be made where there is no torch.
"""

__version__ = "0.1.0"

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

_MODULES = {
    "sharder": (
        "Grid",
        "GridPlan",
        "ParamSpec",
        "ShardPlan",
        "Span",
        "balanced",
        "even",
        "greedy",
        "mixed",
        "moves",
    ),
    "buckets": ("BucketPlan", "pack"),
    "schedule": ("make_schedule",),
    "estimate": ("compare", "estimate"),
    "record": ("record", "simulate"),
    "process_group": (
        "Group",
        "agree",
        "agreeing",
        "coalescing_manager",
        "get_global_rank",
        "get_group_rank",
        "get_process_group_ranks",
        "two_level",
    ),
    "objects": ("broadcast_object_list", "gather_object", "scatter_object_list"),
    "launch": ("run",),
    "optimizer": ("ZeroRedundancyOptimizer",),
    "overlap": ("hook_with_zero_step", "hook_with_zero_step_interleaved", "overlap"),
    "parallel": ("data_parallel",),
    "join": ("Join", "JoinHook", "Joinable", "Roll", "shadowed_by"),
}
__all__ = [name for names in _MODULES.values() for name in names]

if TYPE_CHECKING:
    from .buckets import BucketPlan, pack
    from .estimate import compare, estimate
    from .join import Join, Joinable, JoinHook, Roll, shadowed_by
    from .launch import run
    from .objects import broadcast_object_list, gather_object, scatter_object_list
    from .optimizer import ZeroRedundancyOptimizer
    from .overlap import hook_with_zero_step, hook_with_zero_step_interleaved, overlap
    from .parallel import data_parallel
    from .process_group import (
        Group,
        agree,
        agreeing,
        coalescing_manager,
        get_global_rank,
        get_group_rank,
        get_process_group_ranks,
        two_level,
    )
    from .record import record, simulate
    from .schedule import make_schedule
    from .sharder import (
        Grid,
        GridPlan,
        ParamSpec,
        ShardPlan,
        Span,
        balanced,
        even,
        greedy,
        mixed,
        moves,
    )


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Package(ModuleType):
    """Keeps `zero_nb.record` and `zero_nb.overlap` the functions: importing a module of that name would bind it to the module."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in __all__ and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return [*globals(), *__all__]


def _connect_shared_memory(meeting: Any) -> Any:
    return import_module(f"{__name__}.shared_memory").connect(meeting)


import_module(f"{__name__}.transport").register("shared memory", _connect_shared_memory)
