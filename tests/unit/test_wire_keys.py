"""A front that other machines reach: who has a key gets in, nobody else, and nobody is disturbed."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq
from service_rig import CARD, Rig, ToyCodec, ToyEngine

from srt.cli.main import main
from srt.client import AsyncClient, Client
from srt.errors import ConfigError, NotReady
from srt.launch.folder import SocketFolder
from srt.wire import codec
from srt.wire.codec import encode
from srt.wire.guard import decide, draw_pair
from srt.wire.keys import (
    ClientKeys,
    read_client_keys,
    read_server_keys,
    write_client_keys,
    write_server_keys,
)
from srt.wire.limits import Limits
from srt.wire.memory import MemoryRouter, memory_pipe
from srt.wire.messages import Abort, Generate, Hello
from srt.wire.sockets import ZmqRouter, close_context, open_context
from tokenizer_proc.tokenizer import TokenizerService


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A server's folder that allows alice."""
    folder = tmp_path / "keys"
    assert main(["keys", str(folder), "alice"]) == 0
    return folder


@asynccontextmanager
async def guarded(keys: Path, folder: Path) -> AsyncIterator[tuple[str, str, Rig]]:
    """The toy engine behind a private and a guarded endpoint."""
    context = open_context()
    private = f"ipc://{folder}/front"
    public = "tcp://127.0.0.1:*"
    router = ZmqRouter(context, private, public=public, keys=read_server_keys(keys))
    to_engine, at_engine = memory_pipe(codec.work())
    to_service, at_service = memory_pipe(codec.text())
    engine = ToyEngine(at_engine, to_service)
    service = TokenizerService(
        router, to_engine, at_service, ToyCodec(), Limits(), CARD, tick=0.01, drain_seconds=0.2
    )
    rig = Rig(MemoryRouter(), engine, service)
    playing = asyncio.create_task(engine.run())
    running = asyncio.create_task(service.run(rig.stop))
    try:
        yield router.endpoint, private, rig
    finally:
        rig.stop.set()
        await asyncio.wait_for(running, 20)
        playing.cancel()
        router.close()
        assert close_context(context)
    assert not (folder / "front").exists()


async def test_the_right_key_opens_both_faces(keys: Path, tmp_path: Path) -> None:
    def use_blocking(endpoint: str) -> str:
        with Client.connect(endpoint, keys=keys / "alice.toml") as client:
            return client.generate("hi").text

    async with guarded(keys, tmp_path) as (endpoint, private, _):
        assert endpoint.startswith("tcp://")
        async with await AsyncClient.connect(endpoint, keys=str(keys / "alice.toml")) as client:
            assert (await client.generate("hi")).text == "ab"
        assert await asyncio.to_thread(use_blocking, endpoint) == "ab"
        async with await AsyncClient.connect(private) as client:  # the gateway needs no key
            assert (await client.generate("hi")).text == "ab"


async def test_no_key_and_a_wrong_key_get_nothing_and_hurt_nobody(
    keys: Path, tmp_path: Path
) -> None:
    server = read_server_keys(keys).public
    stranger, other_server = draw_pair(), draw_pair()[0]
    alice = read_client_keys(keys / "alice.toml")
    wrong = [
        None,
        ClientKeys(server=server, public=stranger[0], secret=stranger[1]),
        ClientKeys(server=other_server, public=alice.public, secret=alice.secret),
        ClientKeys(server=server, public=alice.public, secret=stranger[1]),
    ]
    async with guarded(keys, tmp_path) as (endpoint, _, rig):
        async with await AsyncClient.connect(endpoint, keys=alice) as client:
            rig.engine.auto = None
            running = asyncio.create_task(client.generate("hi", rid="r"))
            while not rig.engine.open:
                await asyncio.sleep(0.002)
            for bad in wrong:
                hint = "wants a key" if bad is None else "does not know these keys"
                with pytest.raises(NotReady, match=f"no engine answers.*{hint}"):
                    await AsyncClient.connect(endpoint, keys=bad, timeout=0.3)
            with zmq.Context() as context, context.socket(zmq.DEALER) as plain:
                plain.linger = 0
                plain.connect(endpoint)
                for message in (Hello(rid="h"), Generate(rid="g", prompt="hi"), Abort()):
                    plain.send(encode(message))
                assert not plain.poll(300)
            assert len(rig.engine.works()) == 1 and not rig.engine.aborts()
            [uid] = rig.engine.open
            rig.engine.say(rig.engine.item(uid, "a", opened=True), rig.engine.end(uid, "stop", "b"))
            assert (await running).text == "ab"


async def test_a_client_is_added_and_removed_while_it_runs(keys: Path, tmp_path: Path) -> None:
    async with guarded(keys, tmp_path) as (endpoint, _, _):
        bob = write_client_keys(keys, "bob", draw_pair())
        async with await AsyncClient.connect(endpoint, keys=bob) as client:
            assert (await client.generate("hi")).text == "ab"
        (keys / "clients" / "bob.pub").unlink()
        with pytest.raises(NotReady):
            await AsyncClient.connect(endpoint, keys=bob, timeout=0.3)


def test_what_holds_a_secret_is_private(keys: Path) -> None:
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in keys.iterdir()}
    assert stat.S_IMODE(keys.stat().st_mode) == 0o700
    assert modes["server.toml"] == modes["alice.toml"] == 0o600
    secret = read_client_keys(keys / "alice.toml").secret
    assert secret not in repr(read_client_keys(keys / "alice.toml"))
    (keys / "alice.toml").chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_client_keys(keys / "alice.toml")


def test_the_server_keeps_its_keys(keys: Path) -> None:
    before = read_server_keys(keys)
    assert main(["keys", str(keys), "bob"]) == 0
    assert read_server_keys(keys) == before
    assert set(before.allowed().values()) == {"alice", "bob"}


def test_bad_keys_are_refused_by_name(keys: Path, tmp_path: Path) -> None:
    for name in ("alice", "server", "../x", "", "a" * 65):
        with pytest.raises(ConfigError, match=r"already|cannot name"):
            write_client_keys(keys, name, draw_pair())
    with pytest.raises(ConfigError, match="no key file"):
        read_server_keys(tmp_path / "nowhere")
    (keys / "server.toml").write_text('public = "short"\nsecret = "short"\n')
    with pytest.raises(ConfigError, match="public in the key file"):
        read_server_keys(keys)
    (keys / "server.toml").write_text("no toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_server_keys(keys)
    assert main(["keys", str(keys), "carol"]) == 2
    write_server_keys(tmp_path / "fresh", draw_pair())
    (tmp_path / "fresh" / "clients").rmdir()
    with pytest.raises(ConfigError, match="clients/"):
        read_server_keys(tmp_path / "fresh")


def test_odd_questions_are_answered_no(keys: Path) -> None:
    server = read_server_keys(keys)
    (keys / "clients" / "damaged.pub").write_bytes(b"\xff\xfe")
    head = [b"1.0", b"1", b"tandem", b"127.0.0.1", b"peer"]
    for tail in ([b"NULL"], [b"PLAIN", b"a", b"b"], [b"CURVE", b"short"], [b"CURVE", b"\0" * 32]):
        assert decide([*head, *tail], server)[:3] == [b"1.0", b"1", b"400"]
    assert decide([b"1.0"], server)[2] == b"500"


def test_the_folder_of_the_private_sockets_is_private(tmp_path: Path) -> None:
    with SocketFolder(str(tmp_path)) as folder:
        assert stat.S_IMODE(Path(folder.path).stat().st_mode) == 0o700
    assert not list(tmp_path.iterdir())
