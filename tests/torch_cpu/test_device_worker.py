"""The worker that launches ahead, on a CPU: recorded steps are played by doing them again. Whatever
shares a step, is padded or is in flight changes nobody's answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from kernels.ops import select
from srt.protocols.forward_batch import ForwardBatch, RowSetup, Slice, StepResult
from srt.protocols.worker import WorkerFacts
from srt.runner.decode_graphs import DecodeGraphs
from srt.runner.device_worker import DeviceWorker
from srt.runner.model_runner import ModelRunner
from srt.runner.prefill_graphs import PrefillCudaGraphRunner
from srt.runner.staging import Staging
from srt.runner.timeline import HostTimeline
from srt.runner.warm_up import warm_up
from srt.sampling.device_sampler import DeviceSampler
from srt.wire.params import SamplingParams
from tests.tiny_models import make_spec
from tests.torch_cpu.test_worker import FACTS, decode, prompt, table, whole

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0)
WARM = SamplingParams(temperature=1.0, seed=5)
ROWS = 5


def make_runner() -> ModelRunner:
    """Every number of an attention batch is read from tensors, as on a GPU; a row's result does not
    depend on the others, so that answers can be compared bit by bit."""
    spec = make_spec(
        FACTS,
        load_format="dummy",
        dtype="bfloat16",
        kv_cache_dtype="bfloat16",
        prefill_attention_backend="native",
        decode_attention_backend="native",
    )
    ops = replace(select("reference"), implementation="native")
    runner = ModelRunner(spec, FACTS, ops=ops, device=CPU, seed=0)
    runner.load()
    runner.allocate(num_pages=1 + 8 * ROWS, page_size=16, max_rows=ROWS)
    runner.init_backends()
    return runner


def make_worker(sizes: tuple[int, ...], prefills: tuple[int, ...] = ()) -> DeviceWorker:
    runner = make_runner()
    facts = WorkerFacts(
        vocab_size=97,
        context_length=128,
        num_pages=runner.pool.num_pages,
        page_size=runner.pool.page_size,
        max_rows=ROWS,
        end_token_ids=[2],
        memory_bytes={},
    )
    staging = Staging(CPU, 64)
    timeline = HostTimeline()
    decodes = DecodeGraphs(runner, timeline, staging, sizes)
    recorded = PrefillCudaGraphRunner(runner, timeline, prefills)
    sampler = DeviceSampler(ROWS, 97, CPU)
    worker = DeviceWorker(runner, sampler, facts, timeline, decodes, recorded, staging)
    for size in prefills:
        recorded.record(size)
    return worker


@pytest.fixture(params=[False, True], ids=["eager", "graphs"])
def worker(request: pytest.FixtureRequest) -> Iterator[DeviceWorker]:
    made = make_worker((1, 2, 4), (16, 32, 48)) if request.param else make_worker(())
    yield made
    made.close()


def tokens_of(result: StepResult) -> list[list[int]]:
    """Per slice, whichever form the result has."""
    return [[token] for token in result.plain] + [piece.tokens for piece in result.slices]


def start(worker: DeviceWorker, row: int, tokens: list[int], params: SamplingParams) -> int:
    setup = RowSetup(row=row, params=params, tokens=tokens, prompt_len=len(tokens), stop_ids=[])
    batch = ForwardBatch(
        step=0, setups=[setup], table_writes=[table(row)], slices=[whole(row, tokens)]
    )
    return tokens_of(worker.launch(batch).wait())[0][0]


def alone(
    worker: DeviceWorker, row: int, tokens: list[int], count: int, params: SamplingParams
) -> list[int]:
    """One request that has the worker to itself."""
    found = [start(worker, row, tokens, params)]
    for step in range(count - 1):
        batch = ForwardBatch(step=step, slices=[decode(row, len(tokens) + step)])
        found += tokens_of(worker.launch(batch).wait())[0]
    return found


@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "warm"])
def test_mixed_batches_equal_one_by_one(worker: DeviceWorker, params: SamplingParams) -> None:
    """Two rows decode while a third prompt comes in, in two chunks; then three decode together, which
    no recorded size is made for."""
    prompts = [prompt(1, 20), prompt(2, 33), prompt(3, 41)]
    expected = [alone(worker, row, tokens, 5, params) for row, tokens in enumerate(prompts)]
    found = [[start(worker, row, prompts[row], params)] for row in (0, 1)] + [[]]
    setup = RowSetup(row=2, params=params, tokens=prompts[2], prompt_len=41, stop_ids=[])
    for step, (first, length) in enumerate([(0, 24), (24, 17)]):
        batch = ForwardBatch(
            step=step,
            setups=[] if step else [setup],
            table_writes=[] if step else [table(2)],
            slices=[
                decode(0, 20 + step),
                decode(1, 33 + step),
                Slice(
                    row=2,
                    start=first,
                    length=length,
                    tokens=prompts[2][first : first + length],
                    sample=step == 1,
                ),
            ],
        )
        for row, got in enumerate(tokens_of(worker.launch(batch).wait())):
            found[row] += got
    for step in range(2):
        slices = [decode(0, 22 + step), decode(1, 35 + step), decode(2, 41 + step)]
        for row, got in enumerate(
            tokens_of(worker.launch(ForwardBatch(step=step, slices=slices)).wait())
        ):
            found[row] += got
    assert [each[:3] for each in found] == [each[:3] for each in expected]
    assert found[:2] == [each[:5] for each in expected[:2]]


def test_steps_launched_ahead_run_in_order(worker: DeviceWorker) -> None:
    """Ten steps are launched before the first is waited for; each reads the token before it."""
    tokens = prompt(4, 10)
    expected = alone(worker, 1, tokens, 11, WARM)
    setup = RowSetup(row=0, params=WARM, tokens=tokens, prompt_len=10, stop_ids=[])
    batches = [
        ForwardBatch(step=0, setups=[setup], table_writes=[table(0)], slices=[whole(0, tokens)]),
        *(ForwardBatch(step=1 + step, slices=[decode(0, 10 + step)]) for step in range(10)),
    ]
    tickets = [worker.launch(batch) for batch in batches]
    assert [tokens_of(ticket.wait())[0][0] for ticket in tickets] == expected


def test_every_size_is_recorded_once_while_nobody_waits() -> None:
    worker = make_worker((1, 2, 4))
    worker.record_least(lambda done: None)
    assert worker.idle() is False  # 2 was the last one missing
    assert worker.idle() is False
    warm_up(worker)
    worker.close()


def test_padding_writes_to_nobodys_page() -> None:
    """Three rows in a graph of four: the pages of the fourth row, and all others, keep what they had."""
    worker = make_worker((4,))
    for row in range(4):
        start(worker, row, prompt(row, 20), GREEDY)
    pool = worker.runner.pool
    before = pool.keys(1).clone()
    slices = [decode(row, 20) for row in range(3)]
    worker.launch(ForwardBatch(step=1, slices=slices)).wait()
    changed = (pool.keys(1) != before).any(-1).any(-1).nonzero()[:, 0].tolist()
    written = [(1 + 8 * row) * 16 + 20 for row in range(3)]
    assert sorted(set(changed) - {0}) == written


def test_logprobs_come_with_their_tokens(worker: DeviceWorker) -> None:
    params = SamplingParams(temperature=0.0, logprobs=2)
    tokens = prompt(6, 12)
    first = start(worker, 0, tokens, params)
    result = worker.launch(ForwardBatch(step=1, slices=[decode(0, 12)])).wait()
    [got] = result.slices
    assert got.logprobs is not None and got.logprobs[0].chosen.token == got.tokens[0]
    assert len(got.logprobs[0].top) == 2 and first >= 0


def test_prompts_are_scored(worker: DeviceWorker) -> None:
    """The same numbers whether the prompt comes whole or in two chunks."""
    tokens = prompt(7, 24)
    params = SamplingParams(temperature=0.0, prompt_logprobs=1)

    def scores(cuts: list[int]) -> list[float]:
        setup = RowSetup(row=0, params=params, tokens=tokens, prompt_len=24, stop_ids=[])
        found: list[float] = []
        for index, (first, last) in enumerate(zip(cuts, cuts[1:], strict=False)):
            piece = Slice(
                row=0,
                start=first,
                length=last - first,
                tokens=tokens[first:last],
                sample=last == 24,
                prompt_logprobs=1,
                targets=tokens[first + 1 : last + 1],
            )
            batch = ForwardBatch(
                step=index,
                setups=[] if index else [setup],
                table_writes=[] if index else [table(0)],
                slices=[piece],
            )
            [got] = worker.launch(batch).wait().slices
            assert got.prompt_logprobs is not None
            found += [each.chosen.logprob for each in got.prompt_logprobs]
        return found

    whole_prompt = scores([0, 24])
    assert len(whole_prompt) == 23
    assert scores([0, 10, 24]) == pytest.approx(whole_prompt, abs=1e-5)


def test_prompts_equal_around_the_edges_of_recorded_sizes() -> None:
    """Graph == eager, bit by bit, one token below, at and above each size."""
    plain, recorded = make_worker(()), make_worker((), (16, 32, 48))
    for length in (1, 8, 15, 16, 17, 31, 32, 33, 47, 48, 49):
        tokens = prompt(length, length)
        assert start(plain, 0, tokens, GREEDY) == start(recorded, 0, tokens, GREEDY)
        width = [(1 * 16), (1 * 16) + length]
        for layer in range(3):
            kept = plain.runner.pool.keys(layer)[slice(*width)]
            assert torch.equal(kept, recorded.runner.pool.keys(layer)[slice(*width)])


@pytest.mark.parametrize(
    ("num_tokens", "size"), [(1, 16), (7, 16), (16, 16), (17, 32), (32, 32), (33, None), (65, 128)]
)
def test_one_rule_says_what_a_step_is_padded_to(num_tokens: int, size: int | None) -> None:
    """Never to more than twice its tokens, but for the smallest."""
    worker = make_worker((), (16, 32, 128))
    assert worker.prefills.size_for(num_tokens) == size


@pytest.mark.parametrize(
    ("context", "width", "most"), [(64, 128, 64), (0, 128, 128), (200, 128, 128)]
)
def test_a_prefix_is_bounded_by_the_runner_itself(
    context: int, width: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its own resolved context and its rows of the page table, whatever a flag says."""
    worker = make_worker((), (16,))
    runner = worker.runner
    assert runner.table.tensor.shape[1] * runner.pool.page_size == width
    monkeypatch.setattr(runner, "context_length", context)
    assert worker.prefills.max_addressable_prefix_len == most
