"""convoy fleet init, convoy fleet show, convoy setup, convoy key."""

from pathlib import Path
from typing import Annotated

import typer

from convoy.cli.options import PATH, app
from convoy.errors import InputError

fleet_app = typer.Typer(no_args_is_help=True, help="Write a fleet file by asking hosts, and look at one.")
app.add_typer(fleet_app, name="fleet")


@fleet_app.command()
def init(
    hosts: Annotated[
        list[str], typer.Argument(help="Machines as ssh reaches them: name, user@name, name:port; . is this machine.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The fleet file to write.", **PATH)] = Path(
        "fleet.toml"
    ),
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
) -> None:
    """Ask each host over ssh for its processor, GPUs, memory and network card, and write a fleet file of it.

    Nothing needs to be installed on the hosts, and nothing is changed there. What the catalogue knows of a device stands in the
    file; the rest is found by `convoy measure`.

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
    print(f"Wrote {output}. Next: convoy setup --fleet {output}, where the hosts have no Convoy; then convoy doctor")


@fleet_app.command()
def show(fleet: Annotated[Path, typer.Argument(help="Fleet file.", **PATH)]) -> None:
    """Draw a fleet file: its hosts, their devices, the ways between them."""
    from convoy.fleet import read_fleet

    _show(read_fleet(fleet))


def _show(fleet: object) -> None:
    from rich.console import Console

    from convoy.cli.fleet_tree import tree_of

    Console(highlight=False).print(tree_of(fleet))  # type: ignore[arg-type]


@app.command()
def setup(
    fleet: Annotated[Path, typer.Option(help="Fleet file whose hosts have addresses.", **PATH)],
    into: Annotated[
        str,
        typer.Option(
            help="Folder on the hosts in which one for this project is made; without a leading / in the home there."
        ),
    ] = "convoy",
    data: Annotated[
        list[Path] | None,
        typer.Option(help="A file or folder of the project to send though git ignores it. Can be repeated.", **PATH),
    ] = None,
    requirements: Annotated[
        Path | None,
        typer.Option(
            help="A file of package names, one a line: only these, and what they need, at the versions here.",
            **PATH,
        ),
    ] = None,
    wheels: Annotated[
        Path | None, typer.Option(help="A folder of wheels that are sent, and taken before any index.", **PATH)
    ] = None,
    index: Annotated[
        str | None,
        typer.Option(
            help="Package index of the hosts; [b]none[/]: only --wheels. By itself what each host is configured for, and "
            "PyTorch's own for torch.",
            envvar="CONVOY_INDEX",
        ),
    ] = None,
    print_lines: Annotated[bool, typer.Option("--print", help="Print the commands, and run none of them.")] = False,
    doctor: Annotated[
        bool | None, typer.Option(help="Examine the fleet at the end; by itself where packages were installed.")
    ] = None,
) -> None:
    """Bring the hosts of a fleet to the state of this machine: Python packages, the files of this folder, named data.

    ssh, rsync and uv do the work; rsync and uv must be installed here and on each host. Each host gets an environment with the
    versions that are installed here, torch in the build for its devices, and the files of the project that differ. All of it
    lies in one folder there, which the fleet file then names. A second run sends and installs what has changed.

    Example: convoy setup --fleet lab.toml --data data/cifar10
    """
    from convoy.setup.command import setup_fleet

    raise typer.Exit(setup_fleet(fleet, into.rstrip("/"), data or (), requirements, wheels, index, print_lines, doctor))


@app.command()
def key(
    file: Annotated[Path, typer.Argument(help="File to write; only you can read it.", **PATH)],
) -> None:
    """Make the key of a job on several machines that torchrun, srun or mpirun starts; what Convoy starts needs none.

    Bring the file to every machine (scp -p keeps its mode), and name it there with --job-key FILE, or for a script of your own
    in the variable CONVOY_JOB_KEY. Who has it belongs to the job: make another one for each job, and remove it afterwards.

    Example: convoy key job.key
    """
    from convoy.comm.job_key import write_key_file

    write_key_file(file)
    print(f"{file} has a new key. On every machine of the job: --job-key {file}")
