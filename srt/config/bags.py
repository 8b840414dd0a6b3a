"""The published configuration, one read-only bag per namespace.

A leaf is a real instance attribute, so reading one costs what any attribute costs and compilers can
trace it. Only while something is being built do the bags note who reads what (`srt.config.ledger`).
`None` in a bag is a decision: no key, no journal, no speculation.
"""

from __future__ import annotations

import sys
import typing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, ClassVar, Self

from srt.config.leaves import Leaf, convert, find_leaf, suggest
from srt.config.ledger import Ledger
from srt.config.trail import SECRET, TrailEntry
from srt.errors import ConfigError


class Bag:
    """Leaves are the annotated attributes of the subclass."""

    namespace: ClassVar[str]
    leaf_types: ClassVar[Mapping[str, Any]]  # name to type, in order

    def __init_subclass__(cls) -> None:
        hints = typing.get_type_hints(cls)
        cls.leaf_types = {
            name: hint for name, hint in hints.items() if typing.get_origin(hint) is not ClassVar
        }

    def __init__(self, values: Mapping[str, Any], ledger: Ledger) -> None:
        """`values` has exactly the leaves, already of their types."""
        assert set(values) == set(self.leaf_types), (self.namespace, sorted(values))
        for name, value in values.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "_ledger", ledger)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(
            f"{self.namespace}.{name} is published and read-only; change it with "
            f"get_context().override(source, {name}=...), or for a while with "
            f"get_{self.namespace}().override({name}=...)"
        )

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{self.namespace}.{name} is published and cannot be deleted")

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in show_leaves(self).items())
        return f"{self.namespace}({shown})"

    @contextmanager
    def override(self, **leaves: Any) -> Iterator[Self]:
        """Other values until the scope ends, then the old ones again, also after an exception. Scopes
        nest. All leaves are checked before the first is written: ConfigError, and nothing changed.

        Whoever is built inside the scope keeps the scope's values; it meant to.
        """
        values = check_writes(self, leaves)
        before = {name: vars(self)[name] for name in values}
        for name, value in values.items():
            write_leaf(self, name, value, source="scoped override", reason="until its scope ends")
        try:
            yield self
        finally:
            for name, value in before.items():
                write_leaf(self, name, value, source="scoped override", reason="its scope ended")
                vars(self)["_ledger"].forget_readers(f"{self.namespace}.{name}")


class ModelBag(Bag):
    """What is served, and under which name."""

    namespace = "model"
    model: str  # as the user named it; where it lies on the disk is in the RunnerSpec
    served_model_name: str
    tokenizer: str  # a folder or file
    chat_template: str | None  # None: the model's own
    load_format: (
        str  # of what is being loaded: the target's, and while the draft loads, the draft's
    )


class ScheduleBag(Bag):
    """Limits of the queue, the batch and the KV pool. Counts are tokens or requests."""

    namespace = "schedule"
    max_running: int
    max_queued: int
    max_queued_tokens: int
    max_step_tokens: int
    chunked_prefill_size: int  # 0: whole prompts
    max_itl_ms: float | None  # None: no promise
    policy: str
    page_size: int
    overlap: bool
    max_total_tokens: int  # usable KV tokens, whole pages; the padding page comes on top
    max_prefix_chunk_tokens: int  # of MLA prefixes, expanded at once
    disable_chunked_prefix_cache: bool


class MemoryBag(Bag):
    """The prefix cache and the memory for KV."""

    namespace = "memory"
    disable_radix_cache: bool
    eviction_policy: str
    kv_memory_gb: float  # 10^9 bytes
    gpu_memory_fraction: float  # of one GPU's memory; 0.0: no GPU is used


class SpecBag(Bag):
    """Who guesses tokens, how many, and when not."""

    namespace = "spec"
    speculative_algorithm: str | None
    speculative_draft_model: str | None
    speculative_num_draft_tokens: int  # 0: no speculation
    speculative_num_steps: int
    speculative_eagle_topk: int
    speculative_confidence: float
    speculative_lookup: bool
    speculative_dspark_planner: str
    speculative_dspark_budget: int  # 0: no limit of its own
    speculative_batch_tokens: int
    speculative_force_accept: float  # 0: off


class ExecBag(Bag):
    """How the forward is computed: kernels and threads of a CPU, and whether a request's bits may depend
    on its company."""

    namespace = "exec"
    native_kernels: bool
    deterministic: bool
    moe_force_even_routing: bool  # only ever with weights of noise
    num_threads: int


