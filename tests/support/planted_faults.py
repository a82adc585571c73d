"""A small net with one fault in its second block, for the tests of `sftkit explain`."""

import torch
from torch import nn


class Gated(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.up, self.down, self.fault, self.calls = nn.Linear(6, 10), nn.Linear(10, 6), fault, 0

    def forward(self, x):
        h = self.up(x)
        if self.fault == "breaks" and h.sum() > 1e9:
            h = h * 2
        if self.fault == "values":
            self.calls += 1
            h = h + self.calls
        if self.fault == "shapes" and x.shape[0] > 4:
            h = h * 1.1
        if self.fault == "differs" and torch.compiler.is_compiling():
            h = h * 1.01
        return self.down(h)


class Net(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.blocks = nn.ModuleList([Gated(None), Gated(fault)])

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


class Chain(nn.Module):
    """A product and a chain of elementwise operators. All sizes are multiples of 8, so that Inductor does not pad,
    which it would decide by a measurement.
    """

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return torch.tanh(torch.sin(self.linear(x)) * 2 + 1) * x


def made(fault):
    torch.manual_seed(0)
    return Net(fault), (torch.randn(5, 6),), (torch.randn(3, 6),)


def none():
    return made(None)


def breaks():
    return made("breaks")


def values():
    return made("values")


def shapes():
    return made("shapes")


def differs():
    return made("differs")


def nothing():
    return 1


def a_tensor_alone():
    return Net(None), torch.randn(5, 6)


def fails():
    raise ValueError("no data here")


def of_another_width():
    return Net(None), (torch.randn(5, 7),)


def chain():
    torch.manual_seed(0)
    return Chain(), (torch.randn(8, 16),), (torch.randn(24, 16),)
