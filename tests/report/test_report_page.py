"""From a log to a page, without a browser: what is read, what is refused, what is worked out, what is escaped."""

import base64
import hashlib
import html
import html.parser
import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from convoy.errors import InputError
from convoy.report.chart import MOST_POINTS, Chart, Curve, draw, thinned
from convoy.report.intervals import KINDS, Interval, intervals, kind_of
from convoy.report.numbers import in_bytes, plain, seconds, ticks
from convoy.report.page import MOST_PLANS, _by_id, _system, device_names, page_of, shown_plans, write_report
from convoy.report.plan_picture import bands
from convoy.runlog import reader
from convoy.runlog.metrics import measured_samples_per_s, measured_step_s, rates, smoothed
from convoy.runlog.reader import GrowingLog, log_of, read_log
from convoy.runlog.schema import Event, LayerEntry
from tests.support.run_logs import END, FLEET, PLAN, PREDICTION, RESHARE, RUN, STEP_S, epoch, layer, whole_run, write

SECTIONS = ["numbers", "curves", "rate", "plan", "step", "devices", "system", "shares", "settings", "versions"]


class Elements(html.parser.HTMLParser):
    """The elements of a page, and whether each that is opened is closed in its turn."""

    EMPTY = ("meta", "link", "br", "input")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.all: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.all.append((name, dict(attributes)))
        if name not in self.EMPTY:
            self.open.append(name)

    def handle_endtag(self, name: str) -> None:
        assert self.open.pop() == name


