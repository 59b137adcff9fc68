"""What reads or writes an optimizer between two steps: each is called with the optimizer, its model, what takes
its steps, and an older state dict."""

import copy
import pickle

import torch
from torch import nn

from common import caught
from zero_nb.backward.data_parallelism import DataParallel


def consolidated(zero, *_):
    zero.consolidate_state_dict(to=None)
    return copy.deepcopy(zero.state_dict())


def loaded(zero, *_):
    saved = consolidated(zero)
    zero.load_state_dict(saved)


def loaded_old(zero, module, handle, old):
    zero.load_state_dict(copy.deepcopy(old))


def copied(zero, *_):
    return [
        p.detach().clone() for group in copy.deepcopy(zero).param_groups for p in group["params"]
    ]


def pickled(zero, *_):
    return [
        p.detach().clone()
        for group in pickle.loads(pickle.dumps(zero)).param_groups
        for p in group["params"]
    ]


def reduced(zero, *_):
    return [
        p.detach().clone() for group in zero.__getstate__()["param_groups"] for p in group["params"]
    ]


def stepped_here(zero, *_):
    return [
        key.detach().clone()
        for state in zero.state.values()
        for key in state
        if isinstance(key, torch.Tensor)
    ]


def frozen(zero, module, handle, *_):  # which DDP does not take
    if isinstance(handle, DataParallel):
        next(iter(module.parameters())).requires_grad_(False)


def detached(zero, module, handle, *_):
    if handle is not None:
        handle.detach()
    return consolidated(zero)


def left(zero, module, handle, *_):  # an exception that every rank sees ends the block
    if handle is None:
        return None
    try:
        with handle:
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    return consolidated(zero)


def seen(zero, *_):  # as an exponential moving average reads them
    return [p.detach().clone() for group in zero.param_groups for p in group["params"]]


def added(zero, module, handle, *_):
    if handle is not None:
        return caught(lambda: zero.add_param_group({"params": [nn.Parameter(torch.ones(3))]}))
    extra = nn.Parameter(torch.ones(3, dtype=next(iter(module.parameters())).dtype))
    zero.add_param_group({"params": [extra]})
    return consolidated(zero)


def in_hooks(zero, *_):  # which a user may read anything in
    found = []
    for register in (zero.register_state_dict_pre_hook, zero.register_load_state_dict_pre_hook):
        register(lambda *_: found.append(seen(zero)))
    for call in (zero.state_dict, lambda: zero.load_state_dict({"state": {}, "param_groups": []})):
        caught(call)
    return found


READERS = {
    reader.__name__: reader
    for reader in (
        consolidated,
        loaded,
        loaded_old,
        copied,
        pickled,
        reduced,
        stepped_here,
        frozen,
        detached,
        left,
        added,
        in_hooks,
    )
}
