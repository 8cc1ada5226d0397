"""Detection and segmentation: torchvision's models, with lists of images and dicts of targets; and a loss outside."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests.support.loops import Make, Prepare, conv, endless, update
from tests.support.model_zoo import make_importable

SMALL: Any = {
    "min_size": 64, "max_size": 128, "rpn_post_nms_top_n_train": 40, "rpn_post_nms_top_n_test": 40,
    "box_batch_size_per_image": 16,
}  # fmt: skip


class Photos(Dataset[Any]):
    """30 images of two sizes; each has one to three boxes with labels and masks."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, i: int) -> tuple[Tensor, dict[str, Tensor]]:
        own, boxes = torch.Generator().manual_seed(i), 1 + i % 3
        corners = 4 + 30 * torch.rand(boxes, 2, generator=own)
        sizes = 8 + 20 * torch.rand(boxes, 2, generator=own)
        target = {
            "boxes": torch.cat([corners, corners + sizes], 1),
            "labels": torch.randint(1, 4, (boxes,), generator=own),
            "masks": (torch.rand(boxes, 64, 64, generator=own) > 0.5).to(torch.uint8),
        }
        return torch.rand(3, 64, 64 if i % 4 else 48, generator=own), target


def photos() -> DataLoader[Any]:
    return DataLoader(Photos(), 3, collate_fn=lambda rows: tuple(zip(*rows, strict=True)))


def detection(net: nn.Module, prepare: Prepare, optimizer: Make) -> Iterator[Any]:
    net, steps, loader = prepare(net, optimizer(net.parameters()), photos())
    for images, targets in endless(loader):
        yield update(steps, 0.1 * sum(net(list(images), list(targets)).values()))


def models() -> Any:
    make_importable()
    import torchvision.models.detection as library

    return library


def pyramid() -> Any:
    return models().backbone_utils.resnet_fpn_backbone(backbone_name="resnet18", weights=None, trainable_layers=5)


def faster_rcnn(prepare: Prepare, optimizer: Make) -> Iterator[Any]:
    head = models().faster_rcnn.TwoMLPHead(256 * 49, 32)
    predictor = models().faster_rcnn.FastRCNNPredictor(32, 4)
    net = models().FasterRCNN(pyramid(), **SMALL, box_head=head, box_predictor=predictor)
    yield from detection(net, prepare, optimizer)


def mask_rcnn(prepare: Prepare, optimizer: Make) -> Iterator[Any]:
    net = models().MaskRCNN(pyramid(), num_classes=4, **SMALL)
    yield from detection(net, prepare, optimizer)


def retina_net(prepare: Prepare, optimizer: Make) -> Iterator[Any]:
    yield from detection(models().RetinaNet(pyramid(), 4, min_size=64, max_size=128), prepare, optimizer)


def ssd_lite(prepare: Prepare, optimizer: Make) -> Iterator[Any]:
    net = models().ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=4)
    for module in net.modules():
        if isinstance(
            module, nn.BatchNorm2d
        ):  # of three pixels they turn 1e-15 into 1e-4 in ten steps, also on one device
            module.eval()
    yield from detection(net, prepare, optimizer)


def segmentation(prepare: Prepare, optimizer: Make) -> Iterator[Any]:
    make_importable()
    import torchvision.models.segmentation as library

    net = library.lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=4)
    net, steps, loader = prepare(net, optimizer(net.parameters()), DataLoader(Masks(), 4))
    for images, masks in endless(loader):
        yield update(steps, F.cross_entropy(net(images)["out"], masks))


class Masks(Dataset[Any]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        own = torch.Generator().manual_seed(i)
        return torch.rand(3, 64, 64, generator=own), torch.randint(0, 4, (64, 64), generator=own)


class OneStage(nn.Module):
    """Returns maps of two scales, like a YOLO."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.down = nn.Sequential(conv(3, 6), conv(6, 8, 2)), conv(8, 8, 2)
        self.heads = nn.ModuleList(nn.Conv2d(8, 5, 1) for _ in range(2))

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.body(x)
        return [head(y) for head, y in zip(self.heads, (x, self.down(x)), strict=True)]


def rows_of_targets(prepare: Prepare, optimizer: Make) -> Iterator[Any]:
    """Images as one tensor; targets as one tensor with a row per box, whose first number is the image."""

    def collate(rows: Any) -> tuple[Tensor, Tensor]:
        boxes = [F.pad(t["boxes"], (1, 0), value=i) for i, (_, t) in enumerate(rows)]
        return torch.stack([F.interpolate(x[None], (32, 32))[0] for x, _ in rows]), torch.cat(boxes)

    net = OneStage()
    net, steps, loader = prepare(net, optimizer(net.parameters()), DataLoader(Photos(), 3, collate_fn=collate))
    for images, targets in endless(loader):
        maps, image = net(images), targets[:, 0].long()
        at = [(targets[:, 1:3] / 64 * y.shape[-1]).long().clamp(max=y.shape[-1] - 1) for y in maps]
        rows = [y[image, :, place[:, 1], place[:, 0]] for y, place in zip(maps, at, strict=True)]
        yield update(steps, sum((row[:, :4] - targets[:, 1:] / 64).abs().mean() for row in rows))
