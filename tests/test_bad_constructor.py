"""Wrong arguments of the optimizer: each is a clear error on every rank, at once, and the job goes on."""

import functools

import pytest
import torch
import torch.distributed as dist
from common.bad_input import Case, all_cases, check, make, on_one, planned, stepped, weight
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import SGD, AdamW, Muon

from zero_nb.optim.optimizer import ZeroRedundancyOptimizer
from zero_nb.plan.balancing import balanced


def distributed(*shape):
    """Make a parameter of which each rank has some rows."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    mine = weight(shape[0] // dist.get_world_size(), *shape[1:])
    return nn.Parameter(DTensor.from_local(mine.detach(), mesh, [Shard(0)], run_check=False))


CONSTRUCTOR = {
    "no parameters": Case(lambda: make([]), ValueError, "empty parameter list"),
    "an empty generator": Case(lambda: make(p for p in []), ValueError, "empty parameter list"),
    "None": Case(lambda: make(None), TypeError, "iterable of Tensors", "NoneType"),
    "a number": Case(lambda: make(3), TypeError, "iterable of Tensors", "int"),
    "text": Case(lambda: make("weights"), TypeError, "iterable of Tensors", "str"),
    "one tensor": Case(lambda: make(weight()), TypeError, "iterable of Tensors", "Parameter"),
    "a model": Case(lambda: make(nn.Linear(2, 2)), TypeError, "model.parameters()"),
    "a model's state dict": Case(
        lambda: make(nn.Linear(2, 2).state_dict()), TypeError, "group dicts", "OrderedDict"
    ),
    "one group dict": Case(
        lambda: make({"params": [weight()]}), TypeError, "group dicts", "one dict"
    ),
    "a set": Case(lambda: make({weight(), weight(4)}), TypeError, "order", "set"),
    "tensors and groups": Case(lambda: make([{"params": [weight()]}, weight()]), TypeError, "both"),
    "groups and tensors": Case(lambda: make([weight(), {"params": [weight()]}]), TypeError, "both"),
    "a non-tensor": Case(
        lambda: make([weight(), 3]), TypeError, "can only optimize Tensors", "int"
    ),
    "an array": Case(
        lambda: make([weight().detach().numpy()]), TypeError, "can only optimize Tensors", "ndarray"
    ),
    "not a leaf": Case(lambda: make([weight() * 2]), ValueError, "non-leaf"),
    "twice in a list": Case(
        lambda: make([w := weight(), w]), ValueError, "parameters 0 and 1", "listed once"
    ),
    "twice under two names": Case(
        lambda: make([("a", w := weight()), ("b", w)]), ValueError, "listed once"
    ),
    "two of one name": Case(
        lambda: make([("a", weight()), ("a", weight())]), ValueError, "both called 'a'"
    ),
    "some names missing": Case(
        lambda: make([("a", weight()), weight()]), ValueError, "with/without names"
    ),
    "a name that is no text": Case(lambda: make([(1, weight())]), ValueError, "must be text", "1"),
    "a triple": Case(lambda: make([("a", weight(), 1)]), TypeError, "pairs", "tuple of 3"),
    "names in one group only": Case(
        lambda: make([{"params": [("a", weight())]}, {"params": [weight()]}]),
        ValueError,
        "with/without names",
    ),
    "twice in two groups": Case(
        lambda: make([{"params": [w := weight()]}, {"params": [w]}]),
        ValueError,
        "more than one parameter group",
    ),
    "twice in one group": Case(
        lambda: make([{"params": [w := weight(), w]}]), ValueError, "listed once"
    ),
    "a group without parameters": Case(
        lambda: make([{"lr": 1.0}]), ValueError, "'params' key", "'lr'"
    ),
    "a group of None": Case(
        lambda: make([{"params": None}]), TypeError, "'params' of a group", "NoneType"
    ),
    "a group of a model": Case(
        lambda: make([{"params": nn.Linear(2, 2)}]), TypeError, "model.parameters()"
    ),
    "a group of a set": Case(lambda: make([{"params": {weight()}}]), TypeError, "order", "set"),
    "a sparse parameter": Case(
        lambda: make([nn.Parameter(torch.zeros(3, 3).to_sparse())]), ValueError, "only dense"
    ),
    "a parameter of tensor parallelism or FSDP2": Case(
        lambda: make([weight(8, 4), distributed(8, 4)]), ValueError, "parameter 1 is a DTensor"
    ),
    "an overlapping parameter": Case(
        lambda: make([torch.zeros(1).expand(4).requires_grad_()]), ValueError, "must be dense"
    ),
    "a slice": Case(
        lambda: make([torch.zeros(8)[::2].requires_grad_()]), ValueError, "must be dense"
    ),
    "a lazy parameter": Case(
        lambda: make(nn.LazyLinear(3).parameters()), ValueError, "uninitialized parameter"
    ),
    "a parameter without memory": Case(
        lambda: stepped(make([weight(device="meta")])), ValueError, "meta"
    ),
    "no class": Case(lambda: make([weight()], None), TypeError, "must be a class", "None"),
    "a class by name": Case(
        lambda: make([weight()], "AdamW"), TypeError, "must be a class", "'AdamW'"
    ),
    "an instance": Case(
        lambda: make([w := weight()], SGD([w])), TypeError, "must be a class", "SGD"
    ),
    "a function": Case(
        lambda: make([weight()], lambda params: AdamW(params)),
        TypeError,
        "must be a class",
        "as keywords",
    ),
    "a partial class": Case(
        lambda: make([weight()], functools.partial(AdamW, lr=1.0)),
        TypeError,
        "must be a class",
        "as keywords",
    ),
    "a class of something else": Case(
        lambda: make([weight()], nn.Linear), TypeError, "must be a class", "Linear"
    ),
    "the base class": Case(lambda: make([weight()], torch.optim.Optimizer), TypeError, "defaults"),
    "itself": Case(
        lambda: make([weight()], ZeroRedundancyOptimizer),
        ValueError,
        "unsharded class",
        "sharded already",
    ),
    "for sparse gradients": Case(
        lambda: make([weight()], torch.optim.SparseAdam), ValueError, "sparse gradients"
    ),
    "a functional optimizer": Case(
        lambda: make([weight()], functional()), ValueError, "functional", "torch.optim"
    ),
    "couples everything": Case(
        lambda: make([weight()], torch.optim.LBFGS),
        ValueError,
        "cannot be stepped apart",
        "unsharded",
    ),
    "a vector for Muon": Case(lambda: make([weight(4)], Muon), ValueError, "2D", "[4]"),
    "Muon in pieces": Case(
        lambda: make([weight(16, 16)], Muon, shard="even"), ValueError, "whole matrices"
    ),
    "an unknown option": Case(lambda: make([weight()], AdamW, momentun=1), TypeError, "momentun"),
    "a negative rate": Case(
        lambda: make([weight()], AdamW, lr=-1.0), ValueError, "Invalid learning rate: -1.0"
    ),
    "a rate that is no number": Case(
        lambda: make([weight()], AdamW, lr=float("nan")), ValueError, "nan"
    ),
    "a rate as text": Case(lambda: make([weight()], AdamW, lr="0.1"), TypeError, "'str'"),
    "a rate of None": Case(lambda: make([weight()], AdamW, lr=None), TypeError, "'NoneType'"),
    "betas above 1": Case(
        lambda: make([weight()], AdamW, betas=(2, 2)), ValueError, "Invalid beta"
    ),
    "one beta": Case(lambda: make([weight()], AdamW, betas=0.9), TypeError, "'float'"),
    "nesterov without momentum": Case(
        lambda: make([weight()], SGD, nesterov=True), ValueError, "Nesterov"
    ),
    "two kernels": Case(
        lambda: make([weight()], AdamW, fused=True, foreach=True),
        RuntimeError,
        "cannot be `True` together",
    ),
    "differentiable": Case(
        lambda: make([weight()], AdamW, differentiable=True),
        ValueError,
        "must be False",
        "unsharded",
    ),
    "a differentiable group": Case(
        lambda: make([{"params": [weight()], "differentiable": True}]), ValueError, "must be False"
    ),
    "capturable on the CPU": Case(
        lambda: stepped(make([weight()], AdamW, capturable=True)), AssertionError, "capturable"
    ),
    "a group's class by name": Case(
        lambda: make([{"params": [weight()], "optimizer_class": "SGD"}]),
        TypeError,
        "must be a class",
        "'SGD'",
    ),
    "a group's class of None": Case(
        lambda: make([{"params": [weight()], "optimizer_class": None}]),
        TypeError,
        "must be a class",
    ),
    "a group's class that couples": Case(
        lambda: make([{"params": [weight()], "optimizer_class": torch.optim.LBFGS}]),
        ValueError,
        "stepped apart",
    ),
    "a group sharded nowhere": Case(
        lambda: make([{"params": [weight()], "shard": "nowhere"}]), ValueError, "'nowhere'"
    ),
}
SETTINGS = {
    "an unknown shard": Case(
        lambda: make([weight()], shard="halves"),
        ValueError,
        "'even', 'whole', 'greedy'",
        "'halves'",
    ),
    "shard=None": Case(lambda: make([weight()], shard=None), ValueError, "'auto'", "None"),
    "shard=3": Case(lambda: make([weight()], shard=3), ValueError, "'auto'", "3"),
    "a list of shards": Case(
        lambda: make([weight()], shard=["even"]), ValueError, "'auto'", "['even']"
    ),
    "a policy that fails": Case(
        lambda: make([weight()], shard=lambda specs, n, loads=None: 1 / 0),
        ZeroDivisionError,
        "division by zero",
    ),
    "a policy that says nothing": Case(
        lambda: make([weight()], shard=lambda specs, n, loads=None: None),
        TypeError,
        "must return a ShardPlan",
        "NoneType",
    ),
    "a policy that forgets": Case(
        lambda: make([weight()], shard=planned([], [])), ValueError, "owned by no rank"
    ),
    "a policy that gives twice": Case(
        lambda: make([weight()], shard=planned([(0, 0, 16)], [(0, 0, 16)])),
        ValueError,
        "owned by",
        "and another",
    ),
    "a policy that goes too far": Case(
        lambda: make([weight()], shard=planned([(0, 0, 17)], [])), ValueError, "16"
    ),
    "a policy of a stranger": Case(
        lambda: make([weight()], shard=planned([(0, 0, 16)], [(1, 0, 4)])), (ValueError, IndexError)
    ),
    "a policy for other ranks": Case(
        lambda: make([weight()], shard=lambda specs, n, loads=None: balanced(specs, n + 1)),
        ValueError,
        "over 2 ranks",
        "over 3 ranks",
    ),
    "a policy with too few arguments": Case(
        lambda: make([weight()], shard=lambda specs: None), TypeError, "argument"
    ),
    "master dtype as text": Case(
        lambda: make([weight()], master_dtype="float32"), TypeError, "torch.float32", "'float32'"
    ),
    "master dtype as a type": Case(
        lambda: make([weight()], master_dtype=float), TypeError, "floating-point dtype"
    ),
    "an integer master dtype": Case(
        lambda: make([weight(dtype=torch.bfloat16)], master_dtype=torch.int32),
        TypeError,
        "torch.int32",
    ),
    "a complex master dtype": Case(
        lambda: make([weight()], master_dtype=torch.complex64), TypeError, "torch.complex64"
    ),
    "a lower master dtype": Case(
        lambda: make([weight()], master_dtype=torch.bfloat16),
        ValueError,
        "does not hold torch.float32",
    ),
    "another master dtype of 16 bits": Case(
        lambda: make([weight(dtype=torch.bfloat16)], master_dtype=torch.float16),
        ValueError,
        "does not hold torch.bfloat16",
    ),
    "a bucket of nothing": Case(
        lambda: make([weight()], bucket_cap_mb=0), ValueError, "above 0", "got 0"
    ),
    "a negative bucket": Case(
        lambda: make([weight()], bucket_cap_mb=-1), ValueError, "above 0", "got -1"
    ),
    "a bucket that is no number": Case(
        lambda: make([weight()], bucket_cap_mb=float("nan")), ValueError, "above 0", "nan"
    ),
    "a bucket as text": Case(
        lambda: make([weight()], bucket_cap_mb="1"), ValueError, "above 0", "'1'"
    ),
    "a bucket of None": Case(
        lambda: make([weight()], bucket_cap_mb=None), ValueError, "above 0", "None"
    ),
    "views as text": Case(
        lambda: make([weight()], AdamW, None, "yes"),
        TypeError,
        "parameters_as_bucket_view",
        "'yes'",
    ),
    "the rate by position": Case(
        lambda: make([weight()], AdamW, None, 1e-3),
        TypeError,
        "parameters_as_bucket_view",
        "by keyword",
    ),
    "overlap as text": Case(
        lambda: make([weight()], overlap_with_ddp="yes"), TypeError, "overlap_with_ddp", "'yes'"
    ),
    "overlap by position": Case(
        lambda: make([weight()], AdamW, None, False, "after"),
        TypeError,
        "overlap_with_ddp",
        "'after'",
    ),
    "too many by position": Case(
        lambda: make([weight()], AdamW, None, False, False, 1e-3), TypeError, "positional"
    ),
    "a group by name": Case(
        lambda: make([weight()], AdamW, "gloo"), ValueError, "is not part of group", "'gloo'"
    ),
    "a group of a list": Case(
        lambda: make([weight()], AdamW, [0, 1]), ValueError, "is not part of group", "[0, 1]"
    ),
    "a group by number": Case(lambda: make([weight()], AdamW, 7), ValueError, "7"),
    "somebody else's group": Case(
        lambda: make([weight()], AdamW, dist.GroupMember.NON_GROUP_MEMBER),
        ValueError,
        "is not part of group",
        "made",
    ),
    "a destroyed group": Case(
        lambda: make([weight()], AdamW, destroyed()), ValueError, "before it is destroyed"
    ),
}


def functional():
    from torch.distributed.optim import _FunctionalAdam

    return _FunctionalAdam


def destroyed():
    group = dist.new_group()
    dist.barrier()  # gloo's ranks may still be connecting when one of them has the group
    dist.destroy_process_group(group)
    return group


def spoilt(case, ordinary=lambda: make([weight()])):
    return lambda: on_one(case.do, ordinary)()


def on_one_rank(cases, *names, **ordinary):
    """Give cases of which only one rank does what is wrong."""
    return {
        f"{name}, on one rank": Case(
            spoilt(cases[name], **ordinary), cases[name].kind, *cases[name].words
        )
        for name in names
    }


ON_ONE_RANK = {
    **on_one_rank(
        CONSTRUCTOR,
        "no parameters",
        "None",
        "a model",
        "a set",
        "a non-tensor",
        "twice in a list",
        "a sparse parameter",
        "no class",
        "itself",
        "couples everything",
        "an unknown option",
        "a negative rate",
        "differentiable",
        "two kernels",
    ),
    **on_one_rank(
        SETTINGS,
        "an unknown shard",
        "an integer master dtype",
        "the rate by position",
        "overlap as text",
    ),
    **on_one_rank(
        SETTINGS,
        "a policy that fails",
        "a policy that says nothing",
        "a policy that forgets",
        ordinary=lambda: make([weight()], shard=balanced),
    ),
    "a bucket of nothing, on one rank": Case(
        lambda: make([weight()], bucket_cap_mb=on_one(0, 1)),
        ValueError,
        "bucket_cap_mb must be above 0",
    ),
}


CASES = all_cases(constructor=CONSTRUCTOR, settings=SETTINGS, disagreeing=ON_ONE_RANK)


@pytest.mark.parametrize(("batch", "name"), CASES)
def test_it_is_one_clear_error_on_every_rank_and_the_job_goes_on(batch, name):
    check(batch, name)
