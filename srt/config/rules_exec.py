"""What runs the forward: threads, compiled kernels, determinism, and attention for each half."""

from __future__ import annotations

from srt.config.args import ServerArgs
from srt.config.decisions import Decisions
from srt.config.experts import num_experts
from srt.config.facts import Facts, MachineFacts
from srt.config.rules_attention import decide_half, place_of
from srt.config.rules_model import ModelPlan
from srt.errors import ConfigError


def decide_exec(
    args: ServerArgs, facts: Facts, plan: ModelPlan, decisions: Decisions
) -> tuple[str, str]:
    """Returns the (prefill, decode) attention backends."""
    cores, ranks = facts.machine.num_cores, args.tensor_parallel_size
    decisions.choose(
        "num_threads",
        args.num_threads,
        max(1, cores // ranks),
        f"one per usable core ({cores})" + (f", divided among {ranks} ranks" if ranks > 1 else ""),
    )
    native = _decide_native(args, facts.machine, plan, decisions)
    _decide_determinism(args, plan, native, decisions)
    _decide_routing(args, facts, plan, decisions)
    place = place_of(
        facts.model,
        facts.machine,
        plan.gpu,
        native=native,
        deterministic=args.deterministic and plan.load_format != "script",
        dtype=plan.dtype,
        kv_cache_dtype=plan.kv_cache_dtype,
    )
    return (
        decide_half("prefill", args, place, decisions),
        decide_half("decode", args, place, decisions),
    )


def _decide_native(
    args: ServerArgs, machine: MachineFacts, plan: ModelPlan, decisions: Decisions
) -> bool:
    lack, doubt = _native_lack(plan), _native_doubt(machine)
    if args.native_kernels and lack is not None:
        raise ConfigError(
            f"--native-kernels was asked for, but {lack}; allowed: --no-native-kernels, which "
            f"computes with {'torch' if plan.gpu is None else 'Triton'}"
        )
    return decisions.choose(
        "native_kernels",
        args.native_kernels,
        lack is None and doubt is None,
        lack or doubt or f"{machine.compiler} can build them for this CPU",
    )


def _decide_determinism(
    args: ServerArgs, plan: ModelPlan, native: bool, decisions: Decisions
) -> None:
    """Raises ConfigError if it was asked for and nothing here can keep it. Attention has its own say."""
    if not args.deterministic:
        if plan.gpu is None and native and plan.kv_cache_dtype == "bfloat16":
            decisions.decide("deterministic", False, "not asked for; native kernels are so anyway")
        else:
            decisions.decide("deterministic", False, "off unless asked for: it costs speed")
        return
    if plan.gpu is None and not native and plan.load_format != "script":
        raise ConfigError(
            "--deterministic was asked for, but without the native kernels torch computes on this CPU, "
            "and its sums depend on the batch; allowed: --dtype bfloat16 on a CPU with AVX-512 and a C "
            "compiler (native kernels, native attention), or --device cuda (Triton kernels)"
        )
    source, reason = decisions.asked("deterministic")
    how = (
        "Triton kernels of fixed tiles" if plan.gpu is not None else "native kernels are so already"
    )
    decisions.decide("deterministic", True, f"{reason}; {how}", source=source)


def _decide_routing(args: ServerArgs, facts: Facts, plan: ModelPlan, decisions: Decisions) -> None:
    """Raises ConfigError if experts would be forced upon tokens whose answers somebody may read."""
    flag = "--moe-force-even-routing"
    if args.moe_force_even_routing and plan.load_format != "dummy":
        raise ConfigError(
            f"{flag} was asked for, but the weights are real and answers would be nonsense; allowed "
            "with --load-format dummy only, for measuring"
        )
    if args.moe_force_even_routing and not num_experts(facts.model.config):
        raise ConfigError(
            f"{flag} was asked for, but {facts.model.name} has no experts; leave it out"
        )
    decisions.default("moe_force_even_routing")


def _native_lack(plan: ModelPlan) -> str | None:
    """Why the compiled kernels cannot compute this model, if they cannot."""
    if plan.load_format == "script":
        return "a script has nothing to compute"
    if plan.gpu is not None:
        return "they are for CPUs, and this model runs on the GPU"
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
