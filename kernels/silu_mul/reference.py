"""SwiGLU's gate in float32, rounded once: silu(gate) * up, silu(v) = v / (1 + exp(-v))."""

from __future__ import annotations

import torch


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)
