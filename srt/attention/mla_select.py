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
    assert pair.prefill == pair.decode == "sdpa", pair
    core: MlaCore = SdpaMla()
    return MlaAttention(core, merge_state.select("torch"), ups, settings)
