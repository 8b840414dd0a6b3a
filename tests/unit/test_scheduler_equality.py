"""Chunks, pages, caching, overlap, batching and retraction never change a token."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
from scheduler_fakes import Box, HashWorker, prompt, scored, work

from srt.scheduler.balance import Balance
from srt.wire.messages import Work


def requests() -> list[Work]:
    shared = prompt(0, 24)
    made = [
        work(1, prompt(1, 5), 20),
        work(2, shared + prompt(2, 9), 17),
        work(3, shared + prompt(3, 2), 25, ignore_eos=False, min_tokens=3),
        work(4, prompt(4, 33), 1),
        work(5, shared, 12),
        work(6, shared, 12, seed=2),
        work(7, [1], 30, stop_token_ids=[3, 5]),
        work(8, shared + prompt(2, 9), 17),
        work(9, prompt(9, 17), 0),
    ]
    return made


@cache
def alone(uid: int) -> tuple[int, ...]:
    """A request's tokens when it runs alone, in one go, without cache, in a large pool."""
    request = next(r for r in requests() if r.uid == uid)
    box = Box(
        HashWorker(num_pages=512, page_size=1), radix_cache=False, chunked_prefill_size=0,
        max_running=1, max_step_tokens=512,
    )  # fmt: skip
    box.run(request)
    return tuple(box.tokens(uid))


MATRIX = list(product((0, 3, 16), (1, 16), (True, False), (0, 1), (1, 3, 8), ("large", "tiny")))


