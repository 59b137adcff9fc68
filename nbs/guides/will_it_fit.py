"""Predict what training a small GPT takes, train it, and compare:

torchrun --nproc-per-node 2 will_it_fit.py --batch 4 --context 128
"""

import argparse
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from zero_nb import ZeroRedundancyOptimizer, estimate, memory_report


@dataclass(frozen=True)
class Shape:
    """What decides how many activations a decoder-only transformer keeps for backward."""

    layers: int
    width: int  # of the hidden states
    heads: int  # of queries
    vocabulary: int
    ffn: int  # width inside the MLP
    kv: int  # width of keys, and of values
    gated: bool = False  # the MLP multiplies two projections, as in Llama
    dropout: bool = False  # three dropouts in each block, as GPT-2 has in training


GPT2_XL = Shape(48, 1600, 25, 50257, 6400, 1600, dropout=True)
LLAMA_3_8B = Shape(32, 4096, 32, 128256, 14336, 1024, gated=True)
LLAMA_3_70B = Shape(80, 8192, 64, 128256, 28672, 1024, gated=True)


def block_bytes(
    shape: Shape,
    batch: int,  # sequences on a rank
    context: int,  # tokens in a sequence
    itemsize: int = 2,  # bytes of an activation
    scores: bool = False,  # keep the attention scores; False: the kernel recomputes them (flash)
) -> int:
    """Count the bytes that one block keeps for backward.

    Source: Korthikanti et al. 2022, arXiv:2205.05198, section 4.1, without its parallel terms."""
    norms = 2 * shape.width  # their inputs
    attention = 3 * shape.width + 2 * shape.kv  # input, query, key, value, and what it gives
    mlp = shape.width + (4 if shape.gated else 2) * shape.ffn
    per_token = itemsize * (norms + attention + mlp) + 2 * shape.width * shape.dropout  # masks
    if scores:
        kept = 2 * itemsize + 1 if shape.dropout else itemsize  # before and after dropout, the mask
        per_token += kept * shape.heads * context
    return batch * context * per_token


def activation_bytes(
    shape: Shape,
    batch: int,  # sequences on a rank
    context: int,  # tokens in a sequence
    itemsize: int = 2,  # bytes of an activation
    keep: str = "flash",  # "scores": everything; "flash": all but attention scores; "inputs": of blocks
) -> int:
    """Count the bytes of activations at the end of forward, or, of "inputs", in the first backward.

    The loss is taken in float32. Source: as for `block_bytes`, sections 4.3 and 5."""
    if keep not in ("scores", "flash", "inputs"):
        raise ValueError(f'keep must be "scores", "flash" or "inputs", got {keep!r}')
    tokens = batch * context
    block = block_bytes(shape, batch, context, itemsize, scores=keep == "scores")
    blocks = shape.layers * block
    if keep == "inputs":  # and while one block is computed again, all that it keeps
        blocks = shape.layers * tokens * shape.width * itemsize + block
    return blocks + tokens * (2 * shape.width * itemsize + 4 * shape.vocabulary)


class Block(nn.Module):
    """A block of GPT-2 without dropout."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add attention, then the MLP."""
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norms[1](x))


class Gpt(nn.Module):
    """A decoder-only transformer of the given shape, with plain layers."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.Sequential(*(Block(shape.width, shape.heads) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        """Score the next token at each place."""
        return self.head(self.norm(self.blocks(self.embed(letters))))


def saved_bytes(model: nn.Module, forward) -> tuple[torch.Tensor, int]:
    """Give the loss, and the bytes of all tensors that autograd keeps for backward."""
    known = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = forward()
    return loss, sum(kept.values())


def compare_with_ranks(shape: Shape, batch: int, context: int, steps: int = 3):
    """Train, and give the bytes of each category on this rank: predicted, and counted."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Gpt(shape), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), AdamW, lr=1e-3)
    for _ in range(steps):
        x = torch.randint(shape.vocabulary, (batch, context + 1))
        optimizer.zero_grad()
        loss, activations = saved_bytes(
            ddp.module, lambda x=x: cross_entropy(ddp(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        )
        loss.backward()
        optimizer.step()
    report = memory_report(ddp, optimizer)
    said = estimate(ddp.module, AdamW, dist.get_world_size(), group_rank=dist.get_rank())
    kinds = ("parameters", "gradients", "state")
    predicted = {kind: getattr(said, kind) for kind in kinds}
    counted = {kind: report.row(dist.get_rank(), kind).held for kind in kinds}
    predicted["activations"] = activation_bytes(shape, batch, context, 4)
    counted["activations"] = activations
    return predicted, counted


def main() -> None:
    """Compare as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4, help="(default: 4)")
    parser.add_argument("--width", type=int, default=256, help="(default: 256)")
    parser.add_argument("--batch", type=int, default=4, help="sequences on a rank (default: 4)")
    parser.add_argument("--context", type=int, default=128, help="tokens each (default: 128)")
    given = parser.parse_args()
    shape = Shape(given.layers, given.width, 4, 512, 4 * given.width, given.width)
    dist.init_process_group()
    predicted, counted = compare_with_ranks(shape, given.batch, given.context)
    if dist.get_rank() == 0:
        for kind, nbytes in predicted.items():
            print(f"{kind:<11}  predicted {nbytes:>11,} B  counted {counted[kind]:>11,} B")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
