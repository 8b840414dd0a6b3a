"""What runs the forward: device, threads, compiled kernels, and attention for each half."""

from __future__ import annotations

from srt.config.args import ServerArgs
from srt.config.decisions import Decisions
from srt.config.facts import Facts, MachineFacts
from srt.config.rules_model import ModelPlan
from srt.errors import ConfigError


def decide_exec(
    args: ServerArgs, facts: Facts, plan: ModelPlan, decisions: Decisions
) -> tuple[str, str]:
    """Returns the (prefill, decode) attention backends."""
    device = None if args.device == "auto" else args.device
    decisions.choose("device", device, "cpu", "the only device this version computes on")
    cores = facts.machine.num_cores
    decisions.choose("num_threads", args.num_threads, cores, f"one per usable core ({cores})")
    lack, doubt = _native_lack(plan), _native_doubt(facts.machine)
    native = decisions.choose(
        "native_kernels",
        args.native_kernels,
        lack is None and doubt is None,
        lack or doubt or f"{facts.machine.compiler} can build them for this CPU",
    )
    if args.native_kernels and lack is not None:
        raise ConfigError(
            f"--native-kernels was asked for, but {lack}; allowed: --no-native-kernels, which "
            "computes with torch"
        )
    return (
        _backend("prefill", args.prefill_attention_backend, args, plan, native, decisions),
        _backend("decode", args.decode_attention_backend, args, plan, native, decisions),
    )


def _native_lack(plan: ModelPlan) -> str | None:
    """Why the compiled kernels cannot compute this model, if they cannot."""
    if plan.load_format == "script":
        return "a script has nothing to compute"
    if plan.dtype != "bfloat16":
        return f"they compute in bfloat16, the model in {plan.dtype}"
    return None


def _native_doubt(machine: MachineFacts) -> str | None:
    """Why they are not used unless asked for. Whoever asks may have a cached build, and plain C."""
    if "avx512f" not in machine.cpu_flags:
        return "this CPU has no avx512f, without which torch is faster"
    if machine.compiler is None:
        return "there is no C compiler on the PATH"
    return None


def _backend(
    half: str,
    own: str | None,
    args: ServerArgs,
    plan: ModelPlan,
    native: bool,
    decisions: Decisions,
) -> str:
    """The half's own flag, else the common flag, else the best that can run here."""
    name = f"{half}_attention_backend"
    if not native:
        lack = "the native kernels are off"
    elif plan.kv_cache_dtype != "bfloat16":
        lack = f"native attention reads a bfloat16 cache, this one is {plan.kv_cache_dtype}"
    else:
        lack = None
    asked = own or args.attention_backend
    if asked == "native" and lack is not None:
        flag = name if own else "attention_backend"
        raise ConfigError(
            f"--{flag.replace('_', '-')} native was asked for, but {lack}; allowed here: sdpa"
        )
    if asked is not None:
        return decisions.take(name, asked, None if own else "attention_backend")
    if lack is None:
        return decisions.decide(name, "native", "it reads the paged cache in place")
    return decisions.decide(name, "sdpa", lack)
