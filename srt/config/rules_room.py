"""The memory that the KV cache may have: of the host, or a share of the GPU's."""

from __future__ import annotations

import math

from srt.config.args import ServerArgs
from srt.config.decisions import Decisions
from srt.config.facts import Facts, ModelFacts
from srt.config.footprint import (
    CONTEXT_BYTES,
    Reserve,
    activation_bytes,
    reserve_of,
    weight_bytes,
)
from srt.config.rooms import GPU_FRACTION, Room, cpu_room, gigabytes, gpu_room
from srt.config.rules_graphs import default_sizes
from srt.config.rules_model import ModelPlan
from srt.config.rules_quantization import FP8_CAPABILITY
from srt.config.rules_schedule import GPU_MAX_RUNNING, GPU_PREFIX_CHUNK, most_step_tokens
from srt.config.rules_spec import DraftPlan
from srt.errors import ConfigError

LEAST_STEP = 256  # tokens in a step below which a GPU is not worth it


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
        reserve_of(
            model,
            plan.dtype,
            step_tokens=step,
            rows=rows,
            graph_sizes=sizes,
            prefix_chunk=args.max_prefix_chunk_tokens or GPU_PREFIX_CHUNK,
        )
        for model in models
    )
    for other in others:
        first = first + other
    least = 0 if args.chunked_prefill_size == 0 else max(rows, LEAST_STEP)
    check_before_kv(facts.model, plan, fraction, first, step, least)
    return gpu_room(plan.gpu, fraction, plan, first)


def check_before_kv(
    model: ModelFacts, plan: ModelPlan, fraction: float, reserve: Reserve, step: int, least: int
) -> None:
    """Raises ConfigError if weights and steps alone are too much, with what would fit: `step` tokens are
    planned for a step, `least` of them would do."""
    gpu = plan.gpu
    assert gpu is not None
    others = gpu.memory_total - gpu.memory_free
    need = plan.weight_bytes + reserve.total + CONTEXT_BYTES
    have = int(fraction * gpu.memory_total) - others
    if need < have:
        return
    ways = []
    share = math.ceil(100 * (need + others) / gpu.memory_total) / 100
    if share <= 1:
        ways.append(f"--gpu-memory-fraction {share:g} or more")
    each = activation_bytes(model, plan.dtype, tokens=1, rows=0)
    fits = step - -(-(need - have) // each) - 1
    if least and fits >= least:
        ways.append(f"--max-step-tokens up to {fits}")
    if plan.quantization is None and gpu.capability >= FP8_CAPABILITY:
        ways.append(
            f"--quantization fp8 ({gigabytes(weight_bytes(model, plan.dtype, 'fp8'))} of weights)"
        )
    raise ConfigError(
        f"{model.name} needs {gigabytes(need)} of the GPU before its KV cache "
        f"({gigabytes(plan.weight_bytes)} weights, {gigabytes(reserve.activations)} for steps of {step} "
        f"tokens, the rest for graphs and CUDA), but {gigabytes(max(0, have))} can be had: {fraction:g} "
        f"of {gigabytes(gpu.memory_total)}, less {gigabytes(others)} that others use; allowed: "
        + ", ".join((*ways, "a smaller model or a larger GPU"))
    )
