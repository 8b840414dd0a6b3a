from __future__ import annotations

import pytest
import torch

from kernels.paged_attention import paged_attention

BF16, I32 = torch.bfloat16, torch.int32


class Case:
    """Random slices over shuffled pages; slots that no row owns hold NaN."""

    def __init__(self, starts, lengths, page_size, heads, kv_heads, dim, seed=0):
        torch.manual_seed(seed)
        slices, longest = len(starts), max(s + n for s, n in zip(starts, lengths, strict=True))
        max_pages = -(-longest // page_size)
        pages = torch.randperm((slices + 2) * max_pages - 1)[: (slices + 1) * max_pages] + 1
        self.table = pages.view(slices + 1, max_pages).to(I32)
        self.rows = torch.randperm(slices + 1)[:slices].to(I32)
        self.starts = torch.tensor(starts, dtype=I32)
        self.lengths = torch.tensor(lengths, dtype=I32)
        self.page_size = page_size
        shape = ((slices + 2) * max_pages * page_size, kv_heads, dim)
        self.k = torch.full(shape, float("nan"), dtype=BF16)
        self.v = self.k.clone()
        for row, start, length in zip(self.rows.tolist(), starts, lengths, strict=True):
            seen = torch.arange(start + length)
            slots = self.table[row].long()[seen // page_size] * page_size + seen % page_size
            self.k[slots] = torch.randn(len(seen), kv_heads, dim).to(BF16)
            self.v[slots] = torch.randn(len(seen), kv_heads, dim).to(BF16)
        self.q = torch.randn(sum(lengths), heads, dim).mul_(2).to(BF16)

    def run(self, implementation, library=None, window=None, wide=False):
        planes = [t.float() if wide else t for t in (self.q, self.k, self.v)]
        tables = (self.table, self.rows, self.starts, self.lengths)
        return paged_attention(
            *planes,
            *tables,
            self.page_size,
            self.q.shape[2] ** -0.5,
            window,
            implementation=implementation,
            library=library,
        )


@pytest.mark.parametrize("implementation", ["torch", "native"])
@pytest.mark.parametrize("window", [None, 1, 7, 70])
@pytest.mark.parametrize(
    ("starts", "lengths", "page_size", "heads", "kv_heads", "dim"),
    [
        ([0], [1], 16, 9, 3, 64),
        ([124, 0, 63, 64], [1, 1, 1, 1], 16, 9, 3, 64),  # decode, at block edges too
        ([0, 5], [33, 3], 1, 4, 1, 80),
        ([130, 0, 200], [1, 65, 40], 16, 4, 4, 128),  # decode and prefill in one step
        ([10, 77], [50, 1], 16, 9, 3, 64),
        ([3], [20], 4, 6, 2, 24),  # a head size that is no multiple of 16
        ([0], [70], 16, 50, 2, 32),  # wide groups
    ],
)
def test_close_to_float32(
    implementation, window, starts, lengths, page_size, heads, kv_heads, dim, library_for
):
    library = library_for(implementation)
    case = Case(starts, lengths, page_size, heads, kv_heads, dim)
    found = case.run(implementation, library, window)
    exact = case.run("reference", window=window, wide=True)
    assert found.shape == exact.shape and found.is_contiguous()
    torch.testing.assert_close(found.float(), exact, rtol=1e-2, atol=1.5e-2)


@pytest.mark.parametrize("window", [None, 50])
def test_cutting_a_row_into_slices_changes_no_bit(window, library_for):
    """Whole prefill = chunked prefill = decoding token by token, alone or beside other rows."""
    library = library_for("native")
    case = Case([0, 40], [150, 1], 16, 9, 3, 64)
    whole = case.run("native", library, window)[:150]
    q, row = case.q, case.rows[:1]
    for start, length in ((0, 64), (64, 86), (100, 50), (17, 1), (149, 1)):
        case.q = q[start : start + length]
        case.rows = row
        case.starts = torch.tensor([start], dtype=I32)
        case.lengths = torch.tensor([length], dtype=I32)
        assert torch.equal(case.run("native", library, window), whole[start : start + length])


@pytest.mark.parametrize("implementation", ["reference", "torch", "native"])
def test_a_first_token_returns_its_value(implementation, library_for):
    case = Case([0], [1], 16, 4, 2, 64)
    slot = int(case.table[case.rows[0], 0]) * 16
    found = case.run(implementation, library_for(implementation))
    assert torch.equal(found[0], case.v[slot].repeat_interleave(2, dim=0))


@pytest.mark.parametrize("scale", [60.0, 3e3])
def test_huge_scores_do_not_overflow(scale, library_for):
    library = library_for("native")
    case = Case([90], [8], 16, 4, 2, 64)
    case.q = (case.q * scale).to(BF16)
    found, exact = case.run("native", library), case.run("reference", wide=True)
    torch.testing.assert_close(found.float(), exact, rtol=2e-2, atol=3e-2)


def test_refusals():
    case = Case([0], [2], 16, 4, 2, 64)
    case.lengths = torch.tensor([3], dtype=I32)
    with pytest.raises(ValueError, match="lengths sum to 3"):
        case.run("torch")
    case = Case([0], [2], 16, 4, 2, 64)
    with pytest.raises(ValueError, match="window must be at least 1"):
        case.run("torch", window=0)
    case.starts = case.starts.long()
    with pytest.raises(ValueError, match="starts must be torch.int32"):
        case.run("torch")
    case = Case([0], [2], 16, 5, 2, 64)
    with pytest.raises(ValueError, match="not a multiple"):
        case.run("torch")
