"""The whole engine in one process and one event loop, for the debugger: the same parts and the same
messages over in-memory channels. Breakpoints work and a traceback is whole."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from types import TracebackType

from srt.client import AsyncClient
from srt.config.args import ServerArgs
from srt.config.context import get_serving, publish
from srt.config.resolve import Resolution
from srt.config.trail import InputSource
from srt.launch.boot import Boot
from srt.launch.parts import (
    SchedulerPart,
    build_scheduler_part,
    build_tokenizer,
    gateway_settings,
    load_text,
)
from srt.launch.supervisor import Progress, show_nothing
from srt.wire import codec
from srt.wire.channels import ChannelClosed
from srt.wire.memory import MemoryReceiver, MemoryRouter, memory_pipe
from srt.wire.messages import WorkMessage
from tokenizer_proc.detokenizer import DetokenizerService

# Passes of the loop that a step's tokens need from the scheduler to the HTTP socket: each of the
# hops in between wakes a task, which wakes the next.
PASSES = 16

ShowReady = Callable[[Resolution, dict[str, dict[str, object]], float], None]


class InlineEngine:
    """`async with InlineEngine(boot) as engine:` then `engine.connect()` for a client."""

    def __init__(self, boot: Boot, progress: Progress = show_nothing) -> None:
        self._boot = boot
        self._progress = progress
        self._stop = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.router = MemoryRouter()
        self.part: SchedulerPart | None = None

    async def __aenter__(self) -> InlineEngine:
        boot = self._boot
        publish(boot.args, boot.facts, role="inline", entropy=boot.entropy, sources=boot.sources)
        work_out, work_in = memory_pipe(codec.work())
        step_out, step_in = memory_pipe(codec.step())
        text_out, text_in = memory_pipe(codec.text())
        self._inbox = work_in
        self.part = build_scheduler_part(boot, step_out, partial(self._progress, "engine"))
        text = load_text(boot)
        detokenizer = DetokenizerService(step_in, text_out, text)
        tokenizer = build_tokenizer(boot, self.router, work_out, text_in, text)
        self._tokenizer = tokenizer
        self._tokenizer_task = asyncio.create_task(tokenizer.run(self._stop))
        self._ended = asyncio.Event()
        self._tasks = [
            asyncio.create_task(detokenizer.run(self._ended)),
            asyncio.create_task(self._turn(work_in)),
        ]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        await self._tokenizer_task
        self._ended.set()
        self._inbox.close()
        results = await asyncio.gather(*self._tasks, return_exceptions=True)
        assert self.part is not None
        self.part.close()
        for result in results:
            if isinstance(result, BaseException) and kind is None:
                raise result

    async def connect(self, *, timeout: float = 10.0, name: str = "") -> AsyncClient:
        return await AsyncClient.connect(
            self.router.connect(),
            timeout=timeout,
            stall_seconds=get_serving().stall_seconds,
            name=name,
        )

    async def _turn(self, inbox: MemoryReceiver[WorkMessage]) -> None:
        """The scheduler's loop as a task: it gives way to the others after every turn, and waits for a
        message while it has nothing to do."""
        assert self.part is not None
        is_busy = False
        try:
            while True:
                messages = inbox.drain(0) if is_busy else await inbox.receive()
                is_busy = self.part.scheduler.turn(messages)
                for _ in range(PASSES):
                    await asyncio.sleep(0)
        except ChannelClosed:
            return
        except Exception:
            self._tokenizer.declare_dead("scheduler")
            raise


async def _serve(
    boot: Boot, resolution: Resolution, progress: Progress, show_ready: ShowReady
) -> None:
    from srt.gateway.app import create_app
    from srt.gateway.server import serve

    started = time.monotonic()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(InlineEngine(boot, progress))
        client = await engine.connect(name="gateway")
        stack.push_async_callback(client.close)
        assert engine.part is not None
        ready: dict[str, dict[str, object]] = {"scheduler": engine.part.describe()}
        serving = get_serving()

        def say(port: int) -> None:
            ready["gateway"] = {"host": serving.host, "port": port}
            show_ready(resolution, ready, time.monotonic() - started)

        await serve(create_app(client, gateway_settings()), serving.host, serving.port, stop, say)


def serve_inline(
    args: ServerArgs,
    sources: Mapping[str, InputSource],
    cache_folder: str,
    progress: Progress,
    show_ready: ShowReady,
) -> int:
    """`tandem serve --inline`. Returns 0 after a drain."""
    from srt.launch.prepare import prepare

    boot, resolution = prepare(
        args, sources, folder="inline", cache_folder=cache_folder, progress=progress
    )
    asyncio.run(_serve(boot, resolution, progress, show_ready))
    return 0
