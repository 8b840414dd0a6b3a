"""One connection to an engine: sends requests, sorts the replies, notices silence.

Both faces of the library sit on this. Everything here runs in one event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets

from srt.client.mailbox import Mailbox
from srt.errors import DuplicateRequest, EngineDead, InvalidRequest, TandemError
from srt.wire.channels import ChannelClosed, DealerEnd, PeerSlow
from srt.wire.convert import from_failure
from srt.wire.messages import (
    Abort,
    FrontReply,
    FrontRequest,
    Generate,
    Outputs,
    Ping,
    Refused,
)
from srt.wire.silence import Silence

Future = asyncio.Future[FrontReply]
logger = logging.getLogger(__name__)


class Core:
    """`stall_seconds`: silence after which open requests fail. `buffer`: items of one stream that may
    wait for its reader; past it the stream is aborted."""

    def __init__(self, end: DealerEnd, stall_seconds: float, buffer: int) -> None:
        self._end = end
        self._stall_seconds = stall_seconds
        self._buffer = buffer
        self._prefix = secrets.token_hex(4)
        self._numbers = itertools.count(1)
        self._boxes: dict[str, Mailbox] = {}
        self._calls: dict[str, Future] = {}
        self._loop = asyncio.get_running_loop()
        self._tick = min(1.0, stall_seconds / 4)
        self._silence = Silence(self._tick, self._loop.time())
        self._is_closed = False
        self._cause: str | None = None  # of the engine's death, once that is known
        self._tasks = [
            asyncio.create_task(self._read(), name="client-read"),
            asyncio.create_task(self._watch(), name="client-watch"),
        ]

    def name(self) -> str:
        """A fresh request id."""
        return f"{self._prefix}-{next(self._numbers)}"

    def open(self, request: Generate) -> Mailbox:
        """Sends it. Raises DuplicateRequest, InvalidRequest, EngineDead."""
        rid = request.rid
        if rid in self._boxes:
            state = "still being aborted" if self._boxes[rid].is_abandoned else "still open"
            raise DuplicateRequest(f"this client's request {rid!r} is {state}", param="rid")
        self.send(request)
        if not self._boxes:
            self._silence.heard()
        # n below 1 will be refused: even that is an answer to wait for.
        box = self._boxes[rid] = Mailbox(rid, max(request.n, 1), self._buffer)
        return box

    def leave(self, box: Mailbox) -> None:
        """Its reader is gone. What is open is aborted, and its name stays taken until the engine says
        that it is over, so that nothing late can reach a namesake."""
        box.is_abandoned = True
        if self._boxes.get(box.rid) is box and not self._is_closed:
            try:
                self.send(Abort(rid=box.rid))
            except EngineDead:
                logger.info("request %s: its abort could not be sent", box.rid)

    async def call(self, request: FrontRequest, rid: str, timeout: float) -> FrontReply:
        """One question, one answer. Raises what it was refused with; EngineDead after `timeout`."""
        if rid in self._calls:
            raise DuplicateRequest(f"this client's question {rid!r} is still open", param="rid")
        future: Future = self._loop.create_future()
        self.send(request)
        self._calls[rid] = future
        try:
            return await asyncio.wait_for(future, timeout)
        except TimeoutError:
            raise EngineDead(f"the engine gave no answer within {timeout:g} s") from None
        finally:
            del self._calls[rid]

    def declare_dead(self, cause: str) -> None:
        """Somebody who knows says that the engine is gone: what is open fails, what comes fails."""
        self._cause = cause
        self._fail_all(EngineDead(cause))

    def send(self, request: FrontRequest) -> None:
        """Never blocks. Raises EngineDead, or InvalidRequest for what cannot be encoded."""
        if self._cause is not None:
            raise EngineDead(self._cause)
        try:
            self._end.send(request)
        except ChannelClosed:
            raise EngineDead("this client was closed") from None
        except PeerSlow:
            raise EngineDead("the engine does not read what this client sends") from None
        except (UnicodeEncodeError, OverflowError, TypeError) as error:
            raise InvalidRequest(f"this request cannot be sent: {error}") from None

    async def close(self) -> None:
        """Aborts what is open. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._boxes:
            try:
                self.send(Abort())
            except EngineDead:
                logger.info("the open requests could not be aborted; the engine will notice")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._end.close()
        self._fail_all(EngineDead("this client was closed"))

    async def _read(self) -> None:
        try:
            while True:
                for reply in await self._end.receive():
                    self._sort(reply)
                self._silence.heard()
        except ChannelClosed:
            self._fail_all(EngineDead("the connection was closed"))
        except Exception as error:
            logger.exception("the connection broke")
            self._fail_all(EngineDead(f"the connection broke: {error}"))
            raise

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._tick)
            silent = self._silence.advance(self._loop.time())
            if self._boxes and silent > self._stall_seconds:
                self._fail_all(EngineDead(f"the engine has said nothing for {silent:.1f} s"))

    def _sort(self, reply: FrontReply) -> None:
        if isinstance(reply, Outputs):
            for item in reply.items:
                box = self._boxes.get(item.rid)
                if box is not None:
                    box.put(item)
                    self._tidy(box)
        elif isinstance(reply, Refused):
            self._refuse(reply.rid, from_failure(reply.failure))
        elif not isinstance(reply, Ping):
            future = self._calls.get(reply.rid)
            if future is not None and not future.done():
                future.set_result(reply)

    def _tidy(self, box: Mailbox) -> None:
        if box.is_over:
            self._boxes.pop(box.rid, None)
        elif box.is_overfull and not box.is_abandoned:
            logger.warning("request %s: its reader is too slow, aborted", box.rid)
            self.leave(box)

    def _refuse(self, rid: str, error: TandemError) -> None:
        future = self._calls.get(rid)
        if future is not None and not future.done():
            future.set_exception(error)
        elif rid in self._boxes:
            self._boxes.pop(rid).fail(error)
        else:
            logger.warning("the engine refused %s: %s", rid or "something we sent", error)

    def _fail_all(self, error: TandemError) -> None:
        boxes, self._boxes = self._boxes, {}
        for box in boxes.values():
            box.fail(error)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)
