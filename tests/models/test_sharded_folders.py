"""Folders of `tandem model shard` against the checkpoints they were made of: the same logits, to the
bit; and everything that is wrong with such a folder, by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import make_prompt, save_tiny
from safetensors import safe_open
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import srt.runner.shard as writer
from srt.cli.main import main
from srt.config.facts import ModelFacts
from srt.config.probe import probe_model
from srt.config.shards import SHARD_INDEX, check_sums, read_index
from srt.errors import ConfigError
from srt.parallel.group import ALONE, Group
from srt.runner.shard import Seat, write_shards
from tests.rank_processes import run_ranks
from tests.tiny_models import TINY, Driver, make_runner

PROMPT = make_prompt(TINY["vocab_size"], 30)

LATENT: dict[str, Any] = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 16,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "topk_method": "greedy",
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    biased = LlamaConfig(**TINY, attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
    models: dict[str, Any] = {
        "llama": LlamaForCausalLM(biased),
        "qwen3": Qwen3ForCausalLM(Qwen3Config(**TINY, head_dim=16)),
        "mixtral": MixtralForCausalLM(
            MixtralConfig(**TINY, num_local_experts=8, num_experts_per_tok=2)
        ),
        "deepseek": DeepseekV2ForCausalLM(DeepseekV2Config(**TINY | LATENT)),
    }
    for name, model in models.items():
        save_tiny(model, folder / name)
    return {name: folder / name for name in models}


def cut(source: Path, ranks: int, out: Path, dtype: str | None = None) -> ModelFacts:
    facts = probe_model(source, source.name)
    write_shards(facts, ranks, out, dtype, lambda phase, fraction: None)
    return probe_model(out, out.name)


def logits_of(group: Group, folders: dict[str, str]) -> dict[str, torch.Tensor]:
    found = {}
    for name, folder in folders.items():
        facts = probe_model(folder, name)
        quantization = "int8" if name.startswith("int8") else None
        runner = make_runner(facts, group=group, quantization=quantization)
        assert runner.load_format == facts.format
        found[name] = Driver(runner).run(PROMPT, [16, 10])
    return found


def test_shards_are_the_checkpoint(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """On one rank and on two. int8 scales are made while loading, of the rank's own share."""
    sources = {name: str(path) for name, path in checkpoints.items()}
    sources["int8-llama"] = sources["llama"]
    for ranks in (1, 2):
        folders = {}
        for name, path in sources.items():
            folders[name] = str(tmp_path / f"{name}-{ranks}")
            facts = cut(Path(path), ranks, Path(folders[name]))
            assert (facts.format, facts.shards) == ("sharded", ranks)
            assert facts.num_parameters == probe_model(path, name).num_parameters
        given = sources | {f"{name} cut": path for name, path in folders.items()}
        if ranks == 1:
            found = [logits_of(ALONE, given)]
        else:
            found = run_ranks(2, logits_of, given, folder=tmp_path)
        for each in found:
            for name in sources:
                assert torch.equal(each[f"{name} cut"], each[name]), (name, ranks)


