"""The GPU's linears against the reference: here interpreted, on a GPU for real."""

from __future__ import annotations

import pytest
import torch

from kernels.linear import pack_linear
from kernels.rms_norm import rms_norm
from kernels.silu_mul import silu_mul
from tests.linear_cases import BF16, close, exactly, inputs

SHAPES = [(64, 128), (100, 200), (80, 1040)]
TOKENS = [0, 1, 2, 19, 40, 65]


@pytest.fixture
def device(device_for, library_for) -> str:
    library_for("triton")
    return device_for("triton")


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(("channels", "size"), SHAPES)
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
def test_is_the_reference(tokens, channels, size, out_dtype, device):
    x, weight, bias = inputs(tokens, channels, size, device)
    packed = pack_linear(weight, bias, out_dtype=out_dtype, implementation="triton")
    found = packed(x)
    assert found.dtype == (out_dtype or BF16) and found.shape == (tokens, channels)
    close(found, exactly(x, weight, bias))
    assert packed.bytes == weight.nbytes + bias.nbytes


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 5])
def test_other_dtypes(dtype, tokens, device):
    x, weight, _ = inputs(tokens, 64, 256, device, dtype)
    found = pack_linear(weight, implementation="triton")(x)
    torch.testing.assert_close(found.float(), exactly(x, weight), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("tokens", [1, 3, 33, 70])
@pytest.mark.parametrize(("channels", "size"), SHAPES)
def test_a_norm_before_and_a_residual_behind(tokens, channels, size, device):
    x, weight, _ = inputs(tokens, channels, size, device)
    norm = torch.rand(size, device=device).add_(0.5).to(BF16)
    residual = torch.randn(tokens, channels, device=device).to(BF16)
    packed = pack_linear(weight, implementation="triton")
    close(packed.normed(x, norm, 1e-5), exactly(rms_norm(x, norm, 1e-5), weight))
    summed = exactly(x, weight) + residual.float()
    found = packed.added(x, residual)
    close(found, summed)
    assert found.data_ptr() == residual.data_ptr()


@pytest.mark.parametrize("tokens", [1, 3, 33, 70])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("channels", "size"), SHAPES)
def test_gate_and_up_in_one(tokens, channels, size, with_bias, device):
    x, weight, bias = inputs(tokens, channels, size, device)
    bias = bias if with_bias else None
    packed = pack_linear(weight, bias, gated=True, implementation="triton")
    norm = torch.rand(size, device=device).add_(0.5).to(BF16)
    close(packed(x), silu_mul(exactly(x, weight, bias)))
    normed = rms_norm(x, norm, 1e-5)
    close(packed.normed(x, norm, 1e-5), silu_mul(exactly(normed, weight, bias)))


def test_gated_is_refused_elsewhere(device):
    weight = torch.zeros(4, 8, device=device)
    with pytest.raises(ValueError, match="gated is for implementation 'triton'"):
        pack_linear(weight, gated=True)


@pytest.mark.parametrize("quantization", [None, "fp8", "int4"])
@pytest.mark.parametrize("gated", [False, True])
def test_an_invariant_linear_gives_a_token_the_same_bits_in_any_company(
    quantization, gated, device
):
    x, weight, bias = inputs(150, 144, 1024, device)
    packed = pack_linear(
        weight,
        bias,
        quantization=quantization,
        gated=gated,
        invariant=True,
        implementation="triton",
    )
    whole = packed(x)
    for first, last in ((0, 1), (3, 5), (20, 40), (60, 120), (0, 70)):
        assert torch.equal(packed(x[first:last].contiguous()), whole[first:last])


@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
@pytest.mark.parametrize("gated", [False, True])
def test_a_few_tokens_in_one_stream(tokens, gated, device):
    """The kernel by itself: which numbers of tokens it is planned for is a matter of measurement."""
    from kernels.linear.launches import Extras, Kernels, Stored
    from kernels.linear.plans import StreamPlan

    x, weight, bias = inputs(tokens, 52, 200, device)
    norm = torch.rand(200, device=device).add_(0.5).to(BF16)
    residual = None if gated else torch.randn(tokens, 52, device=device).to(BF16)
    exact = exactly(rms_norm(x, norm, 1e-5), weight, bias)
    pairs = torch.cat((exact[:, ::2], exact[:, 1::2]), dim=1)
    exact = silu_mul(pairs) if residual is None else exact + residual.float()
    out = x.new_empty((tokens, 26 if gated else 52))
    extras = Extras(norm=(norm, 1e-5), residual=residual, gated=gated)
    stored = Stored(weight=weight, bias=bias)
    plan = StreamPlan(rows=8, block=64, stages=2, warps=4)
    Kernels(52, torch.device(device)).run(stored, x, out, extras, plan)
    close(out, exact, 3e-2 if gated else 1.5e-2)
