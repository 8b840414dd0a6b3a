"""Builds the attention of an MLA model of the pair that was selected for it."""

from __future__ import annotations

from collections.abc import Sequence

from kernels import merge_state
from srt.attention.mla import MlaAttention, MlaCore
from srt.attention.mla_plan import MlaSettings
from srt.attention.mla_sdpa import SdpaMla
from srt.attention.select import BackendPair
from srt.layers.latent import UpProjection


def build_mla_backend(
    pair: BackendPair, ups: Sequence[UpProjection], settings: MlaSettings
) -> MlaAttention:
    """What is absorbed is the decode half's business, what is expanded the prefill half's."""
    cores = {name: _build(name, len(ups[0].keys), settings) for name in {pair.prefill, pair.decode}}
    merge = merge_state.select("torch" if pair.prefill == "sdpa" else "triton")
    return MlaAttention(cores[pair.decode], cores[pair.prefill], merge, ups, settings)


def _build(name: str, heads: int, settings: MlaSettings) -> MlaCore:
    if name == "triton":
        from srt.attention.mla_triton import TritonMla

        return TritonMla(heads, deterministic=settings.deterministic)
    if name == "flashinfer":
        from srt.attention.mla_flashinfer import FlashInferMla

        return FlashInferMla()
    assert name == "sdpa", name
    return SdpaMla()
