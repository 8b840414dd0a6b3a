"""Guesses of a block at once: how many, and which of them are verified."""

from __future__ import annotations

from srt.config.algorithms import Algorithm
from srt.config.args import ServerArgs
from srt.config.block_draft import BlockDraft, check_target, read_block_draft
from srt.config.decisions import Decisions
from srt.config.facts import ModelFacts
from srt.errors import ConfigError

WORTH_VERIFYING = 0.1


def decide_block(
    args: ServerArgs,
    algorithm: str,
    known: Algorithm,
    target: ModelFacts,
    draft: ModelFacts,
    decisions: Decisions,
) -> None:
    """Raises ConfigError for a draft that does not fit its target, with both numbers."""
    shape = read_block_draft(
        draft.architecture,
        draft.config,
        name=draft.name,
        vocab_size=draft.vocab_size,
        num_layers=draft.num_layers,
    )
    check_target(
        shape,
        draft.config,
        name=draft.name,
        width=draft.hidden_size,
        hidden_size=target.hidden_size,
        num_layers=target.num_layers,
    )
    most = decisions.choose(
        "speculative_num_draft_tokens",
        args.speculative_num_draft_tokens,
        shape.num_guesses,
        f"what the draft's blocks of {shape.block_size} tokens tell; each request finds its own length",
        source="model",
    )
    if most > shape.num_guesses:
        raise ConfigError(
            f"--speculative-num-draft-tokens {most} is more than the draft {draft.name} tells with its "
            f"blocks of {shape.block_size} tokens; allowed: at most {shape.num_guesses}"
        )
    decisions.choose(
        "speculative_lookup", args.speculative_lookup, True, "a long match costs nothing"
    )
    decisions.decide("speculative_num_steps", 0, f"{algorithm} has no steps")
    decisions.decide("speculative_eagle_topk", 1, f"{algorithm} guesses chains")
    if known.has_planner:
        _decide_planner(args, shape, draft.name, decisions)
    else:
        decisions.decide("speculative_confidence", 0.0, f"{algorithm} has no steps")


def _decide_planner(args: ServerArgs, shape: BlockDraft, name: str, decisions: Decisions) -> None:
    if shape.has_confidence:
        usual, why = "capped", "what is hardly right only makes the step longer"
    else:
        usual, why = "static", f"{name} does not say how sure it is of a guess"
    planner = decisions.choose(
        "speculative_dspark_planner", args.speculative_dspark_planner, usual, why
    )
    if planner != "static" and not shape.has_confidence:
        raise ConfigError(
            f"--speculative-dspark-planner {planner} was given, but {why}; allowed: static"
        )
    confidence, budget = args.speculative_confidence, args.speculative_dspark_budget
    if planner == "static" and confidence is not None:
        raise ConfigError(
            f"--speculative-confidence {confidence} was given, but the static planner verifies every "
            "guess; leave it out, or choose another --speculative-dspark-planner"
        )
    if planner != "ragged" and budget is not None:
        raise ConfigError(
            f"--speculative-dspark-budget {budget} was given, but only the ragged planner has a "
            "budget; leave it out, or choose --speculative-dspark-planner ragged"
        )
    decisions.choose(
        "speculative_confidence",
        confidence,
        0.0 if planner == "static" else WORTH_VERIFYING,
        "all guesses are verified"
        if planner == "static"
        else "a guess costs one token's arithmetic, which pays from about such a chance on",
    )
    decisions.choose(
        "speculative_dspark_budget",
        budget,
        0,
        "as many as the requests of a step may have"
        if planner == "ragged"
        else f"the {planner} planner has none",
    )
