"""Commands of the command line, run in this process."""

import pytest

from fedbudget.cli.main import main


def run_command(
    capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str, str]:
    """Run a command; return exit code, standard output and standard error."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main([*arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code, *capsys.readouterr()
