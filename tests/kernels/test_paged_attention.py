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
        self.named = (None, None, None)  # bases, visible, positions

    def run(self, implementation, library=None, window=None, wide=False):
        planes = [t.float() if wide else t for t in (self.q, self.k, self.v)]
        tables = (self.table, self.rows, self.starts, self.lengths)
        return paged_attention(
            *planes,
            *tables,
            self.page_size,
            self.q.shape[2] ** -0.5,
            window,
            *self.named,
            implementation=implementation,
            library=library,
        )

    def name(self, bases):
        """Random trees: a token sees itself and some of what lies between the base and it."""
        visible, positions = [], []
        for base, start, length in zip(
            bases, self.starts.tolist(), self.lengths.tolist(), strict=True
        ):
            for own in range(start, start + length):
                seen = [s for s in range(max(base, 0), own) if torch.rand(()) < 0.4] + [own]
                positions.append(own if base < 0 else base + len(seen) - 1)
                bits = 0 if base < 0 else sum(1 << (s - base) for s in seen)
                visible.append(bits - (1 << 64) if bits >> 63 else bits)
        self.named = (
            torch.tensor(bases, dtype=I32),
            torch.tensor(visible),
            torch.tensor(positions),
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


@pytest.mark.parametrize("implementation", ["torch", "native"])
@pytest.mark.parametrize("window", [None, 1, 7, 70])
@pytest.mark.parametrize(
    ("starts", "lengths", "bases", "page_size", "heads", "kv_heads", "dim"),
    [
        ([60, 124, 0], [8, 1, 33], [60, -1, -1], 16, 9, 3, 64),  # a tree, a decode, a prompt
        ([70, 66], [6, 1], [64, 63], 16, 9, 3, 64),  # the tree began in an earlier step
        ([3, 128], [64, 64], [3, 128], 4, 4, 1, 80),  # as large as a tree can be; block edges
        ([0, 190], [5, 1], [0, 150], 16, 4, 2, 128),  # nothing before the tree
        ([61], [9], [60], 16, 6, 2, 24),  # a head size that is no multiple of 16
    ],
)
def test_named_keys_close_to_float32(
    implementation, window, starts, lengths, bases, page_size, heads, kv_heads, dim, library_for
):
    library = library_for(implementation)
    case = Case(starts, lengths, page_size, heads, kv_heads, dim)
    case.name(bases)
    found = case.run(implementation, library, window)
    exact = case.run("reference", window=window, wide=True)
    torch.testing.assert_close(found.float(), exact, rtol=1e-2, atol=1.5e-2)


@pytest.mark.parametrize("implementation", ["reference", "native"])
@pytest.mark.parametrize("window", [None, 50])
def test_a_chain_by_name_is_causal_to_the_bit(implementation, window, library_for):
    library = library_for(implementation)
    case = Case([100, 7, 5], [20, 1, 3], 16, 9, 3, 64)
    plain = case.run(implementation, library, window)
    visible = [(1 << (i + 1)) - 1 for i in range(20)] + [0] * 4
    positions = [*range(100, 120), 7, 5, 6, 7]
    case.named = (
        torch.tensor([100, -1, -1], dtype=I32),
        torch.tensor(visible),
        torch.tensor(positions),
    )
    assert torch.equal(case.run(implementation, library, window), plain)


def test_a_tree_beside_others_is_as_alone_and_in_any_order(library_for):
    """A node's result depends on what it sees, not on which nodes stand beside it."""
    library = library_for("native")
    case = Case([90, 30, 64], [12, 1, 40], 16, 9, 3, 64)
    case.name([90, -1, -1])
    whole = case.run("native", library)
    case.q = case.q[4:7]
    case.rows, case.lengths = case.rows[:1], torch.tensor([3], dtype=I32)
    case.starts = torch.tensor([94], dtype=I32)
    case.named = (case.named[0][:1], case.named[1][4:7], case.named[2][4:7])
    assert torch.equal(case.run("native", library), whole[4:7])


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(("dim", "page_size"), [(64, 16), (64, 1), (24, 4)])
def test_a_branch_is_a_chain_to_the_bit(window, dim, page_size, library_for):
    """What a node of a tree gives is what it gives as the last of a chain of what it sees."""
    library = library_for("native")
    base, size = 61, 12  # the branch crosses a border of the kernel's blocks
    case = Case([base], [size], page_size, 9, 3, dim)
    case.name([base])
    tree = case.run("native", library, window)
    row, q, k, v = int(case.rows[0]), case.q, case.k.clone(), case.v.clone()
    bits, case.named = case.named[1].tolist(), (None, None, None)
    places = torch.arange(base + size)
    slots = case.table[row].long()[places // page_size] * page_size + places % page_size
    for node in range(size):
        seen = [base + j for j in range(size) if bits[node] >> j & 1]
        chain = slots[base : base + len(seen)]
        case.k, case.v = k.clone(), v.clone()
        case.k[chain], case.v[chain] = k[slots[seen]], v[slots[seen]]
        case.q = q[node : node + 1]
        case.starts = torch.tensor([base + len(seen) - 1], dtype=I32)
        case.lengths = torch.tensor([1], dtype=I32)
        assert torch.equal(case.run("native", library, window)[0], tree[node])


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
    case = Case([0], [2], 16, 4, 2, 64)
    case.name([0])
    bases, visible, positions = case.named
    for named, window, match in (
        ((bases, None, None), None, "belong together"),
        ((bases, visible, None), 4, "positions are needed"),
        ((bases.long(), visible, None), None, "bases must be torch.int32"),
        ((bases, visible[:1], None), None, "visible must have shape"),
    ):
        case.named = named
        with pytest.raises(ValueError, match=match):
            case.run("torch", window=window)
