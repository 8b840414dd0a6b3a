"""The one mutable object of the process: its published configuration.

    publish(args, facts, role="scheduler", entropy=...)     phase "published"
    get_context().start_loading()                           phase "loading"
    with get_context().building("kv pool"):                 notes who reads which leaf
        pool = make_pool(get_schedule().page_size)
    get_context().seal()                                    phase "sealed"

Every read inside a `building` scope counts as captured once the scope ends, and while loading every
other read counts too, under the name of the module that reads. So no component can forget to say what
it holds. A later write to a captured leaf is a ConfigError that names the reader.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, Self

from srt.config.args import ServerArgs
from srt.config.bags import (
    Bag,
    DeviceBag,
    ExecBag,
    LoraBag,
    MemoryBag,
    ModelBag,
    ObservabilityBag,
    ParallelBag,
    ScheduleBag,
    ServingBag,
    SpecBag,
    check_writes,
    watch_reads,
    write_leaf,
)
from srt.config.dummy import dummy_facts
from srt.config.facts import Facts
from srt.config.leaves import convert_all, find_leaf
from srt.config.published import Phase, Published, describe, fill
from srt.config.resolve import resolve
from srt.config.runner_spec import RunnerSpec
from srt.config.trail import InputSource, TrailEntry
from srt.errors import ConfigError

logger = logging.getLogger(__name__)


class RuntimeContext:
    """Reached with `get_context()`. Reading anything before `publish` raises RuntimeError."""

    def __init__(self) -> None:
        self._state: Published | None = None

    @property
    def state(self) -> Published:
        """Raises RuntimeError before `publish`."""
        if self._state is None:
            raise RuntimeError(
                "no configuration is published in this process; a process entry calls "
                "publish(args, facts, ...) first, a test get_context().override_server_args(...)"
            )
        return self._state

    @property
    def args(self) -> ServerArgs:
        """What the user gave, for diagnostics only."""
        return self.state.args

    @property
    def facts(self) -> Facts:
        return self.state.facts

    @property
    def role(self) -> str:
        return self.state.role

    @property
    def phase(self) -> Phase:
        """published, loading or sealed; only while loading may the gate override."""
        return self.state.phase

    @property
    def runner_specs(self) -> tuple[RunnerSpec, ...]:
        """The target first, then the drafts."""
        return self.state.runner_specs

    @property
    def target(self) -> RunnerSpec:
        """Of the model that is served."""
        return self.state.runner_specs[0]

    @property
    def draft(self) -> RunnerSpec | None:
        """The first of the drafts; there are several if each of its layers has a runner."""
        return next(iter(self.drafts), None)

    @property
    def drafts(self) -> tuple[RunnerSpec, ...]:
        """None without a draft model; several if each of its layers has a runner."""
        return self.state.runner_specs[1:]

    @property
    def trail(self) -> tuple[TrailEntry, ...]:
        """Every decision in order; the last entry of a field has its present value."""
        return tuple(self.state.ledger.trail)

    @property
    def overrides(self) -> tuple[tuple[str, dict[str, Any]], ...]:
        """(source, fields) of the permanent overrides since the last publish."""
        return tuple(self.state.overrides)

    def describe(self) -> dict[str, Any]:
        """Bags, runners, trail, versions and a hash of the configuration, as plain data."""
        return describe(self.state)

    def publish(
        self,
        args: ServerArgs,
        facts: Facts,
        *,
        role: str,
        entropy: int,
        sources: Mapping[str, InputSource] | None = None,
    ) -> None:
        """Resolves and puts the result in place. Again: the last one wins, and what overrides had
        changed is dropped, in the trail and in a warning. Raises ConfigError, and nothing changed."""
        resolution = resolve(args, facts, entropy=entropy, sources=sources)
        before, now = self._state, fill(args, facts, role, resolution)
        for source, fields in before.overrides if before else ():
            for name in fields:
                bag = _bag_of(now, name)
                value = next(
                    entry.value
                    for entry in resolution.trail
                    if entry.field == f"{bag.namespace}.{name}"
                )
                now.ledger.trail.append(
                    TrailEntry(
                        field=f"{bag.namespace}.{name}",
                        value=value,
                        source="publish",
                        reason=f"published again; the override by {source} is dropped",
                    )
                )
            logger.warning("published again; dropped override by %s: %s", source, sorted(fields))
        self._state = now

    def start_loading(self) -> None:
        """From here on load-time overrides may be declared and every read of a leaf is noted."""
        self._advance("published", "loading")
        self._watch()

    def seal(self) -> None:
        """Everything is built."""
        self._advance("loading", "sealed")
        self._watch()

    @contextmanager
    def building(self, component: str) -> Iterator[None]:
        """While `component` is built: what it reads is captured once the scope ends without an
        exception. Inside, it may still override what it read itself."""
        state = self.state
        try:
            with state.ledger.building(component):
                _watch(state)
                yield
        finally:
            _watch(state)

    def override(self, source: str, *, reason: str = "", **fields: Any) -> None:
        """Permanent change of published leaves, of any bags. Never touches ServerArgs. All fields are
        checked before the first write: ConfigError, and nothing changed."""
        state = self.state
        if not source:
            raise ConfigError("an override must say its source, e.g. override('kv sizing', ...)")
        by_bag: dict[str, dict[str, Any]] = {}
        for name, value in fields.items():
            by_bag.setdefault(_bag_of(state, name).namespace, {})[name] = value
        bags = {bag.namespace: bag for bag in state.bags}
        checked = [(bags[name], check_writes(bags[name], by_bag[name])) for name in by_bag]
        changed = {name: value for _, values in checked for name, value in values.items()}
        for bag, values in checked:
            for name, value in values.items():
                write_leaf(bag, name, value, source=source, reason=reason or f"set by {source}")
        if changed:
            state.overrides.append((source, changed))

    def declare_load_time_override(
        self, source: str, fields: Mapping[str, Any], *, reason: str = ""
    ) -> None:
        """For values known only when weights load: only while loading, and only fields whose line in
        ServerArgs says `at_load`."""
        if self.phase != "loading":
            raise ConfigError(
                f"{source} declares a load-time override of {', '.join(fields)}, but the phase is "
                f"{self.phase}; allowed only while loading"
            )
        for name in fields:
            if not find_leaf(name).at_load:
                raise ConfigError(
                    f"{source} may not override {name} at load; mark its line in ServerArgs "
                    "with at_load=True if it is known only then"
                )
        self.override(source, reason=reason, **fields)

    def note(self, source: str, name: str, reason: str) -> None:
        """Somebody looked at a leaf and left it as it is: an entry of the trail with the reason, no
        write. Said again it is no second entry."""
        trail, bag = self.state.ledger.trail, find_leaf(name).bag
        last = next(entry for entry in reversed(trail) if entry.field == f"{bag}.{name}")
        entry = replace(last, source=source, reason=reason, replaced=None)
        if entry != last:
            trail.append(entry)

    def restamp_runner(self, source: str, spec: RunnerSpec, *, reason: str) -> None:
        """Replaces the spec of the same label, only while loading and before the runner's backends are
        built: for what only loading finds out, e.g. that kernels cannot be compiled here."""
        state = self.state
        if state.phase != "loading":
            raise ConfigError(
                f"{source} restamps the {spec.label} runner, but the phase is {state.phase}; allowed "
                "only while loading"
            )
        before = next((old for old in state.runner_specs if old.label == spec.label), None)
        if before is None:
            raise ConfigError(f"{source} restamps the {spec.label} runner, but there is none")
        old, new = asdict(before), asdict(spec)
        state.runner_specs = tuple(spec if each is before else each for each in state.runner_specs)
        state.ledger.trail.extend(
            TrailEntry(
                field=f"{spec.label}.{name}",
                value=value,
                source=source,
                reason=reason,
                replaced=old[name],
            )
            for name, value in new.items()
            if value != old[name]
        )

    def override_server_args(self, **fields: Any) -> SeededConfig:
        """A complete configuration for a test, from a dummy model and `fields`: with `with`, or with
        `install()` and `restore()`. Raises ConfigError for an unknown field."""
        return SeededConfig(self, convert_all(fields))

    def _advance(self, since: Phase, to: Phase) -> None:
        if self.state.phase != since:
            raise RuntimeError(f"cannot go from phase {self.state.phase} to {to}")
        self.state.phase = to

    def _watch(self) -> None:
        _watch(self.state)


class SeededConfig:
    """A temporary configuration. `restore` puts back the very objects that were there before."""

    def __init__(self, context: RuntimeContext, fields: dict[str, Any]) -> None:
        self._context = context
        self._args = ServerArgs(**{"model": "dummy", "load_format": "dummy"} | fields)
        self._before: Published | None = None
        self.is_installed = False

    def install(self) -> Self:
        if self.is_installed:
            raise RuntimeError("this configuration is installed already")
        context = self._context
        before, context._state = context._state, None
        try:
            context.publish(self._args, dummy_facts(), role="test", entropy=0)
        except BaseException:
            context._state = before
            raise
        self._before, self.is_installed = before, True
        return self

    def restore(self) -> None:
        """Does nothing when nothing is installed."""
        if self.is_installed:
            self._context._state, self._before = self._before, None
            self.is_installed = False

    def __enter__(self) -> Self:
        return self.install()

    def __exit__(self, *_: object) -> None:
        self.restore()


def _bag_of(state: Published, name: str) -> Bag:
    leaf = find_leaf(name)
    for bag in state.bags:
        if bag.namespace == leaf.bag:
            return bag
    raise ConfigError(
        f"{name} may differ between target and draft, so it is in a RunnerSpec and cannot be "
        f"overridden; set {leaf.flag} before the start"
    )


def _watch(state: Published) -> None:
    """Note reads while loading and inside every building scope."""
    is_on = state.phase == "loading" or state.ledger.is_building
    for bag in state.bags:
        watch_reads(bag, is_on)


_context = RuntimeContext()


def get_context() -> RuntimeContext:
    return _context


def publish(
    args: ServerArgs,
    facts: Facts,
    *,
    role: str,
    entropy: int,
    sources: Mapping[str, InputSource] | None = None,
) -> None:
    """Publishes this process's configuration; see `RuntimeContext.publish`."""
    _context.publish(args, facts, role=role, entropy=entropy, sources=sources)


def get_model() -> ModelBag:
    return _context.state.model


def get_schedule() -> ScheduleBag:
    return _context.state.schedule


def get_memory() -> MemoryBag:
    return _context.state.memory


def get_spec() -> SpecBag:
    return _context.state.spec


def get_exec() -> ExecBag:
    return _context.state.exec


def get_serving() -> ServingBag:
    return _context.state.serving


def get_lora() -> LoraBag:
    return _context.state.lora


def get_parallel() -> ParallelBag:
    return _context.state.parallel


def get_device() -> DeviceBag:
    return _context.state.device


def get_observability() -> ObservabilityBag:
    return _context.state.observability
