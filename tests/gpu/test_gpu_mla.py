"""Latent attention on a GPU: kernels at the sizes that are served, memory that does not grow with a
prefix, and a small model whose answers no way of running it changes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import pytest
import torch
from gpu_engine import EAGER, Built, ask, batch, build, expect_near, expect_same

from kernels.merge_state import select
from kernels.mla_attention.reference import attend_spans
from srt.attention.mla import MlaAttention, MlaCore, Spans
from srt.attention.mla_plan import MlaSettings
from srt.layers.latent import LatentArch
from tests.latent_batches import LatentBatch, literal

LITE = LatentArch(rank=512, nope=128, rope=64, value=128, q_rank=None, scale=0.1, interleaved=True)
SUM = 1e-5
PROCESSORS = 132
NOTHING = -1e4  # a logarithm below it weighs nothing beside any other: FlashInfer's of no keys
CORES = ["triton", "flashinfer"]
Core = Literal["triton", "flashinfer"]
MODEL = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "kv_lora_rank": 128,
    "q_lora_rank": None,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 998,
    "eos_token_id": 999,
    "torch_dtype": "bfloat16",
}
DUMMY = ("--load-format", "dummy", "--seed", "3")


def case_of(
    starts: tuple[int, ...], lengths: tuple[int, ...], decodes: int = 0, *, heads: int = 16
) -> LatentBatch:
    return LatentBatch(
        starts=starts,
        lengths=lengths,
        decodes=decodes,
        latent=LITE,
        heads=heads,
        page=16,
        dtype=torch.bfloat16,
        device="cuda",
    )


def core_of(name: Core, heads: int = 16) -> MlaCore:
    from srt.attention.mla_triton import TritonMla

    if name == "triton":
        return TritonMla(heads)
    if find_spec("flashinfer") is None:
        pytest.skip("flashinfer is not installed")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("FlashInfer's FA3 is Hopper's")
    from srt.attention.mla_flashinfer import FlashInferMla

    return FlashInferMla()


def build_attention(case: LatentBatch, settings: MlaSettings, name: Core) -> MlaAttention:
    from srt.attention.mla_triton import TritonMla

    core = TritonMla(16, deterministic=settings.deterministic)
    expands = core if name == "triton" else core_of(name)
    return MlaAttention(core, expands, select("triton"), [case.up], settings)


def forward(case: LatentBatch, attention: MlaAttention) -> torch.Tensor:
    attention.plan(case.batch)
    return attention.forward(case.q, 0, case.pool, scale=LITE.scale, window=None)


def run(
    case: LatentBatch, settings: MlaSettings, name: Core = "triton"
) -> tuple[torch.Tensor, MlaAttention]:
    attention = build_attention(case, settings, name)
    return forward(case, attention), attention


@pytest.mark.parametrize(
    ("starts", "lengths", "decodes"),
    [
        ((4095,), (1,), 1),
        ((0, 17, 2000, 4000) * 4, (1,) * 16, 16),
        ((100, 3000), (1, 1), 2),
        ((50, 900, 0), (1, 30, 170), 1),
    ],
)
@pytest.mark.parametrize("deterministic", [False, True])
def test_absorbed(
    starts: tuple[int, ...], lengths: tuple[int, ...], decodes: int, deterministic: bool
) -> None:
    case = case_of(starts, lengths, decodes)
    settings = MlaSettings(chunk_tokens=64, may_expand=False, deterministic=deterministic)
    out, _ = run(case, settings)
    torch.testing.assert_close(out.float(), literal(case), rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("heads", [1, 8, 16, 64, 128])
@pytest.mark.parametrize(
    ("starts", "lengths", "decodes"),
    [
        ((0, 14, 15, 16, 999, 4096) * 3, (1,) * 18, 18),
        ((32767,), (1,), 1),
        ((0, 63) * 128, (1,) * 256, 256),
        ((100, 4000, 77), (170, 9, 64), 0),
        ((2000, 0, 17, 3000), (1, 1, 33, 150), 2),
    ],
)
def test_flashinfer_absorbs(
    starts: tuple[int, ...], lengths: tuple[int, ...], decodes: int, heads: int
) -> None:
    case = case_of(starts, lengths, decodes, heads=heads)
    core = core_of("flashinfer", heads)
    settings = MlaSettings(chunk_tokens=64, may_expand=False)
    attention = MlaAttention(core, core, select("triton"), [case.up], settings)
    right = literal(case)
    for _ in range(3):  # wrappers are planned again
        out = forward(case, attention)
        assert attention.form in (None, "absorbed")
        torch.testing.assert_close(out.float(), right, rtol=3e-2, atol=3e-2)


def test_flashinfer_both_forms_in_a_step() -> None:
    case = case_of((77, 4096, 0, 1023, 3077), (1, 1, 400, 400, 400), 2)
    core = core_of("flashinfer")
    settings = MlaSettings(chunk_tokens=1024, may_expand=True)
    attention = MlaAttention(core, core, select("triton"), [case.up], settings)
    for _ in range(3):
        out = forward(case, attention)
        assert attention.form == "chunked"
        torch.testing.assert_close(out.float(), literal(case), rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("heads", [16, 128])
def test_flashinfer_recorded_decodes_are_the_eager_ones(heads: int) -> None:
    """Recorded at the shortest lengths there are, played at others; plans leave while others compute."""
    case = case_of((14, 15, 16, 999, 4096, 0, 7000), (1,) * 7, 7, heads=heads)
    settings = MlaSettings(chunk_tokens=64, may_expand=False)
    core = core_of("flashinfer", heads)
    attention = MlaAttention(core, core, select("triton"), [case.up], settings)

    def attend() -> torch.Tensor:
        return attention.forward(case.q, 0, case.pool, scale=LITE.scale, window=None)

    lengths = [
        case.batch.starts_host,
        [0] * 7,
        [start // 2 for start in case.batch.starts_host],
        [max(0, start - 1) for start in case.batch.starts_host],
    ]
    eager = []
    for starts in lengths:
        attention.plan(replace(case.batch, starts_host=starts))
        eager.append(attend())
    torch.testing.assert_close(eager[0].float(), literal(case), rtol=3e-2, atol=3e-2)

    recorded = replace(case.batch, starts_host=[0] * 7)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        attention.capture(recorded)
        attend()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    found = []
    for starts in lengths * 3:  # nothing waits in between
        recorded.starts_host = starts
        attention.replay(recorded)
        graph.replay()
        found.append(out.clone())
    for mine, right in zip(found, eager * 3, strict=True):
        torch.testing.assert_close(mine, right, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("queries", "keys", "causal"),
    [
        ((70, 300, 129), (500, 300, 4000), True),
        ((8, 1, 200), (64, 1, 1000), False),
        ((300, 5), (0, 130), False),  # nothing to see: an lse of -inf
        ((1000,) * 3, (1000,) * 3, True),
        ((512, 512), (4096, 4096), False),
    ],
)
@pytest.mark.parametrize("name", CORES)
def test_spans(queries: tuple[int, ...], keys: tuple[int, ...], causal: bool, name: Core) -> None:
    """Against the formula: what comes out and the logarithm of the sums, of queries that lie apart."""
    if name == "triton" and 0 in keys:
        pytest.skip("a chunk holds no empty prefix")
    case = case_of((0,), (1,))
    made = torch.randn(sum(queries), 16 * LITE.query + LITE.width, device="cuda").bfloat16()
    q = made[:, : 16 * LITE.query].view(-1, 16, LITE.query)
    latents = torch.randn(sum(keys), LITE.width, device="cuda").bfloat16()
    core = core_of(name)
    core.start()
    spans = Spans(queries, keys, causal)
    up = case.up
    turned = latents[:, LITE.rank :]
    right, right_lse = attend_spans(
        q, up.project(latents), turned, queries, keys, causal, LITE.scale
    )
    for _ in range(2):  # the second without a plan
        out, lse = core.attend(q, latents, up, spans, LITE.scale)
        seeing = right_lse > -torch.inf
        assert torch.equal(lse > NOTHING, seeing) and lse.shape == right_lse.shape
        torch.testing.assert_close(out[seeing], right[seeing], rtol=3e-2, atol=3e-2)
        torch.testing.assert_close(lse[seeing], right_lse[seeing], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("chunk", "processors", "form"),
    [
        (1024, 1, "chunked"),
        (1024, PROCESSORS, "chunked"),
        (65536, 1, "one-shot"),
        (65536, PROCESSORS, "one-shot"),
    ],
)
@pytest.mark.parametrize("name", CORES)
def test_expanded(chunk: int, processors: int, form: str, name: Core) -> None:
    prefixes = (0, 1, 1023, 1024, 3077)
    case = case_of((77, *prefixes), (1, *[400] * len(prefixes)), 1)
    settings = MlaSettings(chunk_tokens=chunk, may_expand=True, processors=processors)
    out, attention = run(case, settings, name)
    assert attention.form == form
    torch.testing.assert_close(out.float(), literal(case), rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("name", CORES)
def test_few_queries_see_a_long_prefix_in_parts(name: Core) -> None:
    case = case_of((16000, 9000), (200, 250))  # 64 tiles: two parts
    settings = MlaSettings(chunk_tokens=32768, may_expand=True, processors=PROCESSORS)
    attention = build_attention(case, settings, name)
    whole, _ = run(case, MlaSettings(chunk_tokens=32768, may_expand=True), name)
    for _ in range(3):  # wrappers are planned again
        out = forward(case, attention)
        assert attention.form == "chunked"
        torch.testing.assert_close(out.float(), literal(case), rtol=3e-2, atol=3e-2)
        torch.testing.assert_close(out, whole, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("name", CORES)
def test_steps_in_flight_do_not_share_a_plan(name: Core) -> None:
    """Plans of later steps leave while earlier steps compute."""
    settings = MlaSettings(chunk_tokens=2048, may_expand=True)
    cases = [case_of((0, 700 * i), (600 + i, 300)) for i in range(6)]
    attention = build_attention(cases[0], settings, name)
    for case in cases:
        case.up = cases[0].up
    torch.cuda.synchronize()
    outs = [forward(case, attention) for case in cases]
    for case, out in zip(cases, outs, strict=True):
        torch.testing.assert_close(out.float(), literal(case), rtol=3e-2, atol=3e-2)


def test_memory_does_not_grow_with_the_prefix() -> None:
    peaks = []
    for prefix in (8192, 32768):
        case = case_of((prefix,), (512,))
        settings = MlaSettings(chunk_tokens=4096, may_expand=True)
        run(case, settings)
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        _, attention = run(case, settings)
        assert attention.form == "chunked" and attention.most_expanded == 4096
        peaks.append(torch.cuda.max_memory_allocated() - held)
    assert peaks[1] < 1.1 * peaks[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("deepseek")
    (made / "config.json").write_text(json.dumps(MODEL))
    return made


@pytest.fixture(scope="module")
def deepseek(folder: Path, cache: str) -> Iterator[Built]:
    with build(folder, cache, *DUMMY) as built:
        yield built


def test_recorded_steps_are_near_the_eager_ones(deepseek: Built, folder: Path, cache: str) -> None:
    works = batch(temperature=0.0)
    with build(folder, cache, *DUMMY, *EAGER) as eager:
        expect_near(deepseek.run(works), eager.run(works), 0.15, least=24)


def test_overlap_changes_nothing(deepseek: Built) -> None:
    works = batch()
    expect_same(deepseek.run(works, depth=1), deepseek.run(works))


def test_deterministic_answers_are_the_same_in_company_and_in_pieces(
    folder: Path, cache: str
) -> None:
    with build(folder, cache, *DUMMY, "--deterministic") as built:
        works = batch()
        alone = {}
        for work in works:
            alone |= built.run([work], chunked_prefill_size=4096, max_step_tokens=4096)
        expect_same(built.run(works), alone, SUM)
        expect_same(built.run(works, chunked_prefill_size=23, depth=1), alone, SUM)
        driver = built.driver(radix_cache=True)
        driver.run([ask(work.uid + 50, 20 + 9 * work.uid, answer=1) for work in works])
        expect_same(driver.run(works), alone, SUM)
