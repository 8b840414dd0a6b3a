"""A scenario file: which workload, against what, at which loads."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.workloads import (
    Workload,
    multi_turn,
    random_prompts,
    replay_trace,
    shared_prefix,
)
from srt.errors import ConfigError

CACHES = ("as-is", "cold", "pair")
MAKERS: dict[str, Callable[..., Workload]] = {
    "random": random_prompts,
    "shared-prefix": shared_prefix,
    "multi-turn": multi_turn,
    "trace": replay_trace,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """`loads`: each a concurrency or a rate, with its own number of requests if it says so. `exact`: a
    prompt of n words is sent as exactly n token ids. `cache`: "as-is" empties nothing, "cold" empties
    the prefix cache before each run, "pair" also runs the same prompts a second time, warm."""

    name: str
    workload: dict[str, Any]
    loads: list[dict[str, Any]]
    goals: dict[str, float] = field(default_factory=dict)
    temperature: float = 0.0
    repeat: int = 1
    exact: bool = False
    cache: str = "as-is"

    def __post_init__(self) -> None:
        if self.cache not in CACHES:
            raise ConfigError(f"cache {self.cache!r} is unknown; known: {', '.join(CACHES)}")


def read_scenario(path: Path) -> Scenario:
    """Raises ConfigError on an unknown key."""
    try:
        values = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"scenario {path}: {error}") from None
    try:
        return Scenario(name=values.pop("name", path.stem), **values)
    except TypeError as error:
        raise ConfigError(f"scenario {path}: {error}") from None


def workload_of(scenario: Scenario, load: dict[str, Any], seed: int) -> Workload:
    """The scenario's workload with what this load changes of it."""
    changes = {name: value for name, value in load.items() if name not in ("concurrency", "rate")}
    return make_workload({**scenario.workload, **changes}, seed=seed)


def make_workload(settings: dict[str, Any], *, seed: int) -> Workload:
    """Raises ConfigError on an unknown kind or setting."""
    options = dict(settings)
    kind = options.pop("kind", "random")
    if kind not in MAKERS:
        raise ConfigError(f"workload kind {kind!r} is unknown; known: {', '.join(MAKERS)}")
    if "path" in options:
        options["path"] = Path(options["path"])
    try:
        return MAKERS[kind](**{"seed": seed, **options})
    except TypeError as error:
        raise ConfigError(f"workload {kind}: {error}") from None
