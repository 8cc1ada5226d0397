"""Outputs that stay with the device that made them: a loss by parts, and still the very numbers of one device."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import convoy
from convoy.execute.group import Group
from convoy.execute.mean_loss import mean_loss
from convoy.execute.module import Distributed
from convoy.execute.threads import run_on_threads
from convoy.layout import OnOne, Replicated, Split
from convoy.lower import lower
from convoy.named import PLANS
from convoy.nets import build_net
from convoy.plan import Plan
from convoy.planner import candidates
from convoy.steps import Compute, Move, ReturnGradient
from convoy.strategy import Batch, Filter, One
from convoy.trace import trace
from tests import nets
from tests.odd_nets import Auxiliary
from tests.one_device import Training, by_name, check, graph_of, mixed, one_trace, part
from tests.test_planner import costs_of, flat_network

SHORT = (10, 3, 10)
OWN: dict[str, str] = {"outputs": "own"}


def own(plan: Plan) -> Plan:
    return replace(plan, outputs="own")


# ----------------------------------------------------------------------------------------------------------- the numbers


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("plan", [*PLANS, "mixed"])
@pytest.mark.parametrize("net", [*nets.NETS])
def test_training_is_that_of_one_device(net: str, plan: str) -> None:
    """Also with a device that has no sample (of the speeds 7, 0, 2, 1), and with a batch too small for all.

    The net `auxiliary` has an output that the loss does not read. The device without samples had given it a gradient of zeros,
    where the others had none: weight decay changed its copies of the weights, and only those.
    """
    check(Training(net, SHORT), own(mixed(net) if plan == "mixed" else by_name(plan, net)))


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_with_accumulated_gradients_and_clipping(optimizer: str) -> None:
    training = Training("two-conv", optimizer=optimizer, accumulate=2, clip=(0.5, 2.0))
    check(training, own(by_name("data-by-speed", "two-conv", "direct")))


@pytest.mark.parametrize("device", [0, 2])
def test_where_one_device_computes_all_the_others_have_no_outputs(device: int) -> None:
    plan = Plan("alone", graph_of("two-conv").fingerprint, 3, 10, {}, One(device), outputs="own")
    assert lower(plan, graph_of("two-conv")).outputs[0].layout == OnOne(device)
    check(Training("two-conv", SHORT), plan)


def test_several_outputs_with_a_loss_of_each() -> None:
    """As GoogLeNet's auxiliary classifiers; one of the three devices has no sample."""
    torch.manual_seed(2)
    net = Auxiliary().double()
    x, y = torch.randn(6, *nets.shape_of(net), dtype=torch.float64), torch.randint(0, nets.CLASSES, (6,))

    def criterion(outputs: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
        return F.cross_entropy(outputs[0], y) + 0.3 * F.cross_entropy(outputs[1], y)

    def work(group: Group) -> tuple[float, dict[str, Tensor]]:
        plan = convoy.make_plan("data-by-speed", net, x, 6, group, speeds=[4, 0.1, 2], outputs="own")
        assert plan.otherwise == Batch((4, 0, 2))
        here = convoy.distribute(net, plan, group, x)
        optimizer = torch.optim.SGD(here.parameters(), lr=0.1)
        loss = convoy.mean_loss(here, here(part(here, x), batch=6), y, criterion)
        loss.backward()
        optimizer.step()
        return loss.item(), here.full_state_dict()

    found = run_on_threads(3, work)
    whole = criterion(net(x), y)
    whole.backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    for loss, weights in found:
        assert loss == pytest.approx(whole.item(), abs=1e-12)
        assert loss == found[0][0], "the same to the last bit, or devices would decide differently"
        for key, value in net.state_dict().items():
            assert torch.allclose(weights[key], value, rtol=0, atol=1e-12), key


def test_a_loss_that_is_no_number_is_none_on_every_device() -> None:
    model = nets.build("two-conv")
    x, y = torch.randn(4, *nets.shape_of(model), dtype=torch.float64), torch.zeros(4, dtype=torch.int64)
    x[3] = float("nan")

    def work(group: Group) -> float:
        here = Distributed(model, own(plan), group, x)
        return mean_loss(here, here(part(here, x), batch=4), y, F.cross_entropy).item()

    plan = Plan("samples", graph_of("two-conv").fingerprint, 2, 4, {}, Batch((3, 1)))
    with one_trace("two-conv", torch.float64):
        assert all(loss != loss for loss in run_on_threads(2, work))


def test_of_an_ordinary_model_it_is_the_criterion() -> None:
    model, x, y = nn.Linear(4, 3), torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    loss = mean_loss(model, model(x), y, F.cross_entropy)
    loss.backward()
    gradient = model.weight.grad
    assert gradient is not None
    assert loss.item() == F.cross_entropy(model(x), y).item()
    model.weight.grad = None
    F.cross_entropy(model(x), y).backward()
    assert torch.equal(gradient, model.weight.grad)  # type: ignore[arg-type] - backward has made it


def test_tests_see_all_outputs() -> None:
    model = nets.build("two-conv")
    x = torch.randn(4, *nets.shape_of(model), dtype=torch.float64)

    def work(group: Group) -> tuple[int, slice | None, int, slice | None]:
        here = Distributed(model, own(plan), group, x)
        trained, rows = len(here(part(here, x), batch=4)), here.output_rows(4)
        here.eval()
        return trained, rows, len(here(part(here, x), batch=4)), here.output_rows(4)

    plan = Plan("samples", graph_of("two-conv").fingerprint, 3, 4, {}, Batch((3, 0, 1)))
    with one_trace("two-conv", torch.float64):
        rows = [slice(0, 3), slice(0, 0), slice(3, 4)]
        assert run_on_threads(3, work) == [(s.stop - s.start, s, 4, None) for s in rows]


# --------------------------------------------------------------------------------------------------------- the step list


def test_nothing_travels_between_forward_and_backward() -> None:
    plan = by_name("data-by-speed", "two-conv")
    there, here = (lower(each, graph_of("two-conv")) for each in (plan, own(plan)))
    assert isinstance(there.phase("forward")[-1], Move)
    assert all(isinstance(step, Compute) for step in here.phase("forward"))
    (first,) = [step for step in here.steps if isinstance(step, ReturnGradient)]
    assert all(t.sender == t.receiver for each in first.schedule.rounds for t in each)
    assert here.outputs[0].layout == Split(0, (7, 0, 2, 1))


def test_outputs_that_do_not_lie_by_samples_come_to_every_device_all_the_same() -> None:
    for layers in ({"fc": Filter((2, 2, 1))}, by_name("model", "two-conv").layers):
        plan = Plan("it", graph_of("two-conv").fingerprint, 3, 10, layers, Batch((4, 4, 2)), outputs="own")
        plan = plan if layers.keys() == {"fc"} else own(by_name("model", "two-conv"))
        (output,) = lower(plan, graph_of("two-conv")).outputs
        assert output.layout == Replicated(tuple(range(plan.devices)))


def test_a_plan_file_keeps_it_and_an_older_one_means_everywhere() -> None:
    plan = own(by_name("data", "two-conv"))
    assert Plan.from_json(plan.to_json()) == plan
    older = "\n".join(line for line in plan.to_json().splitlines() if '"outputs"' not in line)
    assert Plan.from_json(older) == replace(plan, outputs="everywhere")
    with pytest.raises(convoy.PlanError, match="outputs"):
        Plan.from_json(plan.to_json().replace('"own"', '"nowhere"'))


def test_devices_that_were_told_differently_are_refused() -> None:
    model = nets.build("two-conv")

    def work(group: Group) -> None:
        plan = Plan("samples", graph_of("two-conv").fingerprint, 2, 4, {}, Batch((3, 1)))
        Distributed(model, own(plan) if group.device else plan, group, torch.zeros(2, 3, 8, 8, dtype=torch.float64))

    with one_trace("two-conv", torch.float64), pytest.raises(convoy.MismatchError, match="another plan"):
        run_on_threads(2, work)


def test_the_planner_reckons_with_it() -> None:
    """Equal devices on a wire where a message takes a tenth of a second: they need not wait for one of them."""
    graph = trace(build_net("two-conv:8:16", (3, 32, 32), 10), torch.zeros(2, 3, 32, 32)).graph
    costs = replace(costs_of([3e8] * 3, 1e8), network=flat_network(3, 1e8, latency_s=0.1))
    kept, moved = candidates(graph, 30, costs, outputs="own"), candidates(graph, 30, costs)
    assert all(each.plan.outputs == "own" for each in kept)
    assert all(each.plan.outputs == "everywhere" for each in moved)
    fleets = {sum(n > 0 for n in each[0].plan.otherwise.shares) for each in (kept, moved)}  # type: ignore[union-attr]
    assert fleets == {3}, "all three work"
    assert moved[0].step_s - kept[0].step_s == pytest.approx(0.1, rel=0.2)
