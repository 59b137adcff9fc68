"""Agents of torchrun whose ranks are forked from the process they are in."""

import os
from typing import Any


def fork_ranks(
    config: Any,  # of `elastic_launch`
) -> None:
    """Let an agent fork its ranks, and let the first of them serve their store.

    By default the agent does, in a thread, and looks up the names of those who connect: a rank that is forked at
    that moment has a lock of the C library that nobody opens any more, and waits for ever."""
    config.start_method = "fork"
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
