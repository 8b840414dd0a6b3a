"""Quantized checkpoints answer like plain ones of the values they stand for; others are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import make_prompt, save_tiny
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from srt.errors import ConfigError
from srt.quant.stored import read_stored
from tests.tiny_models import TINY, Driver, make_runner, read_facts

FILE = "model.safetensors"
GROUP = 32
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # column c of eight lies in the nibble PLACES[c] of AWQ's words


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    save_tiny(LlamaForCausalLM(LlamaConfig(**TINY | SIZES, tie_word_embeddings=False)), folder)
    return folder, load_file(folder / FILE)


def to_words(steps: torch.Tensor, places: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """[R, C] of 0..15 -> [R, C / 8] int32."""
    eights = steps.long().view(len(steps), -1, 8)
    words = sum(eights[:, :, column] << 4 * place for column, place in enumerate(places))
    return (words - (words >> 31 << 32)).to(torch.int32)


def int4(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Steps [N, K], zeros and scales [N, K / GROUP], and what they stand for."""
    groups = weight.view(len(weight), -1, GROUP)
    scales = (groups.amax(2) - groups.amin(2)).div(15).half()
    zeros = (-groups.amin(2) / scales.float()).round().clamp(1, 15)
    steps = (groups / scales.float()[:, :, None] + zeros[:, :, None]).round().clamp(0, 15)
    plain = ((steps - zeros[:, :, None]) * scales.float()[:, :, None]).view(weight.shape)
    return steps.view(weight.shape), zeros, scales, plain


def as_awq(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    steps, zeros, scales, plain = int4(weight)
    pieces = {
        "qweight": to_words(steps.t(), PLACES),
        "qzeros": to_words(zeros.t(), PLACES),
        "scales": scales.t().contiguous(),
    }
    return pieces, plain


def as_gptq(weight: torch.Tensor, lower: int = 1) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    steps, zeros, scales, plain = int4(weight)
    pieces = {
        "qweight": to_words(steps).t().contiguous(),
        "qzeros": to_words(zeros.t() - lower),
        "scales": scales.t().contiguous(),
        "g_idx": (torch.arange(weight.shape[1]) // GROUP).int(),
        "bias": torch.zeros(len(weight)),
    }
    return pieces, plain


def as_fp8(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    scales = weight.abs().amax(1, keepdim=True) / 448
    values = (weight / scales).to(torch.float8_e4m3fn)
    pieces = {"weight": values, "weight_scale": scales, "input_scale": torch.ones(1)}
    return pieces, values.float() * scales


def as_fp8_of_one_scale(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    scale = weight.abs().max() / 448
    values = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale": scale}, values.float() * scale


FP8_GROUP = {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "awq": (as_awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}),
    "gptq": (as_gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}),
    "gptq_v2": (
        lambda weight: as_gptq(weight, lower=0),
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "checkpoint_format": "gptq_v2"},
    ),
    "fp8": (as_fp8_of_one_scale, {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "compressed": (
        as_fp8,
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {"group_0": FP8_GROUP},
        },
    ),
}


def write(
    saved: tuple[Path, dict[str, torch.Tensor]], folder: Path, kind: str
) -> tuple[Path, Path]:
    """The folders of the quantized checkpoint and of a plain one with its values."""
    convert, config = KINDS[kind]
    plain, quantized = dict(saved[1]), dict(saved[1])
    for name, weight in saved[1].items():
        if name.endswith("_proj.weight"):
            pieces, plain[name] = convert(weight.float())
            del quantized[name]
            prefix = name.removesuffix("weight")
            quantized |= {f"{prefix}{piece}": value for piece, value in pieces.items()}
    written = json.loads((saved[0] / "config.json").read_text())
    folders = folder / "quantized", folder / "plain"
    for path, tensors, extra in zip(
        folders, (quantized, plain), ({"quantization_config": config}, {}), strict=True
    ):
        path.mkdir()
        (path / "config.json").write_text(json.dumps(written | extra))
        save_file({name: value.contiguous() for name, value in tensors.items()}, path / FILE)
    return folders


def logits_of(folder: Path) -> torch.Tensor:
    facts = read_facts(folder)
    return Driver(make_runner(facts)).run(make_prompt(facts.vocab_size, 20), [20])


@pytest.mark.parametrize("kind", KINDS)
def test_it_answers_like_the_plain_one(kind, saved, tmp_path):
    quantized, plain = write(saved, tmp_path, kind)
    torch.testing.assert_close(logits_of(quantized), logits_of(plain), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["fp8", "compressed"])
def test_experts_in_fp8_answer_like_plain_ones(kind: str, tmp_path: Path) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = Qwen3MoeConfig(**TINY | SIZES, head_dim=16, **experts)
    folder = tmp_path / "whole"
    save_tiny(Qwen3MoeForCausalLM(config), folder)
    quantized, plain = write((folder, load_file(folder / FILE)), tmp_path, kind)
    torch.testing.assert_close(logits_of(quantized), logits_of(plain), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes'; supported: awq"),
        ({"quant_method": "awq", "bits": 8}, "bits 8"),
        ({"quant_method": "awq", "version": "gemv"}, "version 'gemv'"),
        ({"quant_method": "gptq", "desc_act": True}, "desc_act True"),
        ({"quant_method": "gptq", "group_size": -1}, "group_size -1"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "weight_block_size"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "pack-quantized"),
    ],
)
def test_what_is_not_read_is_refused_by_name(change, message):
    with pytest.raises(ConfigError, match=message):
        read_stored({"quantization_config": {"group_size": 128} | change}, "here")


def test_rows_of_mixed_groups_are_refused(saved, tmp_path):
    folder, _ = write(saved, tmp_path, "gptq")
    tensors = load_file(folder / FILE)
    name = "model.layers.0.mlp.up_proj.g_idx"
    tensors[name] = tensors[name].flip(0).contiguous()
    save_file(tensors, folder / FILE)
    with pytest.raises(ConfigError, match=r"up_proj\.g_idx mixes the rows of groups"):
        logits_of(folder)


def test_a_missing_piece_is_named(saved, tmp_path):
    folder, _ = write(saved, tmp_path, "awq")
    tensors = load_file(folder / FILE)
    del tensors["model.layers.1.mlp.down_proj.qzeros"]
    save_file(tensors, folder / FILE)
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.down_proj lacks qzeros"):
        logits_of(folder)
