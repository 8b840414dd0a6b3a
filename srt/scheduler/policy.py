"""Who is admitted first. Pure: lists of requests in, an order out.

Three layers, outermost first:

1. *Level.* Only under `priority`: a request's level is its priority plus one for every
   `LEVEL_SECONDS` it has waited, so a lower priority is delayed, never starved. Elsewhere all
   requests are on one level.
2. *Shares.* Within a level the tenant that has been given the fewest tokens goes next (prompt tokens
   computed and tokens generated count alike, see `Shares`). With one tenant this changes nothing;
   with several, a flood of one delays the others by at most the request that is being admitted.
3. *Policy.* Within a tenant:
   - `fcfs`: by arrival;
   - `longest-prefix`: most cached tokens first, plus `PREFIX_TOKENS_PER_SECOND` for every second of
     waiting; only the `PREFIX_WINDOW` oldest are looked up, the others follow by arrival;
   - `priority`: higher level first, then by arrival.
   Whoever was overtaken `MAX_OVERTAKES` times by later requests of its tenant goes before them all:
   the bound that holds whatever the clock does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heappop, heappush

from srt.scheduler.request import Request

POLICIES = ("fcfs", "longest-prefix", "priority")

LEVEL_SECONDS = 10.0
PREFIX_TOKENS_PER_SECOND = 500.0
PREFIX_WINDOW = 64
MAX_OVERTAKES = 64
TENANTS_REMEMBERED = 1024


class Shares:
    """How many tokens each tenant was given. A tenant that comes back after a pause starts no lower
    than the least served of those that are there, so nobody saves up a claim to the whole engine."""

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._live: dict[str, int] = {}

    def served(self, tenant: str) -> float:
        return self._served.get(tenant, 0.0)

    @property
    def num_tenants(self) -> int:
        """Tenants with live requests."""
        return len(self._live)

    def arrive(self, tenant: str) -> None:
        """A request of `tenant` is there. Paired with `leave`."""
        if tenant not in self._live:
            floor = min((self.served(other) for other in self._live), default=0.0)
            self._served[tenant] = max(self.served(tenant), floor)
        self._live[tenant] = self._live.get(tenant, 0) + 1

    def leave(self, tenant: str) -> None:
        """A request of `tenant` is gone. Of the absent, only the most served are remembered: the
        others would be lifted on their return anyway."""
        self._live[tenant] -= 1
        if not self._live[tenant]:
            del self._live[tenant]
            if len(self._served) > TENANTS_REMEMBERED:
                absent = [other for other in self._served if other not in self._live]
                if absent:
                    del self._served[min(absent, key=self.served)]

    def charge(self, tenant: str, tokens: int) -> None:
        self._served[tenant] = self.served(tenant) + tokens


def level(request: Request, policy: str, now: float) -> int:
    """The level of layer 1."""
    if policy != "priority":
        return 0
    return request.work.priority + int((now - request.arrived) / LEVEL_SECONDS)


def rank(
    waiting: Sequence[Request],
    policy: str,
    now: float,
    peek: Callable[[Request], int],
) -> list[Request]:
    """Layer 3. `waiting` is in order of arrival; `peek` gives a request's cached tokens."""
    if policy == "longest-prefix":
        window = waiting[:PREFIX_WINDOW]
        score = {
            r.uid: peek(r) + PREFIX_TOKENS_PER_SECOND * max(now - r.arrived, 0.0) for r in window
        }
        ranked = sorted(window, key=lambda r: (-score[r.uid], r.sequence))
        ranked.extend(waiting[PREFIX_WINDOW:])
    elif policy == "priority":
        ranked = sorted(waiting, key=lambda r: (-level(r, policy, now), r.sequence))
    else:
        return list(waiting)
    overdue = [r for r in waiting if r.overtaken >= MAX_OVERTAKES]
    if overdue:
        ranked = overdue + [r for r in ranked if r.overtaken < MAX_OVERTAKES]
    return ranked


def share_out(
    ranked: Sequence[Request], policy: str, now: float, shares: Shares
) -> Iterator[Request]:
    """Layers 1 and 2 over a ranked list. Lazy: costs a step of a heap per request taken. Each request
    handed out counts against its tenant as if it had been admitted."""
    if shares.num_tenants < 2:
        yield from ranked
        return
    queues: dict[str, list[Request]] = {}
    for request in reversed(ranked):
        queues.setdefault(request.tenant, []).append(request)
    place = {request.uid: i for i, request in enumerate(ranked)}
    heap: list[tuple[int, float, int, str]] = []

    def put(tenant: str, served: float) -> None:
        head = queues[tenant][-1]
        heappush(heap, (-level(head, policy, now), served, place[head.uid], tenant))

    for tenant in queues:
        put(tenant, shares.served(tenant))
    while heap:
        _, served, _, tenant = heappop(heap)
        request = queues[tenant].pop()
        yield request
        if queues[tenant]:
            put(tenant, served + len(request.tokens))


def note_overtaking(waiting: Iterable[Request], admitted: Request) -> None:
    """Counts `admitted` against those of its tenant that came before it. `waiting` is in order of
    arrival."""
    for request in waiting:
        if request.sequence >= admitted.sequence:
            return
        if request.tenant == admitted.tenant:
            request.overtaken += 1
