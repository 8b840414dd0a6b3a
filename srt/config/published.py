"""Everything one publish put in place: the record, the bags, the runners' specs, the ledger."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

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
    show_leaves,
)
from srt.config.facts import Facts
from srt.config.ledger import Ledger
from srt.config.resolve import Resolution
from srt.config.runner_spec import RunnerSpec

Phase = Literal["published", "loading", "sealed"]


@dataclass(slots=True, kw_only=True)
class Published:
    """`overrides`: (source, fields) of every permanent one. `phase` only moves forward."""

    args: ServerArgs
    facts: Facts
    role: str
    runner_specs: tuple[RunnerSpec, ...]
    ledger: Ledger
    model: ModelBag
    schedule: ScheduleBag
    memory: MemoryBag
    spec: SpecBag
    exec: ExecBag
    serving: ServingBag
    lora: LoraBag
    parallel: ParallelBag
    device: DeviceBag
    observability: ObservabilityBag
    config_hash: str  # of what was resolved; what loading finds out changes bags, not this
    phase: Phase = "published"
    overrides: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    @property
    def bags(self) -> tuple[Bag, ...]:
        return (
            self.model,
            self.schedule,
            self.memory,
            self.spec,
            self.exec,
            self.serving,
            self.lora,
            self.parallel,
            self.device,
            self.observability,
        )


def fill(args: ServerArgs, facts: Facts, role: str, resolution: Resolution) -> Published:
    """The bags of a resolution, around one ledger that begins with the resolution's trail."""
    ledger, values = Ledger(list(resolution.trail)), resolution.values
    published = Published(
        args=args,
        config_hash="",
        facts=facts,
        role=role,
        runner_specs=resolution.runners,
        ledger=ledger,
        model=ModelBag(values["model"], ledger),
        schedule=ScheduleBag(values["schedule"], ledger),
        memory=MemoryBag(values["memory"], ledger),
        spec=SpecBag(values["spec"], ledger),
        exec=ExecBag(values["exec"], ledger),
        serving=ServingBag(values["serving"], ledger),
        lora=LoraBag(values["lora"], ledger),
        parallel=ParallelBag(values["parallel"], ledger),
        device=DeviceBag(values["device"], ledger),
        observability=ObservabilityBag(values["observability"], ledger),
    )
    bags = {bag.namespace: show_leaves(bag) for bag in published.bags}
    runners = [dataclasses.asdict(spec) for spec in published.runner_specs]
    published.config_hash = config_hash(bags, runners, is_seed_drawn=args.seed == 0)
    return published


def describe(state: Published) -> dict[str, Any]:
    """Plain data for `/v1/engine/config`: bags, runners, trail, versions, GPUs. Secrets are hidden; no
    read is noted."""
    bags = {bag.namespace: show_leaves(bag) for bag in state.bags}
    runners = [dataclasses.asdict(spec) for spec in state.runner_specs]
    return {
        "role": state.role,
        "phase": state.phase,
        "config_hash": state.config_hash,
        "bags": bags,
        "runners": runners,
        "trail": [dataclasses.asdict(entry) for entry in state.ledger.trail],
        "versions": dict(state.facts.machine.versions),
        "gpus": [dataclasses.asdict(gpu) for gpu in state.facts.machine.gpus],
    }


def config_hash(
    bags: Mapping[str, Mapping[str, Any]],
    runners: list[dict[str, Any]],
    *,
    is_seed_drawn: bool,
) -> str:
    """Equal for equal configurations, whatever the process, its role and the seed it drew. 16 digits."""
    shown = {name: dict(leaves) for name, leaves in bags.items()}
    if is_seed_drawn:
        del shown["device"]["seed"]
    data = msgspec.json.encode([shown, runners], order="deterministic")
    return hashlib.sha256(data).hexdigest()[:16]
