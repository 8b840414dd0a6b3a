"""How many tokens are guessed in a step, how deep and how wide, and what a chain on a GPU may do."""

from __future__ import annotations

from srt.config.algorithms import ALGORITHMS, LAYERS_KEY, Algorithm
from srt.config.args import ServerArgs
from srt.config.decisions import Decisions
from srt.errors import ConfigError

CONFIDENCE = 0.25
MOST_IN_TREE = 61  # what a window can describe, the token before the tree included
CHAINS = ("eagle", "eagle3")  # whose guesses a GPU draws and verifies without the host


def decide_force(args: ServerArgs, algorithm: str, on_gpu: bool, decisions: Decisions) -> None:
    asked = args.speculative_force_accept
    if asked is not None and not (on_gpu and algorithm in CHAINS):
        raise ConfigError(
            f"--speculative-force-accept {asked:g} was asked for: it measures chains of guesses on a "
            f"GPU; allowed with --device cuda and {' or '.join(CHAINS)}"
        )
    decisions.choose("speculative_force_accept", asked, 0.0, "answers are the model's")


def decide_shape(
    args: ServerArgs,
    algorithm: str,
    known: Algorithm,
    layers: int | None,
    on_gpu: bool,
    decisions: Decisions,
) -> None:
    """How many guesses, how deep, how wide. `layers`: that the draft has, if each is a step. `on_gpu`: a
    chain that is drawn whole, and looked up nowhere, never leaves the device."""
    if not known.has_steps:
        decisions.choose(
            "speculative_num_draft_tokens",
            args.speculative_num_draft_tokens,
            known.guesses,
            f"what {algorithm} does well with; each request finds its own length below it",
        )
        decisions.decide("speculative_lookup", False, f"{algorithm} guesses alone")
        decisions.decide("speculative_num_steps", 0, f"{algorithm} has no steps")
        decisions.decide("speculative_confidence", 0.0, f"{algorithm} has no steps")
        decisions.decide("speculative_eagle_topk", 1, f"{algorithm} guesses chains")
        return
    topk = 1
    if known.has_tree:
        topk = decisions.choose(
            "speculative_eagle_topk", args.speculative_eagle_topk, 1, "a chain costs least to draft"
        )
    else:
        decisions.decide("speculative_eagle_topk", 1, f"{algorithm} guesses chains")
    stays = on_gpu and topk == 1 and layers is None
    lookup = decisions.choose(
        "speculative_lookup",
        args.speculative_lookup,
        not stays,
        "guesses do not leave the GPU" if stays else "a long match costs nothing",
    )
    asked = args.speculative_num_draft_tokens
    usual, why = known.guesses, f"what {algorithm} does well with"
    if layers is not None:
        usual, why = layers, "one for each layer that the draft has"
    steps = decisions.choose(
        "speculative_num_steps",
        args.speculative_num_steps,
        usual if topk > 1 or asked is None else min(asked, usual),
        why,
    )
    if layers is not None and steps > layers:
        raise ConfigError(
            f"--speculative-num-steps {steps} needs as many MTP layers, and the draft has {layers} "
            f"({LAYERS_KEY}); allowed: 1 to {layers}"
        )
    found = ALGORITHMS["ngram"].guesses if lookup else 0
    most = decisions.choose(
        "speculative_num_draft_tokens",
        asked,
        max(steps if topk == 1 else topk * steps, found),
        "what a step or a lookup may find",
    )
    decisions.choose(
        "speculative_confidence",
        args.speculative_confidence,
        CONFIDENCE if topk == 1 and not stays else 0.0,
        "the GPU draws chains whole"
        if stays
        else "a step of the draft pays as long as its guess has such a chance"
        if topk == 1
        else "a tree is cut by its best tokens",
    )
    _check_shape(steps, topk, most)
    if layers is not None and most != steps and not lookup:
        raise ConfigError(
            f"--speculative-num-draft-tokens {most} was given with {steps} MTP layers and without "
            f"--speculative-lookup; allowed: {steps}, one token for each layer"
        )


def _check_shape(steps: int, topk: int, most: int) -> None:
    if topk == 1 and most < steps:
        raise ConfigError(
            f"--speculative-num-draft-tokens {most} was given with --speculative-num-steps {steps}; a "
            f"chain has a token for each step; allowed: at least {steps}"
        )
    if topk > 1 and most < topk * (steps - 1):
        raise ConfigError(
            f"--speculative-num-draft-tokens {most} leaves no room for a tree that computes "
            f"{topk} x ({steps} - 1) tokens; allowed: at least {topk * (steps - 1)}"
        )
    if topk > 1 and most > MOST_IN_TREE:
        raise ConfigError(
            f"--speculative-num-draft-tokens {most} is more than a tree may have; allowed: at most "
            f"{MOST_IN_TREE}"
        )
