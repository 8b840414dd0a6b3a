"""The verifier: what is put out is the target's own draw at every place, whatever was guessed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from srt.protocols.drafter import Guess
from srt.protocols.forward_batch import RowSetup
from srt.sampling.accept import Run, accept
from srt.sampling.sampler import Sampler
from srt.wire.params import SamplingParams

VOCAB = 12


def accept_chains(
    sampler: Sampler, logits: torch.Tensor, rows: list[int], guesses: list[list[int]]
) -> list[Run]:
    return accept(sampler, logits, rows, [Guess(tokens) for tokens in guesses])


def opened(rows: dict[int, dict[str, Any]]) -> Sampler:
    sampler = Sampler(4, VOCAB)
    sampler.open(
        [
            RowSetup(
                row=row,
                params=SamplingParams(**params),
                tokens=[1, 2, 1],
                prompt_len=3,
                stop_ids=[5],
            )
            for row, params in rows.items()
        ]
    )
    return sampler


def peaks(*tokens: int) -> torch.Tensor:
    logits = torch.zeros(len(tokens), VOCAB)
    logits[range(len(tokens)), tokens] = 5.0
    return logits


GREEDY: dict[str, Any] = {"temperature": 0.0}


def test_the_longest_right_prefix_and_the_token_behind_it() -> None:
    sampler = opened({0: GREEDY, 2: GREEDY, 3: GREEDY})
    logits = torch.cat([peaks(3, 4, 6), peaks(3, 4, 6), peaks(7)])
    runs = accept_chains(sampler, logits, [0, 2, 3], [[3, 4], [3, 9], []])
    assert [run.tokens for run in runs] == [[3, 4, 6], [3, 4], [7]]
    assert sampler._generated.tolist() == [3, 0, 2, 1]


RULES: list[dict[str, Any]] = [
    GREEDY,
    {"temperature": 0.0, "repetition_penalty": 1.8, "frequency_penalty": 0.7, "logprobs": 2},
    {"temperature": 0.9, "seed": 5, "presence_penalty": 0.5, "logprobs": 3},
    {"temperature": 1.2, "seed": 9, "top_k": 6, "top_p": 0.9, "min_tokens": 3},
]


@pytest.mark.parametrize("num_right", range(5))
def test_a_chain_equals_one_token_at_a_time(num_right: int) -> None:
    """All rows together, each with its rules, guessing `num_right` tokens right and one wrong."""
    torch.manual_seed(num_right)
    logits = torch.randn(len(RULES), 5, VOCAB) * 2
    one_by_one = opened(dict(enumerate(RULES)))
    plain: list[list[int]] = [[] for _ in RULES]
    scores: list[list[Any]] = [[] for _ in RULES]
    for place in range(5):
        for row in range(len(RULES)):
            sampled = one_by_one.sample(logits[row, place : place + 1].clone(), [row])
            plain[row].append(int(sampled.tokens[0]))
            scores[row].append(sampled.logprobs[0])
    guesses = [
        [*tokens[:num_right], *((t + 1) % VOCAB for t in tokens[num_right:4])][:4]
        for tokens in plain
    ]
    chains = opened(dict(enumerate(RULES)))
    runs = accept_chains(chains, logits.flatten(0, 1).clone(), list(range(len(RULES))), guesses)
    for row, run in enumerate(runs):
        assert run.tokens == plain[row][: num_right + 1]
        assert run.logprobs == scores[row][: num_right + 1]
    assert chains._generated[:4].tolist() == [num_right + 1] * 4


def test_an_error_behind_right_guesses_waits_for_the_next_step() -> None:
    sampler = opened({0: GREEDY, 1: GREEDY})
    logits = torch.cat([peaks(3, 4, 6), peaks(3, 4, 6)])
    logits[2, 0] = float("nan")
    logits[3, 0] = float("nan")
    first, second = accept_chains(sampler, logits, [0, 1], [[3, 4], [3, 4]])
    assert (first.tokens, first.error) == ([3, 4], None)
    assert int(sampler._generated[0]) == 2
    assert second.error is not None and "NaN" in second.error


def test_a_tree_keeps_the_branch_that_was_drawn() -> None:
    """3 (0) - 4 (2) - 6 (4)
    known   <
                7 (1) - 4 (3)            the target says 7, 4, 8"""
    tree = Guess([3, 7, 4, 4, 6], [-1, -1, 0, 1, 2])
    sampler = opened({1: GREEDY, 2: GREEDY})
    logits = torch.cat([peaks(7, 9, 4, 9, 8, 9), peaks(3, 4, 9, 6, 9, 5)])
    first, second = accept(sampler, logits, [1, 2], [tree, tree])
    assert (first.tokens, first.kept) == ([7, 4, 8], [1, 3])
    assert (second.tokens, second.kept) == ([3, 4, 6, 5], [0, 2, 4])
    assert sampler._generated.tolist() == [0, 3, 4, 0]


def test_of_equal_guesses_the_first_counts() -> None:
    sampler = opened({0: GREEDY})
    [run] = accept(sampler, peaks(3, 4, 9, 9), [0], [Guess([3, 3, 4], [-1, -1, 0])])
    assert (run.tokens, run.kept) == ([3, 4, 9], [0, 2])


@pytest.mark.parametrize("rank", (0, 3))
def test_the_distribution_is_the_targets(rank: int) -> None:
    """Chi-square of the second token over 4000 seeds against softmax, behind a guess that is right now
    and then. 99.9 % of the true distribution's samples lie below the bound."""
    torch.manual_seed(0)
    first, second = torch.randn(2, VOCAB) * 0.6
    guessed = int(first.argsort(descending=True)[rank])
    counts, firsts, num = torch.zeros(VOCAB), torch.zeros(VOCAB), 0
    for start in range(0, 4000, 4):
        rows = {i: {"temperature": 0.8, "seed": start + i} for i in range(4)}
        runs = accept_chains(
            opened(rows), torch.stack([first, second] * 4), [0, 1, 2, 3], [[guessed]] * 4
        )
        for run in runs:
            firsts[run.tokens[0]] += 1
            assert len(run.tokens) == 1 + (run.tokens[0] == guessed)
            if len(run.tokens) == 2:
                counts[run.tokens[1]] += 1
                num += 1
    for found, logits, total in ((firsts, first, 4000), (counts, second, num)):
        expected = (logits / 0.8).softmax(-1) * total
        chi = float(((found - expected) ** 2 / expected).sum())
        assert total > 200 and chi < 31.26, (chi, total)  # 11 degrees of freedom
