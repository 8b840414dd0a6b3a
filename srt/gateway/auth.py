"""Who may call. Keys come as `Authorization: Bearer KEY` or `x-api-key: KEY`."""

from __future__ import annotations

import hmac
from collections.abc import Iterable

from starlette.requests import Request

from srt.errors import Forbidden, Unauthorized
from srt.gateway.settings import GatewaySettings


def key_of(request: Request) -> str | None:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return request.headers.get("x-api-key") or None


class Doors:
    """The two levels: callers and administrators. With no key configured, a door is open; the server
    then listens on loopback only, unless told otherwise."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._api = settings.api_keys
        self._admin = settings.admin_keys or settings.api_keys

    async def caller(self, request: Request) -> None:
        """Raises Unauthorized. An admin key opens this door too."""
        if self._api and not _matches(key_of(request), (*self._api, *self._admin)):
            raise _unknown(request)

    async def admin(self, request: Request) -> None:
        """Raises Unauthorized for an unknown key, Forbidden for a caller's key."""
        key = key_of(request)
        if not self._admin or _matches(key, self._admin):
            return
        if _matches(key, self._api):
            raise Forbidden("this call needs the admin key")
        raise _unknown(request)


def _matches(key: str | None, allowed: Iterable[str]) -> bool:
    if key is None:
        return False
    sent = key.encode("utf-8", "replace")
    # Every key is compared, so that the time taken tells nothing.
    return sum(hmac.compare_digest(sent, known.encode()) for known in allowed) > 0


def _unknown(request: Request) -> Unauthorized:
    if key_of(request) is None:
        return Unauthorized("no API key; send `Authorization: Bearer KEY`")
    return Unauthorized("the API key is not known")
