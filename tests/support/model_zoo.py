"""Models from torchvision and timm, small images for each, and the results of training them."""

import copy
import importlib
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import convoy.runtime.module
from convoy.comm.group import Group
from convoy.model.nets import build_net
from convoy.model.tracing import TracedModel
from convoy.plan.plan import Plan
from convoy.runtime.module import Distributed
from tests.support.nets import CLASSES, Thinking, UNet
from tests.support.one_device import one_trace, part
from tests.support.threads import run_on_threads
from tests.support.torch_seed import torch_seed

BATCH = 6
SIZES = (6, 5, 6)
"""Samples of the batches of a training. With fewer samples of one pixel, batch norm magnifies rounding too much to compare."""


@dataclass(frozen=True)
class Entry:
    """A model of the zoo: how it is built, and the side of images that it can take."""

    build: Callable[[], nn.Module]
    side: int = 32


def _named(text: str, side: int = 32) -> Entry:
    return Entry(lambda: build_net(text, (3, side, side), CLASSES), side)


def _narrow_vgg() -> nn.Module:
    """Narrow the classifier to 64 features: with 4096, four devices in one process fill 19 GB. AlexNet too."""
    model = build_net("torchvision:vgg16_bn", (3, 32, 32), CLASSES)
    model.classifier[0], model.classifier[3] = nn.Linear(512 * 7 * 7, 64), nn.Linear(64, 64)
    model.classifier[6] = nn.Linear(64, CLASSES)
    return model


ZOO: dict[str, Entry] = {
    "resnet18": _named("torchvision:resnet18"),
    "resnet50": _named("torchvision:resnet50"),
    "vgg16_bn": Entry(_narrow_vgg),
    "alexnet": _named("torchvision:alexnet", 64),
    "mobilenet_v2": _named("torchvision:mobilenet_v2", 64),
    "mobilenet_v3_small": _named("torchvision:mobilenet_v3_small"),
    "densenet121": _named("torchvision:densenet121", 64),
    "googlenet": _named("torchvision:googlenet"),
    "efficientnet_b0": _named("torchvision:efficientnet_b0", 64),
    "shufflenet_v2_x1_0": _named("torchvision:shufflenet_v2_x1_0", 64),
    "convnext_tiny": _named("torchvision:convnext_tiny"),
    "timm convnext_tiny": _named("timm:convnext_tiny"),
    "unet": Entry(UNet, 16),
    "thinking": Entry(Thinking, 8),
}

_LIBRARIES: list[Any] = []


def make_importable() -> None:
    """torchvision from the registry has kernels for another build of torch than the CPU's, and misses two operators.

    Only the tests define them, empty: no model here calls them. Where the builds match, nothing is missing.
    """
    if "torchvision" in sys.modules:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # image files cannot be read, for the same reason
        try:
            importlib.import_module("torchvision")
        except RuntimeError as error:
            if "torchvision::nms" not in str(error):
                raise
            for name in [n for n in sys.modules if n.partition(".")[0] == "torchvision"]:
                del sys.modules[name]
            _LIBRARIES.append(library := torch.library.Library("torchvision", "FRAGMENT"))
            for operator in ("nms", "qnms"):
                library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            importlib.import_module("torchvision")


def build(name: str) -> nn.Module:
    """Build a model in float64 without random numbers: dropout and stochastic depth are excepted from parity.

    The residual branches of ResNet-50 start small (Goyal et al. 2017 start them at zero): else its batch norms turn 1e-15 in
    the images into 1e-9 in the statistics of a few samples, on one device as well.
    """
    make_importable()
    with torch_seed(0):
        model = ZOO[name].build().double()
    for module in model.modules():
        if "Dropout" in type(module).__name__ or type(module).__name__ == "StochasticDepth":
            module.p = 0.0
    for key, parameter in model.named_parameters():
        if key.endswith("bn3.weight"):
            nn.init.constant_(parameter, 0.2)
    return model


def traced(name: str, model: nn.Module) -> TracedModel:
    """Trace a model once for all tests."""
    with one_trace("zoo", name):
        return convoy.runtime.module.trace(model, batches(name, model)[0][0][:2])


def batches(name: str, model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Return images with one label each, or one per pixel for segmentation models."""
    side = ZOO[name].side
    with torch_seed(11):
        labelled = (side, side) if isinstance(model, UNet) else ()
        return [
            (torch.randn(n, 3, side, side, dtype=torch.float64), torch.randint(0, CLASSES, (n, *labelled)))
            for n in SIZES
        ]


def loss_of(outputs: Any, y: Tensor) -> Tensor:
    """Return the cross entropy; auxiliary classifiers count 0.3 (Szegedy et al. 2015, section 5)."""
    if isinstance(outputs, Tensor):
        return F.cross_entropy(outputs, y)
    main, *others = (F.cross_entropy(each, y) for each in outputs)
    return main + 0.3 * sum(others)


@dataclass
class Left:
    """The result of a training: the loss of each step, weights and buffers, evaluation outputs."""

    losses: Tensor
    weights: dict[str, Tensor]
    evaluated: Tensor


def _train(
    model: nn.Module,
    given: Sequence[tuple[Tensor, Tensor]],
    forward: Callable[[Tensor], Any],
    weights: Callable[[], dict[str, Tensor]],
) -> Left:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    losses = []
    for x, y in given:
        optimizer.zero_grad()
        loss = loss_of(forward(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    model.eval()
    with torch.no_grad():
        return Left(torch.stack(losses), weights(), forward(given[0][0]))


def on_one(model: nn.Module, given: Sequence[tuple[Tensor, Tensor]]) -> Left:
    """Train in plain PyTorch, the reference."""
    reference = copy.deepcopy(model)
    return _train(reference, given, reference, reference.state_dict)


def on_many(name: str, model: nn.Module, plan: Plan) -> list[float]:
    """Train on the devices of a plan, on threads; return each one's difference from one device."""
    given = batches(name, model)
    expected = on_one(model, given)

    def work(group: Group) -> float:
        here = Distributed(model, plan, group, given[0][0][:2])
        found = _train(here, given, lambda x: here(part(here, x), batch=len(x)), here.full_state_dict)
        return difference(found, expected)

    with one_trace("zoo", name):
        return run_on_threads(plan.devices, work, timeout_s=100)


def difference(found: Left, expected: Left) -> float:
    """Return the largest difference relative to max(1, size). NaN counts as infinite."""
    assert found.weights.keys() == expected.weights.keys()
    pairs = [(found.weights[key], weight) for key, weight in expected.weights.items()]
    pairs += [(found.losses, expected.losses), (found.evaluated, expected.evaluated)]
    apart = ((a - b).abs() / b.abs().clamp(min=1.0) for a, b in pairs)
    return max(float(each.double().nan_to_num(nan=float("inf")).max()) for each in apart)
