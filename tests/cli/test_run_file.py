"""Run files: their settings, command-line overrides, and refusals with line numbers."""

import json
import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from convoy import cli
from convoy.config.checks import check
from convoy.config.run_file import resolve_settings, to_toml
from convoy.config.train_options import FIELDS, Settings, extra_of, key_of
from convoy.errors import InputError
from tests.support.processes import PLACE, ROOT

RUN = """\
# a comment
data = "digits"
net = "two-conv:4:6"
batch = 32
limit = 80
lr = 0.05
timeout = 30
slowdown = [1]
speeds = "1"
clip-norm = 2
data-dir = "somewhere"
rebalance = true
"""


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*PLACE, "CONVOY_DEVICE", "COLUMNS", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


# ------------------------------------------------------------------------------------------------------------- values


def test_the_command_line_overrides_the_file_and_the_file_the_defaults(run: Path) -> None:
    found = resolve_settings(run, {"batch": 16, "momentum": 0.5})
    settings = found.settings
    assert (settings.batch, settings.momentum) == (16, 0.5)
    assert (settings.net, settings.limit, settings.lr) == ("two-conv:4:6", 80, 0.05)
    assert (settings.timeout_s, settings.clip_norm) == (30.0, 2.0)
    assert (settings.slowdown, settings.speeds) == ((1.0,), (1.0,))
    assert (settings.data_dir, settings.rebalance) == (Path("somewhere"), True)
    assert (settings.epochs, settings.schedule, settings.precision) == (1, "constant", "float32")
    assert found.sources["batch"] == found.sources["momentum"] == "command line"
    assert found.sources["lr"] == f"{run} line 6"
    assert found.sources["epochs"] == "default"
    assert list(found.sources) == list(FIELDS)


def test_a_switch_of_the_file_can_be_turned_off(run: Path) -> None:
    assert resolve_settings(run, {}).settings.rebalance
    assert not resolve_settings(run, {"rebalance": False}).settings.rebalance


def test_missing_file_gives_defaults() -> None:
    found = resolve_settings(None, {})
    assert found.settings == Settings()
    assert set(found.sources.values()) == {"default"}
    assert ("timeout", "600", "default") in found.rows()
    assert ("limit", "-", "default") in found.rows()


@pytest.mark.parametrize(
    ("written", "expected"), [("4", "4"), ('"cuda:0,cpu"', "cuda:0,cpu"), ('["cuda:0", "cpu"]', "cuda:0,cpu")]
)
def test_devices_can_be_a_number_a_string_or_a_list(tmp_path: Path, written: str, expected: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f"devices = {written}\n")
    assert resolve_settings(file, {}).settings.devices == expected


@pytest.mark.parametrize(("written", "seconds"), [("30", 30.0), ('"450 ms"', 0.45), ('"2 min"', 120.0), ('"30"', 30.0)])
def test_times_accept_units(tmp_path: Path, written: str, seconds: float) -> None:
    """Regression: fleet files took `450 ms`, options and run files numbers only."""
    file = tmp_path / "run.toml"
    file.write_text(f"budget = {written}\n")
    assert resolve_settings(file, {}).settings.budget_s == seconds


