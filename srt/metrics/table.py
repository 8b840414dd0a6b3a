"""Every metric of the engine: one row each. The names are frozen by a test; dashboards depend on them.

Units are base units (seconds, tokens, bytes, ratios of 1). Histograms cover 1 ms to 10 minutes.
Probes of health (`Generate.is_probe`) are in no count or time of requests and tokens; gauges, steps and
the host's time have them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]

PREFIX = "tandem_"
SECONDS = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75,
    1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One metric. `labels` names the labels every sample of it has, in order."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = SECONDS  # upper bounds; histograms only


def _gauge(name: str, help: str, *labels: str) -> Row:
    return Row(name=name, kind="gauge", help=help, labels=labels)


def _counter(name: str, help: str, *labels: str) -> Row:
    return Row(name=name, kind="counter", help=help, labels=labels)


def _histogram(name: str, help: str, *labels: str) -> Row:
    return Row(name=name, kind="histogram", help=help, labels=labels)


ROWS: tuple[Row, ...] = (
    _gauge("requests_running", "requests that prefill or decode"),
    _gauge("requests_waiting", "requests that wait, by the reason of the last refusal", "reason"),
    _gauge("waiting_tokens", "prompt tokens of the requests that wait"),
    _gauge("kv_usage_ratio", "share of the KV pages that live requests hold"),
    _gauge("kv_tokens_used", "KV tokens that live requests hold"),
    _gauge("kv_tokens_evictable", "KV tokens that the prefix cache holds and can give back"),
    _gauge("kv_tokens_free", "KV tokens that nobody holds"),
    _gauge("prefill_room_tokens", "prompt tokens that the latest step with a prompt had room for"),
    _counter("prefix_tokens_asked_total", "prompt tokens looked up in the prefix cache"),
    _counter("prefix_tokens_hit_total", "prompt tokens found there", "tier"),
    _counter("prompt_tokens_total", "prompt tokens of finished prefills, cached ones included"),
    _counter("generation_tokens_total", "tokens generated"),
    _counter("requests_finished_total", "requests that ended", "reason"),
    _counter("requests_rejected_total", "requests refused on arrival", "reason"),
    _counter("aborted_total", "requests aborted", "by"),
    _counter("retractions_total", "running requests put back into the queue for lack of pages"),
    _counter("retracted_tokens_total", "tokens whose KV was given up by retraction"),
    _counter("draft_verifications_total", "decodes that verified guessed tokens"),
    _counter("draft_tokens_total", "guessed tokens verified"),
    _counter("draft_accepted_total", "guessed tokens that were right, by place", "position"),
    _counter("audit_failures_total", "violations found by audits"),
    _histogram("ttft_seconds", "arrival to first token"),
    _histogram("itl_seconds", "one token to the next of the same request"),
    _counter("itl_broken_total", "gaps between two tokens of a request above --max-itl-ms"),
    _histogram("e2e_seconds", "arrival to last token"),
    _histogram("queue_seconds", "arrival to first admission"),
    _histogram("prefill_seconds", "first admission to first token"),
    _histogram("decode_seconds", "first token to last token"),
    _histogram("step_seconds", "one step, by what the worker did", "phase"),
    _counter("host_seconds_total", "time the scheduler spent, by stage", "stage"),
    _counter("steps_total", "steps launched"),
    _gauge("memory_bytes", "memory, by use", "use"),
    _gauge("startup_seconds", "time that each phase of the scheduler's start took", "phase"),
    _histogram("grammar_compile_seconds", "arrival of a request to its compiled grammar"),
    _counter("grammar_refused_total", "grammars that could not be compiled within their limits"),
)
