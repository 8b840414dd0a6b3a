"""`tandem verify` finds what is planted, and nothing where there is nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from zlib import crc32

import pytest
from scheduler_fakes import HashTicket, HashWorker

from srt.cache.lease import Lease
from srt.cli.verify import publish_shipped_draft
from srt.config.args import ServerArgs
from srt.config.context import get_context, get_spec, publish
from srt.config.dummy import dummy_facts
from srt.launch.boot import Boot
from srt.protocols.forward_batch import ForwardBatch, TableWrite
from srt.protocols.worker import Worker
from srt.scheduler.budget import Settings
from srt.verify.check import Report, verify
from srt.verify.compare import find_difference
from srt.verify.driver import Outcome
from srt.verify.evidence import describe
from srt.verify.requests import build_requests, prompts
from srt.verify.variants import baseline, plan
from srt.wire.messages import Work
from srt.wire.params import Finish, LogprobEntry, TokenLogprobs
from srt.wire.topology import Addresses

YOURS = Settings(max_running=4, max_step_tokens=68, chunked_prefill_size=64)


class Words:
    """Text to ids by hash of the word; a token's text is its number."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [crc32(word.encode()) % 60 for word in text.split()]

    def token_bytes(self, token: int) -> bytes:
        return f"{token} ".encode()

    def is_special(self, token: int) -> bool:
        return False


class HashRig:
    """Engines without a model. `fault` gets each worker before it is used, and how it was asked for."""

    kernels, is_exact = "hashes", True

    def __init__(self, fault: Any = None) -> None:
        self.fault = fault

    def worker(
        self, *, num_tokens: int, page_size: int, max_rows: int, algorithm: str | None
    ) -> Worker:
        worker = HashWorker(
            num_pages=1 + num_tokens // page_size, page_size=page_size, max_rows=max_rows
        )
        if self.fault is not None:
            worker = self.fault(worker, page_size)
        return worker

    def close(self) -> None:
        pass


def requests() -> list[Work]:
    return build_requests(Words(), 512)


def run(fault: Any = None, **changes: Any) -> Report:
    asked = requests()
    options: dict[str, Any] = {"page_size": 16, "algorithm": None, "yours": YOURS, **changes}
    return verify(
        HashRig(fault),
        asked,
        Words(),
        baseline(asked, options["page_size"]),
        plan(asked, **options),
    )


def verdicts(report: Report) -> dict[str, bool]:
    return {row.name: row.is_equal for row in report.rows if row.why_not is None}


@pytest.mark.parametrize("page_size", (1, 8, 16))
def test_a_right_engine_passes_and_every_variant_did_what_it_is_about(page_size: int) -> None:
    report = run(page_size=page_size)
    assert report.is_equal, [row for row in report.rows if not row.is_equal]
    left_out = {row.name for row in report.rows if row.why_not}
    own = {f"page size {page_size}"} & {"page size 1", "page size 16"}
    assert left_out == {"speculation: draft"} | own
    assert not [row for row in report.rows if "proves nothing" in row.evidence]
    seen = {row.name: row.evidence for row in report.rows}
    for name, word in {
        "chunking": "cuts", "latency promise": "cuts", "caching": "from the cache",
        "retraction": "retractions", "speculation: ngram": "guesses", "streaming": "pieces",
        "all of it": "guesses",
    }.items():  # fmt: skip
        assert word in seen[name]
    assert "shared" in seen["batching"] and "cuts" not in seen["batching"]


def test_a_draft_that_was_given_is_a_variant() -> None:
    report = run(algorithm="standalone", yours=replace(YOURS, draft_tokens=3, draft_budget=64))
    assert verdicts(report)["speculation: standalone"]
    assert "guesses" in {row.name: row.evidence for row in report.rows}["your settings"]


def test_a_draft_that_is_there_unasked_is_a_variant_and_leaves_your_settings_alone() -> None:
    report = run(drafter=("eagle3", 3))
    assert verdicts(report)["speculation: eagle3"]
    seen = {row.name: row.evidence for row in report.rows}
    assert "guesses" in seen["speculation: eagle3"] and "guesses" not in seen["your settings"]


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({}, "eagle3"),
        ({"speculative_algorithm": "ngram"}, "eagle3"),
        ({"model": "another"}, None),  # no draft of it comes with Tandem
        ({"load_format": "script"}, None),  # has nothing to guess for
    ],
)
def test_the_draft_that_comes_with_tandem_is_published(
    fields: dict[str, Any], found: str | None
) -> None:
    facts = dummy_facts()
    size = {"hidden_size": 576, "num_layers": 30, "vocab_size": 49152, "context_length": 8192}
    facts = replace(facts, model=replace(facts.model, **size))
    args = ServerArgs(**{"load_format": "dummy", **fields})
    boot = Boot(
        args=args,
        sources={},
        facts=facts,
        addresses=Addresses.in_folder("verify", None),
        engine_id="test",
        entropy=1,
        cache_folder="",
    )
    with get_context().override_server_args():
        publish(ServerArgs(load_format="dummy"), facts, role="test", entropy=1)
        drafter = publish_shipped_draft(args, {}, boot)
        assert (None if drafter is None else drafter[0]) == found
        assert (get_context().draft is not None) is (found is not None)
        assert drafter is None or drafter[1] == get_spec().speculative_num_draft_tokens > 0


