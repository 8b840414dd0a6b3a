from __future__ import annotations

import pytest
import torch

from kernels.rms_norm import add_rms_norm, rms_norm

BF16 = torch.bfloat16


@pytest.mark.parametrize("implementation", ["torch", "native"])
@pytest.mark.parametrize(("tokens", "size"), [(1, 576), (3, 33), (33, 80), (130, 577), (0, 64)])
def test_close_to_float32(implementation, tokens, size, library_for):
    library = library_for(implementation)
    torch.manual_seed(tokens * size)
    x, residual = torch.randn(2, tokens, size).mul_(3).to(BF16)
    weight = torch.rand(size).add_(0.5).to(BF16)

    found = rms_norm(x, weight, 1e-5, implementation=implementation, library=library)
    exact = rms_norm(x.float(), weight.float(), 1e-5, implementation="reference")
    torch.testing.assert_close(found.float(), exact, rtol=8e-3, atol=1e-6)

    total = (x.float() + residual.float()).to(BF16)
    normed, new_residual = add_rms_norm(
        x, residual.clone(), weight, 1e-5, implementation=implementation, library=library
    )
    assert torch.equal(new_residual, total)
    exact = rms_norm(total.float(), weight.float(), 1e-5, implementation="reference")
    torch.testing.assert_close(normed.float(), exact, rtol=8e-3, atol=1e-6)


@pytest.mark.parametrize("implementation", ["reference", "torch", "native"])
def test_zero_rows_stay_zero(implementation, library_for):
    found = rms_norm(
        torch.zeros(2, 48, dtype=BF16),
        torch.ones(48, dtype=BF16),
        1e-5,
        implementation=implementation,
        library=library_for(implementation),
    )
    assert torch.equal(found, torch.zeros(2, 48, dtype=BF16))


def test_rows_do_not_depend_on_the_batch(library_for):
    library = library_for("native")
    torch.manual_seed(5)
    x, weight = torch.randn(200, 576).to(BF16), torch.randn(576).to(BF16)
    whole = rms_norm(x, weight, 1e-6, implementation="native", library=library)
    for t in (0, 17, 199):
        alone = rms_norm(x[t : t + 1], weight, 1e-6, implementation="native", library=library)
        assert torch.equal(alone[0], whole[t])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.zeros(4)}, "x must have shape"),
        ({"weight": torch.zeros(3)}, "weight must have shape"),
        ({"implementation": "cuda"}, "implementation must be one of"),
        ({"implementation": "native"}, "native_build"),
        ({"implementation": "native", "x": torch.zeros(2, 4)}, "x is torch.float32"),
    ],
)
def test_refusals(change, words):
    arguments = {"x": torch.zeros(2, 4, dtype=BF16), "weight": torch.ones(4, dtype=BF16)} | change
    with pytest.raises(ValueError, match=words):
        rms_norm(eps=1e-5, **arguments)
