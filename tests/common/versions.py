"""What the torch that is installed can do."""

import inspect

import torch.distributed as dist

# of the ranks of a new group; torch 2.9 sorts them
KEEPS_ORDER = "sort_ranks" in inspect.signature(dist.new_group).parameters
