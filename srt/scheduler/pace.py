"""How many guessed tokens each decode may verify. Speculation that does not pay makes itself small.

A verified guess costs one more token in the step's forward. That is nearly free while the forward waits
for weights to come from memory, and costs what any token costs once it is bound by arithmetic. So a
step has a `budget` of decode tokens, guesses included, up to which guesses are worth their price; among
many running requests nothing of it is left for guesses. Below that, `srt.scheduler.balance` measures.

Each request has a length of its own: doubled when all guesses were right, cut to one more than were
right otherwise. Misses in a row make it pause for 1, 2, 4 .. 64 decodes, so a text that nobody can guess
costs nearly nothing, and one that becomes predictable is found again.
"""

from __future__ import annotations

from srt.scheduler.balance import Balance
from srt.scheduler.request import Request

LONGEST_WAIT = 64  # decode steps
FREE_MISSES = 2  # in a row, before the first pause


class Pace:
    """`most` 0: nobody ever gets a guess."""

    def __init__(
        self,
        *,
        most: int,
        budget: int,
        is_eager: bool = False,
        knows_when: bool = False,
        is_whole: bool = False,
    ) -> None:
        """`is_eager`: guess always, whether it pays or not, to see whether guesses change an answer.
        `knows_when`: the drafter itself stops where its guesses get unlikely; it gets all there is.
        `is_whole`: fewer guesses than `most` cost the same, and a row without any costs more."""
        self.balance = Balance()
        self._knows_when = knows_when
        self._is_whole = is_whole
        self._is_eager = is_eager
        self._most = most
        self._budget = budget

    @property
    def guesses(self) -> bool:
        """Whether anybody ever gets a guess."""
        return self._most > 0

    def allot(self, due: list[Request]) -> list[int]:
        """For each of the requests that decode in the next step, how many guesses it may have. Never
        more than it may still generate behind the token it is sure of."""
        if not self._most or not due:
            return [0] * len(due)
        share = min(self._most, self._budget // len(due) - 1)
        least = self._most if self._is_whole else 1
        if share < least or not (self._is_eager or self.balance.pays(len(due))):
            return [0] * len(due)
        return [self._length(request, share) for request in due]

    def _length(self, request: Request, share: int) -> int:
        if request.remaining < 2:
            return 0
        if self._is_eager or self._is_whole:
            return min(share, request.remaining - 1)
        if request.draft_wait:
            request.draft_wait -= 1
            return 0
        is_open = self._knows_when or request.draft_length is None
        wanted = share if is_open else request.draft_length or 1
        return min(wanted, share, request.remaining - 1)

    def learn(self, request: Request, drafted: int, accepted: int) -> None:
        """`drafted` guesses were verified, the first `accepted` of them were right."""
        if accepted:
            request.draft_misses = 0
        else:
            request.draft_misses += 1
            doubled = request.draft_misses - FREE_MISSES
            if doubled > 0:
                request.draft_wait = min(1 << (doubled - 1), LONGEST_WAIT)
        if accepted == drafted:
            known = self._most if request.draft_length is None else request.draft_length
            request.draft_length = min(self._most, 2 * max(known, drafted))
        else:
            request.draft_length = accepted + 1
