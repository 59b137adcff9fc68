"""Tests that need a GPU, and the backends of their ranks."""

import pytest
import torch

GPU = "cpu:gloo,cuda:nccl"  # the backends of a rank with a GPU


def cuda(test):  # is_available() would keep ranks from being forked
    return pytest.mark.cuda(
        pytest.mark.skipif(not torch.cuda.device_count(), reason="needs a GPU, and -m cuda")(test)
    )
