"""A step in several backward passes, and what each forward holds."""

from unittest.mock import patch

import pytest
import torch
from common.jobs import TINY

from zero_nb.apps.config import MODES
from zero_nb.apps.loop import train_rank
from zero_nb.apps.resume import configured
from zero_nb.apps.sides import Side
from zero_nb.comm.launch import run


def windows_seen(config):
    """Train; give the most windows of a forward with gradients, and of one without."""
    seen = {True: 0, False: 0}
    loss = Side.loss

    def counted(side, module, batch):
        grads = torch.is_grad_enabled()
        seen[grads] = max(seen[grads], len(batch))
        return loss(side, module, batch)

    with patch.object(Side, "loss", counted):
        train_rank(config)
    return seen[True], seen[False]


@pytest.mark.parametrize("mode", MODES)
def test_no_forward_has_more_windows_than_its_part_of_a_step(mode, tmp_path):
    chosen = {**TINY, "mode": mode, "clip": 0.0, "accumulate": 4, "steps": 2, "eval_every": 2}
    del chosen["batch"]
    config = configured({**chosen, "global_batch": 16, "out": str(tmp_path)})
    # of 16 windows, each of 2 ranks has 4 times 2; held-out text is 4 times as much
    assert run(2, windows_seen, config) == [(2, 8), (2, 8)]
