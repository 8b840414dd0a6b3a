"""Which kernels the runners compute with."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import kernels.native_build
import kernels.ops
import kernels.rope
from srt.config.context import RuntimeContext, get_device, get_exec
from srt.config.runner_spec import RunnerSpec
from srt.errors import ConfigError

logger = logging.getLogger(__name__)


def draft_ops(context: RuntimeContext, ops: kernels.ops.Ops) -> kernels.ops.Ops:
    """The target's kernels; the compiled write of K and V knows one type only."""
    spec = context.draft
    assert spec is not None
    if ops.implementation == "native" and spec.kv_cache_dtype != spec.dtype:
        return replace(ops, rope_write_kv=kernels.rope.select("torch"))
    return ops


def select_ops(context: RuntimeContext, folder: Path) -> tuple[RunnerSpec, kernels.ops.Ops]:
    """Compiled kernels if they are on and can be built. What was asked for and cannot be had is an
    error; what a rule had hoped for is taken back, in the trail and in the log."""
    spec = context.target
    if get_device().device == "cuda":
        return spec, kernels.ops.select("triton")
    with context.building("kernels"):
        if not get_exec().native_kernels:
            return spec, kernels.ops.select("torch")
        built = kernels.native_build.build(
            folder, context.facts.machine.compiler, get_exec().num_threads
        )
        if isinstance(built, kernels.native_build.Library):
            ops = kernels.ops.select("native", built)
            if spec.kv_cache_dtype != spec.dtype:  # the compiled write knows one type only
                ops = replace(ops, rope_write_kv=kernels.rope.select("torch"))
            return spec, ops
        if get_exec().deterministic:
            raise ConfigError(
                "--deterministic was asked for, but the native kernels that keep it cannot be built: "
                f"{built.reason}; allowed: --no-deterministic, or a machine that can build them"
            )
        if _was_asked(context, "exec.native_kernels"):
            raise ConfigError(
                f"--native-kernels was asked for, but they cannot be built: {built.reason}; "
                "allowed: --no-native-kernels, which computes with torch"
            )
        context.declare_load_time_override(
            "kernel build", {"native_kernels": False}, reason=built.reason
        )
    logger.warning("native kernels are off, torch computes instead: %s", built.reason)
    for each in context.runner_specs:
        context.restamp_runner("kernel build", _without_native(context, each), reason=built.reason)
    return context.target, kernels.ops.select("torch")


def _without_native(context: RuntimeContext, spec: RunnerSpec) -> RunnerSpec:
    """The spec with every native backend that nobody asked for replaced."""

    def other(half: str, backend: str) -> str:
        asked = _was_asked(context, f"{spec.label}.{half}_attention_backend")
        return backend if asked or backend != "native" else "sdpa"

    return replace(
        spec,
        prefill_attention_backend=other("prefill", spec.prefill_attention_backend),
        decode_attention_backend=other("decode", spec.decode_attention_backend),
    )


def _was_asked(context: RuntimeContext, field: str) -> bool:
    sources = [entry.source for entry in context.trail if entry.field == field]
    return bool(sources) and sources[0] in ("typed", "file")
