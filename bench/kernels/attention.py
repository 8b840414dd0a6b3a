"""python -m bench.kernels.attention: the GPU's attention backends side by side, after a check.

Each as the engine calls it, in a CUDA graph over as many layers as the L2 cache cannot hold. Decode in
TB/s of KV read, prefill in TFLOP/s of what a causal mask leaves.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

import torch
from torch.nn.functional import scaled_dot_product_attention

from bench.kernels.device import microseconds
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

    def move(self, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        for plane in (plane for pair in self.planes for plane in pair):
            plane[destinations] = plane[sources]


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
            plane.float()[slots].transpose(0, 1).repeat_interleave(group, 0)
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
    draw = random.Random(0)
    contexts = [draw.randint(100, 2048) for _ in range(256)]
    for count in (64, 128, 256):
        show(f"decode {count} x 100 .. 2048", contexts[:count], [1] * count)
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
            case.batch.is_settled = is_decode
            if is_decode and name in ("triton", "fixed"):
                backend.replay(case.batch)
            spent = microseconds(case.calls(backend))
            columns.append(f"{spent:8.1f} us {rate(case, spent)}")
        del case
    print(f"{label:28}" + "".join(f"{column:>22}" for column in columns), flush=True)


def rate(case: Case, spent: float) -> str:
    if max(case.batch.lengths_host) > 16:
        return f"{case.flops / spent / 1e6:4.0f} TF/s"
    return f"{case.num_bytes / spent / 1e6:4.2f} TB/s"


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    torch.manual_seed(0)
    compare()


if __name__ == "__main__":
    main()
