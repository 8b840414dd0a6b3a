"""Each backend against the reference kernel, a hybrid of two against one, and who may be chosen."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

from kernels.ops import select
from srt.attention import sdpa
from srt.attention.flashinfer_plan import list_pages, list_slots
from srt.attention.hybrid import HybridAttention
from srt.attention.native import NativeAttention
from srt.attention.sdpa import SdpaAttention
from srt.attention.select import BackendPair, build_backend, select_backend
from srt.cache.pools import PagedKVPool
from srt.config.capability import FP8, TABLE, Half, Need, can_record, plans_on_host
from srt.errors import ConfigError
from srt.protocols.attention import AttentionBackend, AttentionBatch
from tests.triton_loops import mend_loop_bounds

HEADS, KV_HEADS, DIM = 6, 2, 16
DECODES = [(0, 5), (2, 37), (1, 0)]  # row, position
PREFILLS = [(3, 0, 20), (5, 17, 9), (4, 40, 1)]  # row, start, length


def make_batch(
    page_size: int, decodes: list[tuple[int, int]], prefills: list[tuple[int, int, int]]
) -> tuple[AttentionBatch, PagedKVPool, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    pages_per_row = -(-64 // page_size)
    pool = PagedKVPool(
        num_pages=1 + 6 * pages_per_row,
        page_size=page_size,
        num_layers=1,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    for plane in (pool.keys(0), pool.values(0)):
        plane[page_size:] = torch.randn(plane[page_size:].shape, generator=generator)
    order = 1 + torch.randperm(6 * pages_per_row, generator=generator)
    rows = [row for row, _ in decodes] + [row for row, _, _ in prefills]
    starts = [at for _, at in decodes] + [start for _, start, _ in prefills]
    lengths = [1] * len(decodes) + [length for _, _, length in prefills]
    total = sum(lengths)
    batch = AttentionBatch(
        num_decode=len(decodes),
        page_size=page_size,
        page_table=order.view(6, pages_per_row).to(torch.int32),
        rows=torch.tensor(rows, dtype=torch.int32),
        starts=torch.tensor(starts, dtype=torch.int32),
        lengths=torch.tensor(lengths, dtype=torch.int32),
        rows_host=rows,
        starts_host=starts,
        lengths_host=lengths,
        slots=torch.zeros(total, dtype=torch.int64),
        positions=torch.zeros(total, dtype=torch.int64),
    )
    return batch, pool, torch.randn(total, HEADS, DIM, generator=generator)


def run(
    backend: AttentionBackend,
    made: tuple[AttentionBatch, PagedKVPool, torch.Tensor],
    window: int | None,
) -> torch.Tensor:
    batch, pool, q = made
    backend.plan(batch)
    return backend.forward(q, 0, pool, scale=0.3, window=window)


def reference() -> NativeAttention:
    return NativeAttention(select("reference").paged_attention)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's kernels run on the CPU."""
    if find_spec("triton") is None:
        pytest.skip("triton is not installed")
    if torch.cuda.is_available():
        pytest.skip("here Triton compiles for the GPU, see tests/gpu")
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when the kernels are defined
    mend_loop_bounds(monkeypatch)


def triton(*, deterministic: bool = False) -> AttentionBackend:
    pair = BackendPair(prefill="triton", decode="triton")
    return build_backend(pair, select("reference").paged_attention, deterministic=deterministic)


@pytest.mark.parametrize("window", [None, 1, 7, 100])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(
    ("decodes", "prefills"), [(DECODES, PREFILLS), (DECODES, []), ([], PREFILLS)]
)
def test_every_backend_equals_the_reference(
    decodes: list[tuple[int, int]],
    prefills: list[tuple[int, int, int]],
    page_size: int,
    window: int | None,
) -> None:
    made = make_batch(page_size, decodes, prefills)
    expected = run(reference(), made, window)
    hybrids = (
        HybridAttention(prefill=SdpaAttention(), decode=reference()),
        HybridAttention(prefill=reference(), decode=SdpaAttention()),
    )
    for backend in (SdpaAttention(), *hybrids):
        torch.testing.assert_close(run(backend, made, window), expected, rtol=1e-5, atol=1e-5)


