"""The ways of speculating, as far as configuration must know them. What each does is `srt/spec`'s."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from srt.config.block_draft import DFLASH, DSPARK

LAYERS_KEY = "num_nextn_predict_layers"  # config.json: how many MTP layers a model brings


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """`guesses`: verified with one token unless the user says otherwise. `drafts`: the architectures a
    draft's checkpoint may name, None if there is none; `likenesses`: those of whole models that a draft
    may also name, because its layers are like theirs; `any_draft`: it is a whole model of the target's
    vocabulary. `has_steps`: it guesses one position after the other; `has_tree`: several guesses for
    one position may be verified; `has_layers`: each step has a layer of its own, with its own runner.
    `has_block`: the draft guesses a block at once, whose size its checkpoint says; `has_planner`: and it
    says how sure it is of each guess."""

    guesses: int
    drafts: frozenset[str] | None = None
    likenesses: frozenset[str] = frozenset()
    any_draft: bool = False
    has_steps: bool = False
    has_tree: bool = False
    has_block: bool = False
    has_planner: bool = False
    has_layers: bool = False
    about: str = ""

    @property
    def needs_model(self) -> bool:
        return self.any_draft or self.drafts is not None


ALGORITHMS: Mapping[str, Algorithm] = MappingProxyType(
    {
        "ngram": Algorithm(guesses=8, about="what stood there before"),
        "standalone": Algorithm(guesses=4, any_draft=True, about="a smaller model"),
        "eagle": Algorithm(
            guesses=4,
            drafts=frozenset({"LlamaForCausalLMEagle", "EagleLlamaForCausalLM"}),
            likenesses=frozenset({"LlamaForCausalLM", "Qwen2ForCausalLM"}),
            has_steps=True,
            has_tree=True,
            about="a small network that reads the target's final state",
        ),
        "eagle3": Algorithm(
            guesses=6,
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
        "multi_layer": Algorithm(
            guesses=1,
            drafts=frozenset({"MiMoMTP"}),
            has_steps=True,
            has_layers=True,
            about="layers that the target brings, one for each token ahead",
        ),
    }
)

DRAFT_ARCHITECTURES = frozenset(
    name for algorithm in ALGORITHMS.values() for name in algorithm.drafts or ()
)
