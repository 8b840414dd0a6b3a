"""EAGLE-3's network against plain torch, what its drafter keeps, and its trees."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from kernels.ops import select
from srt.config.dummy import dummy_facts
from srt.config.facts import ModelFacts
from srt.errors import ConfigError
from srt.models.eagle3 import Eagle3, Eagle3Network, tap_layers
from srt.protocols.drafter import Outcome, Wish
from srt.protocols.forward_batch import RowSetup, Slice, TableWrite
from srt.runner.model_runner import ModelRunner
from srt.sampling.sampler import Sampler
from srt.spec.eagle import EagleDrafter
from srt.spec.feed import Meal
from srt.spec.tree import Tree
from srt.wire.params import SamplingParams
from tests.tiny_models import make_runner, make_spec

HOT = [3, 4, 9, 17, 30, 31, 40, 55]
NUM_TAPS = 3


def target_facts() -> ModelFacts:
    config = {"intermediate_size": 96, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
    return replace(dummy_facts().model, config=config, num_layers=4)


def stored(facts: ModelFacts, *, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.2

    h, inner, kv = facts.hidden_size, 80, facts.num_kv_heads * facts.head_dim
    q = facts.num_heads * facts.head_dim
    return {
        "fc.weight": noise(h, NUM_TAPS * h),
        "midlayer.input_layernorm.weight": 1 + noise(h),
        "midlayer.hidden_norm.weight": 1 + noise(h),
        "midlayer.post_attention_layernorm.weight": 1 + noise(h),
        "midlayer.self_attn.q_proj.weight": noise(q, 2 * h),
        "midlayer.self_attn.k_proj.weight": noise(kv, 2 * h),
        "midlayer.self_attn.v_proj.weight": noise(kv, 2 * h),
        "midlayer.self_attn.o_proj.weight": noise(h, q),
        "midlayer.mlp.gate_proj.weight": noise(inner, h),
        "midlayer.mlp.up_proj.weight": noise(inner, h),
        "midlayer.mlp.down_proj.weight": noise(h, inner),
        "norm.weight": 1 + noise(h),
        "d2t": torch.tensor(HOT) - torch.arange(len(HOT)),
    }


def draft_facts(target: ModelFacts, folder: Path, **config: Any) -> ModelFacts:
    values = {
        "intermediate_size": 80,
        "rms_norm_eps": 1e-5,
        "draft_vocab_size": len(HOT),
        "eagle_aux_hidden_state_layer_ids": [0, 1, 3],
        **config,
    }
    return replace(
        target,
        path=str(folder),
        format="safetensors",
        architecture="LlamaForCausalLMEagle3",
        num_layers=1,
        config=values,
    )


def draft_runner(
    target: ModelRunner, folder: Path, tensors: dict[str, torch.Tensor], **config: Any
) -> ModelRunner:
    save_file(tensors, str(folder / "model.safetensors"))
    facts = draft_facts(target.facts, folder, **config)
    runner = ModelRunner(
        make_spec(facts, role="draft"),
        facts,
        ops=select("torch"),
        device=torch.device("cpu"),
        seed=0,
        network=Eagle3(),
        lent=target.lend(),
    )
    runner.load()
    runner.allocate(num_pages=target.pool.num_pages, page_size=16, max_rows=4, table=target.table)
    runner.init_backends()
    return runner


@pytest.fixture
def target() -> ModelRunner:
    return make_runner(target_facts(), load_format="dummy")


def rotate(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """x: [T, heads, D]."""
    cos, sin = cos_sin[: len(x), None].chunk(2, dim=-1)
    one, two = x.chunk(2, dim=-1)
    return torch.cat((one * cos - two * sin, two * cos + one * sin), dim=-1)


def plain_states(
    tensors: dict[str, torch.Tensor],
    facts: ModelFacts,
    embedding: torch.Tensor,
    cos_sin: torch.Tensor,
    tokens: list[int],
    states: torch.Tensor,
) -> torch.Tensor:
    """The network without pages, masks or kernels: all tokens at once. states: [T, H]."""
    size, d = facts.hidden_size, facts.head_dim

    def normed(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, (size,), tensors[name], 1e-5)

    x = torch.cat(
        (
            normed(embedding[tokens], "midlayer.input_layernorm.weight"),
            normed(states, "midlayer.hidden_norm.weight"),
        ),
        dim=-1,
    )
    heads = {"q": facts.num_heads, "k": facts.num_kv_heads, "v": facts.num_kv_heads}
    q, k, v = (
        (x @ tensors[f"midlayer.self_attn.{name}_proj.weight"].T).view(len(tokens), count, d)
        for name, count in heads.items()
    )
    q, k = rotate(q, cos_sin), rotate(k, cos_sin)
    group = facts.num_heads // facts.num_kv_heads
    k, v = (each.repeat_interleave(group, dim=1) for each in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * d**-0.5
    causal = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
    weights = scores.masked_fill(~causal, -torch.inf).softmax(-1)
    mixed = torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
    residual = states + mixed @ tensors["midlayer.self_attn.o_proj.weight"].T
    y = normed(residual, "midlayer.post_attention_layernorm.weight")
    gate = y @ tensors["midlayer.mlp.gate_proj.weight"].T
    up = y @ tensors["midlayer.mlp.up_proj.weight"].T
    return residual + (F.silu(gate) * up) @ tensors["midlayer.mlp.down_proj.weight"].T


class Watch(EagleDrafter):
    """Tells the states its first forward of a proposal made."""

    last: torch.Tensor | None = None

    def _compute(self, meals: list[Meal]) -> torch.Tensor | None:
        found = super()._compute(meals)
        self.last = self.last if found is None else found
        return found


def drafter_of(runner: ModelRunner, **shape: Any) -> Watch:
    vocab = runner.arch.vocab_size
    return Watch(runner, Sampler(4, vocab), **{"steps": 3, "topk": 1, "confidence": 0.0, **shape})


def begin(drafter: EagleDrafter, row: int, tokens: list[int], pages: list[int]) -> None:
    drafter.runner.write_table([TableWrite(row=row, first=0, pages=pages)])
    params = SamplingParams(temperature=0.0)
    drafter.open(
        [RowSetup(row=row, params=params, tokens=tokens, prompt_len=len(tokens), stop_ids=[])]
    )


def chunk(row: int, start: int, tokens: list[int]) -> Slice:
    return Slice(row=row, start=start, length=len(tokens), tokens=tokens, sample=False)


def features_of(target: ModelRunner, num: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(num, NUM_TAPS * target.arch.hidden_size, generator=generator)


PROMPT = [5, 9, 3, 7, 11, 2, 8, 6, 4, 21]


def test_chains_are_those_of_the_plain_network(target: ModelRunner, tmp_path: Path) -> None:
    """A prompt in two slices, three tokens that came one after another, then three guesses."""
    tensors = stored(target.facts)
    runner = draft_runner(target, tmp_path, tensors)
    network = runner.network
    assert isinstance(network, Eagle3Network) and network.taps == (0, 1, 3)
    drafter = drafter_of(runner)
    features = features_of(target, len(PROMPT) + 3)
    later = [30, 31, 40]
    begin(drafter, 1, PROMPT, [4, 2])
    with torch.inference_mode():
        drafter.prefill([chunk(1, 0, PROMPT[:6])], [features[:6]])
        drafter.prefill([chunk(1, 6, PROMPT[6:])], [features[6 : len(PROMPT)]])
        for place, token in enumerate(later):
            seen = features[len(PROMPT) - 1 + place][None]
            drafter.absorb([Outcome(row=1, tokens=[token], features=seen)])
        [guess] = drafter.propose([Wish(row=1, start=len(PROMPT) + 2, most=3)])

    tokens = [*PROMPT, *later]
    before = torch.cat((torch.zeros(1, features.shape[1]), features[: len(tokens) - 1]))
    states = before @ tensors["fc.weight"].T
    lent = target.lend()
    cos_sin = network.cos_sin
    head = lent.head_rows(torch.tensor(HOT))
    expected = []
    for _ in range(3):
        made = plain_states(tensors, target.facts, lent.embedding, cos_sin, tokens, states)[-1:]
        if not expected:
            torch.testing.assert_close(drafter.last, made, rtol=1e-4, atol=1e-5)
        logits = F.rms_norm(made, made.shape[1:], tensors["norm.weight"], 1e-5) @ head.T
        expected.append(HOT[int(logits.argmax())])
        tokens.append(expected[-1])
        states = torch.cat((states, made))
    assert guess.tokens == expected and guess.parents is None


def test_what_was_wrong_is_computed_again(target: ModelRunner, tmp_path: Path) -> None:
    """After one right guess of three, the next proposal is that of a row which never guessed."""
    runner = draft_runner(target, tmp_path, stored(target.facts))
    features = features_of(target, 20)
    states = []
    with torch.inference_mode():
        for guesses in (True, False):
            drafter = drafter_of(runner)
            begin(drafter, 0, PROMPT, [1, 2])
            drafter.prefill([chunk(0, 0, PROMPT)], [features[:10]])
            drafter.absorb([Outcome(row=0, tokens=[30], features=features[9:10])])
            got = [3, 4]
            if guesses:
                [guess] = drafter.propose([Wish(row=0, start=10, most=3)])
                got[0] = guess.tokens[0]
            states.append((got[0], drafter))
            if not guesses:
                got[0] = states[0][0]
            drafter.absorb([Outcome(row=0, tokens=got, features=features[10:12])])
            drafter.propose([Wish(row=0, start=12, most=3)])
    torch.testing.assert_close(states[0][1].last, states[1][1].last, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num", (100, 400))
def test_a_drafter_that_nobody_asks_computes_nothing(
    num: int, target: ModelRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can still guess if asked in time; a row that gathered too much has no guesses any more, and the
    next one has."""
    drafter = drafter_of(draft_runner(target, tmp_path, stored(target.facts)))
    features = features_of(target, 10 + num)
    begin(drafter, 0, PROMPT, list(range(1, 28)))
    begin(drafter, 1, PROMPT, [28, 29])
    with torch.inference_mode():
        drafter.prefill([chunk(0, 0, PROMPT)], [features[:10]])
        for place in range(20):
            drafter.absorb([Outcome(row=0, tokens=[7], features=features[9 + place][None])])
        network = drafter.network.forward
        monkeypatch.setattr(drafter.network, "forward", lambda *_: pytest.fail("not asked"))
        for place in range(20, num):
            drafter.absorb([Outcome(row=0, tokens=[7], features=features[9 + place][None])])
        drafter.prefill([chunk(1, 0, PROMPT)], [features[:10]])
        drafter.absorb([Outcome(row=1, tokens=[30], features=features[9:10])])
        monkeypatch.setattr(drafter.network, "forward", network)
        wishes = [Wish(row=0, start=9 + num, most=3), Wish(row=1, start=10, most=3)]
        old, new = drafter.propose(wishes)
        drafter.absorb([Outcome(row=1, tokens=[3], features=features[10:11])])
    assert len(old.tokens) == (3 if num == 100 else 0) and len(new.tokens) == 3
    assert drafter._feed.minds[0].num_pending == 0


