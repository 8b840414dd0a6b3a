"""What the configuration decides about EAGLE drafts and about drafts of several layers."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from srt.config.args import ServerArgs
from srt.config.dummy import dummy_facts
from srt.config.explain import explain, render_table
from srt.config.facts import Facts
from srt.config.probe_layers import layer_facts
from srt.config.resolve import Resolution, resolve
from srt.config.runner_spec import RunnerSpec
from srt.errors import ConfigError
from srt.launch.prepare import probe

LAYERS = {"speculative_algorithm": "multi_layer"}
EAGLE = {"speculative_algorithm": "eagle", "speculative_draft_model": "small"}


def layered(count: int = 3) -> Facts:
    facts = dummy_facts()
    config = {"num_nextn_predict_layers": count, "intermediate_size": 96}
    model = replace(facts.model, architecture="MiMoForCausalLM", config=config)
    return replace(facts, model=model, draft=layer_facts(model))


def with_draft(**changes: Any) -> Facts:
    facts = dummy_facts()
    small: dict[str, Any] = {"name": "small", "path": "small", "num_layers": 1, **changes}
    return replace(facts, draft=replace(facts.model, **small))


def decide(facts: Facts, **given: Any) -> Resolution:
    return resolve(ServerArgs(**given), facts, entropy=1)


def test_a_runner_for_each_layer_and_an_entry_for_each_value() -> None:
    resolution = decide(layered(), **LAYERS)
    assert [spec.label for spec in resolution.runners] == [
        "target",
        "draft-1",
        "draft-2",
        "draft-3",
    ]
    assert [spec.step for spec in resolution.runners] == [None, 0, 1, 2]
    assert {spec.model_path for spec in resolution.runners} == {"dummy"}
    assert {spec.context_length for spec in resolution.runners} == {2048}
    spec = resolution.values["spec"]
    assert spec["speculative_draft_model"] == "dummy"
    assert (spec["speculative_num_steps"], spec["speculative_num_draft_tokens"]) == (3, 8)
    alone = decide(layered(), speculative_lookup=False, **LAYERS).values["spec"]
    assert alone["speculative_num_steps"] == alone["speculative_num_draft_tokens"] == 3
    assert spec["speculative_eagle_topk"] == 1
    for runner in resolution.runners[1:]:
        entries = {e.field: e for e in resolution.trail if e.field.startswith(f"{runner.label}.")}
        assert len(entries) == len(fields(RunnerSpec))
        assert all(entry.reason for entry in entries.values())


def test_each_runner_pays_from_the_one_budget() -> None:
    """Two layers of the target and one of each of three: 5 planes where there were 2."""
    alone = decide(layered(), max_total_tokens=2048).values["memory"]["kv_memory_gb"]
    for steps, planes in ((1, 3), (2, 4), (3, 5)):
        given = {**LAYERS, "speculative_num_steps": steps, "max_total_tokens": 2048}
        both = decide(layered(), **given).values["memory"]["kv_memory_gb"]
        assert both == pytest.approx(planes / 2 * alone)


def test_explain_shows_all_of_them_side_by_side() -> None:
    text = render_table(explain(decide(layered(2), **LAYERS)))
    header = next(line for line in text.splitlines() if line.startswith("runner "))
    assert header.split() == ["runner", "target", "draft-1", "draft-2"]
    assert "a runner for each layer" in text and "one for each layer that the draft has" in text


def test_the_layers_are_dummies_if_their_folder_is_not_read() -> None:
    resolution = decide(layered(), load_format="dummy", **LAYERS)
    assert {spec.load_format for spec in resolution.runners} == {"dummy"}
    own = decide(layered(), speculative_draft_load_format="dummy", **LAYERS)
    assert [spec.load_format for spec in own.runners] == ["safetensors", *["dummy"] * 3]


def test_eagle_takes_drafts_that_are_named_after_whole_models() -> None:
    for name in ("LlamaForCausalLMEagle", "LlamaForCausalLM", "Qwen2ForCausalLM"):
        resolution = decide(with_draft(architecture=name), **EAGLE)
        assert [spec.label for spec in resolution.runners] == ["target", "draft"]
    tree = decide(with_draft(), speculative_eagle_topk=3, **EAGLE).values["spec"]
    assert (tree["speculative_num_steps"], tree["speculative_num_draft_tokens"]) == (4, 12)
    header = render_table(explain(decide(with_draft(), **EAGLE)))
    assert "a small network" not in header and "target  " in header


@pytest.mark.parametrize(
    ("facts", "given", "words"),
    [
        (dummy_facts(), LAYERS, r"dummy has none"),
        (layered(), {**LAYERS, "speculative_eagle_topk": 2}, "guesses chains"),
        (layered(), {**LAYERS, "speculative_num_steps": 4}, "has 3.*allowed: 1 to 3"),
        (
            layered(),
            {**LAYERS, "speculative_num_draft_tokens": 4, "speculative_lookup": False},
            "4 was given with 3 MTP layers.*allowed: 3, one token for each layer",
        ),
        (
            layered(),
            {**LAYERS, "speculative_num_steps": 3, "speculative_num_draft_tokens": 2},
            "a chain has a token for each step; allowed: at least 3",
        ),
        (with_draft(), {**EAGLE, **LAYERS}, "is a LlamaForCausalLM; multi_layer guesses with"),
        (dummy_facts(), {"speculative_algorithm": "eagle"}, "needs --speculative-draft-model"),
        (with_draft(hidden_size=32), EAGLE, "hidden size 32.*has 64"),
        (with_draft(vocab_size=511), EAGLE, "511 tokens.*512"),
        (with_draft(architecture="MistralForCausalLM"), EAGLE, "is a MistralForCausalLM; eagle"),
        (with_draft(), {**EAGLE, "speculative_eagle_topk": 20}, "more than a tree may have"),
    ],
)
def test_refusals_name_the_flag_and_the_way_out(
    facts: Facts, given: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        decide(facts, **given)


def test_the_layers_are_found_in_the_models_own_folder(tmp_path: Path) -> None:
    config = {
        "architectures": ["MiMoForCausalLM"], "vocab_size": 97, "hidden_size": 48,
        "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
        "max_position_embeddings": 256, "num_nextn_predict_layers": 2,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = ServerArgs(model=str(tmp_path), load_format="dummy", **LAYERS)  # type: ignore[arg-type]
    facts = probe(args, str(tmp_path))
    assert facts.draft is not None and facts.draft.path == facts.model.path
    assert (facts.model.architecture, facts.draft.architecture) == ("MiMoForCausalLM", "MiMoMTP")
    assert len(resolve(args, facts, entropy=1).runners) == 3
    assert probe(replace(args, speculative_algorithm="ngram"), str(tmp_path)).draft is None
    lost = replace(args, speculative_draft_model="lost")
    with pytest.raises(ConfigError, match="^--speculative-draft-model lost is no file"):
        probe(lost, str(tmp_path))
    alone = replace(lost, speculative_algorithm=None)
    with pytest.raises(ConfigError, match="--speculative-draft-model lost was given, but nobody"):
        resolve(alone, probe(alone, str(tmp_path)), entropy=1)
