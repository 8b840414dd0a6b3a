from __future__ import annotations

import pytest
import torch

from kernels.embedding import embed


@pytest.mark.parametrize("implementation", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tokens", "size"), [(1, 64), (9, 1500), (0, 8)])
def test_rows_by_token(implementation, dtype, tokens, size, library_for, device_for):
    library_for(implementation)
    device = device_for(implementation)
    torch.manual_seed(tokens)
    weight = torch.randn(50, size).to(dtype).to(device)
    token_ids = torch.randint(0, 50, (tokens,), device=device)
    found = embed(token_ids, weight, implementation=implementation)
    assert found.shape == (tokens, size) and found.dtype == dtype
    for row, token in zip(found, token_ids.tolist(), strict=True):
        assert torch.equal(row, weight[token])


def test_refusals():
    with pytest.raises(ValueError, match="token_ids must be torch.int64"):
        embed(torch.zeros(2, dtype=torch.int32), torch.zeros(3, 4))
    with pytest.raises(ValueError, match="weight must have shape"):
        embed(torch.zeros(2, dtype=torch.int64), torch.zeros(3))
    with pytest.raises(ValueError, match="implementation must be one of"):
        embed(torch.zeros(2, dtype=torch.int64), torch.zeros(3, 4), implementation="cuda")
