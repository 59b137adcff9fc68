"""How many functions a call makes others call."""

import sys


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
