"""The ways of speculating, as far as configuration must know them. What each does is `srt/spec`'s."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from srt.config.block_draft import DFLASH, DSPARK


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """`guesses`: verified with one token unless the user says otherwise. `drafts`: the architectures a
    draft's checkpoint may name, None if there is none; `any_draft`: it is a whole model of the target's
    vocabulary. `has_steps`: it guesses one position after the other; `has_tree`: several guesses for
    one position may be verified. `has_block`: the draft guesses a block at once, whose size its
    checkpoint says; `has_planner`: and it says how sure it is of each guess."""

    guesses: int
    drafts: frozenset[str] | None = None
    any_draft: bool = False
    has_steps: bool = False
    has_tree: bool = False
    has_block: bool = False
    has_planner: bool = False
    about: str = ""

    @property
    def needs_model(self) -> bool:
        return self.any_draft or self.drafts is not None


ALGORITHMS: Mapping[str, Algorithm] = MappingProxyType(
    {
        "ngram": Algorithm(guesses=8, about="what stood there before"),
        "standalone": Algorithm(guesses=4, any_draft=True, about="a smaller model"),
        "eagle3": Algorithm(
            guesses=4,
            drafts=frozenset({"LlamaForCausalLMEagle3"}),
            has_steps=True,
            has_tree=True,
            about="a small network that reads the target's features",
        ),
        "dflash": Algorithm(
            guesses=15,
            drafts=DFLASH,
            has_block=True,
            about="a small network that reads the target's features and fills in a block at once",
        ),
        "dspark": Algorithm(
            guesses=7,
            drafts=DSPARK,
            has_block=True,
            has_planner=True,
            about="dflash whose guesses know the one before them and how sure they are",
        ),
    }
)

DRAFT_ARCHITECTURES = frozenset(
    name for algorithm in ALGORITHMS.values() for name in algorithm.drafts or ()
)
