"""One connection: a request must arrive whole, in time and in HTTP, and who fails that is told so in the
shape of every other error. uvicorn's own protocol has no clock for a request on its way in and no bound
on its head, and it answers broken framing in plain text."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
import uuid
from http import HTTPStatus
from typing import Literal

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from srt.errors import DeadlineExceeded, InvalidRequest, RequestTooLarge, TandemError
from srt.gateway.errors import dump, error_body, error_headers
from srt.gateway.state import Gateway

logger = logging.getLogger(__name__)
MAX_HEAD_BYTES = 65_536  # request line and headers; more than proxies pass on
# Bytes of a field beside its name and value, and of the first line beside its URL
_FIELD_BYTES, _LINE_BYTES = len(b": \r\n"), len(b"GET  HTTP/1.1\r\n")
_OFFER = re.compile(rb"\r\nupgrade(?= *:)", re.IGNORECASE)


class _HeadTooLarge(Exception):
    """Raised in the parser's call, so that it stops before the application hears of the request."""


class NotArrived(DeadlineExceeded):
    """A 408 as well, but the caller's doing: the engine had no request to be late for."""

    kind = "invalid_request_error"


class Connection(HttpToolsProtocol):
    """The application's `state.gateway` has the settings and the tally. One clock runs from the first
    byte of a request (or from the connection's start) to its last. Between requests uvicorn's
    keep-alive time counts."""

    _arriving: Literal["nothing", "head", "body"] = "nothing"
    _head_bytes = 0
    _clock: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        was_body = self._arriving == "body"
        if not was_body:
            data = _decline_upgrade(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._arriving == "head":
            self._head_bytes += 0 if was_body else len(data)  # one field may come without end
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(_head_too_large())
        elif self._arriving == "nothing" and not self._is_answering:
            self._start_clock()  # empty lines before a request: they stopped uvicorn's clock

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._arriving, self._head_bytes = "head", 0
        self._start_clock()

    def on_headers_complete(self) -> None:
        fields = sum(len(name) + len(value) + _FIELD_BYTES for name, value in self.headers)
        if _LINE_BYTES + len(self.url) + fields > MAX_HEAD_BYTES:
            raise _HeadTooLarge
        super().on_headers_complete()
        self._arriving = "body"

    def on_message_complete(self) -> None:
        self._arriving = "nothing"
        self._stop_clock()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Where uvicorn comes with what its parser does not understand."""
        fault = sys.exc_info()[1]
        if fault is not None and isinstance(fault.__context__, _HeadTooLarge):
            self._refuse(_head_too_large())
        elif "Content-Length" in str(fault):
            self._refuse(
                InvalidRequest(
                    "Content-Length must be there once, a number of bytes, and not beside "
                    "Transfer-Encoding; the connection is closed"
                )
            )
        else:
            self._refuse(InvalidRequest("this is not HTTP/1.1; the connection is closed"))

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _has_earlier(self) -> bool:
        """An answer is due that comes before that of the request on its way in."""
        return bool(self.pipeline) or (self._is_answering and self._arriving != "body")

    def _start_clock(self) -> None:
        if self._clock is None:
            seconds = self._gateway.settings.receive_seconds
            self._clock = self.loop.call_later(seconds, self._ring)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _ring(self) -> None:
        self._clock = None
        if self._has_earlier:
            self._start_clock()
        elif self._arriving == "nothing":
            self.transport.close()
        else:
            seconds = self._gateway.settings.receive_seconds
            self._refuse(
                NotArrived(f"the request did not arrive in {seconds:g} s (--receive-seconds)")
            )

    def _refuse(self, error: TandemError) -> None:
        """Answers, if it is this request's turn, and hangs up: what follows cannot be understood. An
        application that waits for the body sees the caller gone."""
        self._stop_clock()
        if self.transport.is_closing():
            return
        name = None
        if self._arriving == "body":  # the application has begun, and named it
            name = dict(self.scope).get("request_id")
        name = str(name or uuid.uuid4().hex)
        has_begun = self._is_answering and self.cycle.response_started
        if not self._has_earlier and not has_begun:
            self.transport.write(_write(error, name))
            self._gateway.tally.add("http_requests_total", 1, "none", str(error.status))
        logger.info("request %s: its connection is closed: %s", name, error.message)
        self.transport.close()

    @property
    def _gateway(self) -> Gateway:
        gateway: Gateway = self.config.app.state.gateway  # type: ignore[union-attr]
        return gateway


def _head_too_large() -> RequestTooLarge:
    return RequestTooLarge(f"the head is larger than {MAX_HEAD_BYTES} bytes")


def _decline_upgrade(data: bytes) -> bytes:
    """Some clients offer HTTP/2 with their first request. A server may overlook that, and must here: the
    parser would take the body for the other protocol."""
    head, end, rest = data.partition(b"\r\n\r\n")
    return _OFFER.sub(rb"\r\nx-offer", head) + end + rest


def _write(error: TandemError, request_id: str) -> bytes:
    """A whole answer as it goes on the wire."""
    body = dump(error_body(error))
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
        "x-request-id": request_id,
        **error_headers(error),
    }
    status = HTTPStatus(error.status)
    lines = [f"HTTP/1.1 {status.value} {status.phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body
