"""Losses of local outputs: value and gradient match one device, and no output is sent."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import convoy
from convoy.comm.group import Group
from convoy.errors import ConvoyError, InputError, MismatchError
from convoy.layout.layout import Split
from convoy.model.tracing import trace
from convoy.plan.lower import lower
from convoy.plan.plan import Plan
from convoy.plan.strategy import Batch, Channel, Filter, One
from convoy.runtime.batches import OutputPart
from convoy.runtime.module import Distributed
from tests.support.nets import UNet
from tests.support.one_device import part
from tests.support.threads import run_on_threads
from tests.support.torch_seed import torch_seed

SHARES = (4, 0, 1, 3)
SAMPLES, CLASSES = sum(SHARES), 5


def _floats(*shape: int) -> Tensor:
    return torch.randn(SAMPLES, *shape, dtype=torch.float64)


def _labels(*shape: int) -> Tensor:
    return torch.randint(0, CLASSES, (SAMPLES, *shape))


def _ignored(*shape: int) -> Tensor:
    """Return labels with all of the first samples' ignored and some others', so that devices count differently."""
    y = torch.where(torch.rand(SAMPLES, *shape) < 0.4, 255, _labels(*shape))
    y[:3] = 255
    return y


WEIGHT = torch.tensor([0.1, 3.0, 1.0, 0.0, 7.0], dtype=torch.float64)
Case = tuple[nn.Module, Callable[[], tuple[Tensor, ...]]]
"""A criterion, and what it is given; the first is the model's output."""

CASES: dict[str, Case] = {
    "cross entropy": (nn.CrossEntropyLoss(), lambda: (_floats(5), _labels())),
    "smoothed": (nn.CrossEntropyLoss(label_smoothing=0.2), lambda: (_floats(5), _labels())),
    "ignored": (nn.CrossEntropyLoss(ignore_index=255), lambda: (_floats(5, 3, 4), _ignored(3, 4))),
    "weighted": (nn.CrossEntropyLoss(weight=WEIGHT), lambda: (_floats(5, 3, 4), _labels(3, 4))),
    "all at once": (
        nn.CrossEntropyLoss(weight=WEIGHT, ignore_index=255, label_smoothing=0.1),
        lambda: (_floats(5, 3, 4), _ignored(3, 4)),
    ),
    "sum": (
        nn.CrossEntropyLoss(weight=WEIGHT, ignore_index=255, reduction="sum"),
        lambda: (_floats(5), _ignored()),
    ),
    "probabilities": (
        nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1),
        lambda: (_floats(5, 2), _floats(5, 2).softmax(1)),
    ),
    "nll": (nn.NLLLoss(weight=WEIGHT, ignore_index=255), lambda: (_floats(5, 3), _ignored(3))),
    "l1": (nn.L1Loss(), lambda: (_floats(2, 3), _floats(2, 3))),
    "mse": (nn.MSELoss(), lambda: (_floats(2, 3), _floats(2, 3))),
    "mse, one target for all channels": (nn.MSELoss(), lambda: (_floats(2, 3), _floats(1, 3))),
    "mse, sum": (nn.MSELoss(reduction="sum"), lambda: (_floats(2, 3), _floats(2, 3))),
    "smooth l1": (nn.SmoothL1Loss(beta=0.5), lambda: (_floats(4), _floats(4))),
    "huber": (nn.HuberLoss(delta=0.5), lambda: (_floats(4), _floats(4))),
    "bce": (nn.BCELoss(), lambda: (_floats(4).sigmoid(), _floats(4).sigmoid())),
    "bce with logits": (
        nn.BCEWithLogitsLoss(pos_weight=WEIGHT[:4], weight=WEIGHT[1:]),
        lambda: (_floats(4), _floats(4).sigmoid()),
    ),
    "poisson": (nn.PoissonNLLLoss(full=True), lambda: (_floats(4), _floats(4).exp())),
    "gaussian": (nn.GaussianNLLLoss(), lambda: (_floats(4), _floats(4), _floats(4).exp())),
    "gaussian, one variance": (nn.GaussianNLLLoss(), lambda: (_floats(4), _floats(4), _floats(1).exp())),
    "soft margin": (nn.SoftMarginLoss(), lambda: (_floats(4), _floats(4).sign())),
    "kl": (nn.KLDivLoss(), lambda: (_floats(4).log_softmax(1), _floats(4).softmax(1))),
    "kl, by samples": (
        nn.KLDivLoss(reduction="batchmean"),
        lambda: (_floats(4).log_softmax(1), _floats(4).softmax(1)),
    ),
    "kl, sum": (nn.KLDivLoss(reduction="sum"), lambda: (_floats(4).log_softmax(1), _floats(4).softmax(1))),
    "hinge embedding": (nn.HingeEmbeddingLoss(), lambda: (_floats(4), _floats(4).sign())),
    "margin ranking": (nn.MarginRankingLoss(0.1), lambda: (_floats(), _floats(), _floats().sign())),
    "cosine embedding": (nn.CosineEmbeddingLoss(), lambda: (_floats(4), _floats(4), _floats().sign())),
    "triplet": (nn.TripletMarginLoss(), lambda: (_floats(4), _floats(4), _floats(4))),
    "triplet by distance": (nn.TripletMarginWithDistanceLoss(), lambda: (_floats(4), _floats(4), _floats(4))),
    "multi margin": (nn.MultiMarginLoss(weight=WEIGHT), lambda: (_floats(5), _labels())),
    "multilabel margin": (nn.MultiLabelMarginLoss(), lambda: (_floats(5), _labels(5))),
    "multilabel soft margin": (
        nn.MultiLabelSoftMarginLoss(weight=WEIGHT),
        lambda: (_floats(5), _labels(5).clamp(max=1).double()),
    ),
}  # fmt: skip


