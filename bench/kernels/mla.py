"""python -m bench.kernels.mla: latent attention on a GPU, of a model like DeepSeek-V2-Lite, after a
check.

Decode in TB/s of latents read and the share of the memory's own rate, with other tile shapes beside ours
(--tune) or FlashInfer's kernel (--flashinfer); expanded attention in TFLOP/s of what a causal mask
leaves; what surrounds them in microseconds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from time import perf_counter

import torch

from bench.kernels.device import memory_bandwidth, microseconds
from kernels.latent_write import select as select_write
from kernels.mla_attention import attend_latents, attend_spans
from kernels.mla_attention.triton import (
    LatentAttention,
    TileShape,
    Work,
    choose_splits,
    decode_shape,
)
from kernels.mla_attention.triton_spans import SpanAttention, cut_spans
from srt.attention.mla import Spans
from srt.attention.mla_flashinfer import WORKSPACE_BYTES, FlashInferMla
from srt.attention.mla_flashinfer_absorbed import FlashInferAbsorbed
from srt.layers.latent import LatentArch, UpProjection
from srt.protocols.attention import AttentionBatch

LITE = LatentArch(rank=512, nope=128, rope=64, value=128, q_rank=None, scale=0.1, interleaved=True)
HEADS, PAGE = 16, 16
ROTATED_BYTES = 400e6
BF16 = torch.bfloat16
RIVALLED = ((1, 4096), (64, 4096), (256, 1024))
DECODES = ((1, 256), (1, 4096), (1, 32768), (8, 1024), (32, 1024), (64, 4096), (256, 1024))
SPANS = (
    *(((1024,), (1024,)), ((8192,), (8192,)), ((2048,) * 4, (2048,) * 4)),
    *(((8192,), (32768,)), ((512,), (32768,)), ((512,) * 2, (16384,) * 2)),  # the last: in parts
)


class Decodes:
    """Rows of one length over shuffled pages, in as many layers as the L2 cache cannot hold."""

    def __init__(self, rows: int, length: int) -> None:
        pages = -(-length // PAGE)
        num_slots = (1 + rows * pages) * PAGE
        self.bytes = rows * length * LITE.width * 2
        layers = max(1, min(32, int(ROTATED_BYTES / self.bytes) + 1))
        self.planes = [
            torch.randn(num_slots, 1, LITE.width, device="cuda", dtype=BF16) for _ in range(layers)
        ]
        order = torch.randperm(rows * pages, device="cuda")
        self.table = (1 + order).view(rows, pages).to(torch.int32)
        self.rows = torch.arange(rows, dtype=torch.int32, device="cuda")
        self.starts = torch.full((rows,), length - 1, dtype=torch.int32, device="cuda")
        self.q_latent = torch.randn(rows, HEADS, LITE.rank, device="cuda", dtype=BF16)
        self.q = torch.randn(rows, HEADS, LITE.query, device="cuda", dtype=BF16)
        self.out = torch.empty_like(self.q_latent)

    def work(self, shape: TileShape, splits: int | None = None) -> Work:
        num = len(self.rows)
        return Work(
            num=num,
            shape=shape,
            splits=splits or choose_splits(num, shape, self.q.device),
            page_table=self.table,
            page_size=PAGE,
            rows=self.rows,
            starts=self.starts,
        )

    def batch(self) -> AttentionBatch:
        num, start = len(self.rows), int(self.starts[0])
        whole = torch.arange(num, device="cuda")
        return AttentionBatch(
            num_decode=num,
            page_size=PAGE,
            page_table=self.table,
            rows=self.rows,
            starts=self.starts,
            lengths=torch.ones_like(self.rows),
            rows_host=list(range(num)),
            starts_host=[start] * num,
            lengths_host=[1] * num,
            slots=whole,
            positions=whole,
        )

    def time(self, work: Work) -> float:
        attention = LatentAttention(self.q.device)
        run = partial(attention.run, work, self.q_latent, self.q, out=self.out, scale=LITE.scale)
        return microseconds([partial(run, plane=plane) for plane in self.planes])


def check() -> None:
    """Slices of every kind against the reference, on fresh numbers."""
    for starts, lengths in (((5, 700, 0, 4095), (1,) * 4), ((0, 900, 33), (70, 5, 200))):
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        case = Decodes(len(ends), max(ends))
        tokens = sum(lengths)
        q_latent = torch.randn(tokens, HEADS, LITE.rank, device="cuda", dtype=BF16)
        q = torch.randn(tokens, HEADS, LITE.query, device="cuda", dtype=BF16)
        rows, begins, counts = (
            torch.tensor(values, dtype=torch.int32, device="cuda")
            for values in (list(range(len(ends))), starts, lengths)
        )
        call = partial(
            attend_latents, q_latent, q, case.planes[0], case.table, rows, begins, counts
        )
        found = call(PAGE, LITE.scale, implementation="triton")
        right = call(PAGE, LITE.scale, implementation="reference")
        torch.testing.assert_close(found, right, rtol=2e-2, atol=2e-2)
    for queries, keys, causal in (((70, 300), (500, 300), True), ((9, 200), (64, 1000), False)):
        q = torch.randn(sum(queries), HEADS, LITE.query, device="cuda", dtype=BF16)
        kv = torch.randn(sum(keys), HEADS, LITE.nope + LITE.value, device="cuda", dtype=BF16)
        turned = torch.randn(sum(keys), LITE.rope, device="cuda", dtype=BF16)
        spans = partial(attend_spans, q, kv, turned, queries, keys, causal, LITE.scale)
        out, lse = spans(implementation="triton")
        right, right_lse = spans(implementation="reference")
        torch.testing.assert_close(out, right, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(lse, right_lse, rtol=2e-2, atol=2e-2)
    print("right: absorbed and expanded")


def show_decodes(rate: float, tune: bool) -> None:
    shapes = {"ours": decode_shape()}
    if tune:
        shapes |= {
            f"{block} keys, {warps} warps, {stages} stages, {per_sm} a multiprocessor": TileShape(
                rows=16, block=block, warps=warps, stages=stages, per_sm=per_sm
            )
            for block, warps, stages, per_sm in (
                *((32, 4, 3, 1), (32, 4, 2, 2), (32, 4, 2, 3), (32, 4, 4, 1), (32, 8, 3, 2)),
                *((64, 8, 2, 1), (64, 8, 2, 2), (64, 8, 3, 1), (64, 4, 2, 2), (16, 4, 4, 2)),
            )
        }
        shapes["ours, 64 keys a part"] = replace(decode_shape(), least=64)
        shapes["ours, 32 keys a part"] = replace(decode_shape(), least=32)
        shapes["ours, 256 keys a part"] = replace(decode_shape(), least=256)
    for rows, length in DECODES:
        case = Decodes(rows, length)
        for name, shape in shapes.items():
            work = case.work(shape)
            try:
                taken = case.time(work)
            except Exception as error:  # a shape that does not fit is a line of the table too
                print(f"decode {rows} x {length}, {name}: {type(error).__name__}")
                continue
            speed = case.bytes / taken / 1e6
            print(
                f"decode {rows} x {length}, {name}: {taken:.1f} us, {work.splits} splits, "
                f"{speed:.2f} TB/s, {speed * 1e12 / rate:.0%} of the floor",
                flush=True,
            )


def show_rival(rate: float) -> None:
    """FlashInfer's kernel over the same latents, planned beforehand; and how long its plan takes the
    host."""
    rival = FlashInferAbsorbed(
        lambda device: torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    )
    for rows, length in RIVALLED:
        case = Decodes(rows, length)
        batch, work = case.batch(), case.work(decode_shape())
        call = partial(rival.attend, case.q_latent, case.q[:, :, LITE.nope :], scale=LITE.scale)
        plans = []
        for _ in range(5):
            torch.cuda.synchronize()
            rival.plan(batch)
            began = perf_counter()
            found = call(plane=case.planes[0])
            plans.append((perf_counter() - began) * 1e6)
        LatentAttention(case.q.device).run(
            work, case.q_latent, case.q, case.planes[0], case.out, LITE.scale
        )
        torch.testing.assert_close(found, case.out, rtol=2e-2, atol=2e-2)
        taken = microseconds([partial(call, plane=plane) for plane in case.planes])
        speed = case.bytes / taken / 1e6
        print(
            f"decode {rows} x {length}, flashinfer: right, {taken:.1f} us, {speed:.2f} TB/s, "
            f"{speed * 1e12 / rate:.0%} of the floor (ours: {case.time(work):.1f} us); plan and launch "
            f"{min(plans):.0f} us of the host",
            flush=True,
        )


def show_spans(rivals: bool) -> None:
    attention = SpanAttention()
    rival = FlashInferMla() if rivals else None
    up = make_up()
    for queries, keys in SPANS:
        causal = queries == keys or sum(queries) == 8192
        q = torch.randn(sum(queries), HEADS, LITE.query, device="cuda", dtype=BF16)
        latents = torch.randn(sum(keys), LITE.width, device="cuda", dtype=BF16)
        kv, turned = up.project(latents), latents[:, LITE.rank :]
        tiles = torch.from_numpy(cut_spans(queries, keys, causal)).cuda()
        taken = microseconds([partial(attention.run, q, kv, turned, tiles, causal, LITE.scale)], 3)
        pairs = sum(a * (b - a / 2 if causal else b) for a, b in zip(queries, keys, strict=True))
        work = 2 * HEADS * (LITE.query + LITE.value) * pairs
        print(f"expanded {queries} on {keys}: {taken:.0f} us, {work / taken / 1e6:.0f} TFLOP/s")
        if rival is not None:
            spans = Spans(queries, keys, causal)
            right = attention.run(q, kv, turned, tiles, causal, LITE.scale)
            for mine, its in zip(
                right, rival.attend(q, latents, up, spans, LITE.scale), strict=True
            ):
                torch.testing.assert_close(its, mine, rtol=2e-2, atol=2e-2)
            taken = microseconds([partial(rival.attend, q, latents, up, spans, LITE.scale)], 3)
            print(
                f"  flashinfer and the expansion: right, {taken:.0f} us, {work / taken / 1e6:.0f} "
                "TFLOP/s",
                flush=True,
            )


def make_up() -> UpProjection:
    rows = HEADS * (LITE.nope + LITE.value)
    weight = torch.randn(rows, LITE.rank, device="cuda", dtype=BF16) * LITE.rank**-0.5
    return UpProjection(weight, LITE)


def expand_by_heads(up: UpProjection, latents: torch.Tensor) -> torch.Tensor:
    """A product per head, written where it belongs: V, K, and the rotated part copied behind it."""
    made = latents.new_empty(len(latents), HEADS, LITE.value + LITE.query)
    shared = latents[:, : LITE.rank].expand(HEADS, -1, -1)
    keys = up.keys.transpose(1, 2)
    torch.bmm(shared, up.values, out=made[:, :, : LITE.value].transpose(0, 1))
    torch.bmm(shared, keys, out=made[:, :, LITE.value : -LITE.rope].transpose(0, 1))
    made[:, :, -LITE.rope :] = latents[:, None, LITE.rank :]
    return made


def show_surroundings() -> None:
    up = make_up()
    write = select_write("triton")
    for tokens in (1, 8, 64, 256, 8192, 32768):
        made = torch.randn(tokens, HEADS * LITE.query + LITE.width, device="cuda", dtype=BF16)
        q = made[:, : HEADS * LITE.query].view(tokens, HEADS, LITE.query)
        latents = made[:, HEADS * LITE.query :]
        plane = torch.zeros(tokens, 1, LITE.width, device="cuda", dtype=BF16)
        at = torch.arange(tokens, device="cuda")
        cos_sin = torch.rand(tokens, LITE.rope, device="cuda")
        sums = torch.randn(tokens, HEADS, LITE.rank, device="cuda", dtype=BF16)
        out = torch.empty(tokens, HEADS, LITE.value, device="cuda", dtype=BF16)
        norm = torch.ones(LITE.rank, device="cuda", dtype=BF16)
        calls: dict[str, Callable[[], object]] = {
            "write": partial(write, q, latents, norm, at, cos_sin, at, plane, 1e-6, True),
            "absorb": partial(up.absorb, q),
            "release": partial(up.release, sums, out),
            "expand": partial(up.project, latents),
            "expand at once": partial(up.expand_at_once, latents),
            "expand by heads": partial(expand_by_heads, up, latents),
            "expand and copy": partial(up.expand, latents),
            "gather": partial(torch.index_select, plane[:, 0], 0, at),
        }
        figures = (f"{name} {microseconds([call], 3):.1f}" for name, call in calls.items())
        print(f"{tokens} tokens, us: {', '.join(figures)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.kernels.mla")
    parser.add_argument("--tune", action="store_true", help="other tile shapes too")
    parser.add_argument(
        "--flashinfer", action="store_true", help="beside ours; may compile a minute"
    )
    options = parser.parse_args()
    torch.manual_seed(torch.seed() % 2**32)
    with torch.inference_mode():
        check()
        rate = memory_bandwidth()
        print(f"memory: {rate / 1e12:.2f} TB/s")
        show_decodes(rate, options.tune)
        if options.flashinfer:
            show_rival(rate)
        show_spans(options.flashinfer)
        show_surroundings()


if __name__ == "__main__":
    main()
