"""python -m bench.kernels.elementwise: the small Triton kernels on a GPU, each checked, then timed.

Per case: microseconds per launch within a CUDA graph, of ours and of the torch composition; the bytes
that must move, per second, and the part that is of what the simplest kernel moves. Few tokens measure
a launch, not memory.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from bench.kernels.device import memory_bandwidth, microseconds
from kernels import merge_state, ops, step_inputs
from kernels.ops import Ops

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
ROTATED_BYTES = 200 << 20  # of buffers in turn, several times the last cache
MAX_BUFFERS = 24
TOKENS = (1, 16, 256, 8192)
HIDDEN = (1024, 4096, 5120)  # Qwen3-0.6B, Llama-8B, Qwen3-14B
FFN = (3072, 14336, 17408)
HEADS = ((16, True, BF16), (32, False, BF16), (32, False, E4M3), (40, True, BF16))
KV_HEADS, HEAD_DIM, SLOTS, PAGE_SIZE = 8, 128, 16384, 16
HOST_LAUNCHES = 2000

Call = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    num_bytes: int  # that a launch must read and write
    make: Callable[[], tuple[Call, Call, Call]]  # on fresh data: ours, torch's, and a check of ours


def random(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def close(found: torch.Tensor, exact: torch.Tensor) -> None:
    loose = found.dtype == E4M3
    torch.testing.assert_close(
        found.float(), exact.float(), rtol=0.13 if loose else 8e-3, atol=2e-2
    )


def make_calls(
    run: Callable[[Ops], object], check: Callable[[Ops, Ops], None]
) -> tuple[Call, Call, Call]:
    ours, theirs, exact = (ops.select(name) for name in ("triton", "torch", "reference"))
    return partial(run, ours), partial(run, theirs), partial(check, ours, exact)


def rows(tokens: int, size: int) -> Case:
    def make() -> tuple[Call, Call, Call]:
        weight, token_ids = random(20000, size), torch.randint(0, 20000, (tokens,), device="cuda")

        def check(ours: Ops, exact: Ops) -> None:
            assert torch.equal(ours.embed(token_ids, weight), exact.embed(token_ids, weight))

        return make_calls(lambda each: each.embed(token_ids, weight), check)

    return Case(name=f"embed {tokens} x {size}", num_bytes=4 * tokens * size, make=make)


def norms(tokens: int, size: int) -> Case:
    def make() -> tuple[Call, Call, Call]:
        x, residual, weight = random(tokens, size), random(tokens, size), random(size)

        def run(each: Ops, residual: torch.Tensor = residual) -> tuple[torch.Tensor, torch.Tensor]:
            return each.add_rms_norm(x, residual, weight, 1e-6)

        def check(ours: Ops, exact: Ops) -> None:
            for one, other in zip(run(ours, residual.clone()), run(exact), strict=True):
                close(one, other)

        return make_calls(run, check)

    return Case(name=f"add_rms_norm {tokens} x {size}", num_bytes=8 * tokens * size, make=make)


def gates(tokens: int, size: int) -> Case:
    def make() -> tuple[Call, Call, Call]:
        x = random(tokens, 2 * size)
        return make_calls(
            lambda each: each.silu_mul(x),
            lambda ours, exact: close(ours.silu_mul(x), exact.silu_mul(x)),
        )

    return Case(name=f"silu_mul {tokens} x {size}", num_bytes=6 * tokens * size, make=make)


def rotations(tokens: int, heads: int, has_norms: bool, dtype: torch.dtype) -> Case:
    width = (heads + 2 * KV_HEADS) * HEAD_DIM

    def make() -> tuple[Call, Call, Call]:
        qkv = random(tokens, width)
        angles = torch.rand(8192, HEAD_DIM // 2, device="cuda") * 6.3
        cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
        positions = torch.randint(0, 8192, (tokens,), device="cuda")
        slots = torch.randperm(SLOTS, device="cuda")[:tokens]
        q_norm, k_norm = (random(HEAD_DIM) if has_norms else None for _ in range(2))

        def planes() -> torch.Tensor:
            return torch.zeros(2, SLOTS, KV_HEADS, HEAD_DIM, device="cuda").to(dtype)

        def run(each: Ops, planes: torch.Tensor) -> torch.Tensor:
            where = (positions, cos_sin, slots, planes[0], planes[1])
            return each.rope_write_kv(qkv, *where, heads, KV_HEADS, HEAD_DIM, q_norm, k_norm)

        def check(ours: Ops, exact: Ops) -> None:
            mine, right = planes(), planes()
            close(run(ours, mine), run(exact, right))
            close(mine, right)

        shared = planes()
        return make_calls(lambda each: run(each, shared), check)

    name = f"rope_write_kv {tokens} x {heads}+{KV_HEADS}" + ", normed" * has_norms
    written = heads * 2 + 2 * KV_HEADS * dtype.itemsize
    num_bytes = tokens * (2 * width + written * HEAD_DIM + 4 * HEAD_DIM + 16)
    return Case(name=name + ", e4m3" * (dtype == E4M3), num_bytes=num_bytes, make=make)


def steps(num: int) -> Case:
    ours, theirs = step_inputs.select("triton"), step_inputs.select("reference")

    def make() -> tuple[Call, Call, Call]:
        table = torch.randint(0, SLOTS, (513, 512), dtype=torch.int32, device="cuda")
        last = torch.randint(0, 99999, (513,), device="cuda")
        which = torch.randperm(513, device="cuda")[:num].int()
        starts = torch.randint(0, 8192, (num,), dtype=torch.int32, device="cuda")
        mine, right = torch.zeros(2, 3, num, dtype=torch.int64, device="cuda")

        def run(each: step_inputs.StepInputsOps, out: torch.Tensor) -> None:
            given = (which, starts, table, last, PAGE_SIZE)
            each.decode_inputs(*given, out[0], out[1], out[2])

        def check() -> None:
            run(ours, mine)
            run(theirs, right)
            assert torch.equal(mine, right)

        return partial(run, ours, mine), partial(run, theirs, right), check

    return Case(name=f"decode_inputs {num}", num_bytes=num * 44, make=make)


def merges(tokens: int) -> Case:
    ours, theirs = merge_state.select("triton"), merge_state.select("reference")

    def make() -> tuple[Call, Call, Call]:
        a, b = (random(tokens, 32, HEAD_DIM, dtype=torch.float32) for _ in range(2))
        lse_a, lse_b = (random(tokens, 32, dtype=torch.float32) for _ in range(2))

        def check() -> None:
            found, wanted = ours(a, lse_a, b, lse_b), theirs(a, lse_a, b, lse_b)
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)

        return partial(ours, a, lse_a, b, lse_b), partial(theirs, a, lse_a, b, lse_b), check

    return Case(name=f"merge_state {tokens} x 32", num_bytes=tokens * 32 * 12 * 129, make=make)


def cases() -> Iterator[Case]:
    for tokens in TOKENS:
        yield from (norms(tokens, size) for size in HIDDEN)
        yield from (gates(tokens, size) for size in FFN)
        yield from (rotations(tokens, *shape) for shape in HEADS)
    yield from (rows(tokens, 4096) for tokens in (1, 16, 8192))
    yield from (steps(num) for num in (1, 32, 256))
    yield from (merges(tokens) for tokens in (16, 4096))


def host_microseconds() -> float:
    """Of one launch of the smallest kernel, all Python included."""
    norm, x = ops.select("triton").rms_norm, random(1, 1024)
    weight = random(1024)
    norm(x, weight, 1e-6)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(HOST_LAUNCHES):
        norm(x, weight, 1e-6)
    taken = time.perf_counter() - begin
    torch.cuda.synchronize()
    return taken / HOST_LAUNCHES * 1e6


def main() -> None:
    torch.manual_seed(time.time_ns() % 2**32)
    measured = memory_bandwidth()
    host = host_microseconds()
    print(f"{torch.cuda.get_device_name()}: memory moves {measured / 1e12:.2f} TB/s; ", end="")
    print(f"the host takes {host:.1f} us for a launch")
    print(f"{'case':40} {'us':>8} {'torch us':>9} {'GB/s':>7} {'of that':>8}")
    done = {}
    for case in cases():
        num = max(2, min(MAX_BUFFERS, ROTATED_BYTES // max(case.num_bytes, 1)))
        made = [case.make() for _ in range(num)]
        made[0][2]()
        ours, theirs = (microseconds([each[side] for each in made]) for side in (0, 1))
        rate = case.num_bytes / (ours * 1e-6)
        print(
            f"{case.name:40} {ours:8.2f} {theirs:9.2f} {rate / 1e9:7.0f} {rate / measured:8.0%}",
            flush=True,
        )
        done[case.name] = {"us": ours, "torch_us": theirs, "bytes_per_s": rate}
    print(json.dumps({"benchmark": "elementwise", "memory": measured, "host": host, "cases": done}))


if __name__ == "__main__":
    main()
