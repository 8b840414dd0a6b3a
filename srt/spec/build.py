"""From the published algorithm to a speculating worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from srt.config.context import get_spec
from srt.protocols.drafter import Drafter
from srt.protocols.worker import Worker
from srt.runner.model_runner import ModelRunner
from srt.runner.tp_worker import TpModelWorker
from srt.sampling.sampler import Sampler
from srt.spec.eagle import EagleDrafter
from srt.spec.ngram import NgramDrafter
from srt.spec.standalone import StandaloneDrafter
from srt.spec.worker import SpeculativeWorker

MakeDrafter = Callable[[TpModelWorker, ModelRunner | None], Drafter]


def _ngram(target: TpModelWorker, draft: ModelRunner | None) -> NgramDrafter:
    return NgramDrafter()


def _standalone(target: TpModelWorker, draft: ModelRunner | None) -> StandaloneDrafter:
    assert draft is not None, "a standalone draft is resolved with its algorithm"
    facts = target.facts
    return StandaloneDrafter(draft, Sampler(facts.max_rows, facts.vocab_size, draft.device))


def _eagle3(target: TpModelWorker, draft: ModelRunner | None) -> EagleDrafter:
    assert draft is not None, "a draft is resolved with its algorithm"
    facts, spec = target.facts, get_spec()
    return EagleDrafter(
        draft,
        Sampler(facts.max_rows, facts.vocab_size, draft.device),
        steps=spec.speculative_num_steps,
        topk=spec.speculative_eagle_topk,
        confidence=spec.speculative_confidence,
    )


# The names are those of --speculative-algorithm.
ALGORITHMS: Mapping[str, MakeDrafter] = MappingProxyType(
    {"ngram": _ngram, "standalone": _standalone, "eagle3": _eagle3}
)


def speculate(target: TpModelWorker, draft: ModelRunner | None) -> Worker:
    """The worker that the published algorithm asks for; the target's own if there is none. Runs on the
    thread that computes."""
    algorithm = get_spec().speculative_algorithm
    if algorithm is None:
        return target
    return SpeculativeWorker(target, ALGORITHMS[algorithm](target, draft))
