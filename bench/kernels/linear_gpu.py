"""python -m bench.kernels.linear_gpu [--quick]: the GPU's linears beside cuBLAS, after a check.

Times are of launches in a CUDA graph, each with another copy of the weight, so that none is in the L2
cache. Without --quick plans are searched for, and the best printed as `kernels.linear.plans` has them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
import torch.nn.functional as F

from bench.kernels.graph_timing import time_calls
from kernels.launch import ANY_INT
from kernels.linear.launches import Extras, Kernels, Stored
from kernels.linear.plans import TOKEN_TILES, Plan, StreamPlan, TilePlan, stream_plan, tile_plan
from kernels.linear.stream import stream_rows
from kernels.linear.tiles import tile_rows
from kernels.linear.triton import pack

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


def stream_plans() -> Iterator[StreamPlan]:
    for rows, block, stages, warps in (
        (8, 512, 4, 4),
        (8, 1024, 3, 4),
        (8, 1024, 1, 4),
        (16, 512, 4, 8),
        (4, 1024, 4, 4),
        (4, 1024, 1, 4),
        (2, 1024, 4, 4),
    ):
        for prefetch, wave in PREFETCHES:
            yield StreamPlan(rows, block, stages, warps, prefetch, wave)


def tile_plans(tokens: int, rows: int, size: int) -> Iterator[TilePlan]:
    shapes = {
        16: ((64, 128, 4, 4), (64, 128, 6, 4), (64, 256, 3, 4), (32, 256, 4, 2), (16, 256, 4, 1)),
        32: ((64, 128, 4, 4), (64, 256, 3, 4), (128, 128, 4, 4)),
        64: ((64, 128, 4, 4), (128, 128, 3, 4), (128, 128, 4, 8)),
    }
    for height, block, stages, warps in shapes[tokens]:
        for splits in (1, 2, 4, 8):
            tiles = -(-rows // height) * splits
            is_fit = size % (splits * block) == 0 and (splits == 1 or tiles <= 1100)
            if is_fit and tiles >= 60:
                for prefetch, wave in ((0, 0), (256, 264 // splits)):
                    yield TilePlan(
                        height, block, stages, warps, splits, prefetch=prefetch, wave=wave
                    )


def compile_plan(job: tuple[Plan, int, int]) -> None:
    """Into Triton's cache on the disk, from where the measuring process takes it."""
    plan, size, tokens = job  # every rows are a multiple of the plan's
    options = {"num_warps": plan.warps, "num_stages": 3, "launch_pdl": True}
    if isinstance(plan, StreamPlan):
        types = (BF16, None, BF16, None, None, None, BF16)
        shape = (size, plan.rows, plan.block, plan.stages)
        constants = (*shape, True, min(plan.prefetch, size), plan.wave, False, True)
        stream_rows.warmup(*types, ANY_INT, 0.5, *constants, grid=(1, 1, 1), **options)
        return
    parts = torch.float32 if plan.splits > 1 else None
    tile_types = (BF16, None, BF16, None, None, None, BF16, parts, torch.int32)
    tile_shape = (size, tokens, plan.rows, plan.block, plan.stages, plan.splits, 1)
    prefetch = min(plan.prefetch, size // plan.splits)
    flags = (True, False, prefetch, plan.wave, False, True)
    tile_rows.warmup(*tile_types, ANY_INT, ANY_INT, *tile_shape, *flags, grid=(1, 1, 1), **options)


class Case:
    """A linear with as many copies of its weight as the L2 cache cannot hold."""

    def __init__(self, rows: int, size: int) -> None:
        self.rows, self.size = rows, size
        copies = max(2, round(ROTATED_BYTES / (2 * rows * size)))
        self.weights = [
            torch.randn(rows, size, device="cuda").mul_(size**-0.5).to(BF16) for _ in range(copies)
        ]
        self.kernels = Kernels(rows, torch.device("cuda"))

    def run(self, plan: Plan, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = x.new_empty((x.shape[0], self.rows))
        stored = Stored(weight=weight)
        self.kernels.run(stored, x, out, Extras(), plan)
        return out

    def check(self, plan: Plan, tokens: int) -> None:
        x = torch.randn(tokens, self.size, device="cuda").to(BF16)
        exact = x.float() @ self.weights[0].float().t()
        error = (self.run(plan, x, self.weights[0]).float() - exact).norm() / exact.norm()
        assert error < 4e-3, f"{plan} [{tokens}, {self.rows}, {self.size}]: error {error:.1e}"

    def time(self, plan: Plan | None, tokens: int, rounds: int = 5) -> float:
        """Microseconds a call; None: cuBLAS."""
        x = torch.randn(tokens, self.size, device="cuda").to(BF16)
        if plan is None:
            calls = [lambda w=w: F.linear(x, w) for w in self.weights]
        else:
            calls = [lambda w=w: self.run(plan, x, w) for w in self.weights]
        return time_calls(calls, rounds=rounds)

    def speed(self, microseconds: float) -> float:
        """TB/s of the weight."""
        return 2 * self.rows * self.size / microseconds / 1e6


def candidates(rows: int, size: int, tokens: int) -> list[Plan]:
    if tokens == 1:
        return list(stream_plans())
    return list(tile_plans(tokens, rows, size))


def search() -> dict[tuple[int, int, int], Plan | None]:
    """The fastest plan by (rows, columns, 1 or token tile). Prints the first few of each."""
    shapes = [(n, k) for model in MODELS.values() for n, k, _ in model.values()]
    tiles = (1, *TOKEN_TILES)
    begin = time.perf_counter()
    jobs = {(plan, k, t) for n, k in shapes for t in tiles for plan in candidates(n, k, t)}
    with ProcessPoolExecutor(15, get_context("spawn")) as pool:
        list(pool.map(compile_plan, sorted(jobs, key=repr), chunksize=4))
    print(f"compiled {len(jobs)} kernels in {time.perf_counter() - begin:.0f} s", flush=True)
    best: dict[tuple[int, int, int], Plan | None] = {}
    for n, k in dict.fromkeys(shapes):
        case = Case(n, k)
        for tile in tiles:
            tokens = 8 if tile == 16 else tile
            times: list[tuple[float, Plan]] = []
            for plan in candidates(n, k, tile):
                try:
                    case.check(plan, tokens)
                    times.append((case.time(plan, tokens, rounds=3), plan))
                except Exception as error:
                    print(f"  left out {plan}: {str(error)[:90]}")
            times.sort(key=lambda entry: entry[0])
            library = case.time(None, tokens)
            best[n, k, tile] = times[0][1] if tile == 1 or times[0][0] < library else None
            shown = "; ".join(
                f"{t:.1f} us {case.speed(t):.2f} TB/s {p}" for t, p in times[:3] + times[-1:]
            )
            print(f"[{n}, {k}] x {tokens}: cuBLAS {library:.1f} us; {shown}", flush=True)
    print(f"searched in {time.perf_counter() - begin:.0f} s")
    print("STREAM = {")
    for (n, k, tile), chosen in best.items():
        if tile == 1:
            print(f"    ({n}, {k}): {chosen},")
    print("}\nTILES = {")
    for (n, k, tile), chosen in best.items():
        if tile != 1:
            print(f"    ({n}, {k}, {tile}): {chosen},")
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


def show_table(best: dict[tuple[int, int, int], Plan | None]) -> None:
    print(f"us a call and TB/s of the weight: ours / cuBLAS; M = {TOKENS}")
    for model, linears in MODELS.items():
        sums = {tokens: [0.0, 0.0] for tokens in TOKENS}
        for name, (n, k, count) in linears.items():
            case, cells = Case(n, k), []
            for tokens in TOKENS:
                tile = 1 if tokens == 1 else next((t for t in TOKEN_TILES if tokens <= t), 0)
                found = best.get((n, k, tile))
                if not best and tile:
                    found = (
                        stream_plan(n, k, "plain") if tile == 1 else tile_plan(n, k, tile, "plain")
                    )
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
                f"cuBLAS {library / 1e3:.3f} ms; floor at 4.3 TB/s {total / 4.3e9:.3f} ms"
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="the plans as they are, no search")
    quick = parser.parse_args().quick
    torch.manual_seed(int(time.time()))
    check_packed()
    show_table({} if quick else search())
