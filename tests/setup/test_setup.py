"""`convoy fleet setup`: the files it sends, on hosts that are other home folders behind a fake ssh."""

import os
import re
import shlex
import signal
import stat
import subprocess
import sys
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from convoy.errors import InputError
from convoy.fleet import Host, read_fleet
from convoy.launch.supervisor import Interrupts
from convoy.setup.setup import INSTALL, _run, data_paths, host_script, pack, project_files, sent_modules, setup_fleet
from tests.support.processes import ROOT
from tests.support.programs import needs
from tests.support.quick_uv import wheel
from tests.support.ssh_hosts import eventually

FLEET = """
[[host]]
name = "attic"  # under the roof
address = "attic.lab"
card = { send_bytes_per_s = 125e6, receive_bytes_per_s = 125e6, latency_s = 5e-5 }

[[host]]
name = "cellar"
address = "cellar.lab"
card = { send_bytes_per_s = 125e6, receive_bytes_per_s = 125e6, latency_s = 5e-5 }

[[device]]
name = "attic-cpu"
host = "attic"
kind = "cpu"

[[device]]
name = "cellar-cpu"
host = "cellar"
kind = "cpu"
"""

SSH = """#!/bin/sh
# The hosts: each has a home in HOSTS, and the one named "gone" does not answer.
while [ "$1" != -- ]; do case $1 in -o|-l|-p) shift 2 ;; -*) shift ;; *) break ;; esac; done
[ "$1" = -- ] && shift
host=$1; shift
[ "$host" = gone ] && { echo "ssh: connect to host gone port 22: Connection timed out" >&2; exit 255; }
mkdir -p "$HOSTS/$host" && cd "$HOSTS/$host" && HOME=$PWD exec sh -c "$*"
"""


def put(folder: Path, *paths: str) -> None:
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(path)


# --- what is sent -----------------------------------------------------------------------------------------------------


def test_without_git_hidden_files_and_caches_are_not_sent(tmp_path: Path) -> None:
    put(tmp_path, "train.py", "nets/one.py", ".env", ".git-not/x", "env/pyvenv.cfg", "env/bin/x", "runs/a/log")
    put(tmp_path, "__pycache__/x")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "circle").symlink_to("circle")
    assert project_files(tmp_path) == ["nets/one.py", "train.py"]


def test_git_ignored_files_are_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is deleted and still in the index is no file. An environment that git was not told of stays here, too."""
    put(tmp_path, "train.py", "gone.py", "data/big.bin", "new.py", ".tracked", ".secret")
    put(tmp_path, ".venv/bin/python", "env/pyvenv.cfg", "env/lib/torch.so")
    (tmp_path / ".gitignore").write_text("data\n")
    for words in (["init", "-q"], ["add", "train.py", "gone.py", ".gitignore", ".tracked"]):
        subprocess.check_call(["git", "-C", str(tmp_path), *words])
    (tmp_path / "gone.py").unlink()
    assert project_files(tmp_path) == [".gitignore", ".tracked", "new.py", "train.py"]
    monkeypatch.setattr("convoy.setup.setup.MOST_BYTES", 10)
    with pytest.raises(InputError, match=r"the largest file is .*let git ignore the data, and name .* with --data"):
        project_files(tmp_path)


def test_data_outside_the_project_is_refused(tmp_path: Path) -> None:
    put(tmp_path, "work/train.py", "images/1.png")
    project = tmp_path / "work"
    (project / "data").symlink_to(tmp_path / "images")
    assert data_paths(project, [Path("data"), project / "train.py"]) == ["data", "train.py"]
    os.mkfifo(project / "pipe")
    for path in (tmp_path / "images", Path("nothing"), Path("pipe"), Path("x" * 300)):
        with pytest.raises(InputError, match=r"not a file or folder in the project .*ln -s"):
            data_paths(project, [path])


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs that comes first: ssh and uv are stand-ins. Convoy is installed here from a folder of two files."""
    folder, convoy = tmp_path / "bin", tmp_path / "convoy-train"
    folder.mkdir()
    put(convoy, "convoy/__init__.py", "convoy/net.py")
    (convoy / "convoy" / "__init__.py").write_text("")
    (convoy / "convoy" / "net.py").write_text("width = 4")
    for name, text in (
        ("uv", f'#!/bin/sh\nexec {sys.executable} {ROOT / "tests" / "support" / "quick_uv.py"} "$@"\n'),
        ("ssh", SSH),
    ):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HOSTS", str(tmp_path / "hosts"))
    monkeypatch.delenv("CONVOY_SSH", raising=False)
    listed = ["numpy==2.4.6", f"-e {convoy.as_uri()}", "torch==2.13.0+cu130", "nvidia-cublas-cu13==13.1"]
    monkeypatch.setenv("QUICK_UV_FREEZE", "\n".join(listed))
    return folder


