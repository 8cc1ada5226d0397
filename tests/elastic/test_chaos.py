"""Chaos in this process: devices on threads with their own machines, which are killed and frozen."""

import gc
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from convoy.checkpoint import checkpoint as checkpoint_module
from convoy.comm.processes import JoinedGroup
from convoy.elastic.members import Members
from convoy.errors import InputError
from lab.chaos import TIGHT, Blow, Case
from lab.chaos_disks import TROUBLES, with_troubles
from lab.chaos_drawn import drawn
from lab.chaos_joins import with_joins
from lab.chaos_threads import resources, run
from tests.support.slow import most_slow


@pytest.fixture(autouse=True)
def _quick_turns() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.0005)
    yield
    sys.setswitchinterval(before)


# 70044 returns to the snapshot of step 5, and then to the checkpoint of step 6.
@pytest.mark.parametrize("seed", [20003, 10007, 20011, 70044])
def test_random_events_change_no_number(seed: int) -> None:
    found = run(drawn(seed))
    assert not found.short
    assert found.apart < TIGHT
    assert found.events


# 7: a device joins in the regroup that returns to the checkpoint.
@pytest.mark.parametrize("seed", most_slow(1, [100008, 7, 100006, 100001]))
def test_devices_that_join_at_a_random_moment_change_no_number(seed: int) -> None:
    found = run(with_joins(drawn(seed)))
    assert not found.short
    assert found.apart < TIGHT
    assert any("join" in fate.happened for fate in found.fates)


def test_a_full_disk_and_a_slow_device_change_no_number() -> None:
    blows = (
        Blow(0, "full", 1, 1, for_s=60.0, room_bytes=4096), Blow(1, "full", 3, 1, for_s=0.3), Blow(0, "kill", 5, 9),
        Blow(2, "slow", 2, 1, for_s=0.2),
    )  # fmt: skip
    found = run(Case(3, 3, "model", epochs=1, saves=1, blows=blows))
    assert not found.short
    assert found.apart < TIGHT
    assert found.events == 4
    assert "cannot write the checkpoint of step 2 " in found.fates[2].warned[0]


def test_chaos_detects_a_destroyed_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    publish = checkpoint_module.publish

    def overwrites(folder: Path, step: int, write: Callable[[Path], None]) -> Path:
        found = publish(folder, step, write)
        (found / "model.safetensors").write_bytes(b"")
        return found

    monkeypatch.setattr(checkpoint_module, "publish", overwrites)
    with pytest.raises(InputError, match="has 0 bytes"):
        run(Case(1, 2, "data", epochs=1, saves=3, blows=()))


@pytest.mark.parametrize("kind", TROUBLES)
def test_faults_depend_on_the_seed_alone(kind: str) -> None:
    case = drawn(10007)
    found = with_troubles(case, [kind])
    assert found == with_troubles(case, [kind])
    assert found.blows[: len(case.blows)] == case.blows
    assert {blow.kind for blow in found.blows[len(case.blows) :]} == {kind}
    assert len({with_troubles(drawn(seed), [kind]).blows[-1].at for seed in range(30)}) > 5


def test_losing_both_copies_of_a_shard_returns_to_the_checkpoint() -> None:
    found = run(Case(2, 4, "model", epochs=1, saves=2, blows=(Blow(1, "kill", 3, 9, beside=2),)))
    assert not found.short
    assert found.apart < TIGHT
    assert "from the checkpoint of step 2" in found.fates[0].told[0]


def test_leaving_costs_no_step() -> None:
    found = run(Case(9, 3, "model", epochs=1, blows=(Blow(0, "term", 3, 4),)))
    assert (found.short, [fate.ended for fate in found.fates]) == ("", ["left", "done", "done"])
    assert found.apart < TIGHT
    assert len(found.fates[1].told) == 1
    assert "repeated" not in found.fates[1].told[0]


def groups() -> int:
    return sum(type(each) in (Members, JoinedGroup) for each in gc.get_objects())


def test_losses_leak_no_groups_files_or_threads() -> None:
    before, there = resources(), groups()
    found = run(Case(5, 3, "sharded", epochs=1, blows=(Blow(1, "kill", 2, 3),)))
    assert (found.short, found.events) == ("", 1)
    del found
    after = resources()
    assert groups() <= there
    assert (after["files"], after["threads"]) == (before["files"], before["threads"])


@pytest.mark.slow  # it has to be silent for longer than the limit
def test_silent_device_that_was_asked_to_leave_has_left() -> None:
    found = run(Case(3, 3, "data", blows=(Blow(1, "term", 4, 1), Blow(1, "stop", 4, 1))))
    assert not found.short
    assert [fate.ended for fate in found.fates] == ["done", "left", "done"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "options",
    [
        "--inside threads --seed 3000 --minutes 10",
        "--inside threads --joins --seed 4000 --minutes 5",
        "--churn --minutes 2",
    ],
)
def test_ten_minutes_of_chaos(options: str) -> None:
    command = [sys.executable, "-m", "lab.chaos", *options.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=850, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
