"""The outermost layer: names every request, counts every answer, and lets no exception out."""

from __future__ import annotations

import logging
import re
import uuid

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from srt.errors import InternalError
from srt.gateway.errors import error_response
from srt.gateway.feed import ClientGone
from srt.gateway.state import Gateway

logger = logging.getLogger(__name__)
_SAFE = re.compile(r"[A-Za-z0-9._:~-]{1,128}")


class Edge:
    """A plain ASGI layer. The scope gets `request_id`, which every answer carries in `x-request-id` and
    every line of the log names, and `has_given_request_id`: whether the caller sent it. The engine knows
    a request by `engine_id`, see `Gateway.name_request`."""

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self._app = app
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        is_given = _SAFE.fullmatch(given) is not None
        scope["request_id"] = given if is_given else uuid.uuid4().hex
        scope["has_given_request_id"] = is_given
        status = 0

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                name = (b"x-request-id", scope["request_id"].encode())
                message = {**message, "headers": [*message.get("headers", ()), name]}
            await send(message)

        try:
            await self._app(scope, receive, send_named)
        except (ClientGone, ClientDisconnect):
            status = status or 499
        except Exception:
            name = scope["request_id"]
            logger.exception("request %s: %s failed", name, scope["path"])
            if not status:
                error = InternalError(f"the gateway met an error of its own; request {name}")
                await error_response(error)(scope, receive, send_named)
        finally:
            route = getattr(scope.get("route"), "path", "none")
            self._gateway.tally.add("http_requests_total", 1, route, str(status))
            name, engine_id = scope["request_id"], scope.get("engine_id")
            alias = "" if engine_id in (None, name) else f" ({engine_id})"
            logger.debug("request %s%s: %s %d", name, alias, route, status)
