"""What several files of tests use, inside and outside the ranks of `run`."""

from .agents import forking_agent
from .cases import run_each
from .errors import caught, caught_error
from .interrupts import Interrupts
from .models import flatten, largest_gap, network
from .ports import free_port
from .ways import take_way

__all__ = [
    "Interrupts",
    "caught",
    "caught_error",
    "flatten",
    "forking_agent",
    "free_port",
    "largest_gap",
    "network",
    "run_each",
    "take_way",
]