def page(tmp_path: Path, rows: list[dict[str, Any]], cut_off: str = "") -> str:
    """The page of a log, checked as HTML: closed elements, unique ids, one script, nothing from elsewhere, every section."""
    text = page_of(read_log(write(tmp_path / "run.jsonl", rows, cut_off)))
    body, start, script = text.partition("<script>")
    script = script.partition("</script>")[0]
    assert start
    assert "</script" not in body
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src &#39;sha256-{digest}&#39;" in body, "no other script may run"
    elements = Elements(text)
    assert elements.open == []
    ids = [attributes["id"] for _, attributes in elements.all if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert [attributes["id"] for name, attributes in elements.all if name == "section"] == SECTIONS
    for name, attributes in elements.all:
        assert name not in ("iframe", "img", "object", "base")
        assert "src" not in attributes
        assert attributes.get("href") in (None, "data:,")
    assert not re.search(r"https?:|//\w|url\(|@import", text.replace("http://www.w3.org/2000/svg", ""))
    assert not re.search(
        r"\bfetch\(|XMLHttp|WebSocket|EventSource|eval",
        script.partition("if (!document.body.dataset.version) return;")[0],
    )
    return text


# ----------------------------------------------------------------------------------------------------------- reading


METERED: dict[str, Any] = {
    "what": "system", "cores": [1.0] * 3, "host_processor": [0.5] * 3, "memory_bytes": [1] * 3,
    "accelerator_bytes": [None] * 3, "sent_bytes_per_s": [0.0] * 3, "received_bytes_per_s": [0.0] * 3,
}  # fmt: skip


def test_measured_joules_of_an_image_stand_beside_the_predicted_ones(tmp_path: Path) -> None:
    def card(second: str, joules: list[float | None], **predicted: float) -> str:
        told = {"power_w": [10.0, None, 5.0], "joules": joules, "joules_by": ["RAPL", "counted with device 0", second]}
        rows = [RUN, FLEET, PLAN, PREDICTION | predicted, *epoch(0)]
        rows += [METERED | told | {"step": step, "s": 1.0 * step, "samples": 640} for step in (10, 20)]
        text = page(tmp_path, rows)
        assert "Measured power" in text
        return html.unescape(re.sub(r"<[^>]+>|\s+", " ", text.partition("Joules/image")[2])[:300])

    assert re.search(
        r"0\.02344 .*measured: NVML; RAPL; 0\.021 predicted", card("NVML", [10.0, None, 5.0], joules_per_image=0.021)
    )
    shown = card("not available here: no counter", [10.0, None, None])
    assert re.search(r"– .*measured: not available here: no counter; no prediction: the fleet gives no watts", shown), (
        shown
    )
    assert "Joules/image" not in page(tmp_path, [RUN, FLEET, PLAN, *epoch(0), METERED | {"step": 9, "s": 1.0}])


def test_a_whole_run(tmp_path: Path) -> None:
    text = page(tmp_path, whole_run())
    assert "Finished: 40 of 40 steps." in text
    record = read_log(tmp_path / "run.jsonl")
    timed = [s for s in record.seconds if s is not None]
    assert timed == pytest.approx([STEP_S] * 38), "the first step of each epoch follows a test, or nothing"
    assert measured_step_s(record) == pytest.approx(STEP_S)
    assert measured_samples_per_s(record) == pytest.approx(64 / STEP_S)
    assert rates(record) == [(step, pytest.approx(3200.0)) for step in (*range(1, 20), *range(21, 40))]


def test_a_test_within_an_epoch_counts_for_no_step(tmp_path: Path) -> None:
    steps = [row for row in epoch(0) if row["what"] == "step"][:4]
    for row in steps[2:]:
        row["s"] += 5.0
    test = {"what": "evaluation", "step": 2, "epoch": 0, "accuracy": 0.5, "best": True}
    record = read_log(write(tmp_path / "log", [RUN, *steps[:2], test, *steps[2:]]))
    assert record.seconds == (None, pytest.approx(STEP_S), None, pytest.approx(STEP_S))


def test_a_killed_run_is_a_page_of_what_there_is(tmp_path: Path) -> None:
    """After every line, and within the next one."""
    rows = whole_run()
    for count in (1, 2, 3, 4, 5, 6, 14, 15, 24, 25, 26, 27, 30, len(rows)):
        half = json.dumps(rows[min(count, len(rows) - 1)])[:-7]
        for cut_off in ("", half):
            text = page(tmp_path, rows[:count], cut_off)
            assert ("Not finished" in text) == (count < len(rows))
            assert ("Its last line is cut off." in text) == (bool(cut_off) and count < len(rows))


def test_what_is_missing_is_said_with_how_to_get_it(tmp_path: Path) -> None:
    named = [row for row in whole_run() if row["what"] != "prediction"]
    named[2]["plan"]["name"] = "master"
    text = page(tmp_path, named)
    assert "Plan master was given, so nothing was predicted: <code>--plan auto</code>" in text
    assert "No prediction was made for plan master, so there is no timeline." in text
    assert "only --plan auto predicts" in text
    for row in named[1]["devices"]:
        row["samples_per_s"] = None
    assert "speeds were not measured" in page(tmp_path, named)
    fixed = [row for row in named if row["what"] != "reshare"]
    assert "It did not change: no other shares were faster by more than the noise." in page(tmp_path, fixed)
    fixed[0]["options"]["rebalance"] = False
    assert "with --rebalance they follow the devices" in page(tmp_path, fixed)


def test_a_log_of_steps_alone_is_a_page_with_holes(tmp_path: Path) -> None:
    text = page(tmp_path, [RUN, *({**row, "lr": None} for row in epoch(0) if row["what"] == "step")])
    assert "The log tells no plan" in text
    assert text.count("Nothing was told of this yet.") == 2, "learning rate, accuracy"


def test_a_loss_that_is_no_number(tmp_path: Path) -> None:
    rows = whole_run()
    for row in rows:
        if row["what"] in ("step", "epoch") and row["epoch"] == 1:
            row["loss"] = None
    text = page(tmp_path, rows)
    assert "The loss was no finite number in 20 steps." in text
    assert "NaN" not in text


def test_a_run_that_went_on_counts_what_it_did_last(tmp_path: Path) -> None:
    """Killed in its second epoch; begun again at step 20 with another plan, and with a prediction of its own."""
    first = [RUN, FLEET, PLAN, PREDICTION, *epoch(0), *epoch(1)[:7]]
    second = [RUN | {"from_step": 20}, FLEET, PLAN | {"work": [1.0, 0.0, 0.0]}, *epoch(1), END]
    text = page(tmp_path, [*first, *second])
    record = read_log(tmp_path / "run.jsonl")
    assert [row.step for row in record.steps] == list(range(40))
    assert [each.step for each in record.plans] == [0, 10, 20]
    assert record.prediction is None, "that was of the plan before"
    assert "Finished: 40 of 40 steps." in text
    assert "Devices 1, 2 have nothing to compute." in text


def test_every_plan_is_shown_with_its_steps_and_the_one_in_force_first(tmp_path: Path) -> None:
    """One step was that of the beginning after the shares had changed. The prediction to compare with stays the planner's."""
    now = PREDICTION | {
        "shares_only": True,
        "step_s": 0.024,
        "pass": PREDICTION["pass"] | {"s": 0.024},
        "bound": "lab2",
    }
    rows = whole_run()
    text = page(tmp_path, rows)
    plans, steps = (part_of(text, name) for name in ("plan", "step"))
    after, before = "From step 10 on: conv2 64/48/16 -&gt; 96/24/8 filters", "Steps 0 to 9: as the run began"
    assert plans.index(f"<details open><summary>{after}") < plans.index(f"<details><summary>{before}")
    assert steps.index("For these shares nothing was predicted.") < steps.index("one pass of the batch takes 16 ms")
    rows.insert(rows.index(RESHARE) + 1, now)
    text = page(tmp_path, rows)
    steps = part_of(text, "step")
    assert steps.index("<details open><summary>From step 10 on</summary>") < steps.index(
        "one pass of the batch takes 24 ms"
    )
    assert "predicts it, from the times measured before the training: one pass of the batch takes 24 ms" in steps
    assert "It is bound by lab2." in steps
    assert steps.index("<details><summary>Steps 0 to 9</summary>") < steps.index("one pass of the batch takes 16 ms")
    assert "16 ms a step, -20.0% off" in text
    rows.remove(RESHARE)
    text = page(tmp_path, [row for row in rows if row != now])
    assert "predicts it: one pass of the batch takes 16 ms" in text
    assert "<details" not in part_of(text, "plan")


def part_of(text: str, section: str) -> str:
    """The source of a section."""
    return text.partition(f'<section id="{section}"')[2].partition("</section>")[0]


def test_of_very_many_plans_the_first_and_the_last_are_drawn(tmp_path: Path) -> None:
    rows = [row for row in whole_run() if row["what"] != "reshare"]
    for step in range(30):
        at = next(place for place, row in enumerate(rows) if row["what"] == "step" and row["step"] == step)
        rows.insert(at + 1, RESHARE | {"step": step, "reason": f"because {step}"})
    text = page(tmp_path, rows)
    summaries = re.findall(r"<summary>([^<]*):", part_of(text, "plan"))
    assert len(summaries) == MOST_PLANS
    assert (summaries[0], summaries[-1]) == ("From step 30 on", "Steps 0 to 0")
    assert part_of(text, "shares").count("<li>after step") == 30


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "it is empty"),
        (b"\n", "line 1 is no JSON"),
        (b"epoch,loss\n1,2\n", "line 1 is no JSON"),
        (b"[1, 2]\n", 'line 1 has no "what"'),
        (b'{"net": "resnet"}\n', 'line 1 has no "what"'),
        (
            b'{"what": "step", "step": 0, "epoch": 0, "loss": 1.0, "samples": 4, "s": 0.1}\n',
            "its first line is not that of a run",
        ),
        (b'{"what": "run"}\n', "line 1: date: field required"),
        (
            b'{"what": "step", "step": 0, "epoch": 0, "loss": 1.0, "samples": 4, "s": 1e308}\n',
            "line 1: s: input should be less than or equal to",
        ),
        (b'{"what": {}}\n', "it is empty"),
        (b"\xff\xfe\x00", "it is no text in UTF-8"),
        (b"\x00" * 100 + b"\n", "line 1 is no JSON"),
        (b"[" * 100_000 + b"\n", "line 1 is no JSON"),
    ],
)
def test_what_is_no_log_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(InputError, match="give the folder of a run, or the log that it wrote") as refused:
        write_report(tmp_path / "file")
    assert words in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    rows = whole_run()
    rows[7]["loss"] = "high"
    with pytest.raises(InputError, match="line 8: loss: input should be a valid number"):
        read_log(write(tmp_path / "log", rows))


