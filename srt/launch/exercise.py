"""Steps that reach every kernel a server may want, so that all of them are compiled and recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from srt.protocols.forward_batch import ForwardBatch, RowSetup, Slice, TableWrite
from srt.protocols.worker import Idler, Worker
from srt.wire.params import SamplingParams

Show = Callable[[str, float | None], None]


def exercise(worker: Worker, chunk: int, show: Show) -> None:
    """Everything the worker does in quiet moments (graphs), then prompts of every magnitude up to
    `chunk` tokens, each followed by decodes, under every kind of sampling. Its pages hold nothing
    afterwards that anybody reads; no request may be alive. Raises whatever a step raises."""
    if isinstance(worker, Idler):
        is_more, done = True, 0
        while is_more:
            show(f"graphs: {done}", None)
            is_more = worker.idle()
            done += 1
    facts = worker.facts
    room = min(facts.context_length, (facts.num_pages - 1) * facts.page_size) - 2
    kinds, lengths = list(_kinds()), list(_lengths(min(chunk, room)))
    for index, length in enumerate(lengths):
        for params in kinds if index == 0 else kinds[:2]:
            show(f"steps of {length} tokens", index / len(lengths))
            _run(worker, length, params)
    show("steps", 1.0)


def _lengths(most: int) -> Iterator[int]:
    """1, 4, 16, ... and the longest."""
    length = 1
    while length < most:
        yield length
        length *= 4
    yield max(1, most)


def _kinds() -> Iterator[SamplingParams]:
    yield SamplingParams(temperature=0.0)
    yield SamplingParams(seed=1)
    yield SamplingParams(seed=1, top_k=8)
    yield SamplingParams(seed=1, top_p=0.9)
    yield SamplingParams(seed=1, min_p=0.1)
    yield SamplingParams(seed=1, top_k=8, top_p=0.9, min_p=0.1)
    yield SamplingParams(
        seed=1, repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.5
    )
    yield SamplingParams(seed=1, logit_bias={0: 1.0})
    yield SamplingParams(temperature=0.0, logprobs=1)


def _run(worker: Worker, length: int, params: SamplingParams) -> None:
    """A prompt and two decodes on one row."""
    page = worker.facts.page_size
    pages = list(range(1, 1 + -(-(length + 2) // page)))
    tokens = [0] * length
    setup = RowSetup(row=0, params=params, tokens=tokens, prompt_len=length, stop_ids=[])
    prompt = Slice(row=0, start=0, length=length, tokens=tokens, sample=True)
    write = TableWrite(row=0, first=0, pages=pages)
    batch = ForwardBatch(step=-3, setups=[setup], table_writes=[write], slices=[prompt])
    worker.launch(batch).wait()
    for number in range(2):
        decode = Slice(row=0, start=length + number, length=1, tokens=None, sample=True)
        worker.launch(ForwardBatch(step=number - 2, slices=[decode])).wait()
