"""Grammars in the scheduler: waiting for one, following it, ending with it; whatever else happens."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scheduler_fakes import END, Box, HashWorker, prompt, work

from srt.errors import InvalidSchema
from srt.protocols.forward_batch import ForwardBatch
from srt.protocols.grammar import Opened
from srt.scheduler.build import build_scheduler
from srt.scheduler.replay import replay
from srt.structured.service import ThreadedGrammars
from srt.structured.tokens import TokenTable
from srt.wire.messages import AbortWork
from srt.wire.params import Grammar

VOCAB = 64
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"  # ids from 10 on; END and the others have no text
PIECES = [b""] * 10 + [letter.encode() for letter in LETTERS] + [b""] * (VOCAB - 10 - len(LETTERS))
TABLE = TokenTable(pieces=PIECES, special_ids=[END], end_ids=[END])
WORD = Grammar(kind="regex", text="[a-f]{6}[0-9]{2}")
OPEN = Grammar(kind="regex", text="(ab|ba|c)+")


class PromptGrammars(ThreadedGrammars):
    """All that was asked is ready in the same turn, whatever the thread's pace."""

    def ready(self, seconds: float) -> list[Opened]:
        found: list[Opened] = []
        while self._asked:
            found += super().ready(20)
        return found


@pytest.fixture
def grammars() -> Iterator[ThreadedGrammars]:
    made = PromptGrammars(lambda: TABLE)
    yield made
    made.close()


class OneAtATime(HashWorker):
    """A mask needs the token before it: no row with one may have two steps on their way."""

    def __init__(self, **more: Any) -> None:
        super().__init__(vocab=VOCAB, **more)
        self.num_masked = 0

    def launch(self, batch: ForwardBatch) -> Any:
        self.num_masked += sum(piece.allowed is not None for piece in batch.slices)
        assert all(piece.sample for piece in batch.slices if piece.allowed is not None)
        return super().launch(batch)


def text(tokens: list[int]) -> str:
    return b"".join(PIECES[token] for token in tokens).decode()


def asks(**more: Any) -> list[Any]:
    """With and without grammars, with prompts of several lengths."""
    shared = prompt(0, 24)
    return [
        work(1, prompt(1, 5), 20, grammar=WORD, **more),
        work(2, prompt(2, 33), 24),
        work(3, shared, 20, grammar=WORD, seed=5, **more),
        work(4, shared, 9, grammar=OPEN, ignore_eos=False),
        work(5, shared, 12),
        work(6, shared, 20, grammar=WORD, seed=6, temperature=1.0),
    ]


@pytest.mark.parametrize("pool", ["large", "tiny"])
@pytest.mark.parametrize("depth", [0, 1])
def test_outputs_fit_and_are_the_same_in_every_setting(
    grammars: ThreadedGrammars, depth: int, pool: str
) -> None:
    alone = {}
    for request in asks():
        box = Box(OneAtATime(num_pages=512, page_size=1), grammars=grammars, radix_cache=False)
        box.run(request)
        alone[request.uid] = box.tokens(request.uid)
    slots = 512 if pool == "large" else 60
    box = Box(
        OneAtATime(num_pages=slots + 1, page_size=1), grammars=grammars, depth=depth, max_running=6,
        chunked_prefill_size=3, max_step_tokens=40,
    )  # fmt: skip
    box.run(*asks())
    for uid, tokens in alone.items():
        assert box.tokens(uid) == tokens, uid
    for uid in (1, 3, 6):
        assert re.fullmatch(WORD.text, text(alone[uid])), text(alone[uid])
        end = box.finish(uid)
        assert (end.reason, end.matched, end.usage.completion_tokens) == ("stop", None, 8)
    assert re.match("(ab|ba|c)+", text(alone[4]))


