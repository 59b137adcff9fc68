"""Sharded optimizers for plain PyTorch data parallelism.

Public names load their module when first used, so that plans can be made where there is no torch.
"""

__version__ = "0.1.0"

from importlib import import_module
from typing import TYPE_CHECKING, Any

_MODULES = {
    "plan.specs": ("ParamSpec",),
    "plan.shards": ("ShardPlan", "Span"),
    "plan.policies": ("even", "greedy"),
    "plan.balancing": ("balanced", "mixed"),
    "plan.grids": ("Grid", "GridPlan"),
    "plan.moves": ("moves",),
    "plan.bucket_plan": ("BucketPlan",),
    "plan.packing": ("pack",),
    "plan.schedule": ("make_schedule",),
    "plan.estimates": ("estimate",),
    "plan.comparison": ("compare",),
    "comm.recording": ("record",),
    "comm.simulation": ("simulate",),
    "comm.ranks": ("get_global_rank", "get_group_rank", "get_process_group_ranks"),
    "comm.agreement": ("agree", "agreeing"),
    "comm.ending": ("fail",),
    "comm.groups": ("Group",),
    "comm.coalescing": ("coalescing_manager",),
    "comm.subgroups": ("two_level",),
    "comm.objects": ("broadcast_object_list", "gather_object", "scatter_object_list"),
    "comm.launch": ("run",),
    "comm.live": ("report_step",),
    "optim.optimizer": ("ZeroRedundancyOptimizer",),
    "backward.ddp_overlap": ("overlap",),
    "backward.torch_hooks": ("hook_with_zero_step", "hook_with_zero_step_interleaved"),
    "backward.data_parallel": ("data_parallel",),
    "checkpoint.full": (
        "full_optim_state_dict",
        "full_state_dict",
        "load_full_state_dict",
        "shard_full_optim_state_dict",
    ),
    "checkpoint.contents": ("newest_checkpoint",),
    "checkpoint.sharded": ("load_sharded", "save_sharded"),
    "checkpoint.convert": ("convert_checkpoint", "verify_checkpoint"),
    "checkpoint.reshard": ("reshard",),
    "checkpoint.async_save": ("AsyncCheckpointer",),
    "verify.memory": ("memory_report",),
    "verify.same": ("assert_same",),
    "verify.parity": ("assert_parity",),
    "verify.divergence": ("DivergenceError",),
    "verify.watchdog": ("watch_divergence",),
    "verify.activations": ("activation_memory",),
    "join.attendance": ("Attendance",),
    "join.join": ("Join",),
    "join.own_joinables": ("shadowed_by",),
    "join.participants": ("JoinHook", "Joinable"),
}
__all__ = [name for names in _MODULES.values() for name in names]

if TYPE_CHECKING:
    from .checkpoint.full import (
        full_optim_state_dict,
        full_state_dict,
        load_full_state_dict,
        shard_full_optim_state_dict,
    )
    from .checkpoint.contents import newest_checkpoint
    from .checkpoint.sharded import load_sharded, save_sharded
    from .checkpoint.async_save import AsyncCheckpointer
    from .checkpoint.convert import convert_checkpoint, verify_checkpoint
    from .checkpoint.reshard import reshard
    from .plan.bucket_plan import BucketPlan
    from .plan.packing import pack
    from .plan.comparison import compare
    from .plan.estimates import estimate
    from .verify.memory import memory_report
    from .verify.same import assert_same
    from .verify.parity import assert_parity
    from .verify.divergence import DivergenceError
    from .verify.watchdog import watch_divergence
    from .verify.activations import activation_memory
    from .join.attendance import Attendance
    from .join.join import Join
    from .join.own_joinables import shadowed_by
    from .join.participants import Joinable, JoinHook
    from .comm.launch import run
    from .comm.live import report_step
    from .comm.objects import broadcast_object_list, gather_object, scatter_object_list
    from .optim.optimizer import ZeroRedundancyOptimizer
    from .backward.ddp_overlap import overlap
    from .backward.torch_hooks import hook_with_zero_step, hook_with_zero_step_interleaved
    from .backward.data_parallel import data_parallel
    from .comm.ranks import get_global_rank, get_group_rank, get_process_group_ranks
    from .comm.agreement import agree, agreeing
    from .comm.coalescing import coalescing_manager
    from .comm.ending import fail
    from .comm.groups import Group
    from .comm.subgroups import two_level
    from .comm.recording import record
    from .comm.simulation import simulate
    from .plan.schedule import make_schedule
    from .plan.balancing import balanced, mixed
    from .plan.grids import Grid, GridPlan
    from .plan.moves import moves
    from .plan.policies import even, greedy
    from .plan.shards import ShardPlan, Span
    from .plan.specs import ParamSpec


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]


def _connect_shared_memory(meeting: Any) -> Any:
    return import_module(f"{__name__}.comm.shared_memory").connect_shared_memory(meeting)


import_module(f"{__name__}.comm.transport").register("shared memory", _connect_shared_memory)
