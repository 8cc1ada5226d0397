"""Models whose own forward cannot be traced: it runs on every device, and submodules that can be traced are split."""

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convoy.comm.group import Group
from convoy.model.tracing import trace
from convoy.plan.presets import Speeds, named_plan
from convoy.runtime.module import Distributed
from tests.support.beside_one import tensors_in
from tests.support.loops import conv
from tests.support.slow import most_slow
from tests.support.threads import run_on_threads

SIZES = ((12, 8), (9, 16))


class Detector(nn.Module):
    """Like those of torchvision: lists of images and targets in; losses out in training, a list of results in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(conv(3, 6), conv(6, 8, 2))
        self.head = nn.Sequential(conv(8, 8), nn.Conv2d(8, 4, 1))
        self.box = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
        self.calls, self.error = 0, 0.0

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]]) -> Any:
        self.calls += 1
        side = [max(x.shape[axis] for x in images) for axis in (1, 2)]
        features = self.backbone(
            torch.stack([F.pad(x, (0, side[1] - x.shape[2], 0, side[0] - x.shape[1])) for x in images])
        )
        scores = self.head(features)
        if not self.training:
            return [{"scores": row[row > 0], "side": tuple(row.shape)} for row in scores]
        chosen = [features[i, :, y, x] for i, t in enumerate(targets) for y, x in t["at"].tolist()]
        boxes = self.box(torch.stack(chosen)) * (1 + self.error)
        return {"box": (boxes - torch.cat([t["box"] for t in targets])).abs().mean(), "scores": scores.square().mean()}


def batches() -> list[tuple[list[Tensor], list[dict[str, Tensor]]]]:
    own = torch.Generator().manual_seed(0)

    def batch(number: int) -> Any:
        sizes = [SIZES[(number + i) % 2 if number % 3 else 0] for i in range(5)]  # other sizes after padding
        images = [torch.randn(3, *size, generator=own, dtype=torch.float64) for size in sizes]
        rows = [1 + (number + i) % 3 for i in range(5)]
        return images, [
            {"at": torch.randint(0, 4, (n, 2), generator=own), "box": torch.randn(n, 4, generator=own).double()}
            for n in rows
        ]

    return [batch(number) for number in range(6)]


def train(here: nn.Module, inner: nn.Module) -> list[Tensor]:
    optimizer, found = torch.optim.AdamW(here.parameters(), lr=0.01, eps=1e-3), []
    for images, targets in batches():
        optimizer.zero_grad()
        loss = torch.stack([*here(images, targets).values()]).sum()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    assert inner.calls == len(batches())
    with torch.no_grad():
        return found + tensors_in(here.eval()(*batches()[0]))


def plan_of(name: str, model: nn.Module) -> Any:
    return named_plan(name, trace(model, batches()[0]).graph, 5, Speeds((3.0, 0.0, 2.0)))


@pytest.mark.parametrize("plan", most_slow(2, ("data-by-speed", "hybrid", "model", "sharded")))
def test_a_detector_trains_like_on_one_device(plan: str) -> None:
    torch.manual_seed(0)
    model = Detector().double()
    reference = copy.deepcopy(model)
    expected = [*train(reference, reference), *reference.state_dict().values()]

    def work(group: Group) -> float:
        here = Distributed(model, plan_of(plan, model), group, batches()[0])
        found = [*train(here, here.module), *here.full_state_dict().values()]
        return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True) if a.numel())

    assert max(run_on_threads(3, work)) < 1e-10


def test_devices_that_round_differently_keep_the_same_weights() -> None:
    model = Detector().double()
    chosen = plan_of("data-by-speed", model)

    def work(group: Group) -> list[Tensor]:
        here = Distributed(model, chosen, group, batches()[0])
        here.module.error = 1e-9 * group.device
        train(here, here.module)
        return [t.detach() for t in (*here.module.box.parameters(), *here.module.box.buffers())]

    first, *others = run_on_threads(3, work)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def test_micro_batches_of_a_detector_add_up() -> None:
    model = Detector().double()
    chosen, reference = plan_of("data-by-speed", model), copy.deepcopy(model)
    for images, targets in batches()[:2]:
        sum(reference(images, targets).values()).backward()

    def work(group: Group) -> float:
        here = Distributed(model, chosen, group, batches()[0])
        with here.no_sync():
            sum(here(*batches()[0]).values()).backward()
        sum(here(*batches()[1]).values()).backward()
        pairs = [(here.gather(key, p.grad), reference.get_parameter(key).grad) for key, p in here.named_parameters()]  # type: ignore[arg-type]
        return max(float((a - b).abs().max()) for a, b in pairs)  # type: ignore[operator]

    assert max(run_on_threads(3, work)) < 1e-12


def test_what_runs_on_every_device_is_reported() -> None:
    traced = trace(Detector().double(), batches()[0])
    assert [part.path for part in traced.live or ()] == ["backbone", "head"]
    assert traced.note.startswith("the forward of Detector runs on every device (")
    assert traced.note.endswith("; split: backbone, head")


@dataclass
class Maps:
    maps: Tensor


class ReturnsMaps(nn.Sequential):
    def forward(self, x: Tensor) -> Any:
        return Maps(super().forward(x))


class Sized(nn.Module):
    """A model whose forward depends on the batch, so that it cannot be traced."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part, self.last = part, nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.part(x)
        x = x.maps if isinstance(x, Maps) else x
        return self.last(x.flatten(2).mean(2) if x.dim() > 3 else x.mean(1)) if len(x) > 1 else x


