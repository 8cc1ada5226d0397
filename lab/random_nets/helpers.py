"""Functions and classes that random nets use by name; their source is copied into the net's file."""

from collections import namedtuple
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

# ruff: noqa: ARG001, ARG002, ARG004


def halve(module, inputs, output):
    return output * 0.5


def shift(module, inputs):
    return (inputs[0] + 0.1, *inputs[1:])


def scale_gradient(module, grad_input, grad_output):
    return tuple(None if g is None else g * 0.5 for g in grad_input)


def scale_output_gradient(module, grad_output):
    return tuple(None if g is None else g * 0.5 for g in grad_output)


def watch(module, inputs, output):
    module.seen = getattr(module, "seen", 0) + 1


def note(module, inputs, output):
    module.noted = getattr(module, "noted", 0.0) + float(output.detach().mean())


def count_arguments(module, args, kwargs, output):
    return output + 0.1 * len(args)


def centre(module, inputs, output):
    return output - output.mean(0, keepdim=True)


def damp(p):
    p.grad.mul_(0.5)


def halved(g):
    return g * 0.5


def bounded(g):
    return g / (1 + g.norm())


def halve_(t):
    t.mul_(0.5)


@torch.no_grad()
def frozen(layer, x):
    return layer(x)


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, g):
        return -0.5 * g


class Standardised(nn.Conv2d):
    def forward(self, x):
        w = self.weight
        w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5)
        return F.conv2d(x, w, self.bias, self.stride, self.padding, self.dilation, self.groups)


class NormAct(nn.BatchNorm2d):
    def forward(self, x):
        return F.silu(
            F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training, self.momentum)
        )


class Doubled(nn.ReLU):
    def forward(self, x):
        return super().forward(x) * 2


class Skipping(nn.Sequential):
    def forward(self, x):
        for layer in self:
            x = x + layer(x)
        return x


class Leaky(nn.Module):
    def __call__(self, x):
        return F.leaky_relu(x)


class Still(nn.Sequential):
    def train(self, mode=True):
        return super().train(False)


@dataclass
class Both:
    main: torch.Tensor
    other: object = None
    note: str = "a"


SCALE = {"value": 1.0}
Pair = namedtuple("Pair", "main other")
