"""Runs every path of a worker once before it is ready, so that nothing lazy is left for a user."""

from __future__ import annotations

from collections.abc import Callable

from srt.protocols.forward_batch import ForwardBatch, RowSetup, Slice, TableWrite
from srt.protocols.worker import Worker
from srt.wire.params import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
DRAWN = SamplingParams(seed=0)
RULED = SamplingParams(seed=0, presence_penalty=0.5, logprobs=1)


def warm_up(
    worker: Worker,
    *,
    guesses: bool = False,
    longest: int = 0,
    show: Callable[[float], None] = lambda done: None,
) -> None:
    """Prefills, greedy, with rules and drawn, and a decode step, on the last pages, which then are as
    free as before; `guesses`: the decode may have some. `longest`: tokens of the largest prompt a step
    may hold, if that is worth a try. Shows how much is done. Raises whatever the model raises."""
    facts = worker.facts
    held = min(facts.context_length, (facts.num_pages - 1) * facts.page_size)
    room = min(4, held)
    length = max(1, room - 2)
    rounds = [
        (max(length, min(longest, held)), GREEDY, None),
        (length, RULED, b"\xff" * -(-facts.vocab_size // 8)),
        (length, DRAWN, None),
    ]
    for number, (count, params, allowed) in enumerate(rounds):
        show(number / (len(rounds) + 1))
        setup = RowSetup(row=0, params=params, tokens=[0] * count, prompt_len=count, stop_ids=[])
        prefill = Slice(
            row=0, start=0, length=count, tokens=[0] * count, sample=True, allowed=allowed
        )
        pages = range(facts.num_pages - -(-max(count, room) // facts.page_size), facts.num_pages)
        write = TableWrite(row=0, first=0, pages=list(pages))
        worker.launch(
            ForwardBatch(step=-2, setups=[setup], table_writes=[write], slices=[prefill])
        ).wait()
    show(len(rounds) / (len(rounds) + 1))
    if length < room:
        decode = Slice(row=0, start=length, length=1, tokens=None, sample=True)
        decode.draft = room - length - 1 if guesses else 0
        worker.launch(ForwardBatch(step=-1, slices=[decode])).wait()
    show(1.0)