def test_a_row_may_be_wished_for_right_after_it_was_computed(
    target: ModelRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("srt.spec.feed.MOST_PENDING", 3)
    drafter = drafter_of(draft_runner(target, tmp_path, stored(target.facts)))
    features = features_of(target, 30)
    begin(drafter, 0, PROMPT, [1, 2])
    with torch.inference_mode():
        drafter.prefill([chunk(0, 0, PROMPT)], [features[:10]])
        for place in range(4):
            drafter.absorb([Outcome(row=0, tokens=[7], features=features[9 + place][None])])
        assert drafter._rows[0].valid == 13  # all but the last token
        [guess] = drafter.propose([Wish(row=0, start=13, most=2)])
    assert len(guess.tokens) == 2


def test_a_tree_holds_the_chain_and_stays_in_its_room(target: ModelRunner, tmp_path: Path) -> None:
    """With one row the best path of a wide tree begins with what the chain guesses first."""
    runner = draft_runner(target, tmp_path, stored(target.facts))
    features = features_of(target, 11)
    found = []
    with torch.inference_mode():
        for topk in (1, 3):
            drafter = drafter_of(runner, topk=topk)
            begin(drafter, 0, PROMPT, [1, 2])
            drafter.prefill([chunk(0, 0, PROMPT)], [features[:10]])
            drafter.absorb([Outcome(row=0, tokens=[30], features=features[9:10])])
            found.append(drafter.propose([Wish(row=0, start=10, most=3 if topk == 1 else 6)])[0])
    chain, tree = found
    assert tree.parents is not None and len(tree.tokens) == 6 and -1 in tree.parents
    assert all(parent < index for index, parent in enumerate(tree.parents))
    assert tree.tokens[0] == chain.tokens[0]
    place = -1
    for token in chain.tokens[:2]:
        place = tree.followers(place)[token]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"target_hidden_size": 32}, "hidden size 32; this target's is 64"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 2, 9]}, "0 to 4, the target's number of layers"),
        ({"eagle_aux_hidden_state_layer_ids": [3, 1, 0]}, "must ascend"),
        ({"draft_vocab_size": 9}, "d2t"),
    ],
)
def test_misfits_are_refused(
    change: dict[str, Any], words: str, target: ModelRunner, tmp_path: Path
) -> None:
    tensors = stored(target.facts)
    if "target_hidden_size" in change:
        tensors["fc.weight"] = torch.zeros(64, NUM_TAPS * 32)
    with pytest.raises(ConfigError, match=words):
        draft_runner(target, tmp_path, tensors, **change)


