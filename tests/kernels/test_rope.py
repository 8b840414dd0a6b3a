from __future__ import annotations

import math

import pytest
import torch

from kernels.rope import rope_write_kv

BF16 = torch.bfloat16
SLOTS = [8, 3, 1, 5]


def angles(context: int, head_dim: int) -> torch.Tensor:
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    table = torch.arange(context)[:, None] * frequencies
    return torch.cat((table.cos(), table.sin()), dim=1)


def run(qkv, positions, slots, heads, kv_heads, dim, norms, implementation, library):
    k_plane, v_plane = torch.full((2, 128, kv_heads, dim), 7.0, dtype=qkv.dtype, device=qkv.device)
    table = angles(300, dim).to(qkv.device)
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


@pytest.mark.parametrize("implementation", ["torch", "native", "triton"])
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "dim"),
    [(1, 9, 3, 64), (3, 4, 1, 80), (33, 4, 4, 128), (90, 9, 3, 64), (5, 3, 1, 6)],
)
def test_close_to_float32(
    implementation, with_norm, tokens, heads, kv_heads, dim, library_for, device_for
):
    library, device = library_for(implementation), device_for(implementation)
    if implementation == "triton" and device == "cpu":
        tokens = min(tokens, 10)  # a hundred times slower there
    torch.manual_seed(tokens * dim)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim).to(BF16).to(device)
    positions, slots = torch.randint(0, 300, (tokens,)), torch.randperm(128)[:tokens]
    positions, slots = positions.to(device), slots.to(device)
    norms = torch.rand(2, dim).add_(0.5).to(BF16).to(device)
    norms = tuple(norms) if with_norm else (None, None)
    shape = (heads, kv_heads, dim)

    found = run(qkv, positions, slots, *shape, norms, implementation, library)
    exact = run(qkv.float(), positions, slots, *shape, norms, "reference", None)
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one.float(), other, rtol=1e-2, atol=2e-2)
    assert torch.equal(found[2].float(), exact[2])  # v is copied as it is
    untouched = torch.ones(128, dtype=torch.bool)
    untouched[slots.cpu()] = False
    assert (found[1][untouched] == 7).all()


@pytest.mark.parametrize("implementation", ["reference", "torch", "native", "triton"])
def test_a_known_rotation(implementation, library_for, device_for):
    """A quarter turn takes (1, 0) to (0, 1); position 0 leaves a head as it is."""
    device = device_for(implementation)
    table = torch.tensor([[1.0, 0.0], [math.cos(math.pi / 2), 1.0]], device=device)
    k_plane, v_plane = torch.zeros(2, 2, 1, 2, dtype=BF16, device=device)
    qkv = torch.tensor([[1.0, 0, 1, 0, 5, 6]] * 2, dtype=BF16, device=device)
    q = rope_write_kv(
        qkv,
        torch.tensor([0, 1], device=device),
        table,
        torch.tensor([1, 0], device=device),
        k_plane,
        v_plane,
        1,
        1,
        2,
        implementation=implementation,
        library=library_for(implementation),
    )
    torch.testing.assert_close(
        q[:, 0].float().cpu(), torch.tensor([[1.0, 0], [0, 1]]), atol=1e-6, rtol=0
    )
    assert k_plane[1, 0].tolist() == [1, 0]
    assert v_plane[0, 0].tolist() == [5, 6]


def rotate_and_keep(qkv, planes, *norms, **options):
    """4 heads and 2 of K and V, of 64 numbers each. Returns qkv's heads before it, and q, k, v behind
    it; the planes' rows are those of `SLOTS`."""
    given = qkv.clone().view(4, 8, 64)
    positions, slots = torch.tensor([[7, 0, 250, 31], SLOTS], device=qkv.device)
    table = angles(300, 64).to(qkv.device)
    rope_write_kv(qkv, positions, table, slots, *planes, 4, 2, 64, *norms, keep=True, **options)
    return given, qkv.view(4, 8, 64).split((4, 2, 2), dim=1)


@pytest.mark.parametrize("implementation", ["reference", "torch", "native", "triton"])
def test_kept_k_takes_its_place_in_qkv(implementation, library_for, device_for):
    library, device = library_for(implementation), device_for(implementation)
    torch.manual_seed(3)
    qkv = torch.randn(4, 8 * 64).to(BF16).to(device)
    k_plane, v_plane = planes = torch.zeros(2, 9, 2, 64, dtype=BF16, device=device)
    norms = torch.rand(2, 64, device=device).to(BF16)
    given, (q, k, v) = rotate_and_keep(
        qkv, planes, *norms, implementation=implementation, library=library
    )
    assert torch.equal(k, k_plane[SLOTS]) and not torch.equal(k, given[:, 4:6])
    assert torch.equal(q, given[:, :4])
    assert torch.equal(v, given[:, 6:]) and torch.equal(v, v_plane[SLOTS])


@pytest.mark.parametrize("implementation", ["reference", "torch", "triton"])
def test_what_is_kept_is_what_a_narrow_plane_holds(implementation, library_for, device_for):
    library, device = library_for(implementation), device_for(implementation)
    torch.manual_seed(3)
    qkv = torch.randn(4, 8 * 64).mul_(30).to(BF16).to(device)
    planes = torch.zeros(2, 9, 2, 64, device=device).to(torch.float8_e4m3fn)
    given, (q, k, v) = rotate_and_keep(
        qkv, planes, k_scale=0.3, v_scale=0.25, implementation=implementation, library=library
    )
    assert torch.equal(q, given[:, :4])
    for kept, plane, scale in zip((k, v), planes, (0.3, 0.25), strict=True):
        # The interpreter cuts off where the others round.
        torch.testing.assert_close(kept.float(), plane.float()[SLOTS] * scale, rtol=8e-3, atol=0.0)
    assert not torch.equal(v, given[:, 6:])


@pytest.mark.parametrize("implementation", ["reference", "torch", "triton"])
def test_planes_in_e4m3_hold_value_over_scale(implementation, library_for, device_for):
    """Numbers that e4m3 holds, and two beyond its range; a quarter turn moves them unrounded."""
    library_for(implementation)
    device = device_for(implementation)
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = numbers[numbers.isfinite()]  # 254
    grid = torch.cat((numbers, torch.tensor([900.0, -460.0]))).view(1, 256).to(device)
    k_scale, v_scale = 0.5, 4.0
    turned = torch.cat((grid[:, 128:], -grid[:, :128]), dim=1)  # -90 degrees, undone by the turn
    qkv = torch.cat((torch.ones_like(grid), turned * k_scale, grid * v_scale), dim=1).to(BF16)
    quarter = torch.cat((torch.zeros(1, 128), torch.ones(1, 128)), dim=1).to(device)
    k_plane, v_plane = torch.zeros(2, 3, 1, 256, device=device).to(torch.float8_e4m3fn)
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    rope_write_kv(
        qkv,
        zero,
        quarter,
        zero + 1,
        k_plane,
        v_plane,
        1,
        1,
        256,
        k_scale=k_scale,
        v_scale=v_scale,
        implementation=implementation,
    )
    wanted = grid[0].clamp(-448, 448)
    assert torch.equal(v_plane[1, 0].float(), wanted)
    assert torch.equal(k_plane[1, 0].float(), wanted)
    assert not k_plane[0].float().any() and not v_plane[2].float().any()


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
    refuse("scale must be 1 for planes of torch.float32", 0, qkv, v_scale=0.5)
    refuse("must be above 0", 0, qkv, k_scale=0.0)
    refuse("v_plane must be torch.float32", 5, planes[1].half())
