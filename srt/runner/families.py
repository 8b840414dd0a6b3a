"""What a kind of model wants of its runner: which pool, which attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.ops import Ops
from srt.attention.mla import MlaAttention
from srt.attention.mla_plan import MlaSettings
from srt.attention.mla_select import build_mla_backend
from srt.attention.relative import RelativeAttention
from srt.attention.select import BackendPair, build_backend
from srt.cache.pools import LatentPool, PagedKVPool
from srt.cache.state_pool import StatePool
from srt.config.context import get_context, get_schedule
from srt.config.runner_spec import RunnerSpec
from srt.layers.convolution import depth_of
from srt.layers.latent import UpProjection
from srt.models.arch import Arch
from srt.models.blocks import CausalModel
from srt.models.mla import LatentDecoder
from srt.protocols.attention import AttentionBackend
from srt.protocols.kv_pool import KVPool


def build_pool(
    arch: Arch, *, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
) -> KVPool:
    if arch.relative is not None:
        layers, taps = arch.relative.layers, arch.relative.taps
        return StatePool(
            num_pages=num_pages,
            page_size=page_size,
            heads=[(layer.num_kv_heads, layer.head_dim) for layer in layers],
            widths=arch.relative.state_widths(arch.hidden_size),
            depth=depth_of(taps, page_size),
            dtype=dtype,
            device=device,
        )
    if arch.latent is not None:
        return LatentPool(
            num_pages=num_pages,
            page_size=page_size,
            num_layers=arch.num_layers,
            rank=arch.latent.rank,
            rope=arch.latent.rope,
            dtype=dtype,
            device=device,
        )
    return PagedKVPool(
        num_pages=num_pages,
        page_size=page_size,
        num_layers=arch.num_layers,
        num_kv_heads=arch.num_kv_heads,
        head_dim=arch.head_dim,
        dtype=dtype,
        device=device,
    )


def attention_of(
    model: CausalModel | None,
    arch: Arch,
    ops: Ops,
    spec: RunnerSpec,
    pair: BackendPair,
    *,
    deterministic: bool,
    narrow: bool,
) -> AttentionBackend:
    """`model` None: a network that drafts, whose layers are dense. `narrow`: the KV cache has 8 bits."""
    if isinstance(model, LatentDecoder):
        return mla_backend(pair, model.ups, spec, deterministic=deterministic)
    if arch.relative is not None:
        return RelativeAttention()
    return build_backend(pair, ops.paged_attention, deterministic=deterministic, narrow=narrow)


def mla_backend(
    pair: BackendPair, ups: Sequence[UpProjection], spec: RunnerSpec, *, deterministic: bool
) -> MlaAttention:
    """Reads the schedule's bag once, after the load-time gate has written it; a later write is an error.
    Whether prefixes are expanded is the target's business: a draft does not look."""
    with get_context().building(f"{spec.label} attention"):
        schedule = get_schedule()
        chunk_tokens = schedule.max_prefix_chunk_tokens
        may_expand = spec.role == "target" and not schedule.disable_chunked_prefix_cache
    device = ups[0].weight.device
    is_gpu = device.type == "cuda"
    settings = MlaSettings(
        chunk_tokens=chunk_tokens,
        may_expand=may_expand,
        deterministic=deterministic,
        processors=torch.cuda.get_device_properties(device).multi_processor_count if is_gpu else 1,
    )
    return build_mla_backend(pair, ups, settings)