def _on_parts(
    arguments: Sequence[Tensor], work: Callable[..., Tensor], *, whole: bool, outputs: int = 1
) -> list[tuple[float, list[Tensor]]]:
    """Return each device's loss and the gradients of its output rows."""

    def run(group: Group) -> tuple[float, list[Tensor]]:
        start = sum(SHARES[: group.device])
        rows = slice(start, start + SHARES[group.device])
        own = [x[rows].clone().requires_grad_() for x in arguments[:outputs]]
        pairs = zip(own, arguments, strict=False)
        parts = [OutputPart(x, Split(0, SHARES), tuple(of.shape), group) for x, of in pairs]
        loss = work(*parts, *(y if whole else y[rows] for y in arguments[outputs:]))
        (3.0 * loss).backward()
        return loss.item(), [x.grad if x.grad is not None else torch.full_like(x, torch.nan) for x in own]

    return run_on_threads(len(SHARES), run, timeout_s=20)


def _check(arguments: Sequence[Tensor], ours: Any, alone: Callable[..., Tensor], outputs: int = 1) -> None:
    leaves = [x.clone().requires_grad_() for x in arguments[:outputs]]
    expected = alone(*leaves, *arguments[outputs:])
    (3.0 * expected).backward()
    for whole in (True, False):
        found = _on_parts(arguments, ours, whole=whole, outputs=outputs)
        for value, _ in found:
            assert value == pytest.approx(expected.item(), rel=1e-12)
        for i, leaf in enumerate(leaves):
            assert leaf.grad is not None
            torch.testing.assert_close(torch.cat([g[i] for _, g in found]), leaf.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.filterwarnings("ignore:Using a target size", "ignore:reduction. .mean. divides")
@pytest.mark.parametrize("name", [*CASES])
def test_every_criterion_has_the_value_and_the_gradient_of_one_device(name: str) -> None:
    criterion, given = CASES[name]
    with torch_seed(5):
        arguments = given()
    _check(arguments, convoy.loss(criterion), criterion)
    plain = convoy.loss(criterion)(*arguments)  # outputs of the whole batch
    torch.testing.assert_close(plain, criterion(*arguments))


def test_custom_criteria_match_one_device() -> None:
    with torch_seed(6):
        pairs = (_floats(3), _floats(3))

    def dice(x: Tensor, y: Tensor) -> Tensor:
        return 1 - 2 * (x * y).sum(1) / (x.square() + y.square()).sum(1)

    _check(pairs, convoy.loss(dice, reduction="mean"), lambda x, y: dice(x, y).mean())
    _check(pairs, convoy.loss(dice, reduction="sum"), lambda x, y: dice(x, y).sum())
    assert convoy.loss(dice, reduction="mean")(*pairs).item() == dice(*pairs).mean().item()


def test_all_ignored_labels_match_torch() -> None:
    x, y = torch.zeros(SAMPLES, 5, dtype=torch.float64), torch.full((SAMPLES,), -100)
    for value, _ in _on_parts((x, y), convoy.loss(nn.CrossEntropyLoss()), whole=True):
        assert str(value) == "nan" == str(F.cross_entropy(x, y).item())


def test_a_sum_of_many_pixels_in_half_precision_does_not_overflow() -> None:
    x, y = torch.full((SAMPLES, 400), 30.0, dtype=torch.float16), torch.zeros(SAMPLES, 400, dtype=torch.float16)
    for value, _ in _on_parts((x, y), convoy.loss(nn.MSELoss()), whole=True):
        assert value == 900.0


# --- what is refused -------------------------------------------------------------------------------------------------


class _Own(nn.CrossEntropyLoss):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y) * 2


