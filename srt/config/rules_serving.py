"""The edge: addresses, keys, seed."""

from __future__ import annotations

import ipaddress

from srt.config.args import ServerArgs
from srt.config.decisions import Decisions
from srt.errors import ConfigError


def decide_serving(args: ServerArgs, entropy: int, decisions: Decisions) -> None:
    front = args.zmq_front
    if front is not None and not front.startswith(("ipc://", "tcp://")):
        raise ConfigError(
            f"--zmq-front {front} was asked for; allowed: ipc://PATH or tcp://HOST:PORT"
        )
    if front is not None and args.inline:
        raise ConfigError(
            f"--zmq-front {front} was asked for with --inline, which has no sockets but the "
            "gateway's; leave one of them out"
        )
    check_guard(front, args.zmq_keys)
    if front is None:
        decisions.decide("zmq_front", None, "a private ipc file, made at start")
    else:
        decisions.take("zmq_front", front)
    if args.admin_key is not None:
        decisions.take("admin_key", args.admin_key)
    elif args.api_key is not None:
        decisions.decide("admin_key", args.api_key, "the api key")
    else:
        decisions.decide("admin_key", None, "off: there is no api key either")
    if args.seed == 0:
        drawn = entropy % (2**31 - 1) + 1
        decisions.decide("seed", drawn, "drawn at start; --seed repeats it")
    else:
        decisions.take("seed", args.seed)


def check_guard(front: str | None, keys: str | None) -> None:
    """Whoever reaches the front can use the engine, so one that other machines reach wants keys."""
    if keys is not None and front is None:
        raise ConfigError(
            f"--zmq-keys {keys} was asked for without --zmq-front; the private ipc file needs no "
            "keys, name an endpoint or leave them out"
        )
    if front is not None and keys is None and not is_local(front):
        raise ConfigError(
            f"--zmq-front {front} was asked for: other machines could use the engine without a key; "
            "allowed: tcp://127.0.0.1:PORT, ipc://PATH, or any address with --zmq-keys FOLDER "
            "(`tandem keys FOLDER NAME` makes the keys)"
        )


def is_local(endpoint: str) -> bool:
    """Only this machine reaches it. A name is not looked up: of all names only localhost is sure."""
    if endpoint.startswith("ipc://"):
        return True
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
