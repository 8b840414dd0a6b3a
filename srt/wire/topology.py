"""Who binds, which socket, how much may wait: one row per hop.

| hop   | from        | to          | pattern         | binds       | high-water mark, messages |
|-------|-------------|-------------|-----------------|-------------|---------------------------|
| front | client      | tokenizer   | DEALER - ROUTER | tokenizer   | 4,096 per client          |
| work  | tokenizer   | scheduler   | PUSH - PULL     | scheduler   | none                      |
| step  | scheduler   | detokenizer | PUSH - PULL     | detokenizer | none                      |
| text  | detokenizer | tokenizer   | PUSH - PULL     | tokenizer   | none                      |
| order | scheduler   | other ranks | PUSH - PULL     | each rank   | none                      |

The inner hops have no mark because admission already bounds what can be in flight, and because a
blocked scheduler would stop every stream. The front hop has one: a client that does not read is cut.
The ROUTER is mandatory: an unroutable reply is an error, hence an abort.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

HopName = Literal["front", "work", "step", "text", "order"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """A hop's sockets: who binds, the ZMQ pattern and how much may be queued for one peer."""

    name: HopName
    binder: Literal["tokenizer", "scheduler", "detokenizer", "rank"]
    pattern: Literal["dealer-router", "push-pull"]
    high_water_mark: int  # messages; 0: no limit


HOPS: dict[HopName, Hop] = {
    hop.name: hop
    for hop in (
        Hop(name="front", binder="tokenizer", pattern="dealer-router", high_water_mark=4096),
        Hop(name="work", binder="scheduler", pattern="push-pull", high_water_mark=0),
        Hop(name="step", binder="detokenizer", pattern="push-pull", high_water_mark=0),
        Hop(name="text", binder="tokenizer", pattern="push-pull", high_water_mark=0),
        Hop(name="order", binder="rank", pattern="push-pull", high_water_mark=0),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """One zmq endpoint per hop, e.g. `ipc:///run/user/0/tandem-x/front`, all private. `public` is one
    more for the front, as the user wished it: ipc or tcp, guarded by keys if there are any."""

    front: str
    work: str
    step: str
    text: str
    order: str  # a rank's own one ends with its number, see `order_of`
    public: str | None = None

    @classmethod
    def in_folder(cls, folder: str, public: str | None = None) -> Addresses:
        """ipc endpoints inside `folder` (mode 0700, made by the supervisor)."""
        return cls(
            front=f"ipc://{folder}/front",
            work=f"ipc://{folder}/work",
            step=f"ipc://{folder}/step",
            text=f"ipc://{folder}/text",
            order=f"ipc://{folder}/order-",
            public=public,
        )

    @property
    def folder(self) -> Path:
        """Where the ipc files lie. What else lies there is as private."""
        return Path(self.work.removeprefix("ipc://")).parent

    def order_of(self, rank: int) -> str:
        return f"{self.order}{rank}"
