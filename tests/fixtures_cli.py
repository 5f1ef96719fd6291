"""Running a command in the tests."""

from __future__ import annotations

from typer.testing import CliRunner, Result

from rholoss.cli import app as cli_app

FIT = (
    "il fit --holdout fixtures_task:holdout --score fixtures_task:train --model fixtures_task:small"
)


def rholoss_(line: str, **options: object) -> Result:
    return CliRunner().invoke(cli_app.app, line.split(), **options)


def one_line(result: Result) -> str:
    """What a user's error prints: one line on stderr, nothing on stdout, exit code 2."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr
    return result.stderr.strip()
