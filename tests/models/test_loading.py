"""Loading: formats agree, and whatever is wrong with a checkpoint is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quantize
from gguf import dequantize as exact_values
from parity import make_prompt, save_tiny
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from srt.config.facts import ModelFacts
from srt.errors import ConfigError
from srt.loading.dummy import dummy_tensors
from srt.loading.gguf_blocks import decode
from srt.loading.gguf_index import GGUFFile
from srt.models.arch import read_arch
from srt.models.llama import Llama
from tests.tiny_models import TINY, Driver, make_runner, read_facts

FILE = "model.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny(LlamaForCausalLM(LlamaConfig(**TINY, tie_word_embeddings=False)), folder)
    return folder, load_file(folder / FILE)


def rewrite(
    saved: tuple[Path, dict[str, torch.Tensor]], folder: Path, tensors: dict[str, torch.Tensor]
) -> ModelFacts:
    (folder / "config.json").write_bytes((saved[0] / "config.json").read_bytes())
    save_file(tensors, folder / FILE)
    return read_facts(folder)


def logits_of(facts: ModelFacts, **changes: str) -> torch.Tensor:
    return Driver(make_runner(facts, **changes)).run(make_prompt(facts.vocab_size, 20), [20])


def test_a_missing_tensor_is_named(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    tensors = dict(saved[1])
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    facts = rewrite(saved, tmp_path, tensors)
    with pytest.raises(ConfigError, match=r"missing tensors: model\.layers\.1\.self_attn\.k_proj"):
        make_runner(facts)


def test_an_unknown_tensor_is_named(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    facts = rewrite(saved, tmp_path, {**saved[1], "model.extra.weight": torch.zeros(3)})
    with pytest.raises(ConfigError, match=r"'model\.extra\.weight' belongs to no parameter"):
        make_runner(facts)


def test_a_misshapen_tensor_is_named_with_both_shapes(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    facts = rewrite(saved, tmp_path, {**saved[1], name: torch.zeros(48, 81)})
    with pytest.raises(ConfigError, match=r"down_proj.*\[48, 81\].*\[48, 80\]"):
        make_runner(facts)


def test_a_tied_head_that_is_stored_again_and_old_rope_tables_are_ignored(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    rewrite(saved, tmp_path, {**saved[1], **extra})
    tied = read_facts(tmp_path, tie_word_embeddings=True)
    assert logits_of(tied).isfinite().all()


def test_no_safetensors_says_which_formats_there_are(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    facts = replace(read_facts(saved[0]), path=str(tmp_path))
    with pytest.raises(ConfigError, match=r"no \*\.safetensors here"):
        make_runner(facts)


def test_a_damaged_file_is_named(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    facts = rewrite(saved, tmp_path, saved[1])
    (tmp_path / FILE).write_bytes(b"\x08\x00\x00\x00")
    with pytest.raises(ConfigError, match="not a readable safetensors file"):
        make_runner(facts)


def test_shards_equal_one_file(saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    LlamaForCausalLM.from_pretrained(saved[0]).save_pretrained(tmp_path, max_shard_size="60KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    torch.testing.assert_close(
        logits_of(read_facts(tmp_path)), logits_of(read_facts(saved[0])), rtol=0, atol=0
    )
    next(tmp_path.glob("*.safetensors")).unlink()
    with pytest.raises(ConfigError, match="names the shard"):
        make_runner(read_facts(tmp_path))


def test_a_gguf_file_equals_the_safetensors_it_came_from(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    facts = write_gguf(saved, tmp_path / "tiny.gguf")
    torch.testing.assert_close(logits_of(facts), logits_of(read_facts(saved[0])), rtol=0, atol=0)


def test_gguf_rope_divisors_slow_the_rotation(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    """A file with stored divisors of 4 is the same model as one with linear scaling by 4."""
    divided = write_gguf(saved, tmp_path / "a.gguf", divisor=4.0)
    linear = replace(
        divided,
        path=write_gguf(saved, tmp_path / "b.gguf").path,
        config={
            **divided.config,
            "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
        },
    )
    torch.testing.assert_close(logits_of(divided), logits_of(linear), rtol=1e-6, atol=1e-6)


def test_a_truncated_gguf_file_is_refused(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    path = tmp_path / "tiny.gguf"
    facts = write_gguf(saved, path)
    content = path.read_bytes()
    for size in (10, 200, len(content) - 5000):
        path.write_bytes(content[:size])
        with pytest.raises(ConfigError, match="not a readable GGUF file"):
            make_runner(facts)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_1", "F16", "BF16", "F32"])
def test_block_formats_decode_like_the_gguf_package(kind: str) -> None:
    values = np.random.default_rng(0).standard_normal((6, 64)).astype(np.float32)
    number = GGMLQuantizationType[kind]
    packed = quantize(values, number)
    raw = torch.from_numpy(packed.view(np.uint8).reshape(-1).copy())
    expected = torch.from_numpy(np.array(exact_values(packed, number)))
    torch.testing.assert_close(
        decode(raw, number, (6, 64), torch.float32), expected, rtol=0, atol=0
    )


def test_dummy_weights_depend_on_seed_and_name_only(
    saved: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    facts = read_facts(saved[0])
    parameters = Llama.parameters(read_arch(facts))
    first = dict(dummy_tensors(parameters, 1))
    second = dict(dummy_tensors(list(reversed(parameters)), 1))
    other = dict(dummy_tensors(parameters, 2))
    assert first.keys() == second.keys() == saved[1].keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
    assert logits_of(facts, load_format="dummy").isfinite().all()


def write_gguf(
    saved: tuple[Path, dict[str, torch.Tensor]], path: Path, divisor: float | None = None
) -> ModelFacts:
    """The tiny model as llama.cpp's converter stores it: renamed, q and k permuted per head."""
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "model.layers": "blk",
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
    }
    writer = GGUFWriter(path, "llama")
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc", "ü"])
    writer.add_array("numbers", [1, 2, 3])
    writer.add_bool("flag", True)
    if divisor is not None:
        writer.add_tensor("rope_freqs.weight", np.full(4, divisor, dtype=np.float32))
    for name, value in saved[1].items():
        array = value.numpy()
        for part, heads in (("q_proj", 6), ("k_proj", 2)):
            if part in name:
                halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
                array = halves.swapaxes(1, 2).reshape(array.shape)
        for long, short in names.items():
            name = name.replace(long, short)
        writer.add_tensor(name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert GGUFFile(path).tensors
    return replace(read_facts(saved[0]), path=str(path), format="gguf")
