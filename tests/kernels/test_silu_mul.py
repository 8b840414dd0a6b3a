from __future__ import annotations

import pytest
import torch

from kernels.silu_mul import silu_mul

BF16 = torch.bfloat16


@pytest.mark.parametrize("implementation", ["torch", "native", "triton"])
@pytest.mark.parametrize(("tokens", "size"), [(1, 1536), (3, 17), (33, 640), (0, 32)])
def test_close_to_float32(implementation, tokens, size, library_for, device_for):
    library = library_for(implementation)
    torch.manual_seed(tokens + size)
    gate_up = torch.randn(tokens, 2 * size).mul_(4).to(BF16).to(device_for(implementation))
    found = silu_mul(gate_up, implementation=implementation, library=library)
    exact = silu_mul(gate_up.float(), implementation="reference")
    assert found.shape == (tokens, size)
    torch.testing.assert_close(found.float(), exact, rtol=1.2e-2, atol=1e-6)


@pytest.mark.parametrize("implementation", ["reference", "torch", "native", "triton"])
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # Triton's interpreter
def test_extreme_gates(implementation, library_for, device_for):
    gates = torch.tensor([-3e38, -500.0, -88.5, -0.0, 0.0, 88.5, 500.0, 3e38], dtype=BF16)
    gate_up = torch.cat((gates, torch.ones(8, dtype=BF16)))[None].to(device_for(implementation))
    found = silu_mul(gate_up, implementation=implementation, library=library_for(implementation))
    exact = torch.nn.functional.silu(gates.double()).float()
    torch.testing.assert_close(found[0].float().cpu(), exact, rtol=8e-3, atol=1e-6)


def test_odd_columns_are_refused():
    with pytest.raises(ValueError, match="even number of columns"):
        silu_mul(torch.zeros(2, 5))
