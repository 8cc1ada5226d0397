"""Plan files: they round-trip, and invalid ones are refused by name."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convoy.errors import PlanError
from convoy.layout.collectives import SUMS
from convoy.layout.comm_dtype import COMM_DTYPES
from convoy.model.graph import Graph, Layer, Parameter
from convoy.plan.plan import Plan
from convoy.plan.strategy import Batch, Channel, Filter, One, Strategy


def weighted(name: str, kind: Any, inputs: tuple[str, ...], shape: tuple[int, ...], weight: tuple[int, ...]) -> Layer:
    parameters = {
        "weight": Parameter(f"{name}.weight", weight, trainable=True),
        "bias": Parameter(f"{name}.bias", weight[:1], trainable=True),
    }
    return Layer(name, kind, inputs, shape, parameters)


LAYERS = [
    Layer("images", "input", (), (3, 8, 8)),
    weighted("features.0", "conv", ("images",), (8, 8, 8), (8, 3, 3, 3)),
    Layer("relu", "elementwise", ("features.0",), (8, 8, 8)),
    # Four groups of two filters, each reading two channels.
    replace(weighted("grouped", "conv", ("relu",), (8, 8, 8), (8, 2, 3, 3)), groups=4),
    Layer("flatten", "flatten", ("grouped",), (512,)),
    weighted("classifier", "linear", ("flatten",), (10,), (10, 512)),
    replace(weighted("tied", "linear", ("classifier",), (10,), (10, 10)), shared=True),
    Layer("centred", "opaque", ("tied",), (10,), per_sample=False, reason="its samples depend on each other"),
]
GRAPH = Graph("SmallNet", {layer.name: layer for layer in LAYERS}, ("centred",))

PLAN = Plan(
    name="by hand",
    model=GRAPH.fingerprint,
    devices=3,
    batch=12,
    layers={
        "features.0": Filter((5, 0, 3)),
        "grouped": Filter((4, 2, 2)),
        "flatten": Batch((6, 6, 0)),
        "classifier": Channel((256, 128, 128)),
        "centred": One(2),
    },
    otherwise=Batch((6, 4, 2)),
    reduce="butterfly",
)

TEXT = f"""{{
  "format": 1,
  "name": "by hand",
  "model": "{GRAPH.fingerprint}",
  "devices": 3,
  "batch": 12,
  "reduce": "butterfly",
  "wire": "exact",
  "pieces": 1,
  "otherwise": {{"strategy": "batch", "shares": [6, 4, 2]}},
  "layers": {{
    "features.0": {{"strategy": "filter", "shares": [5, 0, 3]}},
    "grouped": {{"strategy": "filter", "shares": [4, 2, 2]}},
    "flatten": {{"strategy": "batch", "shares": [6, 6, 0]}},
    "classifier": {{"strategy": "channel", "shares": [256, 128, 128]}},
    "centred": {{"strategy": "one", "device": 2}}
  }}
}}
"""


def changed(**rows: Any) -> str:
    """Return the plan's text with other rows; a row of ... is removed."""
    raw = {**json.loads(TEXT), **rows}
    return json.dumps({key: value for key, value in raw.items() if value is not ...})


# --- what is written is what is read ---------------------------------------------------------------------------------


def test_plan_file_by_hand() -> None:
    assert PLAN.to_json() == TEXT
    assert Plan.from_json(TEXT) == PLAN
    assert Plan.from_json(changed(wire=...)) == PLAN, "older files have no wire format"
    PLAN.check(GRAPH)
    PLAN.check(GRAPH, devices=3)


def test_plan_without_layer_entries_reads_back() -> None:
    plan = replace(PLAN, layers={}, otherwise=One(1))
    assert Plan.from_json(plan.to_json()) == plan
    assert '"layers": {}' in plan.to_json()
    assert Plan.from_json(changed(layers=..., otherwise={"strategy": "one", "device": 1})) == plan
    plan.check(GRAPH)