@pytest.mark.parametrize(("chunk", "page", "radix", "depth", "running", "pool"), MATRIX)
def test_tokens_equal_those_of_the_request_alone(
    chunk: int, page: int, radix: bool, depth: int, running: int, pool: str
) -> None:
    slots = 512 if pool == "large" else 64
    box = Box(
        HashWorker(num_pages=slots // page + 1, page_size=page),
        chunked_prefill_size=chunk, radix_cache=radix, depth=depth, max_running=running,
        max_step_tokens=40, policy="longest-prefix",
    )  # fmt: skip
    todo = requests()
    box.turn(*todo[:4])
    box.turn(*todo[4:])
    box.run()
    for request in todo:
        assert tuple(box.tokens(request.uid)) == alone(request.uid), request.uid


GUESSES = list(product((1, 6), (3, 16), (1, 16), (True, False), (0, 1), ("large", "tiny")))


@pytest.mark.parametrize(("most", "chunk", "page", "radix", "depth", "pool"), GUESSES)
def test_guesses_change_no_token(
    most: int, chunk: int, page: int, radix: bool, depth: int, pool: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Right ones, wrong ones and none, at random; a wrong one leaves rubbish in its KV slot."""
    monkeypatch.setattr(Balance, "pays", lambda *_: True)
    slots = 512 if pool == "large" else 64
    box = Box(
        HashWorker(num_pages=slots // page + 1, page_size=page), chunked_prefill_size=chunk,
        radix_cache=radix, depth=depth, max_step_tokens=40, draft_tokens=most, draft_budget=40,
    )  # fmt: skip
    todo = requests()
    box.turn(*todo[:4])
    box.turn(*todo[4:])
    box.run()
    for request in todo:
        assert tuple(box.tokens(request.uid)) == alone(request.uid), request.uid
    slices = [piece for batch in box.worker.batches for piece in batch.slices]
    assert max(piece.draft for piece in slices) == most
    for batch in box.worker.batches:
        assert sum(piece.length + piece.draft for piece in batch.slices) <= 40


def test_the_tiny_pool_does_retract() -> None:
    """Otherwise the matrix would not test it."""
    box = Box(HashWorker(num_pages=65, page_size=1), radix_cache=True, depth=1)
    more = [work(20 + i, prompt(20 + i, 3), 50) for i in range(4)]
    for request in more:
        box.turn(request)
        for _ in range(3):
            box.turn()
    # growth is underestimated on purpose: 4 x 53 tokens can never live in 64 slots together
    box.run()
    for request in more:
        lone = Box(HashWorker(num_pages=512, page_size=1), radix_cache=False, max_running=1)
        lone.run(request)
        assert box.tokens(request.uid) == lone.tokens(request.uid)


@pytest.mark.parametrize("depth", (0, 1))
@pytest.mark.parametrize("page", (1, 4, 16))
@pytest.mark.parametrize("radix", (True, False))
def test_long_outputs_are_retracted_and_resumed_exactly(depth: int, page: int, radix: bool) -> None:
    slots = 320
    box = Box(
        HashWorker(num_pages=slots // page + 1, page_size=page), depth=depth, radix_cache=radix
    )
    todo = [work(i, prompt(i, 10), 150 + i, logprobs=None) for i in range(1, 7)]
    box.run(*todo)
    assert sum(box.finish(r.uid).timing.retractions for r in todo) > 0
    for request in todo:
        lone = Box(HashWorker(num_pages=512, page_size=1), radix_cache=False, max_running=1)
        lone.run(request)
        assert box.tokens(request.uid) == lone.tokens(request.uid)
        assert box.finish(request.uid).reason == "length"


@pytest.mark.parametrize("page", (1, 16))
@pytest.mark.parametrize("depth", (0, 1))
def test_h14_equal_prompts_in_one_step_share_one_copy(page: int, depth: int) -> None:
    same = prompt(5, 64)
    box = Box(
        HashWorker(num_pages=400 // page + 1, page_size=page), depth=depth, max_step_tokens=200,
        chunked_prefill_size=0,
    )  # fmt: skip
    box.turn(work(1, same, 60), work(2, same, 60))
    assert len(box.worker.batches[0].slices) == 2, "both compute their prompt in one step"
    for uid in range(3, 6):  # overwrites whatever pages were given back
        box.turn(work(uid, prompt(uid, 70), 20))
    box.run()
    lone = Box(HashWorker(num_pages=512, page_size=1), radix_cache=False, max_running=1)
    lone.run(work(1, same, 60))
    assert box.tokens(1) == box.tokens(2) == lone.tokens(1)


@pytest.mark.parametrize("depth", (0, 1))
def test_followers_wait_for_the_leader_and_share_its_prompt(depth: int) -> None:
    box = Box(depth=depth, chunked_prefill_size=8)
    long = prompt(1, 33)
    box.turn(work(1, long, 6), *(work(i, long, 6, seed=i, leader=1, index=i) for i in (2, 3, 4)))
    assert box.state(2)["waits_for"]["reason"] == "leader"
    assert box.state(2)["waits_for"]["behind"] == 1
    box.run()
    assert [box.finish(uid).usage.cached_tokens for uid in (1, 2, 3, 4)] == [0, 32, 32, 32]
    assert len({tuple(box.tokens(uid)) for uid in (1, 2, 3, 4)}) == 4


@pytest.mark.parametrize("depth", (0, 1))
def test_h12_prompt_logprobs_are_whole_whatever_the_chunks(depth: int) -> None:
    page, chunk = 4, 16
    for length in (1, page + 1, 2 * page + 3, chunk + 1, 2 * chunk + 1):
        box = Box(depth=depth, chunked_prefill_size=chunk)
        text = prompt(length, length)
        for uid, asks in ((1, 2), (2, 2), (3, None), (4, 2)):
            box.run(work(uid, text, 3, prompt_logprobs=asks))
            got = [i.prompt_logprobs for i in box.items[uid] if i.prompt_logprobs is not None]
            if asks is None:
                assert got == []
                continue
            expected = [None, *(scored(token, i) for i, token in enumerate(text[1:]))]
            assert got == [expected]
            assert box.finish(uid).cache.reason == "prompt_logprobs"
            assert box.finish(uid).usage.cached_tokens == 0
        assert box.tokens(1) == box.tokens(2) == box.tokens(3) == box.tokens(4)


def test_prefix_cache_is_used_and_separated_by_salt() -> None:
    box = Box()
    text = prompt(1, 30)
    box.run(work(1, text))
    box.run(work(2, text))
    box.run(work(3, text, cache_salt="other"))
    assert [box.finish(uid).usage.cached_tokens for uid in (1, 2, 3)] == [0, 28, 0]
    box.run(work(4, text + box.tokens(1) + [9]))  # a second turn of the same talk
    assert box.finish(4).usage.cached_tokens == 36
    assert box.tokens(1) == box.tokens(2) == box.tokens(3)
