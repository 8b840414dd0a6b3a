"""Block drafts on the compiled kernels against the references, in bfloat16 and with int8 linears."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kernels.native_build import Library, Unavailable, build
from kernels.ops import select
from srt.models.dspark import DsparkNetwork
from srt.protocols.forward_batch import ForwardBatch, Slice, Window
from srt.runner.model_runner import ModelRunner
from tests.block_drafts import draft_runner, make_draft
from tests.models.parity import make_prompt, save_tiny
from tests.tiny_models import TINY, Driver, make_spec, read_facts

PROMPT = make_prompt(97, 37)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    built = build(tmp_path_factory.mktemp("kernels"), shutil.which("cc"))
    if isinstance(built, Unavailable):
        pytest.skip(f"no native kernels: {built.reason}")
    return built


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    save_tiny(LlamaForCausalLM(LlamaConfig(**TINY)), folder)
    return folder


@pytest.mark.parametrize("quantization", (None, "int8"))
def test_native_equals_reference(
    quantization: str | None, library: Library, target_folder: Path, tmp_path: Path
) -> None:
    """The context of a prompt, a block behind it, the first step of the walk and its confidence."""
    draft = make_draft(tmp_path, "dspark", markov_head_type="gated")
    facts = read_facts(target_folder)
    features = torch.randn(37, 2 * 48, generator=torch.Generator().manual_seed(2)).bfloat16()
    found: dict[str, list[torch.Tensor]] = {}
    for implementation in ("native", "reference"):
        ops = select(implementation, library)
        target = ModelRunner(
            make_spec(facts, dtype="bfloat16"), facts, ops=ops, device=torch.device("cpu"), seed=0
        )
        target.load()
        target.allocate(num_pages=33, page_size=16, max_rows=2)
        runner = draft_runner(draft, target, ops, dtype="bfloat16", quantization=quantization)
        found[implementation] = run(runner, features)
    for native, reference in zip(found["native"], found["reference"], strict=True):
        error, size = (native - reference).float().abs(), reference.float().abs()
        assert size.mean() > 0.01
        assert error.mean() < 0.02 * size.mean()
        assert error.max() < 0.1 * size.max()


@torch.inference_mode()
def run(runner: ModelRunner, features: torch.Tensor) -> list[torch.Tensor]:
    """Keys and values of the context, logits of the block, bias and confidence of its guesses."""
    network = runner.network
    assert isinstance(network, DsparkNetwork)
    runner.write_table([Driver(runner).reserve(0, 45)])
    prompt = Slice(row=0, start=0, length=37, tokens=None, sample=False)
    positions, slots = runner.locate([prompt])
    network.backbone.inject(features, positions, slots, runner.pool)
    block = Slice(row=0, start=37, length=6, tokens=[5, *[96] * 5], sample=True, draft=5)
    block.window = Window(base=37, visible=[63] * 6, positions=list(range(37, 43)))
    inputs = runner.prepare(ForwardBatch(step=0, slices=[block]))
    states = network.backbone.forward(
        inputs.token_ids, inputs.attention, runner.pool, runner.backend, inputs.keep
    )
    before = torch.tensor([5, 6, 7, 8, 9, 10])
    return [
        runner.pool.keys(1)[slots],
        runner.pool.values(1)[slots],
        network.backbone.logits(states),
        network.bias(before, states, network.memory(6))[0],
        network.confidence(before, states),
    ]
