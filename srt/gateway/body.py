"""From the bytes of a request to a JSON object, refusing early whatever is not one."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.requests import Request

from srt.errors import InvalidRequest, RequestTooLarge, UnsupportedMediaType


async def read_object(request: Request, max_bytes: int) -> dict[str, Any]:
    """Raises UnsupportedMediaType, RequestTooLarge, InvalidRequest; `ClientDisconnect` when the
    client is gone. The parser has its own depth limit, so nesting is not a danger."""
    _check_type(request)
    data = await _read(request, max_bytes)
    if not data:
        raise InvalidRequest("the body is empty; a JSON object is expected")
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not JSON in UTF-8: {error}") from None
    if not isinstance(body, dict):
        raise InvalidRequest(f"the body must be a JSON object, not {_kind(body)}")
    return body


def _check_type(request: Request) -> None:
    content_type = request.headers.get("content-type")
    if content_type is not None:
        kind, *parameters = [part.strip().lower() for part in content_type.split(";")]
        if kind != "application/json":
            raise UnsupportedMediaType(
                f"content-type is {kind[:80]!r}; application/json is expected"
            )
        for parameter in parameters:
            name, _, value = parameter.partition("=")
            if name == "charset" and value.strip("\"'") not in ("utf-8", "utf8"):
                raise UnsupportedMediaType(f"charset is {value[:80]!r}; JSON travels in utf-8")
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() != "identity":
        raise UnsupportedMediaType(f"content-encoding {encoding[:80]!r} is not accepted")


async def _read(request: Request, max_bytes: int) -> bytes:
    announced = request.headers.get("content-length", "")
    if announced.isascii() and announced.isdigit() and int(announced[:19]) > max_bytes:
        raise _too_large(max_bytes)
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > max_bytes:
            raise _too_large(max_bytes)
        parts.append(part)
    return b"".join(parts)


def _too_large(max_bytes: int) -> RequestTooLarge:
    return RequestTooLarge(f"the body is larger than {max_bytes} bytes (--max-body-mb)")


def _kind(value: object) -> str:
    names = {list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