@pytest.mark.parametrize(
    ("criterion", "words"),
    [
        (nn.CTCLoss(), "CTCLoss"),
        (_Own(), "_Own"),
        (lambda x, y: (x - y).mean(), "lambda"),
        (nn.CrossEntropyLoss(reduction="none"), "'none'"),
        (nn.Sequential(nn.Identity()), "Sequential"),
    ],
)
def test_criteria_with_unknown_reduction_are_refused(criterion: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        convoy.loss(criterion)


@pytest.mark.parametrize(
    ("criterion", "arguments", "words"),
    [
        (nn.MSELoss(), lambda: (_floats(1), _floats()), "the same number of axes"),
        (nn.BCEWithLogitsLoss(weight=torch.ones(SAMPLES, 2)), lambda: (_floats(2), _floats(2)), "sample to sample"),
        (nn.MSELoss(), lambda: (_floats(2), _floats(2)[:5]), "5, 2"),
    ],
)
def test_arguments_that_would_pair_samples_wrongly_are_refused(
    criterion: nn.Module, arguments: Any, words: str
) -> None:
    with torch_seed(8):
        made = arguments()
    with pytest.raises(ConvoyError, match=words):
        _on_parts(made, convoy.loss(criterion), whole=True)


def test_differing_class_weights_are_refused() -> None:
    def work(group: Group) -> None:
        x = OutputPart(torch.zeros(SHARES[group.device], 5), Split(0, SHARES), (SAMPLES, 5), group)
        criterion = nn.CrossEntropyLoss(weight=torch.ones(5) + (group.device == 2))
        convoy.loss(criterion)(x, _labels())

    with pytest.raises(MismatchError, match="another criterion"):
        run_on_threads(len(SHARES), work)


def test_a_local_output_is_never_used_as_a_global_one() -> None:
    def work(group: Group) -> None:
        tensor = torch.ones(SHARES[group.device], 5, requires_grad=True)
        x = OutputPart(tensor, Split(0, SHARES), (SAMPLES, 5), group)
        y = torch.zeros(SAMPLES, dtype=torch.int64)
        for use in (
            lambda: F.cross_entropy(x, y), lambda: torch.stack([x, x]), lambda: x == y,
            lambda: len(x), lambda: x[0], lambda: [*x], lambda: bool(x), lambda: y + x,
        ):  # fmt: skip
            with pytest.raises(InputError, match=r"convoy\.loss"):
                use()
        for operator in (lambda: x + 1, lambda: 2 * x, lambda: float(x)):  # type: ignore[operator, arg-type]
            with pytest.raises(TypeError, match="OutputPart"):
                operator()
        with pytest.raises(AttributeError, match=r"convoy\.loss"):
            x.mean()
        assert not isinstance(x, Tensor)
        assert not x.own.requires_grad
        assert not x.whole().requires_grad
        assert x.whole().shape == (SAMPLES, 5)

    run_on_threads(len(SHARES), work)


# --- in training -----------------------------------------------------------------------------------------------------


def _unet(shares: Sequence[int], *, mixes_strategies: bool = False) -> tuple[nn.Module, Plan, Tensor]:
    """Return a U-Net and a plan that keeps its outputs, an image of logits per sample, local."""
    with torch_seed(1):
        model = UNet().double()
        x = torch.randn(SAMPLES, 3, 16, 16, dtype=torch.float64)
    graph = trace(model, x[:2]).graph
    layers: dict[str, Any] = {}
    if mixes_strategies:
        for i, layer in enumerate(each for each in graph.weighted if not each.shared and each.groups == 1):
            out, inner = layer.channels_out, layer.channels_in
            choices = (
                Filter((out - out // 3, 0, out // 3, 0)), Batch((1, 2, 3, 2)), One(3),
                Channel((0, inner - inner // 2, 0, inner // 2)),
            )  # fmt: skip
            layers[layer.name] = choices[i % 4]
    plan = Plan("u", graph.fingerprint, 4, SAMPLES, layers, Batch(tuple(shares)), outputs="where-computed")
    return model, plan, x


def _targets(model: nn.Module, x: Tensor) -> Tensor:
    classes, *sides = model(x[:1]).shape[1:]
    with torch_seed(2):
        y = torch.where(torch.rand(SAMPLES, *sides) < 0.3, 255, torch.randint(0, classes, (SAMPLES, *sides)))
    y[4:] = torch.where(torch.rand(4, *sides, generator=torch.Generator().manual_seed(1)) < 0.8, 255, y[4:])
    return y


def test_a_u_net_trains_for_twenty_steps_as_on_one_device() -> None:
    model, plan, x = _unet(SHARES, mixes_strategies=True)
    y, criterion = _targets(model, x), nn.CrossEntropyLoss(ignore_index=255, label_smoothing=0.1)

    def train(model: nn.Module, forward: Callable[[Tensor], Any], loss: Any) -> list[float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        losses = []
        for k in range(20):
            order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(k))[: SAMPLES if k % 3 else 3]
            optimizer.zero_grad()
            made = loss(forward(x[order]), y[order])
            made.backward()
            losses.append(made.item())
            optimizer.step()
        return losses

    def work(group: Group) -> tuple[list[float], dict[str, Tensor], Tensor]:
        here = Distributed(model, plan, group, x[:2])
        losses = train(here, lambda x: here(part(here, x), batch=len(x)), convoy.loss(criterion))
        here.eval()
        with torch.no_grad():
            found = here(part(here, x), batch=SAMPLES)
            whole = found.whole()
        return losses, here.full_state_dict(), whole

    found = run_on_threads(4, work, timeout_s=60)
    losses = train(model, model, criterion)
    model.eval()
    for row, weights, whole in found:
        assert row == pytest.approx(losses, rel=1e-10)
        for key, weight in model.state_dict().items():
            torch.testing.assert_close(weights[key], weight, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(whole, model(x), rtol=1e-10, atol=1e-10)


def _sent(model: nn.Module, plan: Plan, x: Tensor, y: Tensor) -> int:
    """Return the bytes all devices send in one step."""

    def work(group: Group) -> int:
        here = Distributed(model, plan, group, x[:2])
        criterion = convoy.loss(nn.CrossEntropyLoss(ignore_index=255))
        here(part(here, x), batch=SAMPLES)
        group.clear_counters()
        criterion(here(part(here, x), batch=SAMPLES), y).backward()
        return sum(group.sent_bytes)

    return sum(run_on_threads(4, work, timeout_s=60))


def test_local_outputs_are_not_sent() -> None:
    model, plan, x = _unet(SHARES)
    graph, y = trace(model, x[:2]).graph, _targets(model, x)
    sums = sum(lower(plan, graph).traffic(8).values())
    losses = 2 * 8 * 3 * 3  # the sum and the count of each device with samples, for every other device
    assert _sent(model, plan, x, y) == sums + losses
    everywhere = replace(plan, outputs="everywhere")
    with torch.no_grad():
        own = model(x)
    copies = sum(SAMPLES - share for share in SHARES) * own[0].numel() * 8
    assert sum(lower(everywhere, graph).traffic(8).values()) == sums + copies
    assert _sent(model, everywhere, x, y) == sums + copies
