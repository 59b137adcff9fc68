"""Digests of tensors that have no elements, or come to have others at the same address."""

import pytest
import torch

from zero_nb.verify.checksums import digests
from zero_nb.verify.digest_trace import KeptDigests


def test_a_tensor_without_elements_has_a_digest_whatever_its_strides():
    empty = torch.empty(0)
    others = [empty[::2], torch.empty(0, 3).t(), torch.empty(3, 0).as_strided((3, 0), (5, 7))]
    assert digests([*others, empty]).tolist() == [0] * 4


@pytest.mark.parametrize(("shape_before", "shape_now"), [(8, 4), (4, 8)])
def test_kept_digests_follow_a_tensor_that_has_other_elements_at_its_address(
    shape_before, shape_now
):
    """Only what the tensor has now is compared: the last of eight elements, or not."""
    memory = torch.zeros(8)
    tensor = torch.empty(0)
    kept = KeptDigests()
    for size in (shape_before, shape_now):
        tensor.data = memory[:size]
        kept.keep({"t": (tensor, tensor.detach())})
    memory[7] = 1.0
    kept.compare({"t": (tensor, tensor.detach())}, "step 2")
    assert kept.restart() == (["t, step 2"] if shape_now == 8 else [])


def test_a_tensor_is_not_compared_with_what_it_had_in_another_shape():
    tensors = [torch.zeros(8), torch.zeros(2)]
    kept = KeptDigests()
    kept.keep({str(i): (tensor, tensor.detach()) for i, tensor in enumerate(tensors)})
    tensors[0].data = tensors[0].data[:4]
    kept.compare({"0": (tensors[0], tensors[0].detach())}, "step 2")
    assert kept.restart() == []
