"""Whole engines for tests: as processes, or inline. Both come with a client and an HTTP address,
and both must leave nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from srt.client import AsyncClient
from srt.config.args import ServerArgs
from srt.config.resolve import typed_fields
from srt.launch.boot import Boot
from srt.launch.folder import SocketFolder
from srt.launch.inline import InlineEngine
from srt.launch.parts import gateway_settings
from srt.launch.prepare import prepare
from srt.launch.supervisor import Supervisor, rank_roles
from srt.wire.channels import DealerEnd

ROLES = ("scheduler", "detokenizer", "tokenizer", "gateway")
READY_SECONDS = 60.0


@dataclass(slots=True)
class Running:
    """A live engine. `pids` is empty inline."""

    client: AsyncClient
    url: str
    pids: dict[str, int] = field(default_factory=dict)
    supervisor: Supervisor | None = None
    front: str = ""
    connect: Callable[[], Awaitable[AsyncClient]] | None = None  # one more client
    engine_end: Callable[[], str | DealerEnd] = str  # what `Client.connect` takes

    def http(self, **options: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=30.0, **options)

    async def settle(self) -> None:
        """Waits until nothing is live, then the audit must be clean."""
        for _ in range(200):
            if (await self.client.health())["live"] == 0:
                seen = await self.client.requests()
                if not seen["requests"]:
                    assert (await self.client.audit())["violations"] == []
                    return
            await asyncio.sleep(0.05)
        raise AssertionError(f"still live: {await self.client.requests()}")


RunEngine = Callable[..., AbstractAsyncContextManager[Running]]


def cache_folder() -> str:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return os.environ.get("TANDEM_CACHE") or str(Path(base) / "tandem")


def write_script(
    folder: Path, tokens: list[Any], script: list[int] | None = None, **more: Any
) -> str:
    """A scripted model whose greedy output is `tokens` in order (ids from 256), or the ids of `script`.
    The end token comes after them; its id is 256 + len(tokens)."""
    folder.mkdir(parents=True, exist_ok=True)
    end = 256 + len(tokens)
    content = {
        "tokens": [*tokens, "<end>"],
        "end_token_ids": [end],
        "script": list(range(256, end)) if script is None else script,
        "context_length": 512,
        **more,
    }
    (folder / "tandem_script.json").write_text(json.dumps(content))
    return str(folder)


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., str]:
    """`script(tokens, ...)` writes a scripted model and gives its folder."""
    numbers = iter(range(1000))

    def write(tokens: list[Any], script: list[int] | None = None, **more: Any) -> str:
        return write_script(tmp_path / f"script{next(numbers)}", tokens, script, **more)

    return write


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny sound Hugging Face folder, tokenizer included."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.tiny_models import TINY

    folder = tmp_path_factory.mktemp("checkpoint")
    LlamaForCausalLM(LlamaConfig(**TINY)).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: TINY["vocab_size"]]
    tokenizer = Tokenizer(models.BPE({text: number for number, text in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(params=["processes", "inline"])
def engine(request: pytest.FixtureRequest) -> RunEngine:
    """`async with engine(model=..., **args) as running` in both modes."""
    return run_processes if request.param == "processes" else run_inline


@pytest.fixture
def processes() -> RunEngine:
    return run_processes


def boot_for(folder: str, **given: Any) -> Boot:
    args = ServerArgs(**{"port": 0, "log_level": "warning", **given})
    boot, _ = prepare(args, typed_fields(args), folder=folder, cache_folder=cache_folder())
    return boot


@asynccontextmanager
async def run_processes(**given: Any) -> AsyncIterator[Running]:
    with SocketFolder() as folder:
        boot = boot_for(folder.path, **given)
        roles = (*rank_roles(boot.args.tensor_parallel_size), *ROLES)
        supervisor = Supervisor(boot=boot.encode(), roles=roles, environment=dict(os.environ))
        await asyncio.to_thread(supervisor.start, timeout=READY_SECONDS)
        pids = supervisor.pids
        gateway = supervisor.ready["gateway"]
        client = await AsyncClient.connect(boot.addresses.front)
        try:
            yield Running(
                client,
                f"http://{gateway['host']}:{gateway['port']}",
                pids,
                supervisor,
                boot.addresses.front,
                lambda: AsyncClient.connect(boot.addresses.front),
                lambda: boot.addresses.front,
            )
        finally:
            await client.close()
            await asyncio.to_thread(supervisor.stop)
        assert not [pid for pid in pids.values() if psutil.pid_exists(pid)], "a child is left"
    assert not os.path.exists(folder.path)


@asynccontextmanager
async def run_inline(**given: Any) -> AsyncIterator[Running]:
    from srt.gateway.app import create_app
    from srt.gateway.server import serve

    boot = boot_for("inline", **given)
    async with InlineEngine(boot) as engine:
        client = await engine.connect()
        gateway_client = await engine.connect(name="gateway")
        stop = asyncio.Event()
        port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        settings = gateway_settings()
        serving = asyncio.create_task(
            serve(create_app(gateway_client, settings), "127.0.0.1", 0, stop, port.set_result)
        )
        try:
            yield Running(
                client,
                f"http://127.0.0.1:{await port}",
                connect=engine.connect,
                engine_end=engine.router.connect,
            )
        finally:
            stop.set()
            await serving
            await client.close()
            await gateway_client.close()


@pytest.fixture(autouse=True)
def no_leftovers() -> Iterator[None]:
    """No process that a test started outlives it."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    assert not left, f"left behind: {left}"


Check = Callable[[Running], Awaitable[None]]
