"""Memory left by control groups: kernel files of both versions."""

from pathlib import Path

from convoy.machine.accelerator import control_group_memory


def written(folder: Path, **texts: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def test_tightest_control_group_counts(tmp_path: Path) -> None:
    """The job's own has no limit; above it 700 of 1000 are used, 100 of them files; above that, 300 of 2000 are left."""
    own = tmp_path / "own"
    own.write_text("0::/batch/job\n")
    written(
        tmp_path / "batch" / "job", memory__max="max", memory__current="300", memory__stat="anon 200\ninactive_file 50"
    )
    assert control_group_memory(tmp_path, own) is None
    written(tmp_path / "batch", memory__max="1000", memory__current="700", memory__stat="anon 600\ninactive_file 100")
    assert control_group_memory(tmp_path, own) == (400, 1000)
    written(tmp_path, memory__max="2000", memory__current="1700", memory__stat="inactive_file 0")
    assert control_group_memory(tmp_path, own) == (300, 2000)


def test_version_1_memory_tree_is_read_in_containers(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("4:cpu,cpuacct:/x\n3:memory:/not/seen/here\n0::/\n")
    names = {
        "memory__limit_in_bytes": "500",
        "memory__usage_in_bytes": "600",
        "memory__stat": "cache 1\ntotal_inactive_file 7",
    }
    written(tmp_path / "memory", **names)
    assert control_group_memory(tmp_path, own) == (0, 500)


def test_no_control_group_means_no_limit(tmp_path: Path) -> None:
    assert control_group_memory(tmp_path, tmp_path / "missing") is None
    (tmp_path / "own").write_text("odd\n")
    assert control_group_memory(tmp_path, tmp_path / "own") is None
