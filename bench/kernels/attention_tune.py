"""python -m bench.kernels.attention_tune: the tile shapes of the GPU's attention kernel, each timed."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import torch

from bench.kernels.attention import HEADS, KV_HEADS, PAGE_SIZE, Case, check, exact, make_case, rate
from bench.kernels.device import microseconds
from kernels.paged_attention.tiles import cut_tiles
from kernels.paged_attention.triton import Attention, TileShape, Work


def decode_shapes() -> Iterator[TileShape]:
    for block, warps, stages, carry in (
        (64, 4, 3, True),
        (64, 4, 4, True),
        (64, 4, 5, False),
        (64, 4, 7, False),
        (64, 2, 3, True),
        (64, 8, 3, True),
        (32, 4, 4, True),
        (32, 2, 4, True),
        (32, 4, 7, False),
        (128, 4, 3, True),
        (128, 8, 3, True),
    ):
        yield TileShape(
            rows=16,
            block=block,
            warps=warps,
            stages=stages,
            per_sm=0,
            least=block,
            carry=carry,
        )


def early_shapes() -> Iterator[TileShape]:
    for block, warps in ((128, 8), (128, 4), (64, 4), (256, 8), (64, 8)):
        yield TileShape(
            rows=16, block=block, warps=warps, stages=2, per_sm=0, least=block, early=True
        )


def long_shapes() -> Iterator[TileShape]:
    for rows, block, warps, stages, carry in (
        (128, 64, 8, 3, True),
        (128, 64, 8, 4, True),
        (128, 64, 8, 5, False),
        (128, 128, 8, 2, True),
        (128, 128, 8, 3, False),
        (128, 128, 8, 5, False),
        (128, 64, 4, 3, True),
        (64, 64, 4, 2, True),
        (64, 64, 4, 3, True),
        (64, 128, 4, 3, False),
        (128, 32, 8, 4, True),
    ):
        yield TileShape(
            rows=rows,
            block=block,
            warps=warps,
            stages=stages,
            per_sm=0,
            two_loops=True,
            carry=carry,
        )


def compile_shape(shape: TileShape) -> None:
    """Leaves in Triton's cache on disk what `tune` runs."""
    length = 64 if shape.two_loops else 1
    case = make_case([0], [length], layers=1)
    out = torch.empty_like(case.q)
    for splits in (1,) if shape.two_loops else (1, 2):
        work = make_work(case, shape, splits)
        Attention(torch.device("cuda")).run(
            work, case.q, *case.pool.planes[0], out, scale=case.scale
        )


def try_compile(shape: TileShape) -> None:
    try:
        compile_shape(shape)
    except Exception as error:  # `tune_shape` says so in its place
        del error


def make_work(case: Case, shape: TileShape, splits: int) -> Work:
    batch = case.batch
    if not shape.two_loops:
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


def tune() -> None:
    """A line per shape: microseconds at every number of splits that makes sense."""
    with ProcessPoolExecutor(12, mp_context=get_context("spawn")) as pool:
        list(pool.map(try_compile, [*decode_shapes(), *early_shapes(), *long_shapes()]))
    for count, context in (
        *((1, 256), (1, 1024), (1, 4096), (8, 256), (8, 1024)),
        *((32, 1024), (64, 1024), (256, 1024)),
    ):
        case = make_case([context - 1] * count, [1] * count)
        most = max(1, 132 * 8 // (count * KV_HEADS))
        splits = [s for s in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64) if s <= most]
        splits = splits[-5:] if count < 32 else splits
        print(f"decode {count} x {context}, splits {splits}")
        for shape in (*decode_shapes(), *(early_shapes() if count <= 8 else ())):
            tune_shape(case, shape, [make_work(case, shape, s) for s in splits])
    for count, length in ((4, 2048), (1, 1024)):
        case = make_case([0] * count, [length] * count)
        print(f"prefill {count} x {length}")
        for shape in long_shapes():
            tune_shape(case, shape, [make_work(case, shape, 1)])


def tune_shape(case: Case, shape: TileShape, works: list[Work]) -> None:
    attention = Attention(torch.device("cuda"))
    out = torch.empty_like(case.q)
    wanted = exact(case, 0) if len(case.q) < 5000 else None
    cells = []
    for work in works:
        calls = [
            partial(attention.run, work, case.q, *planes, out, scale=case.scale)
            for planes in case.pool.planes
        ]
        try:
            calls[0]()
            if wanted is not None:
                check(str(shape), out, wanted)
            spent = microseconds(calls, rounds=3)
        except Exception as error:  # a shape the device has no room for is one line of the table
            cells.append(f"{type(error).__name__}: {error}"[:60])
            break
        cells.append(f"{spent:8.1f} {rate(case, spent)}")
    carried = "early" if shape.early else "carry" if shape.carry else "     "
    print(
        f"  {shape.rows:3} x {shape.block:3} {shape.warps} warps {shape.stages} stages {carried}",
        "".join(cells),
        flush=True,
    )


if __name__ == "__main__":
    torch.manual_seed(0)
    tune()
