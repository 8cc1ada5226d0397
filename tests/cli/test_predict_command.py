"""`convoy predict`, and `convoy plan` for a described fleet."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from convoy import cli
from convoy.cli import plan_verbs
from convoy.errors import InputError

FLEET = """
[network]
send_bytes_per_s = "1 Gbit/s"
receive_bytes_per_s = "1 Gbit/s"
latency_s = "100 us"
[[host]]
name = "a"
[[host]]
name = "b"
[[device]]
name = "a-cpu"
host = "a"
class = "zen5-core"
[[device]]
name = "b-cpu"
host = "b"
class = "zen5-core"
cores = 0.5
"""


def convoy(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", ["convoy", *words])
    with pytest.raises(SystemExit) as end:
        cli.main()
    told = capsys.readouterr()
    assert end.value.code in (0, None), told.err
    return told.out


def test_predict_prints_an_answer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("two-conv:50:500", "--image", "3,32,32", "--classes", "10", "--batch", "256")
    out = convoy(monkeypatch, capsys, "predict", *words, "--on", "zen5-core,laptop-cpu", "--link", "10 Gbit/s")
    for said in ("Would it pay? ", "nine of ten", "Batch: it pays", "Link: it pays", "Based on "):
        assert said in out, out


def test_predict_answers_for_local_outputs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A U-Net sends 3.89 MB of gradients. With the logits of all images on all devices it would be 25.9 MB."""
    words = ("unet:8", "--image", "3,256,256", "--classes", "21", "--batch", "4", "--on", "zen5-core,zen5-core")
    assert "3.89 MB sent per step" in convoy(monkeypatch, capsys, "predict", *words, "--outputs", "where-computed")


def test_list_option_prints_the_device_classes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = convoy(monkeypatch, capsys, "predict", "--list")
    for name in ("rtx3060", "laptop-cpu", "raspberry-pi-5", "NVIDIA GeForce RTX 3090"):
        assert name in out


def test_plan_answers_for_a_described_fleet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: it refused with "run convoy measure"."""
    path = tmp_path / "fleet.toml"
    path.write_text(FLEET)
    plan = tmp_path / "plan.json"
    out = convoy(
        monkeypatch, capsys, "plan", "two-conv:8:16", "--batch", "64", "--fleet", str(path), "-o", str(plan)
    )  # fmt: skip
    assert "a roofline: the devices' peaks" in out
    assert "nine of ten steps take" in out
    assert plan.is_file()


def test_plan_writes_a_valid_trace_and_a_picture_of_each_plan(tmp_path: Path) -> None:
    """Complete events have a name, pid, tid, ts and dur in microseconds; metadata names every process and thread."""
    path, folder = tmp_path / "fleet.toml", tmp_path / "deep" / "traces"
    path.write_text(FLEET)
    plan_verbs.plan("two-conv:8:16", path, trace=folder)
    assert {file.stem for file in folder.glob("*.json")} == {file.stem for file in folder.glob("*.html")}
    assert {"auto", "data", "hybrid"} <= {file.stem for file in folder.iterdir()}
    assert "Predicted step" in (folder / "auto.html").read_text()
    events = json.loads((folder / "hybrid.json").read_text())["traceEvents"]
    named = {
        (e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and "name" in e["args"]
    }
    for event in (each for each in events if each["ph"] == "X"):
        assert event["ts"] >= 0
        assert event["dur"] > 0
        assert ("thread_name", event["pid"], event["tid"]) in named
    assert [named["process_name", device, 0] for device in range(2)] == ["a-cpu", "b-cpu"]
    assert {"compute", "send", "receive"} <= set(named.values())
    with pytest.raises(InputError, match="cannot make the folder"):
        plan_verbs.plan("two-conv:8:16", path, trace=path / "traces")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "give the fleet, once: --on"),
        ({"on": "rtx3060", "fleet": Path("f.toml")}, "give the fleet, once"),
        ({"on": "rtx3061"}, "did you mean rtx3060"),
        ({"on": "rtx3060", "outputs": "here"}, "unknown place of outputs 'here'"),
    ],
)
def test_unanswerable_requests_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        plan_verbs.predict("two-conv:4:6", image="3,32,32", **given)
