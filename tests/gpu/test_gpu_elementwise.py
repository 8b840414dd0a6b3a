"""The elementwise kernels at serving sizes, beside the reference on the same device."""

from __future__ import annotations

import pytest
import torch

from kernels import merge_state, ops, step_inputs

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
TOKENS = [1, 7, 16, 65, 300, 2048]


@pytest.fixture
def ours() -> ops.Ops:
    return ops.select("triton")


@pytest.fixture
def exact() -> ops.Ops:
    return ops.select("reference")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(11)


def random(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def angles(context: int, head_dim: int) -> torch.Tensor:
    turns = torch.rand(context, head_dim // 2, device="cuda") * 6.3
    return torch.cat((turns.cos(), turns.sin()), dim=1)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("size", [576, 1024, 4096, 5120, 8192])
def test_norms(ours, exact, tokens, size):
    x, residual, weight = random(tokens, size), random(tokens, size), random(size)
    found = ours.rms_norm(x, weight, 1e-6)
    torch.testing.assert_close(found, exact.rms_norm(x, weight, 1e-6), rtol=8e-3, atol=1e-6)
    wanted, total = exact.add_rms_norm(x, residual, weight, 1e-6)
    found, kept = ours.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(kept, total)
    torch.testing.assert_close(found, wanted, rtol=8e-3, atol=1e-6)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("size", [1536, 3072, 14336, 17408])
def test_gates(ours, exact, tokens, size):
    gate_up = random(tokens, 2 * size) * 4
    found = ours.silu_mul(gate_up)
    torch.testing.assert_close(found, exact.silu_mul(gate_up), rtol=8e-3, atol=1e-6)


@pytest.mark.parametrize("dtype", [BF16, E4M3])
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "has_norms"),
    [
        (16, 8, 128, True),
        (32, 8, 128, False),
        (9, 3, 64, False),
        (14, 2, 64, False),
        (8, 1, 256, True),
    ],
)
def test_rotations(ours, exact, tokens, heads, kv_heads, dim, has_norms, dtype):
    qkv = random(tokens, (heads + 2 * kv_heads) * dim)
    table, positions = angles(5000, dim), torch.randint(0, 5000, (tokens,), device="cuda")
    slots = torch.randperm(4096, device="cuda")[:tokens]
    weights = tuple(random(2, dim)) if has_norms else (None, None)
    scales = (0.04, 0.01) if dtype == E4M3 else (1.0, 1.0)
    results = []
    for each in (ours, exact):
        planes = torch.full((2, 4096, kv_heads, dim), 3.0, device="cuda").to(dtype)
        where, own = (positions, table, slots, *planes), qkv.clone()
        shape = (heads, kv_heads, dim, *weights, 1e-6)
        q = each.rope_write_kv(own, *where, *shape, *scales, True)
        assert torch.equal(each.rope_write_kv(qkv.clone(), *where, *shape, *scales), q)
        results.append((q, planes, own))
    (q, planes, kept), (wanted_q, wanted, wanted_kept) = results
    # Where a number lies in the middle between two of e4m3's, the last bit before decides.
    rtol = 0.13 if dtype == E4M3 else 8e-3
    torch.testing.assert_close(kept, wanted_kept, rtol=rtol, atol=1e-5)
    torch.testing.assert_close(q, wanted_q, rtol=8e-3, atol=1e-5)
    torch.testing.assert_close(planes.float(), wanted.float(), rtol=rtol, atol=2**-9)
    differing = (planes.float() != wanted.float()).float().mean()
    assert differing < 1e-3
    assert torch.equal(planes[1].float(), wanted[1].float()) or dtype == E4M3


def test_a_row_has_the_same_bits_alone(ours):
    x, weight, gate_up = random(513, 4096), random(4096), random(513, 2 * 14336)
    normed, gated = ours.rms_norm(x, weight, 1e-6), ours.silu_mul(gate_up)
    for t in (0, 200, 512):
        row = slice(t, t + 1)
        assert torch.equal(ours.rms_norm(x[row].clone(), weight, 1e-6), normed[row])
        assert torch.equal(ours.silu_mul(gate_up[row].clone()), gated[row])
    some = slice(100, 117)
    assert torch.equal(ours.rms_norm(x[some].clone(), weight, 1e-6), normed[some])


def test_one_launcher_tells_types_and_alignment_apart(ours, exact):
    """What was compiled for one call is not taken for the next: a view two bytes on is no multiple of
    sixteen, and other types have other sizes."""
    for dtype in (BF16, torch.float16, torch.float32, BF16):
        for first in (0, 1, 0):
            x = random(3 * 1024 + first, dtype=dtype)[first:].view(3, 1024)
            weight = random(1024 + first, dtype=dtype)[first:]
            assert (x.data_ptr() % 16 == 0) == (first == 0)
            found = ours.rms_norm(x, weight, 1e-6)
            wanted = exact.rms_norm(x, weight, 1e-6)
            torch.testing.assert_close(found, wanted, rtol=8e-3, atol=1e-6)


