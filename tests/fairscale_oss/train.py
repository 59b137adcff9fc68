"""Train with fairscale's OSS and save what its users save: what `last.pt` and `after.pt` in this folder were
made with (fairscale 0.4.13 with torch 2.13, two ranks).

    torchrun --nproc-per-node 2 train.py last.pt after.pt"""

import sys

import torch
import torch.distributed as dist
from fairscale.optim.oss import OSS
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Net(nn.Module):
    """Two layers and a buffer."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(7, 5)
        self.b = nn.Linear(5, 3, bias=False)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x):
        return self.b(torch.relu(self.a(x))).square().mean()


def main(last, after):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Net()
    groups = [
        {"params": [model.a.weight, model.b.weight], "weight_decay": 0.1},
        {"params": [model.a.bias], "weight_decay": 0.0},
    ]
    optimizer = OSS(groups, torch.optim.AdamW, lr=1e-2, amsgrad=True)
    parallel = DDP(model)

    def train(first, count):
        for step in range(first, first + count):
            batch = torch.randn(12, 7, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            parallel(batch[dist.get_rank() :: dist.get_world_size()]).backward()
            optimizer.step()

    train(0, 3)
    optimizer.consolidate_state_dict(0)
    if dist.get_rank() == 0:
        content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
        torch.save(content, last)
    train(3, 2)
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), after)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
