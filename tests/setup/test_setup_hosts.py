"""`convoy setup` over a real ssh: hosts with nothing of ours on them, and an index that is a folder of wheels made here.

Desk starts it; attic and cellar are set up. They share a disk, so each has a folder of its own by its name.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import distributions, version
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from convoy._version import __version__
from convoy.fleet import read_fleet
from convoy.setup.packages import _needed, normal
from convoy.setup.torch_builds import FAMILY
from tests.support.processes import ROOT
from tests.support.programs import needs
from tests.support.ssh_hosts import Lab, eventually, lab, needs_ssh
from tests.support.wheels import wheel

pytestmark = [pytest.mark.root, needs_ssh, pytest.mark.timeout(240)]

FLEET = """
[network]
send_bytes_per_s = 125e6
receive_bytes_per_s = 125e6
latency_s = 5e-5

[[host]]
name = "attic"  # under the roof
address = "10.77.0.2"

[[host]]
name = "cellar"
address = "10.77.0.3"

[[device]]
name = "attic-cpu"
host = "attic"
kind = "cpu"

[[device]]
name = "cellar-cpu"
host = "cellar"
kind = "cpu"
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Their Python is the one below this environment: it has none of our packages. They have a uv that is quick."""
    folder = tmp_path_factory.mktemp("lab")
    (folder / "bin").mkdir()
    below = getattr(sys, "_base_executable", sys.executable)
    for name, command in (("python3", below), ("uv", f"{below} {ROOT / 'tests' / 'support' / 'quick_uv.py'}")):
        (folder / "bin" / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (folder / "bin" / name).chmod(0o755)
    if (rsync := shutil.which("rsync")) is not None:
        (folder / "bin" / "rsync").symlink_to(rsync)
    with lab(folder, ["desk", "attic", "cellar"], set_env=f"PATH={folder / 'bin'}:/usr/bin:/bin") as made:
        yield made


@pytest.fixture
def no_uv(hosts: Lab) -> Iterator[None]:
    """They have pip alone, as most hosts."""
    uv = hosts.folder / "bin" / "uv"
    uv.rename(uv.with_suffix(".away"))
    yield
    uv.with_suffix(".away").rename(uv)


@pytest.fixture(autouse=True)
def nobody_left(hosts: Lab) -> Iterator[None]:
    yield
    assert eventually(lambda: not hosts.at_work()), f"still at work: {hosts.at_work()}"


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stand-ins for all that Convoy needs, at the versions of this environment."""
    folder = tmp_path_factory.mktemp("index")
    installed = {normal(each.metadata["Name"]): each for each in distributions() if each.metadata["Name"]}
    # What runs a job on a host needs one package in earnest: the stand-in leads to that of this environment.
    site = str(Path(psutil.__file__).parents[1])
    real = f"import sys\nsys.path.insert(0, {site!r})\ndel sys.modules['psutil']\nimport psutil\n"
    for name in _needed([], installed) - {"convoy-train"}:
        public = installed[name].version.partition("+")[0] if name in FAMILY else installed[name].version
        wheel(folder, name, public, **({"psutil": real} if name == "psutil" else {}))
    return folder


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A script, a module in a folder, data that lies elsewhere and is linked in, and what nobody wants sent."""
    folder = tmp_path_factory.mktemp("work") / "birds"
    (folder / "nets").mkdir(parents=True)
    (folder / "train.py").write_text("print('hello')\n")
    (folder / "nets" / "a name with blanks.py").write_text("x = 1\n")
    (folder / "go.sh").write_text("#!/bin/sh\n")
    (folder / "go.sh").chmod(0o755)
    (folder / ".secret").write_text("token")
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "train.pyc").write_text("x")
    images = folder.parent / "images"
    images.mkdir()
    (images / "one.bin").write_bytes(os.urandom(300_000))
    (folder / "data").symlink_to(images)
    (folder / "lab.toml").write_text(FLEET)
    (folder / "named.txt").write_text("numpy\n")
    return folder


def command(project: Path, index: Path, *more: str) -> list[str]:
    argv = [
        sys.executable, "-m", "convoy", "setup", "--fleet", "lab.toml", "--into", str(project.parent / "hosts"), "--wheels",
        str(index), "--index", "none", "--requirements", "named.txt", "--data", "data", "--no-doctor", *more,
    ]  # fmt: skip
    return ["sh", "-c", f'cd "{project}" && exec "$@"', "sh", *argv]


def setup(hosts: Lab, project: Path, index: Path, *more: str) -> tuple[int, list[str], str]:
    """Status, lines of output without their times, errors."""
    status, output, errors = hosts.run("desk", command(project, index, *more), limit_s=150)
    return status, [re.sub(r"^ *[\d.]+ s  ", "", line) for line in output.splitlines()], errors


def ask(project: Path, host: str, program: str) -> str:
    python = project.parent / "hosts" / f"birds-{host}" / "venv" / "bin" / "python"
    return subprocess.check_output([python, "-I", "-c", program], text=True, cwd="/").strip()


@pytest.fixture(scope="module")
def ready(hosts: Lab, project: Path, index: Path) -> list[str]:
    """All hosts set up, once; what was told."""
    status, output, errors = setup(hosts, project, index)
    assert (status, errors) == (0, ""), output
    return output


def test_all_hosts_have_the_packages_and_files_of_this_machine(ready: Sequence[str], project: Path) -> None:
    told = "\n".join(ready)
    assert f"making an environment with Python {'{}.{}'.format(*sys.version_info)}" in told
    for host in ("attic", "cellar"):
        asked = "import convoy; from importlib.metadata import version as v; print(convoy.__version__, v('numpy'))"
        assert ask(project, host, asked) == f"{__version__} {version('numpy')}"
        assert ask(project, host, "import convoy.setup.there as t; print(t.__file__)").startswith(
            str(project.parent / "hosts")
        )
        there = project.parent / "hosts" / f"birds-{host}" / "project"
        files = sorted(str(path.relative_to(there)) for path in there.rglob("*") if path.is_file())
        assert files == ["data/one.bin", "go.sh", "lab.toml", "named.txt", "nets/a name with blanks.py", "train.py"]
        assert (there / "data" / "one.bin").read_bytes() == (project / "data" / "one.bin").read_bytes()
        assert os.access(there / "go.sh", os.X_OK)
        assert not os.access(there / "train.py", os.X_OK)


def test_the_fleet_file_names_their_places_and_keeps_its_comments(ready: Sequence[str], project: Path) -> None:
    fleet = read_fleet(project / "lab.toml")
    root = project.parent / "hosts"
    assert [(host.python, host.folder) for host in fleet.hosts] == [
        (f"{root}/birds-{name}/venv/bin/python", f"{root}/birds-{name}/project") for name in ("attic", "cellar")
    ]
    assert "# under the roof" in (project / "lab.toml").read_text()
    assert "wrote python and folder of attic, cellar into lab.toml" in ready


@pytest.mark.usefixtures("ready")
def test_a_second_run_does_nothing_and_says_so(hosts: Lab, project: Path, index: Path) -> None:
    status, output, errors = setup(hosts, project, index)
    assert (status, errors) == (0, "")
    assert set(output[-3:]) == {"attic: has all of it", "cellar: has all of it", "every host has all of it already"}


@pytest.mark.usefixtures("ready")
def test_only_what_differs_is_sent_and_only_its_own_files_are_removed(hosts: Lab, project: Path, index: Path) -> None:
    """A file that is changed here, one that is gone here, one that was damaged there, and one that a run has written there."""
    there = project.parent / "hosts" / "birds-cellar" / "project"
    (there / "checkpoint.bin").write_text("of a run")
    (there / "go.sh").write_text("damaged")
    (project / "train.py").write_text("print('changed')\n")
    (project / "nets" / "a name with blanks.py").unlink()
    before = (there / "data" / "one.bin").stat()
    status, output, errors = setup(hosts, project, index, "--print")
    assert (status, errors) == (0, "")
    assert any(line.startswith("# sending 2 files of the project") and "go.sh, train.py" in line for line in output)
    assert any(line.startswith("ssh 10.77.0.3 'rm -- ") and "a name with blanks.py" in line for line in output)
    assert (there / "train.py").read_text() == "print('hello')\n", "--print changes nothing"
    status, output, errors = setup(hosts, project, index)
    assert (status, errors) == (0, "")
    assert any(line.startswith("attic: sending 1 file of the project") for line in output)
    assert any(line.startswith("cellar: sending 2 files of the project") for line in output)
    assert not any("environment" in line or "installing" in line for line in output)
    assert (there / "train.py").read_text() == "print('changed')\n"
    assert (there / "checkpoint.bin").exists()
    assert not (there / "nets").exists()
    after = (there / "data" / "one.bin").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.slow
@pytest.mark.usefixtures("no_uv")
def test_pip_installs_and_a_package_that_is_another_there_is_installed_again(
    hosts: Lab, project: Path, index: Path, tmp_path: Path
) -> None:
    """And a Convoy with the same version number and other files."""
    copy = tmp_path / "birds"
    shutil.copytree(project, copy, symlinks=True)
    (copy / "lab.toml").write_text(FLEET)
    status, output, errors = setup(hosts, copy, index)
    assert (status, errors) == (0, ""), output
    assert sum("Successfully installed" in line for line in output) == 2
    root = tmp_path / "hosts" / "birds-attic"
    [metadata] = root.glob("venv/lib/python*/site-packages/numpy-*.dist-info/METADATA")
    metadata.write_text(metadata.read_text().replace(f"Version: {version('numpy')}", "Version: 0.1"))
    note = json.loads((root / "convoy-setup.json").read_text())
    note["installed"]["convoy-train"] = "another"
    (root / "convoy-setup.json").write_text(json.dumps(note))
    status, output, errors = setup(hosts, copy, index)
    assert (status, errors) == (0, "")
    assert [line for line in output if "installing" in line] == [
        "attic: installing 1 package", "attic: installing convoy-train anew",
    ]  # fmt: skip
    assert ask(copy, "attic", "from importlib.metadata import version as v; print(v('numpy'))") == version("numpy")
    assert "cellar: has all of it" in output


@pytest.mark.usefixtures("ready")
def test_hosts_that_fail_are_named_with_the_remedy_and_the_others_are_set_up(
    hosts: Lab, project: Path, index: Path, tmp_path: Path
) -> None:
    """One is not there; in another run somebody else's folder lies where setup wants its own."""
    copy = tmp_path / "birds"
    shutil.copytree(project, copy, symlinks=True)
    (copy / "lab.toml").write_text(FLEET.replace("10.77.0.3", "10.77.0.99"))
    status, _, errors = setup(hosts, copy, index, "--print")
    assert status == 2
    assert re.match(
        r"error: host cellar \(10.77.0.99\): ssh ended with status 255.*see whether the machine is on", errors
    )
    (copy / "lab.toml").write_text(FLEET)
    mine = tmp_path / "hosts" / "birds-attic"
    mine.mkdir(parents=True)
    (mine / "thesis.tex").write_text("precious")
    status, _, errors = setup(hosts, copy, index)
    assert status == 2
    assert f"host attic (10.77.0.2): {mine} there is not empty, and not setup's own" in errors
    assert sorted(path.name for path in mine.iterdir()) == ["thesis.tex"]


