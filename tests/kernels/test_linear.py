from __future__ import annotations

import pytest
import torch

from kernels.linear import pack_linear
from kernels.linear.reference import quantize_rows

BF16 = torch.bfloat16
SHAPES = [(1, 960, 576), (3, 33, 80), (33, 100, 577), (8, 576, 1536), (13, 1, 30), (205, 64, 70)]


def inputs(tokens, channels, size, dtype=BF16):
    torch.manual_seed(tokens + channels + size)
    x = torch.randn(tokens, size).to(dtype)
    weight = torch.randn(channels, size).mul_(size**-0.5).to(dtype)
    return x, weight, torch.randn(channels).to(dtype)


@pytest.mark.parametrize("implementation", ["torch", "native"])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
@pytest.mark.parametrize(("tokens", "channels", "size"), SHAPES)
def test_bf16(implementation, with_bias, out_dtype, tokens, channels, size, library_for):
    library = library_for(implementation)
    x, weight, bias = inputs(tokens, channels, size)
    bias = bias if with_bias else None
    packed = pack_linear(
        weight, bias, out_dtype=out_dtype, implementation=implementation, library=library
    )
    found = packed(x)
    wide = None if bias is None else bias.float()
    exact = pack_linear(weight.float(), wide, implementation="reference")(x.float())
    assert found.dtype == (out_dtype or BF16) and found.shape == (tokens, channels)
    torch.testing.assert_close(found.float(), exact, rtol=8e-3, atol=8e-3)
    assert weight.nbytes <= packed.bytes


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("tokens", "channels", "size"), SHAPES)
def test_native_int8_is_the_formula(with_bias, tokens, channels, size, library_for):
    """Integer sums are exact, so only the last float32 products may differ."""
    library = library_for("native")
    x, weight, bias = inputs(tokens, channels, size)
    x[0] = 0
    arguments = {"quantization": "int8", "out_dtype": torch.float32}
    bias = bias if with_bias else None
    found = pack_linear(weight, bias, implementation="native", library=library, **arguments)(x)
    exact = pack_linear(weight, bias, implementation="reference", **arguments)(x)
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", ["reference", "torch", "native"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_int8_is_near_the_unquantized(implementation, dtype, library_for):
    if implementation == "native" and dtype == torch.float32:
        pytest.skip("native is bfloat16 only")
    library = library_for(implementation)
    x, weight, bias = inputs(9, 96, 576, dtype)
    packed = pack_linear(
        weight, bias, quantization="int8", implementation=implementation, library=library
    )
    exact = x.float() @ weight.float().T + bias.float()
    error = (packed(x).float() - exact).norm() / exact.norm()
    assert error < 0.02
    assert packed.bytes < 1.1 * weight.numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_torch_takes_other_dtypes(dtype):
    x, weight, bias = inputs(5, 40, 64, dtype)
    found = pack_linear(weight, bias, implementation="torch")(x)
    exact = x.float() @ weight.float().T + bias.float()
    torch.testing.assert_close(found.float(), exact, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_native_rows_do_not_depend_on_the_batch(quantization, library_for):
    library = library_for("native")
    x, weight, _ = inputs(205, 100, 576)
    packed = pack_linear(
        weight, quantization=quantization, implementation="native", library=library
    )
    whole = packed(x)
    for first, last in ((0, 1), (100, 107), (190, 205), (3, 36)):
        assert torch.equal(packed(x[first:last]), whole[first:last])


def test_quantization_rounds_to_even_and_keeps_zero_rows():
    matrix = torch.tensor([[127.0, 0.5, 1.5, -2.5], [0, 0, 0, 0]])
    values, scales = quantize_rows(matrix)
    assert values.tolist() == [[127, 0, 2, -2], [0, 0, 0, 0]]
    assert scales.tolist() == [1.0, 0.0]


def test_refusals(library_for):
    weight = torch.zeros(4, 8)
    with pytest.raises(ValueError, match="quantization must be one of"):
        pack_linear(weight, quantization="int3")
    with pytest.raises(ValueError, match="bias must have shape"):
        pack_linear(weight, torch.zeros(3))
    with pytest.raises(ValueError, match="native_build"):
        pack_linear(weight.to(BF16), implementation="native")
    library = library_for("native")
    with pytest.raises(ValueError, match="weight is torch.float32"):
        pack_linear(weight, implementation="native", library=library)
    with pytest.raises(ValueError, match="out_dtype is torch.float16"):
        pack_linear(
            weight.to(BF16), out_dtype=torch.float16, implementation="native", library=library
        )