def test_command_line_times_accept_units(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert command(monkeypatch, ["train", "--timeout", "2 min", "--epochs", "0"]) == 2
    assert "--epochs" in capsys.readouterr().err, "the time is fine, what comes after it is not"
    for verb in (["train", "--timeout", "2 parsecs"], ["measure", "-o", "x", "--budget", "2 parsecs"]):
        assert command(monkeypatch, verb) == 2
        assert "parsecs" in (told := capsys.readouterr().err)
        assert "450 ms" in told


def test_saved_settings_read_back(run: Path, tmp_path: Path) -> None:
    """All that has a value, in the order and the parts of the list; not the name of the saved file itself."""
    before = resolve_settings(run, {"epochs": 3, "weight_decay": 1e-5, "save_run": tmp_path / "saved.toml"}).settings
    saved = tmp_path / "saved.toml"
    saved.write_text(to_toml(before))
    assert resolve_settings(saved, {}).settings == before.model_copy(update={"save_run": None})
    table = tomllib.loads(saved.read_text())
    assert (table["weight-decay"], table["timeout"], table["epochs"]) == (1e-5, 30.0, 3)
    assert "evaluate-steps" not in table
    assert [line[2:] for line in saved.read_text().splitlines() if line.startswith("# ")][1:] == list(
        dict.fromkeys(extra_of(name)["panel"] for name in FIELDS)
    )


# ------------------------------------------------------------------------------------------------------ what is refused

REFUSED: list[tuple[str, str]] = [
    ("bach = 64", "run.toml line 2: unknown key 'bach': did you mean 'batch'?"),
    ("weight_decay = 0.1", "run.toml line 2: unknown key 'weight_decay': did you mean 'weight-decay'?"),
    ("Epochs = 3", "run.toml line 2: unknown key 'Epochs': did you mean 'epochs'?"),
    ("try-again = true", "run.toml: try-again = true: lost devices are not restarted any more; remove the line"),
    ("colour = 1", "unknown key 'colour': convoy train --help-all lists them"),
    ("[training]\nlr = 0.1", "run.toml line 2: unknown key 'training'"),
    ('batch = "64"', "run.toml line 2: batch = '64': input should be a valid integer"),
    ("batch = 0", "line 2: batch = 0: input should be greater than or equal to 1"),
    ("lr = inf", "line 2: lr = inf: input should be a finite number"),
    ('lr = "0.1"', "line 2: lr = '0.1': input should be a valid number"),
    ("rebalance = 1", "line 2: rebalance = 1: input should be a valid boolean"),
    ("log = 5", "line 2: log = 5: input is not a valid path"),
    ('slowdown = "fast"', "line 2: slowdown = 'fast': give numbers with commas between them, e.g. 1,1,2,4"),
    ("slowdown = [1, inf]", "line 2: slowdown = 1,inf: input should be a finite number"),
    ("devices = true", "line 2: devices = true: input should be a valid string"),
    ('reduce = "tree"', "line 2: reduce = 'tree': input should be 'ring', 'butterfly', 'direct'"),
    ('schedule = "linear"', "line 2: schedule = 'linear': choose one of constant, cosine, one-cycle, step"),
    ("batch = ", "run.toml: not TOML: "),
]


@pytest.mark.parametrize(("text", "words"), REFUSED, ids=lambda value: value)
def test_invalid_settings_of_a_file_are_refused(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f"epochs = 1\n{text}\n" if not text.startswith("Ep") else f"lr = 1.0\n{text}\n")
    with pytest.raises(InputError) as refused:
        resolve_settings(file, {})
    assert words in str(refused.value)
    assert str(refused.value).startswith(str(file))
    assert "\n" not in str(refused.value)


def test_command_line_errors_name_the_option(run: Path) -> None:
    run.write_text("batch = 0\n")
    with pytest.raises(InputError, match=r"^--batch -3: input should be greater than or equal to 1$"):
        resolve_settings(run, {"batch": -3})


@pytest.mark.parametrize("name", ["slowdown", "speeds"])
def test_empty_list_is_refused(name: str, tmp_path: Path) -> None:
    """Regression: `slowdown = []` counted as not given, and trained with factors of 1."""
    file = tmp_path / "run.toml"
    file.write_text(f"devices = 2\n{name} = []\n")
    with pytest.raises(InputError, match=f"--{name} : give one .* for each of the 2 devices"):
        check(resolve_settings(file, {}).settings)


def test_plan_is_for_one_micro_batch(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    row = {"format": 1, "name": "mine", "model": "x", "devices": 1, "batch": 16, "reduce": "ring"}
    plan.write_text(json.dumps({**row, "otherwise": {"strategy": "batch", "shares": [16]}, "layers": {}}))
    check(Settings(plan=str(plan), batch=64, accumulate=4))
    with pytest.raises(
        InputError, match=r"--batch 64 in 2 micro-batches of 32, but the plan .* is for 16: give --batch 32"
    ):
        check(Settings(plan=str(plan), batch=64, accumulate=2))


# ------------------------------------------------------------------------------------------------------- one list


def help_text(option: str) -> str:
    printed = CliRunner(env={"COLUMNS": "80"}).invoke(cli.app, ["train", option])
    assert printed.exit_code == 0
    return printed.stdout


def test_help_all_shows_every_setting_with_its_default_and_meaning() -> None:
    text = re.sub(r"\s+", "", help_text("--help-all"))
    for name, field in FIELDS.items():
        default = "" if field.default in (None, False) else f"[default: {field.default}]"
        for part in (f"--{key_of(name)}", extra_of(name)["panel"], str(field.description), default):
            assert re.sub(r"\s+", "", part) in text, (name, part)


def test_help_fits_one_screen_and_points_to_the_rest() -> None:
    """Regression: it listed 62 options on 250 lines."""
    text = help_text("--help")
    assert len(text.splitlines()) <= 33
    for option in ("data", "net", "batch", "epochs", "lr", "plan", "devices", "fleet", "checkpoint", "log", "help-all"):
        assert f"  --{option} " in text
    assert "<bool>" not in text
    assert "--drop-factor" not in text


def test_there_are_at_most_fourteen_verbs_and_old_names_still_work() -> None:
    verbs: Any = get_command(cli.app)
    assert len([verb for verb in verbs.commands.values() if not verb.hidden]) <= 14
    assert {name for name, verb in verbs.commands.items() if verb.hidden} == set()


@pytest.mark.parametrize("given", ["0", "-1", "2.5", "auto", "", 0, 1.5])
def test_indivisible_micro_batch_counts_are_refused(given: object) -> None:
    with pytest.raises(InputError, match=r"--accumulate"):
        resolve_settings(None, {"accumulate": given})


def test_settings_that_affect_results_must_match_on_every_device() -> None:
    names = set(Settings().decisive)
    assert {"data", "net", "batch", "accumulate", "ema", "precision", "clip_norm", "schedule", "seed"} <= names
    assert {"evaluate_steps", "evaluate_epochs"} <= names, "tests are made together"
    assert not names & {"data_dir", "workers", "log", "port", "timeout_s", "save_plan", "devices", "compare", "explain"}
    assert Settings(plan="here.json").decisive == Settings(plan="there.json").decisive


def command(monkeypatch: pytest.MonkeyPatch, argv: Sequence[str]) -> int:
    monkeypatch.setattr(sys, "argv", ["convoy", *argv])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_a_run_file_is_trained_explained_and_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the file to the log; then the saved file gives the same training again, to the last digit."""
    run = tmp_path / "run.toml"
    run.write_text(RUN.replace('data-dir = "somewhere"\n', "").replace("rebalance = true\n", ""))
    saved, logs = tmp_path / "saved.toml", [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    options = ["--epochs", "2", "--accumulate", "2", "--schedule", "cosine", "--warmup-epochs", "0.5", "--ema", "0.9"]
    options += ["--label-smoothing", "0.1", "--evaluate-steps", "2", "--optimizer", "adamw", "--precision", "bf16"]
    options += ["--save-run", str(saved), "--explain", "--compare", "--log", str(logs[0])]
    assert command(monkeypatch, ["train", str(run), *options]) == 0
    text = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if line.startswith("│")]
    assert ["batch", "32", f"{run} line 4"] in rows
    assert ["clip-norm", "2", f"{run} line 10"] in rows
    assert ["epochs", "2", "command line"] in rows
    assert ["momentum", "0.9", "default"] in rows
    assert [row[0] for row in rows if len(row) == 3][: len(FIELDS)] == [key_of(name) for name in FIELDS]
    assert "the last micro-batch of 16 samples on 1 device" in text
    assert "A step of 32 samples has 2 micro-batches of 16; gradients are all-reduced in the last." in text
    assert re.search(r"step 2: test accuracy [\d.]+%", text)
    assert re.search(r"Best test accuracy: [\d.]+% after step \d", text)
    assert "Loss curves over 6 steps: at most 0 apart (rounding of bf16" in text, "one device, one thread"
    assert command(monkeypatch, ["train", str(saved), "--no-explain", "--no-compare", "--log", str(logs[1])]) == 0
    assert "Settings in force" not in capsys.readouterr().out
    first, second = (told(log) for log in logs)
    assert first == second
    assert [row["samples"] for row in first if row["what"] == "step"] == [32, 32, 16] * 2
    assert [row["lr"] for row in first if row["what"] == "epoch"] == pytest.approx(
        [0.05 / 2 + 0.05 / 4 * 0, 0.0], abs=0.03
    )
    assert [row["step"] for row in first if row["what"] == "evaluation"] == [2, 3, 4, 6]


def told(log: Path) -> list[dict[str, Any]]:
    """Return losses, rates and accuracies, without seconds."""
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    kept = ("what", "step", "epoch", "loss", "samples", "accuracy", "best", "lr")
    return [
        {key: row[key] for key in kept if key in row} for row in rows if row["what"] in ("step", "evaluation", "epoch")
    ]


def test_documented_example_is_valid() -> None:
    text = (ROOT / "examples" / "run.toml").read_text()
    section = (ROOT / "docs" / "training.md").read_text().partition("## A run is a file")[2].partition("\n## ")[0]
    (block,) = re.findall(r"```toml\n(.*?)```", section, re.DOTALL)
    assert block == text
    settings = resolve_settings(ROOT / "examples" / "run.toml", {}).settings
    check(settings)
    assert settings.device_names == ("cpu",) * 4
    named = {f"--{key_of(name)}" for name in FIELDS}
    assert set(re.findall(r"`(--[a-z-]+)", section)) - {"--no-rebalance"} <= named


# --------------------------------------------------------------------------------------------------------- going on

ON_AND_ON = [
    *("--net", "two-conv:4:6", "--limit", "80", "--batch", "20", "--accumulate", "2", "--speeds", "1", "--lr", "0.05"),
    *("--ema", "0.9", "--clip-norm", "1", "--schedule", "step", "--drop-epochs", "1", "--drop-factor", "0.5"),
]
"""Epochs of four steps."""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--resume", "--epochs", "2"], "is complete: 2 epochs are done; give --epochs above 2"),
        (["--resume", "--epochs", "3", "--lr", "0.1"], "lr is 0.05 there and 0.1 here; give the same"),
        (["--resume", "--epochs", "3", "--ema", "0.5"], "ema is 0.9 there and 0.5 here; give the same"),
        (["--epochs", "3"], "of another run: resume it (--resume)"),
        (
            ["--resume", "--epochs", "3", "--compare"],
            "--compare with --resume: one device would start from the beginning",
        ),
    ],
)
def test_unresumable_runs_are_refused(
    options: list[str], words: str, finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, ["train", *ON_AND_ON, "--checkpoint", str(finished), *options]) == 2
    assert words in capsys.readouterr().err


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of two epochs."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    with pytest.MonkeyPatch.context() as patch:
        for name in (*PLACE, "CONVOY_DEVICE"):
            patch.delenv(name, raising=False)
        assert command(patch, ["train", *ON_AND_ON, "--epochs", "2", "--checkpoint", str(folder)]) == 0
    return folder


def test_resume_refuses_changed_settings() -> None:
    lasting = set(Settings().lasting)
    assert {"data", "net", "limit", "seed", "batch", "lr", "ema", "precision", "augment", "label_smoothing"} <= lasting
    assert not lasting & {"epochs", "accumulate", "plan", "slowdown", "speeds", "wire", "rebalance", "evaluate_steps"}
    assert "epochs" in Settings(schedule="cosine").lasting, "its end shapes the whole curve"
