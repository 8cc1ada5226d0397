"""From log to page without a browser: reading, refusals, calculation and escaping."""

import base64
import hashlib
import html
import html.parser
import json
import re
from pathlib import Path
from typing import Any

import pytest

from convoy.errors import InputError
from convoy.report.numbers import in_bytes, plain, seconds
from convoy.report.page import (
    MAX_POINTS,
    MAX_ROWS,
    RELOAD_S,
    Chart,
    Curve,
    LivePage,
    bands,
    device_names,
    layer_boxes,
    page_of,
    resource_charts,
    thinned,
    ticks,
    write_report,
    write_step,
)
from convoy.report.timeline import KINDS, DrawnEvent, drawn_events, kind_of
from convoy.runlog.reader import log_of, newest_run, read_log
from convoy.runlog.schema import EventRow, LayerEntry, PredictionLine
from convoy.train.record import EpochResult
from tests.support.run_logs import END, FLEET, PLAN, PREDICTION, RESHARE, RUN, STEP_S, epoch, layer, whole_run, write

SECTIONS = ["numbers", "curves", "rate", "plan", "step", "devices", "resources", "shares", "settings", "versions"]


class Elements(html.parser.HTMLParser):
    """An HTML parser that checks that every element is closed."""

    EMPTY = ("meta", "link", "br", "input")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.all: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()
        assert self.open == []
        ids = [attributes["id"] for _, attributes in self.all if "id" in attributes]
        assert len(ids) == len(set(ids))

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.all.append((name, dict(attributes)))
        if name not in self.EMPTY:
            self.open.append(name)

    def handle_endtag(self, name: str) -> None:
        assert self.open.pop() == name


def page(tmp_path: Path, rows: list[dict[str, Any]], cut_off: str = "") -> str:
    """Return the page of a log, checked as HTML: one script, every section, nothing external."""
    text = page_of(read_log(write(tmp_path / "run.jsonl", rows, cut_off)))
    body, start, script = text.partition("<script>")
    script = script.partition("</script>")[0]
    assert start
    assert "</script" not in body
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in body, "no other script may run"
    elements = Elements(text)
    assert [attributes["id"] for name, attributes in elements.all if name == "section"] == SECTIONS
    for name, attributes in elements.all:
        assert name not in ("iframe", "img", "object", "base")
        assert "src" not in attributes
        assert attributes.get("href") in (None, "data:,")
    assert not re.search(r"https?:|//\w|url\(|@import", text.replace("http://www.w3.org/2000/svg", ""))
    assert not re.search(r"\bfetch\(|XMLHttp|WebSocket|EventSource|eval", script)
    return text


def part_of(text: str, section: str) -> str:
    return text.partition(f'<section id="{section}"')[2].partition("</section>")[0]


# ----------------------------------------------------------------------------------------------------------- reading


def test_step_after_an_evaluation_is_not_timed(tmp_path: Path) -> None:
    record = read_log(write(tmp_path / "run.jsonl", whole_run()))
    timed = [s for s in record.seconds if s is not None]
    assert timed == pytest.approx([STEP_S] * 38), "the first step of each epoch follows an evaluation, or nothing"
    assert record.step_s == pytest.approx(STEP_S)
    assert record.samples_per_s == pytest.approx(64 / STEP_S)
    assert record.rates == [(step, pytest.approx(3200.0)) for step in (*range(1, 20), *range(21, 40))]


def test_killed_run_makes_a_partial_page(tmp_path: Path) -> None:
    """Cut the log after every kind of line, and within the next one."""
    rows = whole_run()
    for count in (1, 2, 3, 4, 5, 14, 15, 24, 26, 27, len(rows)):
        text = page(tmp_path, rows[:count], json.dumps(rows[min(count, len(rows) - 1)])[:-7])
        assert ("Not finished" in text) == (count < len(rows))
        assert ("Its last line is incomplete." in text) == (count < len(rows))


def test_missing_data_is_named_with_how_to_get_it(tmp_path: Path) -> None:
    named = [row for row in whole_run() if row["what"] != "prediction"]
    text = page(tmp_path, named)
    assert "Nothing was predicted. <code>--plan auto</code> measures the devices" in text
    assert "Nothing was predicted for this plan." in text
    for row in named[1]["devices"]:
        row["samples_per_s"] = None
    assert "solo speeds were not measured" in page(tmp_path, named)
    fixed = [row for row in named if row["what"] != "reshare"]
    assert "They did not change: no other shares were faster by more than the noise." in page(tmp_path, fixed)
    fixed[0]["options"]["rebalance"] = False
    assert "with --rebalance they follow the devices" in page(tmp_path, fixed)
    steps = page(tmp_path, [RUN, *({**row, "lr": None} for row in epoch(0) if row["what"] == "step")])
    assert "The log has no plan" in steps
    assert steps.count("No data yet.") == 3, "learning rate, accuracy, shares"


