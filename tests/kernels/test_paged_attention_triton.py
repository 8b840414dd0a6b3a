"""The Triton attention kernel: interpreted on a CPU, compiled where there is a GPU."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any

import numpy as np
import pytest
import torch

from kernels.paged_attention import reference
from kernels.paged_attention.tiles import cut_tiles
from tests.triton_loops import mend_loop_bounds

pytest.importorskip("triton", reason="triton is not installed")
CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when the kernels are defined

from kernels.paged_attention import triton as subject  # noqa: E402  after the line above
from kernels.paged_attention.triton_gather import Gather  # noqa: E402

DEVICE = torch.device("cuda" if CUDA else "cpu")
I32, BF16 = torch.int32, torch.bfloat16


@pytest.fixture(autouse=True)
def loops(monkeypatch: pytest.MonkeyPatch) -> None:
    mend_loop_bounds(monkeypatch)


class Case:
    """Random slices over shuffled pages; slots that no row owns hold NaN."""

    def __init__(
        self, starts: Any, lengths: Any, page: int, heads: int, kv_heads: int, dim: int
    ) -> None:
        generator = torch.Generator().manual_seed(len(starts) * 1000 + dim)
        longest = max(s + n for s, n in zip(starts, lengths, strict=True))
        pages = -(-longest // page)
        count = len(starts)
        order = 1 + torch.randperm((count + 1) * pages, generator=generator)[: count * pages]
        self.table = order.view(count, pages).to(I32)
        self.rows = list(reversed(range(count)))
        self.starts, self.lengths, self.page = list(starts), list(lengths), page
        shape = ((count + 1) * pages * page + page, kv_heads, dim)
        self.k = torch.full(shape, float("nan"), dtype=BF16)
        self.v = self.k.clone()
        for row, start, length in zip(self.rows, starts, lengths, strict=True):
            seen = torch.arange(start + length)
            slots = self.table[row].long()[seen // page] * page + seen % page
            for plane in (self.k, self.v):
                values = torch.randn(len(seen), kv_heads, dim, generator=generator)
                plane[slots] = values.to(BF16)
        self.q = torch.randn(sum(lengths), heads, dim, generator=generator).mul_(2).to(BF16)
        self.scale = dim**-0.5
        self.bases: list[int] = []
        self.visible: torch.Tensor | None = None
        self.positions: torch.Tensor | None = None

    def name(self, bases: list[int]) -> None:
        """Random trees: a token sees itself and some of what lies between the base and it."""
        generator = torch.Generator().manual_seed(7)
        visible, positions = [], []
        for base, start, length in zip(bases, self.starts, self.lengths, strict=True):
            for own in range(start, start + length):
                draws = torch.rand(max(own - max(base, 0), 0), generator=generator)
                seen = [max(base, 0) + i for i, draw in enumerate(draws) if draw < 0.4] + [own]
                positions.append(own if base < 0 else base + len(seen) - 1)
                bits = 0 if base < 0 else sum(1 << (s - base) for s in seen)
                visible.append(bits - (1 << 64) if bits >> 63 else bits)
        self.bases = bases
        self.visible, self.positions = torch.tensor(visible), torch.tensor(positions)

    def exact(self, window: int | None = None) -> torch.Tensor:
        numbers = [torch.tensor(each, dtype=I32) for each in (self.rows, self.starts, self.lengths)]
        bases = torch.tensor(self.bases, dtype=I32) if self.bases else None
        return reference.paged_attention(
            self.q.float(),
            self.k.float(),
            self.v.float(),
            self.table,
            *numbers,
            self.page,
            self.scale,
            window,
            bases,
            self.visible,
            self.positions,
        )

    def work(
        self, shape: subject.TileShape, splits: int, listed: bool = True, ordered: bool = False
    ) -> subject.Work:
        group = self.q.shape[1] // self.k.shape[1]
        common: Any = {
            "shape": shape,
            "splits": splits,
            "page_table": self.table.to(DEVICE),
            "page_size": self.page,
        }
        if not listed:
            rows, starts = (torch.tensor(each, dtype=I32) for each in (self.rows, self.starts))
            length = self.lengths[0]
            turns = list(reversed(range(len(self.rows)))) if ordered else []
            order = torch.tensor(turns, dtype=I32).to(DEVICE) if ordered else None
            return subject.Work(
                num=len(self.rows) * -(-length // shape.per_tile(group)),
                rows=rows.to(DEVICE),
                starts=starts.to(DEVICE),
                length=length,
                order=order,
                **common,
            )
        tiles = cut_tiles(
            self.rows, self.starts, self.lengths, self.bases, per_tile=shape.per_tile(group)
        )
        return subject.Work(
            num=len(tiles),
            tiles=torch.from_numpy(tiles).to(DEVICE),
            visible=None if self.visible is None else self.visible.to(DEVICE),
            positions=None if self.positions is None else self.positions.to(DEVICE),
            **common,
        )

    def run(
        self,
        shape: subject.TileShape,
        splits: int = 1,
        *,
        listed: bool = True,
        ordered: bool = False,
        attention: subject.Attention | None = None,
        lse: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        out = torch.empty(self.q.shape, dtype=self.q.dtype, device=DEVICE)
        (attention or subject.Attention(DEVICE)).run(
            self.work(shape, splits, listed, ordered),
            *(each.to(DEVICE) for each in (self.q, self.k, self.v)),
            out,
            scale=self.scale,
            lse=lse,
            **options,
        )
        return out.cpu()


def short(rows: int, block: int = 32) -> subject.TileShape:
    return subject.TileShape(rows=rows, block=block, warps=4, stages=3, per_sm=2, least=32)


LONG = subject.TileShape(rows=64, block=32, warps=4, stages=3, per_sm=1, least=32, two_loops=True)


def close(found: torch.Tensor, exact: torch.Tensor) -> None:
    torch.testing.assert_close(found.float(), exact, rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    ("starts", "page", "heads", "kv_heads", "dim"),
    [
        ([124, 0, 63, 64], 16, 8, 2, 64),  # block edges
        ([99, 5], 1, 5, 1, 80),  # a group and a head size that are no powers of two
        ([70], 64, 9, 3, 32),  # a block lies in one page
    ],
)
def test_decode_is_close_to_float32(
    starts: list[int],
    page: int,
    heads: int,
    kv_heads: int,
    dim: int,
    splits: int,
    window: int | None,
) -> None:
    case = Case(starts, [1] * len(starts), page, heads, kv_heads, dim)
    close(case.run(short(16), splits, listed=False, window=window), case.exact(window))


@pytest.mark.parametrize("window", [None, 1, 50])
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("shape", [short(32), LONG])
def test_slices_are_close_to_float32(
    shape: subject.TileShape, splits: int, window: int | None
) -> None:
    case = Case([130, 0, 40], [1, 65, 20], 16, 6, 2, 64)
    close(case.run(shape, splits, window=window), case.exact(window))


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize(
    ("starts", "lengths", "bases"),
    [
        ([60, 124, 0], [8, 1, 33], [60, -1, -1]),  # a tree, a decode, a prompt
        ([70, 66], [6, 1], [64, 63]),  # the tree began in an earlier step
        ([3, 128], [64, 64], [3, 128]),  # as large as a tree can be
        ([0], [5], [0]),  # nothing before the tree
    ],
)
def test_trees_are_close_to_float32(
    starts: list[int], lengths: list[int], bases: list[int], window: int | None
) -> None:
    case = Case(starts, lengths, 16, 4, 2, 32)
    case.name(bases)
    for shape, splits in ((short(32), 3), (LONG, 1)):
        close(case.run(shape, splits, window=window), case.exact(window))


@pytest.mark.parametrize("splits", [1, 3])
def test_capped_scores_and_their_sums(splits: int) -> None:
    cap = 2.0
    case = Case([90, 3], [4, 20], 16, 4, 2, 64)
    lse = torch.empty(case.q.shape[:2], dtype=torch.float32, device=DEVICE)
    found = case.run(LONG, splits, cap=cap, lse=lse)
    first = 0
    for row, start, length in zip(case.rows, case.starts, case.lengths, strict=True):
        seen = torch.arange(start + length)
        slots = case.table[row].long()[seen // 16] * 16 + seen % 16
        k, v = (p[slots].float().repeat_interleave(2, 1) for p in (case.k, case.v))
        scores = torch.einsum("thd,shd->hts", case.q[first : first + length].float(), k)
        scores = cap * torch.tanh(scores * case.scale / cap)
        ahead = seen > torch.arange(start, start + length)[:, None]
        scores = scores.masked_fill(ahead, float("-inf"))
        close(found[first : first + length], torch.einsum("hts,shd->thd", scores.softmax(-1), v))
        sums = scores.logsumexp(-1).T
        torch.testing.assert_close(lse[first : first + length].cpu(), sums, rtol=1e-3, atol=1e-3)
        first += length


@pytest.mark.parametrize(("rows", "dim"), [(16, 64), (32, 80), (16, 16), (64, 64)])
@pytest.mark.parametrize("way", ["listed", "tree", "window", "early", "two loops"])
def test_a_narrow_cache_is_read_with_its_scales(way: str, rows: int, dim: int) -> None:
    """In pairs where tiles are small, else number by number."""
    lengths = [3, 1] if way in ("listed", "tree") else [1, 1]
    case = Case([70, 7], lengths, 16, 4, 2, dim)
    if way == "tree":
        case.name([66, -1])
    k_scale, v_scale = 0.5, 0.25
    k, v = (case.k / k_scale).to(torch.float8_e4m3fn), (case.v / v_scale).to(torch.float8_e4m3fn)
    shape = dataclasses.replace(short(rows), early=way == "early", two_loops=way == "two loops")
    assert subject.is_paired(k, shape) == (rows <= 32 and dim >= 32)
    window = 40 if way == "window" else None
    case.k, case.v = k.to(BF16) * k_scale, v.to(BF16) * v_scale
    exact = case.exact(window)
    case.k, case.v = k, v
    case.scale *= k_scale
    is_listed = way in ("listed", "tree")
    close(case.run(shape, 2, listed=is_listed, window=window, v_scale=v_scale), exact)


def test_counts_are_zero_again_and_the_workspace_is_used_twice() -> None:
    attention = subject.Attention(DEVICE)
    case = Case([100, 30, 64], [1, 1, 1], 16, 4, 2, 32)
    first = case.run(short(16), 4, listed=False, attention=attention)
    again = case.run(short(16), 4, listed=False, attention=attention)
    assert torch.equal(first, again)
    assert not attention._counts.any()


@pytest.mark.parametrize("window", [None, 50])
def test_with_one_shape_no_bit_depends_on_the_cut(window: int | None) -> None:
    """Whole prefill = chunks = token by token, listed or as decode, alone or beside other rows."""
    shape = dataclasses.replace(subject.fixed_shape(64, 3), block=32)
    case = Case([0, 40], [90, 1], 16, 6, 2, 64)
    whole = case.run(shape, window=window)[:90]
    q, row = case.q, case.rows[:1]
    for start, length in ((0, 64), (64, 26), (17, 1), (89, 1)):
        case.q, case.rows = q[start : start + length], row
        case.starts, case.lengths = [start], [length]
        for listed in (True, False)[: 2 if length == 1 else 1]:
            found = case.run(shape, listed=listed, window=window)
            assert torch.equal(found, whole[start : start + length])


def test_tiles() -> None:
    tiles = cut_tiles([4, 2, 9], [0, 10, 3], [5, 1, 4], [-1, -1, 2], per_tile=2, first_token=7)
    fields: dict[int, Any] = {int(tile[1]): tile.tolist() for tile in tiles}
    assert fields == {  # row, token, position, count, base, end
        7: [4, 7, 0, 2, -1, 2, 0, 0],
        9: [4, 9, 2, 2, -1, 4, 0, 0],
        11: [4, 11, 4, 1, -1, 5, 0, 0],
        12: [2, 12, 10, 1, -1, 11, 0, 0],
        13: [9, 13, 3, 2, 2, 7, 0, 0],
        15: [9, 15, 5, 2, 2, 7, 0, 0],
    }
    assert np.all(np.diff(tiles[:, 5]) <= 0)


def test_what_a_device_holds_decides_on_the_splits() -> None:
    shape = short(16)
    sms = subject.num_sms(DEVICE)
    assert subject.choose_splits(10**6, shape, DEVICE) == 1
    assert subject.choose_splits(1, shape, DEVICE) == min(2 * sms, shape.most)
    assert math.log2(subject.choose_shape(5, 128, 5).rows) == 4


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("splits", [1, 3])
def test_the_newest_key_is_read_apart(splits: int, window: int | None) -> None:
    case = Case([124, 0, 63, 64, 32], [1] * 5, 16, 8, 2, 80)
    shape = dataclasses.replace(short(16), early=True)
    close(case.run(shape, splits, listed=False, window=window), case.exact(window))


def test_narrow_rows_are_gathered_in_the_type_of_the_queries() -> None:
    planes = [torch.randn(50, 3, 24).to(torch.float8_e4m3fn).to(DEVICE) for _ in range(2)]
    slots = torch.randperm(50)[:21].to(DEVICE)
    outs = [torch.empty(21, 3, 24, dtype=BF16, device=DEVICE) for _ in range(2)]
    Gather()(*planes, slots, *outs, 0.5, 3.0)
    for plane, out, scale in zip(planes, outs, (0.5, 3.0), strict=True):
        assert torch.equal(out, (plane.float() * scale)[slots].to(BF16))


def test_rows_are_gathered() -> None:
    planes = [torch.randn(50, 3, 24).to(BF16).to(DEVICE) for _ in range(2)]
    slots = torch.randperm(50)[:21].to(DEVICE)
    outs = [torch.empty(21, 3, 24, dtype=BF16, device=DEVICE) for _ in range(2)]
    Gather()(*planes, slots, *outs)
    for plane, out in zip(planes, outs, strict=True):
        assert torch.equal(out, plane[slots])


@pytest.mark.parametrize(("length", "rows"), [(3, 16), (7, 16), (5, 32)])
def test_slices_of_one_length_need_no_list(length: int, rows: int) -> None:
    case = Case([60, 0, 31], [length] * 3, 16, 9, 3, 32)
    plain = case.run(short(rows), 2, listed=False)
    close(plain, case.exact())
    assert torch.equal(case.run(short(rows), 2, listed=False, ordered=True), plain)
