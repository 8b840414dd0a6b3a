from __future__ import annotations

import pytest
import torch

from kernels.merge_state import merge_state

IMPLEMENTATIONS = ["reference", "triton"]


def attend(scores: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """scores [T, h, n], values [h, n, d]: the attention and its lse, in float64."""
    out = torch.einsum("thn,hnd->thd", scores.softmax(-1), values)
    return out, scores.logsumexp(-1)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("split", [1, 20, 39])
@pytest.mark.parametrize(("tokens", "heads", "dim"), [(1, 8, 128), (5, 3, 80), (33, 2, 64)])
def test_two_parts_are_the_whole(
    implementation, split, tokens, heads, dim, library_for, device_for
):
    library_for(implementation)
    device = device_for(implementation)
    torch.manual_seed(tokens * dim + split)
    scores = torch.randn(tokens, heads, 40, dtype=torch.float64) * 6
    values = torch.randn(heads, 40, dim, dtype=torch.float64)
    sides = [
        part.float().contiguous().to(device)
        for span in (slice(None, split), slice(split, None))
        for part in attend(scores[..., span], values[:, span])
    ]
    out, lse = merge_state(*sides, implementation=implementation)
    exact_out, exact_lse = attend(scores, values)
    torch.testing.assert_close(out.cpu(), exact_out.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.cpu(), exact_lse.float(), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_an_empty_side_is_not_looked_at(implementation, library_for, device_for):
    library_for(implementation)
    device = device_for(implementation)
    out_a = torch.tensor([1.0, torch.nan, 3.0, torch.nan], device=device).expand(2, 2, 4)
    out_a = out_a.permute(2, 0, 1).reshape(4, 2, 2).contiguous()  # token i holds value i
    out_b = torch.full((4, 2, 2), 5.0, device=device)
    out_b[0] = torch.inf
    out_b[3] = torch.nan
    nothing = float("-inf")
    lse_a = torch.tensor([700.0, nothing, -700.0, nothing], device=device)
    lse_b = torch.tensor([nothing, -3.0, -700.0, nothing], device=device)
    lse_a, lse_b = (lse[:, None].repeat(1, 2) for lse in (lse_a, lse_b))
    out, lse = merge_state(out_a, lse_a, out_b, lse_b, implementation=implementation)
    torch.testing.assert_close(out[:, 0, 0].cpu(), torch.tensor([1.0, 5.0, 4.0, 0.0]))
    assert (out == out[:, :1, :1]).all()
    wanted = torch.tensor([700.0, -3.0, -700 + 0.6931472, nothing])
    torch.testing.assert_close(lse[:, 1].cpu(), wanted)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_order_of_the_sides_changes_nothing(implementation, library_for, device_for):
    library_for(implementation)
    torch.manual_seed(1)
    device = device_for(implementation)
    out_a, out_b = torch.randn(2, 9, 2, 16, device=device).bfloat16()
    lse_a, lse_b = torch.randn(2, 9, 2, device=device)
    one = merge_state(out_a, lse_a, out_b, lse_b, implementation=implementation)
    other = merge_state(out_b, lse_b, out_a, lse_a, implementation=implementation)
    assert one[0].dtype == torch.bfloat16
    assert torch.equal(one[1], other[1])
    torch.testing.assert_close(one[0].float(), other[0].float(), rtol=8e-3, atol=1e-6)


def test_refusals():
    out, lse = torch.zeros(2, 3, 4), torch.zeros(2, 3)
    with pytest.raises(ValueError, match="lse_b must have shape"):
        merge_state(out, lse, out, lse[:1])
    with pytest.raises(ValueError, match="lse_a must be torch.float32"):
        merge_state(out, lse.double(), out, lse)
    with pytest.raises(ValueError, match="out_b must be torch.float32"):
        merge_state(out, lse, out.half(), lse)
    with pytest.raises(ValueError, match="implementation must be one of"):
        merge_state(out, lse, out, lse, implementation="cuda")
