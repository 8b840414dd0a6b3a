"""The attention backends of a GPU at serving sizes, against float32."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from srt.attention.select import SMALL_PROMPTS, BackendPair, build_backend
from srt.cache.pools import PagedKVPool
from srt.protocols.attention import AttentionBackend, AttentionBatch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

BF16, FP8, I32 = torch.bfloat16, torch.float8_e4m3fn, torch.int32
DECODES = ([1023, 0, 15, 16, 4095, 700], [1] * 6)
MIXED = ([1023, 5, 0, 100, 3000], [1, 1, 300, 5, 513])
VERIFY = ([1000, 64, 7], [8, 8, 5])


@dataclass(slots=True)
class Made:
    batch: AttentionBatch
    pool: PagedKVPool
    q: torch.Tensor

    def run(self, backend: AttentionBackend, window: int | None = None) -> torch.Tensor:
        backend.plan(self.batch)
        return self.forward(backend, window)

    def forward(self, backend: AttentionBackend, window: int | None = None) -> torch.Tensor:
        scale = self.q.shape[2] ** -0.5
        return backend.forward(self.q, 0, self.pool, scale=scale, window=window)

    def part(self, index: int, skip: int, length: int) -> Made:
        """Some tokens of one slice, alone."""
        batch = self.batch
        first = sum(batch.lengths_host[:index]) + skip
        start = batch.starts_host[index] + skip
        alone = replace(
            batch,
            num_decode=int(length == 1),
            rows=batch.rows[index : index + 1],
            starts=torch.tensor([start], dtype=I32, device="cuda"),
            lengths=torch.tensor([length], dtype=I32, device="cuda"),
            rows_host=batch.rows_host[index : index + 1],
            starts_host=[start],
            lengths_host=[length],
        )
        return Made(alone, self.pool, self.q[first : first + length])


def make(
    cut: tuple[list[int], list[int]],
    heads: int = 32,
    kv_heads: int = 8,
    dim: int = 128,
    page_size: int = 16,
    dtype: torch.dtype = BF16,
    unowned: float = 100.0,
) -> Made:
    """Slots that no row owns hold `unowned`."""
    torch.manual_seed(0)
    starts, lengths = cut
    count = len(starts)
    pages = -(-max(s + n for s, n in zip(starts, lengths, strict=True)) // page_size)
    pool = PagedKVPool(
        num_pages=(count + 1) * pages + 1,
        page_size=page_size,
        num_layers=1,
        num_kv_heads=kv_heads,
        head_dim=dim,
        dtype=dtype,
        device=torch.device("cuda"),
        scales=[(0.5, 2.0)] if dtype == FP8 else None,
    )
    order = 1 + torch.randperm((count + 1) * pages)[: count * pages]
    table = order.view(count, pages).to(I32).cuda()
    rows = list(reversed(range(count)))
    for plane in (pool.keys(0), pool.values(0)):
        plane.fill_(unowned)
        for row, start, length in zip(rows, starts, lengths, strict=True):
            values = torch.randn(start + length, kv_heads, dim, device="cuda")
            slots = slots_of(table, row, start + length, page_size)
            plane.view(torch.uint8)[slots] = values.to(dtype).view(torch.uint8)
    total = sum(lengths)
    batch = AttentionBatch(
        num_decode=next((i for i, n in enumerate(lengths) if n > 1), count),
        page_size=page_size,
        page_table=table,
        rows=torch.tensor(rows, dtype=I32, device="cuda"),
        starts=torch.tensor(starts, dtype=I32, device="cuda"),
        lengths=torch.tensor(lengths, dtype=I32, device="cuda"),
        rows_host=rows,
        starts_host=starts,
        lengths_host=lengths,
        slots=torch.zeros(total, dtype=torch.int64, device="cuda"),
        positions=torch.zeros(total, dtype=torch.int64, device="cuda"),
    )
    return Made(batch, pool, torch.randn(total, heads, dim, device="cuda").mul_(2).to(BF16))


def slots_of(table: torch.Tensor, row: int, length: int, page_size: int) -> torch.Tensor:
    seen = torch.arange(length, device="cuda")
    return table[row].long()[seen // page_size] * page_size + seen % page_size


def exact(made: Made, window: int | None = None) -> torch.Tensor:
    batch, pool = made.batch, made.pool
    group = made.q.shape[1] // pool.keys(0).shape[1]
    parts, first = [], 0
    for row, start, length in zip(
        batch.rows_host, batch.starts_host, batch.lengths_host, strict=True
    ):
        slots = slots_of(batch.page_table, row, start + length, batch.page_size)
        k, v = (
            (plane.view(torch.uint8)[slots].view(plane.dtype).float() * scale)
            .transpose(0, 1)
            .repeat_interleave(group, 0)
            for plane, scale in (
                (pool.keys(0), pool.k_scale(0)),
                (pool.values(0), pool.v_scale(0)),
            )
        )
        own = torch.arange(start, start + length, device="cuda")[:, None]
        seen = torch.arange(start + length, device="cuda")
        mask = seen <= own
        if window is not None:
            mask &= seen > own - window
        q = made.q[first : first + length].float().transpose(0, 1)
        parts.append(scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(0, 1))
        first += length
    return torch.cat(parts)


def backend(name: str, *, deterministic: bool = False, narrow: bool = False) -> AttentionBackend:
    needed = {"flashinfer": "flashinfer", "triton": "triton", "both": "flashinfer"}[name]
    if find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    pair = BackendPair(prefill=name, decode=name)
    if name == "both":
        pair = BackendPair(prefill="flashinfer", decode="triton")

    def refuse(*arguments: object) -> torch.Tensor:
        raise AssertionError("the runner's own kernel is not asked")

    return build_backend(pair, refuse, deterministic=deterministic, narrow=narrow)


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found.float(), wanted, rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("name", ["triton", "flashinfer", "both"])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("cut", [DECODES, MIXED, VERIFY])
def test_close_to_float32(cut: tuple[list[int], list[int]], page_size: int, name: str) -> None:
    made = make(cut, page_size=page_size)
    close(made.run(backend(name)), exact(made))


@pytest.mark.parametrize("cut", [([7, 0, 900], [1, 1500, 700]), ([0], [2048])])
def test_gathered_keys_are_close_to_float32(cut: tuple[list[int], list[int]]) -> None:
    made = make(cut)
    for name in ("flashinfer", "both"):
        close(made.run(backend(name)), exact(made))


def test_small_prompts_beside_decodes_have_no_plan() -> None:
    """Ours takes the whole step then; where new keys are is nothing to it."""
    made = make(([50, 0, 0], [1, 300, 77]))
    subject = backend("both")
    subject.plan(made.batch)
    assert not subject.wants_new
    close(made.forward(subject), exact(made))


@pytest.mark.parametrize("name", ["flashinfer", "both"])
def test_new_keys_are_read_where_they_are(name: str) -> None:
    """Beside q in one tensor, rows far apart; the pool's are not looked at. The prompts are long enough
    for a plan of their own."""
    made = make(([50, 0, 0], [1, 1300, 77]))
    assert 1300 * 1300 + 77 * 77 > SMALL_PROMPTS
    wanted = exact(made)
    batch, pool = made.batch, made.pool
    qkv = torch.zeros(len(made.q), 32 + 8 + 8, 128, dtype=BF16, device="cuda")
    first = 0
    for row, start, length in zip(
        batch.rows_host, batch.starts_host, batch.lengths_host, strict=True
    ):
        slots = slots_of(batch.page_table, row, start + length, batch.page_size)[start:]
        qkv[first : first + length, 32:40] = pool.keys(0)[slots]
        qkv[first : first + length, 40:] = pool.values(0)[slots]
        if length > 1:
            pool.keys(0)[slots] = float("nan")
        first += length
    subject = backend(name)
    subject.plan(batch)
    assert subject.wants_new
    new = qkv[:, 32:40], qkv[:, 40:]
    found = subject.forward(made.q, 0, pool, scale=128**-0.5, window=None, new=new)
    close(found, wanted)


@pytest.mark.parametrize(
    "cut", [([900, 30, 0, 700], [1, 1, 1500, 900]), ([0], [2048]), ([20000, 9], [300, 90])]
)
@pytest.mark.parametrize("is_new", [False, True])
def test_prompts_read_a_narrow_cache_by_way_of_copies(
    cut: tuple[list[int], list[int]], is_new: bool
) -> None:
    """Of the pool's numbers, or of the step's own where all of it is new."""
    made = make(cut, dtype=FP8)
    batch, pool = made.batch, made.pool
    wanted = exact(made)
    subject = backend("both", narrow=True)
    subject.plan(batch)
    assert subject.wants_new == (cut == ([0], [2048]))
    new = None
    if is_new and subject.wants_new:
        slots = slots_of(batch.page_table, 0, 2048, batch.page_size)
        k, v = (
            (plane.float()[slots] * scale).to(BF16)
            for plane, scale in ((pool.keys(0), 0.5), (pool.values(0), 2.0))
        )
        new = k, v
    found = subject.forward(made.q, 0, pool, scale=128**-0.5, window=None, new=new)
    torch.testing.assert_close(found.float(), wanted, rtol=2e-2, atol=8e-2)


def test_a_narrow_cache_too_long_for_a_copy_is_read_where_it_is() -> None:
    made = make(([40000], [300]), dtype=FP8)
    subject = backend("both", narrow=True)
    subject.plan(made.batch)
    found = subject.forward(made.q, 0, made.pool, scale=128**-0.5, window=None)
    torch.testing.assert_close(found.float(), exact(made), rtol=2e-2, atol=8e-2)


@pytest.mark.parametrize("dtype", [BF16, FP8])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page_size"),
    [(9, 3, 64, 16), (32, 8, 80, 16), (32, 32, 96, 64), (40, 8, 128, 128), (8, 4, 256, 16)],
)
@pytest.mark.parametrize("window", [None, 200])
def test_triton_takes_every_shape(
    heads: int, kv_heads: int, dim: int, page_size: int, dtype: torch.dtype, window: int | None
) -> None:
    for cut in (DECODES, MIXED, VERIFY):
        sizes = (heads, kv_heads, dim, page_size, dtype)
        made = make(cut, *sizes, unowned=float("nan"))
        tolerance = 8e-2 if dtype == FP8 else 2e-2  # products of what the scales made larger
        found = made.run(backend("triton"), window)
        torch.testing.assert_close(found.float(), exact(made, window), rtol=2e-2, atol=tolerance)


@pytest.mark.parametrize("name", ["triton", "flashinfer"])
def test_a_recorded_step_is_the_eager_one_to_the_bit(name: str) -> None:
    made = make(DECODES)
    eager = made.run(backend(name))
    later = [start // 2 for start in made.batch.starts_host]
    other = Made(
        replace(
            made.batch,
            starts=torch.tensor(later, dtype=I32, device="cuda"),
            starts_host=later,
        ),
        made.pool,
        made.q,
    )
    eager_later = other.run(backend(name))

    recorded = backend(name)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        recorded.capture(made.batch)
        made.forward(recorded)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = made.forward(recorded)
    starts = made.batch.starts.clone()
    for numbers, on_host, wanted in (
        (starts, made.batch.starts_host, eager),
        (other.batch.starts, later, eager_later),
        (starts, made.batch.starts_host, eager),
    ):
        made.batch.starts.copy_(numbers)
        recorded.replay(replace(made.batch, starts_host=on_host))
        graph.replay()
        if name == "triton":
            assert torch.equal(out, wanted)
        else:  # its splits are others in a graph
            close(out, wanted.float())


@pytest.mark.parametrize("is_settled", [False, True])
def test_many_layers_in_a_graph_share_the_workspace(is_settled: bool) -> None:
    """Programmatic launches overlap; each still sees the one before it finished."""
    made = make(([4000], [1]))
    made.batch.is_settled = is_settled
    subject = backend("triton")
    wanted = made.run(subject)
    close(wanted, exact(made))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [made.forward(subject) for _ in range(200)]
    for _ in range(5):
        graph.replay()
        assert all(torch.equal(out, wanted) for out in outs)


@pytest.mark.parametrize("window", [None, 200])
def test_deterministic_bits_depend_on_the_row_only(window: int | None) -> None:
    made = make(MIXED)
    subject = backend("triton", deterministic=True)
    whole = made.run(subject, window)
    close(whole, exact(made, window))
    first = 0
    for index, length in enumerate(made.batch.lengths_host):
        for skip, count in ((0, length), (0, 1), (length // 2, 1), (length // 3, length // 2)):
            if count:
                alone = made.part(index, skip, count).run(subject, window)
                assert torch.equal(alone, whole[first + skip : first + skip + count])
        first += length