def test_a_hybrid_gives_each_kind_to_its_own() -> None:
    class Recorder(SdpaAttention):
        def __init__(self) -> None:
            super().__init__()
            self.lengths: list[list[int]] = []

        def plan(self, batch: AttentionBatch) -> None:
            self.lengths.append(batch.lengths_host)
            super().plan(batch)

    prefill, decode = Recorder(), Recorder()
    hybrid = HybridAttention(prefill=prefill, decode=decode)
    for decodes, prefills in ((DECODES, PREFILLS), (DECODES, []), ([], PREFILLS)):
        run(hybrid, make_batch(16, decodes, prefills), None)
    assert decode.lengths == [[1, 1, 1], [1, 1, 1]]
    assert prefill.lengths == [[20, 9, 1], [20, 9, 1]]


def test_uneven_decodes_are_cut_into_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa, "GROUP_TOKENS", 60)
    made = make_batch(16, [(0, 5), (1, 9), (2, 50), (3, 3), (4, 60)], [])
    expected = run(reference(), made, None)
    torch.testing.assert_close(run(SdpaAttention(), made, None), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize(
    ("decodes", "prefills"), [(DECODES, PREFILLS), (DECODES, []), ([], PREFILLS)]
)
def test_triton_equals_the_reference(
    decodes: list[tuple[int, int]],
    prefills: list[tuple[int, int, int]],
    window: int | None,
    deterministic: bool,
    interpreted: None,
) -> None:
    made = make_batch(16, decodes, prefills)
    expected = run(reference(), made, window)
    found = run(triton(deterministic=deterministic), made, window)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_what_was_captured_reads_the_batch_anew(interpreted: None) -> None:
    batch, pool, q = make_batch(16, DECODES, [])
    backends = (triton(), HybridAttention(prefill=SdpaAttention(), decode=triton()))
    for backend in (*backends, reference(), SdpaAttention()):
        backend.capture(batch)
        backend.forward(q, 0, pool, scale=0.3, window=None)
        later = replace(batch, starts=batch.starts + 3, starts_host=[8, 40, 3])
        expected = run(reference(), (later, pool, q), None)
        batch.starts += 3
        batch.starts_host = later.starts_host
        backend.replay(batch)
        found = backend.forward(q, 0, pool, scale=0.3, window=None)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        batch.starts -= 3


def test_a_settled_batch_gives_the_same(interpreted: None) -> None:
    made = make_batch(16, DECODES, [])
    expected = run(reference(), made, None)
    settled = replace(made[0], is_settled=True), *made[1:]
    torch.testing.assert_close(run(triton(), settled, None), expected, rtol=1e-5, atol=1e-5)


def test_a_large_recorded_batch_takes_long_rows_first(
    interpreted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from srt.attention import triton as module

    monkeypatch.setattr(module, "LEAST_ORDERED", 3)
    batch, pool, q = make_batch(16, DECODES, [])
    backend = module.TritonAttention()
    backend.capture(batch)
    backend.replay(batch)
    expected = run(reference(), (batch, pool, q), None)
    found = backend.forward(q, 0, pool, scale=0.3, window=None)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert backend._orders[3].tensor.tolist() == [1, 0, 2]


def with_tree(
    made: tuple[AttentionBatch, PagedKVPool, torch.Tensor], index: int
) -> tuple[AttentionBatch, PagedKVPool, torch.Tensor]:
    """Slice `index`, of at most 60 tokens, becomes a tree: a token sees itself and every second
    before it."""
    batch, pool, q = made
    bases = [-1] * len(batch.rows_host)
    bases[index] = batch.starts_host[index]
    visible = torch.zeros(len(q), dtype=torch.int64)
    first = sum(batch.lengths_host[:index])
    for i in range(batch.lengths_host[index]):
        visible[first + i] = sum(1 << j for j in range(i, -1, -2))
    positions = batch.positions.clone()
    positions[:] = torch.cat(
        [
            torch.arange(start, start + length)
            for start, length in zip(batch.starts_host, batch.lengths_host, strict=True)
        ]
    )
    base = torch.tensor(bases, dtype=torch.int32)
    made_batch = replace(batch, bases=base, bases_host=bases, visible=visible, positions=positions)
    return made_batch, pool, q


def test_trees_reach_a_backend_that_takes_them(interpreted: None) -> None:
    class Refusing(SdpaAttention):
        def plan(self, batch: AttentionBatch) -> None:
            assert batch.bases is None
            super().plan(batch)

    for index in (3, 4):  # a slice of 20 tokens, one of 9
        made = with_tree(make_batch(16, DECODES, PREFILLS), index)
        expected = run(reference(), made, None)
        hybrid = HybridAttention(prefill=Refusing(), decode=triton(), short=16, has_tree=False)
        for backend in (triton(), hybrid):
            torch.testing.assert_close(run(backend, made, None), expected, rtol=1e-5, atol=1e-5)


def test_short_slices_in_front_are_verified_by_the_decode_backend() -> None:
    class Recorder(SdpaAttention):
        lengths: list[int]

        def plan(self, batch: AttentionBatch) -> None:
            self.lengths = batch.lengths_host
            super().plan(batch)

    prefill, decode = Recorder(), Recorder()
    hybrid = HybridAttention(prefill=prefill, decode=decode, short=9)
    made = make_batch(16, DECODES, [(5, 17, 9), (3, 0, 20), (4, 40, 1)])
    torch.testing.assert_close(
        run(hybrid, made, None), run(reference(), made, None), rtol=1e-5, atol=1e-5
    )
    assert decode.lengths == [1, 1, 1, 9]
    assert prefill.lengths == [20, 1]


def test_small_prompts_are_not_worth_a_plan() -> None:
    class Recorder(SdpaAttention):
        lengths: list[int]

        def plan(self, batch: AttentionBatch) -> None:
            self.lengths = batch.lengths_host
            super().plan(batch)

    made = make_batch(16, DECODES, PREFILLS)
    expected = run(reference(), made, None)
    pairs = 20 * 20 + 9 * 26 + 41
    for small, is_split in ((pairs - 1, True), (pairs, False)):
        prefill, decode = Recorder(), Recorder()
        hybrid = HybridAttention(prefill=prefill, decode=decode, small=small)
        torch.testing.assert_close(run(hybrid, made, None), expected, rtol=1e-5, atol=1e-5)
        assert (decode.lengths == [1, 1, 1]) == is_split


def test_the_scales_of_a_narrow_pool_are_applied() -> None:
    batch, pool, q = make_batch(16, DECODES, PREFILLS)
    expected = run(reference(), (batch, pool, q), None)
    narrow = PagedKVPool(
        num_pages=pool.num_pages,
        page_size=16,
        num_layers=1,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        dtype=torch.float32,
        device=torch.device("cpu"),
        scales=[(0.5, 4.0)],
    )
    narrow.keys(0)[:] = pool.keys(0) * 2
    narrow.values(0)[:] = pool.values(0) / 4
    found = run(SdpaAttention(), (batch, narrow, q), None)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


GPU = Need(
    device="cuda",
    dtype="bfloat16",
    head_dim=128,
    window=False,
    has_library=False,
    capability=90,
    has_flashinfer=True,
    has_triton=True,
)


@pytest.mark.parametrize(
    ("need", "prefill", "decode"),
    [
        (GPU, "flashinfer", "triton"),
        (replace(GPU, has_flashinfer=False), "triton", "triton"),
        (replace(GPU, head_dim=64), "triton", "triton"),  # would be compiled for minutes
        (replace(GPU, window=True), "triton", "triton"),
        (replace(GPU, tree=True), "flashinfer", "triton"),
        (replace(GPU, deterministic=True), "triton", "triton"),
        (replace(GPU, dtype=FP8, query_dtype="bfloat16"), "flashinfer", "triton"),
        (replace(GPU, dtype=FP8, query_dtype="float16"), "triton", "triton"),
        (replace(GPU, has_triton=False), "flashinfer", "flashinfer"),
        (replace(GPU, has_triton=False, has_flashinfer=False), "sdpa", "sdpa"),
        (replace(GPU, capability=75), "sdpa", "sdpa"),
        (replace(GPU, device="cpu", has_library=True), "native", "native"),
    ],
)
def test_an_open_wish_takes_the_best_that_can(need: Need, prefill: str, decode: str) -> None:
    chosen: dict[Half, str] = {"prefill": prefill, "decode": decode}
    for half, name in chosen.items():
        assert select_backend(None, need, "attention_backend", half) == name


@pytest.mark.parametrize(
    ("wish", "need", "reason"),
    [
        (
            "flashinfer",
            replace(GPU, has_flashinfer=False),
            "flashinfer-python, which is not installed",
        ),
        ("flashinfer", replace(GPU, window=True), "has no sliding window"),
        ("flashinfer", replace(GPU, tree=True), "cannot verify a tree of guesses"),
        ("flashinfer", replace(GPU, head_dim=96), "takes heads of 64, 128, 256, not 96"),
        ("flashinfer", replace(GPU, deterministic=True), "--deterministic forbids"),
        ("triton", replace(GPU, head_dim=512), "takes heads of up to 256, not 512"),
        ("triton", replace(GPU, capability=75), "compute capability 8.0, this one has 7.5"),
        (
            "triton",
            replace(GPU, dtype=FP8, query_dtype="bfloat16", capability=80),
            "compute capability 8.9, this one has 8.0",
        ),
        ("triton", replace(GPU, device="cpu"), "runs on GPUs, and this model runs on the CPU"),
        ("sdpa", replace(GPU, cap=True), "cannot cap scores"),
    ],
)
def test_a_wish_that_cannot_be_met_says_why(wish: str, need: Need, reason: str) -> None:
    with pytest.raises(
        ConfigError, match=f"decode_attention_backend={wish} cannot be met"
    ) as raised:
        select_backend(wish, need, "decode_attention_backend")
    assert f"{wish}: " in str(raised.value) and reason in str(raised.value)


def test_an_explicit_wish_may_compile() -> None:
    need = replace(GPU, head_dim=64)
    assert (
        select_backend("flashinfer", need, "prefill_attention_backend", "prefill") == "flashinfer"
    )


def test_what_can_be_recorded() -> None:
    assert [row.name for row in TABLE if can_record(row.name)] == ["flashinfer", "triton"]
    assert [row.name for row in TABLE if plans_on_host(row.name)] == ["flashinfer"]


def test_pages_and_slots_are_looked_up_in_the_order_of_the_rows() -> None:
    batch, _, _ = make_batch(16, DECODES, PREFILLS)
    pieces = slice(len(DECODES), None)
    ends = np.array([20, 26, 41], dtype=np.int32)
    begins, pages, last = list_pages(batch, pieces, ends)
    table = batch.page_table
    assert begins.tolist() == [0, 2, 4, 7] and last.tolist() == [4, 10, 9]
    assert pages.tolist() == [*table[3, :2], *table[5, :2], *table[4, :3]]
    slots = list_slots(batch, pieces, ends).tolist()
    wanted = [
        int(table[row, at // 16]) * 16 + at % 16
        for row, end in ((3, 20), (5, 26), (4, 41))
        for at in range(end)
    ]
    assert slots == wanted


def test_new_keys_reach_the_prefill_backend_that_wants_them() -> None:
    class Wanting(SdpaAttention):
        wants_new = True
        got: list[torch.Tensor]

        def forward(
            self, q: torch.Tensor, *args: Any, new: Any = None, **options: Any
        ) -> torch.Tensor:
            self.got = [*new]
            return super().forward(q, *args, **options)

    prefill = Wanting()
    hybrid = HybridAttention(prefill=prefill, decode=SdpaAttention())
    batch, pool, q = make_batch(16, DECODES, PREFILLS)
    hybrid.plan(batch)
    assert hybrid.wants_new
    k, v = torch.randn(2, len(q), KV_HEADS, DIM)
    hybrid.forward(q, 0, pool, scale=0.3, window=None, new=(k, v))
    assert torch.equal(prefill.got[0], k[len(DECODES) :])
    assert torch.equal(prefill.got[1], v[len(DECODES) :])
    decodes, _, _ = make_batch(16, DECODES, [])
    hybrid.plan(decodes)
    assert not hybrid.wants_new