def test_a_loss_that_is_not_finite_is_reported(tmp_path: Path) -> None:
    rows = whole_run()
    for row in rows:
        if row["what"] in ("step", "epoch") and row["epoch"] == 1:
            row["loss"] = None
    text = page(tmp_path, rows)
    assert "The training loss was not a finite number in 20 steps." in text
    assert "NaN" not in text


def test_a_resumed_run_counts_the_last_line_of_a_repeated_step(tmp_path: Path) -> None:
    """Killed in its second epoch; resumed at step 20 with another plan and clock."""
    again = [row | {"s": row["s"] - 1.4} if row["what"] == "step" else row for row in epoch(1)]
    first = [RUN, FLEET, PLAN, PREDICTION, *epoch(0), *epoch(1)[:7]]
    text = page(tmp_path, [*first, RUN | {"from_step": 20}, FLEET, PLAN | {"work": [1.0, 0.0, 0.0]}, *again, END])
    record = read_log(tmp_path / "run.jsonl")
    assert [row.step for row in record.steps] == list(range(40))
    assert [each.step for each in record.plans] == [0, 10, 20]
    assert record.prediction is None, "it was for the plan before"
    assert "Finished: 40 of 40 steps." in text


def test_current_plan_and_its_prediction_are_drawn(tmp_path: Path) -> None:
    """The summary still compares with the planner's prediction."""
    rows = whole_run()
    text = page(tmp_path, rows)
    assert "The picture shows the shares from step 10 on." in part_of(text, "plan")
    assert "after step 9: conv2 64/48/16 -&gt; 96/24/8 filters" in part_of(text, "shares")
    assert "Nothing was predicted for this plan." in part_of(text, "step")
    times = {"shares_only": True, "step_s": 0.024, "bound": "lab2", "pass": PREDICTION["pass"] | {"s": 0.024}}
    rows.insert(rows.index(RESHARE) + 1, PREDICTION | times)
    text = page(tmp_path, rows)
    step = part_of(text, "step")
    assert "Simulated from the times measured before the training: a micro-batch takes 24 ms" in step
    assert "The step is limited by lab2." in step
    assert "16 ms a step, -20.0% off" in text


