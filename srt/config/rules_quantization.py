"""How the linears are stored: what the checkpoint says decides, else what was asked for.

int8   bf16 checkpoints, on CPUs     fp8   bf16 checkpoints and fp8 ones, on GPUs from sm_89 on
int4   AWQ and GPTQ checkpoints of 4 bits, on GPUs
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from srt.config.args import ServerArgs
from srt.config.decisions import Decisions
from srt.config.experts import num_experts
from srt.config.facts import GpuFacts, ModelFacts
from srt.errors import ConfigError

FP8_CAPABILITY = 89
KEY = "quantization_config"
METHODS: Mapping[str, str] = MappingProxyType(
    {"awq": "int4", "gptq": "int4", "fp8": "fp8", "compressed-tensors": "fp8"}
)


def decide_quantization(
    args: ServerArgs,
    model: ModelFacts,
    load_format: str,
    gpu: GpuFacts | None,
    decisions: Decisions,
) -> str | None:
    """None: the linears stay in the compute type. Raises ConfigError for a checkpoint's method that is
    not known, and for a wish that this checkpoint or this device cannot meet."""
    asked = args.quantization
    stored, reason = stored_method(model)
    _check_experts(model, stored or asked)
    if asked is not None and load_format == "script" and asked != "none":
        raise ConfigError(
            f"--quantization {asked} was asked for, but {model.name} is a script and has no "
            "weights; leave --quantization out"
        )
    if stored is not None:
        if asked not in (None, stored):
            raise ConfigError(
                f"--quantization {asked} was asked for, but {model.name} is stored as {stored} "
                f"({reason}); allowed: {stored}, or leave it out"
            )
        check_quantization(f"{model.name} is stored as {stored} ({reason})", stored, gpu)
        return decisions.decide("quantization", stored, reason, source="model")
    if asked is None:
        return decisions.decide("quantization", None, "off unless asked for: it changes answers")
    if asked == "int4":
        raise ConfigError(
            f"--quantization int4 was asked for, but {model.name} is not stored so; allowed: a "
            f"checkpoint in AWQ or GPTQ of 4 bits, or --quantization {'int8' if gpu is None else 'fp8'}"
        )
    wish = None if asked == "none" else asked
    if wish is not None:
        check_quantization(f"--quantization {wish} was asked for", wish, gpu)
    return decisions.take("quantization", wish)


def _check_experts(model: ModelFacts, method: str | None) -> None:
    """Raises ConfigError for a method that the experts' kernels do not read."""
    if num_experts(model.config) and method in ("int8", "int4"):
        raise ConfigError(
            f"quantization {method}: {model.name} has experts, which are not kept so; allowed: none, or "
            "on a GPU --quantization fp8"
        )


def check_quantization(what: str, method: str, gpu: GpuFacts | None) -> None:
    """Raises ConfigError, beginning with `what`, if this device has no kernels for the method."""
    if gpu is None and method != "int8":
        raise ConfigError(
            f"{what}, but a CPU has kernels for int8 only; allowed here: int8 or none, with a "
            "checkpoint that is not quantized"
        )
    if gpu is not None and method == "int8":
        raise ConfigError(
            f"{what}, but that is for CPUs; allowed on a GPU: "
            + ("fp8, none" if gpu.capability >= FP8_CAPABILITY else "none")
            + ", or a checkpoint in AWQ or GPTQ"
        )
    if gpu is not None and method == "fp8" and gpu.capability < FP8_CAPABILITY:
        raise ConfigError(
            f"{what}, but {gpu.name} is sm_{gpu.capability} and fp8 needs sm_{FP8_CAPABILITY} or "
            "newer; allowed here: none, or a checkpoint in AWQ or GPTQ"
        )


def stored_method(model: ModelFacts) -> tuple[str | None, str]:
    """What the checkpoint's `quantization_config` says, and in which words. Raises ConfigError naming a
    method or a width that is not known."""
    found: Any = model.config.get(KEY)
    if not found:
        return None, ""
    name = found.get("quant_method") if isinstance(found, dict) else None
    method = METHODS.get(str(name).lower())
    if method is None:
        raise ConfigError(
            f"{model.name}: {KEY} names the method {name!r}, which is not supported; supported: "
            f"{', '.join(METHODS)}"
        )
    bits = found.get("bits", found.get("w_bit", 4))
    if method == "int4" and bits != 4:
        raise ConfigError(f"{model.name}: {KEY} says {name} with {bits} bits; supported: 4 bits")
    return method, f"{KEY}: {name}"
