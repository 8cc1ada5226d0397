"""Thousands of damaged files: each is used, or refused in one bounded message, without traceback or hang.

The slow tests have the thousands, the fast ones a sample of the same.
"""

import json
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
import tomlkit
import torch
from torch import nn

from convoy.checkpoint import Progress, load_checkpoint, save_checkpoint
from convoy.cli import fleet_commands, plan_verbs
from convoy.config.checks import check
from convoy.config.run_file import resolve_settings, to_toml
from convoy.fleet import Fleet, read_fleet
from convoy.plan.lower import lower
from convoy.plan.plan import Plan
from convoy.plan.presets import Speeds, named_plan
from convoy.planner.prediction import predict_plan
from convoy.report.page import write_report
from convoy.simulate.table import Measurement
from tests.support.described_fleets import asked
from tests.support.good_files import (
    CLASSES,
    FLEET,
    NET,
    graph,
    make_log,
    make_measurement,
    make_plan,
    make_run_file,
    used_or_refused,
    written,
)
from tests.support.mutations import mutated_bytes, mutated_json, mutated_lines, mutated_tree

# ------------------------------------------------------------------------------------------------------------------ files


@dataclass(frozen=True)
class Subject:
    """A kind of file.

    Attributes:
        make: a good one in a folder; the file that is damaged.
        mutate: damages its bytes.
        use: does with it what the command does.
    """

    make: Callable[[Path], Path]
    mutate: Callable[[bytes, Random], bytes]
    use: Callable[[Path], object]


def use_plan(path: Path) -> None:
    plan = Plan.load(path)
    plan.check(graph(), 2)
    lower(plan, graph())
    assert Plan.from_json(plan.to_json()) == plan


def mutated_toml(content: bytes, random: Random) -> bytes:
    if random.random() < 0.4:
        return mutated_bytes(content, random)
    tree = mutated_tree(tomllib.loads(content.decode()), random)
    try:
        return tomlkit.dumps(tree).encode("utf-8", "backslashreplace")
    except Exception:  # TOML has no word for some of it: a person would write what JSON says
        return "\n".join(f"{json.dumps(key)} = {json.dumps(value)}" for key, value in tree.items()).encode()


def use_fleet(path: Path) -> None:
    plan_verbs.plan(NET, path, batch=16, image="1,8,8", trace=path.parent / "out")


def use_classes(path: Path) -> None:
    """Read the file as `convoy fleet show` and `convoy predict` do, and read it again after writing it."""
    fleet_commands.show(path)
    fleet = read_fleet(path)
    assert Fleet.from_toml(fleet.to_toml()) == fleet
    plan_verbs.predict(NET, fleet=path, batch=16, image="1,8,8", classes=10)


def use_measurement(path: Path) -> None:
    measured = Measurement.from_toml(path.read_text(encoding="utf-8", errors="replace"), str(path))
    costs = measured.costs(graph())
    devices = len(measured.fleet.devices)
    plan = named_plan("data", graph(), 16, Speeds((1.0,) * devices))
    predict_plan(plan, asked(graph(), 16, costs, measured.fleet))


def use_run_file(path: Path) -> None:
    run = resolve_settings(path, {})
    check(run.settings)
    run.rows()
    again = written(path.with_name("again.toml"), to_toml(run.settings))
    assert resolve_settings(again, {}).settings == run.settings


FILES: dict[str, Subject] = {
    "plan": Subject(make_plan, mutated_json, use_plan),
    "fleet": Subject(lambda folder: written(folder / "fleet.toml", FLEET), mutated_toml, use_fleet),
    "fleet of classes": Subject(lambda folder: written(folder / "fleet.toml", CLASSES), mutated_toml, use_classes),
    "measurement": Subject(make_measurement, mutated_toml, use_measurement),
    "run file": Subject(make_run_file, mutated_toml, use_run_file),
    "log": Subject(make_log, mutated_lines, lambda path: write_report(path, path.with_suffix(".html"))),
}


def fuzz_files(name: str, folder: Path, seeds: range) -> int:
    """Damage a file in as many ways as there are seeds; how many of them were refused."""
    subject, refused = FILES[name], 0
    path = subject.make(folder)
    content = path.read_bytes()
    assert used_or_refused(lambda: subject.use(path)) == ""
    for seed in seeds:
        path.write_bytes(subject.mutate(content, Random(f"{name} {seed}")))
        try:
            refused += bool(used_or_refused(lambda: subject.use(path)))
        except BaseException as error:
            error.add_note(f"{name}, seed {seed}")
            raise
    return refused


@pytest.mark.parametrize("name", FILES)
def test_damaged_files_are_used_or_refused(name: str, tmp_path: Path) -> None:
    assert fuzz_files(name, tmp_path, range(25)) > 5


# ------------------------------------------------------------------------------------------------------------- checkpoints


def trained(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """A net with a buffer, with momentum, and with a schedule."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
        schedule.step()
    return model, optimizer, schedule


def damaged_bytes(content: bytes, every: int) -> Iterator[bytes]:
    """Yield the bytes with one changed, one removed, or cut off there, at regular positions."""
    for place in range(0, len(content), every):
        yield content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :]
        yield content[:place] + content[place + 1 :]
        yield content[:place]
    yield content + b"\n"


def refuse_damaged_bytes(folder: Path, every: int) -> None:
    """No damage of a byte is taken for a checkpoint, not even a blank's in its description."""
    model, optimizer, schedule = trained(0)
    saved = save_checkpoint(folder, model, optimizer, Progress(2, 1, 0), schedule=schedule, score=0.5)
    other, its_optimizer, its_schedule = trained(1)
    for path in sorted(saved.iterdir()):
        content = path.read_bytes()
        for damaged in damaged_bytes(content, every):
            path.write_bytes(damaged)
            assert used_or_refused(lambda: load_checkpoint(folder, other, its_optimizer, schedule=its_schedule))
        path.write_bytes(content)
    load_checkpoint(folder, other, its_optimizer, schedule=its_schedule)


def test_every_damaged_checkpoint_byte_is_noticed(tmp_path: Path) -> None:
    refuse_damaged_bytes(tmp_path, every=61)
