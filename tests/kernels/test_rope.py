from __future__ import annotations

import math

import pytest
import torch

from kernels.rope import rope_write_kv

BF16 = torch.bfloat16


def angles(context: int, head_dim: int) -> torch.Tensor:
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    table = torch.arange(context)[:, None] * frequencies
    return torch.cat((table.cos(), table.sin()), dim=1)


def run(qkv, positions, slots, heads, kv_heads, dim, norms, implementation, library, planes=None):
    k_plane, v_plane = planes or torch.full((2, 128, kv_heads, dim), 7.0, dtype=qkv.dtype)
    table = angles(300, dim)
    q = rope_write_kv(
        qkv,
        positions,
        table,
        slots,
        k_plane,
        v_plane,
        heads,
        kv_heads,
        dim,
        *norms,
        implementation=implementation,
        library=library,
    )
    return q, k_plane, v_plane


@pytest.mark.parametrize("implementation", ["torch", "native"])
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "dim"),
    [(1, 9, 3, 64), (3, 4, 1, 80), (33, 4, 4, 128), (90, 9, 3, 64), (5, 3, 1, 6)],
)
def test_close_to_float32(implementation, with_norm, tokens, heads, kv_heads, dim, library_for):
    library = library_for(implementation)
    torch.manual_seed(tokens * dim)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim).to(BF16)
    positions, slots = torch.randint(0, 300, (tokens,)), torch.randperm(128)[:tokens]
    norms = tuple(torch.rand(2, dim).add_(0.5).to(BF16)) if with_norm else (None, None)
    shape = (heads, kv_heads, dim)

    found = run(qkv, positions, slots, *shape, norms, implementation, library)
    exact = run(qkv.float(), positions, slots, *shape, norms, "reference", None)
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one.float(), other, rtol=1e-2, atol=2e-2)
    assert torch.equal(found[2].float(), exact[2])  # v is copied as it is
    untouched = torch.ones(128, dtype=torch.bool)
    untouched[slots] = False
    assert (found[1][untouched] == 7).all()


@pytest.mark.parametrize("implementation", ["reference", "torch", "native"])
def test_a_known_rotation(implementation, library_for):
    """A quarter turn takes (1, 0) to (0, 1); position 0 leaves a head as it is."""
    table = torch.tensor([[1.0, 0.0], [math.cos(math.pi / 2), 1.0]])
    k_plane, v_plane = torch.zeros(2, 2, 1, 2, dtype=BF16)
    qkv = torch.tensor([[1.0, 0, 1, 0, 5, 6]] * 2, dtype=BF16)
    q = rope_write_kv(
        qkv,
        torch.tensor([0, 1]),
        table,
        torch.tensor([1, 0]),
        k_plane,
        v_plane,
        1,
        1,
        2,
        implementation=implementation,
        library=library_for(implementation),
    )
    torch.testing.assert_close(q[:, 0].float(), torch.tensor([[1.0, 0], [0, 1]]), atol=1e-6, rtol=0)
    assert k_plane[1, 0].tolist() == [1, 0]
    assert v_plane[0, 0].tolist() == [5, 6]


def test_refusals():
    qkv, one = torch.zeros(1, 6), torch.zeros(1, dtype=torch.int64)
    planes = torch.zeros(2, 4, 1, 2)
    good = [qkv, one, torch.zeros(3, 2), one, planes[0], planes[1], 1, 1, 2]

    def refuse(words, at, value, **more):
        with pytest.raises(ValueError, match=words):
            rope_write_kv(*good[:at], value, *good[at + 1 :], **more)

    refuse("qkv must have shape", 0, torch.zeros(1, 5))
    refuse("positions must be torch.int64", 1, one.int())
    refuse("slots must have shape", 3, torch.zeros(2, dtype=torch.int64))
    refuse("both or not at all", 0, qkv, q_norm=torch.ones(2))