def test_a_graph_of_dependent_launches_gives_the_bits_of_single_ones(ours):
    """Hundreds of short kernels, each reading what the one before wrote, in buffers used again: the
    blocks of each are let in early, and none may look before it is time."""
    tokens, heads, kv_heads, dim = 8, 8, 4, 128
    hidden = (heads + 2 * kv_heads) * dim  # the rotation takes what the norm gives
    start, weight, table = random(tokens, hidden), random(hidden), angles(512, dim)
    widen = random(hidden - heads * dim)
    slots, positions = torch.randperm(64, device="cuda")[:tokens], torch.arange(tokens).cuda()
    planes = torch.zeros(2, 64, kv_heads, dim, device="cuda", dtype=BF16)

    def layer(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = ours.add_rms_norm(x, residual, weight, 1e-6)
        q = ours.rope_write_kv(x, positions, table, slots, *planes, heads, kv_heads, dim)
        wide = torch.cat((q.view(tokens, -1), widen.expand(tokens, -1)), dim=1)
        gated = ours.silu_mul(torch.cat((wide, planes[:, slots].view(2, tokens, -1)[0]), dim=1))
        return torch.nn.functional.pad(gated, (0, hidden - gated.shape[1]), value=0.5), residual

    def work() -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = start.clone(), start.clone()
        for _ in range(40):
            x, residual = layer(x, residual)
            x, residual = ours.add_rms_norm(x, residual, weight, 1e-6)
            x, residual = ours.add_rms_norm(x, residual, weight, 1e-6)
        return x, residual

    def one_by_one() -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = start.clone(), start.clone()
        for _ in range(40):
            x, residual = layer(x, residual)
            torch.cuda.synchronize()
            x, residual = ours.add_rms_norm(x, residual, weight, 1e-6)
            torch.cuda.synchronize()
            x, residual = ours.add_rms_norm(x, residual, weight, 1e-6)
            torch.cuda.synchronize()
        return x, residual

    wanted, wanted_planes = [each.clone() for each in one_by_one()], planes.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = work()
    for _ in range(30):
        planes.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(one, other) for one, other in zip(made, wanted, strict=True))
        assert torch.equal(planes, wanted_planes)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("size", [576, 4096])
def test_embedded_tokens(ours, exact, tokens, size):
    weight, token_ids = random(150000, size), torch.randint(0, 150000, (tokens,), device="cuda")
    assert torch.equal(ours.embed(token_ids, weight), exact.embed(token_ids, weight))


@pytest.mark.parametrize("rows", [1, 33, 256])
def test_step_inputs(rows):
    mine, right = step_inputs.select("triton"), step_inputs.select("reference")
    table = torch.randint(0, 2**27, (300, 600), dtype=torch.int32, device="cuda")
    last = torch.randint(0, 150000, (300,), device="cuda")
    which = torch.randperm(300, device="cuda")[:rows].int()
    starts = torch.randint(0, 9600, (rows,), dtype=torch.int32, device="cuda")
    found, wanted = torch.zeros(2, 3, rows, dtype=torch.int64, device="cuda")
    mine.decode_inputs(which, starts, table, last, 16, *found)
    right.decode_inputs(which, starts, table, last, 16, *wanted)
    assert torch.equal(found, wanted)
    where = torch.randperm(table.numel(), device="cuda")[: rows * 3].int()
    tables, lasts = (table.clone(), table.clone()), (last.clone(), last.clone())
    for each, its_table, its_last in zip((mine, right), tables, lasts, strict=True):
        each.write_table(its_table, where, where + 5)
        each.remember(its_last, which, found[0] + 1)
    assert torch.equal(*tables)
    assert torch.equal(*lasts)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize(("tokens", "heads", "dim"), [(1, 32, 128), (300, 40, 128), (17, 3, 80)])
def test_merged_states(tokens, heads, dim, dtype):
    outs = random(2, tokens, heads, dim, dtype=dtype)
    lses = random(2, tokens, heads, dtype=torch.float32) * 20
    lses[0, ::3] = float("-inf")
    outs[0, ::3] = float("nan")
    sides = (outs[0], lses[0], outs[1], lses[1])
    found, wanted = merge_state.select("triton")(*sides), merge_state.select("reference")(*sides)
    torch.testing.assert_close(found[0], wanted[0], rtol=8e-3 if dtype == BF16 else 1e-5, atol=1e-5)
    torch.testing.assert_close(found[1], wanted[1], rtol=1e-5, atol=1e-5)
