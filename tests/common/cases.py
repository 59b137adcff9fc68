"""Several cases in one launch of ranks: to start processes takes longer than most cases."""

from collections.abc import Callable, Mapping
from typing import Any

from zero_nb.comm.launch import run


def run_each(
    size: int,  # ranks
    f: Callable[..., Any],  # called on each rank for each case
    cases: Mapping[Any, tuple[Any, ...]],  # arguments of `f`, by a name
    **options: Any,  # of `run`
) -> dict[Any, list[Any]]:  # what the ranks returned, in rank order, by name
    """Run all cases one after the other, in their order; an error says in which one it was."""

    def run_one(name: Any) -> Any:
        try:
            return f(*cases[name])
        except BaseException:
            print(f"case {name}", flush=True)
            raise

    ranks = run(size, lambda: {name: run_one(name) for name in cases}, **options)
    return {name: [rank[name] for rank in ranks] for name in cases}
