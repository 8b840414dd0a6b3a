"""Which of the guessed tokens are kept.

The rule: at every verified position the target draws its own token, with all of the request's rules
and with the noise of (seed, position) that it would draw with anyway; a guess is kept if and only if it
is that very token. The first token that is not the guess ends the run and stands in its place. Guesses
may be a tree: of several for one position the one that is the drawn token is kept, if any is.

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

from srt.protocols.drafter import Guess
from srt.protocols.forward_batch import LookAhead
from srt.sampling.sampler import Sampler
from srt.wire.params import TokenLogprobs


@dataclass(slots=True, kw_only=True)
class Run:
    """What one row put out in a step: one token, or several if guesses were right."""

    tokens: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)  # the guesses that were right, by index
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    error: str | None = None

    @property
    def last(self) -> int:
        return self.tokens[-1] if self.tokens else 0


def accept(
    sampler: Sampler,
    logits: torch.Tensor,
    rows: list[int],
    guesses: list[Guess],
    masks: list[bytes | None] | None = None,
    looks: list[LookAhead | None] | None = None,
) -> list[Run]:
    """One run for each of `rows`, all different. logits: [sum(1 + len(guess.tokens)), V] float32, row
    after row: those behind the last known token, then behind each guess. They may be changed in place.

    `masks` are those of `Slice.allowed`, `looks` those of `Slice.look_ahead`, which a row that has a
    mask and guesses needs.
    """
    firsts, first = [], 0
    for guess in guesses:
        firsts.append(first)
        first += 1 + len(guess.tokens)
    assert first == len(logits), (first, len(logits))
    permitted: list[bytes | None] = [None] * len(rows) if masks is None else list(masks)
    runs = [Run() for _ in rows]
    places = [-1] * len(rows)
    alive, depth = list(range(len(rows))), 0
    while alive:
        index = [firsts[each] + 1 + places[each] for each in alive]
        here = [permitted[each] for each in alive]
        is_masked = any(mask is not None for mask in here)
        sampled = sampler.sample(
            logits[index], [rows[each] for each in alive], here if is_masked else None
        )
        going = []
        for at, (each, token) in enumerate(zip(alive, sampled.tokens.tolist(), strict=True)):
            run, error = runs[each], sampled.errors[at]
            if error is not None and depth:  # what was kept is good; the next step meets this again
                sampler.rollback(rows[each], 1)
                continue
            run.error = error
            run.tokens.append(token)
            run.logprobs.append(sampled.logprobs[at])
            following = guesses[each].followers(places[each]).get(token)
            if error is None and following is not None:
                run.kept.append(following)
                places[each] = following
                if permitted[each] is not None:
                    look = None if looks is None else looks[each]
                    assert look is not None, "a mask, a guess and no way to look ahead"
                    permitted[each] = look(run.tokens)
                    if permitted[each] is None:
                        continue
                going.append(each)
        alive, depth = going, depth + 1
    return runs
