"""What the routes of one gateway share."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import Request

from srt.errors import EngineDead, ShuttingDown, TandemError
from srt.gateway.auth import key_of
from srt.gateway.checks import Bounds
from srt.gateway.engine import Engine
from srt.gateway.live import Live
from srt.gateway.settings import GatewaySettings
from srt.gateway.tally import build_tally
from srt.gateway.version import find_version
from srt.metrics.registry import Registry

T = TypeVar("T")
logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Gateway:
    engine: Engine
    settings: GatewaySettings
    live: Live = field(default_factory=Live)
    tally: Registry = field(default_factory=build_tally)
    started: int = field(default_factory=lambda: int(time.time()))  # unix seconds
    version: str = field(default_factory=find_version)
    has_answered: bool = False  # the first real token was produced
    num_tokens: int = 0  # that passed through here

    @property
    def model(self) -> str:
        return self.settings.model or self.engine.welcome.model

    @property
    def fingerprint(self) -> str:
        """Changes with the engine's configuration, so that a caller of `seed` can tell."""
        return f"fp_{self.engine.welcome.config_hash[:16]}"

    def bounds(self) -> Bounds:
        return Bounds(settings=self.settings, vocab_size=self.engine.welcome.vocab_size)

    def tenant(self, request: Request) -> str:
        name = request.headers.get("x-tandem-tenant", "")[:64]
        return self.settings.tenant_of(key_of(request), name)

    def name_request(self, request: Request, chosen: str | None) -> str:
        """The engine's name for it, put into the scope as `engine_id`: the one that the body chose, or
        this answer's `x-request-id`. One that came in that header gets a part that makes it unique,
        since the caller may send many requests under it. A chosen one is the answer's `x-request-id`
        too if the caller sent none."""
        scope = request.scope
        is_given: bool = scope["has_given_request_id"]
        if chosen is not None and not is_given:
            scope["request_id"] = chosen
        name: str = scope["request_id"]
        unique = f"{name}-{uuid.uuid4().hex[:12]}" if is_given else name
        scope["engine_id"] = unique if chosen is None else chosen
        return scope["engine_id"]  # type: ignore[no-any-return]

    async def drain(self) -> None:
        """Refuse new work, give open requests their time, then end them with an error."""
        self.live.is_draining = True
        if await self.live.wait_empty(self.settings.drain_seconds):
            return
        logger.warning("%d requests are still open after the drain time", len(self.live))
        try:
            await self.engine.abort(None)
        except TandemError as error:
            logger.warning("they could not be aborted: %s", error.message)
        await self.live.wait_empty(2.0)

    def seen_by_caller(self, error: TandemError) -> TandemError:
        """Requests that the drain ended did not ask for it."""
        if self.live.is_draining and error.code == "aborted":
            return ShuttingDown("the server is shutting down; the answer is not complete")
        return error

    async def within(self, seconds: float, work: Coroutine[Any, Any, T]) -> T:
        """A question's answer. Raises EngineDead if there is none in time."""
        try:
            async with asyncio.timeout(seconds):
                return await work
        except TimeoutError:
            raise EngineDead(f"the engine gave no answer within {seconds:g} s") from None

    async def ask(self, work: Coroutine[Any, Any, T]) -> T:
        return await self.within(self.settings.ask_seconds, work)

    async def ask_health(self) -> dict[str, Any]:
        """Raises a TandemError when the engine does not answer in time or has not moved."""
        seconds = self.settings.health_seconds
        health = await self.within(seconds, self.engine.health(seconds))
        age = float(health.get("engine_age", 0.0))
        if age > self.settings.stall_seconds or health.get("phase") == "stalled":
            cause = health.get("cause")  # the engine may know it before this process is told
            raise EngineDead(cause or f"the engine has not moved for {age:.1f} s")
        return health
