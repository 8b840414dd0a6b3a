"""python -m bench.kernels.attention_tune [--only narrow]: the tile shapes of the GPU's attention kernel,
each timed, for decodes, decodes from a cache of 8 bits (narrow), and prompts."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import torch

from bench.kernels.attention import (
    BF16,
    FP8,
    HEADS,
    KV_HEADS,
    PAGE_SIZE,
    Case,
    check,
    exact,
    make_case,
)
from bench.kernels.device import microseconds
from kernels.paged_attention.tiles import cut_tiles
from kernels.paged_attention.triton import Attention, TileShape, Work

DECODES = (
    *((1, 200), (1, 1000), (8, 200), (8, 1000), (32, 200), (32, 1000), (64, 1000)),
    *((128, 200), (128, 800), (256, 200), (256, 800)),
)
NARROW_DECODES = (
    *((1, 200), (1, 1000), (1, 4000), (8, 1000), (32, 200), (32, 1000), (64, 1000)),
    *((128, 200), (128, 800), (256, 200), (256, 800)),
)
KINDS = ("decode", "narrow", "prefill")
PREFILLS = ((1, 1024), (4, 2048))
SLOTS = 132 * 8  # programs beyond which a split is not tried


def tile(
    rows: int, block: int, warps: int, stages: int, *, early: bool = False, two_loops: bool = False
) -> TileShape:
    return TileShape(
        rows=rows,
        block=block,
        warps=warps,
        stages=stages,
        per_sm=0,
        least=block,
        early=early,
        two_loops=two_loops,
    )


def decode_shapes() -> Iterator[TileShape]:
    for block, warps, stages in (
        (64, 4, 2),
        (64, 4, 3),
        (64, 4, 4),
        (64, 2, 3),
        (64, 8, 3),
        (32, 4, 3),
        (32, 4, 4),
        (32, 2, 5),
        (128, 4, 2),
        (128, 4, 3),
        (128, 8, 3),
    ):
        yield tile(16, block, warps, stages)
    for block, stages in ((64, 2), (64, 3), (64, 4), (32, 4), (128, 2)):
        yield tile(64, block, 4, stages, two_loops=True)
    for block, warps in ((128, 8), (128, 4), (64, 4), (256, 8)):
        yield tile(16, block, warps, 2 if block > 64 else 3, early=True)


def narrow_shapes() -> Iterator[TileShape]:
    for block, warps, stages in (
        (64, 4, 3),
        (64, 4, 4),
        (64, 4, 5),
        (64, 2, 4),
        (128, 4, 2),
        (128, 4, 3),
        (128, 4, 4),
        (128, 8, 3),
    ):
        yield tile(16, block, warps, stages)
    for block, stages in ((64, 3), (64, 4), (128, 2), (128, 3)):
        yield tile(16, block, 4, stages, two_loops=True)
    yield tile(64, 64, 4, 3, two_loops=True)
    for block, warps in ((128, 8), (128, 4), (64, 4), (256, 8)):
        yield tile(16, block, warps, 2, early=True)


def long_shapes() -> Iterator[TileShape]:
    for rows, block, warps, stages in (
        (128, 64, 8, 2),
        (128, 64, 8, 3),
        (128, 64, 8, 4),
        (128, 128, 8, 2),
        (64, 64, 4, 2),
        (64, 64, 4, 3),
        (64, 128, 4, 2),
        (128, 32, 8, 4),
    ):
        yield tile(rows, block, warps, stages, two_loops=True)


def make_work(case: Case, shape: TileShape, splits: int) -> Work:
    batch = case.batch
    if batch.num_decode:
        return Work(
            num=batch.num_decode,
            shape=shape,
            splits=splits,
            page_table=batch.page_table,
            page_size=PAGE_SIZE,
            rows=batch.rows,
            starts=batch.starts,
        )
    tiles = cut_tiles(
        batch.rows_host,
        batch.starts_host,
        batch.lengths_host,
        [],
        per_tile=shape.per_tile(HEADS // KV_HEADS),
    )
    return Work(
        num=len(tiles),
        shape=shape,
        splits=splits,
        page_table=batch.page_table,
        page_size=PAGE_SIZE,
        tiles=torch.from_numpy(tiles).cuda(),
    )


def try_compile(length: int, dtype: torch.dtype, splits: int, shape: TileShape) -> None:
    """Leaves in Triton's cache on disk what `tune` runs."""
    try:
        case = make_case([0], [length], dtype=dtype, layers=1)
        out = torch.empty_like(case.q)
        attention = Attention(torch.device("cuda"))
        work = make_work(case, shape, splits)
        attention.run(work, case.q, *case.pool.planes[0], out, scale=case.scale)
    except Exception as error:  # `tune` says so in its place
        del error