counts = st.integers(0, 2**70)
shares = st.lists(counts, max_size=5).map(tuple)
batches = st.builds(Batch, shares)
ones = st.builds(One, counts)
strategies = st.one_of(batches, ones, st.builds(Filter, shares), st.builds(Channel, shares))
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)  # half a surrogate pair is no text
plans = st.builds(
    Plan,
    name=texts,
    model=texts,
    devices=st.integers(1, 2**70),
    batch=st.integers(1, 2**70),
    layers=st.dictionaries(texts, strategies, max_size=5),
    otherwise=st.one_of(batches, ones),
    reduce=st.sampled_from(SUMS),
    wire=st.sampled_from(COMM_DTYPES),
)


@given(plans)
@settings(deadline=None)
def test_any_plan_comes_back_equal_and_in_its_order(plan: Plan) -> None:
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert list(again.layers) == list(plan.layers)
    assert {type(s) for s in again.layers.values()} == {type(s) for s in plan.layers.values()}
    assert again.to_json() == plan.to_json()


def test_load_reads_utf_8_whatever_the_locale(tmp_path: Path) -> None:
    """Convoy writes ASCII; hand-written files may contain UTF-8."""
    path = tmp_path / "plan.json"
    path.write_bytes(TEXT.replace("by hand", "für uns").encode())
    assert Plan.load(path) == replace(PLAN, name="für uns")
    path.write_text(replace(PLAN, name="für uns").to_json(), encoding="ascii")
    assert Plan.load(path) == replace(PLAN, name="für uns")


# --- files that are refused ------------------------------------------------------------------------------------------

LAYER = {"strategy": "filter", "shares": [5, 0, 3]}

NO_PLANS = [
    # text, what the message names: the place, the value, the remedy
    ("", ("JSON", "line 1 column 1", "correct it there")),
    (TEXT.replace("[5, 0, 3]", "[5 0, 3]"), ("JSON", "line 12 column 55", "correct it there")),
    ("\ufeff" + TEXT, ("JSON", "BOM", "correct it there")),
    ("[" * 100_000, ("JSON", "nested too deeply", "correct it there")),
    (TEXT.replace("12", "1" * 5000), ("JSON", "5000 digits", "correct it there")),
    (changed(format=2), ("format 2", "reads 1", "make the plan again")),
    (changed(colour="red"), ("unknown key 'colour'", "remove it")),
    (changed(layers={"c": {**LAYER, "colour": 1}}), ("unknown key 'layers.c.filter.colour'", "remove it")),
    (changed(name=...), ("key 'name' is missing", "add it")),
    (changed(layers={"c": {"strategy": "filter"}}), ("'layers.c.filter.shares' is missing", "add it")),
    (changed(layers={"c": {"strategy": "diagonal"}}), ("layers.c", "'diagonal'", "'channel'", "correct it")),
    (
        changed(otherwise={"strategy": "filter", "shares": [1]}),
        ("otherwise", "'filter'", "'batch', 'one'", "correct it"),
    ),
    (changed(layers={"c": {"strategy": "filter", "shares": [5, "0"]}}), ("filter.shares.1", "'0'", "correct it")),
    (changed(layers={"c": {"strategy": "batch", "shares": [True]}}), ("batch.shares.0", "True", "correct it")),
    (changed(batch=0), ("batch", "found 0", "greater than or equal to 1", "correct it")),
    (changed(reduce="tree"), ("reduce", "found 'tree'", "'ring', 'butterfly', 'direct' or 'star'", "correct it")),
    # A file says in full what is inexact; the short name is for the command line.
    (changed(wire="bf16"), ("wire", "found 'bf16'", "'exact' or 'inexact-bf16'", "correct it")),
]


@pytest.mark.parametrize(("text", "parts"), NO_PLANS, ids=[parts[0] for _, parts in NO_PLANS])
def test_invalid_plans_are_refused(text: str, parts: tuple[str, ...]) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.from_json(text, "fleet/plan.json")
    message = str(caught.value)
    assert message.startswith("fleet/plan.json")
    for part in parts:
        assert part in message
    assert len(message) < 300


