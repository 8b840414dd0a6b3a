"""What several commands share: the flags of ServerArgs, the cache folder, a running engine."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from srt.cli.progress import PhaseBars
from srt.config.args import ServerArgs
from srt.config.flags import add_flags, read_namespace
from srt.config.trail import InputSource
from srt.errors import ConfigError
from srt.launch.bytecode import bytecode_cache
from srt.launch.ending import leaving_on_sigterm
from srt.launch.folder import SocketFolder
from srt.launch.prepare import prepare
from srt.launch.supervisor import ENGINE_ROLES, Supervisor, rank_roles

if TYPE_CHECKING:
    from srt.client import Client


def cache_folder() -> str:
    """TANDEM_CACHE, else tandem/ in XDG_CACHE_HOME, else in ~/.cache."""
    chosen = os.environ.get("TANDEM_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return chosen or str(Path(base) / "tandem")


def add_server_flags(parser: argparse.ArgumentParser, words: str = "") -> None:
    """Every flag of ServerArgs. There are many, so the usage line only says so; `words` are what else
    the command takes."""
    parser.usage = f"{parser.prog} [flags] {words}".rstrip()
    add_flags(parser)


def server_args(options: argparse.Namespace) -> tuple[ServerArgs, dict[str, InputSource]]:
    return read_namespace(options)


def start_logging(level: str) -> None:
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname).1s %(name)s: %(message)s"
    )


def child_environment() -> dict[str, str]:
    """The children's environment. OpenMP threads of the text processes would only be in the way of the
    model's, so everything that starts threads by itself is told not to."""
    return {**os.environ, **bytecode_cache(cache_folder()), "TOKENIZERS_PARALLELISM": "false"}


@contextmanager
def running_engine(options: argparse.Namespace) -> Iterator[Client]:
    """A client of the engine at `--connect`, or of one that is started for this command alone."""
    from srt.client import Client  # `serve` needs none, and can start its processes sooner

    if options.keys and not options.connect:
        raise ConfigError("--keys is for --connect: an engine of our own has a private front")
    if options.connect:
        ignored = sorted(server_args(options)[1])
        if ignored:
            raise ConfigError(
                f"--connect asks a running engine, so {', '.join(ignored)} would change nothing; "
                "leave out the engine's flags"
            )
        with Client.connect(options.connect, keys=options.keys) as client:
            yield client
        return
    args, sources = server_args(options)
    start_logging("warning")
    with leaving_on_sigterm(), SocketFolder() as folder:
        with PhaseBars() as bars:
            boot, _ = prepare(
                replace(args, log_level="warning"),
                sources,
                folder=folder.path,
                cache_folder=cache_folder(),
                progress=bars.show,
            )
            roles = (*rank_roles(args.tensor_parallel_size), *ENGINE_ROLES)
            supervisor = Supervisor(
                boot=boot.encode(), roles=roles, environment=child_environment()
            )
            supervisor.start(bars.show)
        try:
            with Client.connect(boot.addresses.front) as client:
                yield client
        finally:
            supervisor.stop()


def add_connect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--connect", help="ZMQ front of a running engine; default: start one for this command"
    )
    parser.add_argument(
        "--keys", type=Path, help="this client's key file, if the engine has --zmq-keys"
    )