def tune(kinds: Sequence[str]) -> None:
    """A line per shape, a column per case: microseconds, and at how many splits."""
    tried = {
        "decode": (*((1, BF16, splits, decode_shapes) for splits in (1, 2)),),
        "narrow": (*((1, FP8, splits, narrow_shapes) for splits in (1, 2)),),
        "prefill": ((64, BF16, 1, long_shapes),),
    }
    with ProcessPoolExecutor(14, mp_context=get_context("spawn")) as pool:
        jobs = [
            pool.submit(try_compile, length, dtype, splits, shape)
            for kind in kinds
            for length, dtype, splits, shapes in tried[kind]
            for shape in shapes()
        ]
        for job in jobs:
            job.result()
    if "decode" in kinds:
        cases = [make_case([context - 1] * count, [1] * count) for count, context in DECODES]
        show("decode", DECODES, cases, list(decode_shapes()))
        del cases
    if "narrow" in kinds:
        cases = [
            make_case([context - 1] * count, [1] * count, dtype=FP8)
            for count, context in NARROW_DECODES
        ]
        show("decode, fp8 cache", NARROW_DECODES, cases, list(narrow_shapes()))
        del cases
    if "prefill" in kinds:
        cases = [make_case([0] * count, [length] * count) for count, length in PREFILLS]
        show("prefill", PREFILLS, cases, list(long_shapes()))


def show(
    title: str, sizes: tuple[tuple[int, int], ...], cases: list[Case], shapes: list[TileShape]
) -> None:
    print(f"{title:40}" + "".join(f"{f'{count} x {length}':>13}" for count, length in sizes))
    for shape in shapes:
        label = f"{shape.rows:3} x {shape.block:3}, {shape.warps} warps, {shape.stages} stages"
        label += " early" if shape.early else " two loops" if shape.two_loops else ""
        print(f"{label:40}" + "".join(f"{best(case, shape):>13}" for case in cases), flush=True)


def best(case: Case, shape: TileShape) -> str:
    programs = max(len(case.batch.rows_host), 1) * KV_HEADS
    contexts = [s + n for s, n in zip(case.batch.starts_host, case.batch.lengths_host, strict=True)]
    most = min(SLOTS // programs, max(contexts) // shape.block) if case.batch.num_decode else 1
    if shape.early and programs > 256:
        return "-"
    found: list[tuple[float, int]] = []
    for splits in sorted({1, 2, 4, 8, 16, 32} & set(range(1, max(most, 1) + 1))):
        try:
            found.append((measure(case, shape, splits), splits))
        except Exception as error:  # a shape the device has no room for
            return type(error).__name__[:16]
    spent, splits = min(found)
    return f"{spent:.1f} /{splits}"


def measure(case: Case, shape: TileShape, splits: int) -> float:
    attention = Attention(torch.device("cuda"))
    out = torch.empty_like(case.q)
    work = make_work(case, shape, splits)
    calls = [
        partial(attention.run, work, case.q, *planes, out, scale=case.scale)
        for planes in case.pool.planes
    ]
    calls[0]()
    if len(case.q) <= 64:
        check(str(shape), out, exact(case, 0))
    return microseconds(calls, rounds=3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=KINDS, choices=KINDS)
    torch.manual_seed(0)
    tune(parser.parse_args().only)


if __name__ == "__main__":
    main()
