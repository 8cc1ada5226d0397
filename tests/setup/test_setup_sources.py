"""What setup sends: which files are the project's, which packages are this environment's."""

import os
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

from convoy import __version__
from convoy.errors import InputError
from convoy.setup import packages, tree
from tests.support.wheels import wheel


def put(folder: Path, *paths: str) -> None:
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(path)


def test_a_folder_that_is_no_repository(tmp_path: Path) -> None:
    """Hidden files, environments, caches and the logs of runs stay here."""
    put(
        tmp_path,
        "train.py",
        "nets/one.py",
        ".env",
        ".git-not/x",
        "env/pyvenv.cfg",
        "env/bin/x",
        "__pycache__/x",
        "runs/a/log",
    )
    (tmp_path / "loop").symlink_to(tmp_path)
    assert tree.project_files(tmp_path) == ["nets/one.py", "train.py"]


def test_in_a_repository_git_says_what_is_ignored(tmp_path: Path) -> None:
    """A file that is deleted and still in the index is no file. An environment that nobody told git of stays here, too."""
    put(tmp_path, "train.py", "gone.py", "data/big.bin", ".gitignore", "new.py", ".tracked", ".secret")
    put(tmp_path, ".venv/bin/python", "env/pyvenv.cfg", "env/lib/torch.so")
    (tmp_path / ".gitignore").write_text("data\n")
    for words in (["init", "-q"], ["add", "train.py", "gone.py", ".gitignore", ".tracked"]):
        subprocess.check_call(["git", "-C", str(tmp_path), *words])
    (tmp_path / "gone.py").unlink()
    assert tree.project_files(tmp_path) == [".gitignore", ".tracked", "new.py", "train.py"]
    assert tree.data_files(tmp_path, [Path("data")]) == ["data/big.bin"]


def test_a_project_with_too_much_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "train.py", "a-long-name-of-data.bin")
    monkeypatch.setattr(tree, "MOST_BYTES", 10)
    with pytest.raises(
        InputError, match=r"the largest file is a-long-name-of-data.bin.*let git ignore the data.*--data"
    ):
        tree.project_files(tmp_path)


def test_named_data_lies_in_the_project_or_is_linked_into_it(tmp_path: Path) -> None:
    put(tmp_path, "work/train.py", "images/a/1.png", "images/b/2.png")
    project = tmp_path / "work"
    with pytest.raises(InputError, match=r"lies outside of the project .*ln -s .*images images.*--data images"):
        tree.data_files(project, [tmp_path / "images"])
    with pytest.raises(InputError, match="not there"):
        tree.data_files(project, [Path("images")])
    (project / "images").symlink_to(tmp_path / "images")
    (tmp_path / "images" / "back").symlink_to(tmp_path / "images")
    assert tree.data_files(project, [Path("images"), Path("train.py")]) == [
        "images/a/1.png",
        "images/b/2.png",
        "train.py",
    ]


