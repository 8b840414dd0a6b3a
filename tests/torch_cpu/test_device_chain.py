"""Chains of guesses on the device, on a CPU: the same answers as without them, and the same guesses as
the drafter that asks the host at every step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from test_device_worker import CPU, FACTS, GREEDY, ROWS, WARM, make_runner
from test_device_worker import make_worker as make_plain
from test_eagle3 import draft_facts, stored
from test_worker import decode, prompt, table, whole

from kernels.ops import select
from srt.models.eagle3 import Eagle3
from srt.protocols.forward_batch import ForwardBatch, RowSetup, Slice, StepResult
from srt.protocols.worker import Worker, WorkerFacts
from srt.runner.decode_graphs import DecodeGraphs
from srt.runner.device_worker import DeviceWorker
from srt.runner.model_runner import ModelRunner
from srt.runner.prefill_graphs import PrefillCudaGraphRunner
from srt.runner.staging import Array, Staging
from srt.runner.timeline import HostTimeline, Mark
from srt.runner.tp_worker import TpModelWorker
from srt.sampling.device_sampler import DeviceSampler
from srt.sampling.sampler import Sampler
from srt.spec.chain_graphs import ChainGraphs
from srt.spec.device_chain import DeviceChain
from srt.spec.device_worker import ChainTicket, ChainWorker
from srt.spec.eagle import EagleDrafter
from srt.spec.worker import SpeculativeWorker
from srt.wire.params import SamplingParams
from tests.tiny_models import make_spec

GUESSES = 3


def make_draft(target: ModelRunner, folder: Path) -> ModelRunner:
    save_file(stored(FACTS), str(folder / "model.safetensors"))
    facts = draft_facts(FACTS, folder)
    runner = ModelRunner(
        make_spec(
            facts,
            role="draft",
            dtype="bfloat16",
            kv_cache_dtype="bfloat16",
            prefill_attention_backend="native",
            decode_attention_backend="native",
        ),
        facts,
        ops=replace(select("reference"), implementation="native"),
        device=CPU,
        seed=0,
        network=Eagle3(),
        lent=target.lend(),
    )
    runner.load()
    pages = target.pool.num_pages
    runner.allocate(num_pages=pages, page_size=16, max_rows=ROWS, table=target.table)
    runner.init_backends()
    return runner


def worker_facts(target: ModelRunner) -> WorkerFacts:
    return WorkerFacts(
        vocab_size=97,
        context_length=128,
        num_pages=target.pool.num_pages,
        page_size=16,
        max_rows=ROWS,
        end_token_ids=[2],
        memory_bytes={},
    )


def make_chain(folder: Path, sizes: tuple[int, ...], force: float = 0.0) -> ChainWorker:
    target = make_runner()
    draft = make_draft(target, folder)
    timeline, staging, sampler = HostTimeline(), Staging(CPU, 64), DeviceSampler(ROWS, 97, CPU)
    plain = DeviceWorker(
        target,
        sampler,
        worker_facts(target),
        timeline,
        DecodeGraphs(target, timeline, staging, ()),
        PrefillCudaGraphRunner(target, timeline, ()),
        staging,
    )
    chain = DeviceChain(target, draft, sampler, GUESSES, force)
    graphs = ChainGraphs(chain, timeline, staging, sizes)
    return ChainWorker(chain, graphs, plain, timeline, staging)


def make_host(folder: Path) -> SpeculativeWorker:
    """Guesses one by one, each fetched."""
    target = make_runner()
    draft = make_draft(target, folder)
    worker = TpModelWorker(target, Sampler(ROWS, 97), worker_facts(target), ThreadPoolExecutor(1))
    drafter = EagleDrafter(draft, Sampler(ROWS, 97), steps=GUESSES, topk=1, confidence=0.0)
    return SpeculativeWorker(worker, drafter)


@pytest.fixture(params=[False, True], ids=["eager", "graphs"])
def chained(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ChainWorker]:
    worker = make_chain(tmp_path, (1, 2, 4))
    while request.param and worker.graphs.missing:
        worker.idle()
    yield worker
    worker.close()


def tokens_of(result: StepResult) -> list[list[int]]:
    return [[token] for token in result.plain] + [piece.tokens for piece in result.slices]


class Row:
    """A request as a scheduler would drive it: it goes on from where the last result left it."""

    def __init__(self, row: int, tokens: list[int], params: SamplingParams) -> None:
        self.row, self.tokens, self.length = row, list(tokens), len(tokens)
        self.setup = RowSetup(
            row=row, params=params, tokens=list(tokens), prompt_len=len(tokens), stop_ids=[]
        )
        self.kept: list[list[int]] = []

    def prefill(self) -> Slice:
        return whole(self.row, self.tokens)

    def decode(self, most: int = GUESSES) -> Slice:
        piece = decode(self.row, len(self.tokens) - 1)
        piece.draft = most
        return piece

    @property
    def output(self) -> list[int]:
        return self.tokens[self.length :]


def run(
    worker: Worker, rows: list[Row], slices: list[Slice], *, opens: list[Row] | None = None
) -> None:
    batch = ForwardBatch(
        step=0,
        setups=[row.setup for row in opens or []],
        table_writes=[table(row.row) for row in opens or []],
        slices=slices,
    )
    result = worker.launch(batch).wait()
    for row, got, tokens in zip(
        rows, [None] * len(result.plain) + result.slices, tokens_of(result), strict=True
    ):
        row.tokens += tokens
        if got is not None:
            row.kept.append(got.kept)


def alone(params: SamplingParams, tokens: list[int], count: int) -> list[int]:
    plain = make_plain(())
    row = Row(0, tokens, params)
    run(plain, [row], [row.prefill()], opens=[row])
    for _ in range(count - 1):
        run(plain, [row], [row.decode(0)])
    return row.output


@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "warm"])
def test_answers_are_those_without_guesses(chained: ChainWorker, params: SamplingParams) -> None:
    """Three rows; one comes while the others decode, one asks for fewer guesses than there may be."""
    rows = [Row(index, prompt(index + 1, 15 + 9 * index), params) for index in range(3)]
    run(chained, rows[:2], [row.prefill() for row in rows[:2]], opens=rows[:2])
    for _ in range(2):
        run(chained, rows[:2], [rows[0].decode(), rows[1].decode(1)])
    run(chained, rows, [rows[0].decode(), rows[1].decode(), rows[2].prefill()], opens=rows[2:])
    for step in range(8):
        run(chained, rows, [row.decode(0 if step == 3 else GUESSES) for row in rows])
    for row in rows:
        wanted = alone(params, row.tokens[: row.length], len(row.output))
        assert row.output == wanted, row.row


def test_guesses_are_those_of_the_host(tmp_path: Path) -> None:
    """Step by step the same guesses are right, so the draft's KV and its features are the same."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    found = []
    for worker in (make_chain(tmp_path / "a", (1, 2)), make_host(tmp_path / "b")):
        rows = [Row(index, prompt(index + 7, 21 + index), WARM) for index in range(2)]
        run(worker, rows, [row.prefill() for row in rows], opens=rows)
        for _ in range(12):
            run(worker, rows, [row.decode() for row in rows])
        found.append([(row.output, row.kept) for row in rows])
        worker.close()
    assert found[0] == found[1]
    assert any(kept for _, each in found[0] for kept in each), "no guess was ever right"


