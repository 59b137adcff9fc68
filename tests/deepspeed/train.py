"""Train with DeepSpeed's ZeRO stage 1 from the beginning or from its files, and go on: what the files in
this folder were made with (DeepSpeed 0.19.8 with torch 2.13, two ranks), and what reads ours.

    DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 train.py save fp32 fp32 fp32/after.pt
    DS_ACCELERATOR=cpu torchrun --nproc-per-node 3 train.py load FOLDER fp32 after.pt"""

import json
import sys

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

OPTIONS = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 0.0,
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}


class Net(nn.Module):
    """Two layers, a frozen parameter and a buffer."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(7, 5)
        self.b = nn.Linear(5, 3, bias=False)
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x):
        return self.b(torch.relu(self.a(x))).square().mean()


def main(how, folder, dtype, after):
    torch.manual_seed(0 if how == "save" else 9)
    model = Net()
    groups = [
        {"params": [model.a.weight, model.b.weight], "weight_decay": 0.1},
        {"params": [model.a.bias], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2 if how == "save" else 1.0)
    bf16 = {"bf16": {"enabled": True}} if dtype == "bf16" else {}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=OPTIONS | bf16)

    def train(first, count):
        for step in range(first, first + count):
            batch = torch.randn(12, 7, generator=torch.Generator().manual_seed(step))
            x = batch[dist.get_rank() :: dist.get_world_size()]
            loss = engine(x.bfloat16() if bf16 else x)
            engine.backward(loss)
            engine.step()

    if how == "save":
        train(0, 3)
        engine.save_checkpoint(folder)
    else:
        path, client_state = engine.load_checkpoint(folder)
        assert path
        print(
            f"rank {dist.get_rank()} has extra {json.dumps(client_state.get('extra'))}", flush=True
        )
    train(3, 2)
    if dist.get_rank() == 0:
        torch.save({name: w.detach().float() for name, w in model.state_dict().items()}, after)


if __name__ == "__main__":
    main(*sys.argv[1:])
