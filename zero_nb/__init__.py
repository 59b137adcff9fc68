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
    "plan.span_moves": ("moves",),
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
    "backward.data_parallelism": ("data_parallel",),
    "checkpoint.full": (
        "full_optim_state_dict",
        "full_state_dict",
        "load_full_state_dict",
        "shard_full_optim_state_dict",
    ),
    "checkpoint.contents": ("newest_checkpoint",),
    "checkpoint.sharded": ("load_sharded", "save_sharded"),
    "checkpoint.convert": ("convert_checkpoint", "verify_checkpoint"),
    "checkpoint.resharding": ("reshard",),
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

if TYPE_CHECKING:  # `as`: a type checker takes such a name for one that users may import
    from .checkpoint.full import (
        full_optim_state_dict as full_optim_state_dict,
        full_state_dict as full_state_dict,
        load_full_state_dict as load_full_state_dict,
        shard_full_optim_state_dict as shard_full_optim_state_dict,
    )
    from .checkpoint.contents import (
        newest_checkpoint as newest_checkpoint,
    )
    from .checkpoint.sharded import (
        load_sharded as load_sharded,
        save_sharded as save_sharded,
    )
    from .checkpoint.async_save import (
        AsyncCheckpointer as AsyncCheckpointer,
    )
    from .checkpoint.convert import (
        convert_checkpoint as convert_checkpoint,
        verify_checkpoint as verify_checkpoint,
    )
    from .checkpoint.resharding import (
        reshard as reshard,
    )
    from .plan.bucket_plan import (
        BucketPlan as BucketPlan,
    )
    from .plan.packing import (
        pack as pack,
    )
    from .plan.comparison import (
        compare as compare,
    )
    from .plan.estimates import (
        estimate as estimate,
    )
    from .verify.memory import (
        memory_report as memory_report,
    )
    from .verify.same import (
        assert_same as assert_same,
    )
    from .verify.parity import (
        assert_parity as assert_parity,
    )
    from .verify.divergence import (
        DivergenceError as DivergenceError,
    )
    from .verify.watchdog import (
        watch_divergence as watch_divergence,
    )
    from .verify.activations import (
        activation_memory as activation_memory,
    )
    from .join.attendance import (
        Attendance as Attendance,
    )
    from .join.join import (
        Join as Join,
    )
    from .join.own_joinables import (
        shadowed_by as shadowed_by,
    )
    from .join.participants import (
        Joinable as Joinable,
        JoinHook as JoinHook,
    )
    from .comm.launch import (
        run as run,
    )
    from .comm.live import (
        report_step as report_step,
    )
    from .comm.objects import (
        broadcast_object_list as broadcast_object_list,
        gather_object as gather_object,
        scatter_object_list as scatter_object_list,
    )
    from .optim.optimizer import (
        ZeroRedundancyOptimizer as ZeroRedundancyOptimizer,
    )
    from .backward.ddp_overlap import (
        overlap as overlap,
    )
    from .backward.torch_hooks import (
        hook_with_zero_step as hook_with_zero_step,
        hook_with_zero_step_interleaved as hook_with_zero_step_interleaved,
    )
    from .backward.data_parallelism import (
        data_parallel as data_parallel,
    )
    from .comm.ranks import (
        get_global_rank as get_global_rank,
        get_group_rank as get_group_rank,
        get_process_group_ranks as get_process_group_ranks,
    )
    from .comm.agreement import (
        agree as agree,
        agreeing as agreeing,
    )
    from .comm.coalescing import (
        coalescing_manager as coalescing_manager,
    )
    from .comm.ending import (
        fail as fail,
    )
    from .comm.groups import (
        Group as Group,
    )
    from .comm.subgroups import (
        two_level as two_level,
    )
    from .comm.recording import (
        record as record,
    )
    from .comm.simulation import (
        simulate as simulate,
    )
    from .plan.schedule import (
        make_schedule as make_schedule,
    )
    from .plan.balancing import (
        balanced as balanced,
        mixed as mixed,
    )
    from .plan.grids import (
        Grid as Grid,
        GridPlan as GridPlan,
    )
    from .plan.span_moves import (
        moves as moves,
    )
    from .plan.policies import (
        even as even,
        greedy as greedy,
    )
    from .plan.shards import (
        ShardPlan as ShardPlan,
        Span as Span,
    )
    from .plan.specs import (
        ParamSpec as ParamSpec,
    )


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
