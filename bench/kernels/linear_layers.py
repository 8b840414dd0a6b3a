"""python -m bench.kernels.linear_layers: a layer's linears in order, with what stands between them.

Microseconds a layer in a CUDA graph over eight layers of random weights, attention left out: norms, gate
and residual fused into our linears; as launches of their own around our linears; the same around cuBLAS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F

from bench.kernels.device import microseconds
from bench.kernels.linear_gpu import BF16, MODELS
from kernels import ops
from kernels.linear.triton import pack

LAYERS = 8
EPS = 1e-5
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def random_weight(rows: int, size: int) -> torch.Tensor:
    return torch.randn(rows, size, device="cuda").mul_(size**-0.5).to(BF16)


class Layer:
    """`forward` by one of three ways; the result of attention is `attended`, whatever q, k and v are."""

    def __init__(self, shapes: dict[str, tuple[int, int, int]], ways: ops.Ops) -> None:
        weights = {name: random_weight(*shapes[name][:2]) for name in shapes if name != "head"}
        self.weights, self.ops = weights, ways
        self.norms = torch.rand(2, shapes["qkv"][1], device="cuda").add_(0.5).to(BF16)
        self.linears = {name: pack(weight, None, None) for name, weight in weights.items()}
        self.gated = pack(weights["gate_up"], None, None, gated=True)

    def fused(self, h: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        self.linears["qkv"].normed(h, self.norms[0], EPS)
        h = self.linears["out"].added(attended, h)
        return self.linears["down"].added(self.gated.normed(h, self.norms[1], EPS), h)

    def apart(self, h: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        return self._apart(h, attended, self.linears)

    def library(self, h: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        calls = {name: partial(F.linear, weight=weight) for name, weight in self.weights.items()}
        return self._apart(h, attended, calls)

    def _apart(
        self,
        h: torch.Tensor,
        attended: torch.Tensor,
        linears: Mapping[str, Callable[[torch.Tensor], torch.Tensor]],
    ) -> torch.Tensor:
        linears["qkv"](self.ops.rms_norm(h, self.norms[0], EPS))
        x, h = self.ops.add_rms_norm(linears["out"](attended), h, self.norms[1], EPS)
        return h + linears["down"](self.ops.silu_mul(linears["gate_up"](x)))


def measure(model: str, ways: ops.Ops) -> None:
    shapes = MODELS[model]
    layers = [Layer(shapes, ways) for _ in range(LAYERS)]
    num_bytes = sum(2 * n * k for name, (n, k, _) in shapes.items() if name != "head")
    for tokens in TOKENS:
        attended = torch.randn(tokens, shapes["out"][1], device="cuda").to(BF16)
        start = torch.randn(tokens, shapes["qkv"][1], device="cuda").to(BF16)
        results, times = {}, {}
        for way in (Layer.fused, Layer.apart, Layer.library):
            h = start.clone()
            results[way.__name__] = way(layers[0], h, attended).float()
            calls = [partial(way, layer, h, attended) for layer in layers]
            times[way.__name__] = microseconds(calls, rounds=7, at_least=16)
        exact = results["library"]
        for name, found in results.items():
            error = (found - exact).norm() / exact.norm()
            assert error < 8e-3, f"{model} x {tokens}, {name}: error {error:.1e}"
        shown = "  ".join(
            f"{name} {t:.1f} us ({num_bytes / t / 1e6:.2f} TB/s)" for name, t in times.items()
        )
        print(f"{model} layer x {tokens}: {shown}", flush=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    for each in MODELS:
        measure(each, ops.select("triton"))
