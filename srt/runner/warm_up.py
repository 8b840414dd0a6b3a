"""Runs every path of a worker once before it is ready, so that nothing lazy is left for a user."""

from __future__ import annotations

from srt.protocols.forward_batch import ForwardBatch, RowSetup, Slice, TableWrite
from srt.protocols.worker import Worker
from srt.wire.params import SamplingParams


def warm_up(worker: Worker, *, guesses: bool = False) -> None:
    """A prefill and a decode step, greedy and sampled, on the last page, which then is as free as
    before; `guesses`: the decode may have one. Raises whatever the model raises."""
    facts = worker.facts
    greedy = SamplingParams(temperature=0.0)
    setup = RowSetup(row=0, params=greedy, tokens=[0, 0], prompt_len=2, stop_ids=[])
    length = 2 if facts.page_size > 2 and facts.context_length > 2 else 1
    first = ForwardBatch(
        step=-2,
        setups=[setup],
        table_writes=[TableWrite(row=0, first=0, pages=[facts.num_pages - 1])],
        slices=[Slice(row=0, start=0, length=length, tokens=[0] * length, sample=True)],
    )
    drawn = RowSetup(
        row=0, params=SamplingParams(seed=0), tokens=[0] * length, prompt_len=length, stop_ids=[]
    )
    follower = Slice(row=0, start=length - 1, length=1, tokens=None, sample=True)
    follower.draft = 1 if guesses and length > 1 else 0
    second = ForwardBatch(
        step=-1,
        setups=[drawn],
        slices=[follower],
    )
    for batch in (first, second):
        worker.launch(batch).wait()
