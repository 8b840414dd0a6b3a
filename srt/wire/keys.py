"""CURVE keys as files: who a guarded front is, and which clients it knows.

    FOLDER/                  mode 0700, the server's
      server.toml            public, secret (mode 0600)
      clients/NAME.pub       one public key each: the clients that are allowed
      NAME.toml              server, public, secret (mode 0600): give it to the client

A key is the 40 characters of Z85 that zmq uses. Who makes a pair elsewhere hands in the public half as
`clients/NAME.pub`; a client is turned away by removing that file. `tandem keys` writes all of them.
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from srt.errors import ConfigError

KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,63}")
SERVER = "server"
KeyPair = tuple[str, str]  # public, secret


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerKeys:
    """What binds a guarded endpoint. `clients` is read again for every newcomer."""

    public: str
    secret: str = field(repr=False)
    clients: Path

    def allowed(self) -> dict[str, str]:
        """The allowed clients' names by public key. A file that holds no key allows nobody."""
        found = {}
        for path in sorted(self.clients.glob("*.pub")):
            try:
                key = path.read_text().strip()
            except (OSError, UnicodeDecodeError):
                continue
            if KEY.fullmatch(key):
                found[key] = path.stem
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientKeys:
    """What connects to one: the server's public key and the client's own pair."""

    server: str
    public: str
    secret: str = field(repr=False)


def read_server_keys(folder: str | Path) -> ServerKeys:
    """Raises ConfigError for what is missing, damaged or open to other users."""
    place = Path(folder).expanduser()
    keys = _read(place / f"{SERVER}.toml", ("public", "secret"), "tandem keys FOLDER makes one")
    if not (place / "clients").is_dir():
        raise ConfigError(f"{place} has no folder clients/, so nobody could connect; tandem keys")
    return ServerKeys(public=keys["public"], secret=keys["secret"], clients=place / "clients")


def read_client_keys(path: str | Path) -> ClientKeys:
    """Raises ConfigError for what is missing, damaged or open to other users."""
    hint = "the server's `tandem keys FOLDER NAME` makes one"
    return ClientKeys(**_read(Path(path).expanduser(), ("server", "public", "secret"), hint))


def write_server_keys(folder: Path, pair: KeyPair) -> None:
    """Makes the folder and the server's pair. An older pair stays: its clients rely on it."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    (folder / "clients").mkdir(exist_ok=True)
    if not (folder / f"{SERVER}.toml").exists():
        _write(folder / f"{SERVER}.toml", {"public": pair[0], "secret": pair[1]})


def write_client_keys(folder: Path, name: str, pair: KeyPair) -> Path:
    """Allows a new client and returns the file it needs. Raises ConfigError for a name that is taken or
    unfit."""
    server = read_server_keys(folder)
    if NAME.fullmatch(name) is None or name == SERVER:
        raise ConfigError(
            f"{name!r} cannot name a client; allowed: up to 64 letters, digits, '_', '-' and '.', "
            f"and not {SERVER!r}"
        )
    listed, path = server.clients / f"{name}.pub", folder / f"{name}.toml"
    if listed.exists() or path.exists():
        raise ConfigError(f"{folder} already has a client {name}; remove {listed} and {path} first")
    _write(path, {"server": server.public, "public": pair[0], "secret": pair[1]})
    listed.write_text(pair[0] + "\n")
    return path


def _read(path: Path, names: tuple[str, ...], hint: str) -> dict[str, str]:
    try:
        mode = path.stat().st_mode
        values = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"there is no key file {path}; {hint}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"the key file {path} cannot be read: {error}") from None
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(f"other users may open the key file {path}; chmod 600 {path}")
    for name in names:
        if not isinstance(values.get(name), str) or KEY.fullmatch(values[name]) is None:
            raise ConfigError(f"{name} in the key file {path} is not 40 characters of Z85; {hint}")
    return {name: values[name] for name in names}


def _write(path: Path, values: dict[str, str]) -> None:
    text = "".join(f'{name} = "{value}"\n' for name, value in values.items())
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
