"""Builds the worker from the published configuration, in the one order that is right:
load target -> gate -> load draft -> pools for both -> backends -> warm-up -> seal."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypeVar, overload

import torch

import kernels.native_build
import kernels.ops
import kernels.rope
from srt.config.context import (
    RuntimeContext,
    get_context,
    get_device,
    get_exec,
    get_memory,
    get_schedule,
    get_spec,
)
from srt.config.gate import maybe_disable_chunked_prefix_cache
from srt.config.runner_spec import RunnerSpec
from srt.errors import ConfigError
from srt.protocols.worker import Worker, WorkerFacts
from srt.runner.draft import build_draft_tp_worker
from srt.runner.memory import PoolNeed, PoolSizes, size_pools
from srt.runner.model_runner import ModelRunner
from srt.runner.tp_worker import TpModelWorker
from srt.runner.warm_up import warm_up
from srt.sampling.sampler import Sampler

logger = logging.getLogger(__name__)

ShowPhase = Callable[[str, float | None], None]
T = TypeVar("T")
W = TypeVar("W", bound=Worker)
Speculate = Callable[[TpModelWorker, list[ModelRunner]], W]


def plainly(target: TpModelWorker, drafts: list[ModelRunner]) -> TpModelWorker:
    """No speculation."""
    assert not drafts, "a draft was resolved and nobody uses it"
    return target


@overload
def build_worker(cache_folder: str, show: ShowPhase) -> TpModelWorker: ...


@overload
def build_worker(cache_folder: str, show: ShowPhase, speculate: Speculate[W]) -> W: ...


def build_worker(
    cache_folder: str, show: ShowPhase, speculate: Speculate[Worker] = plainly
) -> Worker:
    """Takes the context from published to sealed. `cache_folder` keeps the compiled kernels. `speculate`
    makes the target's worker, and the draft's runners if there are any, a speculating worker. Raises
    ConfigError for anything that was asked for and cannot be had."""
    context = get_context()
    context.start_loading()
    num_threads = get_exec().num_threads
    thread = ThreadPoolExecutor(
        1, "model", initializer=torch.set_num_threads, initargs=(num_threads,)
    )
    try:
        worker = _build(context, cache_folder, show, thread, speculate)
    except BaseException:
        thread.shutdown()
        raise
    context.seal()
    return worker


def _build(
    context: RuntimeContext,
    cache_folder: str,
    show: ShowPhase,
    thread: ThreadPoolExecutor,
    speculate: Speculate[Worker],
) -> Worker:
    def on_thread(work: Callable[[], T]) -> T:
        return thread.submit(work).result()

    show("kernels", None)
    spec, ops = _select_ops(context, Path(cache_folder) / "kernels")
    model = context.facts.model
    if any("load_format" in fields for _, fields in context.overrides):
        raise ConfigError(
            f"load_format was overridden after the target was resolved with {spec.load_format}, which "
            "it keeps; set --load-format before the start"
        )
    runner = ModelRunner(
        spec, model, ops=ops, device=torch.device(get_device().device), seed=get_device().seed
    )
    on_thread(lambda: runner.load(show))
    maybe_disable_chunked_prefix_cache(
        use_mla_backend=False, is_draft_worker=runner.role == "draft"
    )
    runners = [runner]
    for its in context.drafts:
        show(its.label, None)
        runners.append(
            build_draft_tp_worker(
                context.args,
                runner,
                ops=_draft_ops(context, ops),
                load=lambda draft: on_thread(lambda: draft.load(show)),
                step=its.step,
            )
        )
    if all(_is_all_native(each) for each in runners):
        # What is left for torch in a step is small, and its idle threads spin on the cores that the
        # kernels' own threads need: a decode step of 8 would take 17 ms instead of 12.
        on_thread(lambda: torch.set_num_threads(1))
    schedule = get_schedule()
    max_rows, page_size = schedule.max_running, schedule.page_size
    sizes = size_pools(
        [
            PoolNeed(owner=f"{r.spec.label} kv", bytes_per_token=r.kv_bytes_per_token)
            for r in runners
        ],
        budget_bytes=round(get_memory().kv_memory_gb * 1e9),
        max_total_tokens=schedule.max_total_tokens,
        page_size=page_size,
        context_length=runner.context_length,
    )
    for each in runners:
        each.allocate(
            num_pages=sizes.num_pages,
            page_size=page_size,
            max_rows=max_rows,
            table=None if each is runner else runner.table,
        )
    for each in runners:
        each.init_backends()
    facts = WorkerFacts(
        vocab_size=model.vocab_size,
        context_length=runner.context_length,
        num_pages=sizes.num_pages,
        page_size=page_size,
        max_rows=max_rows,
        end_token_ids=model.end_token_ids,
        memory_bytes={f"{r.spec.label} weights": r.weight_bytes for r in runners} | sizes.bytes,
    )
    sampler = on_thread(lambda: Sampler(max_rows, model.vocab_size, runner.device, ops.best_token))
    target = TpModelWorker(runner, sampler, facts, thread)
    worker = on_thread(lambda: speculate(target, runners[1:]))
    warm_up(
        worker,
        guesses=get_spec().speculative_num_draft_tokens > 0,
        show=lambda done: show("warm-up", done),
    )
    for each in runners:
        _log(each, sizes)
    return worker


def _draft_ops(context: RuntimeContext, ops: kernels.ops.Ops) -> kernels.ops.Ops:
    """The target's kernels; the compiled write of K and V knows one type only."""
    spec = context.draft
    assert spec is not None
    if spec.kv_cache_dtype != spec.dtype:
        return replace(ops, rope_write_kv=kernels.rope.select("torch"))
    return ops


def _is_all_native(runner: ModelRunner) -> bool:
    pair = runner.attention_pair
    return (
        runner.ops.implementation == "native"
        and runner.kv_cache_dtype == runner.dtype
        and pair.prefill == pair.decode == "native"
    )


def _select_ops(context: RuntimeContext, folder: Path) -> tuple[RunnerSpec, kernels.ops.Ops]:
    """Compiled kernels if they are on and can be built. What was asked for and cannot be had is an
    error; what a rule had hoped for is taken back, in the trail and in the log."""
    spec = context.target
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


def _log(runner: ModelRunner, sizes: PoolSizes) -> None:
    pair = runner.attention_pair
    logger.info(
        "%s ready: %s, %s, kernels %s, attention %s (prefill) %s (decode), weights %.0f MB, "
        "KV %.0f MB in %d pages",
        runner.spec.label,
        runner.arch.name,
        runner.spec.dtype,
        runner.ops.implementation,
        pair.prefill,
        pair.decode,
        runner.weight_bytes / 1e6,
        sizes.bytes[f"{runner.spec.label} kv"] / 1e6,
        sizes.num_pages - 1,
    )
