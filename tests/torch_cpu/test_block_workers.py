"""Drafts that guess blocks, built from the published configuration: nothing is published twice, nothing
is copied, what does not fit is refused with both numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernels.ops import select
from srt.config.args import ServerArgs
from srt.config.context import get_context, publish
from srt.config.dummy import dummy_facts
from srt.config.facts import Facts
from srt.errors import ConfigError
from srt.models.arch import read_arch
from srt.models.draft import DraftSource
from srt.models.dspark import Dspark
from srt.protocols.forward_batch import ForwardBatch, RowSetup, Slice, TableWrite
from srt.runner import build
from srt.runner.build import build_worker
from srt.runner.draft import build_draft_tp_worker
from srt.runner.model_runner import ModelRunner
from srt.spec.build import speculate
from srt.spec.dflash import DflashDrafter
from srt.spec.dspark import DsparkDrafter
from srt.spec.worker import SpeculativeWorker
from srt.wire.params import SamplingParams
from tests.tiny_models import published_target

CONFIG: dict[str, Any] = {"intermediate_size": 96, "rms_norm_eps": 1e-5}
HEADS = {"markov_rank": 8, "markov_head_type": "gated", "enable_confidence_head": True}
BLOCK = {**CONFIG, "block_size": 6, "mask_token_id": 511, "target_layer_ids": [-1, 2]}
DRAFTS: dict[str, dict[str, Any]] = {
    "dflash": {"architecture": "DFlashDraftModel", "config": BLOCK},
    "dspark": {"architecture": "DSparkDraftModel", "config": {**BLOCK, **HEADS}},
}
ALGORITHMS = tuple(DRAFTS)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    with get_context().override_server_args():
        yield


def show(phase: str, fraction: float | None) -> None:
    pass


def two_models(algorithm: str) -> Facts:
    facts = dummy_facts()
    target = replace(facts.model, config=CONFIG, num_layers=4)
    return replace(
        facts, model=target, draft=replace(target, name="small", num_layers=2, **DRAFTS[algorithm])
    )


def publish_two(algorithm: str, **fields: Any) -> None:
    given: dict[str, Any] = {
        "model": "dummy",
        "load_format": "dummy",
        "dtype": "float32",
        "max_running": 4,
        "max_total_tokens": 2048,
        "speculative_algorithm": algorithm,
        "speculative_draft_model": "small",
        "speculative_draft_load_format": "dummy",
        **fields,
    }
    publish(ServerArgs(**given), two_models(algorithm), role="scheduler", entropy=0)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_very_record_and_no_second_publish(
    algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[ServerArgs] = []
    original = build.build_draft_tp_worker

    def spied(args: ServerArgs, *rest: Any, **more: Any) -> ModelRunner:
        seen.append(args)
        before = get_context().describe()["bags"]
        made = original(args, *rest, **more)
        assert get_context().describe()["bags"] == before
        return made

    monkeypatch.setattr(build, "build_draft_tp_worker", spied)
    publish_two(algorithm)
    published = get_context().args
    monkeypatch.setattr(
        type(get_context()), "publish", lambda *_, **__: pytest.fail("a draft published")
    )
    build_worker(str(tmp_path), show, speculate).close()
    assert len(seen) == 1 and seen[0] is published and get_context().args is published


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_built_worker_guesses_with_its_own_pool_in_the_targets_slots(
    algorithm: str, tmp_path: Path
) -> None:
    """Also through the warm-up, which lets a row begin with a decode."""
    publish_two(
        algorithm,
        speculative_draft_attention_backend="sdpa",
        speculative_lookup=False,
        context_length=300,
    )
    worker = build_worker(str(tmp_path), show, speculate)
    assert isinstance(worker, SpeculativeWorker)
    drafter = worker.drafter
    assert isinstance(drafter, DflashDrafter | DsparkDrafter) and drafter.name == algorithm
    target, draft = worker.target.runner, drafter.runner
    assert draft.draft_attention_backend == "sdpa" and target.draft_attention_backend is None
    assert draft.context_length == target.context_length == 300
    assert draft.table is target.table and draft.pool.num_pages == target.pool.num_pages
    assert drafter.taps == (0, 3)
    setup = RowSetup(
        row=1, params=SamplingParams(temperature=0.0), tokens=[5, 6, 7], prompt_len=3, stop_ids=[]
    )
    first = ForwardBatch(
        step=0,
        setups=[setup],
        table_writes=[TableWrite(row=1, first=0, pages=[3])],
        slices=[Slice(row=1, start=0, length=3, tokens=[5, 6, 7], sample=True)],
    )
    [got] = worker.launch(first).wait().slices
    assert len(got.tokens) == 1
    decode = Slice(row=1, start=3, length=1, tokens=None, sample=True, draft=5)
    [got] = worker.launch(ForwardBatch(step=1, slices=[decode])).wait().slices
    assert got.num_drafted == 5 if algorithm == "dflash" else got.num_drafted <= 5
    size = worker.facts.memory_bytes
    assert set(size) == {"target weights", "draft weights", "target kv", "draft kv"}
    assert size["draft kv"] * 2 == size["target kv"]
    worker.close()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    ("num_layers", "hidden_size", "words"),
    [(3, 64, r"listens to layer 2 .* has 3"), (4, 48, r"hidden size of 64, its target one of 48")],
)
def test_a_network_refuses_another_target(
    algorithm: str, num_layers: int, hidden_size: int, words: str
) -> None:
    """The second line of defence: the network knows what it is lent."""
    publish_two(algorithm)
    target = published_target()
    lent = replace(target.lend(), num_layers=num_layers, hidden_size=hidden_size)
    target.lend = lambda: lent  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=words):
        build_draft_tp_worker(get_context().args, target, ops=select("torch"))


def test_what_the_checkpoint_stores_of_its_own_is_used() -> None:
    """DSPARK checkpoints carry copies of the target's embedding and head; others carry none."""
    publish_two("dspark")
    draft = get_context().facts.draft
    assert draft is not None
    stored = frozenset({"embed_tokens.weight", "lm_head.weight"})
    for names in (frozenset[str](), stored):
        source = DraftSource(arch=read_arch(draft), config=draft.config, stored=names)
        parts = {part.source for each in Dspark.parameters(source) for part in each.parts}
        assert parts & stored == names
        assert "markov_head.gate_proj.weight" in parts and "confidence_head.proj.weight" in parts
