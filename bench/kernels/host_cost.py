"""python -m bench.kernels.host_cost: what the ops of an eager layer cost the host, in us a call.

Qwen3-0.6B's sizes and few tokens, so that the device is never what is waited for. A step that runs
eagerly cannot be shorter than the sum of these over its layers.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F

from bench.kernels.attention import Case, backends, make_case
from kernels import ops
from kernels.launch import launch_options
from kernels.rms_norm.triton import norm_rows
from srt.protocols.attention import AttentionBackend

TOKENS, HIDDEN, FFN = 128, 1024, 3072
HEADS, KV_HEADS, HEAD_DIM = 16, 8, 128
CALLS, ROUNDS = 200, 7
BF16 = torch.bfloat16


def host_microseconds(call: Callable[[], object]) -> float:
    """The best round: others were disturbed."""
    call()
    best = float("inf")
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        best = min(best, time.perf_counter() - begin)
    return best / CALLS * 1e6


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=BF16)


def pieces() -> Iterator[tuple[str, Callable[[], object]]]:
    """What a launch consists of, and what torch takes for the like."""
    x, weight, out = random(TOKENS, HIDDEN), random(HIDDEN), random(TOKENS, HIDDEN)
    yield "torch.empty_like", lambda: torch.empty_like(x)
    yield "x + x", lambda: x + x
    yield "torch.add(x, x, out=out)", lambda: torch.add(x, x, out=out)
    yield "F.rms_norm", lambda: F.rms_norm(x, (HIDDEN,), weight, 1e-6)
    options = launch_options(x.device)

    def through_triton() -> None:
        norm_rows[(TOKENS,)](x, x, weight, out, 1e-6, HIDDEN, HIDDEN, False, num_warps=4, **options)

    yield "a launch through Triton", through_triton
    constants = (HIDDEN, HIDDEN, False)
    form = norm_rows.warmup(*[BF16] * 4, 0.5, *constants, grid=(1,), num_warps=4, **options)
    stream = torch.cuda.current_stream().cuda_stream
    pointers = (x.data_ptr(), x.data_ptr(), weight.data_ptr(), out.data_ptr())
    arguments = (*pointers, 1e-6, *constants, True)
    grid, packed, nothing = (TOKENS, 1, 1), form.packed_metadata, (None, None, None)
    run = form.run
    yield (
        "a launch of a compiled form",
        lambda: run(*grid, stream, form.function, packed, *nothing, *arguments),
    )
    given = (run.launch_cooperative_grid, run.launch_pdl, None, None, packed, *nothing)
    yield (
        "a launch, nothing around it",
        lambda: run.launch(*grid, stream, form.function, *given, *arguments),
    )
    yield (
        "the same without the chain",
        lambda: run.launch(*grid, stream, form.function, False, False, *given[2:], *arguments),
    )


def layer() -> Iterator[tuple[str, Callable[[], object]]]:
    ours = ops.select("triton")
    x, weight, residual = random(TOKENS, HIDDEN), random(HIDDEN), random(TOKENS, HIDDEN)
    yield "rms_norm", lambda: ours.rms_norm(x, weight, 1e-6)
    yield "add_rms_norm", lambda: ours.add_rms_norm(x, residual, weight, 1e-6)
    gate_up = random(TOKENS, 2 * FFN)
    yield "silu_mul", lambda: ours.silu_mul(gate_up)
    width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    qkv, cos_sin = random(TOKENS, width), torch.rand(4096, HEAD_DIM, device="cuda")
    places = torch.arange(TOKENS, device="cuda")
    planes, (q_norm, k_norm) = random(2, 4096, KV_HEADS, HEAD_DIM), random(2, HEAD_DIM)
    heads = (HEADS, KV_HEADS, HEAD_DIM)
    where = (qkv, places, cos_sin, places, planes[0], planes[1])
    yield "rope_write_kv", lambda: ours.rope_write_kv(*where, *heads, q_norm, k_norm, 1e-6)
    wide = random(width, HIDDEN)
    yield "F.linear", lambda: F.linear(x, wide)
    packed = ours.pack_linear(wide)
    yield "a packed linear", lambda: packed(x)
    few = x[:8].contiguous()
    yield "a packed linear, 8 tokens", lambda: packed(few)
    case = make_case([0], [TOKENS], heads=HEADS, kv_heads=KV_HEADS, dim=HEAD_DIM, layers=1)
    for name, backend in backends().items():
        backend.plan(case.batch)
        yield f"attention, {name}", case.calls(backend)[0]
        yield f"plan and attention, {name}", partial(plan_and_run, backend, case)


def plan_and_run(backend: AttentionBackend, case: Case) -> None:
    backend.plan(case.batch)
    case.calls(backend)[0]()


def main() -> None:
    done = {}
    for group in (pieces(), layer()):
        for name, call in group:
            done[name] = host_microseconds(call)
            print(f"{name:32} {done[name]:8.1f} us", flush=True)
    print(json.dumps({"benchmark": "host_cost", "unit": "us", "cases": done}))


if __name__ == "__main__":
    main()
