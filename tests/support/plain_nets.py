"""Small convolutional nets of the usual kinds. Images are 3x8x8 unless a net has a `shape`."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 5


class TwoConv(nn.Module):
    """A small version of the net in Marques' measurements."""

    def __init__(self, first: int = 5, second: int = 7) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, first, 5, padding=2)
        self.conv2 = nn.Conv2d(first, second, 3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.fc = nn.Linear(second * 4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        return self.fc(torch.flatten(x, 1))


class BasicBlock(nn.Module):
    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample = None
        if stride != 1 or channels_in != channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = BasicBlock(width, width, 1)
        self.layer2 = BasicBlock(width, 2 * width, 2)
        self.fc = nn.Linear(2 * width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)), inplace=True)
        x = self.layer2(self.layer1(x))
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Concatenation(nn.Module):
    """A net with two branches of different widths, then a block's input concatenated with its output."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Conv2d(3, 3, 1)
        self.wide = nn.Conv2d(3, 5, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.dense = nn.Conv2d(8, 4, 3, padding=1)
        self.fc = nn.Linear(12 * 16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.narrow(x), self.wide(x)], 1)
        x = F.relu(self.norm(x))
        x = torch.cat((x, self.dense(x)), dim=1)
        return self.fc(F.avg_pool2d(x, 2).flatten(1))


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down = nn.Conv2d(channels, 3, 1)
        self.up = nn.Conv2d(3, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        gate = F.adaptive_avg_pool2d(x, 1)
        return x * torch.sigmoid(self.up(F.relu(self.down(gate))))


class Mobile(nn.Module):
    """A MobileNet block: expand, depthwise with a multiplier, squeeze and excite, project, add."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.expand = nn.Sequential(nn.Conv2d(4, 6, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU6(inplace=True))
        self.depthwise = nn.Sequential(
            nn.Conv2d(6, 12, 3, padding=1, groups=6, bias=False), nn.BatchNorm2d(12), nn.Hardswish()
        )
        self.excite = SqueezeExcite(12)
        self.project = nn.Sequential(nn.Conv2d(12, 4, 1, bias=False), nn.BatchNorm2d(4))
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.project(self.excite(self.depthwise(self.expand(x))))
        return self.head(x.mean([2, 3]))


class Convolutions(nn.Module):
    """A net with every form of convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.same = nn.Conv2d(3, 6, 3, padding="same", dilation=2)
        self.grouped = nn.Conv2d(6, 8, 3, padding=1, groups=2)
        self.strided = nn.Conv2d(8, 6, 3, stride=2, padding=1, bias=False)
        self.square = nn.Conv2d(6, 5, 1)
        self.multiplied = nn.Conv2d(5, 10, 3, padding=1, groups=5, bias=False)
        self.circular = nn.Conv2d(10, 4, 3, padding=1, padding_mode="circular")
        self.valid = nn.Conv2d(4, 6, (3, 2), padding="valid")
        self.fc = nn.Linear(6 * 2 * 3, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.grouped(torch.tanh(self.same(x))))
        x = torch.tanh(self.multiplied(self.square(self.strided(x))))
        return self.fc(self.valid(self.circular(x)).flatten(1))


class Lopsided(nn.Module):
    """A net with 'same' padding that needs one more zero on one side."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, (3, 2), padding="same")
        self.fc = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.relu(self.conv(x)).mean((2, 3)))


class Signal(nn.Module):
    """A Conv1d and batch norm net over signals of 3x16, with features normalised before the last layer."""

    shape = (3, 16)

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(3, 6, 5, stride=2, padding=2, bias=False)
        self.bn1 = nn.BatchNorm1d(6, momentum=None)
        self.conv2 = nn.Conv1d(6, 4, 3, padding="same")
        self.bn2 = nn.BatchNorm1d(4, affine=False)
        self.fc1 = nn.Linear(4 * 4, 9)
        self.bn3 = nn.BatchNorm1d(9, track_running_stats=False)
        self.fc2 = nn.Linear(9, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.max_pool1d(self.bn2(self.conv2(x)), 2)
        x = self.fc1(x.reshape(x.shape[0], -1))
        return self.fc2(F.elu(self.bn3(x)))


class Shuffle(nn.Module):
    """ShuffleNet's unit: chunk, send one half through a branch, concatenate, shuffle the channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.branch = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1, groups=4))
        self.fc = nn.Linear(8 * 16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.stem(x).chunk(2, dim=1)
        x = torch.cat((a, self.branch(b)), dim=1)
        n, c, h, w = x.size(0), x.size(1), x.size(2), x.size(3)
        x = x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)
        x = torch.cat(x.chunk(4, 1)[1:] + x.chunk(4, 1)[:1], 1)
        return self.fc(F.max_pool2d(x, 2).flatten(1))


class Tokens(nn.Module):
    """A net of Linear layers on three axes, with a layer norm over the features."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 6, 4, stride=4)
        self.norm = nn.LayerNorm(6)
        self.fc1 = nn.Linear(6, 7)
        self.fc2 = nn.Linear(7, 6)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = x + self.fc2(F.gelu(self.fc1(self.norm(x))))
        return self.head(x.mean(1))


class FrozenNorm(nn.Module):
    """A net with batch norm in evaluation mode during training, as in fine-tuning."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.frozen = nn.BatchNorm2d(6)
        self.live = nn.BatchNorm2d(6)
        self.fc = nn.Linear(6, CLASSES)
        self.frozen.eval()
        nn.init.uniform_(self.frozen.running_mean, -1, 1)
        nn.init.uniform_(self.frozen.running_var, 0.5, 2)

    def train(self, mode: bool = True) -> "FrozenNorm":
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.relu(self.live(F.relu(self.frozen(self.conv(x))))).mean((-2, -1)))
