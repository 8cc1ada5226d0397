"""One line, and four: the examples run alone and on processes, with the same losses; and what the functions refuse."""

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import convoy
import convoy.measure.layer_timer
from convoy.comm.group import Group
from convoy.errors import InputError, MismatchError, PlanError
from convoy.plan.strategy import Batch
from tests.support import nets
from tests.support.processes import PLACE, ROOT, on_processes
from tests.support.scripts import on_forks
from tests.support.threads import run_on_threads

ONE, FOUR = ROOT / "examples" / "one_line.py", ROOT / "examples" / "four_lines.py"
X = torch.zeros(1, 3, 8, 8, dtype=torch.float64)


# ------------------------------------------------------------------------------------------------------ the example


def added_lines(example: Path) -> list[str]:
    """Return the lines of an example that call Convoy."""
    return [line for line in example.read_text().splitlines() if re.search(r"= convoy\.\w+\(", line)]


def test_the_readme_shows_the_example() -> None:
    readme = (ROOT / "README.md").read_text()
    section = readme.partition("## One line")[2].partition("\n## ")[0]
    (block,) = re.findall(r"```diff\n(.*?)```", section, re.DOTALL)
    assert "\n".join(line[1:] for line in block.splitlines()) in ONE.read_text()
    assert [line[1:] for line in block.splitlines() if line.startswith("+")] == added_lines(ONE)


def test_the_examples_differ_from_an_ordinary_script_by_one_line_and_by_four() -> None:
    assert (len(added_lines(ONE)), len(added_lines(FOUR))) == (1, 4)
    calls = "".join(added_lines(FOUR))
    assert all(f"convoy.{call}(" in calls for call in ("join", "make_plan", "distribute", "loader"))


