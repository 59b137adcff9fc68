"""Interrupts at a line of one's choice."""

import sys


class Interrupts:
    """A trace that raises `KeyboardInterrupt` at one of the lines that this thread runs in some folders."""

    def __init__(self, at, *rooms):
        self.left = at
        self.rooms = rooms  # parts of the paths of files

    def __call__(self, frame, event, arg):
        if not any(room in frame.f_code.co_filename for room in self.rooms):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self
