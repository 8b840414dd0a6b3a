"""python -m bench.kernels.linear_gpu [--quick] [--kind fp8]: the GPU's linears beside the library's.

Times are of launches in a CUDA graph, each with another copy of the weight, so that none is in the L2
cache. Without --quick plans are searched for, and the best printed as `kernels.linear.plans` has them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context

import torch
import torch.nn.functional as F

from bench.kernels.device import microseconds
from kernels.launch import ANY_FLOAT, ANY_INT
from kernels.linear.fp8 import multiply
from kernels.linear.gate import bind as bind_gate
from kernels.linear.int4 import Int4Linear
from kernels.linear.int4_kernels import int4_rows
from kernels.linear.launches import Extras, Kernels, Stored
from kernels.linear.plans import TOKEN_TILES, Plan, StreamPlan, TilePlan, few_plan
from kernels.linear.quantized import FP8, quantize_fp8, quantize_int4, quantize_tokens
from kernels.linear.stream import stream_rows
from kernels.linear.tiles import tile_rows
from kernels.linear.triton import pack

GROUP = 128
BF16 = torch.bfloat16
MODELS: dict[str, dict[str, tuple[int, int, int]]] = {  # rows, columns, how often in a step
    "Llama-8B": {
        "qkv": (6144, 4096, 32),
        "out": (4096, 4096, 32),
        "gate_up": (28672, 4096, 32),
        "down": (4096, 14336, 32),
        "head": (128256, 4096, 1),
    },
    "Qwen3-0.6B": {
        "qkv": (4096, 1024, 28),
        "out": (1024, 2048, 28),
        "gate_up": (6144, 1024, 28),
        "down": (1024, 3072, 28),
        "head": (151936, 1024, 1),
    },
    "Qwen3-14B": {
        "qkv": (7168, 5120, 40),
        "out": (5120, 5120, 40),
        "gate_up": (34816, 5120, 40),
        "down": (5120, 17408, 40),
        "head": (151936, 5120, 1),
    },
}
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PREFETCHES = ((0, 0), (1024, 528), (2048, 1056))  # columns, programs
ROTATED_BYTES = 260e6  # more than four times the L2 cache
ORDER = (1, 16, 2, 4, 32, 64, 128, 256)  # of TOKEN_TILES, in which they are searched
STREAMS = (
    (8, 512, 4, 4),
    (8, 1024, 3, 4),
    (8, 1024, 1, 4),
    (16, 512, 4, 8),
    (4, 1024, 4, 4),
    (4, 1024, 1, 4),
    (2, 1024, 4, 4),
)
FEW_STREAMS = (
    (8, 512, 4, 4),
    (4, 512, 4, 4),
    (4, 1024, 4, 4),
    (4, 1024, 3, 8),
    (2, 1024, 4, 4),
    (8, 1024, 3, 8),
)
TILES = {
    16: ((64, 128, 4, 4), (64, 128, 6, 4), (64, 256, 3, 4), (32, 256, 4, 2), (16, 256, 4, 1)),
    32: ((64, 128, 4, 4), (64, 256, 3, 4), (128, 128, 4, 4)),
    64: ((64, 128, 4, 4), (128, 128, 3, 4), (128, 128, 4, 8)),
    128: ((64, 64, 6, 4), (64, 128, 4, 4), (128, 64, 5, 8), (128, 128, 3, 8)),
    256: ((64, 64, 6, 4), (64, 64, 4, 8), (128, 64, 4, 8), (128, 128, 3, 8)),
}
ALIKE = {"down": "out"}  # names with the same things fused
Best = dict[tuple[int, int, int], Plan | None]


def stream_plans(kind: str, tokens: int) -> Iterator[StreamPlan]:
    if tokens > 1:
        for shape in FEW_STREAMS:
            yield StreamPlan(*shape)
        return
    for rows, block, stages, warps in STREAMS:
        if kind == "fp8" and stages > 1:
            yield StreamPlan(rows, block, stages + 2, warps)
        for prefetch, wave in PREFETCHES if kind == "plain" else PREFETCHES[:1]:
            yield StreamPlan(rows, block, stages, warps, prefetch, wave)


def tile_plans(kind: str, tokens: int, rows: int, size: int) -> Iterator[TilePlan]:
    for height, block, stages, warps in TILES[tokens]:
        if kind == "int4" and (warps < 4 or block != 128):
            continue
        wide = (128, 256) if tokens == 256 and block == 64 and warps == 8 else (min(tokens, 128),)
        if kind == "fp8":
            block *= 2
        for splits in (1, 2, 4, 8):
            tiles = -(-rows // height) * splits * -(-tokens // 128)
            is_fit = size % (splits * block) == 0 and (splits == 1 or tiles <= 1100)
            if is_fit and tiles >= 60 and (tokens <= 64 or tiles <= 540):
                for prefetch in (0, 256) if kind == "plain" else (0,):
                    wave = 264 // splits if prefetch else 0
                    shape = (height, block, stages, warps, splits)
                    for each in wide:
                        yield TilePlan(*shape, tokens=each, prefetch=prefetch, wave=wave)


def fused(name: str, plan: Plan) -> tuple[bool, bool, bool]:
    """What a step has done with a linear of that name: norm, residual, gate. Only a stream norms."""
    has_norm = name in ("qkv", "gate_up") and isinstance(plan, StreamPlan)
    return has_norm, name in ("out", "down"), name == "gate_up"


def candidates(kind: str, rows: int, size: int, tokens: int) -> list[Plan]:
    if tokens > 64 and (kind == "int4" or kind == "plain" and rows > 8192):
        return []
    if tokens >= 16:
        return list(tile_plans(kind, tokens, rows, size))
    if kind == "int4":
        return list(tile_plans(kind, 16, rows, size)) if tokens == 1 else []
    return list(stream_plans(kind, tokens))


def compile_plan(job: tuple[str, str, Plan, int, int]) -> None:
    """Into Triton's cache on the disk, from where the measuring process takes it."""
    name, kind, plan, size, tokens = job  # all numbers of rows are multiples of the plan's
    options = {"num_warps": plan.warps, "num_stages": 3, "launch_pdl": True, "grid": (1, 1, 1)}
    weight = FP8 if kind == "fp8" else BF16
    scale = torch.float32 if kind == "fp8" else None
    has_norm, has_residual, has_gate = fused(name, plan)
    norm, residual = BF16 if has_norm else None, BF16 if has_residual else None
    height = (plan.rows, plan.stages) if kind == "int4" else (plan.rows, plan.block, plan.stages)
    if isinstance(plan, StreamPlan):
        types = [BF16, norm, weight, scale, None, residual, BF16, *[ANY_INT] * 4, ANY_FLOAT]
        flags = [True, plan.late, has_gate, True]
        stream_rows.warmup(*types, size, tokens, *height, *flags, **options)
        return
    parts = torch.float32 if plan.splits > 1 else None
    rest = [None, residual, BF16, parts, torch.int32]
    cuts = [plan.tokens or max(tokens, 16), *height, plan.splits, 1]
    flags = [False, has_gate, True]
    if kind == "int4":
        read: list[torch.dtype | None] = [BF16, torch.uint8]
        constants = (size, GROUP, 64, *cuts, *flags)
        int4_rows.warmup(*read, *read, *rest, ANY_INT, ANY_INT, *constants, **options)
        return
    read = [weight, scale]
    constants = (size, *cuts, True, *flags)
    tile_rows.warmup(*read, *read, *rest, *[ANY_INT] * 4, *constants, **options)


