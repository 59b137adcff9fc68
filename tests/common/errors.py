"""Exceptions as values that a rank can return."""

from collections.abc import Callable


def caught_error(
    f: Callable[[], object],  # called once
) -> tuple[str, str] | None:  # the exception's type and its message; None if there was none
    """Call f and give the type name and the message of what it raises."""
    try:
        f()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def caught(
    f: Callable[[], object],  # called once
) -> str | None:  # "ValueError: its message"; None if f raised nothing
    """Call f and give what it raises as one line of text."""
    error = caught_error(f)
    return None if error is None else ": ".join(error)
