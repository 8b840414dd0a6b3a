"""Which of the guessed tokens are kept.

The rule: at every verified position the target draws its own token, with all of the request's rules
and with the noise of (seed, position) that it would draw with anyway; a guess is kept if and only if it
is that very token. The first token that is not the guess ends the run and stands in its place.

So the tokens put out are those of decoding one by one, for every temperature and whatever was guessed:
each is drawn from the target's logits behind the same tokens with the same noise. The distribution is
the target's, exactly, and a request with a seed gets the same answer with speculation and without. A
guess that was drawn with the same noise is right more often than an independent one: noise couples
the two draws (the maximal coupling of classic rejection sampling keeps 1 - TV(p, q) of the guesses, this
one at least (1 - TV) / (1 + TV), and all of them where p = q).

State needs no rollback here. A token is drawn only if everything before it was kept, so penalties,
`min_tokens` and the noise counter never see a token that is taken back.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from srt.sampling.sampler import Sampler
from srt.wire.params import TokenLogprobs


@dataclass(slots=True, kw_only=True)
class Run:
    """What one row put out in a step: one token, or several if guesses were right."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    error: str | None = None

    @property
    def last(self) -> int:
        return self.tokens[-1] if self.tokens else 0


def accept_chains(
    sampler: Sampler,
    logits: torch.Tensor,
    rows: list[int],
    guesses: list[list[int]],
    masks: list[bytes | None] | None = None,
) -> list[Run]:
    """One run for each of `rows`, all different. logits: [sum(1 + len(guess)), V] float32, chain after
    chain: those behind the last known token, then behind each guess. They may be changed in place.

    `masks` are those of `Slice.allowed`. A row that has one has no guesses: what may follow a guess is
    known only when the grammar has taken it.
    """
    firsts, first = [], 0
    for guess in guesses:
        firsts.append(first)
        first += 1 + len(guess)
    assert first == len(logits), (first, len(logits))
    assert masks is None or not any(m and g for m, g in zip(masks, guesses, strict=True))
    runs = [Run() for _ in rows]
    alive, depth = list(range(len(rows))), 0
    while alive:
        index = [firsts[chain] + depth for chain in alive]
        sampled = sampler.sample(
            logits[index], [rows[chain] for chain in alive], None if depth else masks
        )
        going = []
        for place, (chain, token) in enumerate(zip(alive, sampled.tokens.tolist(), strict=True)):
            run, guess, error = runs[chain], guesses[chain], sampled.errors[place]
            if error is not None and depth:  # what was kept is good; the next step meets this again
                sampler.rollback(rows[chain], 1)
                continue
            run.error = error
            run.tokens.append(token)
            run.logprobs.append(sampled.logprobs[place])
            if error is None and depth < len(guess) and guess[depth] == token:
                going.append(chain)
        alive, depth = going, depth + 1
    return runs
