"""Latent attention on a GPU: kernels at the sizes that are served, memory that does not grow with a
prefix, and a small model whose answers no way of running it changes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gpu_engine import EAGER, Built, ask, batch, build, expect_near, expect_same

from kernels.merge_state import select
from srt.attention.mla import MlaAttention
from srt.attention.mla_plan import MlaSettings
from srt.layers.latent import LatentArch
from tests.latent_batches import LatentBatch, literal

LITE = LatentArch(rank=512, nope=128, rope=64, value=128, q_rank=None, scale=0.1, interleaved=True)
SUM = 1e-5
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


def case_of(starts: tuple[int, ...], lengths: tuple[int, ...], decodes: int = 0) -> LatentBatch:
    return LatentBatch(
        starts=starts,
        lengths=lengths,
        decodes=decodes,
        latent=LITE,
        heads=16,
        page=16,
        dtype=torch.bfloat16,
        device="cuda",
    )


def run(case: LatentBatch, settings: MlaSettings) -> tuple[torch.Tensor, MlaAttention]:
    from srt.attention.mla_triton import TritonMla

    core = TritonMla(16, deterministic=settings.deterministic)
    attention = MlaAttention(core, core, select("triton"), [case.up], settings)
    attention.plan(case.batch)
    out = attention.forward(case.q, 0, case.pool, scale=LITE.scale, window=None)
    return out, attention


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


@pytest.mark.parametrize(("chunk", "form"), [(1024, "chunked"), (65536, "one-shot")])
def test_expanded(chunk: int, form: str) -> None:
    prefixes = (0, 1, 1023, 1024, 3077)
    case = case_of((77, *prefixes), (1, *[400] * len(prefixes)), 1)
    out, attention = run(case, MlaSettings(chunk_tokens=chunk, may_expand=True))
    assert attention.form == form
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
