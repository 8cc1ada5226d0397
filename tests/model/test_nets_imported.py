"""Networks from elsewhere: torchvision, timm, the user's function. Their arguments, and refusals."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from convoy.errors import InputError
from convoy.model import nets
from convoy.model.nets import build_net
from convoy.model.operation import TracedModel
from convoy.model.tracing import trace
from tests.support.model_zoo import make_importable

CIFAR = (3, 32, 32)

MINE = """
import torch
from torch import nn


def everything(image, classes):
    channels, height, width = image
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * height * width, classes))


class Net(nn.Module):
    def __init__(self, width=4, *, num_classes=10):
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3)
        self.fc = nn.Linear(width, num_classes)

    def forward(self, x):
        return self.fc(self.conv(x).mean((2, 3)))


def with_auxiliary(classes):
    class Two(Net):
        def forward(self, x):
            return super().forward(x), super().forward(-x)

    return Two(num_classes=classes)


def depth_and_more(depth, image, *sizes, **options):
    return everything(image, 7)


def fails():
    return {}["weights"]


def no_module():
    return [nn.Linear(3, 7)]


def for_pixels(classes):
    return nn.Conv2d(3, classes, 1)


def large():
    return nn.Sequential(nn.Conv2d(3, 4, 64), nn.Flatten(), nn.Linear(4, 7))


ready = nn.Linear(3, 7)
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the user's modules."""
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "net.py").write_text(MINE)
    (tmp_path / "needy.py").write_text("import a_package_that_nobody_has\n")
    (tmp_path / "broken.py").write_text("import torch\n\nwidth = 1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    importlib.invalidate_caches()
    for name in ("mine", "pack", "pack.net", "needy", "broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


@pytest.fixture
def packages() -> None:
    """torchvision and timm can be imported."""
    make_importable()


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize("text", ["mine:everything", "pack.net:Net", "mine:with_auxiliary"])
def test_a_function_gets_the_arguments_that_it_has_parameters_for(text: str) -> None:
    model = build_net(text, CIFAR, 7)
    outputs = model(torch.zeros(2, *CIFAR))
    assert (outputs[0] if isinstance(outputs, tuple) else outputs).shape == (2, 7)


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("absent.place:build", ["no module 'absent'", "working folder"]),
        (
            "needy:build",
            ["needy:build: the module does not import", "a_package_that_nobody_has", "needy.py line 1", "correct it"],
        ),
        ("broken:build", ["broken:build: the module does not import", "ZeroDivisionError", "broken.py line 3"]),
        ("mine:everythin", ["everythin is not there", "did you mean everything"]),
        ("mine:zzz", ["zzz is not there", "a callable that returns a new nn.Module"]),
        ("mine:depth_and_more", ["mine:depth_and_more needs depth", "image, classes", "defaults"]),
        ("mine:fails", ["mine:fails failed", "KeyError", "mine.py line", "correct it there"]),
        ("mine:no_module", ["no_module() gave a list", "return an nn.Module"]),
        ("mine:for_pixels", ["images of 3x32x32 and 7 classes", "two images give (2, 7, 32, 32), not (2, 7)"]),
        ("mine:large", ["does not fit images of 3x32x32", "Kernel size", "give images"]),
        ("mine", ["unknown net 'mine'", "torchvision:NAME", "timm:NAME"]),
    ],
)
def test_what_is_refused(text: str, words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        build_net(text, CIFAR, 7)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize("text", ["torchvision:resnet18", "timm:resnet18.a1_in1k"])
def test_models_of_packages_have_the_classes_asked_for(text: str) -> None:
    a, b = (build_net(text, CIFAR, 7, seed) for seed in (1, 1))
    assert a(torch.zeros(2, *CIFAR)).shape == (2, 7)
    assert torch.equal(a.conv1.weight, b.conv1.weight)


@pytest.mark.usefixtures("packages")
def test_timm_takes_images_of_any_channels() -> None:
    assert isinstance(build_net("timm:resnet18", (1, 32, 32), 7).conv1, nn.Conv2d)
    with pytest.raises(InputError, match=r"does not fit images of 1x32x32 .*channels"):
        build_net("torchvision:resnet18", (1, 32, 32), 7)


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("torchvision:resnet81", ["torchvision has no net 'resnet81'", "did you mean resnet18"]),
        ("torchvision:zzzzzzzz", ["no net 'zzzzzzzz'", "list_models()"]),
        ("timm:convnext_tini", ["timm has no net 'convnext_tini'", "convnext_tiny"]),
    ],
)
def test_what_packages_do_not_have(text: str, words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        build_net(text, CIFAR, 7)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (None, ["torchvision is not installed", "pip install 'convoy-train[models]'"]),
        ("import tokenizers_of_nobody", ["tokenizers_of_nobody is not installed", "convoy-train[models]"]),
        (
            "raise RuntimeError('operator torchvision::nms does not exist')",
            ["torchvision does not import with torch", torch.__version__, "nms does not exist", "install both"],
        ),
    ],
)
def test_a_package_that_is_missing_or_built_for_another_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str | None, words: list[str]
) -> None:
    if source is not None:
        (tmp_path / "torchvision.py").write_text(source)
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    if source is None:
        monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError) as caught:
        build_net("torchvision:resnet18", CIFAR, 7)
    for word in words:
        assert word in str(caught.value)


def test_a_net_of_a_package_is_read_without_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    make_importable()
    on_meta: list[bool] = []

    def recorded(model: nn.Module, example: torch.Tensor) -> TracedModel:
        on_meta.append(all(p.is_meta for p in model.parameters()))
        return trace(model, example)

    monkeypatch.setattr(nets, "trace", recorded)
    graph = nets.graph_of("torchvision:squeezenet1_1", CIFAR, 10)
    assert on_meta == [True]
    assert graph == trace(build_net("torchvision:squeezenet1_1", CIFAR, 10), torch.zeros(2, *CIFAR)).graph
    assert nets.graph_of("torchvision:shufflenet_v2_x0_5", CIFAR, 10).outputs, "a part of it must be run"
    assert on_meta == [True, True, False]
