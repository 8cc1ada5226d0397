"""convoy fleet: init, show, setup, key."""

from pathlib import Path
from typing import Annotated

import typer

from convoy.cli.options import PATH, app
from convoy.errors import InputError

fleet_app = typer.Typer(no_args_is_help=True, help="Prepare a fleet: write its file, set up its hosts.")
app.add_typer(fleet_app, name="fleet")


@fleet_app.command()
def init(
    hosts: Annotated[
        list[str], typer.Argument(help="Machines as ssh reaches them: name, user@name, name:port; . is this machine.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The fleet file to write.", **PATH)] = Path(
        "fleet.toml"
    ),
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Write a fleet file by asking each host over ssh for its processor, GPUs, memory and NIC.

    Nothing needs to be installed on the hosts, and nothing is changed there. The file has what the catalogue
    knows of each device; `convoy measure` finds the rest.

    Example: convoy fleet init . user@host2 host3 -o lab.toml
    """
    from convoy.files import write_whole
    from convoy.launch.survey import ask, fleet_of, host_of

    if output.exists() and not force:
        raise InputError(f"{output} is there already: give another -o, or --force to write over it")
    named = [host_of(text) for text in hosts]
    print(f"Asking {len(named)} hosts ...", flush=True)
    fleet, notes = fleet_of(named, ask(named))
    write_whole(output, fleet.to_toml())
    _show(fleet)
    for note in notes:
        print(f"Note: {note}.")
    print(f"Wrote {output}. Next: convoy fleet setup --fleet {output}, if the hosts have no Convoy; then convoy doctor")


@fleet_app.command()
def show(fleet: Annotated[Path, typer.Argument(help="Fleet file.", **PATH)]) -> None:
    """Draw a fleet file: its hosts, devices and links."""
    from convoy.fleet import read_fleet

    _show(read_fleet(fleet))


def _show(fleet: object) -> None:
    from rich.console import Console

    from convoy.cli.fleet_tree import tree_of

    Console(highlight=False).print(tree_of(fleet))  # type: ignore[arg-type]


@fleet_app.command()
@app.command(hidden=True)  # its place until 0.1
def setup(
    fleet: Annotated[Path, typer.Option(help="Fleet file whose hosts have addresses.", **PATH)],
    into: Annotated[
        str,
        typer.Option(help="Folder on the hosts, for this and other projects; without a leading / in the home there."),
    ] = "convoy",
    data: Annotated[
        list[Path] | None,
        typer.Option(help="File or folder of the project to send although git ignores it; may be repeated.", **PATH),
    ] = None,
    requirements: Annotated[
        Path | None,
        typer.Option(help="File of package names: send only these and what they need, at the versions here.", **PATH),
    ] = None,
    wheels: Annotated[Path | None, typer.Option(help="Folder of wheels that are sent and preferred.", **PATH)] = None,
    index: Annotated[
        str | None,
        typer.Option(
            help="Package index of the hosts; none: only --wheels. Default: each host's own, and PyTorch's for torch.",
            envvar="CONVOY_INDEX",
        ),
    ] = None,
    print_lines: Annotated[bool, typer.Option("--print", help="Print the commands, and run none of them.")] = False,
    doctor: Annotated[
        bool | None, typer.Option(help="Examine the fleet at the end. Default: if packages were installed.")
    ] = None,
) -> None:
    """Bring the hosts of a fleet to the state of this machine.

    ssh, rsync and uv do the work; rsync and uv must be installed here and on each host. Each host gets an environment with the
    versions that are installed here, torch in the build for its devices, and the files of this folder that differ. All of it is
    in one folder there, whose name is written into the fleet file. A second run sends and installs only changes.

    Example: convoy fleet setup --fleet lab.toml --data data/cifar10
    """
    from convoy.setup.setup import setup_fleet

    raise typer.Exit(setup_fleet(fleet, into.rstrip("/"), data or (), requirements, wheels, index, print_lines, doctor))


@fleet_app.command()
@app.command(hidden=True)  # its place until 0.1
def key(
    file: Annotated[Path, typer.Argument(help="File to write; only you can read it.", **PATH)],
) -> None:
    """Make the key of a job on several machines that torchrun, srun or mpirun starts.

    Bring the file to every machine (scp -p keeps its mode), and name it there with --job-key FILE, or for a script of your own
    in the variable CONVOY_JOB_KEY. Who has it can join the job: make a new one for each job, and remove it afterwards.
    Jobs that Convoy starts need none.

    Example: convoy fleet key job.key
    """
    from convoy.comm.job_key import write_key_file

    write_key_file(file)
    print(f"{file} has a new key. On every machine of the job: --job-key {file}")