class Case:
    """A linear with as many copies of its weight as the L2 cache cannot hold."""

    def __init__(self, name: str, kind: str, rows: int, size: int) -> None:
        self.name, self.kind, self.rows, self.size = name, kind, rows, size
        gated = name == "gate_up"
        self.bytes = {"plain": 2.0, "fp8": 1.0, "int4": 0.5 + 3 / GROUP}[kind] * rows * size
        self.plain: list[torch.Tensor] = []
        self.stored: list[Stored] = []
        self.int4: list[Int4Linear] = []
        for _ in range(max(2, round(ROTATED_BYTES / self.bytes))):
            weight = torch.randn(rows, size, device="cuda", dtype=BF16).mul_(size**-0.5)
            if kind == "int4":
                self.int4.append(Int4Linear(quantize_int4(weight, GROUP), None, None, gated=gated))
            elif kind == "fp8":
                values = quantize_fp8(weight)
                self.stored.append(Stored(weight=values.values, scale=values.scales))
            else:
                self.stored.append(Stored(weight=weight))
            if kind == "plain" or not self.plain:
                self.plain.append(weight)
        self.kernels, self.gate = Kernels(rows, torch.device("cuda")), bind_gate()
        self.norm = torch.ones(size, device="cuda", dtype=BF16), 1e-5

    def calls(self, plan: Plan | None, x: torch.Tensor) -> list[Callable[[], torch.Tensor]]:
        """One for each copy, with what is fused; None: the library's product, in bfloat16 for int4, and
        the gate behind it."""
        if plan is None and self.kind != "fp8":
            return [partial(self._library, x, weight) for weight in self.plain]
        if isinstance(plan, TilePlan) and self.kind == "int4":
            residual = self._residual(x) if self.name in ("out", "down") else None
            return [partial(each.run, x, residual, plan) for each in self.int4]
        values, scales = x, None
        if self.kind == "fp8" and not isinstance(plan, StreamPlan):
            values, scales = quantize_tokens(x)
            if plan is None:
                return [partial(multiply, values, scales, each, BF16) for each in self.stored]
        assert plan is not None
        has_norm, has_residual, has_gate = fused(self.name, plan)
        extras = Extras(
            norm=self.norm if has_norm else None,
            x_scale=scales,
            residual=self._residual(x) if has_residual else None,
            gated=has_gate,
        )
        return [partial(self._run, plan, values, extras, stored) for stored in self.stored]

    def _run(self, plan: Plan, x: torch.Tensor, extras: Extras, stored: Stored) -> torch.Tensor:
        channels = self.rows // 2 if extras.gated else self.rows
        out = torch.empty((x.shape[0], channels), dtype=BF16, device="cuda")
        self.kernels.run(stored, x, out, extras, plan)
        return out

    def _library(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, weight)
        return self.gate(y) if self.name == "gate_up" else y

    def _residual(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(x.shape[0], self.rows, device="cuda", dtype=BF16)

    def check(self, plan: Plan, tokens: int) -> None:
        """Norm and residual change nothing here: x is normed, the residual zero."""
        x = torch.randn(tokens, self.size, device="cuda", dtype=BF16)
        x = (x / x.float().square().mean(1, keepdim=True).sqrt()).to(BF16)
        exact = x.float() @ self.plain[0].float().t()
        if self.name == "gate_up":
            pairs = exact[:, ::2], exact[:, 1::2]
            exact = F.silu(pairs[0]) * pairs[1]
        error = (self.calls(plan, x)[0]().float() - exact).norm() / exact.norm()
        limit = {"plain": 8e-3, "fp8": 8e-2, "int4": 0.25}[self.kind]
        assert error < limit, f"{plan} [{tokens}, {self.rows}, {self.size}]: error {error:.1e}"

    def time(self, plan: Plan | None, tokens: int, rounds: int = 5) -> float:
        """Microseconds a call."""
        x = torch.randn(tokens, self.size, device="cuda", dtype=BF16)
        return microseconds(self.calls(plan, x), rounds=rounds, at_least=16)

    def speed(self, microseconds: float) -> float:
        """TB/s of the weight."""
        return self.bytes / microseconds / 1e6


def search(kind: str, shapes: list[tuple[str, int, int]], order: Sequence[int]) -> Best:
    """The fastest plan by (rows, columns, tokens of TOKEN_TILES). Prints the first few of each."""
    begin = time.perf_counter()
    jobs = {
        (ALIKE.get(name, name), kind, replace(plan, prefetch=0, wave=0), k, t)
        for name, n, k in shapes
        for t in order
        for plan in candidates(kind, n, k, t)
    }
    with ProcessPoolExecutor(15, get_context("spawn")) as pool:
        list(pool.map(compile_plan, sorted(jobs, key=repr), chunksize=4))
    print(f"compiled {len(jobs)} kernels in {time.perf_counter() - begin:.0f} s", flush=True)
    best: Best = {}
    for name, n, k in shapes:
        case = Case(name, kind, n, k)
        for tile in order:
            tokens = 8 if tile == 16 else tile
            times: list[tuple[float, Plan]] = []
            plans = candidates(kind, n, k, tile)
            tiled = best.get((n, k, 16))
            if tile in (2, 4) and tiled is not None:
                plans.append(tiled)
            for plan in plans:
                try:
                    case.check(plan, tokens)
                    times.append((case.time(plan, tokens, rounds=3), plan))
                except Exception as error:
                    print(f"  left out {plan}: {str(error)[:90]}")
            times.sort(key=lambda entry: entry[0])
            library = case.time(None, tokens)
            is_ours = times and (tile == 1 or times[0][0] < library)
            best[n, k, tile] = times[0][1] if is_ours else None
            shown = "; ".join(
                f"{t:.1f} us {case.speed(t):.2f} TB/s {p}" for t, p in times[:3] + times[-1:]
            )
            print(f"{name} [{n}, {k}] x {tokens}: library {library:.1f} us; {shown}", flush=True)
    print(f"searched in {time.perf_counter() - begin:.0f} s\n{kind.upper()}: Table = {{")
    for place, chosen in best.items():
        print(f"    {place}: {chosen},")
    print("}")
    return best


def check_packed() -> None:
    """What is packed, against float32, at the sizes that are served."""
    for rows, size in ((6144, 4096), (4096, 14336), (1024, 3072)):
        weight = torch.randn(rows, size, device="cuda").mul_(size**-0.5).to(BF16)
        for tokens in (*TOKENS, 3, 33):
            x = torch.randn(tokens, size, device="cuda").to(BF16)
            exact = x.float() @ weight.float().t()
            for wide in (None, torch.float32):
                found = pack(weight, None, wide)(x).float()
                error = (found - exact).norm() / exact.norm()
                assert error < 4e-3, f"[{tokens}, {rows}, {size}] {wide}: error {error:.1e}"
    print("packed linears are right")


def show_table(kind: str, best: Best) -> None:
    print(f"us a call and TB/s of the weight: ours / library; M = {TOKENS}")
    for model, linears in MODELS.items():
        sums = {tokens: [0.0, 0.0] for tokens in TOKENS}
        for name, (n, k, count) in linears.items():
            case, cells = Case(name, kind, n, k), []
            for tokens in TOKENS:
                tile = next((t for t in TOKEN_TILES if tokens <= t), 0)
                found = best.get((n, k, tile))
                if not best and tile:
                    found = few_plan(n, k, tile, kind)
                library = case.time(None, tokens)
                ours = library if found is None else case.time(found, tokens)
                sums[tokens][0] += count * min(ours, library)
                sums[tokens][1] += count * library
                speeds = f"{case.speed(ours):.2f}/{case.speed(library):.2f}"
                cells.append(f"{ours:.1f}/{library:.1f} {speeds}")
            print(f"{model} {name}:", " | ".join(cells), flush=True)
        total = sum(2 * n * k * count for n, k, count in linears.values())
        for tokens, (ours, library) in sums.items():
            print(
                f"{model} a step of {tokens}: {ours / 1e3:.3f} ms ({total / ours / 1e6:.2f} TB/s), "
                f"library {library / 1e3:.3f} ms; floor at 4.3 TB/s {total / 4.3e9:.3f} ms"
            )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="the plans as they are, no search")
    parser.add_argument("--kind", default="plain", choices=("plain", "fp8", "int4"))
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--tokens", type=int, nargs="+", default=ORDER, choices=ORDER,
                        help="plans are searched for")  # fmt: skip
    options = parser.parse_args()
    torch.manual_seed(int(time.time()))
    is_whole = tuple(options.tokens) == ORDER
    if options.kind == "plain" and is_whole:
        check_packed()
    every = [
        (name, n, k)
        for model in options.models
        for name, (n, k, _) in MODELS[model].items()
        if options.kind == "plain" or (name != "head" and model != "Qwen3-0.6B")
    ]
    found = {} if options.quick else search(options.kind, every, options.tokens)
    if options.kind == "plain" and is_whole:
        show_table(options.kind, found)


if __name__ == "__main__":
    main()
