"""`tandem serve`: the engine and its gateway until SIGTERM or Ctrl-C."""

from __future__ import annotations

import argparse
import logging
import signal
import socket
import sys
import time
from types import FrameType

from srt.cli.options import (
    add_server_flags,
    cache_folder,
    child_environment,
    server_args,
    start_logging,
)
from srt.cli.progress import PhaseBars
from srt.config.args import ServerArgs
from srt.config.facts import Facts
from srt.config.resolve import Resolution
from srt.config.trail import InputSource
from srt.errors import ConfigError, EngineDead
from srt.launch.folder import SocketFolder
from srt.launch.prepare import prepare
from srt.launch.supervisor import ENGINE_ROLES, ROLES, Supervisor, rank_roles

log = logging.getLogger(__name__)
Ready = dict[str, dict[str, object]]  # what each part said of itself when it was ready


class Signals:
    """The first SIGTERM or Ctrl-C asks for a drain, the second ends it."""

    def __init__(self) -> None:
        self.count = 0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1

    @property
    def is_stopping(self) -> bool:
        return self.count > 0

    @property
    def is_forced(self) -> bool:
        return self.count > 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server_flags(parser)


def run(options: argparse.Namespace) -> int:
    args, sources = server_args(options)
    start_logging(args.log_level)
    if args.inline:
        return run_inline(args, sources)
    if args.gateway:
        check_address(args.host, args.port)
    signals = Signals()
    started = time.monotonic()
    with SocketFolder() as folder, PhaseBars() as bars:
        boot, resolution = prepare(
            args, sources, folder=folder.path, cache_folder=cache_folder(), progress=bars.show
        )
        warn_of_idle_gpu(boot.facts, resolution)
        roles = (
            *rank_roles(args.tensor_parallel_size),
            *(ROLES if args.gateway else ENGINE_ROLES),
        )
        supervisor = Supervisor(boot=boot.encode(), roles=roles, environment=child_environment())
        try:
            supervisor.start(bars.show, is_stopping=lambda: signals.is_stopping)
            if not signals.is_stopping:
                bars.stop()
                print_ready(resolution, supervisor.ready, time.monotonic() - started)
            return watch(supervisor, signals, args.drain_seconds)
        finally:
            supervisor.stop()


def run_inline(args: ServerArgs, sources: dict[str, InputSource]) -> int:
    from srt.launch.inline import serve_inline

    with PhaseBars() as bars:

        def ready(resolution: Resolution, parts: Ready, seconds: float) -> None:
            bars.stop()
            print_ready(resolution, parts, seconds)

        return serve_inline(args, sources, cache_folder(), bars.show, ready)


def check_address(host: str, port: int) -> None:
    """Better found before the weights are loaded. Raises ConfigError."""
    try:
        socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        ).close()
    except OSError as error:
        raise ConfigError(
            f"--host {host} --port {port} cannot be had: {error}; choose another address, or "
            "--port 0 for any free port"
        ) from None


def watch(supervisor: Supervisor, signals: Signals, drain_seconds: float) -> int:
    """0 after a drain; raises EngineDead if a child ended by itself, also while draining."""
    while not signals.is_stopping:
        dead = supervisor.watch(timeout=0.2)
        if dead is not None:
            supervisor.announce_death(dead)
            time.sleep(1.0)  # for the last messages to reach the clients
            raise EngineDead(f"the {dead} process died; see its log above")
    if not supervisor.is_ready:  # nothing can be open, and a child that starts may end as it likes
        supervisor.kill()
        return 0
    dead = supervisor.drain(drain_seconds, lambda: signals.is_forced)
    for role, code in supervisor.stop().items():
        if dead is None and code > 0:  # by itself, with a reason in its log
            dead = role
    if dead is not None:
        raise EngineDead(f"the {dead} process died while draining; see its log above")
    return 0


def gpu_of(resolution: Resolution) -> str:
    """The first word of why: its name, unless the user asked for it."""
    entry = next(entry for entry in resolution.trail if entry.field == "device.device")
    return entry.reason.split(",")[0] if entry.source == "rule" else "cuda"


def warn_of_idle_gpu(facts: Facts, resolution: Resolution) -> None:
    """A GPU that is there and not used, for a reason that can be mended, should surprise nobody."""
    entry = next(entry for entry in resolution.trail if entry.field == "device.device")
    is_chosen = entry.source != "rule" or facts.model.format == "script"
    if facts.machine.gpus and entry.value == "cpu" and not is_chosen:
        log.warning("the model runs on the CPU: %s", entry.reason)


def print_ready(resolution: Resolution, ready: Ready, seconds: float) -> None:
    """Where it listens, what got how much memory, and a line to try."""
    model = resolution.values["model"]["served_model_name"]
    scheduler = ready.get("scheduler", {})
    memory = scheduler.get("memory_bytes", {})
    assert isinstance(memory, dict)
    bill = ", ".join(f"{use} {size / 1e6:,.0f} MB" for use, size in memory.items())
    ranks = resolution.values["parallel"]["tensor_parallel_size"]
    each = f" on each of {ranks} ranks" if ranks > 1 else ""
    place = "" if resolution.values["device"]["device"] == "cpu" else f" on {gpu_of(resolution)}"
    print(f"ready in {seconds:.1f} s: {model}{place}; {bill}{each}", file=sys.stderr)
    print(
        f"room for {scheduler.get('kv_tokens')} tokens, {scheduler.get('max_running')} requests at "
        f"once; ZMQ clients: {ready.get('tokenizer', {}).get('front')}",
        file=sys.stderr,
    )
    gateway = ready.get("gateway")
    if gateway:
        url = f"http://{gateway['host']}:{gateway['port']}"
        print(f"listening on {url}; try\n", file=sys.stderr)
        print(
            f"curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' -d "
            f'\'{{"model": "{model}", "stream": true, "temperature": 0, "messages": '
            '[{"role": "user", "content": "What is the capital of France?"}]}\'\n',
            flush=True,
        )