def test_lines_of_different_numbers_of_devices_are_refused(tmp_path: Path) -> None:
    rows = whole_run()
    rows[1]["devices"].pop()
    with pytest.raises(InputError, match="its lines are of different numbers of devices"):
        read_log(write(tmp_path / "log", rows))


def test_lines_of_a_newer_version_are_passed_over(tmp_path: Path) -> None:
    page(tmp_path, [RUN | {"weather": "fine"}, {"what": "moon", "phase": 3}, *whole_run()[1:]])


# ------------------------------------------------------------------------------------------------------ a log that grows


def test_a_log_is_read_on_and_not_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Line after line, and within the next: as a whole log of these lines; every line is parsed once."""
    rows, path = whole_run(), tmp_path / "log"
    parsed: list[str] = []
    own = reader.parse_json
    monkeypatch.setattr(reader, "parse_json", lambda text: parsed.append(text) or own(text))
    growing = GrowingLog(write(path, rows[:1]))
    for count in (1, 2, 7, 8, 20, len(rows)):
        half = json.dumps(rows[count])[:9] if count < len(rows) else ""
        write(path, rows[:count], half)
        found = growing.read()
        assert found.is_cut == bool(half)
        parsed_before = len(parsed)
        assert found == read_log(path)
        del parsed[parsed_before:]
    assert len(parsed) == len(rows)


def test_a_log_that_is_not_the_same_any_more_is_read_anew(tmp_path: Path) -> None:
    """Written anew and longer by the time it is looked at, in the same file; replaced; cut off; gone and back."""
    path = tmp_path / "log"
    growing = GrowingLog(write(path, [RUN, *epoch(0)]))
    assert growing.read().steps_done == 20
    write(path, [RUN | {"date": "2027-01-01"}, *epoch(0), *epoch(1)])
    assert (growing.read().run.date, growing.read().steps_done) == ("2027-01-01", 40)
    write(tmp_path / "other", [RUN, *epoch(0), *epoch(1)]).replace(path)
    assert growing.read().run.date == RUN["date"]
    write(path, [RUN])
    assert growing.read().steps_done == 0
    path.unlink()
    with pytest.raises(InputError, match="No such file"):
        growing.read()
    write(path, whole_run())
    assert growing.read().steps_done == 40
    with path.open("a") as file:
        file.write("no json\n")
    for _ in range(2):
        with pytest.raises(InputError, match=f"line {len(whole_run()) + 1} is no JSON"):
            growing.read()
    write(path, whole_run())
    assert growing.read().end is not None


# ------------------------------------------------------------------------------------------------ where it is written


def test_where_the_page_goes(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "2026"
    folder.mkdir(parents=True)
    log = write(folder / "log.jsonl", whole_run())
    assert write_report(folder) == folder / "report.html"
    assert write_report(log) == folder / "log.html"
    assert write_report(log, tmp_path / "mine.htm") == tmp_path / "mine.htm"
    assert (tmp_path / "mine.htm").read_bytes() == (folder / "report.html").read_bytes()
    assert sorted(path.name for path in folder.iterdir()) == ["log.html", "log.jsonl", "report.html"]
    with pytest.raises(InputError, match=r"cannot write .*nowhere/page.html"):
        write_report(log, tmp_path / "nowhere" / "page.html")


def test_a_folder_of_runs_names_the_latest(tmp_path: Path) -> None:
    for name in ("2026-11-20", "2026-11-21"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "log.jsonl", [RUN])
    with pytest.raises(InputError, match=r"there is no log.jsonl in .*: the latest run in it is .*2026-11-21$"):
        log_of(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"there is no log.jsonl in .*empty: give the folder of a run"):
        log_of(tmp_path / "empty")
    with pytest.raises(InputError, match=r"cannot read the log .*none.jsonl: No such file"):
        write_report(tmp_path / "none.jsonl")


# ------------------------------------------------------------------------------------------------------------- pieces


def test_what_people_named_is_escaped_in_texts_and_attributes(tmp_path: Path) -> None:
    rows = whole_run()
    evil = "<i onclick='x'>1 & 2</i>\""
    rows[0]["options"]["net"] = rows[2]["plan"]["name"] = rows[3]["names"][1] = rows[1]["devices"][0]["host"] = evil
    rows[2]["layers"][0] |= {"layer": evil, "strategy": evil}
    text = page(tmp_path, [row for row in rows if row["what"] != "reshare"])
    assert "onclick='x'>" not in text
    escaped = "&lt;i onclick=&#39;x&#39;&gt;1 &amp; 2&lt;/i&gt;&#34;"
    assert f"<title>{escaped} on digits" in text
    assert f'title="{escaped} on device 0' in text, "a tooltip of the plan"


def test_layers_that_only_follow_stand_in_one_row() -> None:
    rows = [
        layer("conv", "conv", "filter", ["3", "1"], flop=9),
        layer("relu", "elementwise", "filter", ["3", "1"]),
        layer("flatten", "flatten", "filter", ["12", "4"]),
        layer("norm", "norm", "filter", ["3", "1"], sum_bytes=8),
        layer("drop", "dropout", "filter", ["2", "2"]),
        layer("fc", "linear", "one", ["all", "-"], flop=9),
        layer("mine", "opaque", "one", ["all", "-"], note="no rule knows it"),
    ]
    found = bands([LayerEntry.model_validate(row) for row in rows])
    names = [[band.lead.layer, *(each.layer for each in band.others)] for band in found]
    assert names == [["conv", "relu", "flatten"], ["norm"], ["drop"], ["fc"], ["mine"]]


def test_a_deep_net_is_shown_as_stretches_of_the_same_shares(tmp_path: Path) -> None:
    """A hundred convolutions by batch, a move, a Linear by filter: two rows; one by one where they are unfolded."""
    deep = [layer(f"conv{n}", "conv", "batch", ["32", "16", "16"], flop=9, sum_bytes=10) for n in range(100)]
    move = {"value": "conv99", "from": "split by samples", "to": "copies on 3 devices", "bytes": 512}
    deep.append(layer("fc", "linear", "filter", ["5", "3", "2"], flop=9, moves=[move]))
    rows = [row for row in whole_run() if row["what"] != "reshare"]
    rows[2]["layers"] = deep
    seen, _, folded = page(tmp_path, rows).partition('id="plan"')[2].partition("Layer by layer")
    assert seen.count('class="layer"') == 2
    assert "and 99 more, up to conv conv99" in seen
    assert "Σ 1 kB" in seen
    assert folded.partition("</details>")[0].count('class="layer"') == 101


def test_intervals_of_a_device() -> None:
    """A thousand slivers are one span; what is wide stays by itself; every message keeps its peer."""
    events: list[Event] = [(0, "compute", f"l{i} forward", i * 1e-4, (i + 1) * 1e-4, -1, 0) for i in range(1000)]
    events += [(0, "compute", "fc backward", 0.1, 0.5, -1, 0), (0, "compute", "conv backward", 0.5, 1.0, -1, 0)]
    events += [(0, "send", "Move 3", 0.2, 0.4, 1, 2000), (1, "receive", "Move 3", 0.2, 0.4, 0, 2000)]
    (slivers, fc, conv) = intervals(events, 0, "compute", 1.0)
    assert (slivers.kind, slivers.times, slivers.label) == ("forward", 1000, "l0 forward … l999 forward")
    assert (slivers.start_s, slivers.end_s) == pytest.approx((0.0, 0.1))
    assert [(fc.start_s, fc.end_s), (conv.start_s, conv.end_s)] == [(0.1, 0.5), (0.5, 1.0)]
    assert intervals(events, 0, "send", 1.0) == [Interval("send", 0.2, 0.4, "Move 3, 2 kB to device 1")]
    assert intervals(events, 1, "receive", 1.0) == [Interval("receive", 0.2, 0.4, "Move 3, 2 kB from device 0")]


@pytest.mark.parametrize(
    ("label", "kind"),
    [
        ("layer1.0.conv1 forward", "forward"),
        ("fc backward weight", "backward"),
        ("optimizer", "optimizer"),
        ("Move 8 copies", "handling"),
        ("fc forward copies", "handling"),
        ("batch and loss", "handling"),
    ],
)
def test_kinds_of_work(label: str, kind: str) -> None:
    assert kind_of("compute", label) == kind
    assert kind in KINDS


def test_no_kind_of_work_has_the_colour_of_a_device() -> None:
    """A blue bar beside a blue device was read as that device's."""
    css = files("convoy.report").joinpath("templates", "page.css").read_text()
    found: dict[str, str] = {}
    for scheme in css.split("@media (prefers-color-scheme: dark)", 1):
        found |= dict(re.findall(r"--([a-z]+\d?): (#[0-9a-f]{6})", scheme))
        devices = {colour for name, colour in found.items() if re.fullmatch(r"d\d", name)}
        kinds = {colour for name, colour in found.items() if name in (*KINDS, "computing", "exchange", "rest")}
        assert (len(devices), len(kinds)) == (8, 7)
        assert not devices & kinds


