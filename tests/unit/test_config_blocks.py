"""What the configuration decides about drafts that guess a block at once, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from srt.config.args import ServerArgs
from srt.config.block_draft import read_block_draft
from srt.config.dummy import dummy_facts
from srt.config.explain import explain, render_table
from srt.config.facts import Facts
from srt.config.resolve import Resolution, resolve
from srt.errors import ConfigError

ARCHITECTURES = {"dflash": "DFlashDraftModel", "dspark": "Qwen3DSparkModel"}
HEADS = {"markov_rank": 8, "markov_head_type": "vanilla", "enable_confidence_head": True}
KEYS = {
    "dflash": {
        "block_size": 8,
        "dflash_config": {"mask_token_id": 511, "target_layer_ids": [0, 2]},
    },
    "dspark": {"block_size": 7, "mask_token_id": 511, "target_layer_ids": [0, 2], **HEADS},
}


def with_draft(algorithm: str, keys: dict[str, Any] | None = None, **changes: Any) -> Facts:
    facts = dummy_facts()
    target = replace(facts.model, num_layers=4)
    small: dict[str, Any] = {
        "name": "small",
        "path": "small",
        "num_layers": 2,
        "architecture": ARCHITECTURES[algorithm],
        "config": {**KEYS[algorithm], **(keys or {})},
        **changes,
    }
    return replace(facts, model=target, draft=replace(target, **small))


def decide(algorithm: str, facts: Facts | None = None, **given: Any) -> Resolution:
    args = ServerArgs(speculative_algorithm=algorithm, speculative_draft_model="small", **given)
    return resolve(args, facts or with_draft(algorithm), entropy=1)


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ("dflash", {"num_draft_tokens": 7, "confidence": 0.0, "dspark_planner": "static"}),
        ("dspark", {"num_draft_tokens": 7, "confidence": 0.1, "dspark_planner": "capped"}),
    ],
)
def test_the_block_says_how_many_guesses_there_are(
    algorithm: str, expected: dict[str, Any]
) -> None:
    """A block of 8 of which the first is known, and one of 7 whose first tells its successor."""
    found = decide(algorithm).values["spec"]
    assert found == {
        "speculative_algorithm": algorithm, "speculative_draft_model": "small",
        "speculative_num_steps": 0, "speculative_eagle_topk": 1, "speculative_batch_tokens": 16,
        "speculative_dspark_budget": 0, "speculative_force_accept": 0.0, "speculative_lookup": True,
        **{f"speculative_{name}": value for name, value in expected.items()},
    }  # fmt: skip
    fewer = decide(algorithm, speculative_num_draft_tokens=3).values["spec"]
    assert fewer["speculative_num_draft_tokens"] == 3


@pytest.mark.parametrize("algorithm", ("dflash", "dspark"))
def test_explain_shows_both_runners_and_where_the_number_comes_from(algorithm: str) -> None:
    text = render_table(explain(decide(algorithm)))
    header = next(line for line in text.splitlines() if line.startswith("runner "))
    assert header.split() == ["runner", "target", "draft"]
    assert "what the draft's blocks of" in text and "speculative_dspark_planner" in text


def test_planners_and_their_settings() -> None:
    ragged = decide(
        "dspark",
        speculative_dspark_planner="ragged",
        speculative_dspark_budget=9,
        speculative_confidence=0.2,
    ).values["spec"]
    assert ragged["speculative_dspark_planner"] == "ragged"
    assert (ragged["speculative_dspark_budget"], ragged["speculative_confidence"]) == (9, 0.2)
    silent = decide("dspark", with_draft("dspark", {"enable_confidence_head": False}))
    assert silent.values["spec"]["speculative_dspark_planner"] == "static"
    assert silent.values["spec"]["speculative_confidence"] == 0.0


@pytest.mark.parametrize(
    ("algorithm", "given", "words"),
    [
        ("dflash", {"speculative_num_draft_tokens": 8}, r"8 is more than .* 8 tokens.*at most 7"),
        ("dspark", {"speculative_num_draft_tokens": 8}, r"8 is more than .* 7 tokens.*at most 7"),
        ("dflash", {"speculative_num_steps": 2}, "guesses all tokens at once"),
        ("dflash", {"speculative_confidence": 0.2}, "guesses all tokens at once"),
        ("dspark", {"speculative_num_steps": 2}, "guesses all tokens at once"),
        ("dflash", {"speculative_eagle_topk": 2}, "guesses chains"),
        ("dflash", {"speculative_dspark_planner": "static"}, "does not say how sure it is"),
        ("dspark", {"speculative_dspark_budget": 4}, "only the ragged planner has a budget"),
        (
            "dspark",
            {"speculative_dspark_planner": "static", "speculative_confidence": 0.4},
            "the static planner verifies every guess",
        ),
        ("dspark", {"speculative_dspark_planner": "wild"}, "allowed: static, capped, ragged"),
    ],
)
def test_refusals_name_the_flag_and_the_way_out(
    algorithm: str, given: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        decide(algorithm, **given)


@pytest.mark.parametrize(
    ("algorithm", "keys", "words"),
    [
        ("dflash", {"block_size": 1}, "blocks of 1 tokens; allowed: 2 to 62"),
        ("dflash", {"block_size": 63}, "blocks of 63 tokens; allowed: 2 to 62"),
        ("dspark", {"block_size": 0}, "block_size must be a whole number of at least 1, not 0"),
        ("dspark", {"mask_token_id": 512}, "mask_token_id 512 in a vocabulary of 512 tokens"),
        ("dspark", {"mask_token_id": None}, "mask_token_id must be a whole number"),
        ("dspark", {"target_layer_ids": [1, 3]}, "listens to layer 3 .* has 4; .* up to 2"),
        ("dspark", {"target_layer_ids": [2, 1]}, "must be rising numbers"),
        ("dspark", {"target_layer_ids": [-2, 1]}, "must be rising numbers"),
        ("dspark", {"num_target_layers": 36}, "made for a target of 36 layers, this one has 4"),
        ("dspark", {"markov_rank": 0}, "markov_rank 0"),
        ("dspark", {"markov_head_type": "magic"}, "'magic'; known: vanilla, gated, rnn"),
        (
            "dspark",
            {"layer_types": ["full_attention", "sliding_attention"]},
            "blocks of one kind only",
        ),
    ],
)
def test_a_draft_that_cannot_work_is_refused_with_its_numbers(
    algorithm: str, keys: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        decide(algorithm, with_draft(algorithm, keys))


def test_a_draft_of_another_width_or_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="hidden size of 32, its target one of 64"):
        decide("dflash", with_draft("dflash", hidden_size=32))
    with pytest.raises(ConfigError, match="small is a DFlashDraftModel; dspark guesses with"):
        decide("dspark", with_draft("dflash"))
    with pytest.raises(ConfigError, match="needs --speculative-draft-model.*DFlashDraftModel"):
        decide("dflash", dummy_facts())
    with pytest.raises(ConfigError, match="ragged was given, but small does not say how sure"):
        decide("dspark", with_draft("dspark", {"enable_confidence_head": False}),
               speculative_dspark_planner="ragged")  # fmt: skip


@pytest.mark.parametrize(
    ("layers", "own", "taps"),
    [(36, 5, (2, 10, 18, 26, 34)), (28, 1, (15,)), (4, 2, (2,)), (30, 3, (2, 15, 28))],
)
def test_layers_are_spread_evenly_if_none_are_named(
    layers: int, own: int, taps: tuple[int, ...]
) -> None:
    found = read_block_draft(
        "DFlashDraftModel",
        {"block_size": 4, "mask_token_id": 0, "num_target_layers": layers},
        name="small",
        vocab_size=9,
        num_layers=own,
    )
    assert found.taps == taps
