"""Agents of torchrun whose ranks are forked from the process they are in."""

import gc
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.distributed.launcher.api import elastic_launch


def _be_rank(program: Callable[..., Any], *args: Any) -> Any:
    """Run a program on a forked rank, and leave alone what the process before has left behind: a server of a
    store that is collected here would wait for its thread, which is in that process only."""
    gc.freeze()
    return program(*args)


def forking_agent(
    config: Any,  # of `elastic_launch`
    program: Callable[..., Any],  # of each rank
) -> Callable[..., Any]:  # takes the program's arguments
    """Make an agent that forks its ranks, and lets the first of them serve their store.

    By default the agent does, in a thread, and looks up the names of those who connect: a rank that is forked at
    that moment has a lock of the C library that nobody opens any more, and waits for ever."""
    config.start_method = "fork"
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return partial(elastic_launch(config, _be_rank), program)
