"""python -m bench.kernels.step: a whole step of a Llama-shaped model, from embedding to logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from bench.kernels.candidates import BF16, Sizes, load
from bench.timing import report
from kernels.linear import Linear
from kernels.ops import Ops

PAGE_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Slices of one length after one start; random weights, each read once a step."""

    sizes: Sizes
    ops: Ops
    embedding: torch.Tensor
    layers: list[list[Linear]]
    norm: torch.Tensor
    head: Linear
    planes: torch.Tensor  # [layers, 2, slots, kv_heads, head_dim]
    cos_sin: torch.Tensor

    def run(self, slices: int, start: int, length: int) -> torch.Tensor:
        sizes, ops, norm = self.sizes, self.ops, self.norm
        max_pages = -(-(start + length) // PAGE_SIZE)
        table = torch.arange(slices * max_pages, dtype=torch.int32).view(slices, max_pages)
        rows = torch.arange(slices, dtype=torch.int32)
        starts, lengths = torch.full_like(rows, start), torch.full_like(rows, length)
        positions = torch.arange(start, start + length).repeat(slices)
        slots = positions + (rows.long() * max_pages * PAGE_SIZE).repeat_interleave(length)
        residual = self.embedding[torch.randint(0, sizes.vocab, (len(positions),))]
        x = ops.rms_norm(residual, norm, 1e-5)
        shape = (sizes.heads, sizes.kv_heads, sizes.head_dim)
        for index, (qkv, out, gate_up, down) in enumerate(self.layers):
            k, v = self.planes[index]
            q = ops.rope_write_kv(qkv(x), positions, self.cos_sin, slots, k, v, *shape)
            where = (table, rows, starts, lengths, PAGE_SIZE, sizes.head_dim**-0.5, None)
            attended = ops.paged_attention(q, k, v, *where).view(len(positions), -1)
            x, residual = ops.add_rms_norm(out(attended), residual, norm, 1e-5)
            x, residual = ops.add_rms_norm(down(ops.silu_mul(gate_up(x))), residual, norm, 1e-5)
        return self.head(x[length - 1 :: length].contiguous())


def build_step(ops: Ops, quantization: str | None, sizes: Sizes) -> Step:
    def linear(channels: int, size: int) -> Linear:
        weight = torch.randn(channels, size).mul_(size**-0.5).to(BF16)
        return ops.pack_linear(weight, quantization=quantization)

    width = sizes.heads * sizes.head_dim
    shape = [(sizes.qkv, sizes.hidden), (sizes.hidden, width)]
    shape += [(2 * sizes.ffn, sizes.hidden), (sizes.hidden, sizes.ffn)]
    return Step(
        sizes=sizes,
        ops=ops,
        embedding=torch.randn(sizes.vocab, sizes.hidden).to(BF16),
        layers=[[linear(*size) for size in shape] for _ in range(sizes.layers)],
        norm=torch.ones(sizes.hidden, dtype=BF16),
        head=linear(sizes.vocab, sizes.hidden),
        planes=torch.zeros(sizes.layers, 2, 8192, sizes.kv_heads, sizes.head_dim, dtype=BF16),
        cos_sin=torch.randn(8192, sizes.head_dim),
    )


def cases() -> Iterator[tuple[str, dict[str, Callable[[], object]]]]:
    steps = {
        f"{name} {quantization or 'bf16'}": build_step(ops, quantization, Sizes())
        for name, ops in load(with_reference=False).items()
        for quantization in (None, "int8")
    }
    for case, shape in {
        "decode 1 x 125": (1, 125, 1),
        "decode 8 x 125": (8, 125, 1),
        "decode 32 x 125": (32, 125, 1),
        "verify 5 after 200": (1, 200, 5),
        "prefill 512": (1, 0, 512),
    }.items():
        yield case, {name: partial(step.run, *shape) for name, step in steps.items()}


if __name__ == "__main__":
    report("step", cases())
