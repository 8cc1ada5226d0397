"""Small nets, by name with weights that depend on a seed alone. Images are 3x8x8 unless a net has a `shape`."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convoy import register_layer
from tests.support.torch_seed import torch_seed

CLASSES = 5

# --- usual convolutional nets


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


# --- features that a distributed run can get wrong


class Frozen(nn.Module):
    """A net with parameters without a gradient: a whole first layer, and a bias in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.net = TwoConv()
        self.net.conv1.requires_grad_(False)
        self.net.fc.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Auxiliary(nn.Module):
    """A net with two outputs, one unused by the loss, and a parameter that no layer reads."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, padding=1)
        self.conv2 = nn.Conv2d(6, 4, 3, padding=1)
        self.fc = nn.Linear(4 * 16, CLASSES)
        self.aux = nn.Linear(6 * 16, CLASSES)
        self.nobody = nn.Parameter(torch.ones(2, 3))
        self.register_buffer("unread", torch.arange(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        return self.fc(self.conv2(x).flatten(1)), self.aux(x.flatten(1))


class Bare(nn.Module):
    """A net with parameters outside modules, on splittable channels; two are added before anything else."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, padding=1)
        self.conv2 = nn.Conv2d(6, 6, 3, padding=1)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 6))
        self.shift_a = nn.Parameter(torch.linspace(-0.5, 0.5, 6).view(6, 1, 1))
        self.shift_b = nn.Parameter(torch.linspace(0.3, -0.3, 6).view(6, 1, 1))
        self.fc = nn.Linear(6, CLASSES)
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("mean", torch.tensor([0.1, -0.2, 0.3]).view(1, 3, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.conv1(x - self.mean) * self.scale.view(1, -1, 1, 1))
        x = (self.shift_a + self.shift_b) + self.conv2(x)
        return self.fc(F.gelu(x).mean(dim=(2, 3))) / self.temperature


class Tied(nn.Module):
    """A net that calls a convolution and a batch norm twice, and shares one weight between two Linears."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.again = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.fc1 = nn.Linear(4, 4)
        self.fc2 = nn.Linear(4, 4)
        self.fc2.weight = self.fc1.weight
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        x = F.relu(self.norm(self.again(x)))
        x = F.relu(self.again(x)).mean((2, 3))
        return self.head(torch.tanh(self.fc2(torch.tanh(self.fc1(x)))))


class InPlace(nn.Module):
    """A net that overwrites values and reads them again under their old names."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, padding=1)
        self.conv2 = nn.Conv2d(6, 6, 3, padding=1)
        self.conv3 = nn.Conv2d(6, 6, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.fc = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        a = self.conv1(x)
        b = self.conv2(self.relu(a))
        b += a  # a is what the ReLU left
        c = self.conv3(b)
        c.mul_(0.5)
        d = F.relu(c.sub_(0.1), True)
        return self.fc((c * 0.5 + d).mean((2, 3)))  # c and d are one tensor


class Dropouts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.drop2d = nn.Dropout2d(0.25)
        self.fc1 = nn.Linear(6 * 16, 8)
        self.drop = nn.Dropout(0.5)
        self.fc2 = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop2d(F.max_pool2d(F.relu(self.conv(x)), 2)).flatten(1)
        x = F.dropout(F.relu(self.fc1(x)), 0.1, self.training)
        return self.fc2(self.drop(x))


class PerSample(nn.Module):
    """A module whose forward looks at each sample's numbers, so torch.fx cannot trace it; some parameters go unused."""

    def __init__(self) -> None:
        super().__init__()
        self.bright = nn.Conv2d(6, 6, 1)
        self.dark = nn.Conv2d(6, 6, 1)
        self.never = nn.Conv2d(6, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        rows = []
        for sample in x:
            if float(sample.detach().sum()) > 1e9:
                rows.append(self.never(sample))
            else:
                rows.append(self.bright(sample) if float(sample.detach().sum()) > 0 else self.dark(sample))
        return torch.stack(rows)


class Declared(PerSample):
    """A `PerSample` module declared to treat each sample alone."""


register_layer(Declared, splits="samples")


class AroundInner(nn.Module):
    """A net with a module of choice between its convolution and its linear layer."""

    def __init__(self, inner: type[nn.Module] = PerSample) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.inner = inner()
        self.fc = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.relu(self.inner(self.conv(x))).mean((2, 3)))


class OpaqueWhole(nn.Module):
    """A net that torch.fx cannot trace."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.fc = nn.Linear(6, CLASSES)
        self.fc_dark = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv(x)).mean((2, 3))
        rows = [self.fc(v) if float(v.detach().sum()) > 1.0 else self.fc_dark(v) for v in x]
        return torch.stack(rows)


class Centre(nn.Module):
    """A module that subtracts the batch mean opaquely to torch.fx, optionally in training only."""

    def __init__(self, only_training: bool = False) -> None:
        super().__init__()
        self.only_training = only_training
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 6).view(6, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        if float(x.detach().abs().sum()) < 0 or (self.only_training and not self.training):
            return x * self.weight
        return (x - x.mean(0, keepdim=True)) * self.weight


class DependentSamples(nn.Module):
    def __init__(self, only_training: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, padding=1)
        self.centre = Centre(only_training)
        self.conv2 = nn.Conv2d(6, 4, 3, padding=1)
        self.fc = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.centre(self.conv1(x))
        return self.fc(F.relu(self.conv2(x)).mean((2, 3)))


class Average(nn.Module):
    """A module with a running average of its input in a buffer that its output uses."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(6, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and bool(x.detach().isfinite().all()):
            self.average.mul_(0.9).add_(0.1 * x.detach().mean((0, 2, 3)).view(6, 1, 1))
        return x - self.average


class OwnNorm(nn.BatchNorm2d):
    """A batch norm with a branch on numbers: no rule may treat it as an ordinary one, and no trace sees inside."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return F.relu(y) + 0.1 if bool(y.isfinite().all()) else y


class OwnNorms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = OwnNorm(6)
        self.fc = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.norm(self.conv(x)).mean((2, 3)))


class Sizes(nn.Module):
    """A net with numbers taken from shapes, the batch size among them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.fc1 = nn.Linear(6 * 16, 8)
        self.fc2 = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv(x)), 2)
        x = x.view(x.size(0), x.size(1) * x.size(2) * x.size(3)) * 7
        x = F.relu(self.fc1(x / x.size(0)))
        return self.fc2(x) + x.new_zeros(x.size(0), CLASSES)


