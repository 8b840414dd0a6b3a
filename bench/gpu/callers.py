"""One process of callers: `python -m bench.gpu.callers`. `Calls` come in as JSON, what was heard goes
out. Times are of the machine's monotonic clock, which all processes share."""

from __future__ import annotations

import asyncio
import sys
import time

import msgspec
import uvloop

from bench.gpu.sets import Ask
from bench.record import Record
from bench.targets import HttpTarget
from bench.workloads import Item

MODEL = "measured"


class Calls(msgspec.Struct, kw_only=True):
    """`start`: when the first may go out."""

    url: str
    start: float
    asks: list[Ask]


class Heard(msgspec.Struct, kw_only=True):
    """Of one request: when it was sent and ended, tokens of its answer, gaps between the pieces."""

    sent: float
    first: float
    end: float
    tokens: int
    gaps: list[float]
    error: str | None = None


async def call(calls: Calls) -> list[Heard]:
    targets = {
        heat: HttpTarget(calls.url, model=MODEL, temperature=heat)
        for heat in {ask.temperature for ask in calls.asks}
    }

    async def one(ask: Ask) -> Heard:
        record = Record()
        await asyncio.sleep(max(0.0, calls.start + ask.at - time.perf_counter()))
        item = Item(prompt="", max_tokens=ask.max_tokens, token_ids=tuple(ask.token_ids))
        await targets[ask.temperature].ask(item, [], record, 0.0)
        error = record.error
        if error is None and record.completion_tokens != ask.max_tokens:
            error = f"{record.completion_tokens} tokens instead of {ask.max_tokens}"
        return Heard(
            sent=record.sent,
            first=record.arrivals[0][0] if record.arrivals else record.end,
            end=record.end,
            tokens=record.completion_tokens,
            gaps=[round(gap, 6) for gap in record.itl],
            error=error,
        )

    return list(await asyncio.gather(*map(one, calls.asks)))


def main() -> int:
    calls = msgspec.json.decode(sys.stdin.buffer.read(), type=Calls)
    heard = msgspec.json.encode(uvloop.run(call(calls)))
    # Not sys.stdout.buffer: where Python does not buffer, it may write no more than a pipe holds.
    with open(sys.stdout.fileno(), "wb", closefd=False) as out:
        out.write(heard)
    return 0


if __name__ == "__main__":
    sys.exit(main())
