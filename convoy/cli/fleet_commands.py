"""Defines the verbs emulate and doctor, and those of convoy fleet: init, show, setup, key."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.tree import Tree

from convoy.cli.options import app, argument, flag, in_job, option, path_of
from convoy.errors import InputError
from convoy.fleet import Fleet, Nic, read_fleet
from convoy.report.numbers import in_bits


@app.command(context_settings={"allow_interspersed_args": False})
def emulate(
    fleet: Annotated[Path, argument("FLEET", "Fleet file: hosts, NICs, devices with their cores.", parser=path_of)],
    command: Annotated[list[str], argument("COMMAND", "Program and arguments, run per device; write -- before it.")],
    limit_s: Annotated[float, option("TIME", "Time after which the command is ended.", "--limit")] = 3600.0,
    goes_on: Annotated[bool, flag("Let the others continue if a device is lost.", "--goes-on")] = False,
) -> None:
    """Run a command on every device of an emulated fleet (Linux, root).

    Each host becomes a network namespace with its NIC's rates (tc tbf). Each device gets its cores as a
    processor quota (cgroup) and torchrun's environment. Everything is removed afterwards, also after an interrupt.

    Example: convoy emulate benchmarks/fleets/mixed4.toml -- convoy train --plan hybrid
    """
    from convoy.emulate.run import emulate as run

    program = command[1:] if command[0] == "--" else command
    if not program:
        raise InputError("nothing to run: write a command after --, e.g. convoy emulate fleet.toml -- convoy train")
    raise typer.Exit(run(read_fleet(fleet), program, timeout_s=limit_s, fleet_path=fleet, continues=goes_on))


@app.command()
def doctor(
    fleet: Annotated[Path | None, option("PATH", "Fleet file: hosts, expected speeds of links and devices.")] = None,
    json_file: Annotated[Path | None, option("PATH", "Also write facts and findings to this file.", "--json")] = None,
    wait: Annotated[float, option("TIME", "Time to wait for hosts that have not connected.")] = 30.0,
    case: Annotated[str | None, typer.Option(hidden=True)] = None,  # set when started over ssh (JSON)
) -> None:
    """Examine this machine, or all machines of a job, before any training.

    It prints each finding with its remedy. Started on every host (convoy emulate, torchrun, srun, mpirun), or over ssh with
    a fleet file whose hosts have addresses, it also tries every pair of hosts: closed ports, slow links, other versions.
    Exit status: 0 ready to train, 1 there are errors.

    Example: convoy emulate fleet.toml -- convoy doctor
    """
    from convoy.doctor.doctor import run_doctor

    in_job()
    raise typer.Exit(run_doctor(fleet, json_file, wait, case))


fleet_app = typer.Typer(no_args_is_help=True, help="Prepare a fleet: write its file, set up its hosts.")
app.add_typer(fleet_app, name="fleet")


@fleet_app.command()
def init(
    hosts: Annotated[list[str], argument("HOST...", "As ssh reaches them: name, user@name, name:port; . is this one.")],
    output: Annotated[Path, option("PATH", "The fleet file to write.", "--output", "-o")] = Path("fleet.toml"),
    force: Annotated[bool, flag("Replace an existing file.", "--force")] = False,
) -> None:
    """Write a fleet file by asking each host over ssh for its processor, GPUs, memory and NIC.

    Nothing needs to be installed on the hosts, and nothing is changed there. The file contains the catalogue's
    data about each device; `convoy measure` adds the rest.

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
def show(fleet: Annotated[Path, argument("FLEET", "Fleet file.", parser=path_of)]) -> None:
    """Draw a fleet file: its hosts, devices and links."""
    _show(read_fleet(fleet))