def test_measured_joules_per_image_are_shown_with_predicted_ones(tmp_path: Path) -> None:
    metered = {
        "what": "system", "cores": [1.0] * 3, "host_processor": [0.5] * 3, "memory_bytes": [1] * 3,
        "accelerator_bytes": [None] * 3, "sent_bytes_per_s": [0.0] * 3, "received_bytes_per_s": [0.0] * 3,
    }  # fmt: skip

    def card(second: str, joules: list[float | None], **predicted: float) -> str:
        told = {"power_w": [10.0, None, 5.0], "joules": joules, "joules_by": ["RAPL", "counted with device 0", second]}
        rows = [RUN, FLEET, PLAN, PREDICTION | predicted, *epoch(0)]
        rows += [metered | told | {"step": step, "s": 1.0 * step, "samples": 640} for step in (10, 20)]
        text = page(tmp_path, rows)
        assert "Measured power" in text
        return html.unescape(re.sub(r"<[^>]+>|\s+", " ", text.partition("Joules/image")[2])[:300])

    shown = card("NVML", [10.0, None, 5.0], joules_per_image=0.021)
    assert re.search(r"0\.02344 .*by NVML; RAPL; 0\.021 predicted", shown)
    assert "no prediction: the fleet has no watts" in card("NVML", [10.0, None, 5.0])
    assert card("not available here: no counter", [10.0, None, None]) == ""
    assert "Joules/image" not in page(tmp_path, [RUN, FLEET, PLAN, *epoch(0), metered | {"step": 9, "s": 1.0}])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "it is empty"),
        (b"\n", "line 1 is not JSON"),
        (b"[1, 2]\n", 'line 1 has no "what"'),
        (b'{"what": "end", "step_s": 0.1}\n', "its first line is not"),
        (b'{"what": "run"}\n', "line 1: date: field required"),
        (b'{"what": {}}\n', "it is empty"),
        (b"\xff\xfe\x00", "it is not UTF-8 text"),
        (b"[" * 100_000 + b"\n", "line 1 is not JSON"),
    ],
)
def test_files_that_are_not_logs_are_refused(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(InputError, match="give the folder of a run, or the log that it wrote") as refused:
        write_report(tmp_path / "file")
    assert words in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_invalid_line_is_named_and_newer_line_skipped(tmp_path: Path) -> None:
    rows = whole_run()
    page(tmp_path, [RUN | {"weather": "fine"}, {"what": "moon", "phase": 3}, *rows[1:]])
    rows[7]["loss"] = "high"
    with pytest.raises(InputError, match="line 8: loss: input should be a valid number"):
        read_log(write(tmp_path / "log", rows))


# ------------------------------------------------------------------------------------------------ where it is written


def test_page_is_written_next_to_its_log(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "2026"
    folder.mkdir(parents=True)
    log = write(folder / "log.jsonl", whole_run())
    assert write_report(folder) == folder / "report.html"
    assert write_report(log) == folder / "log.html"
    assert write_report(log, tmp_path / "mine.htm") == tmp_path / "mine.htm"
    assert (tmp_path / "mine.htm").read_bytes() == (folder / "report.html").read_bytes()
    with pytest.raises(InputError, match=r"cannot write .*nowhere/page.html"):
        write_report(log, tmp_path / "nowhere" / "page.html")


def test_newest_run_of_a_folder_is_found(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no run in"):
        newest_run(tmp_path)
    for name in ("2026-11-20", "2026-11-21"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "log.jsonl", [RUN])
    assert newest_run(tmp_path) == tmp_path / "2026-11-21"
    with pytest.raises(InputError, match=r"there is no log.jsonl in .*: give the folder of a run"):
        log_of(tmp_path)
    with pytest.raises(InputError, match=r"cannot read the log .*none.jsonl: No such file"):
        write_report(tmp_path / "none.jsonl")


def test_live_page_is_written_after_epochs_and_reloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing takes one second: the next epochs within 20 s are skipped. `convoy report` writes a page that stays."""
    now_s = iter([10.0, 11.0, 20.0, 30.9, 31.0, 32.0])
    monkeypatch.setattr("convoy.report.page.time.monotonic", lambda: next(now_s))
    told: list[str] = []
    live, target = LivePage(tmp_path, told.append), tmp_path / "report.html"
    ended = EpochResult(0, 1.0, 0.5, 1.0, 1.0, 0.1)
    write(tmp_path / "log.jsonl", [RUN, *epoch(0)])
    live.on_epoch(ended)
    first = target.read_text()
    assert f'http-equiv="refresh" content="{RELOAD_S}"' in first
    write(tmp_path / "log.jsonl", [RUN, *epoch(0), *epoch(1)])
    for _ in range(2):
        live.on_epoch(ended)
        assert target.read_text() == first
    live.on_epoch(ended)
    assert "40 of 40 steps" in target.read_text()
    assert 'http-equiv="refresh"' not in write_report(tmp_path).read_text()
    assert told == []


def test_a_live_page_that_cannot_be_written_is_reported_once(tmp_path: Path) -> None:
    told: list[str] = []
    live = LivePage(tmp_path, told.append)
    for _ in range(2):
        live.on_epoch(EpochResult(0, 1.0, 0.5, 1.0, 1.0, 0.1))
    (warning,) = told
    assert re.fullmatch(r"WARNING: there is no log.jsonl in .*; training continues without the page", warning)


def test_predicted_step_has_a_page_of_its_own(tmp_path: Path) -> None:
    text = write_step(PredictionLine.model_validate(PREDICTION), tmp_path / "step.html", "a net").read_text()
    Elements(text)
    assert "busy 75.0%, waits for messages 25.0%" in text
    assert "conv2 forward: 6 ms to 10 ms" in text


# ------------------------------------------------------------------------------------------------------------- parts


def test_names_are_escaped_in_texts_and_attributes(tmp_path: Path) -> None:
    rows = whole_run()
    evil = "<i onclick='x'>1 & 2</i>\""
    rows[0]["options"]["net"] = rows[2]["plan"]["name"] = rows[3]["names"][1] = rows[1]["devices"][0]["host"] = evil
    rows[2]["layers"][0] |= {"layer": evil, "strategy": evil}
    text = page(tmp_path, [row for row in rows if row["what"] != "reshare"])
    assert "onclick='x'>" not in text
    escaped = "&lt;i onclick=&#39;x&#39;&gt;1 &amp; 2&lt;/i&gt;&#34;"
    assert f"<title>{escaped} on digits" in text
    assert f'title="{escaped} on device 0' in text, "a tooltip of the plan"


def test_layers_without_own_work_share_a_row() -> None:
    rows = [
        layer("conv", "conv", "filter", ["3", "1"], flop=9),
        layer("relu", "elementwise", "filter", ["3", "1"]),
        layer("flatten", "flatten", "filter", ["12", "4"]),
        layer("norm", "norm", "filter", ["3", "1"], bytes=8),
        layer("drop", "dropout", "filter", ["2", "2"]),
        layer("fc", "linear", "one", ["all", "-"], flop=9),
        layer("mine", "opaque", "one", ["all", "-"], note="no rule knows it"),
    ]
    found = bands([LayerEntry.model_validate(row) for row in rows])
    names = [[each.layer for each in band] for band in found]
    assert names == [["conv", "relu", "flatten"], ["norm"], ["drop"], ["fc"], ["mine"]]


def test_deep_net_is_grouped_by_equal_shares(tmp_path: Path) -> None:
    """Convolutions by batch, a Linear by filter: two rows."""
    count = MAX_ROWS + 80
    deep = [layer(f"conv{n}", "conv", "batch", ["32", "16", "16"], flop=9, bytes=10) for n in range(count)]
    deep.append(layer("fc", "linear", "filter", ["5", "3", "2"], flop=9, bytes=512))
    rows = [row for row in whole_run() if row["what"] != "reshare"]
    rows[2]["layers"] = deep
    seen = part_of(page(tmp_path, rows), "plan")
    assert seen.count('class="layer"') == 2
    assert f"and {count - 1} more, up to conv conv{count - 1}" in seen
    assert "1 kB sent" in seen


def test_thin_events_in_a_row_are_drawn_as_one() -> None:
    events: list[EventRow] = [(0, "compute", f"l{i} forward", i * 1e-4, (i + 1) * 1e-4, -1, 0) for i in range(1000)]
    events += [(0, "compute", "fc backward", 0.1, 0.5, -1, 0), (0, "compute", "conv backward", 0.5, 1.0, -1, 0)]
    events += [(0, "send", "Move 3", 0.2, 0.4, 1, 2000), (1, "receive", "Move 3", 0.2, 0.4, 0, 2000)]
    (thin, fc, conv) = drawn_events(events, 0, "compute", 1.0)
    assert (thin.kind, thin.count, thin.label) == ("forward", 1000, "l0 forward … l999 forward")
    assert (thin.start_s, thin.end_s) == pytest.approx((0.0, 0.1))
    assert [(fc.start_s, fc.end_s), (conv.start_s, conv.end_s)] == [(0.1, 0.5), (0.5, 1.0)]
    assert drawn_events(events, 0, "send", 1.0) == [DrawnEvent("send", 0.2, 0.4, "Move 3, 2 kB to device 1")]
    assert drawn_events(events, 1, "receive", 1.0) == [DrawnEvent("receive", 0.2, 0.4, "Move 3, 2 kB from device 0")]


def test_work_is_classified_by_label() -> None:
    labels = [
        "conv1 forward",
        "fc backward weight",
        "optimizer",
        "Move 8 copies",
        "fc forward copies",
        "batch and loss",
    ]
    found = [kind_of("compute", label) for label in labels]
    assert found == ["forward", "backward", "optimizer", "handling", "handling", "handling"]
    assert {*found, kind_of("send", "Move 8"), kind_of("receive", "Move 8")} == set(KINDS)


def test_downsampling_keeps_peaks() -> None:
    points = [(float(x), 1.0) for x in range(50_000)]
    points[31_415], points[2] = (31_415.0, 9.0), (2.0, -5.0)
    few = thinned(points)
    assert len(few) <= MAX_POINTS
    assert {(31_415.0, 9.0), (2.0, -5.0)} <= set(few)
    assert [x for x, _ in few] == sorted(x for x, _ in few)


@pytest.mark.parametrize("ys", [[0.0], [5.0], [0.0, 0.0], [1e-12, 1e-12], [-3.0, 4.0], [1e30, 0.0], [0.1, 0.1 + 1e-12]])
def test_charts_stay_within_their_frame(ys: list[float]) -> None:
    for from_zero in (True, False):
        curve = Curve("it", [(float(x), y) for x, y in enumerate(ys)], dots=True)
        (line,) = Chart("it", "It", [curve], (0, len(ys)), from_zero=from_zero).lines
        assert len(line.points) == len(ys)
        assert all(0 <= x <= 1000 and 0 <= y <= 400 for x, y in line.points)


def test_numbers_and_ticks_are_rounded() -> None:
    shown = [plain(v) for v in (0, 0.5, 0.013170, 12345.6, 1e-7, None)]
    assert shown == ["0", "0.5", "0.01317", "12,346", "1.000e-07", "–"]
    assert [seconds(v) for v in (3e-5, 0.0132, 2.04, 59.94, 185, 7445)] == [
        "30 µs", "13.2 ms", "2.04 s", "59.9 s", "3 min 5 s", "2 h 4 min",
    ]  # fmt: skip
    assert [in_bytes(v) for v in (0, 12, 5120, 262144, 3_000_000_000)] == ["-", "12 B", "5.12 kB", "262 kB", "3 GB"]
    assert ticks(0, 100, 5) == [0, 20, 40, 60, 80, 100]
    assert ticks(0.013, 0.098) == pytest.approx([0.02, 0.04, 0.06, 0.08])
    assert ticks(-1, 1, 2) == [-1, 0, 1]


# ------------------------------------------------------------------------------------- devices that leave and join


def members(step: int, *devices: int) -> dict[str, Any]:
    return {"what": "members", "step": step, "devices": list(devices), "reason": "device 1 was lost"}


def system(step: int, *devices: int) -> dict[str, Any]:
    """Return system lines in which each device uses as many cores as its id."""
    zeros = [0 for _ in devices]
    return {
        "what": "system", "step": step, "s": 0.1 * step, "cores": [float(d) for d in devices], "host_processor": zeros,
        "memory_bytes": zeros, "accelerator_bytes": zeros, "sent_bytes_per_s": zeros, "received_bytes_per_s": zeros,
        "ids": list(devices),
    }  # fmt: skip


def with_changes() -> list[dict[str, Any]]:
    """Return a log in which the second of three devices leaves and a fourth joins."""
    rows = whole_run()
    kept = [row for row in rows if row["what"] in ("run", "fleet", "plan", "prediction")]
    steps = [row for row in rows if row["what"] == "step"]
    return [
        *kept, *steps[:10], system(5, 0, 1, 2), system(10, 0, 1, 2), members(10, 0, 2), *steps[10:15], system(15, 0, 2),
        members(15, 0, 2, 3), {**rows[1], "ids": [0, 2, 3]}, rows[2], *steps[15:20], system(20, 0, 2, 3),
    ]  # fmt: skip


def test_each_device_keeps_its_number_when_others_leave_and_join(tmp_path: Path) -> None:
    record = read_log(write(tmp_path / "log", with_changes()))
    assert record.ids == (0, 2, 3)
    (cores,) = [chart for chart in resource_charts(record) if chart.name == "cores"]
    assert {curve.label: list(curve.points) for curve in cores.curves} == {
        "device 0": [(5, 0.0), (10, 0.0), (15, 0.0), (20, 0.0)], "device 1": [(5, 1.0), (10, 1.0)],
        "device 2": [(5, 2.0), (10, 2.0), (15, 2.0), (20, 2.0)], "device 3": [(20, 3.0)],
    }  # fmt: skip
    names = device_names(record)
    assert [name.rpartition(", ")[2] for name in names] == ["device 0", "device 2", "device 3"]
    boxes = layer_boxes(record.plans[-1].line.layers[0], names, record.ids)
    assert [re.findall(r"on device (\d)", box.title) for box in boxes] == [["0"], ["2"], ["3"]]
    text = part_of(page(tmp_path, with_changes()), "plan")
    assert re.findall(r'class="chip d\d">(\d)<', text) == ["0", "2", "3"]


def test_lines_of_different_numbers_of_devices_are_refused(tmp_path: Path) -> None:
    rows, changed = whole_run(), with_changes()
    rows[1]["devices"].pop()
    next(row for row in changed if row["what"] == "system")["ids"].append(7)
    for wrong in (rows, changed):
        with pytest.raises(InputError, match="contradict each other"):
            page_of(read_log(write(tmp_path / "log", wrong)))


def test_system_lines_without_ids_end_when_a_device_leaves(tmp_path: Path) -> None:
    """Lines of old logs do not name their device."""
    rows = with_changes()
    for row in rows:
        if row["what"] == "system":
            del row["ids"]
    record = read_log(write(tmp_path / "log", rows))
    assert [line.step for line in record.system] == [20]
