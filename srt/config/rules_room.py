"""The memory that the KV cache may have: of the host, or a share of the GPU's."""

from __future__ import annotations

from srt.config.args import ServerArgs
from srt.config.decisions import Decisions
from srt.config.facts import Facts
from srt.config.footprint import reserve_of
from srt.config.rooms import GPU_FRACTION, Room, cpu_room, gpu_room
from srt.config.rules_graphs import default_sizes
from srt.config.rules_model import ModelPlan
from srt.config.rules_schedule import GPU_MAX_RUNNING, most_step_tokens
from srt.config.rules_spec import DraftPlan
from srt.errors import ConfigError


def decide_room(
    args: ServerArgs,
    facts: Facts,
    plan: ModelPlan,
    draft: DraftPlan | None,
    decisions: Decisions,
) -> Room:
    """`plan`: of all runners together. Raises ConfigError for a share of a GPU that is not used."""
    if plan.gpu is None:
        if args.gpu_memory_fraction is not None:
            raise ConfigError(
                f"--gpu-memory-fraction {args.gpu_memory_fraction:g} was asked for, but the model runs "
                "on the CPU; allowed there: --kv-memory-gb, or leave it out"
            )
        decisions.decide("gpu_memory_fraction", 0.0, "no GPU is used")
        return cpu_room(facts, plan, args.tensor_parallel_size)
    fraction = decisions.choose(
        "gpu_memory_fraction",
        args.gpu_memory_fraction,
        GPU_FRACTION,
        "the rest is for fragments and for what others start",
    )
    rows = args.max_running or GPU_MAX_RUNNING
    context = args.context_length or facts.model.context_length
    step, asked = most_step_tokens(args, context, is_gpu=True), args.cuda_graph_sizes
    sizes = default_sizes(rows) if asked is None else tuple(size for size in asked if size > 0)
    models = [facts.model] if draft is None else [facts.model, draft.facts]
    first, *others = (
        reserve_of(model, plan.dtype, step_tokens=step, rows=rows, graph_sizes=sizes)
        for model in models
    )
    for other in others:
        first = first + other
    return gpu_room(plan.gpu, fraction, plan, first)
