"""python -m bench.kernels.attention [--tune]: the GPU's attention backends side by side, after a check.

Each as the engine calls it, in a CUDA graph over as many layers as the L2 cache cannot hold. Decode in
TB/s of KV read, prefill in TFLOP/s of what a causal mask leaves. --tune tries the kernel's tile shapes.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context

import torch
from torch.nn.functional import scaled_dot_product_attention

from bench.kernels.device import microseconds
from kernels.paged_attention.tiles import cut_tiles
from kernels.paged_attention.triton import Attention, TileShape, Work
from srt.attention.flashinfer import FlashInferAttention
from srt.attention.triton import TritonAttention
from srt.protocols.attention import AttentionBackend, AttentionBatch

HEADS, KV_HEADS, DIM = 32, 8, 128
PAGE_SIZE = 16
ROTATED_BYTES = 300e6
MAX_LAYERS = 64
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


@dataclass(slots=True)
class Pool:
    """Layers are parts of one pair of planes."""

    planes: list[tuple[torch.Tensor, torch.Tensor]]
    page_size: int
    num_pages: int
    num_layers: int
    dtype: torch.dtype
    bytes_per_token: int

    def keys(self, layer: int) -> torch.Tensor:
        return self.planes[layer][0]

    def values(self, layer: int) -> torch.Tensor:
        return self.planes[layer][1]

    def k_scale(self, layer: int) -> float:
        return 1.0

    def v_scale(self, layer: int) -> float:
        return 1.0


@dataclass(slots=True)
class Case:
    batch: AttentionBatch
    pool: Pool
    q: torch.Tensor

    @property
    def scale(self) -> float:
        return float(self.q.shape[2] ** -0.5)

    @property
    def num_bytes(self) -> int:
        """K and V of the rows in one layer."""
        ends = zip(self.batch.starts_host, self.batch.lengths_host, strict=True)
        return self.pool.bytes_per_token * sum(start + length for start, length in ends)

    @property
    def flops(self) -> int:
        seen = (
            length * start + length * (length + 1) // 2
            for start, length in zip(self.batch.starts_host, self.batch.lengths_host, strict=True)
        )
        return 4 * self.q.shape[1] * self.q.shape[2] * sum(seen)

    def calls(self, backend: AttentionBackend) -> list[Callable[[], object]]:
        forward = partial(backend.forward, pool=self.pool, scale=self.scale, window=None)
        return [partial(forward, self.q, layer) for layer in range(self.pool.num_layers)]


def make_case(
    starts: list[int],
    lengths: list[int],
    *,
    dtype: torch.dtype = BF16,
    heads: int = HEADS,
    kv_heads: int = KV_HEADS,
    dim: int = DIM,
    page_size: int = PAGE_SIZE,
    layers: int | None = None,
) -> Case:
    count = len(starts)
    pages = -(-max(s + n for s, n in zip(starts, lengths, strict=True)) // page_size)
    tokens = (count * pages + 1) * page_size
    per_token = 2 * kv_heads * dim * dtype.itemsize
    if layers is None:
        layers = min(max(math.ceil(ROTATED_BYTES / (tokens * per_token)), 2), MAX_LAYERS)
    planes = []
    for _ in range(layers):
        k, v = (
            torch.randn(tokens, kv_heads, dim, device="cuda", dtype=BF16).to(dtype)
            for _ in range(2)
        )
        planes.append((k, v))
    table = 1 + torch.randperm(count * pages, device="cuda", dtype=torch.int32).view(count, pages)
    num_decode = sum(length == 1 for length in lengths)
    rows = list(range(count))
    total = sum(lengths)
    ints = partial(torch.tensor, dtype=torch.int32, device="cuda")
    batch = AttentionBatch(
        num_decode=num_decode,
        page_size=page_size,
        page_table=table,
        rows=ints(rows),
        starts=ints(starts),
        lengths=ints(lengths),
        rows_host=rows,
        starts_host=starts,
        lengths_host=lengths,
        slots=torch.zeros(total, dtype=torch.int64, device="cuda"),
        positions=torch.zeros(total, dtype=torch.int64, device="cuda"),
    )
    pool = Pool(planes, page_size, count * pages + 1, layers, dtype, per_token)
    return Case(batch, pool, torch.randn(total, heads, dim, device="cuda", dtype=BF16))


def exact(case: Case, layer: int) -> torch.Tensor:
    """One slice after the other, gathered, in float32."""
    parts, first = [], 0
    batch = case.batch
    group = case.q.shape[1] // case.pool.keys(layer).shape[1]
    for row, start, length in zip(
        batch.rows_host, batch.starts_host, batch.lengths_host, strict=True
    ):
        seen = torch.arange(start + length, device="cuda")
        slots = batch.page_table[row].long()[seen // batch.page_size] * batch.page_size
        slots += seen % batch.page_size
        k, v = (
            plane[slots].float().transpose(0, 1).repeat_interleave(group, 0)
            for plane in (case.pool.keys(layer), case.pool.values(layer))
        )
        q = case.q[first : first + length].float().transpose(0, 1)
        mask = seen <= torch.arange(start, start + length, device="cuda")[:, None]
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=case.scale)
        parts.append(out.transpose(0, 1))
        first += length
    return torch.cat(parts)


def backends() -> dict[str, AttentionBackend]:
    found: dict[str, AttentionBackend] = {
        "triton": TritonAttention(),
        "fixed": TritonAttention(deterministic=True),
    }
    if find_spec("flashinfer") is not None:
        found["flashinfer"] = FlashInferAttention()
        found["fi paged"] = FlashInferAttention(gathers=False)
    return found


def check(name: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
    error = (found.float() - wanted).abs().max().item()
    assert error < 0.02, f"{name} is off by {error}"


def compare() -> None:
    checked = make_case([700, 0, 31, 64, 40], [1, 1, 1, 300, 77], layers=1)
    for name, backend in backends().items():
        backend.plan(checked.batch)
        check(name, checked.calls(backend)[0](), exact(checked, 0))  # type: ignore[arg-type]
    print("every backend is right on a mixed batch")
    print(f"{'':28}" + "".join(f"{name:>22}" for name in (*backends(), "triton, fp8 KV")))
    for context in (256, 1024, 4096):
        for count in (1, 8, 32, 64, 256):
            show(f"decode {count} x {context}", [context - 1] * count, [1] * count)
    for count, length in ((1, 1024), (1, 8192), (4, 2048)):
        for heads in (16, 32, 40):
            show(f"prefill {count} x {length}, {heads} heads", [0] * count, [length] * count, heads)
    show("prefill 512 after 7680", [7680], [512])
    show("verify 32 x 8 at 1024", [1016] * 32, [8] * 32)
    for label, starts, lengths in (
        ("host, decode 32", [1023] * 32, [1] * 32),
        ("host, prefill 1 x 1024", [0], [1024]),
        ("host, prefill 4 x 2048", [0] * 4, [2048] * 4),
    ):
        show_host(label, starts, lengths)


def show_host(label: str, starts: list[int], lengths: list[int]) -> None:
    """The host's microseconds for a plan, with the first layer, and for each layer after."""
    case = make_case(starts, lengths, layers=16)
    columns = []
    for backend in backends().values():
        calls = case.calls(backend)
        plans, layers = [], []
        for _ in range(5):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            backend.plan(case.batch)
            calls[0]()
            planned = time.perf_counter()
            for call in calls[1:]:
                call()
            layers.append((time.perf_counter() - planned) / 15)
            plans.append(planned - begin)
        columns.append(f"{min(plans) * 1e6:6.0f} + {min(layers) * 1e6:5.1f} us")
    print(f"{label:28}" + "".join(f"{column:>22}" for column in columns), flush=True)


def show(label: str, starts: list[int], lengths: list[int], heads: int = HEADS) -> None:
    columns = []
    for dtype in (BF16, FP8):
        case = make_case(starts, lengths, dtype=dtype, heads=heads)
        for name, backend in backends().items():
            if dtype == FP8 and name != "triton":
                continue
            is_decode = case.batch.num_decode == len(lengths)
            (backend.capture if is_decode else backend.plan)(case.batch)
            spent = microseconds(case.calls(backend))
            columns.append(f"{spent:8.1f} us {rate(case, spent)}")
        del case
    print(f"{label:28}" + "".join(f"{column:>22}" for column in columns), flush=True)


def rate(case: Case, spent: float) -> str:
    if max(case.batch.lengths_host) > 16:
        return f"{case.flops / spent / 1e6:4.0f} TF/s"
    return f"{case.num_bytes / spent / 1e6:4.2f} TB/s"


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tune", action="store_true")
    torch.manual_seed(0)
    (tune if parser.parse_args().tune else compare)()


if __name__ == "__main__":
    main()
