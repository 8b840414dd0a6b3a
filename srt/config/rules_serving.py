"""The edge: addresses, keys, seed."""

from __future__ import annotations

from srt.config.args import ServerArgs
from srt.config.decisions import Decisions
from srt.errors import ConfigError


def decide_serving(args: ServerArgs, entropy: int, decisions: Decisions) -> None:
    if args.port > 65535:
        raise ConfigError(f"--port {args.port} was asked for; allowed: 0 (any free one) to 65535")
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