class HalfBatch(nn.Module):
    """A net with a number that grows with the batch, but not in proportion."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.fc = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.relu(self.conv(x)).mean((2, 3)) * (x.size(0) // 2))


class NoGradient(nn.Module):
    """A net with branches without gradient: detached, under no_grad, and a boolean mask."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, padding=1)
        self.conv2 = nn.Conv2d(6, 6, 3, padding=1)
        self.watched = nn.Conv2d(3, 6, 3, padding=1)
        self.probe = nn.Linear(6, CLASSES)
        self.fc = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(x)
        h = h * (h > 0).to(h.dtype)
        with torch.no_grad():
            teacher = self.conv2(torch.sigmoid(h))
        y = self.conv2(h) + teacher
        seen = self.watched(x).detach().mean((2, 3))
        return self.fc(y.mean((2, 3))) + self.probe(seen) + self.fc(h.mean((2, 3))).detach()


class Negative(torch.autograd.Function):
    """The gradient reversal of domain adaptation."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:  # noqa: ARG004
        return x * 1.0

    @staticmethod
    def backward(ctx: object, g: Tensor) -> Tensor:  # noqa: ARG004
        return -g


class OwnBackward(nn.Module):
    """A function with its own backward: torch.fx sees only its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.fc = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(Negative.apply(F.relu(self.conv(x))).mean((2, 3)))


def _halved(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
    return output / 2


class Hooked(nn.Module):
    """A net with hooks on a layer, and a weight computed from others."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, padding=1)
        self.conv1.register_forward_hook(_halved)
        self.conv2 = torch.nn.utils.parametrizations.weight_norm(nn.Conv2d(6, 4, 3, padding=1))
        self.fc = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.relu(self.conv2(self.conv1(x))).mean((2, 3)))


def _twice(channels_in: int, channels: int) -> nn.Sequential:
    """Two 3x3 convolutions, each with batch norm and ReLU."""
    return nn.Sequential(
        *(nn.Conv2d(channels_in, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(inplace=True)),
        *(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(inplace=True)),
    )


class UNet(nn.Module):
    """Ronneberger et al. 2015, small: down by pooling, up by transposed convolutions, skips, a class for every pixel."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down1, self.down2 = _twice(3, width), _twice(width, 2 * width)
        self.bottom = _twice(2 * width, 4 * width)
        self.up2, self.join2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2), _twice(4 * width, 2 * width)
        self.up1, self.join1 = nn.ConvTranspose2d(2 * width, width, 2, stride=2), _twice(2 * width, width)
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Conv2d(width, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(self.pool(a))
        c = self.bottom(self.pool(b))
        b = self.join2(torch.cat([b, self.up2(c)], dim=1))
        a = self.join1(torch.cat([a, self.up1(b)], dim=1))
        return self.head(a)


class Thinking(nn.Module):
    """A module whose Python loop depends on each sample: at most five iterations until the answer is clear."""

    def __init__(self, width: int = 8, clear: float = 0.3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.think = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(2, width), nn.ReLU())
        self.head = nn.Linear(width, CLASSES)
        self.clear = clear

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.answer(sample)[0] for sample in x.split(1)])

    def answer(self, x: Tensor) -> tuple[Tensor, int]:
        """Return one sample's answer and its number of iterations."""
        y, thoughts = self.stem(x), 0
        answer = self.head(y.mean((2, 3)))
        while thoughts < 5 and float(answer.detach().softmax(1).max()) < self.clear:
            y, thoughts = y + self.think(y), thoughts + 1
            answer = self.head(y.mean((2, 3)))
        return answer, thoughts


NETS: dict[str, Callable[[], nn.Module]] = {
    "two-conv": TwoConv,
    "resnet": ResNet,
    "concatenation": Concatenation,
    "mobile": Mobile,
    "convolutions": Convolutions,
    "lopsided": Lopsided,
    "signal": Signal,
    "frozen-norm": FrozenNorm,
    "frozen": Frozen,
    "auxiliary": Auxiliary,
    "bare": Bare,
    "tied": Tied,
    "in-place": InPlace,
    "opaque-per-sample": lambda: AroundInner(Declared),
    "opaque-whole": OpaqueWhole,
    "dependent-samples": DependentSamples,
    "dependent-in-training": lambda: DependentSamples(only_training=True),
    "average": lambda: AroundInner(Average),
    "own-norm": OwnNorms,
    "sizes": Sizes,
    "half-batch": HalfBatch,
    "shuffle": Shuffle,
    "no-gradient": NoGradient,
    "own-backward": OwnBackward,
    "hooked": Hooked,
    "tokens": Tokens,
}
"""All but `Dropouts`, whose training is not that of one device."""


def build(name: str, seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Build a net whose weights depend on the seed only."""
    with torch_seed(seed):
        return NETS[name]().to(dtype)


def shape_of(model: nn.Module) -> tuple[int, ...]:
    """Return the shape of one input of a net."""
    return getattr(model, "shape", (3, 8, 8))
