"""Errors as HTTP: one JSON shape, the right status, and what the client should do next.

{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}
"""

from __future__ import annotations

import math
from typing import Any

import orjson
from starlette.responses import Response

from srt.errors import (
    DeadlineExceeded,
    DuplicateRequest,
    EngineDead,
    InternalError,
    NotReady,
    ProtocolError,
    QueueFull,
    ShuttingDown,
    TandemError,
)

# Clients retry 408, 409, 429 and 5xx by themselves. What would fail again must say so, or a request
# that breaks something is sent until everything is broken.
_FINAL = (DeadlineExceeded, DuplicateRequest, InternalError, ProtocolError)
_RETRY_AFTER: tuple[tuple[type[TandemError], float], ...] = (
    (QueueFull, 1.0),
    (NotReady, 2.0),
    (ShuttingDown, 5.0),
    (EngineDead, 5.0),
)


def error_body(error: TandemError) -> dict[str, Any]:
    return {
        "error": {
            "message": error.message,
            "type": error.kind,
            "param": error.param,
            "code": error.code,
        }
    }


def error_headers(error: TandemError) -> dict[str, str]:
    headers: dict[str, str] = {}
    for kind, seconds in _RETRY_AFTER:
        if isinstance(error, kind):
            wait = seconds if error.retry_after is None else error.retry_after
            headers["retry-after"] = str(max(1, math.ceil(wait)))
    if isinstance(error, _FINAL):
        headers["x-should-retry"] = "false"
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return headers


def dump(value: Any) -> bytes:
    """JSON that is always valid UTF-8: a string that cannot be encoded is mended, never fatal."""
    try:
        return orjson.dumps(value)
    except (TypeError, orjson.JSONEncodeError):
        return orjson.dumps(_mended(value))


def _mended(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, dict):
        return {_mended(str(key)): _mended(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [_mended(item) for item in value]
    return value if isinstance(value, (int, float, bool)) or value is None else str(value)


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(dump(body), status, headers, "application/json")


def error_response(error: TandemError) -> Response:
    return json_response(error_body(error), error.status, error_headers(error))