@pytest.mark.usefixtures("programs")
def test_packages_are_sent_as_uv_lists_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From git, a URL, a local wheel or folder, or conda; torch without its build and libraries."""
    here = wheel(tmp_path, "local", "3.0")
    more = [
        "tool @ git+https://lab/tool@abc", "fetched @ https://lab/fetched.whl", f"local @ {here.as_uri()}",
        "pydantic @ file:///croot/pydantic/work",
    ]  # fmt: skip
    monkeypatch.setenv("QUICK_UV_FREEZE", "\n".join([os.environ["QUICK_UV_FREEZE"], *more]))
    put(tmp_path, "work/train.py", "one/a")
    (tmp_path / "one" / "names").write_text("numpy\n")
    pack(tmp_path / "one", tmp_path / "work", (), None, None, "https://ann:secret@lab/simple")
    sent = tmp_path / "one" / "packages"
    lines = (sent / "requirements.txt").read_text().splitlines()
    assert lines[:2] == ["--index-url https://ann:secret@lab/simple", "--find-links ."]
    assert lines[2:5] == ["numpy==2.4.6", "./convoy_train-1-py3-none-any.whl", "torch==2.13.0"]
    assert lines[5:8] == [*more[:2], f"./{here.name}"]
    assert re.fullmatch(r"pydantic==[\d.]+", lines[8])
    assert len(lines) == 9
    assert stat.S_IMODE((sent / "requirements.txt").stat().st_mode) == 0o600, "it holds a password"
    assert (tmp_path / "one" / "listing").read_bytes() == b"train.py\0"

    (tmp_path / "two").mkdir()
    pack(tmp_path / "two", tmp_path / "work", (), tmp_path / "one" / "names", None, None)
    sent = tmp_path / "two" / "packages"
    assert (sent / "requirements.txt").read_text().split() == [
        "--find-links", ".", "./convoy_train-1-py3-none-any.whl", "numpy",
    ]  # fmt: skip
    assert "numpy==2.4.6" in (sent / "constraints.txt").read_text().splitlines()


def test_packages_that_cannot_be_sent_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, (wheels, index, words) in enumerate(
        ((tmp_path, None, "there are no wheels"), (None, "none", "packages must come from somewhere"))
    ):
        (tmp_path / str(number)).mkdir()
        with pytest.raises(InputError, match=words):
            pack(tmp_path / str(number), tmp_path, (), None, wheels, index)
    (tmp_path / "uv").write_text("#!/bin/sh\necho 'error: no backend' >&2; exit 2\n")
    (tmp_path / "uv").chmod(0o755)
    for path, words in ((str(tmp_path), "uv pip freeze .* failed: error: no backend"), ("", "pip install uv")):
        (tmp_path / f"x{path[-1:]}").mkdir()
        monkeypatch.setenv("PATH", path)
        with pytest.raises(InputError, match=words):
            pack(tmp_path / f"x{path[-1:]}", tmp_path, (), None, None, None)


def test_setup_script_quotes_shell_arguments() -> None:
    host = Host("attic", "fe80::1", user="ann", ssh_port=2222)
    script = host_script(host, "my convoy/$x-attic", Path("/s"), Path("/a b"), ["--torch-backend", "auto"], ["ssh"])
    begin, packages, install, project = [shlex.split(line) for line in re.split(r"\n(?=ssh|rsync)", script)[1:]]
    assert begin[-2] == install[-2] == "fe80::1"
    assert begin[-1].endswith("'my convoy/$x-attic'")
    assert packages[-1] == "[fe80::1]:my convoy/$x-attic/packages/"
    assert project[-2:] == ["/a b/", "[fe80::1]:my convoy/$x-attic/project/"]
    assert "-p 2222" in packages[packages.index("-e") + 1]
    assert install[-1].endswith("--torch-backend auto")


# --- hosts ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:  # noqa: ARG001
    """A script, a module in a folder, data that lies elsewhere and is linked in, and a fleet file. It is the current folder."""
    folder = tmp_path / "birds"
    put(folder, "train.py", "nets/a name with blanks.py", "go.sh", ".secret")
    (folder / "go.sh").chmod(0o755)
    put(tmp_path, "images/one.bin")
    (folder / "data").symlink_to(tmp_path / "images")
    (folder / "lab.toml").write_text(FLEET)
    for name, version in (("numpy", "2.4.6"), ("torch", "2.13.0")):
        (tmp_path / "wheels").mkdir(exist_ok=True)
        wheel(tmp_path / "wheels", name, version, **{name: f"version = {version!r}"})
    monkeypatch.chdir(folder)
    return folder


def setup(project: Path, **changed: object) -> int:
    given = {"data": [Path("data")], "wheels": project.parent / "wheels", "index": "none", "doctor": False}
    return setup_fleet(project / "lab.toml", **{**given, **changed})  # type: ignore[arg-type]


def on(project: Path, host: str) -> Path:
    """Return setup's folder on a host."""
    return project.parent / "hosts" / f"{host}.lab" / "convoy" / f"birds-{host}"


