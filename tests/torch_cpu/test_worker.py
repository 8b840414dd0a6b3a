"""The runner and its worker: whatever shares a step changes nobody's answer."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from srt.config.facts import ModelFacts
from srt.errors import ConfigError
from srt.protocols.forward_batch import ForwardBatch, RowSetup, Slice, SliceResult, TableWrite
from srt.protocols.worker import WorkerFacts
from srt.runner.model_runner import ModelRunner
from srt.runner.tp_worker import TpModelWorker
from srt.runner.warm_up import warm_up
from srt.sampling.sampler import Sampler
from srt.wire.params import SamplingParams
from tests.tiny_models import TINY, Driver, make_runner, make_spec

FACTS = ModelFacts(
    name="tiny",
    path="nowhere",
    format="safetensors",
    architecture="LlamaForCausalLM",
    config={**TINY, "sliding_window": None},
    context_length=128,
    dtype="float32",
    num_layers=3,
    hidden_size=48,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=97,
    num_parameters=0,
    end_token_ids=[2],
)
GREEDY = SamplingParams(temperature=0.0)
PAGES = 8  # of 16 tokens: one context


def make_worker(runner: ModelRunner) -> TpModelWorker:
    facts = WorkerFacts(
        vocab_size=97,
        context_length=128,
        num_pages=runner.pool.num_pages,
        page_size=runner.pool.page_size,
        max_rows=4,
        end_token_ids=[2],
        memory_bytes={},
    )
    thread = ThreadPoolExecutor(1)
    return TpModelWorker(runner, Sampler(4, 97), facts, thread)


@pytest.fixture
def worker() -> Iterator[TpModelWorker]:
    made = make_worker(make_runner(FACTS, load_format="dummy"))
    yield made
    made.close()


def prompt(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (length,), generator=generator).tolist()


def opening(row: int, tokens: list[int]) -> RowSetup:
    return RowSetup(row=row, params=GREEDY, tokens=tokens, prompt_len=len(tokens), stop_ids=[])


def table(row: int) -> TableWrite:
    return TableWrite(row=row, first=0, pages=list(range(1 + row * PAGES, 1 + (row + 1) * PAGES)))


def whole(row: int, tokens: list[int]) -> Slice:
    return Slice(row=row, start=0, length=len(tokens), tokens=tokens, sample=True)


def decode(row: int, position: int) -> Slice:
    return Slice(row=row, start=position, length=1, tokens=None, sample=True)


def start(worker: TpModelWorker, row: int, tokens: list[int]) -> int:
    batch = ForwardBatch(
        step=0,
        setups=[opening(row, tokens)],
        table_writes=[table(row)],
        slices=[whole(row, tokens)],
    )
    return worker.launch(batch).wait().slices[0].tokens[0]


def alone(worker: TpModelWorker, tokens: list[int], count: int) -> list[int]:
    """Greedy tokens of one request that has the worker to itself, on row 3."""
    found = [start(worker, 3, tokens)]
    for step in range(count - 1):
        batch = ForwardBatch(step=step, slices=[decode(3, len(tokens) + step)])
        found += worker.launch(batch).wait().slices[0].tokens
    return found


def test_mixed_batches_equal_one_by_one(worker: TpModelWorker) -> None:
    """Two rows decode while a third prompt comes in, in two chunks."""
    prompts = [prompt(1, 20), prompt(2, 33), prompt(3, 41)]
    expected = [alone(worker, tokens, 3) for tokens in prompts]
    found = [[start(worker, row, prompts[row])] for row in (0, 1)] + [[]]
    for step, (first, length) in enumerate([(0, 24), (24, 17)]):
        chunk = prompts[2][first : first + length]
        batch = ForwardBatch(
            step=step,
            setups=[] if step else [opening(2, prompts[2])],
            table_writes=[] if step else [table(2)],
            slices=[
                decode(0, 20 + step),
                decode(1, 33 + step),
                Slice(row=2, start=first, length=length, tokens=chunk, sample=step == 1),
            ],
        )
        for row, result in enumerate(worker.launch(batch).wait().slices):
            found[row] += result.tokens
    for step in range(2):
        batch = ForwardBatch(step=step, slices=[decode(2, 41 + step)])
        found[2] += worker.launch(batch).wait().slices[0].tokens
    assert found == expected


def test_steps_launched_ahead_run_in_order(worker: TpModelWorker) -> None:
    """Ten steps are launched before the first is waited for; each reads the token before it."""
    tokens = prompt(4, 10)
    expected = alone(worker, tokens, 11)
    batches = [
        ForwardBatch(
            step=0, setups=[opening(0, tokens)], table_writes=[table(0)], slices=[whole(0, tokens)]
        ),
        *(ForwardBatch(step=1 + step, slices=[decode(0, 10 + step)]) for step in range(10)),
    ]
    tickets = [worker.launch(batch) for batch in batches]
    assert [ticket.wait().slices[0].tokens[0] for ticket in tickets] == expected
    assert all(ticket.done() for ticket in tickets)


def test_a_page_may_change_hands_between_two_launched_steps(worker: TpModelWorker) -> None:
    """Row 1 takes row 0's pages in the step after row 0's last, without a wait between them."""
    old, new = prompt(5, 30), prompt(6, 25)
    expected = [alone(worker, old, 2)[1], alone(worker, new, 1)[0]]
    start(worker, 0, old)
    last = worker.launch(ForwardBatch(step=1, slices=[decode(0, 30)]))
    taken = TableWrite(row=1, first=0, pages=table(0).pages)
    following = ForwardBatch(
        step=2, setups=[opening(1, new)], table_writes=[taken], slices=[whole(1, new)]
    )
    results = [last.wait(), worker.launch(following).wait()]
    assert [result.slices[0].tokens[0] for result in results] == expected


def test_prompt_logprobs_match_the_logits(worker: TpModelWorker) -> None:
    """In two slices; the last has one target less, and a plain row beside it changes nothing."""
    tokens = prompt(7, 21)
    logits = Driver(worker.runner).run(tokens, [21])
    expected = logits.log_softmax(-1)[torch.arange(20), torch.tensor(tokens[1:])]
    start(worker, 1, prompt(8, 5))
    found: list[float] = []
    results: list[SliceResult] = []
    for first, last in ((0, 16), (16, 21)):
        batch = ForwardBatch(
            step=0,
            setups=[opening(0, tokens)] if first == 0 else [],
            table_writes=[table(0)],
            slices=[
                decode(1, 5 if first == 0 else 6),
                Slice(
                    row=0,
                    start=first,
                    length=last - first,
                    tokens=tokens[first:last],
                    sample=last == 21,
                    prompt_logprobs=2,
                    targets=tokens[first + 1 : last + 1],
                ),
            ],
        )
        results.append(worker.launch(batch).wait().slices[1])
        scores = results[-1].prompt_logprobs
        assert scores is not None
        assert [len(score.top) for score in scores] == [2] * len(scores)
        found += [score.chosen.logprob for score in scores]
    torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-4, atol=1e-4)
    assert results[0].tokens == []
    assert results[1].tokens == [int(logits[-1].argmax())]


def test_a_row_with_nan_fails_alone_and_its_pages_stay_usable(worker: TpModelWorker) -> None:
    bad, good = prompt(9, 12), prompt(10, 12)
    expected = alone(worker, good, 3)
    start(worker, 0, bad)
    assert start(worker, 1, good) == expected[0]
    worker.runner.pool.values(1)[16 * table(0).pages[0] + 2] = float("nan")
    batch = ForwardBatch(step=1, slices=[decode(0, 12), decode(1, 12)])
    failed, fine = worker.launch(batch).wait().slices
    assert failed.error is not None and failed.tokens == []
    assert fine.error is None and fine.tokens == [expected[1]]
    taken = TableWrite(row=1, first=0, pages=table(0).pages)  # the poisoned pages, nearly empty
    batch = ForwardBatch(
        step=2, setups=[opening(1, good)], table_writes=[taken], slices=[whole(1, good)]
    )
    assert worker.launch(batch).wait().slices[0].tokens == [expected[0]]
    batch = ForwardBatch(step=3, slices=[decode(0, 13), decode(1, 12)])
    assert worker.launch(batch).wait().slices[1].tokens == [expected[1]]


def test_a_step_that_raises_says_so_to_its_own_ticket(worker: TpModelWorker) -> None:
    tokens = prompt(11, 9)
    expected = alone(worker, tokens, 1)
    outside = Slice(row=0, start=4000, length=1, tokens=[5], sample=True)
    ticket = worker.launch(ForwardBatch(step=0, setups=[opening(0, [5])], slices=[outside]))
    with pytest.raises(IndexError):
        ticket.wait()
    assert alone(worker, tokens, 1) == expected


def test_warm_up_leaves_no_trace(worker: TpModelWorker) -> None:
    tokens = prompt(12, 9)
    before = alone(worker, tokens, 2)
    warm_up(worker)
    assert alone(worker, tokens, 2) == before
    assert not worker.runner.pool.keys(0)[:16].any()


def test_close_waits_for_launched_steps_and_may_be_called_twice() -> None:
    made = make_worker(make_runner(FACTS, load_format="dummy"))
    tokens = prompt(13, 9)
    batch = ForwardBatch(
        step=0, setups=[opening(0, tokens)], table_writes=[table(0)], slices=[whole(0, tokens)]
    )
    ticket = made.launch(batch)
    made.close()
    made.close()
    assert ticket.done() and len(ticket.wait().slices[0].tokens) == 1


def test_two_different_runners_live_in_one_process() -> None:
    """Stamps come from the spec alone; neither runner sees the other's."""
    target = make_runner(FACTS, load_format="dummy", context_length=128)
    draft = make_runner(
        FACTS, load_format="dummy", role="draft", context_length=64, dtype="bfloat16"
    )
    assert (target.role, target.context_length, target.dtype) == ("target", 128, torch.float32)
    assert (draft.role, draft.context_length, draft.dtype) == ("draft", 64, torch.bfloat16)
    assert draft.kv_bytes_per_token * 2 == target.kv_bytes_per_token
    tokens = prompt(14, 12)
    first = Driver(target).run(tokens, [12])
    Driver(draft).run(tokens, [12])
    torch.testing.assert_close(Driver(target).run(tokens, [12]), first, rtol=0, atol=0)


def test_a_cache_of_another_type_than_the_model(worker: TpModelWorker) -> None:
    half = Driver(make_runner(FACTS, load_format="dummy", kv_cache_dtype="bfloat16"))
    tokens = prompt(15, 30)
    exact = Driver(worker.runner).run(tokens, [20])
    assert (half.run(tokens, [20]) - exact).abs().max() < 0.02 * exact.abs().max()


def test_a_backend_that_cannot_run_says_what_each_lacks() -> None:
    spec = make_spec(FACTS, decode_attention_backend="native")
    with pytest.raises(ConfigError) as raised:
        make_runner(FACTS, decode_attention_backend=spec.decode_attention_backend)
    message = str(raised.value)
    assert "decode_attention_backend=native cannot be met" in message
    assert "computes in bfloat16, not float32" in message
    assert "needs the compiled kernels" in message
    assert "sdpa: can" in message
