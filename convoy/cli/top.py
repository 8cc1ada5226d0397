"""The command itself, which the verbs are added to."""

import os
from typing import Annotated

import typer

from convoy._version import __version__

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Train one CNN on all the devices you have, as fast as their speeds add up.",
)


@app.callback(invoke_without_command=True)
def _top(version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    if version:
        print(f"convoy {__version__}")
        raise typer.Exit


def in_job() -> bool:
    """Whether torchrun, srun or mpirun started this process as one of a job.

    Its place is then told in torchrun's variables, to all that follows here and to the processes that this one starts.

    Raises:
        InputError: as :func:`convoy.comm.launch_env.as_torchrun`.
    """
    from convoy.comm.launch_env import as_torchrun, is_one_of_job

    os.environ.update(as_torchrun(os.environ))
    return is_one_of_job(os.environ)
