"""What each child is: `python -m srt.launch.roles ROLE`. Reads its boot record, publishes the
configuration, builds its end of the sockets, runs its service, ends without a trace."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import uvloop

from srt.config.context import get_serving, publish
from srt.errors import ConfigError
from srt.launch.boot import Boot
from srt.launch.control import Control
from srt.launch.ranks import MEETING, join_ranks, reach_others, run_rank
from srt.launch.supervisor import RANK

log = logging.getLogger(__name__)
T = TypeVar("T")
AsyncRole = Callable[[Boot, Control, asyncio.Event], Coroutine[Any, Any, None]]


def main() -> int:
    role = sys.argv[1]
    faulthandler.enable()
    control = Control()
    line = control.read_boot()
    if not line:
        return 1  # the parent died before it said anything; nobody reads this
    boot = Boot.decode(line)
    logging.basicConfig(
        level=boot.args.log_level.upper(),
        format=f"%(asctime)s %(levelname).1s {role} %(name)s: %(message)s",
    )
    try:
        publish(boot.args, boot.facts, role=role, entropy=boot.entropy, sources=boot.sources)
        if role == "scheduler":
            run_scheduler(boot, control)
        elif role.startswith(RANK):
            run_rank(boot, control, int(role.removeprefix(RANK)))
        else:
            uvloop.run(run_async(ASYNC_ROLES[role], boot, control))
    except ConfigError as error:
        control.report(error=str(error))
        return 2
    except Exception:
        log.exception("%s failed", role)
        return 1
    finally:
        if control.is_orphaned:
            remove_folder(boot)
    return 0


def remove_folder(boot: Boot) -> None:
    """A parent that was killed cannot remove the sockets' folder; whoever closes the last one does."""
    folder = boot.addresses.folder
    try:
        (folder / MEETING).unlink(missing_ok=True)
        folder.rmdir()
    except OSError:
        log.debug("the sockets' folder is still in use, or gone")


def run_scheduler(boot: Boot, control: Control) -> None:
    """Weights first: the sockets are bound only when there is somebody behind them."""
    from srt.launch.parts import build_scheduler_part
    from srt.scheduler.process import SWITCH_SECONDS, run
    from srt.wire import codec
    from srt.wire.sockets import ZmqPollingReceiver, ZmqSender, close_context, open_context
    from srt.wire.topology import HOPS

    stopped = threading.Event()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    sys.setswitchinterval(SWITCH_SECONDS)
    context = open_context()
    outbox = ZmqSender(context, boot.addresses.step, HOPS["step"])
    inbox = ZmqPollingReceiver(context, boot.addresses.work, HOPS["work"], codec.work())
    group = join_ranks(boot, 0)
    others = reach_others(boot, context, group)
    part = build_scheduler_part(boot, outbox, control.show_phase, group, others)
    control.listen(lambda notice: None, stopped.set)
    control.report_ready(**part.describe())
    try:
        run(part.scheduler, inbox, stopped.is_set)
    finally:
        try:
            part.close()  # raises again what a broken device has to say
        finally:
            inbox.close()
            for sender in (outbox, *others):
                sender.close()
            close_context(context)


async def run_async(role: AsyncRole, boot: Boot, control: Control) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_signal_handler(signal.SIGINT, lambda: None)
    await role(boot, control, stop)


def listen(
    control: Control,
    stop: asyncio.Event,
    on_dead: Callable[[str], None],
    on_hurry: Callable[[], None] = lambda: None,
) -> None:
    """Notices arrive on a thread; what they cause happens in the loop."""
    loop = asyncio.get_running_loop()

    def call(work: Callable[..., None], *words: str) -> None:
        try:
            loop.call_soon_threadsafe(work, *words)
        except RuntimeError:
            log.debug("a notice came after the end")  # the loop is closed

    def notice(fields: dict[str, Any]) -> None:
        if "dead" in fields:
            call(on_dead, str(fields["dead"]))
        if "hurry" in fields:
            call(on_hurry)

    def end() -> None:  # nobody is left who could say how long a drain may take
        call(stop.set)
        call(on_hurry)

    control.listen(notice, end)


async def unless(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """What `work` returns; None if `stop` is set before, and then it is cancelled."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if working.done():
        return working.result()
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)  # for its clean-up
    return None


async def run_detokenizer(boot: Boot, control: Control, stop: asyncio.Event) -> None:
    from srt.launch.parts import load_text
    from srt.wire import codec
    from srt.wire.sockets import ZmqReceiver, ZmqSender, close_context, open_context
    from srt.wire.topology import HOPS
    from tokenizer_proc.detokenizer import DetokenizerService

    context = open_context()
    step = ZmqReceiver(context, boot.addresses.step, HOPS["step"], codec.step())
    text = ZmqSender(context, boot.addresses.text, HOPS["text"])
    control.show_phase("loading the vocabulary")
    service = DetokenizerService(step, text, load_text(boot))
    listen(control, stop, lambda role: None)
    control.report_ready()
    try:
        await service.run(stop)
    finally:
        step.close()
        text.close()
        close_context(context)


async def run_tokenizer(boot: Boot, control: Control, stop: asyncio.Event) -> None:
    from srt.launch.parts import build_tokenizer, load_text
    from srt.wire import codec
    from srt.wire.keys import read_server_keys
    from srt.wire.sockets import ZmqReceiver, ZmqRouter, ZmqSender, close_context, open_context
    from srt.wire.topology import HOPS

    folder = get_serving().zmq_keys
    keys = None if folder is None else read_server_keys(folder)
    context = open_context()
    addresses = boot.addresses
    front = ZmqRouter(context, addresses.front, public=addresses.public, keys=keys)
    work = ZmqSender(context, boot.addresses.work, HOPS["work"])
    text = ZmqReceiver(context, boot.addresses.text, HOPS["text"], codec.text())
    control.show_phase("loading the vocabulary")
    service = build_tokenizer(boot, front, work, text, load_text(boot))
    listen(control, stop, service.declare_dead, service.hurry)
    control.report_ready(front=front.endpoint)
    try:
        await service.run(stop)
    finally:
        front.close()
        work.close()
        text.close()
        close_context(context)


async def run_gateway(boot: Boot, control: Control, stop: asyncio.Event) -> None:
    from srt.client import AsyncClient
    from srt.gateway.app import create_app
    from srt.gateway.server import serve
    from srt.launch.parts import gateway_settings

    control.show_phase("waiting for the tokenizer")
    serving = get_serving()
    client: AsyncClient | None = None

    def pass_on(role: str) -> None:
        if client is not None:  # else nobody has asked for anything yet
            client.declare_dead(role)

    listen(control, stop, pass_on)  # from now on: the tokenizer may leave before it answers
    connecting = AsyncClient.connect(
        boot.addresses.front, timeout=600.0, stall_seconds=serving.stall_seconds, name="gateway"
    )
    client = await unless(stop, connecting)
    if client is None:
        return
    try:

        def ready(port: int) -> None:
            control.report_ready(host=serving.host, port=port)

        await serve(create_app(client, gateway_settings()), serving.host, serving.port, stop, ready)
    except OSError as error:
        raise ConfigError(
            f"--host {serving.host} --port {serving.port} cannot be had: {error.strerror}; "
            "choose another --port, or 0 for any free one"
        ) from None
    finally:
        await client.close()


ASYNC_ROLES: dict[str, AsyncRole] = {
    "detokenizer": run_detokenizer,
    "tokenizer": run_tokenizer,
    "gateway": run_gateway,
}

if __name__ == "__main__":
    sys.exit(main())
