"""What the configuration decides about speculation, and what it refuses."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from srt.config.args import ServerArgs
from srt.config.dummy import dummy_facts
from srt.config.explain import explain, render_table
from srt.config.facts import Facts
from srt.config.resolve import Resolution, resolve
from srt.config.runner_spec import RunnerSpec
from srt.errors import ConfigError

TWO = {"speculative_algorithm": "standalone", "speculative_draft_model": "small"}


def two_models(**changes: Any) -> Facts:
    facts = dummy_facts()
    small: dict[str, Any] = {"name": "small", "path": "small", "num_layers": 1, **changes}
    return replace(facts, draft=replace(facts.model, **small))


def decide(facts: Facts | None = None, **given: Any) -> Resolution:
    return resolve(ServerArgs(**given), facts or two_models(), entropy=1)


def test_off_by_default() -> None:
    resolution = decide(dummy_facts())
    assert resolution.values["spec"] == {
        "speculative_algorithm": None, "speculative_draft_model": None,
        "speculative_num_draft_tokens": 0, "speculative_batch_tokens": 0,
        "speculative_num_steps": 0, "speculative_eagle_topk": 0, "speculative_confidence": 0.0,
        "speculative_lookup": False, "speculative_dspark_planner": "static",
        "speculative_dspark_budget": 0, "speculative_force_accept": 0.0,
    }  # fmt: skip
    assert decide(speculative_algorithm="none").runners == resolution.runners
    assert [spec.role for spec in resolution.runners] == ["target"]


def test_ngram_needs_no_second_runner() -> None:
    resolution = decide(dummy_facts(), speculative_algorithm="ngram")
    assert [spec.role for spec in resolution.runners] == ["target"]
    assert resolution.values["spec"]["speculative_num_draft_tokens"] == 8
    plain = decide(dummy_facts())
    assert resolution.values["schedule"] == plain.values["schedule"]


def test_the_draft_has_a_spec_of_its_own_and_an_entry_for_each_value() -> None:
    resolution = decide(**TWO)
    target, draft = resolution.runners
    assert (target.role, draft.role) == ("target", "draft")
    entries = [entry for entry in resolution.trail if entry.field.startswith("draft.")]
    assert sorted(entry.field for entry in entries) == sorted(
        f"draft.{field.name}" for field in fields(RunnerSpec)
    )
    for entry in entries:
        assert entry.reason and entry.source in ("typed", "file", "model", "rule")
        assert (
            entry.value
            == {f.name: getattr(draft, f.name) for f in fields(draft)}[
                entry.field.removeprefix("draft.")
            ]
        )


def test_one_budget_for_both() -> None:
    """A KV token costs what both runners keep of it: two layers here and one there."""
    alone = decide(max_total_tokens=2048).values["memory"]["kv_memory_gb"]
    both = decide(max_total_tokens=2048, **TWO).values["memory"]["kv_memory_gb"]
    assert both == pytest.approx(1.5 * alone)


def test_context_follows_target() -> None:
    for draft_length in (512, 100_000):
        resolution = decide(two_models(context_length=draft_length), context_length=1024, **TWO)
        assert [spec.context_length for spec in resolution.runners] == [1024, 1024]


def test_the_drafts_flags_leave_the_target_alone() -> None:
    plain = decide(**TWO)
    changed = decide(
        speculative_draft_attention_backend="sdpa",
        speculative_draft_load_format="dummy",
        speculative_draft_kv_cache_dtype="float32",
        **TWO,
    )
    assert changed.runners[0] == plain.runners[0]
    draft = changed.runners[1]
    assert (draft.load_format, draft.kv_cache_dtype) == ("dummy", "float32")
    assert draft.draft_attention_backend == "sdpa"
    assert (draft.prefill_attention_backend, draft.decode_attention_backend) == ("sdpa", "sdpa")


def test_explain_shows_both_side_by_side() -> None:
    text = render_table(explain(decide(**TWO)))
    header = next(line for line in text.splitlines() if line.startswith("runner "))
    assert header.split() == ["runner", "target", "draft"]
    assert "draft.context_length" in text and "it works at the same positions" in text


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"speculative_algorithm": "standalone"}, "needs --speculative-draft-model"),
        ({"speculative_draft_model": "small"}, "nobody guesses"),
        ({"speculative_num_draft_tokens": 3}, "nobody guesses"),
        ({"speculative_lookup": False}, "--no-speculative-lookup was given, but nobody guesses"),
        ({"speculative_lookup": True}, "--speculative-lookup was given, but nobody guesses"),
        ({**TWO, "speculative_algorithm": "ngram"}, "guesses without a model"),
        (
            {"speculative_algorithm": "ngram", "speculative_draft_attention_backend": "sdpa"},
            "--speculative-draft-attention-backend sdpa was given",
        ),
        ({**TWO, "speculative_draft_load_format": "gguf"}, "gguf was asked for"),
        (
            {
                **TWO,
                "native_kernels": True,
                "speculative_draft_attention_backend": "native",
                "speculative_draft_kv_cache_dtype": "float32",
            },
            "native reads a KV cache in bfloat16, not float32",
        ),
        ({"speculative_algorithm": "magic"}, "allowed: none, ngram, standalone"),
    ],
)
def test_refusals_name_the_flag_and_the_way_out(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        decide(**given)


def test_a_draft_of_another_vocabulary_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"511 tokens.*512"):
        decide(two_models(vocab_size=511), **TWO)
    with pytest.raises(ConfigError, match="a script runs no second model"):
        decide(two_models(format="script"), **TWO)


def test_a_forced_acceptance_is_for_measuring_chains_on_a_gpu() -> None:
    with pytest.raises(ConfigError, match="allowed with --device cuda and eagle or eagle3"):
        decide(dummy_facts(), speculative_algorithm="ngram", speculative_force_accept=3.0)
    with pytest.raises(ConfigError, match="force-accept"):
        decide(dummy_facts(), speculative_force_accept=3.0)
