"""What the scheduler sees of a model: launch a step, wait for its result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from srt.protocols.forward_batch import ForwardBatch, StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """Fixed once the worker is ready. `num_pages` counts the padding page 0."""

    vocab_size: int
    context_length: int  # tokens, prompt and output together
    num_pages: int
    page_size: int
    max_rows: int
    end_token_ids: list[int]
    memory_bytes: dict[str, int]  # who got how much: weights, kv, activations, ...
    whole_guesses: bool = False  # as many guesses are computed for a row as there may be, or none


class Ticket(Protocol):
    """A launched step."""

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    def wait(self) -> StepResult:
        """Blocks. Raises whatever the step raised; then no result of it may be used."""
        ...


class Worker(Protocol):
    """Runs steps in the order of their launch; one caller. A row keeps its state between steps."""

    @property
    def facts(self) -> WorkerFacts:
        """Sizes and ids that never change."""
        ...

    def launch(self, batch: ForwardBatch) -> Ticket:
        """Queues the step behind the earlier ones and returns at once. The batch is the worker's from
        here on."""
        ...

    def close(self) -> None:
        """Waits for launched steps, then frees threads and memory. Idempotent."""
        ...


@runtime_checkable
class Idler(Protocol):
    """What a worker may have beside this: work for quiet moments, such as capturing one more graph."""

    def idle(self) -> bool:
        """Called by the launching thread while no request is alive and no step is in flight; does one
        piece of that work and returns. A request that comes meanwhile waits for it, so a piece is
        short. True: there is more. What it raises ends the engine, as a step's error does."""
        ...