class Wrong(HashWorker):
    """Says another token wherever `is_wrong(batch, slice)`."""

    def __init__(self, inner: HashWorker, is_wrong: Any) -> None:
        self.__dict__.update(inner.__dict__)
        self.is_wrong = is_wrong

    is_short = False

    def launch(self, batch: ForwardBatch) -> HashTicket:
        ticket = super().launch(batch)
        assert ticket.result is not None
        for piece, got in zip(batch.slices, ticket.result.slices, strict=True):
            if got.tokens and self.is_wrong(batch, piece):
                got.tokens[-1] = self.last[piece.row] = (got.tokens[-1] + 1) % 60
        return ticket


def only_in_company(batch: ForwardBatch, piece: Any) -> bool:
    return len(batch.slices) > 8


def test_a_wrong_token_in_company_is_found_where_it_is() -> None:
    report = run(lambda worker, page_size: Wrong(worker, only_in_company))
    assert not report.is_equal
    found = {row.name: row for row in report.rows}
    assert found["baseline"].is_equal and not found["batching"].is_equal
    first = found["batching"].differences[0]
    assert first.what == "tokens" and first.expected != first.found
    assert found["batching"].num_equal < found["batching"].num_requests


def test_a_fault_of_one_page_size_is_blamed_on_it() -> None:
    def fault(worker: HashWorker, page_size: int) -> HashWorker:
        wrong = Wrong(worker, lambda batch, piece: piece.start > 20)
        return wrong if page_size == 1 else worker

    seen = verdicts(run(fault))
    assert [name for name, is_equal in seen.items() if not is_equal] == ["page size 1"]


def test_a_cache_that_hands_out_wrong_pages_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The books are right, the runner's table is not: the first two cached pages change places."""
    right = Lease.table_write

    def write(lease: Lease) -> TableWrite | None:
        found = right(lease)
        if found is not None and found.first == 0 and lease.committed >= 32:
            found.pages[:2] = found.pages[1::-1]
        return found

    monkeypatch.setattr(Lease, "table_write", write)
    seen = verdicts(run())
    assert {name for name, is_equal in seen.items() if not is_equal} == {
        "caching", "all of it", "your settings",
    }  # fmt: skip


def test_a_variant_that_breaks_is_a_finding() -> None:
    def fault(worker: HashWorker, page_size: int) -> HashWorker:
        worker.raise_at = 5 if page_size == 1 else -1
        return worker

    report = run(fault)
    [row] = [row for row in report.rows if not row.is_equal]
    assert row.name == "page size 1" and row.broke == "RuntimeError: the step failed"


def test_a_baseline_that_breaks_is_an_error() -> None:
    def fault(worker: HashWorker, page_size: int) -> HashWorker:
        worker.raise_at = 5
        return worker

    with pytest.raises(RuntimeError, match="the step failed"):
        run(fault)


def outcome(tokens: list[int], text: str = "", gap: float | None = None, **end: Any) -> Outcome:
    logprobs = []
    if gap is not None:
        top = [LogprobEntry(token=1, logprob=-0.5), LogprobEntry(token=2, logprob=-0.5 - gap)]
        logprobs = [TokenLogprobs(chosen=top[0], top=top) for _ in tokens]
    finish = Finish(**{"reason": "length", **end})
    return Outcome(tokens=tokens, pieces=[text], logprobs=logprobs, finish=finish)


def test_differences_name_the_first_place() -> None:
    assert find_difference(1, outcome([1, 2]), outcome([1, 2])) is None
    other = find_difference(7, outcome([1, 9, 3]), outcome([1, 2, 3], gap=0.25))
    assert other is not None
    assert (other.uid, other.position, other.expected, other.found) == (7, 1, 2, 9)
    assert other.gap == pytest.approx(0.25)
    short = find_difference(1, outcome([1]), outcome([1, 2]))
    assert short is not None and (short.position, short.expected, short.found) == (1, 2, None)
    end = find_difference(1, outcome([1], reason="stop"), outcome([1]))
    assert end is not None and (end.what, end.expected, end.found) == ("end", None, None)
    text = find_difference(1, outcome([1], "a"), outcome([1], "b"))
    assert text is not None and text.what == "text"


def test_requests_fit_a_small_context() -> None:
    for work in build_requests(Words(), 64):
        assert len(work.token_ids) + (work.params.max_tokens or 0) <= 64
        assert work.token_ids
    asked = build_requests(Words(), 64)
    short = {v.name: v for v in plan(asked, page_size=16, algorithm=None, yours=YOURS)}
    assert short["retraction"].why_not is not None


def test_prompts_are_of_mixed_length_and_sampled_both_ways() -> None:
    lengths = [len(work.token_ids) for work in requests()]
    assert len(lengths) == len(prompts()) == 14 and min(lengths) < 3 and max(lengths) > 100
    drawn = [work for work in requests() if work.params.temperature > 0]
    assert 4 < len(drawn) < 10 and all(work.params.seed for work in drawn)


def test_what_never_took_place_proves_nothing() -> None:
    counts = {"steps": 9, "cuts": 0, "cached": 0}
    assert describe(counts, "cached") == "proves nothing: 0 tokens from the cache, 9 steps"
    assert describe(counts, None) == "9 steps"
