"""A linear's inputs, what it gives exactly, and how near to that is near enough."""

from __future__ import annotations

import torch

from kernels.linear import pack_linear

BF16 = torch.bfloat16


def inputs(tokens, channels, size, device, dtype=BF16):
    torch.manual_seed(tokens + channels + size)
    x = torch.randn(tokens, size, device=device).to(dtype)
    weight = torch.randn(channels, size, device=device).mul_(size**-0.5).to(dtype)
    return x, weight, torch.randn(channels, device=device).to(dtype)


def exactly(x, weight, bias=None):
    bias = None if bias is None else bias.float()
    return pack_linear(weight.float(), bias, implementation="reference")(x.float())


def close(found, exact, limit=1.5e-2):
    """Within what rounding to bfloat16 costs; the interpreter cuts off instead."""
    assert found.shape == exact.shape
    assert (found.float() - exact).norm() <= limit * exact.norm()