def test_default_taps_are_low_middle_and_high() -> None:
    assert tap_layers({}, 30) == (2, 15, 27)
    assert tap_layers({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 5]}}, 8) == (
        (1, 2, 5)
    )


def test_own_head_and_full_vocabulary(target: ModelRunner, tmp_path: Path) -> None:
    tensors = stored(target.facts)
    del tensors["d2t"]
    vocab = target.arch.vocab_size
    runner = draft_runner(target, tmp_path, tensors, draft_vocab_size=vocab)
    assert isinstance(runner.network, Eagle3Network)
    states = torch.randn(2, 64)
    assert runner.network.logits(states).shape == (2, vocab)
    tensors["lm_head.weight"] = torch.randn(vocab, 64)
    own = draft_runner(target, tmp_path, tensors, draft_vocab_size=vocab).network
    assert isinstance(own, Eagle3Network)
    assert not torch.allclose(own.logits(states), runner.network.logits(states))


def test_a_tree_grows_from_the_likeliest_and_keeps_the_likeliest() -> None:
    tree = Tree(most=3, topk=2, steps=3)
    tree.add(-1, [10, 11], [-0.1, -2.0])
    assert tree.grow() == [0, 1]
    tree.add(0, [20, 21], [-0.2, -3.0])
    tree.add(1, [22, 23], [-0.1, -4.0])
    assert tree.grow() == [2]  # there is room for three that are computed
    assert (tree.visible(0), tree.visible(1), tree.visible(2)) == (0b1, 0b10, 0b101)
    tree.add(2, [30, 31], [-0.1, -9.0])
    assert tree.grow() == []  # as deep as it may be
    assert tree.path(6) == [10, 20, 30]
    best = tree.best()
    assert (best.tokens, best.parents) == ([10, 20, 30], [-1, 0, 1])
