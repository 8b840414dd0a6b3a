"""A decoder whose linears take in norms and sums says what one with separate ops says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.ops import Ops, select
from srt.attention.sdpa import SdpaAttention
from srt.cache.pools import PagedKVPool
from srt.layers.parameters import Weights
from srt.layers.rope import build_cos_sin
from srt.loading.dummy import dummy_tensors
from srt.loading.fill import fill
from srt.models.arch import Arch, read_arch
from srt.models.blocks import Taps
from srt.models.decoder import DenseDecoder
from srt.models.registry import model_family
from srt.protocols.attention import AttentionBatch
from tests.torch_cpu.test_worker import FACTS

TOKENS = 5


def load(arch: Arch, implementation: str) -> Weights:
    parameters = model_family(arch.name).parameters(arch)
    ops = select(implementation)
    return fill(
        parameters,
        dummy_tensors(parameters, seed=3),
        dtype=torch.float16,
        device=torch.device("cpu"),
        pack=lambda name, weight, bias: ops.pack_linear(
            weight, bias, gated=implementation == "triton" and name.endswith(".gate_up")
        ),
        origin="noise",
    )


def run(
    decoder: DenseDecoder, arch: Arch, keep: torch.Tensor | None, taps: Taps | None
) -> torch.Tensor:
    positions = torch.arange(TOKENS)
    batch = AttentionBatch(
        num_decode=0,
        page_size=8,
        page_table=torch.tensor([[1]], dtype=torch.int32),
        rows=torch.zeros(1, dtype=torch.int32),
        starts=torch.zeros(1, dtype=torch.int32),
        lengths=torch.full((1,), TOKENS, dtype=torch.int32),
        rows_host=[0],
        starts_host=[0],
        lengths_host=[TOKENS],
        slots=8 + positions,
        positions=positions,
    )
    pool = PagedKVPool(
        num_pages=2,
        page_size=8,
        num_layers=arch.num_layers,
        num_kv_heads=arch.num_kv_heads,
        head_dim=arch.head_dim,
        dtype=torch.float16,
        device=torch.device("cpu"),
    )
    attention = SdpaAttention()
    attention.plan(batch)
    return decoder.forward(torch.tensor([5, 9, 9, 40, 7]), batch, pool, attention, keep, taps)


@pytest.mark.parametrize("layers", [(), (0, 2), (1, 3)])
@pytest.mark.parametrize("keeps", [False, True])
def test_fused_equals_separate(layers: tuple[int, ...], keeps: bool) -> None:
    pytest.importorskip("triton", reason="the fused linears are written in it")
    arch = read_arch(replace(FACTS, config={**FACTS.config, "attention_bias": True}))
    ops: Ops = select("torch")
    cos_sin = build_cos_sin(arch.rope, 64, torch.device("cpu"), None)
    keep = torch.tensor([4, 1]) if keeps else None
    found = []
    for implementation in ("triton", "torch"):
        decoder = DenseDecoder(arch, load(arch, implementation), ops, cos_sin)
        assert decoder.stack.is_fused == (implementation == "triton")
        assert decoder.stack.pays(TOKENS) == (implementation == "triton")
        taps = Taps(layers=layers) if layers else None
        hidden = run(decoder, arch, keep, taps)
        found.append((hidden, [] if taps is None else taps.taken))
    (one, tapped), (other, wanted) = found
    torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
    assert len(tapped) == len(wanted) == len(layers)
    for a, b in zip(tapped, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