def test_rows_with_rules_of_their_own_decode_beside(chained: ChainWorker) -> None:
    special = replace_params(WARM, presence_penalty=0.5)
    rows = [Row(0, prompt(1, 15), WARM), Row(1, prompt(2, 24), special)]
    run(chained, rows, [row.prefill() for row in rows], opens=rows)
    for _ in range(5):
        run(chained, rows, [row.decode() for row in rows])
    for row, params in zip(rows, (WARM, special), strict=True):
        assert row.output == alone(params, row.tokens[: row.length], len(row.output))
    assert len(rows[1].output) == 6  # one token a step


def test_a_row_that_wants_no_guess_goes_along(chained: ChainWorker) -> None:
    rows = [Row(index, prompt(index + 1, 15 + 9 * index), WARM) for index in range(2)]
    run(chained, rows, [row.prefill() for row in rows], opens=rows)
    for most in (0, GUESSES, 0):
        slices = [rows[0].decode(most), rows[1].decode()]
        ticket = chained.launch(ForwardBatch(step=0, slices=slices))
        assert isinstance(ticket, ChainTicket) and ticket.others == []
        for row, tokens in zip(rows, tokens_of(ticket.wait()), strict=True):
            assert most or row is not rows[0] or len(tokens) == 1
            row.tokens += tokens
    for row in rows:
        assert row.output == alone(WARM, row.tokens[: row.length], len(row.output))


