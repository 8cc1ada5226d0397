"""What `convoy plan` prints: a row per plan, the chosen one layer by layer, what fewer devices would bring."""

import itertools
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from convoy.graph import Graph
from convoy.prospect import Prospect
from convoy.report.screen import Screen, in_bytes


def show_prospects(console: Console, rows: Sequence[Prospect], speeds: Sequence[float], names: Sequence[str]) -> None:
    """A row per plan."""
    limit = sum(speeds)
    table = Table(title=f"Predicted, before anything runs; the limit is {limit:,.4g} samples/s", title_justify="left")
    table.add_column("plan")
    for name in ("step", "samples/s", "of the limit", "traffic", "memory", "devices"):
        table.add_column(name, justify="right")
    table.add_column("bound by")
    for row in rows:
        memory = max(m.total_bytes for m in row.memory)
        table.add_row(
            row.plan.name, f"{row.step_s:.4g} s", f"{row.samples_per_s:,.4g}", f"{row.efficiency:.1%}",
            in_bytes(row.traffic_bytes), in_bytes(memory), str(row.workers), row.bound,
        )  # fmt: skip
    console.print(table)
    best, fastest = rows[-1], max(range(len(speeds)), key=lambda d: speeds[d])
    if best.workers == 1:
        console.print(
            f"This fleet is slower than {names[fastest]} alone ({speeds[fastest]:,.4g} samples/s): auto leaves the others out."
        )
    else:
        console.print(f"auto is {best.samples_per_s / speeds[fastest]:.2f}x as fast as {names[fastest]} alone.")


def show_counts(
    console: Console, counts: Sequence[tuple[int, float]], speeds: Sequence[float], names: Sequence[str]
) -> None:
    """What one device less or more brings."""
    order = sorted(range(len(speeds)), key=lambda d: (-speeds[d], d))
    alone = speeds[order[0]]
    for (fewer, before), (more, after) in itertools.pairwise(counts):
        added = " and ".join(names[d] for d in order[fewer:more])
        console.print(f"without {added}: {before / alone:.2f}x; with {added}: {after / alone:.2f}x")


def show_plan(console: Console, row: Prospect, graph: Graph) -> None:
    """The plan layer by layer."""
    from convoy.explain import layer_rows, work_shares
    from convoy.lower import lower

    shares = work_shares(lower(row.plan, graph), graph)
    Screen(visible=True, console=console).plan(row.plan, layer_rows(row.plan, graph), shares)