@needs("rsync")
def test_all_hosts_get_the_packages_and_files_of_this_machine(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert setup(project) == 0
    for host in ("attic", "cellar"):
        asked = "import convoy.net, numpy, torch; print(numpy.version, torch.version)"
        python = on(project, host) / "project" / read_fleet(project / "lab.toml").hosts[0].python
        assert subprocess.check_output([python, "-Ic", asked], text=True) == "2.4.6 2.13.0\n"
        there = on(project, host) / "project"
        files = sorted(str(path.relative_to(there)) for path in there.rglob("*") if path.is_file())
        assert files == ["data/one.bin", "go.sh", "lab.toml", "nets/a name with blanks.py", "train.py"]
        assert os.access(there / "go.sh", os.X_OK)
        assert not os.access(there / "train.py", os.X_OK)
    assert "wrote python and folder of attic, cellar into" in capsys.readouterr().out
    assert "# under the roof" in (project / "lab.toml").read_text()
    fleet = read_fleet(project / "lab.toml")
    assert fleet.hosts[1].folder == "convoy/birds-cellar/project"
    assert sent_modules(fleet, project) == [Path("nets/a name with blanks.py"), Path("train.py")]
    assert sent_modules(fleet, project.parent) == []


@needs("rsync")
def test_second_setup_sends_only_changes(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And it leaves what a run has written on a host. A module of Convoy that is changed here is installed again."""
    assert setup(project) == 0
    there = on(project, "cellar") / "project"
    (there / "checkpoint.bin").write_text("of a run")
    before = (there / "data" / "one.bin").stat()
    (project / "train.py").write_text("changed")
    capsys.readouterr()
    assert setup(project) == 0
    assert "Installed" not in capsys.readouterr().out
    assert (there / "train.py").read_text() == "changed"
    assert (there / "checkpoint.bin").exists()
    after = (there / "data" / "one.bin").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    (project.parent / "convoy-train" / "convoy" / "net.py").write_text("width = 8")
    assert setup(project) == 0
    output = capsys.readouterr().out
    assert output.count("Installed 1 packages") == 2
    [module] = on(project, "attic").glob("venv/lib/python*/site-packages/convoy/net.py")
    assert module.read_text() == "width = 8"


@needs("rsync")
def test_hosts_that_fail_are_named_with_the_remedy_and_the_others_are_set_up(project: Path) -> None:
    """One is not there; then another folder lies where setup wants its own, and a package is in no index."""
    (project / "lab.toml").write_text(FLEET.replace("cellar.lab", "gone"))
    with pytest.raises(
        InputError, match=r"^host cellar \(gone\): .*status 255.*timed out; check that the machine is on"
    ):
        setup(project)
    assert [host.folder for host in read_fleet(project / "lab.toml").hosts] == ["convoy/birds-attic/project", None]
    (project / "lab.toml").write_text(FLEET)
    put(on(project, "cellar"), "thesis.tex")
    with pytest.raises(
        InputError, match="birds-cellar is not empty, and setup did not create it: give another folder with --into"
    ):
        setup(project)
    assert [path.name for path in on(project, "cellar").iterdir()] == ["thesis.tex"]
    (project.parent / "wheels" / "numpy-2.4.6-py3-none-any.whl").unlink()
    with pytest.raises(
        InputError, match=r"numpy==2.4.6 is in no index; correct this .* Another package index: --index"
    ):
        setup(project, into="elsewhere")


def test_a_host_without_rsync_or_uv_is_refused_with_the_remedy(project: Path, programs: Path) -> None:
    bare = project.parent / "bare"
    bare.mkdir()
    (bare / "sh").symlink_to("/bin/sh")
    (programs / "ssh").write_text(SSH.replace("exec sh", f"PATH={bare} exec sh"))
    with pytest.raises(InputError, match=r"host attic .*there is no rsync \(apt install rsync\)"):
        setup(project)


def test_manual_setup_is_kept_and_print_changes_nothing(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    named = FLEET.replace('"attic.lab"', '"attic.lab"\npython = "/opt/python"')
    (project / "lab.toml").write_text(named)
    assert setup(project, print_lines=True) == 0
    output = capsys.readouterr().out
    assert "attic: skipped, because its [[host]] names its own python or folder" in output
    assert "# host cellar\n" in output
    assert "# host attic" not in output
    assert (project / "lab.toml").read_text() == named
    assert not (project.parent / "hosts").exists()
    (project / "lab.toml").write_text(re.sub(r"address = .*", "", FLEET))
    with pytest.raises(InputError, match="its hosts have no address"):
        setup(project)


@needs("rsync")
def test_interrupted_setup_ends_its_processes(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUICK_UV_SLOW", "100")
    code = (
        "import sys; from pathlib import Path; from convoy.setup.setup import setup_fleet as setup; "
        "sys.exit(setup(Path('lab.toml'), wheels=Path('../wheels'), index='none', doctor=False))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE, text=True) as started:
        assert eventually(lambda: installing() == 2)
        os.kill(started.pid, signal.SIGINT)
        _, errors = started.communicate(timeout=60)
    assert started.returncode == 130
    assert errors.splitlines()[-1] == "interrupted: the next `convoy fleet setup` continues from here"
    assert eventually(lambda: installing() == 0)
    monkeypatch.setenv("QUICK_UV_SLOW", "0")
    assert setup(project) == 0


@pytest.mark.usefixtures("programs")
def test_an_installation_ends_when_ssh_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUICK_UV_SLOW", "100")
    (tmp_path / "packages").mkdir()
    version = "{}.{}".format(*sys.version_info)
    with subprocess.Popen(["sh", "-c", INSTALL, "sh", str(tmp_path), version], stdin=subprocess.PIPE) as there:
        assert eventually(lambda: installing() == 1)
        assert there.stdin is not None
        there.stdin.close()
        assert there.wait(30) != 0
    assert eventually(lambda: installing() == 0)


def installing() -> int:
    """Count the processes of the fake uv that install."""
    found = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return sum(any(word.endswith("quick_uv.py") for word in words) and "install" in words for words in found)


def test_setup_ends_only_its_own_processes() -> None:
    """Regression: it killed all descendants of the calling process."""
    with subprocess.Popen(["sleep", "30"]) as bystander, Interrupts() as interrupts:
        try:
            done = _run({Host("attic"): "exit 3"}, interrupts, print)
            assert done["attic"][0] == 3
            with pytest.raises(subprocess.TimeoutExpired):
                bystander.wait(0.5)
        finally:
            bystander.kill()
