"""What is resolved for models whose KV cache holds latents (MLA)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from config_gpu import gpu_facts

from srt.config.args import ServerArgs
from srt.config.dummy import dummy_facts
from srt.config.facts import Facts
from srt.config.gate import after_load
from srt.config.probe_hf import probe_hf
from srt.config.resolve import resolve
from srt.errors import ConfigError

SHAPE = Path(__file__).parent.parent.parent / "bench" / "shapes" / "deepseek-v2-lite.json"


def facts_on(facts: Facts, folder: Path, **changes: Any) -> Facts:
    (folder / "config.json").write_text(json.dumps({**json.loads(SHAPE.read_text()), **changes}))
    return replace(facts, model=probe_hf(folder, "lite"))


def test_sizes_are_those_of_latents(tmp_path: Path) -> None:
    model = facts_on(gpu_facts(), tmp_path).model
    assert (model.head_dim, model.num_kv_heads) == (192, 16)
    assert 15.6e9 < model.num_parameters < 15.8e9
    found = resolve(ServerArgs(load_format="dummy"), gpu_facts_of(tmp_path), entropy=0)
    entry = next(each for each in found.trail if each.field == "schedule.max_total_tokens")
    assert f"{27 * 576 * 2} bytes a token" in entry.reason
    assert found.values["schedule"]["max_prefix_chunk_tokens"] == 32768


def gpu_facts_of(folder: Path) -> Facts:
    return facts_on(gpu_facts(), folder)


@pytest.mark.parametrize(
    ("facts", "changes", "prefill", "why"),
    [
        (gpu_facts(), {}, "flashinfer", "the fastest here"),
        (gpu_facts(without=("flashinfer-python",)), {}, "triton", "not installed"),
        (
            gpu_facts(machine={"flashinfer_latent_trouble": "no operator"}),
            {},
            "triton",
            "no operator",
        ),
        (gpu_facts(card={"capability": 100}), {}, "triton", "on sm_90 only"),
        (gpu_facts(), {"v_head_dim": 64}, "triton", "heads of 192 and 128 numbers, not 192 and 64"),
    ],
)
def test_flashinfer_expands_where_it_can_and_triton_does_the_rest(
    facts: Facts, changes: dict[str, Any], prefill: str, why: str, tmp_path: Path
) -> None:
    found = resolve(
        ServerArgs(load_format="dummy"), facts_on(facts, tmp_path, **changes), entropy=0
    )
    [spec] = found.runners
    pair = (spec.prefill_attention_backend, spec.decode_attention_backend)
    assert pair == (prefill, "triton")
    entry = next(e for e in found.trail if e.field == "target.prefill_attention_backend")
    assert why in entry.reason


def test_flashinfer_by_name_is_refused_for_other_heads(tmp_path: Path) -> None:
    args = ServerArgs(load_format="dummy", prefill_attention_backend="flashinfer")
    [spec] = resolve(args, gpu_facts_of(tmp_path), entropy=0).runners
    assert spec.prefill_attention_backend == "flashinfer"
    with pytest.raises(ConfigError, match="192 and 128 numbers.*allowed here: triton, sdpa"):
        resolve(args, facts_on(gpu_facts(), tmp_path, qk_rope_head_dim=32), entropy=0)


@pytest.mark.parametrize(
    ("changes", "facts", "asked", "why"),
    [
        ({}, gpu_facts(), {}, None),
        ({}, gpu_facts(card={"capability": 80}), {}, None),
        ({"num_attention_heads": 128}, gpu_facts(), {}, None),
        ({"v_head_dim": 256}, gpu_facts(), {}, None),
        (
            {"kv_lora_rank": 256},
            gpu_facts(),
            {},
            "rotated keys of 512 and 64 numbers, not 256 and 64",
        ),
        ({"num_attention_heads": 24}, gpu_facts(), {}, "takes 1, 2, 4 .. 128 heads of MLA, not 24"),
        ({"num_attention_heads": 256}, gpu_facts(), {}, "heads of MLA, not 256"),
        ({}, gpu_facts(), {"deterministic": True}, "--deterministic forbids"),
        ({}, gpu_facts(machine={"flashinfer_absorbed_trouble": "no nvcc"}), {}, "here: no nvcc"),
        ({}, gpu_facts(machine={"flashinfer_latent_trouble": "no nvcc"}), {}, None),
    ],
)
def test_flashinfer_absorbs_when_asked(
    changes: dict[str, Any], facts: Facts, asked: dict[str, Any], why: str | None, tmp_path: Path
) -> None:
    args = ServerArgs(load_format="dummy", decode_attention_backend="flashinfer", **asked)
    here = facts_on(facts, tmp_path, **changes)
    if why is None:
        [spec] = resolve(args, here, entropy=0).runners
        assert spec.decode_attention_backend == "flashinfer" and spec.graph_sizes
        return
    with pytest.raises(ConfigError, match="--decode-attention-backend flashinfer") as raised:
        resolve(args, here, entropy=0)
    assert why in str(raised.value) and "allowed here: triton" in str(raised.value)


def test_flashinfer_does_both_halves(tmp_path: Path) -> None:
    both = ServerArgs(load_format="dummy", attention_backend="flashinfer")
    [spec] = resolve(both, gpu_facts_of(tmp_path), entropy=0).runners
    assert spec.prefill_attention_backend == spec.decode_attention_backend == "flashinfer"


def test_a_gpu_with_little_shared_memory_has_the_slow_reference_for_it(tmp_path: Path) -> None:
    facts = facts_on(gpu_facts(card={"capability": 89}), tmp_path)
    with pytest.raises(ConfigError, match="needs more shared memory for MLA") as raised:
        resolve(ServerArgs(load_format="dummy"), facts, entropy=0)
    assert "allowed here: --attention-backend sdpa" in str(raised.value)
    asked = ServerArgs(load_format="dummy", attention_backend="sdpa")
    [spec] = resolve(asked, facts, entropy=0).runners
    assert spec.decode_attention_backend == "sdpa"


def test_a_cpu_has_sdpa_and_native_is_refused(tmp_path: Path) -> None:
    facts = dummy_facts()
    machine = replace(facts.machine, compiler="cc")
    facts = facts_on(replace(facts, machine=machine), tmp_path, num_hidden_layers=1)
    asked: dict[str, Any] = {"load_format": "dummy", "max_total_tokens": 512, "context_length": 256}
    [spec] = resolve(ServerArgs(**asked), facts, entropy=0).runners
    assert spec.prefill_attention_backend == spec.decode_attention_backend == "sdpa"
    with pytest.raises(ConfigError, match="native cannot prefill MLA; allowed here: sdpa"):
        resolve(ServerArgs(**asked, attention_backend="native"), facts, entropy=0)


@pytest.mark.parametrize(
    ("facts", "asked", "words"),
    [
        (gpu_facts(), {}, "--kv-cache-dtype auto or bfloat16"),
        (dummy_facts(), {"dtype": "float32"}, "--kv-cache-dtype auto or float32"),
        (gpu_facts(), {"attention_backend": "sdpa"}, "--kv-cache-dtype auto or bfloat16"),
        (gpu_facts(), {"deterministic": True}, "--kv-cache-dtype auto or bfloat16"),
        (gpu_facts(), {"deterministic": True, "dtype": "float32"},
         "--kv-cache-dtype auto or float32, with --no-deterministic"),
    ],
)  # fmt: skip
def test_no_backend_reads_latents_in_8_bits_and_the_way_out_is_named(
    facts: Facts, asked: dict[str, Any], words: str, tmp_path: Path
) -> None:
    args = ServerArgs(load_format="dummy", kv_cache_dtype="fp8_e4m3", **asked)
    with pytest.raises(ConfigError, match="reads no latents in fp8_e4m3") as raised:
        resolve(args, facts_on(facts, tmp_path), entropy=0)
    assert str(raised.value).endswith(f"; allowed: {words}")


def test_ranks_have_all_latents_and_a_share_of_the_heads(tmp_path: Path) -> None:
    args = ServerArgs(load_format="dummy", tensor_parallel_size=2, device="cpu")
    found = resolve(args, gpu_facts_of(tmp_path), entropy=0)
    entry = next(each for each in found.trail if each.field == "parallel.tensor_parallel_size")
    assert "8 of 16 heads and all latents" in entry.reason
    entry = next(each for each in found.trail if each.field == "schedule.max_total_tokens")
    assert f"{27 * 576 * 2} bytes a token" in entry.reason or "plenty" in entry.reason


def test_explain_after_load_knows_the_gate(tmp_path: Path) -> None:
    args = ServerArgs(load_format="dummy", prefill_attention_backend="triton")
    facts = gpu_facts_of(tmp_path)
    found = after_load(args, facts, resolve(args, facts, entropy=0), use_mla_backend=True)
    field = "schedule.disable_chunked_prefix_cache"
    [entry] = [each for each in found.trail if each.field == field]
    assert (entry.value, entry.source) == (False, "load-time gate")
    assert entry.reason == "triton merges chunks of a cached MLA prefix"


def test_a_missing_size_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kv_lora_rank is missing"):
        facts_on(gpu_facts(), tmp_path, kv_lora_rank=None)


def test_trees_of_guesses_are_refused_on_a_gpu(tmp_path: Path) -> None:
    facts = gpu_facts_of(tmp_path)
    draft = replace(facts.model, architecture="LlamaForCausalLMEagle3")
    args = ServerArgs(
        load_format="dummy",
        speculative_algorithm="eagle3",
        speculative_draft_model="draft",
        speculative_eagle_topk=2,
    )
    with pytest.raises(ConfigError, match="eagle-topk 2.*cannot verify.*allowed here: 1"):
        resolve(args, replace(facts, draft=draft), entropy=0)
