"""MiMo against transformers' Qwen2, which computes the same; its folder holds MTP layers besides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import CHUNKINGS, make_prompt
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from srt.config.probe_hf import probe_hf
from srt.config.probe_layers import layer_facts
from srt.errors import ConfigError
from srt.models.mtp import Mtp
from tests.layered_models import NUM_LAYERS, load_network, save_noisy
from tests.tiny_models import Driver, make_runner, read_facts


def change(folder: Path, **tensors: Any) -> None:
    file = folder / "model.safetensors"
    found = {**load_file(file), **{name.replace("/", "."): each for name, each in tensors.items()}}
    save_file({name: each for name, each in found.items() if each is not None}, file)


def test_mimo_is_qwen2(tmp_path: Path) -> None:
    facts = save_noisy(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    kept = {key: value for key, value in config.items() if key != "architectures"}
    model = Qwen2ForCausalLM(Qwen2Config(**{**kept, "rope_parameters": {
        "rope_type": "default", "rope_theta": kept.pop("rope_theta")}})).eval()  # fmt: skip
    own = {k: v for k, v in load_file(tmp_path / "model.safetensors").items() if "mtp" not in k}
    model.load_state_dict(own)
    prompt = make_prompt(facts.vocab_size)
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0]
    for chunks in CHUNKINGS:
        found = Driver(make_runner(facts)).run(prompt, chunks)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_target_and_layers_take_their_own_tensors_and_no_others_are_there(tmp_path: Path) -> None:
    facts = save_noisy(tmp_path)
    its = layer_facts(facts)
    assert its is not None
    change(tmp_path, **{"model/mtp_layers/0/odd": torch.ones(3)})
    target = make_runner(facts)  # not the target's business
    with pytest.raises(ConfigError, match=r"model\.mtp_layers\.0\.odd"):
        load_network(target, its, Mtp(0), 0)
    load_network(target, its, Mtp(1), 1)
    change(tmp_path, **{"model/mtp_layers/0/odd": None, "model/layers/0/odd": torch.ones(3)})
    load_network(target, its, Mtp(0), 0)
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.odd"):
        make_runner(facts)
    change(tmp_path, **{"model/layers/0/odd": None, "model/mtp_layers/7/odd": torch.ones(3)})
    with pytest.raises(ConfigError, match=r"model\.mtp_layers\.7\.odd"):
        make_runner(facts)  # more layers than the configuration announces
    change(tmp_path, **{"model/mtp_layers/7/odd": None,
                        "model/mtp_layers/2/input_proj/weight": None})  # fmt: skip
    with pytest.raises(ConfigError, match=r"missing tensors: model\.mtp_layers\.2\.input_proj"):
        load_network(target, its, Mtp(2), 2)


def test_layers_are_found_where_the_configuration_says_so(tmp_path: Path) -> None:
    save_noisy(tmp_path)
    facts = probe_hf(tmp_path, "mimo")
    its = layer_facts(facts)
    assert its is not None and its.path == facts.path
    assert (its.architecture, its.num_layers) == ("MiMoMTP", 1)
    stored = load_file(tmp_path / "model.safetensors")
    size = sum(each.numel() for name, each in stored.items() if "mtp_layers.1" in name)
    assert abs(its.num_parameters - size) < 0.05 * size  # biases and norms left out
    assert NUM_LAYERS == facts.config["num_nextn_predict_layers"]
    assert layer_facts(read_facts(tmp_path, num_nextn_predict_layers=0)) is None
    with pytest.raises(ConfigError, match="not implemented; known: those of MiMoForCausalLM"):
        layer_facts(read_facts(tmp_path, architectures=["Qwen2ForCausalLM"]))
    with pytest.raises(ConfigError, match="must be a count, not 'two'"):
        layer_facts(read_facts(tmp_path, num_nextn_predict_layers="two"))
