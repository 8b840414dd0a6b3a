"""How the weights are read and computed with."""

from __future__ import annotations

from dataclasses import dataclass

from srt.config.algorithms import DRAFT_ARCHITECTURES
from srt.config.args import ServerArgs
from srt.config.decisions import Decisions
from srt.config.facts import Facts, GpuFacts
from srt.config.footprint import ITEM_BYTES, weight_bytes
from srt.config.inkling import state_bytes
from srt.config.latent import kv_items
from srt.config.rules_parallel import bytes_of_rank, check_int4, check_ranks, kv_heads_of_rank
from srt.config.rules_quantization import FP8_CAPABILITY, decide_quantization
from srt.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan:
    """How the target is stored and computed, and what that costs one rank in bytes."""

    load_format: str
    dtype: str
    kv_cache_dtype: str
    quantization: str | None
    bytes_per_token: int  # of KV, over all layers
    weight_bytes: int  # an estimate: every parameter in the type it is kept in
    gpu: GpuFacts | None = None  # where it is computed; None: the CPU


def decide_model(
    args: ServerArgs, facts: Facts, gpu: GpuFacts | None, decisions: Decisions
) -> ModelPlan:
    """Raises ConfigError for what this checkpoint or machine cannot do."""
    model = facts.model
    if model.architecture in DRAFT_ARCHITECTURES:
        raise ConfigError(
            f"--model {args.model} is a draft network ({model.architecture}), which answers nothing by "
            "itself; give it as --speculative-draft-model beside its target"
        )
    decisions.default("model")
    decisions.choose(
        "served_model_name", args.served_model_name, model.name, "the model's name", source="model"
    )
    decisions.choose(
        "tokenizer", args.tokenizer, model.path, "it is stored with the model", source="model"
    )
    if args.chat_template is None:
        decisions.decide("chat_template", None, "the model's own template", source="model")
    else:
        decisions.take("chat_template", args.chat_template)
    load_format = _load_format(args, facts, decisions)
    dtype = _dtype(args, facts, gpu, decisions)
    kv_dtype = decisions.choose(
        "kv_cache_dtype",
        _unless_auto(args.kv_cache_dtype),
        dtype,
        "the type the model computes in",
    )
    check_kv_dtype("--kv-cache-dtype", kv_dtype, gpu)
    quantization = decide_quantization(args, model, load_format, gpu, decisions)
    ranks = args.tensor_parallel_size
    if quantization == "int4":
        check_int4(model, ranks)
    embedding = model.vocab_size * model.hidden_size * ITEM_BYTES[dtype]
    kv_heads = kv_heads_of_rank(model.num_kv_heads, ranks)
    return ModelPlan(
        load_format=load_format,
        dtype=dtype,
        kv_cache_dtype=kv_dtype,
        quantization=quantization,
        bytes_per_token=kv_items(model, kv_heads) * ITEM_BYTES[kv_dtype] + state_bytes(model),
        weight_bytes=bytes_of_rank(weight_bytes(model, dtype, quantization), embedding, ranks),
        gpu=gpu,
    )


def check_kv_dtype(flag: str, dtype: str, gpu: GpuFacts | None) -> None:
    """Raises ConfigError for a cache type that this card cannot read."""
    if dtype == "fp8_e4m3" and gpu is not None and gpu.capability < FP8_CAPABILITY:
        raise ConfigError(
            f"{flag} fp8_e4m3 was asked for, but {gpu.name} is sm_{gpu.capability} and fp8 needs "
            f"sm_{FP8_CAPABILITY} or newer; allowed here: bfloat16, float16"
        )


def _load_format(args: ServerArgs, facts: Facts, decisions: Decisions) -> str:
    found = facts.model.format
    asked = _unless_auto(args.load_format)
    if asked is not None and asked != found and (asked != "dummy" or found == "script"):
        raise ConfigError(
            f"--load-format {asked} was asked for, but {facts.model.path} is {found}; allowed: auto, "
            f"{found}" + ("" if found == "script" else ", dummy") + "; leave --load-format out"
        )
    reason = f"{facts.model.path} is {found}"
    if found == "sharded" and asked != "dummy":
        reason += f" for {check_ranks(facts.model, args.tensor_parallel_size)}"
    return decisions.choose("load_format", asked, str(found), reason, source="model")


def _dtype(args: ServerArgs, facts: Facts, gpu: GpuFacts | None, decisions: Decisions) -> str:
    if gpu is not None:
        reason = f"sm_{gpu.capability} multiplies it on tensor cores"
        return decisions.choose("dtype", _unless_auto(args.dtype), "bfloat16", reason)
    flags = facts.machine.cpu_flags
    flag = next((name for name in ("amx_bf16", "avx512_bf16") if name in flags), None)
    if flag is not None:
        decided, reason = "bfloat16", f"this CPU multiplies bfloat16 natively ({flag})"
    else:
        decided, reason = "float32", "this CPU has neither avx512_bf16 nor amx_bf16"
    return decisions.choose("dtype", _unless_auto(args.dtype), decided, reason)


def _unless_auto(value: str) -> str | None:
    return None if value == "auto" else value
