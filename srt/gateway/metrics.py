"""GET /metrics: the scheduler's snapshot and the gateway's own figures as Prometheus text."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from srt.errors import TandemError
from srt.gateway.state import Gateway

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Snapshot = dict[str, dict[str, Any]]


def routes(gateway: Gateway) -> APIRouter:
    router = APIRouter(tags=["metrics"])

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(render(await collect(gateway)), media_type=CONTENT_TYPE)

    return router


async def collect(gateway: Gateway) -> Snapshot:
    """Without the engine's figures when it does not answer, which is a figure as well."""
    tally = gateway.tally
    try:
        seconds = gateway.settings.health_seconds
        engine: Snapshot = await gateway.within(seconds, gateway.engine.metrics())
        tally.put("engine_up", 1)
    except TandemError:
        engine = {}
        tally.put("engine_up", 0)
    tally.put("http_live_requests", len(gateway.live))
    build = {
        "version": gateway.version,
        "model": gateway.model,
        "config_hash": gateway.engine.welcome.config_hash,
    }
    info = {"type": "gauge", "help": "what runs here", "samples": [[build, 1]]}
    return {**engine, **tally.snapshot(), "tandem_build_info": info}


def render(snapshot: Snapshot) -> str:
    """The text format, version 0.0.4. Input: see `Registry.snapshot`."""
    lines: list[str] = []
    for name, entry in snapshot.items():
        lines.append(f"# HELP {name} {_escape(entry['help'])}")
        lines.append(f"# TYPE {name} {entry['type']}")
        for labels, value in entry["samples"]:
            if entry["type"] == "histogram":
                lines.extend(_histogram(name, labels, value, entry["buckets"]))
            else:
                lines.append(_line(name, labels, value))
    return "\n".join(lines) + "\n"


def _histogram(
    name: str, labels: dict[str, str], value: dict[str, Any], buckets: list[float]
) -> Iterator[str]:
    bounds = [*(f"{bound:g}" for bound in buckets), "+Inf"]
    for bound, count in zip(bounds, accumulate(value["counts"]), strict=True):
        yield _line(f"{name}_bucket", {**labels, "le": bound}, count)
    yield _line(f"{name}_sum", labels, value["sum"])
    yield _line(f"{name}_count", labels, value["count"])


def _line(name: str, labels: dict[str, str], value: float) -> str:
    inside = ",".join(f'{key}="{_escape(text, quotes=True)}"' for key, text in labels.items())
    number = repr(int(value)) if float(value).is_integer() else repr(float(value))
    return f"{name}{{{inside}}} {number}" if inside else f"{name} {number}"


def _escape(text: str, quotes: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quotes else text
