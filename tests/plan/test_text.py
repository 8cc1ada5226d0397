"""A plan explained in text, on a net small enough to count every byte and FLOP by hand.

Images of 1x2x2; a convolution of four 1x1 filters (2 FLOP x 4 filters x 4 pixels = 32 FLOP per sample), ReLU, flatten, and
a Linear from 16 features to 2 (64 FLOP per sample). Eight parameters in the convolution, 34 in the Linear. Numbers of 4 bytes.
"""

import pytest
import torch
from torch import nn

from convoy.model.graph import Graph
from convoy.model.tracing import trace
from convoy.plan.lower import lower
from convoy.plan.plan import Plan
from convoy.plan.presets import Speeds, named_plan
from convoy.plan.strategy import Batch, Channel, Filter
from convoy.plan.text import LayerRow, layer_rows, step_lines, work_shares


@pytest.fixture(scope="module")
def graph() -> Graph:
    model = nn.Sequential(nn.Conv2d(1, 4, 1), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))
    return trace(model, torch.zeros(1, 1, 2, 2)).graph


def filters_then_channels(graph: Graph) -> Plan:
    layers = {"0": Filter((3, 1)), "3": Channel((12, 4))}
    return Plan("mine", graph.fingerprint, 2, 4, layers, Batch((2, 2)), "star")


HYBRID = """\
one step of 6 samples on 3 devices
forward:
     0  compute  0: input_1 batch(4,0,2) -> batch(4,0,2)
     1  compute  1: 0 batch(4,0,2) -> batch(4,0,2)  after 0
     2  compute  2: 1 batch(4,0,2) -> batch(4,0,2)  after 1
     3  move     2: batch(4,0,2) -> copies(0,2)  (384 bytes in 1 round)  after 2
     4  compute  3: 2 copies(0,2) -> channel(1,0,1)  after 3
     5  move     3: channel(1,0,1) -> copies(0,1,2)  (96 bytes in 1 round)  after 4
backward:
     6  gradient 3: from the loss, copies(0,1,2) -> channel(1,0,1)  (nothing is sent)  after 5
     7  compute  3 (input gradient): channel(1,0,1) -> 2 copies(0,2)  after 6
     8  gradient 2: copies(0,2) -> batch(4,0,2)  (384 bytes in 1 round)  after 7
     9  compute  3 (weight gradient): channel(1,0,1) -> 2 copies(0,2)  after 6
    10  compute  2: batch(4,0,2) -> 1 batch(4,0,2)  after 8
    11  compute  1: batch(4,0,2) -> 0 batch(4,0,2)  after 10
    12  compute  0: batch(4,0,2) -> input_1 batch(4,0,2)  after 11
    13  sum, butterfly: gradients of 2 parameters, 8 numbers over (0, 2)  (64 bytes in 2 rounds)  after 12"""
"""4 and 2 samples of 16 features cross (256 + 128 bytes); two columns of 6 outputs go to two others each (4 x 24 bytes); the
gradients come back as sums, each device sending the rows of the other (128 + 256); in each of two rounds both send half of the
8 numbers (4 x 16)."""


def test_steps_of_hybrid_by_hand(graph: Graph) -> None:
    plan = named_plan("hybrid", graph, 6, Speeds((2.0, 0.0, 1.0)))
    assert step_lines(lower(plan, graph)) == HYBRID.splitlines()


def test_table_of_master_by_hand(graph: Graph) -> None:
    rows = layer_rows(named_plan("master", graph, 4, Speeds((3.0, 1.0))), graph)
    assert rows == [
        LayerRow("0", "conv", "filter", ("3", "1"), 0, ""),
        LayerRow("1", "elementwise", "one", ("all", "-"), 128, ""),  # the move into it, forward and backward
        LayerRow("2", "flatten", "one", ("all", "-"), 0, ""),
        LayerRow("3", "linear", "one", ("all", "-"), 32, ""),
    ]


def test_the_table_adds_up_to_the_traffic(graph: Graph) -> None:
    for name in ("data", "data-by-speed", "master", "model", "hybrid"):
        plan = named_plan(name, graph, 5, Speeds((2.0, 1.0, 1.0)))
        assert sum(row.bytes_ for row in layer_rows(plan, graph)) == sum(lower(plan, graph).traffic().values())


class Centred(nn.Module):
    """A layer that compares every sample with all others, so that no rule can split it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.fc(x)
        return x - x.mean(0)


def test_unsplit_layer_says_why() -> None:
    """It runs on the device with the most samples; the table gives the reason and the device."""
    graph = trace(Centred(), torch.zeros(2, 4)).graph
    plan = named_plan("data-by-speed", graph, 6, Speeds((1.0, 2.0)))
    row = next(row for row in layer_rows(plan, graph) if row.strategy == "one")
    assert (row.strategy, row.parts) == ("one", ("-", "all"))
    assert "runs whole on one device" in row.note
    assert work_shares(lower(plan, graph), graph)[1] > 0.5


def test_layer_that_falls_back_says_so() -> None:
    graph = trace(nn.Sequential(nn.Conv2d(1, 4, 1), nn.LayerNorm([4, 2, 2])), torch.zeros(1, 1, 2, 2)).graph
    rows = layer_rows(named_plan("model", graph, 4, Speeds((1.0, 1.0))), graph)
    assert rows[1].strategy == "batch"
    assert "cannot keep channel(2,2)" in rows[1].note


def test_flop_share_of_each_device(graph: Graph) -> None:
    def shares(plan: Plan) -> tuple[float, ...]:
        return work_shares(lower(plan, graph), graph)

    master = shares(named_plan("master", graph, 4, Speeds((3.0, 1.0))))
    assert master == pytest.approx(((3 / 4 * 32 + 64) / 96, 1 / 4 * 32 / 96))
    hybrid = shares(named_plan("hybrid", graph, 6, Speeds((2.0, 0.0, 1.0))))
    assert hybrid == pytest.approx(((4 / 6 * 32 + 1 / 2 * 64) / 96, 0, (2 / 6 * 32 + 1 / 2 * 64) / 96))
    assert shares(filters_then_channels(graph)) == pytest.approx((3 / 4, 1 / 4))
