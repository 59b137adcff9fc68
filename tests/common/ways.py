"""Ways in which a reduce-scatter or a gather moves."""

import pytest
import torch.distributed as dist

from zero_nb.comm import relays


def take_way(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Let groups that are made from now on share memory ("memory"), send messages as between
    machines ("messages"), or as if every two ranks had a machine of their own ("hosts")."""
    monkeypatch.setenv("ZERO_NB_MEMORY", str(int(way == "memory")))
    if way == "hosts":
        monkeypatch.setattr(relays, "_host", lambda: f"{dist.get_rank() // 2:08x}")
