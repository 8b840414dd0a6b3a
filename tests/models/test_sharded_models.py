"""Ranks that share a model against one that has all of it: the same logits, bit by bit on every rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from parity import make_prompt, save_tiny
from safetensors.torch import load_file
from test_quantized_checkpoints import FILE, write
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from kernels.linear import AddingLinear, FusedLinear
from kernels.linear.reference import quantize_rows
from srt.layers.parameters import Parameter, linear
from srt.layers.sharding import pack_share, shard
from srt.models.arch import read_arch
from srt.models.registry import model_family
from srt.parallel.group import ALONE
from tests.rank_processes import logits_of, run_ranks, talk
from tests.tiny_models import TINY, make_runner, read_facts

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
PROMPT = make_prompt(TINY["vocab_size"], 40)


@dataclass(frozen=True)
class Seat:
    """A rank of a group that only says who it is."""

    rank: int
    size: int
    add = ALONE.add
    join = ALONE.join
    smallest = ALONE.smallest
    share = ALONE.share
    close = ALONE.close


def save_families(folder: Path) -> dict[str, Path]:
    """One checkpoint for everything that divides differently: KV heads that divide and one that does
    not, biases behind columns and behind rows, norms of heads, a tied head, an odd vocabulary."""
    models: dict[str, Any] = {
        "llama": LlamaForCausalLM(LlamaConfig(**TINY)),
        "llama-biased": LlamaForCausalLM(
            LlamaConfig(**TINY, attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
        ),
        "llama-one-kv-head": LlamaForCausalLM(LlamaConfig(**{**TINY, "num_key_value_heads": 1})),
        "qwen2": Qwen2ForCausalLM(Qwen2Config(**TINY)),
        "qwen3": Qwen3ForCausalLM(Qwen3Config(**TINY, head_dim=16, tie_word_embeddings=True)),
        "qwen3-moe": Qwen3MoeForCausalLM(Qwen3MoeConfig(**TINY, head_dim=16, **EXPERTS)),
        "mixtral": MixtralForCausalLM(
            MixtralConfig(**TINY, num_local_experts=8, num_experts_per_tok=2)
        ),
    }
    for name, model in models.items():
        save_tiny(model, folder / name)
    return {name: folder / name for name in models}


def save_quantized(folder: Path) -> dict[str, Path]:
    """Weights that come in groups of columns, and weights with a scale for each row."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4}
    save_tiny(LlamaForCausalLM(LlamaConfig(**TINY | sizes)), folder / "plain")
    saved = folder / "plain", load_file(folder / "plain" / FILE)
    found = {}
    for kind in ("awq", "compressed"):
        (folder / kind).mkdir()
        found[kind], _ = write(saved, folder / kind, kind)
    return found


def test_two_ranks_compute_what_one_computes(tmp_path: Path) -> None:
    folders = save_families(tmp_path)
    paths = {name: str(path) for name, path in (folders | save_quantized(tmp_path)).items()}
    given = {**paths, "dummy": paths["llama"]}, PROMPT
    alone = logits_of(ALONE, *given)
    first, second = run_ranks(2, logits_of, *given, folder=tmp_path)
    for name, expected in alone.items():
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(first[name].argmax(1), expected.argmax(1)), name


def test_ranks_divide_weights_and_kv(tmp_path: Path) -> None:
    """All but embedding, norms and row biases; one KV head for two ranks is kept by both."""
    folders = save_families(tmp_path)
    for name, path in folders.items():
        facts = read_facts(path)
        whole = make_runner(facts)
        halves = [make_runner(facts, group=Seat(rank, 2)) for rank in range(2)]
        heads = facts.num_kv_heads
        for half in halves:
            assert half.arch.num_heads == whole.arch.num_heads // 2
            assert half.kv_bytes_per_token * heads == whole.kv_bytes_per_token, name
            assert half.pool.keys(0).shape[1] == max(1, heads // 2)
            assert half.weight_bytes < 0.75 * whole.weight_bytes, name


def test_shares_make_up_the_whole(tmp_path: Path) -> None:
    """Each entry of a tensor is kept by one rank, by all of them, or by those that share a KV head."""
    for path in save_families(tmp_path).values():
        facts = read_facts(path)
        for heads, kv_heads, size in ((6, 2, 2), (8, 2, 4), (8, 1, 8)):
            arch = replace(read_arch(facts), num_heads=heads, num_kv_heads=kv_heads)
            parameters = model_family(facts.architecture).parameters(arch)
            shares = [shard(parameters, arch.head_dim, Seat(rank, size)) for rank in range(size)]
            for index, parameter in enumerate(parameters):
                check_shares(parameter, [share[index] for share in shares], size, kv_heads)


def check_shares(whole: Parameter, shares: list[Parameter], size: int, kv_heads: int) -> None:
    for place, part in enumerate((*whole.parts, *whole.biases)):
        counts = torch.zeros(part.shape, dtype=torch.int64)
        for share in shares:
            cut = (*share.parts, *share.biases)[place].cut
            (counts if cut is None else cut.of(counts)).add_(1)
        is_kv = whole.sharding == "heads" and place % 3 > 0
        is_whole = whole.sharding is None or (whole.sharding == "row" and place > 0)
        expected = size if is_whole else max(1, size // kv_heads) if is_kv else 1
        assert counts.unique().tolist() == [expected], (whole.name, part)


def test_a_column_quantizes_as_it_does_in_the_whole() -> None:
    weight = torch.randn(12, 8, generator=torch.Generator().manual_seed(0))
    [share] = shard([linear("x.gate_up", "x.", {"gate": 12}, 8)], 4, Seat(1, 2))
    cut = share.parts[0].cut
    assert cut is not None
    values, scales = quantize_rows(weight)
    own_values, own_scales = quantize_rows(cut.of(weight))
    assert torch.equal(own_values, cut.of(values)) and torch.equal(own_scales, scales[6:])


class Adding:
    """A linear that can take in the sum behind it, and writes it as kernels do."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight, self.bytes = weight, weight.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T

    def added(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual.add_(self(x))


def test_what_is_added_to_a_sum_is_added_once() -> None:
    weight, x, residual = (torch.randn(4, 8) for _ in range(3))
    residual = residual[:, :4].contiguous()
    shares = [
        pack_share("x.down", part, None, lambda w, b: Adding(w), Seat(rank, 2), 8)
        for rank, part in enumerate(weight.split(4, dim=1))
    ]
    made = []
    for share, part in zip(shares, x.split(4, dim=1), strict=True):
        assert isinstance(share, AddingLinear) and not isinstance(share, FusedLinear)
        made.append(share.added(part, residual.clone()))
    torch.testing.assert_close(made[0] + made[1], residual + x @ weight.T)


def test_the_group_agrees_and_shares(tmp_path: Path) -> None:
    first, second = run_ranks(2, talk, folder=tmp_path)
    columns = [[0.0, 1.0, 10.0, 11.0], [2.0, 3.0, 12.0, 13.0]]
    assert first == second == [3, "050505", None, "", columns]