def test_more_rows_may_guess_than_any_size_has(tmp_path: Path) -> None:
    """A budget of tokens bounds the sizes; short chains of many rows are within it too."""
    worker = make_chain(tmp_path, (1, 2))
    rows = [Row(index, prompt(index + 1, 15 + 9 * index), WARM) for index in range(ROWS)]
    run(worker, rows, [row.prefill() for row in rows], opens=rows)
    for _ in range(4):
        run(worker, rows, [row.decode(1) for row in rows])
    for row in rows:
        assert row.output == alone(WARM, row.tokens[: row.length], len(row.output))
    worker.close()


class Counting(Staging):
    """Of the steps so far the most blocks that one sent."""

    most, _now = 0, 0

    def send(self, arrays: Sequence[Array], into: torch.Tensor | None = None) -> list[torch.Tensor]:
        self._now += 1
        self.most = max(self.most, self._now)
        return super().send(arrays, into)

    def used(self, mark: Mark) -> None:
        self._now = 0
        super().used(mark)


def test_a_step_may_hold_all_there_is(
    chained: ChainWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that guess, rows with rules of their own, pages, and prompts that come in two chunks each."""
    staging = Counting(CPU, 64)
    for holder in (chained, chained.graphs):
        monkeypatch.setattr(holder, "_staging", staging)
    monkeypatch.setattr(chained.chain.target.table, "_is_shared", False)  # as beside a device
    special = replace_params(WARM, presence_penalty=0.5)
    kinds = [WARM, special, WARM, GREEDY, special]
    rows = [Row(index, prompt(index + 1, 15 + 9 * index), kinds[index]) for index in range(ROWS)]
    run(chained, rows[:2], [row.prefill() for row in rows[:2]], opens=rows[:2])
    for come in (2, 3, 4):
        known, fresh = rows[:come], rows[come]
        half = fresh.prefill()
        half.tokens, half.length, half.sample = fresh.tokens[:10], 10, False
        run(chained, [*known, fresh], [*(row.decode() for row in known), half], opens=[fresh])
        rest = fresh.prefill()
        rest.tokens, rest.start, rest.length = fresh.tokens[10:], 10, len(fresh.tokens) - 10
        run(chained, [*known, fresh], [*(row.decode() for row in known), rest])
    for _ in range(4):
        run(chained, rows, [row.decode() for row in rows])
    for row in rows:
        wanted = alone(row.setup.params, row.tokens[: row.length], len(row.output))
        assert row.output == wanted, row.row
    assert staging.most == 6


def test_a_forced_chain_keeps_its_mean(tmp_path: Path) -> None:
    worker = make_chain(tmp_path, (1,), force=2.5)
    row = Row(0, prompt(3, 12), GREEDY)
    run(worker, [row], [row.prefill()], opens=[row])
    for _ in range(20):
        run(worker, [row], [row.decode()])
    assert len(row.output) == pytest.approx(1 + 20 * 2.5, abs=2)


def replace_params(params: SamplingParams, **changes: object) -> SamplingParams:
    from msgspec.structs import replace as changed

    return changed(params, **changes)
