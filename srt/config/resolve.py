"""`resolve`: from what was typed and what is true to every value, each with its reason. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from srt.config.args import ServerArgs
from srt.config.bags import BAGS
from srt.config.decisions import Decisions
from srt.config.facts import Facts
from srt.config.latent import is_latent
from srt.config.leaves import convert, leaf_table
from srt.config.prefix_chunks import check_prefix_wish
from srt.config.rules_device import decide_device
from srt.config.rules_exec import decide_exec
from srt.config.rules_graphs import Sizes, decide_graphs, decide_prefill_graphs
from srt.config.rules_memory import MemoryPlan, decide_memory
from srt.config.rules_model import ModelPlan, decide_model
from srt.config.rules_parallel import decide_parallel
from srt.config.rules_room import decide_room
from srt.config.rules_schedule import decide_schedule
from srt.config.rules_serving import decide_serving
from srt.config.rules_spec import DraftPlan, decide_spec, draft_runners
from srt.config.runner_spec import RunnerSpec
from srt.config.trail import InputSource, TrailEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """`values` by namespace and leaf; `runners` with the target first; `trail` has one entry per leaf
    and per value of a runner."""

    values: dict[str, dict[str, Any]]
    runners: tuple[RunnerSpec, ...]
    trail: tuple[TrailEntry, ...]


def resolve(
    args: ServerArgs,
    facts: Facts,
    *,
    entropy: int,
    sources: Mapping[str, InputSource] | None = None,
) -> Resolution:
    """Decides everything that was left open. Raises ConfigError for a wish that cannot be met.

    entropy: a random number from outside, for what is drawn at start. sources: which fields were typed
    and which came from a file; None: those that differ from their default were typed.
    """
    args = check_args(args)
    decisions = Decisions(args, typed_fields(args) if sources is None else sources)
    gpu = decide_device(args, facts, decisions)
    decide_parallel(args, facts, gpu is not None, decisions)
    plan = decide_model(args, facts, gpu, decisions)
    backends = decide_exec(args, facts, plan, decisions)
    draft = decide_spec(args, facts, plan, backends, decisions)
    both = plan if draft is None else draft.join(plan)
    room = decide_room(args, facts, both, draft, decisions)
    memory = decide_memory(args, facts, both, room, decisions)
    wish = decisions.origin("disable_chunked_prefix_cache")
    check_prefix_wish(args, wish, is_latent(facts.model.architecture))
    rows = decide_schedule(args, memory, gpu is not None, decisions)
    graphs = decide_graphs(args, gpu, backends[1], rows, decisions)
    step_tokens = decisions.values["max_step_tokens"]
    prefills = decide_prefill_graphs(args, facts.model, graphs[0], step_tokens, decisions)
    decide_serving(args, entropy, decisions)
    for name, leaf in leaf_table().items():
        if name not in decisions.values and leaf.bag not in ("runner", "draft"):  # all decided
            decisions.default(name)
    runners, trail = _runners(facts, plan, memory, backends, (graphs, prefills), draft)
    return Resolution(
        values={
            bag.namespace: {
                name: msgspec.convert(decisions.values[name], hint)
                for name, hint in bag.leaf_types.items()
            }
            for bag in BAGS
        },
        runners=runners,
        trail=(*decisions.trail, *trail),
    )


def check_args(args: ServerArgs) -> ServerArgs:
    """Every field of its type, in its range, among its choices; also when built by hand in Python."""
    given = {name: getattr(args, name) for name in leaf_table()}
    return ServerArgs(**{name: convert(leaf_table()[name], given[name]) for name in given})


def typed_fields(args: ServerArgs) -> dict[str, InputSource]:
    table = leaf_table()
    return {name: "typed" for name in table if getattr(args, name) != table[name].default}


def _runners(
    facts: Facts,
    plan: ModelPlan,
    memory: MemoryPlan,
    backends: tuple[str, str],
    graphs: tuple[Sizes, Sizes],
    draft: DraftPlan | None,
) -> tuple[tuple[RunnerSpec, ...], list[TrailEntry]]:
    """The specs, and the entries of the values that no field of ServerArgs has."""
    spec = RunnerSpec(
        role="target",
        model_path=facts.model.path,
        load_format=plan.load_format,
        dtype=plan.dtype,
        quantization=plan.quantization,
        context_length=memory.context_length,
        kv_cache_dtype=plan.kv_cache_dtype,
        prefill_attention_backend=backends[0],
        decode_attention_backend=backends[1],
        graph_sizes=graphs[0][0],
        prefill_graph_sizes=graphs[1][0],
    )
    reasons = {
        "role": ("rule", "the model that answers"),
        "model_path": ("model", "where --model was found"),
        "load_format": ("rule", "model.load_format"),
        "graph_sizes": graphs[0][1:],
        "prefill_graph_sizes": graphs[1][1:],
        "draft_attention_backend": ("rule", "the target is no draft"),
        "step": ("rule", "the target is no draft"),
    }
    values = asdict(spec)
    trail = [
        TrailEntry(field=f"target.{name}", value=values[name], source=source, reason=reason)
        for name, (source, reason) in reasons.items()
    ]
    if draft is None:
        return (spec,), trail
    others, their_trail = draft_runners(draft, plan, memory.context_length, spec)
    return (spec, *others), [*trail, *their_trail]