def test_a_host_that_a_person_has_set_up_is_left_alone(hosts: Lab, project: Path, index: Path, tmp_path: Path) -> None:
    copy = tmp_path / "birds"
    shutil.copytree(project, copy, symlinks=True)
    named = FLEET.replace('"10.77.0.2"', '"10.77.0.2"\npython = "/opt/python"')
    named = named.replace('"10.77.0.3"', '"10.77.0.3"\nfolder = "/x"')
    (copy / "lab.toml").write_text(named)
    status, output, errors = setup(hosts, copy, index)
    assert (status, errors) == (0, "")
    assert [line.partition(",")[0] for line in output[:2]] == ["attic: left as it is", "cellar: left as it is"]
    assert (copy / "lab.toml").read_text() == named


@pytest.mark.slow
@needs("rsync")
@pytest.mark.usefixtures("ready")
def test_rsync_carries_the_files_where_both_sides_have_it(hosts: Lab, project: Path, index: Path) -> None:
    """And where it fails they go by ssh."""
    root, rsync = project.parent / "hosts", hosts.folder / "bin" / "rsync"
    (project / "go.sh").write_text("#!/bin/sh\ntrue\n")
    status, output, errors = setup(hosts, project, index, "--print")
    assert (status, errors) == (0, "")
    assert sum("by rsync: go.sh" in line for line in output) == 2
    status, output, errors = setup(hosts, project, index)
    assert (status, errors) == (0, "")
    assert not any("rsync" in line for line in output)
    assert os.access(root / "birds-attic" / "project" / "go.sh", os.X_OK)
    assert (root / "birds-cellar" / "project" / "go.sh").read_text() == "#!/bin/sh\ntrue\n"
    (project / "train.py").write_text("print('by ssh')\n")
    rsync.unlink()
    rsync.write_text("#!/bin/sh\necho no such option >&2\nexit 1\n")
    rsync.chmod(0o755)
    status, output, errors = setup(hosts, project, index)
    assert (status, errors) == (0, "")
    assert any("rsync did not do it" in line and "no such option" in line for line in output)
    assert (root / "birds-cellar" / "project" / "train.py").read_text() == "print('by ssh')\n"


