"""Decides who may connect to a CURVE endpoint: zmq asks (ZAP, RFC 27), the folder of keys answers."""

from __future__ import annotations

import logging
import threading

import zmq
from zmq.utils import z85

from srt.errors import ConfigError
from srt.wire.keys import ClientKeys, KeyPair, ServerKeys

logger = logging.getLogger(__name__)
ENDPOINT = "inproc://zeromq.zap.01"  # where zmq looks for the one that answers
DOMAIN = b"tandem"


def draw_pair() -> KeyPair:
    """A fresh key pair. Raises ConfigError if this zmq has no CURVE."""
    check_curve()
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def check_curve() -> None:
    if not zmq.has("curve"):
        raise ConfigError("this build of zmq has no CURVE (libsodium); the wheels of pyzmq have it")


def guard_socket(socket: zmq.Socket[bytes], keys: ServerKeys) -> None:
    """What is bound from now on wants a key that `watch_door` of the same context knows."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
    socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)


def show_keys(socket: zmq.Socket[bytes], keys: ClientKeys) -> None:
    """For a client, before it connects."""
    check_curve()
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server.encode())
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())


def watch_door(context: zmq.Context[zmq.Socket[bytes]], keys: ServerKeys) -> None:
    """Answers in a thread that ends with the context. To be called before anything guarded is bound:
    without an answer zmq would let everybody in who knows the server's public key."""
    check_curve()
    socket = context.socket(zmq.REP)
    socket.linger = 0
    socket.bind(ENDPOINT)
    threading.Thread(target=_answer, args=(socket, keys), name="zmq-door", daemon=True).start()


def _answer(socket: zmq.Socket[bytes], keys: ServerKeys) -> None:
    try:
        while True:
            socket.send_multipart(decide(socket.recv_multipart(), keys))
    except zmq.ContextTerminated:
        pass
    except Exception:
        logger.exception("the door of the guarded front broke; it stays shut")
    finally:
        socket.close(0)


def decide(question: list[bytes], keys: ServerKeys) -> list[bytes]:
    """The reply to one ZAP question: 200 with the client's name, or 400."""
    if len(question) < 6:
        return [b"1.0", b"", b"500", b"not a ZAP question", b"", b""]
    version, number, _, address, _, mechanism, *credentials = question
    name = None
    if mechanism == b"CURVE" and len(credentials) == 1 and len(credentials[0]) == 32:
        name = keys.allowed().get(z85.encode(credentials[0]).decode())
    if name is None:
        logger.warning("refused a client at %s: its key is not known", address.decode("latin-1"))
        return [version, number, b"400", b"unknown key", b"", b""]
    logger.info("client %s at %s", name, address.decode("latin-1"))
    return [version, number, b"200", b"OK", name.encode(), b""]
