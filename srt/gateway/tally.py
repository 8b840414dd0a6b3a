"""What the gateway itself counts. The engine's own figures come from the scheduler."""

from __future__ import annotations

from srt.metrics.registry import Registry
from srt.metrics.table import Row


def _counter(name: str, help: str, *labels: str) -> Row:
    return Row(name=name, kind="counter", help=help, labels=labels)


ROWS: tuple[Row, ...] = (
    _counter("http_requests_total", "HTTP answers, by route and status", "route", "status"),
    _counter("http_disconnects_total", "callers that hung up before their answer was complete"),
    _counter("http_slow_readers_total", "streams aborted because the caller did not read"),
    Row(name="http_live_requests", kind="gauge", help="generating requests that are open"),
    Row(name="http_ttft_seconds", kind="histogram", help="request read to first output, streams"),
    Row(name="engine_up", kind="gauge", help="1 if the engine answered this scrape"),
)


def build_tally() -> Registry:
    return Registry(ROWS)
