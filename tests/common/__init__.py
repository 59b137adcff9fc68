"""What several files of tests use, inside and outside the ranks of `run`."""

from .errors import caught, caught_error
from .models import flatten, largest_gap

__all__ = ["caught", "caught_error", "flatten", "largest_gap"]