class ServingBag(Bag):
    """Addresses, keys, the gateway's limits. Times are seconds."""

    namespace = "serving"
    host: str
    port: int
    zmq_front: str | None  # None: a private ipc file
    zmq_keys: str | None  # None: whoever can reach zmq_front gets in
    gateway: bool
    inline: bool
    api_key: str | None
    admin_key: str | None
    cors_origins: tuple[str, ...]
    max_body_mb: float
    receive_seconds: float
    stream_buffer_kb: int  # 1024 bytes
    max_prompts: int
    max_messages: int
    max_prompt_chars: int
    max_n: int
    max_logprobs: int
    max_stop: int
    max_stop_chars: int
    max_stop_token_ids: int
    max_logit_bias: int
    max_grammar_chars: int
    max_name_chars: int
    default_deadline: float
    stall_seconds: float
    drain_seconds: float
    generation_defaults: bool
    strict_fields: bool


class LoraBag(Bag):
    """Adapters: none is served, so there are no leaves."""

    namespace = "lora"


class ParallelBag(Bag):
    """How many processes compute the model together."""

    namespace = "parallel"
    tensor_parallel_size: int  # 1: one has all of it
    rank_sums: str  # library or direct


class DeviceBag(Bag):
    """Where the model runs, and the seed (drawn at start if the user gave 0)."""

    namespace = "device"
    device: str
    seed: int


class ObservabilityBag(Bag):
    """Logs, the journal, and how many steps the profile keeps."""

    namespace = "observability"
    log_level: str
    journal: str | None
    step_log: int


BAGS: tuple[type[Bag], ...] = (
    ModelBag,
    ScheduleBag,
    MemoryBag,
    SpecBag,
    ExecBag,
    ServingBag,
    LoraBag,
    ParallelBag,
    DeviceBag,
    ObservabilityBag,
)


def show_leaves(bag: Bag) -> dict[str, Any]:
    """Name to value, secrets hidden, without noting a read."""
    return {
        name: show(find_leaf(name), value) for name, value in vars(bag).items() if name != "_ledger"
    }


def show(leaf: Leaf, value: Any) -> Any:
    return SECRET if leaf.secret and value is not None else value


def check_writes(bag: Bag, leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The values as the leaves' types. Raises ConfigError for an unknown leaf, a wrong value, or a leaf
    that something built has captured. A value that changes nothing is left out: nobody misses it."""
    ledger: Ledger = vars(bag)["_ledger"]
    values = {}
    for name, value in leaves.items():
        wanted = bag.leaf_types.get(name)
        if wanted is None:
            near = suggest(name, bag.leaf_types)
            raise ConfigError(f"{bag.namespace} has no leaf {name!r}{near}")
        new = convert(find_leaf(name), value, wanted)
        if new == vars(bag)[name]:
            continue
        reader = ledger.reader_of(f"{bag.namespace}.{name}")
        if reader is not None:
            raise ConfigError(
                f"{bag.namespace}.{name} cannot become {show(find_leaf(name), new)!r}: {reader} was "
                f"built with {show_leaves(bag)[name]!r} and would not see it; override it before "
                f"{reader} is built"
            )
        values[name] = new
    return values


def write_leaf(bag: Bag, name: str, value: Any, *, source: str, reason: str) -> None:
    """Writes a checked value and its trail entry. For this package only."""
    leaf, ledger = find_leaf(name), vars(bag)["_ledger"]
    ledger.trail.append(
        TrailEntry(
            field=f"{bag.namespace}.{name}",
            value=show(leaf, value),
            source=source,
            reason=reason,
            replaced=show(leaf, vars(bag)[name]),
        )
    )
    object.__setattr__(bag, name, value)


class _Watched(Bag):
    """Mixed into a bag's twin; shares its layout and its leaves."""

    if not typing.TYPE_CHECKING:  # or every misspelt leaf would pass the type check

        def __getattribute__(self, name: str) -> Any:
            values = object.__getattribute__(self, "__dict__")
            if name in values and name != "_ledger":
                module = sys._getframe(1).f_globals.get("__name__", "?")
                values["_ledger"].note_read(f"{type(self).namespace}.{name}", module)
            return object.__getattribute__(self, name)


_TWINS: Mapping[type[Bag], type[Bag]] = MappingProxyType(
    {bag: type(bag.__name__, (_Watched, bag), {}) for bag in BAGS}
)
_PLAIN: Mapping[type[Bag], type[Bag]] = MappingProxyType(
    {twin: bag for bag, twin in _TWINS.items()}
)


def watch_reads(bag: Bag, is_on: bool) -> None:
    """While on, the bag is of a twin class whose attribute access notes leaf reads in the ledger."""
    plain = _PLAIN.get(type(bag), type(bag))
    object.__setattr__(bag, "__class__", _TWINS[plain] if is_on else plain)
