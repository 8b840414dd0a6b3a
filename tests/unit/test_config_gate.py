"""The load-time gate of the chunked prefix cache. Each test is one contract of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from srt.config import gate
from srt.config.args import ServerArgs
from srt.config.context import get_context, get_schedule, publish
from srt.config.dummy import dummy_facts
from srt.config.explain import Row, explain
from srt.config.facts import Facts
from srt.config.gate import after_load, maybe_disable_chunked_prefix_cache
from srt.config.resolve import Resolution, resolve
from srt.errors import ConfigError
from tests.latent_batches import FACTS as MLA_MODEL


@pytest.fixture(autouse=True)
def loading() -> Iterator[None]:
    pair = {"prefill_attention_backend": "sdpa", "decode_attention_backend": "sdpa"}
    with get_context().override_server_args(**pair):
        get_context().start_loading()
        yield


@pytest.fixture
def sdpa_reads_no_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [n for n in gate.CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS if n != "sdpa"]
    monkeypatch.setattr(gate, "CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS", names)


@pytest.fixture
def native_reads_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend from outside adds itself to the public list."""
    names = [*gate.CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS, "native"]
    monkeypatch.setattr(gate, "CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS", names)


def is_disabled() -> bool:
    return bool(get_context().describe()["bags"]["schedule"]["disable_chunked_prefix_cache"])


def test_gate_lands_on_view() -> None:
    maybe_disable_chunked_prefix_cache(False, False)
    assert get_schedule().disable_chunked_prefix_cache
    entry = get_context().trail[-1]
    assert (entry.field, entry.source) == (
        "schedule.disable_chunked_prefix_cache",
        "load-time gate",
    )
    assert entry.reason == "the model's attention is not MLA"


def test_gate_leaves_input() -> None:
    maybe_disable_chunked_prefix_cache(False, False)
    assert get_context().args.disable_chunked_prefix_cache is False


def test_draft_never_writes() -> None:
    trail = get_context().trail
    maybe_disable_chunked_prefix_cache(False, True)
    assert not is_disabled()
    assert get_context().trail == trail


def test_republish_drops_gate() -> None:
    """Hence the gate runs after the last publish."""
    maybe_disable_chunked_prefix_cache(False, False)
    publish(get_context().args, dummy_facts(), role="test", entropy=0)
    assert not is_disabled()


def test_gate_survives_draft_build() -> None:
    maybe_disable_chunked_prefix_cache(False, False)
    with get_schedule().override(max_queued=1), get_context().building("draft"):
        maybe_disable_chunked_prefix_cache(True, True)
    assert is_disabled()


@pytest.mark.usefixtures("sdpa_reads_no_chunks")
def test_mla_on_a_backend_without_chunks_is_disabled() -> None:
    maybe_disable_chunked_prefix_cache(True, False)
    assert is_disabled()
    assert "prefill backend sdpa" in get_context().trail[-1].reason


def test_mla_on_a_listed_backend_stays_on() -> None:
    maybe_disable_chunked_prefix_cache(True, False)
    assert not is_disabled()


@pytest.mark.parametrize(("prefill", "off"), [("sdpa", False), ("native", True)])
def test_gate_uses_prefill_half(prefill: str, off: bool) -> None:
    halves = {"sdpa": "native", "native": "sdpa"}
    args = ServerArgs(prefill_attention_backend=prefill, decode_attention_backend=halves[prefill])
    facts = dummy_facts()
    facts = replace(facts, machine=replace(facts.machine, compiler="cc"))
    publish(args, facts, role="test", entropy=0)
    maybe_disable_chunked_prefix_cache(True, False)
    assert is_disabled() is off


def test_gate_twice_is_one_entry() -> None:
    maybe_disable_chunked_prefix_cache(False, False)
    trail = get_context().trail
    maybe_disable_chunked_prefix_cache(False, False)
    assert get_context().trail == trail


def test_gate_after_a_backend_read_the_leaf_is_an_error() -> None:
    with get_context().building("attention backend"):
        assert not get_schedule().disable_chunked_prefix_cache
    with pytest.raises(ConfigError, match="attention backend was built"):
        maybe_disable_chunked_prefix_cache(False, False)


@pytest.mark.parametrize("typed", [False, True])
def test_explain_after_load_shows_what_loading_leaves_there(typed: bool) -> None:
    args = ServerArgs(disable_chunked_prefix_cache=typed)
    publish(args, dummy_facts(), role="test", entropy=0)
    before = resolve(args, dummy_facts(), entropy=0)
    after = after_load(args, dummy_facts(), before, use_mla_backend=False)
    maybe_disable_chunked_prefix_cache(False, False)

    def row_of(resolution: Resolution) -> Row:
        return next(row for row in explain(resolution) if row.name == gate.LEAF)

    loaded = get_context().describe()["bags"]["schedule"]
    assert after.values["schedule"] == loaded and loaded[gate.LEAF] is True
    assert len(explain(after)) == len(explain(before))
    if typed:
        assert after == before and row_of(after).source == "typed"
    else:
        found = row_of(after)
        assert (found.value, found.source, found.replaced) == (True, "load-time gate", False)
        assert found.reason == "the model's attention is not MLA"
        assert row_of(before).value is False


