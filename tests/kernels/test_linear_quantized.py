"""Linears with fp8 and int4 weights against what they mean; interpreted where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from kernels.linear import pack_linear
from kernels.linear.quantized import (
    pack_nibbles,
    quantize_fp8,
    quantize_int4,
    quantize_tokens,
    unpack_nibbles,
)
from kernels.rms_norm import rms_norm
from kernels.silu_mul import silu_mul
from tests.linear_cases import BF16, close, exactly, inputs


@pytest.fixture
def device(device_for, library_for) -> str:
    library_for("triton")
    return device_for("triton")


@pytest.mark.parametrize("tokens", [1, 3, 70])
@pytest.mark.parametrize(("channels", "size"), [(96, 528)])
def test_fp8_with_all_that_is_fused(tokens, channels, size, device):
    """One token: the weight's rounding is the only one; more: their activations are rounded too."""
    x, weight, bias = inputs(tokens, channels, size, device)
    residual = torch.randn(tokens, channels, device=device).to(BF16)
    norm = torch.rand(size, device=device).add_(0.5).to(BF16)
    stored = quantize_fp8(weight)
    wide = stored.dequantize(torch.float32)
    limit = 1.5e-2 if tokens == 1 else 4e-2 if device == "cuda" else 8e-2  # cut off
    packed = pack_linear(weight, bias, quantization="fp8", implementation="triton")
    close(packed(x), exactly(x, wide, bias), limit)
    assert packed.bytes == channels * (size + 4) + bias.nbytes
    packed = pack_linear(stored, implementation="triton")
    close(packed.normed(x, norm, 1e-5), exactly(rms_norm(x, norm, 1e-5), wide), limit)
    summed = exactly(x, wide) + residual.float()
    close(packed.added(x, residual), summed, limit)
    packed = pack_linear(stored, gated=True, implementation="triton")
    close(packed(x), silu_mul(exactly(x, wide)), 2 * limit)


@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("size", [64, 300])
def test_tokens_to_fp8(with_norm, size, device):
    torch.manual_seed(size)
    x = torch.randn(5, size, device=device).mul_(3).to(BF16)
    x[1] = 0
    norm = torch.rand(size, device=device).add_(0.5).to(BF16)
    from kernels.linear.quantize import bind

    found, scales = bind()(x, (norm, 1e-5) if with_norm else None)
    exact = rms_norm(x, norm, 1e-5).float() if with_norm else x.float()
    values, peaks = quantize_tokens(exact)
    torch.testing.assert_close(scales, peaks, rtol=1e-2, atol=0)
    assert not found[1].float().any() and scales[1] == 0
    again, wanted = found.float() * scales[:, None], values.float() * peaks[:, None]
    assert (again - wanted).norm() <= (3e-2 if device == "cuda" else 8e-2) * wanted.norm()


@pytest.mark.parametrize("quantization", ["fp8", "int4"])
@pytest.mark.parametrize("implementation", ["reference", "torch"])
def test_few_bits_on_the_cpu(quantization, implementation):
    x, weight, bias = inputs(5, 48, 256, "cpu")
    packed = pack_linear(weight, bias, quantization=quantization, implementation=implementation)
    wide = {"fp8": quantize_fp8, "int4": quantize_int4}[quantization](weight).dequantize(BF16)
    close(packed(x), exactly(x, wide, bias))
    error = (wide.float() - weight.float()).norm() / weight.float().norm()
    assert error < {"fp8": 0.03, "int4": 0.12}[quantization]


@pytest.mark.parametrize("tokens", [0, 1, 33, 70])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize(("channels", "size"), [(36, 384)])
def test_int4_with_all_that_is_fused(tokens, group, channels, size, device):
    x, weight, bias = inputs(tokens, channels, size, device)
    residual = torch.randn(tokens, channels, device=device).to(BF16)
    norm = torch.rand(size, device=device).add_(0.5).to(BF16)
    stored = quantize_int4(weight, group)
    wide = stored.dequantize(torch.float32)
    packed = pack_linear(stored, bias, implementation="triton")
    close(packed(x), exactly(x, wide, bias))
    assert packed.bytes == channels * (size // 2 + size // group * 3) + bias.nbytes
    packed = pack_linear(stored, implementation="triton")
    close(packed.normed(x, norm, 1e-5), exactly(rms_norm(x, norm, 1e-5), wide))
    summed = exactly(x, wide) + residual.float()
    close(packed.added(x, residual), summed)
    packed = pack_linear(stored, gated=True, implementation="triton")
    close(packed(x), silu_mul(exactly(x, wide)), 3e-2)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_nibbles_come_back(group):
    steps = torch.randint(0, 16, (5, 384), dtype=torch.uint8)
    packed = pack_nibbles(steps, group)
    assert packed.shape == (5, 192) and torch.equal(unpack_nibbles(packed, group), steps)


def test_int4_refusals():
    with pytest.raises(ValueError, match="groups of 48"):
        quantize_int4(torch.zeros(4, 96), 48)
    with pytest.raises(ValueError, match="needs a multiple of 128 columns, not 192"):
        quantize_int4(torch.zeros(4, 192), 64)
    with pytest.raises(ValueError, match="quantized already"):
        pack_linear(quantize_int4(torch.zeros(4, 128)), quantization="fp8")
