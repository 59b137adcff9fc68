"""What a command says of wrong options."""

import pytest

from zero_nb.apps import cli


def refused(capsys, *words):
    """Call `main` in this process; give its exit status and what it said."""
    with pytest.raises(SystemExit) as end:
        cli.main(list(words))
    told = capsys.readouterr()
    return end.value.code, told.err, told.out