def test_no_peak_is_lost_where_many_points_are_drawn_as_few() -> None:
    points = [(float(x), 1.0) for x in range(50_000)]
    points[31_415] = (31_415.0, 9.0)
    points[2] = (2.0, -5.0)
    few = thinned(points)
    assert len(few) <= MOST_POINTS
    assert {(31_415.0, 9.0), (2.0, -5.0)} <= set(few)
    assert [x for x, _ in few] == sorted(x for x, _ in few)
    assert thinned(points[:10]) == points[:10]


@pytest.mark.parametrize("ys", [[0.0], [5.0], [0.0, 0.0], [1e-12, 1e-12], [-3.0, 4.0], [1e30, 0.0], [0.1, 0.1 + 1e-12]])
def test_a_chart_of_any_numbers_lies_within_its_frame(ys: list[float]) -> None:
    for from_zero in (True, False):
        curve = Curve("it", [(float(x), y) for x, y in enumerate(ys)], dots=True)
        (line,) = draw(Chart("it", "It", "step", [curve], (0, len(ys)), from_zero=from_zero)).lines
        points = line.points
        assert len(points) == len(ys)
        for place in points:
            x, y = map(float, place.split(","))
            assert 0 <= x <= 1000
            assert 0 <= y <= 400


def test_marks_of_an_axis_are_round() -> None:
    assert ticks(0, 100, 5) == [0, 20, 40, 60, 80, 100]
    assert ticks(0.013, 0.098) == pytest.approx([0.02, 0.04, 0.06, 0.08])
    assert ticks(-1, 1, 2) == [-1, 0, 1]