def _show(fleet: Fleet) -> None:
    devices, hosts = len(fleet.devices), len(fleet.hosts)
    tree = Tree(f"{devices} device{'s' * (devices > 1)} on {hosts} host{'s' * (hosts > 1)}")
    for host in fleet.hosts:
        nic = host.card or fleet.network
        address = f"  ({host.address})" if host.address else ""
        branch = tree.add(f"{host.name}{address}{f'  {_rates(nic)}' if nic else ''}")
        for index in fleet.devices_on(host.name):
            device = fleet.devices[index]
            facts = [f"{index}: {device.name}", device.kind if device.class_name is None else device.class_name]
            facts += [f"{device.cores:g} cores"] if device.cores else []
            facts += [f"{device.memory_bytes / 1e9:.3g} GB"] if device.memory_bytes else []
            facts += [f"slowed down {device.slowdown:g}x"] if device.slowdown != 1 else []
            branch.add(", ".join(facts))
    for segment in fleet.segments:
        tree.add(f"{segment.name}: {', '.join(segment.hosts)}; to all others {_rates(segment.uplink)}")
    links = tree.add("measured links") if fleet.links else tree
    for link in fleet.links:
        speed = f"{in_bits(link.bandwidth_bytes_per_s)}, {link.latency_s * 1e3:.3g} ms"
        links.add(f"{link.source} to {link.target}: {speed}")
    Console(highlight=False, markup=False).print(tree)


def _rates(nic: Nic) -> str:
    out, into = in_bits(nic.send_bytes_per_s), in_bits(nic.receive_bytes_per_s)
    return f"{out if out == into else f'{out} out, {into} in'}, {nic.latency_s * 1e3:.3g} ms"


@fleet_app.command()
def setup(
    fleet: Annotated[Path, option("PATH", "Fleet file with an address for each host.")],
    into: Annotated[str, option("FOLDER", "Folder on the hosts; relative to the home folder, or absolute.")] = "convoy",
    data: Annotated[list[Path] | None, option("PATH", "Send this although git ignores it; may be repeated.")] = None,
    requirements: Annotated[Path | None, option("PATH", "Package names: send only these and their needs.")] = None,
    wheels: Annotated[Path | None, option("PATH", "Folder of wheels that are sent and preferred.")] = None,
    index: Annotated[str | None, option("URL", "Package index of the hosts, or none.", envvar="CONVOY_INDEX")] = None,
    print_lines: Annotated[bool, flag("Print the commands, and run none of them.", "--print")] = False,
    doctor: Annotated[bool | None, flag("Examine the fleet at the end. Default: if packages were installed.")] = None,
) -> None:
    """Install this machine's packages and this folder's files on the hosts of a fleet.

    ssh, rsync and uv do the work; rsync and uv must be installed here and on each host. Each host gets an environment with the
    versions that are installed here, torch in the build for its devices, and the files of this folder that differ. All of it
    goes into one folder there; the fleet file gets its name. A second run sends and installs only changes.

    Example: convoy fleet setup --fleet lab.toml --data data/cifar10
    """
    from convoy.setup.setup import setup_fleet

    raise typer.Exit(setup_fleet(fleet, into.rstrip("/"), data or (), requirements, wheels, index, print_lines, doctor))


@fleet_app.command()
def key(
    file: Annotated[Path, argument("FILE", "The key file; only you can read it.", parser=path_of)],
    to: Annotated[str | None, option("HOST:PORT", "Send it to one machine, by a code; from this address.")] = None,
    source: Annotated[str | None, option("HOST:PORT", "Receive it from a machine that runs --to.", "--from")] = None,
) -> None:
    """Make the key of a job on several machines that torchrun, srun or mpirun starts, or copy it.

    Every machine needs the file: copy it with scp -p, or run --to here, --from there, and type the code. Pass it with
    --job-key FILE, or to your own script in the variable CONVOY_JOB_KEY. The key lets any device join the job: make a new one
    for each job, and delete it after the job. Jobs that Convoy starts need none.

    Example: convoy fleet key job.key
    """
    from convoy.launch.pairing import make_or_copy_key

    make_or_copy_key(file, to, source)
