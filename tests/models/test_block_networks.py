"""DFLASH and DSPARK against plain torch: the block's logits, the context's K and V, the walk; after
prefills in pieces, and after steps in which some guesses were right and others wrong."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from srt.protocols.drafter import Guess, Wish
from srt.protocols.forward_batch import ForwardBatch, RowSetup, Slice
from srt.protocols.worker import WorkerFacts
from srt.runner.tp_worker import TpModelWorker
from srt.sampling.sampler import Sampler
from srt.spec.dflash import DflashDrafter
from srt.spec.dspark import DsparkDrafter
from srt.spec.planner import plan
from srt.spec.worker import SpeculativeWorker
from srt.wire.params import SamplingParams
from tests.block_drafts import (
    TinyDraft,
    block_states,
    context_kv,
    draft_runner,
    make_draft,
    walk,
)
from tests.models.parity import make_prompt, save_tiny
from tests.tiny_models import TINY, Driver, make_runner, read_facts

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
PROMPT = make_prompt(97, 37)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LlamaForCausalLM:
    rope = {"rope_type": "default", "rope_theta": 500.0}
    config = LlamaConfig(**TINY, rope_parameters=rope, tie_word_embeddings=False)
    folder = tmp_path_factory.mktemp("block-target")
    model = save_tiny(LlamaForCausalLM(config), folder)
    model.name_or_path = str(folder)
    return model


def features_of(model: LlamaForCausalLM, draft: TinyDraft, tokens: list[int]) -> torch.Tensor:
    """[P, F], by transformers: entry k + 1 of its hidden states is what layer k put out."""
    with torch.no_grad():
        states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    return torch.cat([states[layer + 1][0] for layer in draft.config["target_layer_ids"]], dim=1)


def embedded(model: LlamaForCausalLM, tokens: list[int]) -> torch.Tensor:
    return model.model.embed_tokens.weight.detach()[tokens]


@dataclass(slots=True)
class Rig:
    """One speculating worker, driven step by step."""

    worker: SpeculativeWorker
    driver: Driver
    drafter: Any

    def step(self, slices: list[Slice], setups: list[RowSetup] | None = None) -> list[list[int]]:
        writes = [
            self.driver.reserve(piece.row, piece.start + piece.length + piece.draft)
            for piece in slices
        ]
        batch = ForwardBatch(step=0, slices=slices, setups=setups or [], table_writes=writes)
        result = self.worker.launch(batch).wait()
        assert all(each.error is None for each in result.slices)
        return [each.tokens for each in result.slices]

    def prefill(self, row: int, prompt: list[int], chunks: list[int]) -> list[int]:
        """Returns the prompt and its first token."""
        greedy = SamplingParams(temperature=0.0)
        setups = [
            RowSetup(row=row, params=greedy, tokens=prompt, prompt_len=len(prompt), stop_ids=[])
        ]
        at = 0
        for size in chunks:
            piece = Slice(
                row=row, start=at, length=size, tokens=prompt[at : at + size], sample=False
            )
            at += size
            piece.sample = at == len(prompt)
            [drawn] = self.step([piece], setups)
            setups = []
        return [*prompt, *drawn]

    def decode(self, row: int, tokens: list[int], most: int) -> list[int]:
        piece = Slice(
            row=row, start=len(tokens) - 1, length=1, tokens=None, sample=True, draft=most
        )
        return [*tokens, *self.step([piece])[0]]


def make_rig(
    model: LlamaForCausalLM,
    draft: TinyDraft,
    *,
    page_size: int = 16,
    planner: str = "static",
    **cut: Any,
) -> Rig:
    facts = read_facts(Path(model.name_or_path))
    runner = make_runner(facts, page_size=page_size)
    second = draft_runner(draft, runner)
    for layer in range(second.arch.num_layers):  # what was never written must never be read
        second.pool.keys(layer)[page_size:].fill_(50.0)
        second.pool.values(layer)[page_size:].fill_(50.0)
    worker_facts = WorkerFacts(
        vocab_size=97, context_length=256, num_pages=runner.pool.num_pages, page_size=page_size,
        max_rows=4, end_token_ids=[2], memory_bytes={},
    )  # fmt: skip
    inner = TpModelWorker(runner, Sampler(4, 97), worker_facts, ThreadPoolExecutor(1))
    drafter: Any
    if draft.algorithm == "dflash":
        drafter = DflashDrafter(second, Sampler(4, 97))
    else:
        settings = {"threshold": 0.0, "budget": 0} | cut
        drafter = DsparkDrafter(second, Sampler(4, 97), planner=planner, **settings)
    return Rig(SpeculativeWorker(inner, drafter), Driver(runner), drafter)


def spy(owner: Any, name: str) -> list[torch.Tensor]:
    """What the function gives from now on, call by call."""
    seen: list[torch.Tensor] = []
    original = getattr(owner, name)

    def listen(*given: Any) -> torch.Tensor:
        found: torch.Tensor = original(*given)
        seen.append(found.clone())
        return found

    setattr(owner, name, listen)
    return seen


def propose(rig: Rig, held: list[list[int]], lengths: tuple[int, ...]) -> list[Guess]:
    """Guesses for rows 0, 1 .., which hold these tokens."""
    rig.drafter.runner.write_table(
        [
            rig.driver.reserve(row, len(tokens) + most)
            for row, (tokens, most) in enumerate(zip(held, lengths, strict=True))
        ]
    )
    wishes = [
        Wish(row=row, start=len(tokens) - 1, most=most)
        for row, (tokens, most) in enumerate(zip(held, lengths, strict=True))
    ]
    with torch.inference_mode():
        found: list[Guess] = rig.drafter.propose(wishes)
    return found


def expected_logits(
    model: LlamaForCausalLM, draft: TinyDraft, tokens: list[int], most: int, **more: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """States and logits of `most` guesses behind `tokens`."""
    anchored = draft.algorithm == "dspark"
    masks = most - 1 if anchored else most
    block = embedded(model, [tokens[-1], *[draft.config["mask_token_id"]] * masks])
    states = block_states(draft, features_of(model, draft, tokens[:-1]), block, **more)
    states = states if anchored else states[1:]
    return states, states @ model.lm_head.weight.detach().T


def stop(rig: Rig) -> None:
    rig.worker.close()


@pytest.mark.parametrize("page_size", (1, 16))
@pytest.mark.parametrize("algorithm", ("dflash", "dspark"))
def test_block_logits_are_those_of_plain_torch(
    algorithm: str, page_size: int, target: LlamaForCausalLM, tmp_path: Path
) -> None:
    """Behind a prompt in pieces, then behind three steps of whatever was kept; with blocks of several
    lengths, the row beside another one."""
    draft = make_draft(tmp_path, algorithm)
    rig = make_rig(target, draft, page_size=page_size)
    seen = spy(rig.drafter._blocks.network, "logits")
    other = rig.prefill(1, PROMPT[5:20], [15])
    tokens = rig.prefill(0, PROMPT, [20, 1, 16])
    for most in (4, 1, 7):
        seen.clear()
        _, expected = expected_logits(target, draft, tokens, most)
        _, beside = expected_logits(target, draft, other, 3)
        slices = [
            Slice(row=row, start=len(held) - 1, length=1, tokens=None, sample=True, draft=count)
            for row, held, count in ((0, tokens, most), (1, other, 3))
        ]
        found = rig.step(slices)
        torch.testing.assert_close(seen[0], torch.cat((expected, beside)), **CLOSE)
        tokens, other = tokens + found[0], other + found[1]
    stop(rig)


@pytest.mark.parametrize("algorithm", ("dflash", "dspark"))
def test_context_is_the_projection_of_the_features(
    algorithm: str, target: LlamaForCausalLM, tmp_path: Path
) -> None:
    """K and V of every position that has them, after a prefill and after guesses right and wrong."""
    draft = make_draft(tmp_path, algorithm, target_layer_ids=[-1, 1])
    rig = make_rig(target, draft)
    tokens = rig.prefill(0, PROMPT, [17, 20])

    def check() -> None:
        features = features_of(target, draft, tokens[:-1])
        pool, pages = rig.drafter.runner.pool, rig.driver.pages[0]
        slots = [pages[at // 16] * 16 + at % 16 for at in range(len(tokens) - 1)]
        for layer in range(2):
            keys, values = context_kv(draft, features, layer)
            torch.testing.assert_close(pool.keys(layer)[slots], keys, **CLOSE)
            torch.testing.assert_close(pool.values(layer)[slots], values, **CLOSE)

    check()
    right = plain_tokens(target, tokens, 12)
    for good, bad in ((2, 1), (0, 3), (4, 0)):
        ahead = right[len(tokens) - len(PROMPT) - 1 :][: good + bad]
        guess = [*ahead[:good], *((token + 1) % 97 for token in ahead[good:])]
        rig.drafter.propose = lambda wishes, guess=guess: dictate(rig, wishes, guess)
        found = rig.decode(0, tokens, len(guess))
        assert len(found) == len(tokens) + good + 1
        tokens = found
        check()
    stop(rig)


def dictate(rig: Rig, wishes: list[Wish], guess: list[int]) -> list[Guess]:
    """The drafter runs as ever, but these are its guesses."""
    found = type(rig.drafter).propose(rig.drafter, wishes)
    [row] = [rig.drafter._blocks.rows[wish.row] for wish in wishes]
    rig.drafter._blocks.rows.sampler.rollback(wishes[0].row, len(found[0].tokens))
    rig.drafter._blocks.rows.sampler.advance(wishes[0].row, guess)
    row.guess[:] = guess
    return [Guess(list(guess))]


def plain_tokens(model: LlamaForCausalLM, tokens: list[int], count: int) -> list[int]:
    held = list(tokens)
    with torch.no_grad():
        for _ in range(count):
            held.append(int(model(torch.tensor([held])).logits[0, -1].argmax()))
    return held[len(tokens) :]


@pytest.mark.parametrize("kind", ("vanilla", "gated", "rnn"))
@pytest.mark.parametrize("with_token", (True, False))
def test_the_walk_is_that_of_plain_torch(
    kind: str, with_token: bool, target: LlamaForCausalLM, tmp_path: Path
) -> None:
    draft = make_draft(
        tmp_path, "dspark", markov_head_type=kind, confidence_head_with_markov=with_token
    )
    rig = make_rig(target, draft, planner="capped")
    others = [rig.prefill(row, PROMPT[row:20], [20 - row]) for row in (1, 2)]
    tokens = rig.prefill(0, PROMPT, [37])
    told = spy(rig.drafter.network, "confidence")
    held = [tokens, *others]
    lengths = (6, 2, 8)
    found = propose(rig, held, lengths)
    expected = []
    for row, most in enumerate(lengths):
        states, logits = expected_logits(target, draft, held[row], most)
        guesses, _, chances = walk(draft, states, logits, held[row][-1])
        assert found[row].tokens == guesses
        expected.append(chances)
    torch.testing.assert_close(told[0], torch.cat(expected), **CLOSE)
    stop(rig)


@pytest.mark.parametrize(("planner", "budget"), [("capped", 0), ("ragged", 5)])
def test_what_the_planner_drops_is_forgotten(
    planner: str, budget: int, target: LlamaForCausalLM, tmp_path: Path
) -> None:
    """The chains are cut as their confidences say, and the sampler has drawn what is left."""
    draft = make_draft(tmp_path, "dspark")
    rig = make_rig(target, draft, planner=planner, threshold=0.05, budget=budget)
    held = [rig.prefill(row, PROMPT[row:30], [30 - row]) for row in range(3)]
    lengths = (8, 5, 7)
    found = propose(rig, held, lengths)
    chains, guesses = [], []
    for row, most in enumerate(lengths):
        states, logits = expected_logits(target, draft, held[row], most)
        tokens, _, chances = walk(draft, states, logits, held[row][-1])
        guesses.append(tokens)
        chains.append(chances.tolist())
    kept = plan(planner, chains, threshold=0.05, budget=budget)
    assert 0 < sum(kept) < sum(lengths)
    assert [guess.tokens for guess in found] == [
        tokens[:length] for tokens, length in zip(guesses, kept, strict=True)
    ]
    drawn = rig.drafter._blocks.rows.sampler._generated[:3].tolist()
    assert drawn == [1 + length for length in kept]  # and the prompt's first token
    stop(rig)


@pytest.mark.parametrize("looks_back", (False, True))
def test_windows_and_blocks_that_look_back(
    looks_back: bool, target: LlamaForCausalLM, tmp_path: Path
) -> None:
    """Sliding layers look back only, unless the checkpoint says that they look both ways."""
    changes: dict[str, Any] = {"sliding_window": 9, "layer_types": ["sliding_attention"] * 2}
    if not looks_back:
        changes["is_causal"] = False
    draft = make_draft(tmp_path, "dflash", **changes)
    rig = make_rig(target, draft)
    told = spy(rig.drafter.network, "logits")
    tokens = rig.prefill(0, PROMPT, [37])
    rig.decode(0, tokens, 5)
    key, query = torch.arange(37 + 6), torch.arange(37, 37 + 6)[:, None]
    sees = query - key < 9
    if looks_back:
        sees &= key <= query
    _, expected = expected_logits(target, draft, tokens, 5, sees=sees)
    torch.testing.assert_close(told[0], expected, **CLOSE)
    stop(rig)
