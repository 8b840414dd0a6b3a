"""What the checkpoint of a block draft says of itself: config.json of DFLASH and DSPARK drafts.

The keys are those of the public checkpoints (arXiv 2602.06036 and its sequel); some exporters put them
under `dflash_config`, others at the top.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from srt.errors import ConfigError

DFLASH = frozenset({"DFlashDraftModel"})
DSPARK = frozenset({"Qwen3DSparkModel", "DSparkDraftModel"})
MARKOV_KINDS = ("vanilla", "gated", "rnn")
MOST_IN_BLOCK = 62  # tokens; what a window can describe


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockDraft:
    """`taps`: where it listens to the target, as `srt.models.blocks.Taps` counts. `from_anchor`: the
    block's first token, the known one, tells its successor; otherwise each mask tells its own place.
    `markov` None: guesses of a block do not know of each other."""

    block_size: int
    mask_token: int
    taps: tuple[int, ...]
    from_anchor: bool
    is_causal: bool
    markov: str | None
    markov_rank: int
    has_confidence: bool
    confidence_sees_token: bool

    @property
    def num_guesses(self) -> int:
        return self.block_size if self.from_anchor else self.block_size - 1


def read_block_draft(
    architecture: str, config: Mapping[str, Any], *, name: str, vocab_size: int, num_layers: int
) -> BlockDraft:
    """All of the draft; `name` is for errors. Raises ConfigError naming the key at fault."""
    keys = _Keys(name, {**config, **(config.get("dflash_config") or {})})
    block_size = keys.count("block_size")
    from_anchor = bool(keys.get("sample_from_anchor", architecture in DSPARK))
    least = 1 if from_anchor else 2
    if not least <= block_size <= MOST_IN_BLOCK:
        raise ConfigError(
            f"the draft {name} has blocks of {block_size} tokens; allowed: {least} to {MOST_IN_BLOCK}"
        )
    mask_token = keys.count("mask_token_id", least=0)
    if mask_token >= vocab_size:
        raise ConfigError(
            f"the draft {name} has mask_token_id {mask_token} in a vocabulary of {vocab_size} tokens"
        )
    rank = keys.count("markov_rank", 0, least=0) if architecture in DSPARK else 0
    if architecture in DSPARK and rank == 0:
        raise ConfigError(
            f"the draft {name} is a {architecture} with markov_rank 0: it has no head"
        )
    markov = str(keys.get("markov_head_type", "vanilla")) if rank else None
    if markov is not None and markov not in MARKOV_KINDS:
        raise ConfigError(
            f"the draft {name} has a markov_head_type {markov!r}; known: {', '.join(MARKOV_KINDS)}"
        )
    has_confidence = bool(rank) and bool(keys.get("enable_confidence_head", False))
    return BlockDraft(
        block_size=block_size,
        mask_token=mask_token,
        taps=_taps(keys, num_layers),
        from_anchor=from_anchor,
        is_causal=_is_causal(keys),
        markov=markov,
        markov_rank=rank,
        has_confidence=has_confidence,
        confidence_sees_token=has_confidence
        and bool(keys.get("confidence_head_with_markov", False)),
    )


def check_target(
    draft: BlockDraft,
    config: Mapping[str, Any],
    *,
    name: str,
    width: int,
    hidden_size: int,
    num_layers: int,
) -> None:
    """`width`: the draft's hidden size; `hidden_size`, `num_layers`: the target's. Raises ConfigError
    for a draft that was made for another target, with both numbers."""
    if width != hidden_size:
        raise ConfigError(
            f"the draft {name} has a hidden size of {width}, its target one of {hidden_size}; they "
            "must be the same, for it borrows the target's embedding and head"
        )
    layers = config.get("num_target_layers")
    if layers is not None and layers != num_layers:
        raise ConfigError(
            f"the draft {name} is made for a target of {layers} layers, this one has {num_layers}"
        )
    if draft.taps[-1] >= num_layers:
        raise ConfigError(
            f"the draft {name} listens to layer {draft.taps[-1] - 1} of its target, which has "
            f"{num_layers}; target_layer_ids may go up to {num_layers - 2}"
        )


class _Keys:
    """Typed reading; errors name the draft and the key."""

    def __init__(self, name: str, values: Mapping[str, Any]) -> None:
        self.name = name
        self.get = values.get

    def count(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        found = self.get(key, default)
        if not isinstance(found, int) or isinstance(found, bool) or found < least:
            raise ConfigError(
                f"the draft {self.name}: {key} must be a whole number of at least {least}, not "
                f"{found!r}"
            )
        return found


def _taps(keys: _Keys, count: int) -> tuple[int, ...]:
    """Layer k's output enters layer k + 1. Without a list: as many as the draft has layers, `count`,
    spread evenly from layer 1 to the third from the end."""
    found = keys.get("target_layer_ids")
    if found is None:
        layers = keys.count("num_target_layers")
        last = max(layers - 3, 1)
        found = sorted(
            {round(1 + place * (last - 1) / max(count - 1, 1)) for place in range(count)}
        )
        if count == 1:
            found = [layers // 2]
    is_list = isinstance(found, list) and all(isinstance(each, int) for each in found)
    if not is_list or not found or found != sorted(set(found)) or found[0] < -1:
        raise ConfigError(
            f"the draft {keys.name}: target_layer_ids must be rising numbers from -1, the embedding, "
            f"on, not {found!r}"
        )
    return tuple(layer + 1 for layer in found)


def _is_causal(keys: _Keys) -> bool:
    """Layers with a sliding window look back only, the others both ways, unless `is_causal` says."""
    asked = keys.get("is_causal")
    if asked is not None:
        return bool(asked)
    kinds = {kind == "sliding_attention" for kind in keys.get("layer_types") or ("full_attention",)}
    if len(kinds) > 1:
        raise ConfigError(
            f"the draft {keys.name} has layers that look back and others that look both ways; blocks "
            "of one kind only are implemented"
        )
    return kinds.pop()
