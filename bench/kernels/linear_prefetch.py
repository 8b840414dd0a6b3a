# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
"""python -m bench.kernels.linear_prefetch: a linear behind a kernel that leaves the memory idle.

As the output projection stands behind attention of few keys: 64 blocks that wait four microseconds. What
does it gain to ask for more of the weight while they do?
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, globaltimer

from bench.kernels.device import microseconds
from bench.kernels.linear_gpu import BF16, MODELS, ROTATED_BYTES
from kernels.launch import Launcher
from kernels.linear.launches import Extras, Kernels, Stored
from kernels.linear.plans import Plan, few_plan

IDLE = 4000  # nanoseconds


@triton.jit
def wait_rows(out_ptr, nanoseconds, PDL: tl.constexpr):
    """out: [blocks]."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    begin = globaltimer()
    now = begin
    while now - begin < nanoseconds:
        now = globaltimer()
    tl.store(out_ptr + tl.program_id(0), (now - begin).to(tl.int32))


def show(name: str, rows: int, size: int, tokens: int) -> None:
    kernels, wait = Kernels(rows, torch.device("cuda")), Launcher(wait_rows)
    copies = max(2, round(ROTATED_BYTES / (2 * rows * size)))
    weights = [torch.randn(rows, size, device="cuda", dtype=BF16) for _ in range(copies)]
    x = torch.randn(tokens, size, device="cuda", dtype=BF16)
    residual = torch.zeros(tokens, rows, device="cuda", dtype=BF16)
    waited = torch.zeros(64, device="cuda", dtype=torch.int32)

    def idle() -> None:
        wait((64, 1, 1), (waited,), (IDLE,), ())

    def pair(plan: Plan, weight: torch.Tensor) -> None:
        idle()
        kernels.run(Stored(weight=weight), x, residual, Extras(residual=residual), plan)

    plan = few_plan(rows, size, tokens, "plain")
    assert plan is not None
    alone = microseconds([idle] * 16, rounds=5, at_least=16)
    shown = []
    for prefetch, wave in (
        (0, 0),
        (256, 264),
        (1024, 528),
        (2048, 1056),
        (4096, 2112),
        (9999, 9999),
    ):
        asked = replace(plan, prefetch=min(prefetch, size), wave=wave)
        calls: list[Callable[[], object]] = [partial(pair, asked, each) for each in weights]
        shown.append(f"{prefetch}/{wave} +{microseconds(calls, rounds=7, at_least=16) - alone:.2f}")
    print(f"{name} x {tokens}, waiting {alone:.2f} us:", "  ".join(shown), flush=True)


if __name__ == "__main__":
    for model, linears in MODELS.items():
        for linear in ("out", "qkv"):
            for tokens in (1, 16):
                rows, size, _ = linears[linear]
                if few_plan(rows, size, tokens, "plain") is not None:
                    show(f"{model} {linear}", rows, size, tokens)