def test_the_gate_shows_that_it_left_an_mla_model_its_chunks() -> None:
    """The decision stands beside the value; nothing is written."""
    before = resolve(ServerArgs(), dummy_facts(), entropy=0)
    before = replace(
        before, runners=(replace(before.runners[0], prefill_attention_backend="sdpa"),)
    )
    after = after_load(ServerArgs(), dummy_facts(), before, use_mla_backend=True)
    row = next(row for row in explain(after) if row.name == gate.LEAF)
    why = "sdpa merges chunks of a cached MLA prefix"
    assert (row.value, row.source, row.reason) == (False, "load-time gate", why)
    assert after.values == before.values and len(after.trail) == len(before.trail)
    maybe_disable_chunked_prefix_cache(True, False)
    maybe_disable_chunked_prefix_cache(True, False)
    context = get_context()
    shown = [entry for entry in context.describe()["trail"] if entry["field"] == gate.FIELD]
    assert [(e["value"], e["source"], e["reason"]) for e in shown[1:]] == [
        (False, "load-time gate", why)
    ]
    assert not context.overrides and not is_disabled()


def test_a_gate_that_looked_has_not_read_the_leaf() -> None:
    maybe_disable_chunked_prefix_cache(True, False)
    maybe_disable_chunked_prefix_cache(False, False)  # nobody holds what the note says
    assert is_disabled()


def test_chunks_that_the_user_turned_off_are_not_the_gates() -> None:
    args = ServerArgs(disable_chunked_prefix_cache=True)
    before = resolve(args, dummy_facts(), entropy=0)
    assert after_load(args, dummy_facts(), before, use_mla_backend=True) == before


@pytest.mark.usefixtures("native_reads_chunks")
def test_a_backend_from_outside_adds_itself() -> None:
    assert gate.why_not_chunked(True, "native") is None
    assert gate.why_not_chunked(False, "native") is not None


WISHES = {
    "--max-prefix-chunk-tokens 4096": ({"max_prefix_chunk_tokens": 4096}, None),
    "--no-disable-chunked-prefix-cache": ({}, "typed"),
    "disable_chunked_prefix_cache = false": ({}, "file"),
}


@pytest.mark.parametrize("words", WISHES)
def test_a_wish_for_chunks_without_mla_is_refused_before_loading(words: str) -> None:
    fields, origin = WISHES[words]
    sources = None if origin is None else {gate.LEAF: origin}
    with pytest.raises(ConfigError, match=f"^{words}.* not MLA.*nothing to chunk; leave it out$"):
        resolve(ServerArgs(**fields), dummy_facts(), entropy=0, sources=sources)


def mla_facts() -> Facts:
    return replace(dummy_facts(), model=MLA_MODEL)


@pytest.mark.usefixtures("sdpa_reads_no_chunks")
@pytest.mark.parametrize("words", WISHES)
def test_a_wish_that_the_backend_cannot_fulfil_is_refused(words: str) -> None:
    """By the gate: who can is known once other packages have registered."""
    fields, origin = WISHES[words]
    args = ServerArgs(**fields)
    sources = None if origin is None else {gate.LEAF: origin}
    publish(args, mla_facts(), role="test", entropy=0, sources=sources)
    before = resolve(args, mla_facts(), entropy=0, sources=sources)
    refusal = f"^{words}.*prefill backend sdpa cannot.* in chunks; leave it out$"
    with pytest.raises(ConfigError, match=refusal):
        maybe_disable_chunked_prefix_cache(True, False)
    with pytest.raises(ConfigError, match=refusal):
        after_load(args, mla_facts(), before, use_mla_backend=True)
    maybe_disable_chunked_prefix_cache(True, True)  # no draft's business


def test_only_backends_that_could_be_chosen_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those of a GPU on a CPU, nor names that no flag takes; but what a package added."""
    names = gate.CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS
    args = ServerArgs(max_prefix_chunk_tokens=4096)
    publish(args, mla_facts(), role="test", entropy=0)
    context = get_context()
    able = gate.able_here(args, mla_facts(), context.target, context.trail)
    assert able == ["sdpa"]
    monkeypatch.setattr(
        gate, "CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS", [*names, "theirs"]
    )
    monkeypatch.setattr(gate, "why_not_chunked", lambda latent, prefill: "it cannot")
    with pytest.raises(ConfigError, match="--prefill-attention-backend sdpa or theirs, or leave"):
        maybe_disable_chunked_prefix_cache(True, False)


def test_a_chunk_smaller_than_a_page_is_refused() -> None:
    args = ServerArgs(max_prefix_chunk_tokens=8, page_size=16)
    with pytest.raises(ConfigError, match="max-prefix-chunk-tokens 8.*16 and more"):
        resolve(args, mla_facts(), entropy=0)
