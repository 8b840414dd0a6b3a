"""python -m bench.kernels.linear_large: products of many tokens, TFLOP/s of what the library offers.

TN: the weight [N, K] as it is stored. NN: stored [K, N]. halves: the tokens in two calls. lt: through
cuBLASLt. fp8: values and scales given; quantized: with the tokens' quantization before it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from bench.kernels.device import microseconds
from bench.kernels.linear_gpu import BF16, MODELS
from kernels.linear import quantize
from kernels.linear.fp8 import multiply
from kernels.linear.launches import Stored
from kernels.linear.quantized import quantize_fp8, quantize_tokens

TOKENS = (512, 1024, 2048, 4096, 8192)
COPIES = 3


def halves(x: torch.Tensor, weight: torch.Tensor) -> None:
    for half in x.chunk(2):
        F.linear(half, weight)


def quantized(x: torch.Tensor, stored: Stored, to_fp8: quantize.Quantize) -> None:
    multiply(*to_fp8(x, None), stored, BF16)


def measure(ways: dict[str, list[Callable[[], object]]], flops: float) -> str:
    shown = []
    for name, calls in ways.items():
        try:
            taken = microseconds(calls, rounds=3, at_least=6)
            shown.append(f"{name} {flops / taken / 1e6:.0f}")
        except RuntimeError as error:
            shown.append(f"{name} fails ({str(error).splitlines()[0][:60]})")
    return "  ".join(shown)


def show(name: str, rows: int, size: int) -> None:
    weights = [
        torch.randn(rows, size, device="cuda").mul_(size**-0.5).to(BF16) for _ in range(COPIES)
    ]
    turned = [weight.t().contiguous() for weight in weights]
    stored = [quantize_fp8(weight) for weight in weights]
    few = [Stored(weight=each.values, scale=each.scales) for each in stored]
    to_fp8 = quantize.bind()
    for tokens in TOKENS:
        x = torch.randn(tokens, size, device="cuda").to(BF16)
        residual = torch.randn(tokens, rows, device="cuda").to(BF16)
        values, scales = quantize_tokens(x)
        ways: dict[str, list[Callable[[], object]]] = {
            "TN": [partial(F.linear, x, weight) for weight in weights],
            "NN": [partial(torch.mm, x, weight) for weight in turned],
            "halves": [partial(halves, x, weight) for weight in weights],
            "+residual": [partial(residual.addmm_, x, weight.t()) for weight in weights],
            "fp8": [partial(multiply, values, scales, each, BF16) for each in few],
            "quantized": [partial(quantized, x, each, to_fp8) for each in few],
        }
        flops = 2.0 * tokens * rows * size
        torch.backends.cuda.preferred_blas_library("cublas")
        line = measure(ways, flops)
        torch.backends.cuda.preferred_blas_library("cublaslt")
        line += "  lt: " + measure({"TN": ways["TN"], "NN": ways["NN"]}, flops)
        print(f"{name} [{tokens}, {size}] x [{rows}, {size}]: {line}", flush=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    for model in ("Llama-8B", "Qwen3-14B", "Qwen3-0.6B"):
        for linear, (rows, size, _) in MODELS[model].items():
            if linear != "head":
                show(f"{model} {linear}", rows, size)
