"""For whoever runs the server: what it is, what it is doing and why, and the few things to do to it."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from srt.errors import InvalidRequest, NotFound
from srt.gateway import capabilities
from srt.gateway.auth import Doors
from srt.gateway.body import read_object
from srt.gateway.checks import refuse
from srt.gateway.errors import json_response
from srt.gateway.state import Gateway

MAX_FLUSH_WAIT = 3600.0  # seconds


def routes(gateway: Gateway, doors: Doors) -> APIRouter:
    router = APIRouter(tags=["admin"])
    admin = [Depends(doors.admin)]

    @router.get("/server_info", dependencies=admin)
    async def server_info() -> Response:
        return json_response(describe(gateway))

    @router.get("/capabilities", dependencies=[Depends(doors.caller)])
    async def get_capabilities() -> Response:
        return json_response(capabilities.report(gateway.settings.strict_fields))

    @router.get("/v1/engine/config", dependencies=admin)
    async def engine_config() -> Response:
        return json_response(await gateway.ask(gateway.engine.engine_config()))

    @router.get("/requests", dependencies=admin)
    async def list_requests() -> Response:
        found = await gateway.ask(gateway.engine.requests())
        return json_response({**found, "gateway": gateway.live.request_ids()})

    @router.get("/requests/{request_id:path}", dependencies=admin)
    async def get_request(request_id: str) -> Response:
        return json_response(await look_up(gateway, request_id))

    @router.post("/flush_cache", dependencies=admin)
    async def flush_cache(request: Request) -> Response:
        wait = read_wait(request.query_params.get("wait", "0"))
        freed = await gateway.within(
            wait + gateway.settings.ask_seconds, gateway.engine.flush_cache(wait)
        )
        return json_response({"status": "flushed", **freed})

    @router.post("/abort", dependencies=[Depends(doors.caller)])
    async def abort(request: Request) -> Response:
        body = await read_object(request, gateway.settings.max_body_bytes)
        for name in body:
            if name not in ("request_id", "all"):
                refuse(name[:100], "unknown field; give request_id or all")
        if body.get("all") is True:
            await doors.admin(request)
            aborted = gateway.live.request_ids()
        else:
            request_id = body.get("request_id")
            if not isinstance(request_id, str):
                refuse("request_id", "must be a string; or give all: true")
            aborted = [request_id] if request_id in gateway.live else []
        for request_id in aborted:
            for rid in gateway.live.rids(request_id):
                await gateway.engine.abort(rid)
        return json_response({"aborted": aborted, "live": len(gateway.live)})

    return router


def read_wait(text: str) -> float:
    """Seconds that a flush may wait for the engine to be idle."""
    try:
        wait = float(text)
    except ValueError:
        wait = -1.0
    if not 0 <= wait <= MAX_FLUSH_WAIT:
        raise InvalidRequest(
            f"wait: must be a number of seconds in [0, {MAX_FLUSH_WAIT:g}]", param="wait"
        )
    return wait


async def look_up(gateway: Gateway, request_id: str) -> dict[str, Any]:
    """All engine requests of one caller's request. Raises NotFound when none is live."""
    samples: list[Any] = []
    for rid in gateway.live.rids(request_id) or (request_id,):
        try:
            found = await gateway.ask(gateway.engine.request(rid))
            samples.extend(found["requests"])
        except NotFound:
            continue  # one prompt of several may be finished
    if not samples:
        raise NotFound(f"no live request is called {request_id[:200]!r}")
    return {"id": request_id, "requests": samples}


def describe(gateway: Gateway) -> dict[str, Any]:
    """Everything but the keys."""
    settings = msgspec.to_builtins(gateway.settings)
    for name in ("api_keys", "admin_keys"):
        settings[name] = len(settings[name])
    welcome = msgspec.to_builtins(gateway.engine.welcome)
    return {
        "version": gateway.version,
        "model": gateway.model,
        "engine": {name: value for name, value in welcome.items() if name not in ("t", "rid")},
        "settings": settings,
        "started": gateway.started,
        "uptime_seconds": int(time.time()) - gateway.started,
        "live_requests": len(gateway.live),
        "is_draining": gateway.live.is_draining,
    }
