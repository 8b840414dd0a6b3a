"""The kernels of latent attention: interpreted on a CPU, compiled where there is a GPU."""

from __future__ import annotations

import os

import pytest
import torch

from kernels.latent_write import write_latent
from kernels.mla_attention import attend_latents, attend_spans
from srt.layers.latent import LatentArch
from tests.latent_batches import LatentBatch, literal
from tests.triton_loops import mend_loop_bounds

pytest.importorskip("triton", reason="triton is not installed")
CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when the kernels are defined

DEVICE = "cuda" if CUDA else "cpu"
SMALL = LatentArch(rank=32, nope=32, rope=16, value=16, q_rank=None, scale=0.2, interleaved=True)


@pytest.fixture(autouse=True)
def loops(monkeypatch: pytest.MonkeyPatch) -> None:
    mend_loop_bounds(monkeypatch)


@pytest.mark.parametrize("heads", [16, 6, 32])
@pytest.mark.parametrize(
    ("starts", "lengths"),
    [
        ((0, 1, 200, 130), (1, 1, 1, 1)),
        ((700,), (1,)),
        ((0, 140, 31), (9, 1, 40)),
        ((300,), (5,)),
    ],
)
@pytest.mark.parametrize("page", [16, 64])
def test_latents(starts: tuple[int, ...], lengths: tuple[int, ...], heads: int, page: int) -> None:
    case = LatentBatch(
        starts=starts,
        lengths=lengths,
        latent=SMALL,
        heads=heads,
        page=page,
        dtype=torch.bfloat16,
        device=DEVICE,
    )
    batch, q_latent = case.batch, case.up.absorb(case.q)
    given = (q_latent, case.q, case.pool.keys(0), batch.page_table, batch.rows, batch.starts)
    rest = (batch.lengths, page, SMALL.scale)
    expected = attend_latents(*given, *rest, implementation="reference")
    found = attend_latents(*given, *rest, implementation="triton")
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("queries", "keys", "causal"),
    [
        ((5, 130, 1), (5, 130, 1), True),
        ((3, 140), (77, 300), True),
        ((4, 200, 1), (64, 1, 131), False),
    ],
)
def test_spans(queries: tuple[int, ...], keys: tuple[int, ...], causal: bool) -> None:
    generator = torch.Generator().manual_seed(sum(keys))
    heads = 2

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device=DEVICE, dtype=torch.bfloat16)

    given = (noise(sum(queries), heads, 48), noise(sum(keys), heads, 48), noise(sum(keys), 16))
    spans = (queries, keys, causal, 0.2)
    expected = attend_spans(*given, *spans, implementation="reference")
    found = attend_spans(*given, *spans, implementation="triton")
    torch.testing.assert_close(found[0], expected[0], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("interleaved", [False, True])
def test_writing_latents(interleaved: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    tokens, heads, nope, rope, rank = 5, 6, 8, 8, 24

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device=DEVICE, dtype=torch.bfloat16)

    made = noise(tokens, heads * (nope + rope) + rank + rope)
    norm = noise(rank)
    positions = torch.tensor([3, 0, 9, 9, 1], device=DEVICE)
    slots = torch.tensor([7, 2, 11, 4, 5], device=DEVICE)
    angles = torch.randn(10, rope // 2, generator=generator).to(DEVICE)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    found = []
    for implementation in ("reference", "triton"):
        own = made.clone()
        q = own[:, : heads * (nope + rope)].view(tokens, heads, -1)
        latents = own[:, heads * (nope + rope) :]
        plane = torch.zeros(12, 1, rank + rope, dtype=torch.bfloat16, device=DEVICE)
        write_latent(
            q,
            latents,
            norm,
            positions,
            cos_sin,
            slots,
            plane,
            1e-6,
            interleaved,
            implementation=implementation,
        )
        found.append((own, plane))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(theirs, mine, rtol=1e-2, atol=1e-2)
    assert not torch.equal(found[0][0], made)


def test_what_does_not_fit_is_named() -> None:
    q = torch.zeros(2, 1, 8)
    table = torch.zeros(1, 1, dtype=torch.int32)
    ones = torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="lengths sum to 1"):
        attend_latents(q, q, torch.zeros(4, 1, 12), table, ones, ones, ones, 4, 1.0)
    with pytest.raises(ValueError, match="plane holds 8"):
        attend_latents(q, q, torch.zeros(4, 1, 8), table, ones, ones, ones, 4, 1.0)
    turned = torch.zeros(1, 2)
    with pytest.raises(ValueError, match="as many keys as queries"):
        attend_spans(q, torch.zeros(1, 1, 10), turned, (2,), (1,), True, 1.0)
    with pytest.raises(ValueError, match="turned meets 2"):
        attend_spans(q, torch.zeros(1, 1, 6), turned, (2,), (1,), False, 1.0)


@pytest.mark.parametrize(
    ("chunk", "may_expand", "form"),
    [(24, True, "chunked"), (4096, True, "one-shot"), (24, False, "absorbed")],
)
def test_every_form_through_the_backend(chunk: int, may_expand: bool, form: str) -> None:
    from kernels.merge_state import select
    from srt.attention.mla import MlaAttention
    from srt.attention.mla_plan import MlaSettings
    from srt.attention.mla_triton import TritonMla

    prefixes = (0, 1, 23, 24, 77)
    case = LatentBatch(
        starts=(5, 60, *prefixes),
        lengths=(1, 1, *[100] * len(prefixes)),
        decodes=2,
        latent=SMALL,
        heads=4,
        page=16,
        dtype=torch.bfloat16,
        device=DEVICE,
    )
    core = TritonMla(4)
    settings = MlaSettings(chunk_tokens=chunk, may_expand=may_expand)
    attention = MlaAttention(core, core, select("triton"), [case.up], settings)
    attention.plan(case.batch)
    out = attention.forward(case.q, 0, case.pool, scale=SMALL.scale, window=None)
    assert attention.form == form
    torch.testing.assert_close(out.float(), literal(case), rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize(("starts", "heads"), [((5, 900, 0), 6), ((300,) * 12, 4)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_decodes_through_the_backend(
    starts: tuple[int, ...], heads: int, deterministic: bool
) -> None:
    from srt.attention.mla_triton import TritonMla

    case = LatentBatch(
        starts=starts,
        lengths=(1,) * len(starts),
        decodes=len(starts),
        latent=SMALL,
        heads=heads,
        page=16,
        dtype=torch.bfloat16,
        device=DEVICE,
    )
    core = TritonMla(heads, deterministic=deterministic)
    core.plan(case.batch)
    out = core.absorbed(case.q, 0, case.pool, case.up, SMALL.scale)
    torch.testing.assert_close(out.float(), literal(case), rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("starts", [(5, 300), (0, 17, 900)])
def test_recorded_slices_of_one_length(starts: tuple[int, ...]) -> None:
    """Their tiles are cut by the kernel, out of what the tensors hold when it runs."""
    from srt.attention.mla_triton import TritonMla

    case = LatentBatch(
        starts=starts,
        lengths=(7,) * len(starts),
        latent=SMALL,
        heads=6,
        page=16,
        dtype=torch.bfloat16,
        device=DEVICE,
    )
    core, now = TritonMla(6), case.batch.starts.clone()
    case.batch.starts.zero_()
    core.capture(case.batch)
    case.batch.starts.copy_(now)
    out = core.absorbed(case.q, 0, case.pool, case.up, SMALL.scale)
    torch.testing.assert_close(out.float(), literal(case), rtol=3e-2, atol=3e-2)