def under_torchrun(example: Path) -> tuple[str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(example)],
        cwd=ROOT,
        env={**os.environ, "PYTHONWARNINGS": "error", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def by_its_variables(example: Path) -> tuple[str, str]:
    said = on_forks(3, example, as_one=False)
    assert said[1:] == [("", "")] * 2
    return said[0]


@pytest.mark.slow
def test_large_images_in_tiles_train_like_whole_images(tmp_path: Path) -> None:
    example = [str(ROOT / "examples" / "large_images.py")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}

    def output_of(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    output_of(*example, "make", "--side", "160")
    train = (*example, "train", "--side", "160", "--steps", "4")
    alone, together = output_of(*train), output_of("-m", "convoy", "run", "--devices", "3", *train)
    losses = [[float(x) for x in re.findall(r"loss ([\d.]+)", text)] for text in (alone, together)]
    assert len(losses[0]) == 4
    assert losses[1] == pytest.approx(losses[0], abs=1e-4), "float32 on both sides"
    assert "(1, 3, 160, 160)" in alone
    assert "(1, 3, 160, 160)" not in together


@pytest.mark.parametrize(
    ("example", "start"),
    [
        pytest.param(ONE, under_torchrun, id="one line", marks=pytest.mark.slow),
        pytest.param(FOUR, by_its_variables, id="four lines"),
    ],
)
def test_example_runs_alone_and_under_torchrun(
    example: Path, start: Callable[[Path], tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same losses, with warnings as errors, and not a word beside the example's own but what it waits for."""
    for name in PLACE:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(convoy.measure.layer_timer, "SPEEDS_SLICE_S", 0.0)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(example))
    out, err = start(example)
    said = "every device times the model's layers"
    assert err == f"convoy: {said} ...\n"
    alone, together = (
        [float(loss) for loss in re.findall(r"^epoch \d: loss ([\d.]+)", text, re.MULTILINE)]
        for text in (printed.getvalue(), out)
    )
    assert len(out.splitlines()) == len(alone) == len(together) == 2
    assert together == pytest.approx(alone, abs=2e-3), "float32 on both sides"
    assert alone[1] < 0.5 * alone[0]


# ----------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("name", "batch", "options", "error", "words"),
    [
        ("fastest", 8, {}, InputError, ["unknown plan 'fastest'", "data-by-speed", "hybrid", "master", "model"]),
        ("data", 8, {"reduce": "tree"}, InputError, ["unknown reduce 'tree'", "butterfly", "direct", "ring", "star"]),
        ("data", 0, {}, PlanError, ["batch of 0", "1 or more"]),
        ("data", 8, {"speeds": [1, 2]}, InputError, ["speeds 1,2", "one positive number for each of the 1 devices"]),
        ("data", 8, {"speeds": [0]}, InputError, ["speeds 0", "positive"]),
        ("data", 8, {"speeds": []}, InputError, ["one positive number for each of the 1 devices"]),
    ],
)
def test_impossible_plans_are_refused(
    name: str,
    batch: int,
    options: dict[str, object],
    error: type[Exception],
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before the seconds of measuring."""
    monkeypatch.setattr("convoy.measure.planning.measure_speeds", lambda *_: pytest.fail("measured first"))
    with convoy.join() as group, pytest.raises(error) as caught:
        convoy.make_plan(name, nets.build("two-conv"), X, batch, group, **options)  # type: ignore[arg-type]
    for word in words:
        assert word in str(caught.value)


def test_plan_from_a_file_skips_planning() -> None:
    """The command line gives `--plan my.json` so: the shares stay, `reduce` and `wire` replace the plan's own where given."""
    model = nets.build("two-conv")
    with convoy.join() as group:
        saved = convoy.make_plan("data", model, X, 8, group, speeds=[1], reduce="star")
        plans = convoy.api.make_plans(model, X, 8, group, plan=saved, speeds=[3])
        assert (list(plans), plans.speeds.devices, plans.predicted(saved)) == ([saved], (3.0,), None)
        changed = convoy.api.make_plans(model, X, 8, group, plan=saved, speeds=[3], wire="inexact-bf16")[0]
        assert changed == replace(saved, wire="inexact-bf16")
        with pytest.raises(PlanError, match="is for a batch of 8, not 9: make a new plan"):
            convoy.api.make_plans(model, X, 9, group, plan=saved, speeds=[3])
        with pytest.raises(PlanError, match="made for another model"):
            convoy.api.make_plans(nets.build("resnet"), X, 8, group, plan=saved)


def test_plan_for_another_model_or_fleet_is_refused() -> None:
    model = nets.build("two-conv")
    with convoy.join() as group:
        plan = convoy.make_plan("data", model, X, 8, group, speeds=[1])
        with pytest.raises(PlanError, match=r"made for another model .*make a plan for this model"):
            convoy.distribute(nets.build("resnet"), plan, group, X)
        shares = replace(plan, devices=2, otherwise=Batch((4, 4)))
        with pytest.raises(PlanError, match="is for 2 devices, this job has 1: start as many devices"):
            convoy.distribute(model, shares, group, X)
        wrong = replace(plan, otherwise=Batch((7,)))
        with pytest.raises(PlanError, match="sum to 7, the axis has 8: make them sum to 8"):
            convoy.distribute(model, wrong, group, X)


@pytest.mark.parametrize("what", ["model", "plan"])
def test_devices_with_different_arguments_are_named(what: str) -> None:
    first, second = nets.build("two-conv"), nets.build("resnet")

    def work(group: Group) -> None:
        stranger = group.device in (1, 3)
        model = second if stranger and what == "model" else first
        name = "model" if stranger and what == "plan" else "data"
        plan = convoy.make_plan(name, model, X, 8, group, speeds=[1] * 4)
        convoy.distribute(model, plan, group, X)

    with pytest.raises(
        MismatchError, match=f"devices 1, 3 started with another {what} than device 0: start every device"
    ):
        run_on_threads(4, work)


def join_with_another_version(device: int) -> str:
    """On processes: device 2 has a newer Convoy."""
    import convoy.comm.rendezvous as meeting

    if device == 2:
        meeting.__version__ = "99.0"  # type: ignore[attr-defined]
    try:
        convoy.join(timeout_s=20).close()
    except MismatchError as error:
        return str(error)
    return "joined"


def test_a_device_with_another_version_is_named() -> None:
    for message in on_processes(3, "tests.test_api:join_with_another_version", joined=False):
        assert re.search(r"do not run the same convoy: .* on most, but 99\.0 on device 2 \(host .*\)", message)
        assert "Use the same environment" in message


# ------------------------------------------------------------------------------------------------- the ordinary script


def test_state_dict_is_refused_with_a_remedy() -> None:
    with convoy.join() as group:
        model = nets.build("two-conv")
        plan = convoy.make_plan("model", model, X, 8, group, speeds=[1])
        part = convoy.distribute(model, plan, group, X)
        with pytest.raises(InputError, match=r"full_state_dict\(\) on every device"):
            part.state_dict()
        whole = part.full_state_dict()
    fresh = nets.build("two-conv", seed=1)
    fresh.load_state_dict(whole)
    assert all(torch.equal(a, b) for a, b in zip(fresh.parameters(), model.parameters(), strict=True))


def test_original_model_is_unchanged(tmp_path: Path) -> None:
    """Training works on a copy; what is saved is loaded by plain PyTorch."""
    model = nets.build("two-conv")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    data = torch.utils.data.TensorDataset(torch.randn(4, 3, 8, 8).double(), torch.arange(4))

    def work(group: Group) -> None:
        plan = convoy.make_plan("hybrid", model, X, 4, group, speeds=[1, 3])
        part = convoy.distribute(model, plan, group, X)
        optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
        for x, y in convoy.loader(data, 4, part):
            nn.functional.cross_entropy(part(x), y).backward()
        assert float(convoy.train.clip_grad_norm_(part, 1e-3)) > 1e-3
        optimizer.step()
        state = part.full_state_dict()
        if group.device == 0:
            torch.save(state, tmp_path / "model.pt")

    run_on_threads(2, work)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    model.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    assert not torch.equal(model.get_parameter("fc.weight"), before["fc.weight"])


def device_and_barrier(group: Group) -> list[str]:
    """Return what a process finds before and after it has joined."""
    found = [str(convoy.device)]
    convoy.wait_for_everyone()
    return [*found, str(group.torch_device)]


def test_device_is_that_of_the_process_and_everyone_waits() -> None:
    assert convoy.device == torch.device("cpu")
    convoy.wait_for_everyone()  # without a job there is nobody to wait for
    assert on_processes(2, "tests.test_api:device_and_barrier") == [["cpu", "cpu"]] * 2