@pytest.mark.parametrize("depth", [0, 1])
def test_a_retracted_request_goes_on_where_its_grammar_was(
    grammars: ThreadedGrammars, depth: int
) -> None:
    pair = Grammar(kind="regex", text="([a-f][0-9]){50}")
    todo = [work(uid, prompt(uid, 10), 120, grammar=pair, seed=uid) for uid in (1, 2)]
    wide, narrow = (
        Box(OneAtATime(num_pages=pages), grammars=grammars, depth=depth) for pages in (200, 41)
    )
    for box in (wide, narrow):
        box.run(*todo)
    assert narrow.finish(2).timing.retractions == 1
    for uid in (1, 2):
        assert narrow.tokens(uid) == wide.tokens(uid)
        assert re.fullmatch(pair.text, text(narrow.tokens(uid)))


@pytest.mark.parametrize("depth", [0, 1])
def test_overlap_does_not_slow_a_grammar_down(grammars: ThreadedGrammars, depth: int) -> None:
    worker = OneAtATime()
    box = Box(worker, grammars=grammars, depth=depth)
    box.run(work(1, prompt(1, 4), 20, grammar=WORD), work(2, prompt(2, 4), 30))
    masked = [any(p.allowed is not None for p in batch.slices) for batch in worker.batches]
    assert masked[:8] == [True] * 8, "it is in every step until it is through"
    assert sum(masked) == 8


@pytest.mark.parametrize("more", [{"min_tokens": 19}, {"ignore_eos": True}, {"ignore_eos": False}])
def test_a_complete_grammar_ends_the_request(grammars: ThreadedGrammars, more: Any) -> None:
    box = Box(OneAtATime(), grammars=grammars, depth=1)
    box.run(work(1, prompt(1, 5), 20, grammar=WORD, **more))
    assert re.fullmatch(WORD.text, text(box.tokens(1)))
    assert box.finish(1).reason == "stop"


@pytest.mark.parametrize(("limit", "reason"), [(7, "length"), (8, "stop"), (9, "stop")])
def test_a_limit_cuts_and_the_last_token_may_complete(
    grammars: ThreadedGrammars, limit: int, reason: str
) -> None:
    box = Box(OneAtATime(), grammars=grammars)
    box.run(work(1, prompt(1, 5), limit, grammar=WORD))
    assert (len(box.tokens(1)), box.finish(1).reason) == (min(limit, 8), reason)


@pytest.mark.parametrize("depth", [0, 1])
def test_the_models_end_is_allowed_only_where_the_output_may_end(
    grammars: ThreadedGrammars, depth: int
) -> None:
    box = Box(OneAtATime(), grammars=grammars, depth=depth)
    seeds = range(30)
    box.run(*(work(s, prompt(s, 4), 40, grammar=OPEN, seed=s, ignore_eos=False) for s in seeds))
    ended = 0
    for seed in seeds:
        tokens, end = box.tokens(seed), box.finish(seed)
        if end.reason == "stop":
            ended += 1
            assert tokens[-1] == end.matched == END and re.fullmatch(OPEN.text, text(tokens))
    assert ended > 5


def test_followers_have_matchers_of_their_own(grammars: ThreadedGrammars) -> None:
    box = Box(OneAtATime(), grammars=grammars, depth=1)
    same = prompt(3, 20)
    box.run(*(work(uid, same, 20, grammar=WORD, seed=uid, leader=1) for uid in (1, 2, 3)))
    texts = {text(box.tokens(uid)) for uid in (1, 2, 3)}
    assert len(texts) == 3 and all(re.fullmatch(WORD.text, each) for each in texts)


