"""`tandem keys FOLDER [NAME ...]`: keys for a ZMQ front that other machines reach."""

from __future__ import annotations

import argparse
from pathlib import Path

from srt.errors import ConfigError
from srt.wire.guard import draw_pair
from srt.wire.keys import write_client_keys, write_server_keys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="the server's folder of keys; made if needed")
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="clients to allow; each gets a file FOLDER/NAME.toml",
    )


def run(options: argparse.Namespace) -> int:
    try:
        write_server_keys(options.folder, draw_pair())
        for name in options.names:
            path = write_client_keys(options.folder, name, draw_pair())
            print(f"{path}: for the client {name}; move it there, it holds a secret")
    except OSError as error:
        raise ConfigError(f"cannot write keys into {options.folder}: {error}") from None
    print(f"tandem serve --zmq-front tcp://0.0.0.0:5555 --zmq-keys {options.folder}")
    return 0
