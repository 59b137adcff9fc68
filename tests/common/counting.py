"""How many functions a call makes others call, and how many tensors its operators give."""

import sys

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def calls(f):
    """Count the functions that a call makes others call."""
    count = 0

    def counted(frame, event, arg):
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(counted)
    try:
        f()
    finally:
        sys.setprofile(before)
    return count


class _Results(TorchDispatchMode):
    """Counts the tensors that operators give."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        self.count += len(tree_leaves(found))
        return found


def results(f):
    """Count the tensors that operators give in a call: views count, too, of which one may make any number."""
    with _Results() as made:
        f()
    return made.count
