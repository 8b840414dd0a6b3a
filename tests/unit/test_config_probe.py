"""Facts read from real files, written here: GGUF by its own package, safetensors by hand."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from srt.cli.options import cache_folder
from srt.config.facts import ModelFacts
from srt.config.probe import probe_machine, probe_model
from srt.errors import ConfigError
from srt.loading.fetch import cached_path, find_known

ROOT = Path(__file__).parents[2]
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
    "vocab_size": 32,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": True,
}


def write_hf(folder: Path, drop: str = "", **changes: Any) -> Path:
    config = {key: value for key, value in (CONFIG | changes).items() if key != drop}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_safetensors(path: Path, shapes: dict[str, list[int]], dtype: str = "BF16") -> None:
    """Header only; nobody here reads the data."""
    header: dict[str, Any] = {
        name: {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]}
        for name, shape in shapes.items()
    }
    data = json.dumps(header | {"__metadata__": {"format": "pt"}}).encode()
    path.write_bytes(struct.pack("<Q", len(data)) + data)


def write_gguf(path: Path, arch: str = "llama", drop: str = "", has_head: bool = False) -> Path:
    writer = gguf.GGUFWriter(path, arch)
    counts = {
        "block_count": 2, "context_length": 128, "embedding_length": 8, "feed_forward_length": 16,
        "attention.head_count": 4, "attention.head_count_kv": 2,
    }  # fmt: skip
    for key, value in counts.items():
        if key != drop:
            writer.add_uint32(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32(f"{arch}.rope.freq_base", 100000.0)
    writer.add_token_list([f"t{i}" for i in range(32)])
    writer.add_uint32("tokenizer.ggml.eos_token_id", 2)
    writer.add_uint32("tokenizer.ggml.eot_token_id", 3)
    writer.add_tensor("token_embd.weight", np.zeros((32, 8), np.float32))
    writer.add_tensor("output_norm.weight", np.zeros(8, np.float32))
    if has_head:
        writer.add_tensor("output.weight", np.zeros((32, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_hf_folder(tmp_path: Path) -> None:
    write_hf(tmp_path)
    write_safetensors(tmp_path / "model.safetensors", {"a": [32, 8], "b": [8]})
    generation = {"eos_token_id": [2, 5], "temperature": 0.6, "transformers_version": "5"}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert probe_model(tmp_path, "tiny") == ModelFacts(
        name="tiny",
        path=str(tmp_path),
        format="safetensors",
        architecture="LlamaForCausalLM",
        config=CONFIG,
        context_length=128,
        dtype="bfloat16",
        num_layers=2,
        hidden_size=8,
        num_heads=4,
        num_kv_heads=2,
        head_dim=2,
        vocab_size=32,
        num_parameters=264,
        end_token_ids=[2, 5],
        generation_defaults={"eos_token_id": [2, 5], "temperature": 0.6},
        stored_bytes=528,
    )


def test_hf_shards_are_summed_and_a_missing_one_is_named(tmp_path: Path) -> None:
    write_hf(tmp_path, drop="torch_dtype")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    write_safetensors(tmp_path / "one.safetensors", {"a": [10]}, "F16")
    with pytest.raises(ConfigError, match=r"two\.safetensors cannot be read"):
        probe_model(tmp_path, "tiny")
    write_safetensors(tmp_path / "two.safetensors", {"b": [3, 4]}, "F16")
    facts = probe_model(tmp_path, "tiny")
    assert (facts.num_parameters, facts.dtype) == (22, "float16")


def test_hf_without_weights_is_estimated(tmp_path: Path) -> None:
    facts = probe_model(write_hf(tmp_path, head_dim=4, num_key_value_heads=None), "tiny")
    attention = 2 * 8 * 16 + 2 * 8 * 16
    assert facts.num_parameters == 2 * (attention + 3 * 8 * 16) + 8 * 32
    assert (facts.head_dim, facts.num_kv_heads) == (4, 4)


@pytest.mark.parametrize("key", ["hidden_size", "vocab_size", "max_position_embeddings"])
def test_hf_missing_key_is_named(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"config\.json: {key} is missing"):
        probe_model(write_hf(tmp_path, drop=key), "tiny")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*supported: LlamaForCausalLM"),
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "InklingForCausalLM$",
        ),  # what scripts have is ours
        ({"architectures": []}, "architectures must be"),
        ({"hidden_size": "8"}, "hidden_size must be a positive integer, not '8'"),
        ({"num_attention_heads": True}, "num_attention_heads"),
        ({"eos_token_id": 32}, "eos_token_id has 32; token ids of this model are 0 to 31"),
        ({"torch_dtype": "int4"}, "dtype is 'int4'"),
    ],
)
def test_hf_wrong_value_is_named(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        probe_model(write_hf(tmp_path, **changes), "tiny")


@pytest.mark.parametrize("data", [b"", b"\0" * 8, b"\xff" * 16, struct.pack("<Q", 3) + b"[1]"])
def test_broken_safetensors_is_named(tmp_path: Path, data: bytes) -> None:
    write_hf(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(ConfigError, match=r"model\.safetensors is not a safetensors file"):
        probe_model(tmp_path, "tiny")


@pytest.mark.parametrize(
    ("arch", "architecture", "bias"),
    [
        ("llama", "LlamaForCausalLM", False),
        ("qwen2", "Qwen2ForCausalLM", True),
        ("qwen3", "Qwen3ForCausalLM", False),
    ],
)
def test_gguf_file(tmp_path: Path, arch: str, architecture: str, bias: bool) -> None:
    facts = probe_model(write_gguf(tmp_path / "m.gguf", arch), "tiny")
    assert (facts.format, facts.architecture, facts.vocab_size) == ("gguf", architecture, 32)
    assert (facts.num_layers, facts.hidden_size, facts.context_length) == (2, 8, 128)
    assert (facts.num_heads, facts.num_kv_heads, facts.head_dim) == (4, 2, 2)
    assert (facts.num_parameters, facts.end_token_ids) == (264, [2, 3])
    assert facts.config["rms_norm_eps"] == 1e-5  # not the float32 nearest to it
    assert facts.config["rope_theta"] == 100000.0
    assert (facts.config["tie_word_embeddings"], facts.config["attention_bias"]) == (True, bias)


def test_gguf_says_in_what_blocks_it_is_stored(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "llama")
    for key, value in (("block_count", 1), ("context_length", 64), ("embedding_length", 64)):
        writer.add_uint32(f"llama.{key}", value)
    for key in ("feed_forward_length", "attention.head_count", "vocab_size"):
        writer.add_uint32(f"llama.{key}", 4)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    for name, rows, kind in (
        ("token_embd.weight", 64, gguf.GGMLQuantizationType.Q8_0),
        ("blk.0.ffn_up.weight", 192, gguf.GGMLQuantizationType.Q4_1),
    ):
        data = gguf.quants.quantize(np.ones((rows, 64), np.float32), kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.add_tensor("output_norm.weight", np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    facts = probe_model(tmp_path / "q.gguf", "tiny")
    assert facts.stored == "Q4_1 (75.0%), Q8_0 (25.0%), F32 (<0.1%)"
    assert facts.dtype == "float16"  # what its blocks are scaled in, and its other types come near


def test_gguf_with_an_output_matrix_is_not_tied(tmp_path: Path) -> None:
    facts = probe_model(write_gguf(tmp_path / "m.gguf", has_head=True), "tiny")
    assert facts.config["tie_word_embeddings"] is False


def test_gguf_errors_name_file_and_key(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", drop="block_count")
    with pytest.raises(ConfigError, match=r"m\.gguf: llama\.block_count is missing"):
        probe_model(path, "tiny")
    with pytest.raises(ConfigError, match="general.architecture is 'mamba'.*llama, qwen2, qwen3"):
        probe_model(write_gguf(tmp_path / "n.gguf", "mamba"), "tiny")
    whole = write_gguf(tmp_path / "o.gguf").read_bytes()
    for size in (10, 100, 600):
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        with pytest.raises(ConfigError, match=r"cut\.gguf is not a"):
            probe_model(tmp_path / "cut.gguf", "tiny")


def test_the_default_model() -> None:
    known = find_known("smollm2-135m")
    assert known is not None
    path = cached_path(known, cache_folder())
    if path is None:
        pytest.skip("smollm2-135m is not in the cache: tandem model fetch smollm2-135m")
    facts = probe_model(path, "smollm2-135m")
    assert (facts.num_parameters, facts.vocab_size) == (134_515_008, 49_152)
    assert (facts.num_layers, facts.num_heads, facts.num_kv_heads, facts.head_dim) == (30, 9, 3, 64)
    assert (facts.context_length, facts.end_token_ids) == (8192, [2])
    assert facts.config["tie_word_embeddings"] is True


def write_script(folder: Path, **script: Any) -> Path:
    (folder / "tandem_script.json").write_text(json.dumps(script))
    return folder


def test_script_folder(tmp_path: Path) -> None:
    write_script(tmp_path, tokens=["a", "bc"], end_token_ids=[257], script=[256], context_length=64)
    facts = probe_model(tmp_path, "s")
    assert (facts.format, facts.architecture, facts.vocab_size) == ("script", "Script", 258)
    assert (facts.context_length, facts.end_token_ids) == (64, [257])


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ({"tokens": 5}, "tokens must be a list"),
        ({"tokens": [], "script": [256]}, "script has 256; token ids of this model are 0 to 255"),
        ({"end_token_ids": [-1]}, "end_token_ids has -1"),
        ({"scripts": {"hi": [999]}}, "hi has 999"),
        ({"scripts": []}, "scripts must map"),
        ({"context_length": 0}, "context_length must be a positive integer"),
    ],
)
def test_wrong_script(tmp_path: Path, script: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        probe_model(write_script(tmp_path, **script), "s")


def test_no_model_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no model at"):
        probe_model(tmp_path / "none", "m")
    with pytest.raises(ConfigError, match="is not a model"):
        probe_model(tmp_path, "m")


@pytest.fixture
def container(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    proc.mkdir()
    cgroup.mkdir()
    (proc / "meminfo").write_text("MemTotal: 8000 kB\nMemAvailable: 6000 kB\nHugePages_Total: 0\n")
    (proc / "cpuinfo").write_text("model name : x\nflags : avx2 amx_bf16\n")
    yield proc, cgroup


def test_machine_of_this_test(container: tuple[Path, Path]) -> None:
    facts = probe_machine(*container)
    assert (facts.memory_total, facts.memory_available) == (8_192_000, 6_144_000)
    assert facts.cpu_flags == ["avx2", "amx_bf16"]
    assert facts.num_cores == len(os.sched_getaffinity(0))
    assert facts.versions["python"] and facts.versions["torch"]


def test_container_limits_count(container: tuple[Path, Path]) -> None:
    proc, cgroup = container
    (cgroup / "memory.max").write_text("4096000\n")
    (cgroup / "memory.current").write_text("1000000\n")
    (cgroup / "cpu.max").write_text("100000 100000\n")
    facts = probe_machine(proc, cgroup)
    assert (facts.memory_total, facts.memory_available) == (4_096_000, 3_096_000)
    assert facts.num_cores == 1
    (cgroup / "memory.max").write_text("max\n")
    assert probe_machine(proc, cgroup).memory_total == 8_192_000


def test_machine_without_proc(tmp_path: Path) -> None:
    facts = probe_machine(tmp_path, tmp_path)
    assert 0 < facts.memory_available < facts.memory_total


def test_probing_imports_neither_torch_nor_numpy() -> None:
    program = (
        "import sys, srt.config.probe as p, srt.config.flags, srt.config.explain, srt.config.gate\n"
        "p.probe_machine()\nassert not {'torch', 'numpy', 'gguf'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)
