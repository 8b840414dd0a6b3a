"""MTP layers against plain torch; what their pools hold, whatever was guessed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from srt.config.probe_layers import layer_facts
from srt.models.mtp import Mtp
from srt.protocols.drafter import Outcome, Wish
from srt.protocols.forward_batch import RowSetup, Slice, TableWrite
from srt.runner.model_runner import ModelRunner
from srt.sampling.sampler import Sampler
from srt.spec.multi_layer import MultiLayerDrafter
from srt.wire.params import SamplingParams
from tests.layered_models import NUM_LAYERS, load_network, normed, plain_layer, save_noisy
from tests.tiny_models import make_runner

LENGTH = 110
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return make_runner(save_noisy(tmp_path_factory.mktemp("mimo")))


@pytest.fixture(scope="module")
def runners(target: ModelRunner) -> list[ModelRunner]:
    its = layer_facts(target.facts)
    assert its is not None
    return [load_network(target, its, Mtp(step), step) for step in range(NUM_LAYERS)]


def drafter_of(runners: list[ModelRunner], confidence: float = 0.0) -> MultiLayerDrafter:
    return MultiLayerDrafter(runners, Sampler(4, 97), confidence=confidence)


def begin(drafter: MultiLayerDrafter, row: int, tokens: list[int], pages: list[int]) -> None:
    drafter.runners[0].write_table([TableWrite(row=row, first=0, pages=pages)])
    drafter.open(
        [RowSetup(row=row, params=GREEDY, tokens=tokens, prompt_len=len(tokens), stop_ids=[])]
    )


def chunk(row: int, start: int, tokens: list[int]) -> Slice:
    return Slice(row=row, start=start, length=len(tokens), tokens=tokens, sample=False)


def features_of(row: int) -> torch.Tensor:
    """What the target made of every position."""
    return torch.randn(LENGTH, 48, generator=torch.Generator().manual_seed(row))


def held(runner: ModelRunner, row: int, length: int) -> torch.Tensor:
    """K and V of the row's first slots."""
    pool, page = runner.pool, runner.pool.page_size
    slots = [int(runner.table.host[row, at // page]) * page + at % page for at in range(length)]
    keys, values = (plane.flatten(0, -3)[slots] for plane in (pool.keys(0), pool.values(0)))
    return torch.cat((keys, values))


def test_guesses_are_those_of_the_plain_layers(
    target: ModelRunner, runners: list[ModelRunner]
) -> None:
    tensors = load_file(Path(target.spec.model_path) / "model.safetensors")
    embedding, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    rng, features = random.Random(2), features_of(1)
    tokens = [rng.randrange(3, 97) for _ in range(24)]
    drafter = drafter_of(runners)
    begin(drafter, 1, tokens[:20], [4, 2])
    with torch.inference_mode():
        drafter.prefill([chunk(1, 0, tokens[:7])], [features[:7]])
        drafter.prefill([chunk(1, 7, tokens[7:20])], [features[7:20]])
        for place in range(20, 24):
            seen = features[place - 1][None]
            drafter.absorb([Outcome(row=1, tokens=[tokens[place]], features=seen)])
        [guess] = drafter.propose([Wish(row=1, start=23, most=5)])

    states, expected = features[:23], []
    cos_sin = runners[0].network.stack.cos_sin  # type: ignore[attr-defined]
    for step in range(NUM_LAYERS):
        prefix = f"model.mtp_layers.{step}."
        before = torch.cat((torch.zeros(1, 48), states))
        parts = (
            normed(before, tensors[f"{prefix}hidden_layernorm.weight"]),
            normed(embedding[tokens], tensors[f"{prefix}token_layernorm.weight"]),
        )
        x = torch.cat(parts, dim=1) @ tensors[f"{prefix}input_proj.weight"].T
        x = plain_layer(tensors, prefix, target.facts, x, cos_sin)
        states = normed(x, tensors[f"{prefix}final_layernorm.weight"])
        expected.append(int((states[-1] @ head.T).argmax()))
        tokens.append(expected[-1])
    assert guess.tokens == expected and guess.parents is None


@pytest.mark.parametrize(("most_pending", "patience"), ((3, 99), (256, 8), (256, 0)))
@pytest.mark.parametrize("seed", range(4))
def test_every_layer_holds_what_the_known_tokens_make(
    seed: int,
    most_pending: int,
    patience: int,
    runners: list[ModelRunner],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a random history of guesses, right and wrong, of rests and of slices: K and V of all layers
    are those of a row that got the same text as one prompt."""
    monkeypatch.setattr("srt.spec.feed.MOST_PENDING", most_pending)
    monkeypatch.setattr("srt.spec.feed.PATIENCE", patience)
    rng = random.Random(seed)
    rows = {row: [rng.randrange(3, 97) for _ in range(rng.randint(1, 40))] for row in (0, 1)}
    features = {row: features_of(10 * seed + row) for row in rows}
    drafter = drafter_of(runners, confidence=rng.choice((0.0, 0.05)))
    pages = list(range(1, 29))
    rng.shuffle(pages)
    with torch.inference_mode():
        for row, tokens in rows.items():
            begin(drafter, row, tokens, [pages.pop() for _ in range(7)])
            at = 0
            while at < len(tokens):
                end = min(len(tokens), at + rng.randint(1, 20))
                drafter.prefill([chunk(row, at, tokens[at:end])], [features[row][at:end]])
                at = end
            first = rng.randrange(3, 97)
            seen = features[row][at - 1 : at]
            drafter.absorb([Outcome(row=row, tokens=[first], features=seen)])
            tokens.append(first)
        for _ in range(14):
            wishes = [
                Wish(row=row, start=len(tokens) - 1, most=rng.randint(1, 4))
                for row, tokens in rows.items()
                if rng.random() < 0.7
            ]
            guesses = drafter.propose(wishes) if wishes else []
            found = {wish.row: each.tokens for wish, each in zip(wishes, guesses, strict=True)}
            outcomes = []
            for row, tokens in rows.items():
                guess = found.get(row, [])
                right = guess[: rng.randint(0, len(guess))]
                start = len(tokens) - 1
                got = [*right, rng.randrange(3, 97)]
                seen = features[row][start : start + len(got)]
                outcomes.append(Outcome(row=row, tokens=got, features=seen))
                tokens += got
            drafter.absorb(outcomes)
        drafter.propose([Wish(row=row, start=len(rows[row]) - 1, most=1) for row in rows])

        other = drafter_of(runners)
        for row, tokens in rows.items():
            begin(other, row + 2, tokens, [pages.pop() for _ in range(7)])
            other.prefill([chunk(row + 2, 0, tokens)], [features[row][: len(tokens)]])
    for row, tokens in rows.items():
        assert drafter._rows[row].valid == len(tokens) > 20
        for depth, runner in enumerate(runners):
            expected = held(runner, row + 2, len(tokens))
            torch.testing.assert_close(
                held(runner, row, len(tokens)), expected, rtol=1e-4, atol=1e-4
            )
            if depth:
                mine, its = (
                    each._feed.minds[number].before[depth]
                    for each, number in ((drafter, row), (other, row + 2))
                )
                torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-4)


def test_a_chain_ends_where_it_is_unlikely_and_where_nobody_asked_for_more(
    runners: list[ModelRunner],
) -> None:
    features = features_of(5)
    for confidence, most, length in ((0.0, 2, 2), (0.0, 9, NUM_LAYERS), (1.1, 3, 1)):
        drafter = drafter_of(runners, confidence)
        begin(drafter, 0, [5, 6, 7], [1])
        with torch.inference_mode():
            drafter.prefill([chunk(0, 0, [5, 6, 7])], [features[:3]])
            drafter.absorb([Outcome(row=0, tokens=[8], features=features[2:3])])
            [guess] = drafter.propose([Wish(row=0, start=3, most=most)])
        assert len(guess.tokens) == length
        assert drafter._rows[0].guess == guess.tokens