def test_numbers_in_words() -> None:
    assert [plain(v) for v in (0, 0.5, 0.013170, 12345.6, 1e-7, None)] == [
        "0",
        "0.5",
        "0.01317",
        "12,346",
        "1.000e-07",
        "–",
    ]
    assert [seconds(v) for v in (3e-5, 0.0132, 2.04, 59.94, 185, 7445)] == [
        "30 µs", "13.2 ms", "2.04 s", "59.9 s", "3 min 5 s", "2 h 4 min",
    ]  # fmt: skip
    assert [in_bytes(v) for v in (0, 12, 5120, 262144, 3_000_000_000)] == ["-", "12 B", "5.12 kB", "262 kB", "3 GB"]


def test_smoothing_keeps_a_mean_and_a_line() -> None:
    assert smoothed([3.0] * 9, 5) == [3.0] * 9
    assert smoothed([0.0, 0.0, 9.0, 0.0, 0.0], 3) == [0.0, 3.0, 3.0, 3.0, 0.0]
    assert smoothed([1.0, 2.0, 4.0], 1) == [1.0, 2.0, 4.0]


def members(step: int, *devices: int) -> dict[str, Any]:
    return {"what": "members", "step": step, "devices": list(devices), "reason": "device 1 was lost"}


def system(step: int, *devices: int) -> dict[str, Any]:
    """What each device used: as many cores as its id says."""
    zeros = [0 for _ in devices]
    return {
        "what": "system", "step": step, "s": 0.1 * step, "cores": [float(d) for d in devices], "host_processor": zeros,
        "memory_bytes": zeros, "accelerator_bytes": zeros, "sent_bytes_per_s": zeros, "received_bytes_per_s": zeros,
        "ids": list(devices),
    }  # fmt: skip


