from __future__ import annotations

import pytest
import torch

from kernels.rms_norm import add_rms_norm, rms_norm

BF16 = torch.bfloat16


@pytest.mark.parametrize("implementation", ["torch", "native", "triton"])
@pytest.mark.parametrize(("tokens", "size"), [(1, 576), (3, 33), (33, 80), (130, 577), (0, 64)])
def test_close_to_float32(implementation, tokens, size, library_for, device_for):
    library, device = library_for(implementation), device_for(implementation)
    torch.manual_seed(tokens * size)
    x, residual = torch.randn(2, tokens, size, device=device).mul_(3).to(BF16)
    weight = torch.rand(size, device=device).add_(0.5).to(BF16)

    found = rms_norm(x, weight, 1e-5, implementation=implementation, library=library)
    exact = rms_norm(x.float(), weight.float(), 1e-5, implementation="reference")
    torch.testing.assert_close(found.float(), exact, rtol=8e-3, atol=1e-6)

    normed, new_residual = add_rms_norm(
        x, residual.clone(), weight, 1e-5, implementation=implementation, library=library
    )
    total = x.float() + residual.float()
    if (
        implementation == "triton" and device == "cpu"
    ):  # its interpreter cuts off, it does not round
        torch.testing.assert_close(new_residual.float(), total, rtol=2**-7, atol=0)
    else:
        assert torch.equal(new_residual, total.to(BF16))
    exact = rms_norm(new_residual.float(), weight.float(), 1e-5, implementation="reference")
    torch.testing.assert_close(normed.float(), exact, rtol=8e-3, atol=1e-6)


@pytest.mark.parametrize("implementation", ["reference", "torch", "native", "triton"])
def test_zero_rows_stay_zero(implementation, library_for, device_for):
    device = device_for(implementation)
    found = rms_norm(
        torch.zeros(2, 48, dtype=BF16, device=device),
        torch.ones(48, dtype=BF16, device=device),
        1e-5,
        implementation=implementation,
        library=library_for(implementation),
    )
    assert torch.equal(found.cpu(), torch.zeros(2, 48, dtype=BF16))


@pytest.mark.parametrize("implementation", ["native", "triton"])
def test_rows_do_not_depend_on_the_batch(implementation, library_for, device_for):
    chosen = {"implementation": implementation, "library": library_for(implementation)}
    torch.manual_seed(5)
    x, weight = torch.randn(200, 576).to(BF16), torch.randn(576).to(BF16)
    x, weight = (tensor.to(device_for(implementation)) for tensor in (x, weight))
    whole = rms_norm(x, weight, 1e-6, **chosen)
    for t in (0, 17, 199):
        alone = rms_norm(x[t : t + 1], weight, 1e-6, **chosen)
        assert torch.equal(alone[0], whole[t])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.zeros(4)}, "x must have shape"),
        ({"weight": torch.zeros(3)}, "weight must have shape"),
        ({"implementation": "cuda"}, "implementation must be one of"),
        ({"implementation": "native"}, "native_build"),
        ({"implementation": "native", "x": torch.zeros(2, 4)}, "x is torch.float32"),
        ({"implementation": "triton", "x": torch.zeros(4, 2).t()}, "x must be contiguous"),
    ],
)
def test_refusals(change, words):
    arguments = {"x": torch.zeros(2, 4, dtype=BF16), "weight": torch.ones(4, dtype=BF16)} | change
    with pytest.raises(ValueError, match=words):
        rms_norm(eps=1e-5, **arguments)