def test_data_that_is_neither_file_nor_folder_is_refused(tmp_path: Path) -> None:
    """A pipe ended in a traceback, as if it were a folder; so did a name that no file can have."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "circle").symlink_to("circle")
    for name in ("pipe", "circle"):
        with pytest.raises(InputError, match=f"--data {name}: neither a file nor a folder"):
            tree.data_files(tmp_path, [Path(name)])
    with pytest.raises(InputError, match="not there"):
        tree.data_files(tmp_path, [Path("x" * 300)])
    put(tmp_path, "train.py")
    assert tree.project_files(tmp_path) == ["train.py"], "beside it, a link to itself ended in a traceback"


def test_a_file_is_known_by_its_content_and_whether_it_runs(tmp_path: Path) -> None:
    put(tmp_path, "a", "b/a")
    (tmp_path / "a").chmod(0o755)
    (tmp_path / "b/a").write_text("a")
    first, second = tree.pieces(tmp_path, ["b/a", "a"])
    assert (first.path, second.path) == ("a", "b/a")
    assert first.sha256 == second.sha256 == "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb"
    assert (first.executable, second.executable, first.size_bytes) == (True, False, 1)


# -------------------------------------------------------------------------------------------------------- packages


def test_convoys_own_wheel_is_what_runs_here_and_the_same_each_time(tmp_path: Path) -> None:
    (tmp_path / "again").mkdir()
    (tmp_path / "names").write_text("# what the script imports\nnumpy>=1 ; python_version > '3'\n")
    made = packages.packages_here(tmp_path, tmp_path / "names")
    again = packages.packages_here(tmp_path / "again", tmp_path / "names")
    path = made.wheels["convoy-train"]
    assert path.read_bytes() == again.wheels["convoy-train"].read_bytes()
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        assert archive.read("convoy/setup/there.py") == Path(packages.__file__).with_name("there.py").read_bytes()
        assert f"Version: {__version__}\n".encode() in archive.read(f"convoy_train-{__version__}.dist-info/METADATA")
    assert not any(name.endswith(".pyc") for name in names)
    assert {"convoy/fleet/catalogue.toml", "convoy/py.typed"} <= set(names)
    assert made.pinned["numpy"] == version("numpy")
    assert made.pinned["pydantic-core"] == version("pydantic-core"), "what Convoy needs, and what that needs"
    assert made.torch == {"torch": version("torch").partition("+")[0]}
    assert "pytest" not in made.pinned, "nobody named it"


def test_a_name_that_is_not_installed_here(tmp_path: Path) -> None:
    (tmp_path / "names").write_text("numpy\nno-such-thing\n")
    with pytest.raises(InputError, match=r"names no-such-thing, which this environment has not.*install it here first"):
        packages.packages_here(tmp_path, tmp_path / "names")


SEEN = """
import json, sys
from pathlib import Path
from convoy.setup import packages
packages.own_wheel = lambda folder, installed: Path("own.whl")
made = packages.packages_here(Path(sys.argv[1]))
print(json.dumps([made.pinned, made.torch, made.direct, sorted(made.wheels), made.left_out]))
"""


def test_what_was_not_installed_by_name(tmp_path: Path) -> None:
    """From git, from an address, from a wheel here; by the system's own package manager; libraries of a build of torch."""
    site = tmp_path / "site"
    site.mkdir()
    here = wheel(tmp_path, "local", "3.0")
    for name, own_version, told, installer in (
        ("plain", "1.0", None, "pip\n"),
        ("torch", "2.13.0+cu126", None, "uv"),
        ("nvidia-cublas-cu12", "12.6", None, "pip"),
        ("From_Git", "2.0", '{"url": "https://lab/x", "vcs_info": {"vcs": "git", "commit_id": "abc"}}', "pip"),
        ("fetched", "2.1", '{"url": "https://lab/fetched.whl", "archive_info": {}}', "pip"),
        ("local", "3.0", f'{{"url": "{here.as_uri()}", "archive_info": {{}}}}', "pip"),
        ("of-conda", "4.0", '{"url": "file:///croot/of-conda/work", "dir_info": {}}', "conda"),
        ("of-debian", "5.0", None, ""),
    ):
        info = site / f"{name}-{own_version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {own_version}\n")
        if told:
            (info / "direct_url.json").write_text(told)
        if installer:
            (info / "INSTALLER").write_text(installer)
    root = Path(packages.__file__).parents[2]
    keep = f"import sys; sys.path = [p for p in sys.path if 'site-packages' not in p] + [{str(site)!r}]\n"
    done = subprocess.run(
        [sys.executable, "-S", "-c", keep + SEEN, str(tmp_path)], capture_output=True, text=True, timeout=30, check=False,
        env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    assert done.stderr == ""
    assert done.stdout.strip() == (
        '[{"fetched": "2.1", "from-git": "2.0", "of-conda": "4.0", "plain": "1.0"}, {"torch": "2.13.0"}, '
        '{"fetched": "fetched @ https://lab/fetched.whl", "from-git": "from-git @ git+https://lab/x@abc"}, '
        '["convoy-train", "local"], ["of-debian"]]'
    )
