"""The load-time gate where it works: between the load of an MLA model and its attention backend."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from srt.attention.mla import MlaAttention
from srt.attention.select import BackendPair
from srt.cache.pools import LatentPool
from srt.config import gate
from srt.config.args import ServerArgs
from srt.config.context import get_context, get_schedule, publish
from srt.config.dummy import dummy_facts
from srt.config.facts import Facts
from srt.config.trail import TrailEntry
from srt.errors import ConfigError
from srt.protocols.forward_batch import ForwardBatch, RowSetup, Slice, TableWrite
from srt.runner.build import build_worker
from srt.runner.families import mla_backend
from srt.runner.tp_worker import TpModelWorker
from srt.wire.params import SamplingParams
from tests.latent_batches import FACTS, LatentBatch
from tests.tiny_models import make_spec

FIELD = "schedule.disable_chunked_prefix_cache"


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    with get_context().override_server_args():
        yield


@pytest.fixture
def nobody_reads_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS", ["flashinfer"])


def mla_facts() -> Facts:
    return replace(dummy_facts(), model=replace(FACTS, num_parameters=20_000))


def built(tmp_path: Path, **fields: Any) -> TpModelWorker:
    args = ServerArgs(model="dummy", load_format="dummy", dtype="float32", max_running=2, **fields)
    publish(args, mla_facts(), role="scheduler", entropy=0)
    return build_worker(str(tmp_path), lambda phase, fraction: None)


def attention_of(worker: TpModelWorker) -> MlaAttention:
    attention = worker.runner.backend
    assert isinstance(attention, MlaAttention)
    return attention


def gate_writes() -> list[tuple[str, dict[str, Any]]]:
    return [each for each in get_context().overrides if each[0] == gate.SOURCE]


def last_word() -> TrailEntry:
    return [entry for entry in get_context().trail if entry.field == FIELD][-1]


def test_an_mla_target_reads_prefixes_in_chunks_and_runs(tmp_path: Path) -> None:
    worker = built(tmp_path, max_prefix_chunk_tokens=32)
    try:
        settings = attention_of(worker).settings
        assert settings.may_expand and settings.chunk_tokens == 32
        assert not get_schedule().disable_chunked_prefix_cache and not gate_writes()
        assert (last_word().value, last_word().source) == (False, gate.SOURCE)
        assert "sdpa merges chunks" in last_word().reason
        pool = worker.runner.pool
        assert isinstance(pool, LatentPool)
        assert pool.bytes_per_token == worker.runner.kv_bytes_per_token == 2 * 48 * 4
        held = worker.facts.memory_bytes["target kv"]
        assert held == pool.bytes_per_token * pool.num_pages * pool.page_size
        tokens = list(range(3, 23))
        setup = RowSetup(row=0, params=SamplingParams(), tokens=tokens, prompt_len=20, stop_ids=[])
        batch = ForwardBatch(
            step=0,
            setups=[setup],
            table_writes=[TableWrite(row=0, first=0, pages=[1, 2])],
            slices=[Slice(row=0, start=0, length=20, tokens=tokens, sample=True)],
        )
        assert len(worker.launch(batch).wait().slices[0].tokens) == 1
    finally:
        worker.close()


@pytest.mark.usefixtures("nobody_reads_chunks")
def test_gate_lands_on_view_and_leaves_input(tmp_path: Path) -> None:
    worker = built(tmp_path)
    worker.close()
    assert not attention_of(worker).settings.may_expand
    assert get_schedule().disable_chunked_prefix_cache
    assert get_context().args.disable_chunked_prefix_cache is False
    assert gate_writes() == [(gate.SOURCE, {gate.LEAF: True})]
    assert last_word().value is True and "prefill backend sdpa cannot" in last_word().reason


@pytest.mark.usefixtures("nobody_reads_chunks")
def test_what_the_engine_shows_has_the_decision_with_its_reason(tmp_path: Path) -> None:
    built(tmp_path).close()
    shown = get_context().describe()
    assert shown["bags"]["schedule"]["disable_chunked_prefix_cache"] is True
    last = [entry for entry in shown["trail"] if entry["field"] == FIELD][-1]
    assert last["source"] == gate.SOURCE and "sdpa" in last["reason"]


@pytest.mark.usefixtures("nobody_reads_chunks")
def test_chunks_asked_for_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max-prefix-chunk-tokens 64.*sdpa cannot.*leave it out"):
        built(tmp_path, max_prefix_chunk_tokens=64)


def test_a_user_who_wants_no_chunks_has_none(tmp_path: Path) -> None:
    worker = built(tmp_path, disable_chunked_prefix_cache=True)
    worker.close()
    assert not attention_of(worker).settings.may_expand and not gate_writes()


def test_a_draft_does_not_look_and_a_late_write_is_an_error() -> None:
    publish(ServerArgs(model="dummy"), mla_facts(), role="scheduler", entropy=0)
    get_context().start_loading()
    up = LatentBatch(starts=(0,), lengths=(1,)).up
    pair = BackendPair(prefill="sdpa", decode="sdpa")
    draft = make_spec(FACTS, role="draft")
    made = mla_backend(pair, [up], draft, deterministic=False)
    assert not made.settings.may_expand
    gate.maybe_disable_chunked_prefix_cache(False, False)  # a draft has read nothing of it
    target = mla_backend(pair, [up], make_spec(FACTS), deterministic=False)
    assert not target.settings.may_expand
    with pytest.raises(ConfigError, match="target attention was built"):
        get_context().override("late", disable_chunked_prefix_cache=False)
