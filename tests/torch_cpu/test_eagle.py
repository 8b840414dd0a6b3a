"""EAGLE's network against plain torch, and the checkpoints it takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from srt.config.facts import ModelFacts
from srt.errors import ConfigError
from srt.models.draft import FeatureNetwork
from srt.models.eagle import Eagle
from srt.protocols.drafter import Outcome, Wish
from srt.protocols.forward_batch import RowSetup, Slice, TableWrite
from srt.runner.model_runner import ModelRunner
from srt.sampling.sampler import Sampler
from srt.spec.eagle import EagleDrafter
from srt.wire.params import SamplingParams
from tests.layered_models import (
    Tensors,
    config_of,
    load_network,
    noisy_eagle,
    plain_layer,
    save,
    save_noisy,
    target_tensors,
)
from tests.tiny_models import make_runner

PROMPT = [5, 9, 3, 7, 11, 2, 8, 6, 4, 21]
LATER = [30, 31, 40]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return make_runner(save_noisy(tmp_path_factory.mktemp("mimo")))


def draft_facts(folder: Path, tensors: Tensors, num_layers: int) -> ModelFacts:
    config = config_of(num_hidden_layers=num_layers, architectures=["LlamaForCausalLM"])
    return save(folder, tensors, **config)


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize("has_extras", [False, True])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_chains_are_those_of_the_plain_network(
    num_layers: int, has_extras: bool, target: ModelRunner, tmp_path: Path
) -> None:
    """A prompt in two slices, three tokens that came one after another, then three guesses; with biases,
    an embedding and a head of its own, and without."""
    lent, hidden = target.lend(), target.arch.hidden_size
    tensors = noisy_eagle(target.facts, num_layers)
    embedding, head = lent.embedding, target_tensors(target.facts)["lm_head.weight"]
    if has_extras:
        embedding, head = noise(*embedding.shape) * 0.2, noise(*head.shape) * 0.3
        tensors |= {"embed_tokens.weight": embedding, "lm_head.weight": head}
        tensors["fc.bias"] = noise(hidden)
        for name, size in (("q", target.arch.q_size), ("k", target.arch.kv_size)):
            tensors[f"layers.0.self_attn.{name}_proj.bias"] = noise(size)
        tensors["layers.0.self_attn.v_proj.bias"] = noise(target.arch.kv_size)
    runner = load_network(target, draft_facts(tmp_path, tensors, num_layers), Eagle())
    network = runner.network
    assert isinstance(network, FeatureNetwork) and network.taps == (target.arch.num_layers,)
    features = noise(len(PROMPT) + len(LATER), hidden)
    drafter = EagleDrafter(runner, Sampler(4, 97), steps=3, topk=1, confidence=0.0)
    runner.write_table([TableWrite(row=1, first=0, pages=[4, 2])])
    greedy = SamplingParams(temperature=0.0)
    drafter.open([RowSetup(row=1, params=greedy, tokens=PROMPT, prompt_len=10, stop_ids=[])])
    with torch.inference_mode():
        for start, end in ((0, 6), (6, 10)):
            piece = Slice(
                row=1, start=start, length=end - start, tokens=PROMPT[start:end], sample=False
            )
            drafter.prefill([piece], [features[start:end]])
        for place, token in enumerate(LATER):
            seen = features[len(PROMPT) - 1 + place][None]
            drafter.absorb([Outcome(row=1, tokens=[token], features=seen)])
        [guess] = drafter.propose([Wish(row=1, start=len(PROMPT) + 2, most=3)])

    tokens = [*PROMPT, *LATER]
    states = torch.cat((torch.zeros(1, hidden), features[: len(tokens) - 1]))
    cos_sin = runner.network.stack.cos_sin  # type: ignore[attr-defined]
    expected = []
    for _ in range(3):
        x = torch.cat((embedding[tokens], states), dim=1) @ tensors["fc.weight"].T
        x = x + tensors.get("fc.bias", torch.zeros(1))
        for layer in range(num_layers):
            x = plain_layer(tensors, f"layers.{layer}.", target.facts, x, cos_sin)
        expected.append(int((x[-1] @ head.T).argmax()))
        tokens.append(expected[-1])
        states = torch.cat((states, x[-1:]))
    assert guess.tokens == expected and guess.parents is None


def test_a_whole_model_is_refused_and_told_where_to_go(target: ModelRunner, tmp_path: Path) -> None:
    tensors = target_tensors(target.facts)
    with pytest.raises(ConfigError, match="no fc.weight.*standalone"):
        load_network(target, draft_facts(tmp_path, tensors, 3), Eagle())


@pytest.mark.parametrize(
    ("name", "words"),
    [("layers.0.input_layernorm.weight", "belongs to no parameter"), ("hot.weight", "hot.weight")],
)
def test_what_nobody_knows_is_an_error(
    name: str, words: str, target: ModelRunner, tmp_path: Path
) -> None:
    tensors = noisy_eagle(target.facts, 1) | {name: torch.ones(48)}
    with pytest.raises(ConfigError, match=words):
        load_network(target, draft_facts(tmp_path, tensors, 1), Eagle())


def test_a_draft_of_another_width_is_refused(target: ModelRunner, tmp_path: Path) -> None:
    facts = replace(draft_facts(tmp_path, noisy_eagle(target.facts, 1), 1))
    facts = replace(facts, config={**facts.config, "target_hidden_size": 32})
    with pytest.raises(ConfigError, match="hidden size 32; this target's is 48"):
        load_network(target, facts, Eagle())