def hooked() -> nn.Module:
    part = nn.Sequential(conv(3, 6), conv(6, 6))
    part.register_forward_hook(
        lambda module, _inputs, _output: setattr(module, "seen", vars(module).get("seen", 0) + 1)
    )
    return part


def damp(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def with_gradient_hook() -> nn.Module:
    part = nn.Conv2d(3, 6, 3)
    part.weight.register_post_accumulate_grad_hook(damp)  # type: ignore[no-untyped-call]
    return part


PARTS = {
    "encoder": lambda: nn.TransformerEncoderLayer(6, 1, 8, dropout=0.0, batch_first=True),
    "hook": hooked,
    "gradient_hook": with_gradient_hook,
    "dataclass": lambda: ReturnsMaps(conv(3, 6)),
}


@pytest.mark.parametrize("part", PARTS)
def test_submodules_that_cannot_be_split_stay_right(part: str) -> None:
    torch.manual_seed(0)
    model = Sized(PARTS[part]()).double()
    reference = Sized(PARTS[part]()).double()  # not a copy, which has no hooks on parameters
    reference.load_state_dict(model.state_dict())
    images = torch.randn(5, *((4, 6) if part == "encoder" else (3, 6, 6)), dtype=torch.float64)

    def losses(here: nn.Module) -> Tensor:
        optimizer, found = torch.optim.SGD(here.parameters(), lr=0.1), []
        for _ in range(3):
            optimizer.zero_grad()
            loss = here(images).square().sum()
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
        return torch.stack(found)

    expected = losses(reference)
    chosen = named_plan("model", trace(model, images).graph, 5, Speeds((3.0, 2.0)))
    for found in run_on_threads(2, lambda group: losses(Distributed(model, chosen, group, images))):
        assert torch.allclose(found, expected, rtol=1e-12)


def test_a_model_that_keeps_its_features_gets_other_sizes() -> None:
    class Keeps(Sized):
        def forward(self, x: Tensor) -> Tensor:
            self.kept = self.part(x)
            return self.last(self.kept.flatten(2).mean(2)) if len(x) > 1 else self.kept

    torch.manual_seed(0)
    model = Keeps(nn.Sequential(conv(3, 6))).double()
    small, large = (torch.randn(5, 3, n, n, dtype=torch.float64) for n in (6, 8))
    expected = [copy.deepcopy(model)(x).detach() for x in (small, large)]
    chosen = plan_of_images(model, small)

    def work(group: Group) -> list[Tensor]:
        here = Distributed(model, chosen, group, small)
        return [here(x) for x in (small, large)]

    for found in run_on_threads(2, work):
        torch.testing.assert_close([each.detach() for each in found], expected)


def test_modules_that_overwrite_their_input_do_so_in_a_live_forward() -> None:
    class Doubled(Sized):
        def forward(self, x: Tensor) -> Tensor:
            x = x * 1
            return self.last((x + self.part(x)).flatten(2).mean(2)) if len(x) > 1 else x

    torch.manual_seed(0)
    model, x = Doubled(nn.SiLU(inplace=True)).double(), torch.randn(5, 6, 4, 4, dtype=torch.float64)
    expected, chosen = copy.deepcopy(model)(x), plan_of_images(model, x)
    for found in run_on_threads(2, lambda group: Distributed(model, chosen, group, x)(x)):
        torch.testing.assert_close(found, expected)


def plan_of_images(model: nn.Module, x: Tensor) -> Any:
    return named_plan("data", trace(model, x).graph, len(x), Speeds((3.0, 2.0)))