def test_types(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Stored in another type it is the model in that type; nothing else of it changes."""
    half = cut(checkpoints["qwen3"], 1, tmp_path / "half", "bfloat16")
    assert half.dtype == "bfloat16"
    plain = probe_model(checkpoints["qwen3"], "plain")
    found, expected = (
        Driver(make_runner(facts, dtype="bfloat16")).run(PROMPT, [16]) for facts in (half, plain)
    )
    assert torch.equal(found, expected)


def test_weights_of_noise_need_a_configuration_only(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """What `--load-format dummy --seed 1` computes, divided: to try the command out."""
    bare, out = tmp_path / "bare", tmp_path / "out"
    bare.mkdir()
    shutil.copy(checkpoints["deepseek"] / "config.json", bare)
    order = ["model", "shard", "--model", str(bare), "--load-format", "dummy", "--out", str(out)]
    assert main(order) == 0
    facts = probe_model(out, "out")
    assert facts.format == "sharded"
    found = Driver(make_runner(facts)).run(PROMPT, [16])
    noise = make_runner(probe_model(bare, "bare"), load_format="dummy", seed=1)
    assert torch.equal(found, Driver(noise).run(PROMPT, [16]))


def test_a_rank_has_its_share_and_a_tied_head_is_stored_once(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "FILE_BYTES", 30_000)  # several files for a rank
    cut(checkpoints["llama"], 1, tmp_path / "one")
    cut(checkpoints["llama"], 2, tmp_path / "two")
    one, two = read_index(tmp_path / "one"), read_index(tmp_path / "two")
    assert one is not None and two is not None
    stored = {name for file in one.files for name in file.tensors}
    assert "embedding" in stored and "head" not in stored
    for rank in range(2):
        files = two.of_rank(rank)
        assert len(files) > 2
        found = {}
        for file in files:
            with safe_open(tmp_path / "two" / file.name, framework="pt") as opened:
                found |= {name: opened.get_slice(name).get_shape() for name in file.tensors}
        assert found["head"] == [49 - rank, 48] and found["layers.0.qkv"] == [40, 48]
        assert found["layers.1.down"] == [48, 40] and found["layers.1.gate_up"] == [80, 48]


def test_what_is_wrong_is_named(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    facts = cut(checkpoints["llama"], 2, tmp_path / "good")
    cut(checkpoints["llama"], 2, tmp_path / "other")
    file = "rank-1-of-2-00000.safetensors"

    def lose(folder: Path) -> None:
        (folder / file).unlink()

    def shorten(folder: Path) -> None:
        (folder / file).write_bytes((folder / file).read_bytes()[:-1])

    def exchange(folder: Path) -> None:
        shutil.copy(tmp_path / "other" / file, folder / file)

    def swap(folder: Path) -> None:
        shutil.copy(folder / "rank-0-of-2-00000.safetensors", folder / file)

    def forget(folder: Path) -> None:
        (folder / SHARD_INDEX).unlink()

    cases: list[tuple[Callable[[Path], None], str]] = [
        (lose, f"{file} is missing"),
        (shorten, f"{file} has .* bytes"),
        (exchange, f"{file} was not written together"),
        (swap, f"{file} "),
        (forget, f"has no {SHARD_INDEX}"),
    ]
    for index, (spoil, words) in enumerate(cases):
        folder = shutil.copytree(tmp_path / "good", tmp_path / f"bad-{index}")
        spoil(folder)
        with pytest.raises(ConfigError, match=words):
            make_runner(replace(facts, path=str(folder)), group=Seat(1, 2))
    with pytest.raises(ConfigError, match="stored for 2 ranks, not for 1"):
        make_runner(facts)


def test_a_changed_configuration_and_a_damaged_index(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "cut"
    cut(checkpoints["llama"], 1, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    with pytest.raises(ConfigError, match=r"rms_norm_eps is 0\.5, but the model was divided with"):
        probe_model(folder, "cut")
    (folder / "config.json").write_text(json.dumps(config))
    for text, words in (
        ("{", "not JSON"),
        ('{"version": 2}', "version 2"),
        ('{"version": 1}', "no index of shards"),
    ):
        (folder / SHARD_INDEX).write_text(text)
        with pytest.raises(ConfigError, match=words):
            probe_model(folder, "cut")


def test_the_command(
    checkpoints: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = str(checkpoints["llama"]), tmp_path / "out"
    order = ["model", "shard", "--model", source, "--out", str(out), "--tensor-parallel-size"]
    assert main([*order, "4"]) == 2
    assert (
        "6 attention heads, which 4 ranks cannot divide; allowed: 1, 2" in capsys.readouterr().err
    )
    assert not out.exists()
    assert main([*order, "2"]) == 0
    assert f"--model {out} --tensor-parallel-size 2" in capsys.readouterr().out
    assert main([*order, "2"]) == 2
    assert "is there already" in capsys.readouterr().err
    assert main(["model", "shard", "--model", str(out), "--out", str(tmp_path / "again")]) == 2
    assert "is sharded" in capsys.readouterr().err
    assert main(["model", "check", str(out)]) == 0
    file = next(out.glob("rank-1*"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    index = read_index(out)
    assert index is not None
    with pytest.raises(ConfigError, match=f"{file.name} is not what was written"):
        check_sums(out, index)
