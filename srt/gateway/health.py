"""Is it alive, is it ready, does it really answer. None of these is behind a key or behind a queue.

The stall rule: `/health` is 503 at once when a process of the engine has died, when the tokenizer
process does not answer within `health_seconds`, and when the ring through all processes has not turned
for `stall_seconds` (--stall-seconds). A long step is no stall: set it above the longest one.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from contextlib import aclosing

from fastapi import APIRouter
from starlette.responses import Response

from srt.errors import InternalError, NotReady, ShuttingDown, TandemError
from srt.gateway.errors import json_response
from srt.gateway.state import Gateway
from srt.wire.messages import Generate
from srt.wire.params import SamplingParams

logger = logging.getLogger(__name__)
_TOP_PRIORITY = 1_000_000


def routes(gateway: Gateway) -> APIRouter:
    router = APIRouter(tags=["health"])
    num_seen = 0  # tokens that earlier probes know of

    @router.get("/health")
    async def health() -> Response:
        return json_response({"status": "ok", **await gateway.ask_health()})

    @router.get("/ready")
    async def ready() -> Response:
        if gateway.live.is_draining:
            raise ShuttingDown("draining: open requests end, new ones are refused")
        if not gateway.has_answered:
            raise NotReady("warming: the first token has not been produced yet")
        return json_response({"status": "ready", **await gateway.ask_health()})

    @router.get("/health_generate")
    async def health_generate() -> Response:
        nonlocal num_seen
        is_busy = gateway.num_tokens > num_seen
        num_seen = gateway.num_tokens
        if is_busy:
            await gateway.ask_health()  # whoever answered before may be dead since
        else:
            await probe(gateway)
        return json_response({"status": "ok", "checked": "traffic" if is_busy else "probe"})

    return router


async def probe(gateway: Gateway) -> None:
    """One token, end to end. Raises a TandemError within `probe_seconds` if none comes."""
    seconds = gateway.settings.probe_seconds
    ask = Generate(
        rid=f"probe-{uuid.uuid4().hex[:12]}",
        prompt="Hi",
        params=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
        priority=_TOP_PRIORITY,
        deadline=seconds,
        tenant="probe",
        is_probe=True,
    )
    num_tokens = 0
    try:
        async with (
            asyncio.timeout(seconds + 1),
            aclosing(gateway.engine.stream_request(ask)) as outputs,
        ):
            async for output in outputs:
                num_tokens += len(output.token_ids)
    except TimeoutError:
        raise NotReady(f"no token came within {seconds:g} s") from None
    if not num_tokens:
        raise InternalError("the probe ended without a token")
    gateway.has_answered = True


async def warm(gateway: Gateway) -> None:
    """Probe until the first token was produced; then the server is ready."""
    pause = 0.1
    while not gateway.has_answered:
        try:
            await probe(gateway)
        except TandemError as error:
            logger.info("not ready yet: %s", error.message)
            await asyncio.sleep(pause)
            pause = min(2.0, pause * 2)
    logger.info("ready: the first token was produced")
