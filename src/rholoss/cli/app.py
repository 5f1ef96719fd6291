"""All commands put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from rholoss import __version__
from rholoss.cli.advise import advise
from rholoss.cli.demo import demo
from rholoss.cli.errors import TRACEBACK, TRACEBACK_VARIABLE, Commands
from rholoss.cli.il import il
from rholoss.cli.methods import methods

# Plain help texts: examples keep their lines, and a file gets the same text as a terminal.
app = typer.Typer(
    cls=Commands, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
)


@app.callback(invoke_without_command=True)
def root(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    traceback: Annotated[
        bool,
        typer.Option(
            TRACEBACK, help=f"Show where an error comes from (or set {TRACEBACK_VARIABLE}=1)."
        ),
    ] = False,
) -> None:
    """Train on the points that are learnable, worth learning and not yet learnt (RHO-LOSS).

    Objects of your own are named as module:attribute, e.g. mytask:train for `train` in mytask.py in
    the current directory. An id is the row number of a point in its data set. An epoch is one pass
    over the candidates, of which a share (`keep`) is trained on.

    \b
    The usual way:
      rholoss demo                                   see what it does, a minute or two
      rholoss advise --model mytask:target --data mytask:train
                                                     can it pay on this machine?
      rholoss il fit --holdout mytask:holdout --score mytask:train \\
                     --model mytask:small --out il/mytask
      then in your loop:  batch = select(model, batch)
    """
    if version:
        typer.echo(f"rholoss {__version__}")
    elif ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


app.command(short_help="See what selection does, on real digits.")(demo)
app.command(short_help="Can it pay? Measures your model on your machine.")(advise)
app.add_typer(il, name="il", short_help="Irreducible losses: fit, score, check, show.")
app.command(short_help="All methods, what they read and cost.")(methods)


def run(args: Sequence[str]) -> int:
    """Run a command line and return its exit code."""
    return typer.main.get_command(app).main(list(args), standalone_mode=False)
