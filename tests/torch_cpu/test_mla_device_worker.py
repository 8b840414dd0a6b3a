"""An MLA model behind the worker of a device, on a CPU: its Triton kernels interpreted, recorded steps
played by doing them again. Answers are those of the plain reference."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when the kernels are defined

from kernels.ops import Ops, select
from srt.attention.select import BackendPair
from srt.config.context import get_context
from srt.protocols.forward_batch import ForwardBatch, RowSetup, Slice, TableWrite
from srt.protocols.worker import WorkerFacts
from srt.runner.decode_graphs import DecodeGraphs
from srt.runner.device_worker import DeviceWorker
from srt.runner.model_runner import ModelRunner
from srt.runner.prefill_graphs import PrefillCudaGraphRunner
from srt.runner.staging import Staging
from srt.runner.timeline import HostTimeline
from srt.sampling.device_sampler import DeviceSampler
from srt.wire.params import SamplingParams
from tests.latent_batches import FACTS
from tests.tiny_models import make_spec
from tests.triton_loops import mend_loop_bounds

CPU = torch.device("cpu")
PAGE, ROWS, PAGES = 16, 3, 8


@pytest.fixture(autouse=True)
def around(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    mend_loop_bounds(monkeypatch)
    with get_context().override_server_args():
        get_context().override("a test", max_prefix_chunk_tokens=16)
        yield


def make_worker(
    backend: str, sizes: tuple[int, ...], prefills: tuple[int, ...], ops: Ops | None = None
) -> DeviceWorker:
    spec = make_spec(FACTS, load_format="dummy", dtype="bfloat16", kv_cache_dtype="bfloat16")
    runner = ModelRunner(spec, FACTS, ops=ops or select("reference"), device=CPU, seed=0)
    runner.load()
    runner.allocate(num_pages=1 + PAGES * ROWS, page_size=PAGE, max_rows=ROWS)
    runner.attention_pair = BackendPair(prefill=backend, decode=backend)
    runner.init_backends()
    facts = WorkerFacts(
        vocab_size=97,
        context_length=128,
        num_pages=runner.pool.num_pages,
        page_size=PAGE,
        max_rows=ROWS,
        end_token_ids=[2],
        memory_bytes={},
    )
    staging, timeline = Staging(CPU, 64), HostTimeline()
    decodes = DecodeGraphs(runner, timeline, staging, sizes)
    recorded = PrefillCudaGraphRunner(runner, timeline, prefills)
    sampler = DeviceSampler(ROWS, 97, CPU)
    worker = DeviceWorker(runner, sampler, facts, timeline, decodes, recorded, staging)
    for size in prefills:
        recorded.record(size)
    return worker


def answers(worker: DeviceWorker) -> list[list[int]]:
    """Row 0 comes in whole, row 1 in two pieces beside its decodes, then both decode."""
    params = SamplingParams(temperature=0.0)
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(3, 97, (n,), generator=generator).tolist() for n in (20, 61)]

    def pages(row: int) -> TableWrite:
        return TableWrite(
            row=row, first=0, pages=list(range(1 + row * PAGES, 1 + (row + 1) * PAGES))
        )

    def piece(row: int, first: int, last: int, sample: bool) -> Slice:
        tokens = prompts[row][first:last]
        return Slice(row=row, start=first, length=len(tokens), tokens=tokens, sample=sample)

    def decode(row: int, start: int) -> Slice:
        return Slice(row=row, start=start, length=1, tokens=None, sample=True)

    def setup(row: int) -> RowSetup:
        tokens = prompts[row]
        return RowSetup(row=row, params=params, tokens=tokens, prompt_len=len(tokens), stop_ids=[])

    steps = [
        ForwardBatch(
            step=0, setups=[setup(0)], table_writes=[pages(0)], slices=[piece(0, 0, 20, True)]
        ),
        ForwardBatch(
            step=1,
            setups=[setup(1)],
            table_writes=[pages(1)],
            slices=[decode(0, 20), piece(1, 0, 30, False)],
        ),
        ForwardBatch(step=2, slices=[decode(0, 21), piece(1, 30, 61, True)]),
        *(
            ForwardBatch(step=3 + i, slices=[decode(0, 22 + i), decode(1, 61 + i)])
            for i in range(2)
        ),
    ]
    found: list[list[int]] = []
    for step in steps:
        result = worker.launch(step).wait()
        found.append([*result.plain, *(token for each in result.slices for token in each.tokens)])
    return found


@pytest.mark.parametrize(
    ("sizes", "prefills"), [((), ()), ((1, 4), (32, 64))], ids=["eager", "graphs"]
)
def test_answers_are_the_references(sizes: tuple[int, ...], prefills: tuple[int, ...]) -> None:
    expected = answers(make_worker("sdpa", (), ()))
    worker = make_worker("triton", sizes, prefills)
    assert answers(worker) == expected


def test_norms_and_sums_inside_the_linears() -> None:
    """All kernels are those of a GPU."""
    expected = answers(make_worker("sdpa", (), ()))
    worker = make_worker("triton", (1, 4), (), select("triton"))
    assert worker.runner._model.stack.is_fused
    assert answers(worker) == expected
