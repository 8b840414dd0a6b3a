"""Models with experts: what is counted, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from srt.config.args import ServerArgs
from srt.config.dummy import dummy_facts
from srt.config.experts import num_experts, sparse_layers
from srt.config.facts import Facts
from srt.config.footprint import activation_bytes
from srt.config.probe_hf import probe_hf
from srt.config.resolve import Resolution, resolve
from srt.errors import ConfigError

SHAPE = Path(__file__).parent.parent.parent / "bench" / "shapes" / "qwen3-30b-a3b.json"
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def with_experts(**model: Any) -> Facts:
    facts = dummy_facts()
    config = {**facts.model.config, **EXPERTS}
    return dataclasses.replace(
        facts, model=dataclasses.replace(facts.model, config=config, **model)
    )


def decide(facts: Facts, **fields: Any) -> Resolution:
    return resolve(ServerArgs(**fields), facts, entropy=11)


def test_the_shape_has_its_thirty_billion_parameters(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(SHAPE.read_text())
    model = probe_hf(tmp_path, "shape")
    assert num_experts(model.config) == 128
    assert 30.4e9 < model.num_parameters < 30.6e9
    dense = {key: value for key, value in model.config.items() if key != "num_experts"}
    without = dataclasses.replace(model, config=dense)
    count = {"tokens": 8192, "rows": 256}
    more = activation_bytes(model, "bfloat16", **count)
    assert more > activation_bytes(without, "bfloat16", **count)


def test_which_layers_have_experts() -> None:
    assert sparse_layers({}, 3) == {0, 1, 2}
    assert sparse_layers({"decoder_sparse_step": 2}, 5) == {1, 3}
    assert sparse_layers({"mlp_only_layers": [0, 2]}, 4) == {1, 3}
    config = json.loads(SHAPE.read_text())
    assert len(sparse_layers(config, config["num_hidden_layers"])) == 48


def test_even_routing_is_for_noise_only() -> None:
    found = decide(with_experts(), moe_force_even_routing=True, load_format="dummy")
    assert found.values["exec"]["moe_force_even_routing"] is True
    assert decide(with_experts()).values["exec"]["moe_force_even_routing"] is False
    with pytest.raises(ConfigError, match="weights are real.*--load-format dummy"):
        decide(with_experts(), moe_force_even_routing=True)
    with pytest.raises(ConfigError, match="has no experts; leave it out"):
        decide(dummy_facts(), moe_force_even_routing=True, load_format="dummy")


def test_experts_are_not_kept_in_int8() -> None:
    with pytest.raises(ConfigError, match="int8.*has experts.*allowed: none"):
        decide(with_experts(), quantization="int8")
