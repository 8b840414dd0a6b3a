"""Chooses a runner's attention backends by name, from the capability table, and builds them."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from kernels.paged_attention import PagedAttention
from srt.attention.hybrid import HybridAttention
from srt.attention.native import NativeAttention
from srt.attention.sdpa import SdpaAttention
from srt.config.capability import PREFERENCE, TABLE, Half, Need, is_ready, lacks
from srt.errors import ConfigError
from srt.protocols.attention import AttentionBackend

SMALL_PROMPTS = (
    1_500_000  # pairs of query and key: FlashInfer's plan takes the host up to a millisecond
)
SHORT_SLICE = 16  # tokens; a verification of guesses, which our kernel for few queries is best at


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendPair:
    prefill: str
    decode: str


def select_backend(wish: str | None, need: Need, field: str, half: Half = "decode") -> str:
    """The wished backend, or without a wish the best one for this half that lacks nothing and has
    nothing to compile.

    Raises ConfigError saying what each candidate lacks; `field` names the setting.
    """
    rows = {row.name: row for row in TABLE}
    lacking = {name: lacks(row, need, half) for name, row in rows.items()}
    if wish is None:
        for name in PREFERENCE[half]:
            if not lacking[name] and is_ready(rows[name], need, half):
                return name
    elif wish not in lacking:
        raise ConfigError(f"{field}={wish}: no such backend; known: {', '.join(lacking)}")
    elif not lacking[wish]:
        return wish
    listing = "; ".join(f"{name}: {', '.join(why) or 'can'}" for name, why in lacking.items())
    raise ConfigError(f"{field}={wish or 'auto'} cannot be met. {listing}")


def build_backend(
    pair: BackendPair,
    paged_attention: PagedAttention,
    *,
    deterministic: bool = False,
    narrow: bool = False,
) -> AttentionBackend:
    """`paged_attention` is the runner's own kernel; only the native backend calls it. `narrow`: the KV
    cache has 8 bits."""

    def build(name: str) -> AttentionBackend:
        match name:
            case "native":
                return NativeAttention(paged_attention)
            case "triton":
                from srt.attention.triton import TritonAttention

                return TritonAttention(deterministic=deterministic)
            case "flashinfer":
                from srt.attention.flashinfer import FlashInferAttention

                return FlashInferAttention(gathers=find_spec("triton") is not None, narrow=narrow)
        assert name == "sdpa", name
        return SdpaAttention()

    if pair.prefill == pair.decode:
        return build(pair.decode)
    prefill = build(pair.prefill)
    return HybridAttention(
        prefill=prefill,
        decode=build(pair.decode),
        short=SHORT_SLICE if pair.decode == "triton" else 1,
        small=SMALL_PROMPTS if pair == BackendPair(prefill="flashinfer", decode="triton") else 0,
        has_tree=next(row.has_tree for row in TABLE if row.name == pair.prefill),
        takes=getattr(prefill, "takes", None) if narrow else None,
    )
