"""All ops of a model's forward, chosen once by one word."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from kernels import (
    best_token,
    embedding,
    latent_write,
    linear,
    moe,
    paged_attention,
    rms_norm,
    rope,
    silu_mul,
)
from kernels.rms_norm import AddRMSNorm, RMSNorm

if TYPE_CHECKING:
    import torch

    from kernels.native_build import Library


class PackLinear(Protocol):
    def __call__(
        self,
        weight: torch.Tensor | linear.QuantizedWeight,
        bias: torch.Tensor | None = None,
        *,
        quantization: str | None = None,
        out_dtype: torch.dtype | None = None,
        gated: bool = False,
        invariant: bool = False,
    ) -> linear.Linear: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Ops:
    """The unchecked callables; each op's package documents its arguments."""

    implementation: str
    embed: embedding.Embed
    rms_norm: RMSNorm
    add_rms_norm: AddRMSNorm
    rope_write_kv: rope.RopeWriteKV
    write_latent: latent_write.WriteLatent
    silu_mul: silu_mul.SiluMul
    paged_attention: paged_attention.PagedAttention
    pack_linear: PackLinear
    moe: moe.MoeOps
    best_token: best_token.BestToken


def select(implementation: str, library: Library | None = None) -> Ops:
    """implementation: one of `kernels.choice`; native needs the library and bfloat16.

    A CUDA runner takes "triton"; its attention is its backends', so `paged_attention` stays torch's.
    """
    attention = "torch" if implementation == "triton" else implementation
    norms = rms_norm.select(implementation, library)
    return Ops(
        implementation=implementation,
        embed=embedding.select(implementation),
        rms_norm=norms.rms_norm,
        add_rms_norm=norms.add_rms_norm,
        rope_write_kv=rope.select(implementation, library),
        write_latent=latent_write.select(implementation),
        silu_mul=silu_mul.select(implementation, library),
        paged_attention=paged_attention.select(attention, library),
        pack_linear=partial(linear.pack_linear, implementation=implementation, library=library),
        moe=moe.select(implementation),
        best_token=best_token.select(implementation, library),
    )