def with_a_loss() -> list[dict[str, Any]]:
    """Of three devices the second is lost, and a fourth comes."""
    rows = whole_run()
    fleet, plan = rows[1], next(row for row in rows if row["what"] == "plan")
    kept = [row for row in rows if row["what"] in ("run", "fleet", "plan", "prediction")]
    steps = [row for row in rows if row["what"] == "step"]
    fleet = {**fleet, "ids": [0, 2, 3]}
    return [
        *kept, *steps[:10], system(5, 0, 1, 2), system(10, 0, 1, 2), members(10, 0, 2), *steps[10:15], system(15, 0, 2),
        members(15, 0, 2, 3), fleet, plan, *steps[15:20], system(20, 0, 2, 3),
    ]  # fmt: skip


def test_one_device_is_followed_through_losses_and_joins(tmp_path: Path) -> None:
    """The second of three was the third device, after a loss; its curve ended, and was called that of another."""
    record = read_log(write(tmp_path / "log", with_a_loss()))
    assert record.ids == (0, 2, 3)
    assert [line.ids for line in record.system] == [(0, 1, 2), (0, 1, 2), (0, 2), (0, 2, 3)]
    assert record.fleet is not None
    assert record.fleet.ids == (0, 2, 3)
    (cores,) = [drawing for drawing in _system(record) if drawing.name == "cores"]
    assert [text for _, text in cores.legend] == ["device 0", "device 2", "device 3", "device 1"]
    assert {device: [_by_id(line)["cores"].get(device) for line in record.system] for device in range(4)} == {
        0: [0.0] * 4, 1: [1.0, 1.0, None, None], 2: [2.0] * 4, 3: [None, None, None, 3.0],
    }  # fmt: skip
    names = device_names(record)
    assert [name.rpartition(", ")[2] for name in names] == ["device 0", "device 2", "device 3"]
    boxes = shown_plans(record)[-1].rows[0].boxes(names, record.ids)
    assert [re.findall(r"on device (\d)", box.title) for box in boxes] == [["0"], ["2"], ["3"]]
    page(tmp_path, with_a_loss())


def test_a_line_of_other_devices_than_it_has_values_of_is_refused(tmp_path: Path) -> None:
    rows = with_a_loss()
    next(row for row in rows if row["what"] == "system")["ids"].append(7)
    with pytest.raises(InputError, match="its lines are of different numbers of devices"):
        read_log(write(tmp_path / "log", rows))


def test_lines_of_old_logs_that_do_not_say_whose_they_are_end_at_a_loss(tmp_path: Path) -> None:
    rows = with_a_loss()
    for row in rows:
        if row["what"] == "system":
            del row["ids"]
    record = read_log(write(tmp_path / "log", rows))
    assert [line.step for line in record.system] == [20]
