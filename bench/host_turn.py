"""What the scheduler itself costs: turns with a worker that is done at once.

    python -m bench.host_turn --rows 1 32 256

Every row is a request that decodes. A turn is all the host does for one step: read the inbox, plan,
launch, take the results, encode and send them through a socket. Microseconds, medians over the turns;
`row` is the median turn divided by the rows. The worker's own time (making the results) is left out.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field

from srt.protocols.forward_batch import ForwardBatch, SliceResult, StepResult
from srt.protocols.worker import WorkerFacts
from srt.scheduler.budget import Settings
from srt.scheduler.build import build_scheduler
from srt.scheduler.profile import STAGES
from srt.wire import codec
from srt.wire.messages import Work
from srt.wire.params import SamplingParams, TextOptions
from srt.wire.sockets import ZmqPollingReceiver, ZmqSender, close_context, open_context
from srt.wire.topology import HOPS

PROMPT, END = 64, 7  # tokens of a prompt; a token that nobody draws


@dataclass(slots=True)
class InstantTicket:
    result: StepResult

    def done(self) -> bool:
        return True

    def wait(self) -> StepResult:
        return self.result


@dataclass(slots=True)
class InstantWorker:
    """Draws token 11 everywhere. Notes how long its own work took, which is nobody's cost here."""

    max_rows: int
    num_pages: int
    is_short: bool
    seconds: float = 0.0
    facts: WorkerFacts = field(init=False)

    def __post_init__(self) -> None:
        self.facts = WorkerFacts(
            vocab_size=32_000,
            context_length=1 << 20,
            num_pages=self.num_pages,
            page_size=16,
            max_rows=self.max_rows,
            end_token_ids=[END],
            memory_bytes={},
        )

    def launch(self, batch: ForwardBatch) -> InstantTicket:
        began = time.perf_counter()
        plain = [11 for piece in batch.slices if piece.tokens is None] if self.is_short else []
        longer = batch.slices[len(plain) :]
        results = [SliceResult(tokens=[11] if piece.sample else []) for piece in longer]
        ticket = InstantTicket(StepResult(slices=results, plain=plain))
        self.seconds = time.perf_counter() - began
        return ticket

    def close(self) -> None:
        """It has nothing."""


@dataclass(slots=True, kw_only=True)
class Times:
    """Microseconds: of whole turns, and by stage."""

    turns: list[float]
    stages: dict[str, float]


def time_turns(rows: int, turns: int, *, depth: int, frozen: bool, is_short: bool) -> Times:
    """Of `turns` steps in which `rows` requests decode, after some that warm up."""
    warm = 20 + rows // 64
    length = turns + warm + 8  # nobody ends before the last turn
    num_pages = rows * ((PROMPT + length) // 16 + 2) + 1
    worker = InstantWorker(max_rows=rows, num_pages=num_pages, is_short=is_short)
    context = open_context()
    with tempfile.TemporaryDirectory() as folder:
        inbox = ZmqPollingReceiver(context, f"ipc://{folder}/work", HOPS["work"], codec.work())
        step = ZmqPollingReceiver(context, f"ipc://{folder}/step", HOPS["step"], codec.step())
        outbox = ZmqSender(context, step.endpoint, HOPS["step"])
        settings = Settings(
            max_running=rows,
            max_step_tokens=rows + 8192,
            chunked_prefill_size=8192,
            depth=1 if depth else 0,
            step_log=turns,
        )
        scheduler = build_scheduler(worker, settings, outbox, time.monotonic)
        scheduler.turn([_work(uid, length) for uid in range(1, rows + 1)])
        for _ in range(warm):
            scheduler.turn([])
        if frozen:
            gc.collect()
            gc.freeze()
        times = []
        for _ in range(turns):
            step.drain(0)  # the detokenizer has a core of its own
            began = time.perf_counter()
            scheduler.turn(inbox.drain(0))
            times.append(1e6 * (time.perf_counter() - began - worker.seconds))
        gc.unfreeze()
        groups = scheduler.profile()["groups"]
        stages = groups[f"decode {rows}"]["stages"]
        for channel in (inbox, outbox, step):
            channel.close()
        close_context(context)
    return Times(turns=times, stages={name: 1e6 * stages[name] for name in STAGES})


def _work(uid: int, max_tokens: int) -> Work:
    return Work(
        uid=uid,
        rid=f"request-{uid}",
        token_ids=[uid % 30_000 + 20] * PROMPT,
        params=SamplingParams(max_tokens=max_tokens, seed=uid),
        text=TextOptions(),
        cache_salt=str(uid),
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--turns", type=int, default=1000)
    parser.add_argument("--depth", type=int, choices=(0, 1), default=1)
    parser.add_argument(
        "--no-freeze",
        dest="freeze",
        action="store_false",
        help="let the collector walk all objects",
    )
    parser.add_argument(
        "--no-short", dest="short", action="store_false", help="a result object for every row"
    )
    options = parser.parse_args(argv)
    print(f"{'rows':>5}{'turn':>9}{'p99':>9}{'row':>8}  |" + "".join(f"{s:>10}" for s in STAGES))
    for rows in options.rows:
        found = time_turns(
            rows,
            options.turns,
            depth=options.depth,
            frozen=options.freeze,
            is_short=options.short,
        )
        turn = statistics.median(found.turns)
        p99 = sorted(found.turns)[int(0.99 * len(found.turns))]
        stages = "".join(f"{found.stages[name]:>10.0f}" for name in STAGES)
        print(f"{rows:>5}{turn:>9.0f}{p99:>9.0f}{turn / rows:>8.2f}  |{stages}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