@pytest.mark.slow
@pytest.mark.usefixtures("ready")
def test_a_module_that_was_changed_here_since_is_told_before_the_run(hosts: Lab, project: Path, index: Path) -> None:
    """The script is the same everywhere; a module that it imports is not: so far the hosts computed with different code."""
    assert setup(hosts, project, index)[0] == 0
    (project / "net.py").write_text("width = 8\n")
    run = [sys.executable, "-m", "convoy", "run", "--fleet", "lab.toml", "train.py"]
    status, output, errors = hosts.run("desk", ["sh", "-c", f'cd "{project}" && exec "$@"', "sh", *run])
    assert (status, output) == (2, "Device 0 is on host attic: files that the job writes lie there.\n")
    for told, name in zip(errors.splitlines(), ("attic", "cellar"), strict=True):
        assert f"host {name} " in told
        assert "net.py is not there" in told
        assert "`convoy setup` brings it" in told


@pytest.mark.slow
@pytest.mark.usefixtures("no_uv")
def test_an_interrupted_setup_ends_everywhere_and_the_next_one_finishes(
    hosts: Lab, project: Path, index: Path, tmp_path: Path
) -> None:
    """Ctrl-C while a host installs: nothing runs there any more, and what is half done is done anew."""
    copy = tmp_path / "birds"
    shutil.copytree(project, copy, symlinks=True)
    (copy / "lab.toml").write_text(FLEET.replace("10.77.0.3", "10.77.0.1").replace("cellar", "desk"))
    with hosts.on("desk", command(copy, index)) as started:
        root = tmp_path / "hosts" / "birds-attic"
        assert eventually(lambda: (root / "venv").exists())
        assert not (root / "requirements.txt").exists()
        os.killpg(started.pid, signal.SIGINT)
        output, errors = started.communicate(timeout=30)
    assert started.returncode == 130
    assert errors.splitlines()[-1] == "interrupted: what was begun is finished by the next `convoy setup`"
    assert "desk: this machine, as it is" in output
    assert eventually(lambda: not hosts.at_work(), 10), hosts.at_work()
    status, lines, errors = setup(hosts, copy, index, "--print")
    assert (status, errors) == (0, "")
    assert any(" venv --clear" in line for line in lines)