def test_a_layer_named_twice_is_refused() -> None:
    """A copied line with an unchanged name: JSON would silently keep the last one."""
    line = '    "grouped": {"strategy": "filter", "shares": [4, 2, 2]},\n'
    assert line in TEXT
    with pytest.raises(PlanError, match=r"the key 'grouped' occurs twice.*correct it"):
        Plan.from_json(TEXT.replace(line, line + line.replace("4, 2, 2", "2, 2, 4")))
    with pytest.raises(PlanError, match=r"the key 'batch' occurs twice"):
        Plan.from_json(TEXT.replace('"batch": 12,', '"batch": 12, "batch": 24,'))
    with pytest.raises(PlanError, match=r"the key 'shares' occurs twice"):
        Plan.from_json(TEXT.replace('"shares": [4, 2, 2]', '"shares": [4, 2, 2], "shares": [4, 2, 2]'))


# --- plans that do not fit -------------------------------------------------------------------------------------------


def with_layer(name: str, strategy: Strategy) -> Plan:
    return replace(PLAN, layers={**PLAN.layers, name: strategy})


UNFIT = [
    # plan, what the message says: the place and the value, the rule, the remedy
    (replace(PLAN, model="0123"), "'by hand' was made for another model (fingerprint 0123", "make a plan for this"),
    (replace(PLAN, reduce="tree"), "unknown reduce 'tree'", "choose one of ring, butterfly, direct, star"),
    (replace(PLAN, wire="fp8"), "unknown wire format 'fp8'", "choose one of exact, inexact-bf16"),
    (replace(PLAN, otherwise=Batch((6, 7, -1))), "(6, 7, -1) include a negative one", "a share is zero (idle) or more"),
    (replace(PLAN, otherwise=Batch((6, 4, 1))), "(6, 4, 1) sum to 11, the axis has 12", "make them sum to 12"),
    (replace(PLAN, otherwise=One(3)), "all other layers: there is no device 3", "name one of 0 to 2"),
    (with_layer("conv9", One(0)), "names a layer 'conv9' that SmallNet does not have", "its layers are images, feat"),
    (with_layer("features.0", Filter((5, 4, 0))), "'features.0', strategy 'filter': shares (5, 4, 0) sum to 9", "to 8"),
    (with_layer("features.0", One(7)), "'features.0', strategy 'one': there is no device 7", "name one of 0 to 2"),
    (with_layer("grouped", Filter((3, 3, 2))), "'grouped', strategy 'filter': shares (3, 3, 2) cut", "multiple of 2"),
    (with_layer("grouped", Channel((4, 2, 2))), "'grouped', strategy 'channel': only Linear and", "use batch, filter"),
    (with_layer("centred", Filter((4, 4, 2))), "'centred', strategy 'filter'", "use batch or one"),
    (with_layer("tied", Filter((4, 4, 2))), "'tied', strategy 'filter': its parameters belong", "use batch or one"),
    (with_layer("centred", Batch((4, 4, 4))), "'centred', strategy 'batch': its samples depend", "strategy 'one'"),
]


@pytest.mark.parametrize(("plan", "value", "remedy"), UNFIT, ids=[value for _, value, _ in UNFIT])
def test_a_plan_that_does_not_fit_is_refused(plan: Plan, value: str, remedy: str) -> None:
    with pytest.raises(PlanError, match=re.escape(value) + ".*" + re.escape(remedy)):
        plan.check(GRAPH)


def test_plan_for_another_device_count_is_refused() -> None:
    with pytest.raises(PlanError, match=r"'by hand' is for 3 devices, this job has 4: start as many devices as"):
        PLAN.check(GRAPH, devices=4)


def test_a_plan_for_another_model_says_which() -> None:
    """A wider first layer makes another model, although all names are the same."""
    wider = replace(GRAPH, layers={**GRAPH.layers, "features.0": replace(GRAPH["features.0"], shape=(16, 8, 8))})
    with pytest.raises(PlanError, match=f"fingerprint {GRAPH.fingerprint}; SmallNet has {wider.fingerprint}"):
        PLAN.check(wider)
    # Precision and remarks do not count: a plan holds in any of them.
    PLAN.check(replace(GRAPH, layers={n: replace(v, dtype="float64", reason="") for n, v in GRAPH.layers.items()}))


def test_inexact_wire_format_is_stated() -> None:
    plan = replace(PLAN, wire="inexact-bf16")
    assert "inexact-bf16" in plan.inexact
    assert '"wire": "inexact-bf16"' in plan.to_json()
    plan.check(GRAPH)