class SlowGrammars:
    """Opens when told, and may fail; counts who was forgotten."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.opened: list[Opened] = []
        self.forgotten: list[int] = []
        self.fails_after = 1 << 30
        self.waits: list[float] = []

    def open(self, uid: int, grammar: Grammar) -> None:
        self.asked.append(uid)

    def ready(self, seconds: float) -> list[Opened]:
        self.waits.append(seconds)
        found, self.opened = self.opened, []
        return found

    def follow(self, uid: int, tokens: list[int]) -> bytes | None:
        self.fails_after -= len(tokens)
        if self.fails_after <= 0:
            raise InvalidSchema("regex: too many states", param="regex")
        return b"\xff" * 8

    def peek(self, uid: int, tokens: list[int]) -> bytes | None:
        return b"\xff" * 8

    def forget(self, uid: int) -> None:
        self.forgotten.append(uid)


def test_a_request_waits_for_its_grammar_and_holds_nobody_up() -> None:
    grammars = SlowGrammars()
    box = Box(OneAtATime(), grammars=grammars)
    box.turn(work(1, prompt(1, 5), 4, grammar=WORD))
    assert box.state(1)["waits_for"]["reason"] == "grammar"
    assert set(grammars.waits) == {0.005}, "alone, it does not spin"
    grammars.waits.clear()
    for _ in range(4):
        box.turn(*([] if box.items.get(2) else [work(2, prompt(2, 5), 30)]))
    assert box.state(1)["waits_for"]["reason"] == "grammar" and len(box.tokens(2)) >= 3
    assert set(grammars.waits) == {0.0}, "others do not wait"
    grammars.opened = [Opened(uid=1, mask=b"\xff" * 8)]
    box.run()
    assert box.finish(1).reason == box.finish(2).reason == "length"
    assert grammars.forgotten == [1]


def test_h3_a_grammar_that_fails_ends_its_own_request() -> None:
    grammars = SlowGrammars()
    box = Box(OneAtATime(), grammars=grammars, depth=1)
    box.turn(*(work(uid, prompt(uid, 5), 20, grammar=WORD) for uid in (1, 2)), work(3, [1], 9))
    error = InvalidSchema("regex: no", param="regex")
    grammars.opened = [Opened(uid=1, error=error), Opened(uid=2, mask=b"\xff" * 8)]
    grammars.fails_after = 3
    box.run()
    for uid, words in ((1, "regex: no"), (2, "too many states")):
        end = box.finish(uid)
        assert (end.reason, end.failure.code) == ("error", "invalid_schema")
        assert words in end.failure.message
    assert len(box.tokens(2)) == 3 and box.finish(3).reason == "length"
    assert sorted(grammars.forgotten) == [1, 2]


@pytest.mark.parametrize("when", ["waiting", "running"])
def test_an_abort_forgets_the_grammar(when: str) -> None:
    grammars = SlowGrammars()
    box = Box(OneAtATime(), grammars=grammars, depth=1)
    box.turn(work(1, prompt(1, 5), 20, grammar=WORD))
    if when == "running":
        grammars.opened = [Opened(uid=1, mask=b"\xff" * 8)]
        box.turn()
        box.turn()
    box.run(AbortWork(uid=1))
    assert box.finish(1).reason == "abort" and grammars.forgotten == [1]
    grammars.waits.clear()
    box.turn()
    assert not grammars.waits, "nobody waits any more"


def test_without_grammars_they_are_refused() -> None:
    box = Box(OneAtATime())
    box.run(work(1, prompt(1, 5), 20, grammar=WORD), work(2, prompt(1, 5), 2))
    assert box.finish(1).failure.param == "regex" and box.finish(2).reason == "length"


def test_a_recorded_run_replays_without_a_vocabulary(
    grammars: ThreadedGrammars, tmp_path: Path
) -> None:
    path = tmp_path / "journal"
    box = Box(OneAtATime(), grammars=grammars, depth=1)
    box.scheduler = build_scheduler(
        box.worker, box.settings, box, box.clock, journal=path, grammars=grammars
    )
    bad = work(9, prompt(9, 4), 5, grammar=Grammar(kind="regex", text="["))
    box.run(*asks(), bad)
    box.scheduler.close()
    assert box.finish(9).reason == "error"
    again = Box(OneAtATime())
    result = replay(path, again.send)
    assert result.difference is None and result.num_steps == len(box.worker.batches)
    for uid in (1, 2, 3, 4, 5, 6, 9):
        assert again.tokens(uid) == box.tokens(uid)
        assert again.finish(uid) == box.finish(uid)
