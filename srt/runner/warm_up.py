"""Runs every path of a worker once before it is ready, so that nothing lazy is left for a user."""

from __future__ import annotations

from collections.abc import Callable

from srt.protocols.forward_batch import ForwardBatch, RowSetup, Slice, TableWrite
from srt.protocols.worker import Worker
from srt.wire.params import SamplingParams


def warm_up(
    worker: Worker, *, guesses: bool = False, show: Callable[[float], None] = lambda done: None
) -> None:
    """A prefill and a decode step, greedy and sampled, on the last pages, which then are as free as
    before; `guesses`: the decode may have some. Shows how much is done. Raises whatever the model
    raises."""
    facts = worker.facts
    room = min(4, facts.context_length, (facts.num_pages - 1) * facts.page_size)
    length = max(1, room - 2)
    pages = list(range(facts.num_pages - -(-room // facts.page_size), facts.num_pages))
    for number, params in enumerate((SamplingParams(temperature=0.0), SamplingParams(seed=0))):
        show(number / 3)
        tokens = [0] * length
        setup = RowSetup(row=0, params=params, tokens=tokens, prompt_len=length, stop_ids=[])
        prefill = Slice(row=0, start=0, length=length, tokens=tokens, sample=True)
        write = TableWrite(row=0, first=0, pages=pages)
        worker.launch(
            ForwardBatch(step=-2, setups=[setup], table_writes=[write], slices=[prefill])
        ).wait()
    show(2 / 3)
    if length < room:
        decode = Slice(row=0, start=length, length=1, tokens=None, sample=True)
        decode.draft = room - length - 1 if guesses else 0
        worker.launch(ForwardBatch(step=-1, slices=[decode])).wait()
    show(1.0)
