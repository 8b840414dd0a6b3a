"""Linears at serving sizes beside the float32 product on the same device; the promises about bits."""

from __future__ import annotations

import pytest
import torch

from kernels.linear import FusedLinear, pack_linear
from kernels.linear.quantized import quantize_fp8, quantize_int4
from kernels.rms_norm import rms_norm
from kernels.silu_mul import silu_mul

BF16 = torch.bfloat16
SHAPES = [(4096, 14336), (1030, 2176)]
TOKENS = [1, 3, 17, 64, 65, 2048]
STORED = [None, "fp8", "int4"]


def make(rows: int, size: int) -> torch.Tensor:
    torch.manual_seed(rows + size)
    return torch.randn(rows, size, device="cuda").mul_(size**-0.5).to(BF16)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(BF16)


def meaning(weight: torch.Tensor, quantization: str | None) -> torch.Tensor:
    """The float32 weight that is multiplied with."""
    if quantization is None:
        return weight.float()
    quantize = quantize_fp8 if quantization == "fp8" else quantize_int4
    return quantize(weight).dequantize(torch.float32)


def assert_near(found: torch.Tensor, exact: torch.Tensor, quantization: str | None) -> None:
    """fp8: more than one token has its activations rounded to three bits of fraction too."""
    assert found.isfinite().all()
    error = (found.float() - exact).norm() / exact.norm()
    assert error < (5e-2 if quantization == "fp8" else 1e-2), error


@pytest.mark.parametrize("quantization", STORED)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(("rows", "size"), SHAPES)
def test_alone_and_with_all_that_is_fused(rows, size, tokens, quantization):
    weight, x, norm = make(rows, size), random(tokens, size), random(size).abs() + 0.5
    wide = meaning(weight, quantization)
    packed: FusedLinear = pack_linear(weight, quantization=quantization, implementation="triton")
    assert_near(packed(x), x.float() @ wide.t(), quantization)
    normed = rms_norm(x, norm, 1e-5, implementation="reference").float()
    assert_near(packed.normed(x, norm, 1e-5), normed @ wide.t(), quantization)
    residual = random(tokens, rows)
    exact = x.float() @ wide.t() + residual.float()
    assert_near(packed.added(x, residual), exact, quantization)
    gated = pack_linear(weight, quantization=quantization, gated=True, implementation="triton")
    exact = silu_mul(x.float() @ wide.t(), implementation="reference")
    assert_near(gated(x), exact, "fp8" if quantization else None)


@pytest.mark.parametrize("tokens", [1, 5, 40, 200])
def test_logits_keep_their_float32_sums(tokens):
    weight, x = make(50000, 2048), random(tokens, 2048)
    found = pack_linear(weight, out_dtype=torch.float32, implementation="triton")(x)
    exact = x.double() @ weight.double().t()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("quantization", STORED)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("rows", "size"), [(6144, 4096), (1030, 2176)])
def test_invariant_means_to_the_bit(rows, size, gated, quantization):
    packed = pack_linear(
        make(rows, size),
        quantization=quantization,
        gated=gated,
        invariant=True,
        implementation="triton",
    )
    x = random(1500, size)
    whole = packed(x)
    for first, last in ((0, 1), (7, 9), (100, 130), (500, 564), (500, 565), (0, 700), (1, 1500)):
        assert torch.equal(packed(x[first:last].contiguous()), whole[first:last]), (first, last)


@pytest.mark.parametrize("tokens", [1, 4, 16, 64])
@pytest.mark.parametrize("quantization", STORED)
def test_a_recorded_chain_gives_the_bits_of_the_eager_one(tokens, quantization):
    """Kernels overlap in the recording; none may read what the one before has not yet written."""
    norm = random(1024).abs() + 0.5
    options = {"quantization": quantization, "implementation": "triton"}
    layers = [
        (
            pack_linear(make(3072, 1024), gated=True, **options),
            pack_linear(make(1024, 1536), **options),
        )
        for _ in range(6)
    ]

    def run(h: torch.Tensor) -> torch.Tensor:
        for gate_up, down in layers:
            h = down.added(gate_up.normed(h, norm, 1e-5), h)
        return h

    start = random(tokens, 1024)
    eager = run(start.clone())
    held = start.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(held)
    for _ in range(20):
        held.copy_(start)
        graph.replay()
        assert torch.equal(out, eager)
