"""What each device did, and how the shares changed."""

import itertools

from convoy.report.markup import Markup, tag
from convoy.report.numbers import percent, plain, seconds
from convoy.report.page_parts import chip, colour, details, device_key, device_names, missing, section, table
from convoy.runlog.reader import Record

WIDTH, HEIGHT = 1000.0, 300.0


def use(record: Record, device: int, epoch: int | None = None) -> tuple[float, float, float] | None:
    """The parts of a device's time that it computed, exchanged and waited, did everything else; None where nothing is known.

    Args:
        epoch: place in `record.utilization`; None: all epochs together.
    """
    rows = record.utilization if epoch is None else record.utilization[epoch : epoch + 1]
    wall_s = sum(row.wall_s[device] for row in rows)
    if wall_s <= 0:
        return None
    computes = min(1.0, sum(row.compute_s[device] for row in rows) / wall_s)
    exchanges = min(1.0 - computes, sum(row.exchange_s[device] for row in rows) / wall_s)
    return computes, exchanges, 1.0 - computes - exchanges


def devices_section(record: Record) -> Markup:
    names = device_names(record)
    known = [use(record, device) for device in range(len(names))]
    if not any(known):
        return section(
            "devices", "Where the time of each device went",
            missing("Nothing was told of the devices' time yet: they tell it at the end of every epoch of two steps or more."),
        )  # fmt: skip
    bars = [_bar(record, device, name) for device, name in enumerate(names)]
    parts = ("computing", "exchange and wait", "everything else")
    key = tag(
        "span",
        *(tag("span", tag("i", class_=f"key {k}"), w, class_="entry") for k, w in zip(KINDS, parts, strict=True)),
        class_="legend",
    )
    lead = (
        "Measured over all training steps, without tests. Exchange and wait: the device could not go on before others were "
        "done or messages arrived. Everything else: loading images, the optimizer, Python."
    )
    folded = (
        details("Computing, epoch by epoch", _by_epoch(record, len(names))) if len(record.utilization) > 1 else None
    )
    gpu = any(name.startswith("cuda") for name in names) and not record.run.options.get("rebalance")
    note = (
        "On a GPU without --rebalance, computing is the time until the kernels are queued, not done." if gpu else None
    )
    return section(
        "devices", "Where the time of each device went", tag("p", lead), tag("p", note) if note else None, key,
        tag("div", *bars, class_="uses"), folded,
    )  # fmt: skip


KINDS = ("computing", "exchange", "rest")


def _bar(record: Record, device: int, name: str) -> Markup:
    parts = use(record, device) or (0.0, 0.0, 1.0)
    boxes = [
        tag("span", f"{part:.0%}" if part >= 0.08 else "", class_=f"box {kind}", style=f"flex-grow:{part:.4f}",
            title=f"device {device}: {kind} {percent(part)}")
        for kind, part in zip(KINDS, parts, strict=True) if part > 0.0005
    ]  # fmt: skip
    facts = []
    row = record.fleet.devices[device] if record.fleet is not None else None
    if row is not None and row.samples_per_s is not None:
        facts.append(f"{plain(row.samples_per_s)} samples/s alone")
    work = record.changes[-1][1].work if record.changes else []
    if work:
        facts.append(f"{percent(work[device])} of the arithmetic")
    return tag(
        "div", tag("div", chip(device), " ", tag("b", name), f" {', '.join(facts)}", class_="head"),
        tag("div", *boxes, class_="boxes"), class_="use",
    )  # fmt: skip


def _by_epoch(record: Record, devices: int) -> Markup:
    head = ["epoch", "steps", *(f"device {device}" for device in range(devices))]
    rows = []
    for place, line in enumerate(record.utilization):
        parts = [use(record, device, place) for device in range(devices)]
        rows.append([str(line.epoch + 1), str(line.steps), *(percent(part and part[0]) for part in parts)])
    return table(head, rows)


def shares_section(record: Record) -> Markup:
    """How the arithmetic was shared out, from step to step, and why that changed."""
    changes = [(step, line) for step, line in record.changes if line.work]
    if not changes or not record.steps:
        return section("shares", "The history of shares", missing("The log tells no shares yet."))
    names, reshares = device_names(record), [line for line in record.reshares if line.work]
    wanted = bool(record.run.options.get("rebalance"))
    if reshares:
        times = "once" if len(reshares) == 1 else f"{len(reshares)} times"
        lead = f"Each device's part of the arithmetic. The shares changed {times}:"
    elif wanted:
        lead = "Each device's part of the arithmetic. It did not change: no other shares were faster by more than the noise."
    else:
        lead = "Each device's part of the arithmetic. The shares stay as planned; with --rebalance they follow the devices."
    reasons = tag("ol", *(tag("li", f"after step {line.step}: {line.reason}") for line in reshares), class_="reasons")
    return section(
        "shares", "The history of shares", tag("p", lead), reasons if reshares else None, device_key(names),
        _areas(record, [(step, line.work) for step, line in changes], [line.step + 1 for line in reshares]),
    )  # fmt: skip


def _areas(record: Record, changes: list[tuple[int, tuple[float, ...]]], marks: list[int]) -> Markup:
    end = record.steps[-1].step + 1
    starts = [min(step, end) for step, _ in changes]
    first = starts[0]
    scale = WIDTH / max(1, end - first)
    drawn = []
    for (start, stop), (_, work) in zip(itertools.pairwise([*starts, end]), changes, strict=True):
        below = HEIGHT
        for device, part in enumerate(work):
            below -= part * HEIGHT
            title = tag("title", f"steps {start} to {stop}: device {device} {percent(part)}")
            drawn.append(
                tag("rect", title, x=(start - first) * scale, y=below, width=(stop - start) * scale,
                    height=part * HEIGHT, class_=f"area {colour(device)}")
            )  # fmt: skip
    lines = [
        tag("line", x1=(at - first) * scale, x2=(at - first) * scale, y1=0, y2=HEIGHT, class_="cut") for at in marks
    ]
    svg = tag(
        "svg", tag("title", "Shares of the arithmetic"), *drawn, *lines,
        viewbox=f"0 0 {WIDTH:g} {HEIGHT:g}", preserve="none", role="img",
    )  # fmt: skip
    numbers = [tag("span", str(n), style=f"left:{(at - first) * scale / WIDTH:.2%}") for n, at in enumerate(marks, 1)]
    ys = [tag("span", f"{part}%", style=f"top:{100 - part}%") for part in (0, 50, 100)]
    xs = [
        tag("span", plain(x), style=f"left:{(x - first) * scale / WIDTH:.2%}") for x in (first, (first + end) // 2, end)
    ]
    return tag(
        "figure",
        tag("div", tag("div", *ys, class_="ys", aria_hidden="true"),
            tag("div", svg, tag("div", *numbers, class_="numbers"), class_="plot"),
            tag("div", *xs, class_="xs", aria_hidden="true"), tag("div", "step", class_="x-label"), class_="axes"),
        class_="chart",
    )  # fmt: skip


def train_time(record: Record) -> str:
    """Seconds of training so far, in words."""
    told = sum(line.train_s for line in record.epochs)
    return seconds(told if told else None)
