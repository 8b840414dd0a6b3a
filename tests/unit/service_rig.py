"""A tokenizer service on memory channels, with a toy codec and an engine the test plays itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from srt.client import AsyncClient
from srt.wire import codec
from srt.wire.limits import Limits
from srt.wire.memory import MemoryReceiver, MemoryRouter, MemorySender, memory_pipe
from srt.wire.messages import (
    AbortWork,
    Command,
    Drain,
    Reply,
    TextItem,
    Texts,
    Turn,
    Work,
    WorkMessage,
)
from srt.wire.params import ChatMessage, ChatOptions, Finish, Usage
from tokenizer_proc.card import EngineCard
from tokenizer_proc.tokenizer import TokenizerService

CARD = EngineCard(
    model="toy", context_length=64, vocab_size=128, engine_id="life-1", config_hash="hash"
)


class ToyCodec:
    """A token is an ASCII character; id 1 is the start token."""

    vocab_size = 128

    def __init__(self, has_chat_template: bool = True) -> None:
        self.has_chat_template = has_chat_template

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if "!boom!" in text:
            raise RuntimeError("the toy broke")
        return [1] * add_special_tokens + [ord(character) % 128 for character in text]

    def token_bytes(self, token: int) -> bytes:
        return bytes([token])

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(chr(i) for i in ids if not (skip_special_tokens and i == 1))

    def render(self, messages: list[ChatMessage], options: ChatOptions) -> str:
        return "".join(f"<{message.role}>{message.content}" for message in messages)


class ToyEngine:
    """Scheduler and detokenizer in one. `auto` answers at once; otherwise the test speaks."""

    def __init__(self, work: MemoryReceiver[WorkMessage], text: MemorySender) -> None:
        self._work = work
        self._text = text
        self.auto: list[str] | None = ["a", "b"]
        self.turns = True  # answers the ring
        self.obeys = True  # ends what it is told to abort
        self.seen: list[WorkMessage] = []
        self.open: dict[int, Work] = {}
        self.step = 0

    async def run(self) -> None:
        while True:
            for message in await self._work.receive():
                self.seen.append(message)
                self._take(message)

    def _take(self, message: WorkMessage) -> None:
        if isinstance(message, Work):
            self.open[message.uid] = message
            if self.auto is not None:
                self.say(self.item(message.uid, opened=True))
                for piece in self.auto[:-1]:
                    self.say(self.item(message.uid, piece))
                self.say(self.end(message.uid, "length", self.auto[-1]))
        elif isinstance(message, Turn):
            if self.turns:
                self._text.send(message)
        elif isinstance(message, AbortWork):
            if message.uid in self.open and self.obeys:
                item = self.end(message.uid, "abort")
                if not message.quiet:
                    self.say(item)
        elif isinstance(message, Command) and message.topic != "profile":
            self._text.send(Reply(ticket=message.ticket, body={"topic": message.topic}))

    def item(self, uid: int, text: str = "", opened: bool = False) -> TextItem:
        return TextItem(uid=uid, text=text, tokens=[ord(c) for c in text], opened=opened)

    def end(self, uid: int, reason: Any, text: str = "", stopped: bool = False) -> TextItem:
        work = self.open.pop(uid)
        item = self.item(uid, text)
        item.stopped = stopped
        item.finish = Finish(
            reason=reason,
            usage=Usage(prompt_tokens=len(work.token_ids), completion_tokens=2, cached_tokens=1),
        )
        return item

    def say(self, *items: TextItem) -> None:
        """What is a single token and nothing else goes in short form."""
        self.step += 1
        texts = Texts(step=self.step)
        for item in items:
            if (
                item == TextItem(uid=item.uid, text=item.text, tokens=item.tokens[:1])
                and item.tokens
            ):
                texts.uids.append(item.uid)
                texts.plain.append(item.tokens[0])
                texts.texts.append(item.text)
            else:
                texts.items.append(item)
        self._text.send(texts)

    def works(self) -> list[Work]:
        return [message for message in self.seen if isinstance(message, Work)]

    def aborts(self) -> list[AbortWork]:
        return [message for message in self.seen if isinstance(message, AbortWork)]

    def drains(self) -> list[Drain]:
        return [message for message in self.seen if isinstance(message, Drain)]


class Rig:
    def __init__(self, router: MemoryRouter, engine: ToyEngine, service: TokenizerService) -> None:
        self.router = router
        self.engine = engine
        self.service = service
        self.stop = asyncio.Event()
        self.running: asyncio.Task[None] | None = None

    async def client(self, **options: Any) -> AsyncClient:
        return await AsyncClient.connect(self.router.connect(), **options)


async def until(condition: Callable[[], object]) -> None:
    async def wait() -> None:
        while not condition():
            await asyncio.sleep(0.002)

    await asyncio.wait_for(wait(), 20)


@asynccontextmanager
async def make_rig(
    *, mark: int = 4096, limits: Limits | None = None, templates: bool = True, **options: Any
) -> AsyncIterator[Rig]:
    router = MemoryRouter(mark)
    to_engine, at_engine = memory_pipe(codec.work())
    to_service, at_service = memory_pipe(codec.text())
    engine = ToyEngine(at_engine, to_service)
    service = TokenizerService(
        router,
        to_engine,
        at_service,
        ToyCodec(templates),
        limits or Limits(),
        CARD,
        **{"tick": 0.01, "drain_seconds": 0.2, "seed": 5, **options},
    )
    rig = Rig(router, engine, service)
    playing = asyncio.create_task(engine.run())
    rig.running = asyncio.create_task(service.run(rig.stop))
    try:
        yield rig
    finally:
        rig.stop.set()
        await asyncio.wait_for(rig.running, 20)
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        for end in (router, to_engine, at_engine, to_service, at_service):
            end.close()
