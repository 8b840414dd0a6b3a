"""Whom we ask: a running engine, or a scripted one of our own."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.soak.plan import Library
from srt.client import AsyncClient
from srt.config.args import ServerArgs
from srt.launch.folder import SocketFolder
from srt.launch.inline import InlineEngine
from srt.launch.parts import gateway_settings
from srt.launch.prepare import prepare
from srt.launch.supervisor import ROLES, Supervisor

Connect = Callable[[], Awaitable[AsyncClient]]


@dataclass(slots=True, kw_only=True)
class Site:
    """`pids`: processes whose memory is watched, by name."""

    url: str | None
    connect: Connect | None
    pids: dict[str, int] = field(default_factory=dict)


@asynccontextmanager
async def own_engine(
    library: Library, settings: dict[str, Any], *, inline: bool
) -> AsyncIterator[Site]:
    with tempfile.TemporaryDirectory() as model, SocketFolder() as sockets:
        (Path(model) / "tandem_script.json").write_text(json.dumps(library.script()))
        args = ServerArgs(model=model, port=0, log_level="error", **settings)
        boot, _ = prepare(args, {}, folder=sockets.path, cache_folder=model)
        if inline:
            async with InlineEngine(boot) as engine, _gateway(engine) as url:
                yield Site(url=url, connect=engine.connect, pids={"all": os.getpid()})
            return
        supervisor = Supervisor(boot=boot.encode(), roles=ROLES, environment=os.environ)
        await asyncio.to_thread(supervisor.start, timeout=60.0)
        try:
            port = supervisor.ready["gateway"]["port"]
            front = boot.addresses.front
            yield Site(
                url=f"http://127.0.0.1:{port}",
                connect=lambda: AsyncClient.connect(front),
                pids=supervisor.pids,
            )
        finally:
            await asyncio.to_thread(supervisor.stop)


@asynccontextmanager
async def _gateway(engine: InlineEngine) -> AsyncIterator[str]:
    from srt.gateway.app import create_app
    from srt.gateway.server import serve

    stop = asyncio.Event()
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    async with await engine.connect(name="gateway") as client:
        app = create_app(client, gateway_settings())
        serving = asyncio.create_task(serve(app, "127.0.0.1", 0, stop, port.set_result))
        try:
            yield f"http://127.0.0.1:{await port}"
        finally:
            stop.set()
            await serving


def running_engine(url: str | None, zmq: str | None, pid: int | None) -> Site:
    """One that is there already. `pid`: its first process, of which the others are children."""
    pids: dict[str, int] = {}
    if pid is not None:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for child in children:
            words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
            pids[words[-2].decode()] = int(child)
        pids = pids or {"all": pid}
    connect = None if zmq is None else lambda: AsyncClient.connect(zmq)
    return Site(url=url, connect=connect, pids=pids)
