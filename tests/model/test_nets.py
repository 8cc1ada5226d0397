"""Networks by name: shapes, parameter counts worked out by hand, and what is refused."""

import pytest
import torch
from torch import nn

from convoy.errors import InputError
from convoy.model.nets import NETS, build_net

CIFAR = (3, 32, 32)
DIGITS = (1, 8, 8)


def counts(model: nn.Module) -> list[int]:
    """Parameters of each layer that has some, weight and bias together."""
    return [sum(p.numel() for p in m.parameters(False)) for m in model.modules() if list(m.parameters(False))]


def test_the_net_of_marques_on_cifar10() -> None:
    # 500 filters of 3x5x5 and a bias; 1500 of 500x5x5; 10 classes from 1500 planes of 8x8.
    expected = [500 * 3 * 25 + 500, 1500 * 500 * 25 + 1500, 1500 * 64 * 10 + 10]
    assert expected == [38_000, 18_751_500, 960_010]
    with torch.device("meta"):
        assert counts(build_net("two-conv:500:1500", CIFAR, 10)) == expected


def test_a_residual_net_of_depth_14() -> None:
    """Depth 6n+2 with n=2: a stem, three stages of two blocks of two convolutions, a classifier; 1x1 where shapes change."""
    model = build_net("resnet:14:4", CIFAR, 10)
    kernels = [(m.in_channels, m.out_channels, m.stride[0]) for m in model.modules() if isinstance(m, nn.Conv2d)]
    first, change, rest = (4, 4, 1), [(4, 8, 2), (8, 8, 1), (4, 8, 2)], [(8, 8, 1), (8, 8, 1)]
    last = [(8, 16, 2), (16, 16, 1), (8, 16, 2), (16, 16, 1), (16, 16, 1)]
    assert kernels == [(3, 4, 1), first, first, first, first, *change, *rest, *last]
    assert sum(1 for m in model.modules() if isinstance(m, nn.BatchNorm2d)) == len(kernels)


def test_deep_nets_for_small_images_have_their_usual_numbers_of_weights() -> None:
    """ResNet-18 of He et al. 2016 with a 3x3 stem; VGG-11 of Simonyan and Zisserman 2015, whose convolutions have 9,220,480."""
    linear = 512 * 4096 + 4096 + 4096 * 4096 + 4096 + 4096 * 10 + 10
    for text, weights in (("resnet18:64", 11_173_962), ("vgg:11:4096", 9_220_480 + linear)):
        with torch.device("meta"):
            model = build_net(text, CIFAR, 10)
        assert sum(p.numel() for p in model.parameters()) == weights


def test_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(99)
    before = torch.get_rng_state()
    a, b, c = (build_net("two-conv:2:3", DIGITS, 10, seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before), "the program's own random numbers are left alone"
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert not torch.equal(a["0.weight"], c["0.weight"])


@pytest.mark.parametrize(
    ("text", "image", "words"),
    [
        ("lenet", DIGITS, ["unknown net 'lenet'", "alexnet:F", "resnet:DEPTH:WIDTH", "two-conv:K1:K2", "timm:NAME"]),
        ("two-conv:3", DIGITS, ["'two-conv:3'", "two-conv:K1:K2", "1 or more"]),
        ("two-conv:a:b", DIGITS, ["'two-conv:a:b'", "whole numbers"]),
        ("resnet:9:4", DIGITS, ["6n+2", "not 9", "resnet:8:16"]),
        ("vgg:12:64", CIFAR, ["11, 13, 16 or 19, not 12", "vgg:11:4096"]),
        ("unet:4", (3, 40, 32), ["4 times", "40x32", "multiples of 16"]),
        ("vgg:11:64", (3, 31, 32), ["32x32 or more", "these are 31x32"]),
        ("alexnet:999999999999", CIFAR, ["'alexnet:999999999999'", "memory", "smaller"]),
    ],
)
def test_what_is_refused(text: str, image: tuple[int, int, int], words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        build_net(text, image, 10)
    for word in words:
        assert word in str(caught.value)


def test_the_smallest_image_of_every_net_is_large_enough() -> None:
    for name, (_, _, _, least) in NETS.items():
        model = build_net(name, (1, least, least), 3).eval()
        assert model(torch.zeros(1, 1, least, least)).shape[:2] == (1, 3)
