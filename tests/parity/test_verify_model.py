"""`tandem verify` with a model that computes: the published path, one set of weights, many pools."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from request_set import VOCAB

from srt.cache.pools import PagedKVPool
from srt.config.args import ServerArgs
from srt.config.context import get_context, get_schedule, get_spec, publish
from srt.config.dummy import dummy_facts
from srt.config.facts import Facts, ModelFacts
from srt.launch.parts import scheduler_settings
from srt.verify.check import Report, verify
from srt.verify.model_rig import open_rig
from srt.verify.requests import build_requests
from srt.verify.variants import baseline, plan


class Words:
    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [3 + crc32(word.encode()) % (VOCAB - 3) for word in text.split()]

    def token_bytes(self, token: int) -> bytes:
        return f"{token} ".encode()

    def is_special(self, token: int) -> bool:
        return False


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    with get_context().override_server_args():
        yield


def run(facts: ModelFacts, folder: Path, **fields: Any) -> Report:
    args = ServerArgs(model="tiny", dtype="float32", max_total_tokens=4096, num_threads=1, **fields)
    whole = Facts(machine=dummy_facts().machine, model=facts, draft=facts)
    publish(args, whole, role="verify", entropy=1)
    requests = build_requests(Words(), facts.context_length)
    page_size, algorithm = get_schedule().page_size, get_spec().speculative_algorithm
    yours = scheduler_settings()
    rig = open_rig(str(folder), lambda phase, fraction: None)
    try:
        variants = plan(requests, page_size=page_size, algorithm=algorithm, yours=yours)
        return verify(rig, requests, Words(), baseline(requests, page_size), variants)
    finally:
        rig.close()


@pytest.mark.parametrize(
    "fields",
    [
        {"max_itl_ms": 5.0},
        {
            "speculative_algorithm": "standalone",
            "speculative_draft_model": "tiny",
            "page_size": 8,
        },
    ],
    ids=["plain", "standalone"],
)
def test_a_tiny_model_passes(facts: ModelFacts, tmp_path: Path, fields: dict[str, Any]) -> None:
    report = run(facts, tmp_path, **fields)
    assert report.is_equal, [row for row in report.rows if not row.is_equal]
    assert "torch, float32" in report.kernels and not report.is_exact
    assert not [row for row in report.rows if "proves nothing" in row.evidence]


def test_a_page_that_is_read_too_early_is_found(
    facts: ModelFacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values of the second layer land one slot too far where a page is one token."""
    right = PagedKVPool.values

    def wrong(self: PagedKVPool, layer: int) -> Any:
        found = right(self, layer)
        return found.roll(1, 0) if self.page_size == 1 and layer == 1 else found

    monkeypatch.setattr(PagedKVPool, "values", wrong)
    report = run(facts, tmp_path)
    assert [row.name for row in report.rows if not row.is_equal] == ["page size 1"]
    [row] = [row for row in report.rows if not row.is_equal]
    assert row.differences[0].gap is not None
