"""From the published algorithm to a speculating worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from srt.config.capability import plans_on_host
from srt.config.context import get_context, get_spec
from srt.protocols.drafter import Drafter
from srt.protocols.worker import Worker
from srt.runner.device_worker import DeviceWorker
from srt.runner.model_runner import ModelRunner
from srt.runner.tp_worker import TpModelWorker
from srt.sampling.sampler import Sampler
from srt.spec.chain_graphs import ChainGraphs
from srt.spec.device_chain import DeviceChain
from srt.spec.device_worker import ChainWorker
from srt.spec.dflash import DflashDrafter
from srt.spec.dspark import DsparkDrafter
from srt.spec.eagle import EagleDrafter
from srt.spec.lookup import LookupFirst
from srt.spec.multi_layer import MultiLayerDrafter
from srt.spec.ngram import NgramDrafter
from srt.spec.standalone import StandaloneDrafter
from srt.spec.worker import SpeculativeWorker

LONG_MATCH = 4  # tokens: a longer match is right more often than a small network
MOST = 1 << 16  # no limit: a tree or a block is as large as the wish

MakeDrafter = Callable[[TpModelWorker, list[ModelRunner]], Drafter]


def _ngram(target: TpModelWorker, drafts: list[ModelRunner]) -> NgramDrafter:
    return NgramDrafter()


def _standalone(target: TpModelWorker, drafts: list[ModelRunner]) -> StandaloneDrafter:
    [draft] = drafts
    return StandaloneDrafter(draft, _sampler(target, draft))


def _eagle(target: TpModelWorker, drafts: list[ModelRunner]) -> Drafter:
    [draft], spec = drafts, get_spec()
    model = EagleDrafter(
        draft,
        _sampler(target, draft),
        steps=spec.speculative_num_steps,
        topk=spec.speculative_eagle_topk,
        confidence=spec.speculative_confidence,
    )
    return _look_up_first(
        model, spec.speculative_num_steps if spec.speculative_eagle_topk == 1 else MOST
    )


def _multi_layer(target: TpModelWorker, drafts: list[ModelRunner]) -> Drafter:
    spec = get_spec()
    assert len(drafts) == spec.speculative_num_steps, "a layer for each step"
    sampler = _sampler(target, drafts[0])
    model = MultiLayerDrafter(drafts, sampler, confidence=spec.speculative_confidence)
    return _look_up_first(model, len(drafts))


def _dflash(target: TpModelWorker, drafts: list[ModelRunner]) -> Drafter:
    [draft] = drafts
    return _look_up_first(DflashDrafter(draft, _sampler(target, draft)), MOST)


def _dspark(target: TpModelWorker, drafts: list[ModelRunner]) -> Drafter:
    [draft], spec = drafts, get_spec()
    model = DsparkDrafter(
        draft,
        _sampler(target, draft),
        planner=spec.speculative_dspark_planner,
        threshold=spec.speculative_confidence,
        budget=spec.speculative_dspark_budget,
    )
    return _look_up_first(model, MOST)


def _sampler(target: TpModelWorker, draft: ModelRunner) -> Sampler:
    facts = target.facts
    return Sampler(facts.max_rows, facts.vocab_size, draft.device, draft.ops.best_token)


def _look_up_first(model: Drafter, most: int) -> Drafter:
    if not get_spec().speculative_lookup:
        return model
    return LookupFirst(NgramDrafter(shortest=LONG_MATCH), model, most)


# The names are those of --speculative-algorithm.
ALGORITHMS: Mapping[str, MakeDrafter] = MappingProxyType(
    {
        "ngram": _ngram,
        "standalone": _standalone,
        "eagle": _eagle,
        "eagle3": _eagle,
        "multi_layer": _multi_layer,
        "dflash": _dflash,
        "dspark": _dspark,
    }
)


def speculate(target: TpModelWorker, drafts: list[ModelRunner]) -> Worker:
    """The worker that the published algorithm asks for; the target's own if there is none. Runs on the
    thread that computes."""
    algorithm = get_spec().speculative_algorithm
    if algorithm is None:
        return target
    return SpeculativeWorker(target, ALGORITHMS[algorithm](target, drafts))


def speculate_on_device(plain: DeviceWorker, drafts: list[ModelRunner]) -> ChainWorker:
    """Chains of guesses that the host never sees, for what `stays_on_device` says can have them."""
    [draft], spec = drafts, get_spec()
    chain = DeviceChain(
        plain.runner,
        draft,
        plain.sampler,
        spec.speculative_num_steps,
        spec.speculative_force_accept,
    )
    most = max(1, spec.speculative_batch_tokens // chain.width)
    sizes = tuple(size for size in draft.spec.graph_sizes if size <= most)
    graphs = ChainGraphs(chain, plain.timeline, plain.staging, sizes)
    return ChainWorker(chain, graphs, plain, plain.timeline, plain.staging)


def stays_on_device() -> bool:
    """Whether the published algorithm's guesses need nothing of the host: chains of a network that reads
    features, drawn whole and looked up nowhere, by attention that nobody has to plan."""
    spec, context = get_spec(), get_context()
    runners = (context.target, *context.drafts)
    if any(plans_on_host(each.decode_attention_backend) for each in runners):
        return False
    return (
        spec.speculative_algorithm in ("eagle", "eagle3")
        and spec.speculative_eagle_topk == 1
        and not spec.speculative_lookup
        and spec.speculative_confidence == 0
    )
