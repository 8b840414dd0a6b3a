"""Builds the worker from the published configuration, in the one order that is right:
load target -> gate -> load draft -> pools for both -> backends -> warm-up -> seal."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, overload

import torch

from srt.attention.flashinfer_operator import have_absorbed, have_prefill
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
from srt.errors import ConfigError
from srt.parallel.group import ALONE, Group
from srt.protocols.worker import Worker, WorkerFacts
from srt.runner.choose_ops import draft_ops, select_ops
from srt.runner.draft import build_draft_tp_worker
from srt.runner.memory import PoolNeed, PoolSizes, settle_kv_budget, size_pools
from srt.runner.model_runner import ModelRunner
from srt.runner.out_of_memory import naming_memory
from srt.runner.timeline import open_timeline
from srt.runner.tp_worker import TpModelWorker
from srt.runner.warm_up import warm_up
from srt.sampling.sampler import Sampler

if TYPE_CHECKING:
    from srt.runner.build_device import SpeculateOnDevice

logger = logging.getLogger(__name__)

ShowPhase = Callable[[str, float | None], None]
T = TypeVar("T")
Run = Callable[[Callable[[], None]], None]
W = TypeVar("W", bound=Worker)
Speculate = Callable[[TpModelWorker, list[ModelRunner]], W]


def plainly(target: TpModelWorker, drafts: list[ModelRunner]) -> TpModelWorker:
    """No speculation."""
    assert not drafts, "a draft was resolved and nobody uses it"
    return target


@overload
def build_worker(cache_folder: str, show: ShowPhase) -> TpModelWorker: ...


@overload
def build_worker(
    cache_folder: str,
    show: ShowPhase,
    speculate: Speculate[W],
    group: Group = ALONE,
    on_device: SpeculateOnDevice | None = None,
) -> W: ...


def build_worker(
    cache_folder: str,
    show: ShowPhase,
    speculate: Speculate[Worker] = plainly,
    group: Group = ALONE,
    on_device: SpeculateOnDevice | None = None,
) -> Worker:
    """Takes the context from published to sealed. `cache_folder` keeps the compiled kernels. `speculate`
    makes the target's worker, and the draft's runners if there are any, a speculating worker; so does
    `on_device` on a GPU, if it is given. `group`: whose ranks build their worker too, and share the
    target; a draft is whole on each. Raises ConfigError for anything that was asked for and cannot be
    had."""
    context = get_context()
    context.start_loading()
    is_plain = get_spec().speculative_algorithm is None
    if get_device().device == "cuda" and (is_plain or on_device is not None):
        worker: Worker = _build_device(
            context, cache_folder, show, group, None if is_plain else on_device
        )
        context.seal()
        return worker
    thread = ThreadPoolExecutor(
        1, "model", initializer=_settle, initargs=(get_exec().num_threads, _device_of(group))
    )
    try:
        worker = _build(context, cache_folder, show, thread, speculate, group)
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
    group: Group,
) -> Worker:
    def on_thread(work: Callable[[], T]) -> T:
        return thread.submit(work).result()

    runner = _load_target(context, cache_folder, show, on_thread, group)
    ops = runner.ops
    runners = [runner, *_load_drafts(context, runner, show, on_thread)]
    if all(_is_all_native(each) for each in runners):
        # What is left for torch in a step is small, and its idle threads spin on the cores that the
        # kernels' own threads need: a decode step of 8 would take 17 ms instead of 12.
        on_thread(lambda: torch.set_num_threads(1))
    facts, sizes = _allocate(context, runners)
    sampler = on_thread(
        lambda: Sampler(facts.max_rows, facts.vocab_size, runner.device, ops.best_token)
    )
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


def _settle(num_threads: int, device: torch.device) -> None:
    """The thread that computes: how many more it may use, and where what names no GPU goes."""
    torch.set_num_threads(num_threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _device_of(group: Group) -> torch.device:
    """A rank's own GPU; the CPU is everybody's."""
    kind = get_device().device
    return torch.device(kind, group.rank) if kind == "cuda" else torch.device(kind)


def _load_target(
    context: RuntimeContext, cache_folder: str, show: ShowPhase, run: Run, group: Group
) -> ModelRunner:
    show("kernels", None)
    spec, ops = select_ops(context, Path(cache_folder) / "kernels")
    model = context.facts.model
    if any("load_format" in fields for _, fields in context.overrides):
        raise ConfigError(
            f"load_format was overridden after the target was resolved with {spec.load_format}, which "
            "it keeps; set --load-format before the start"
        )
    runner = ModelRunner(
        spec,
        model,
        ops=ops,
        device=_device_of(group),
        seed=get_device().seed,
        group=group,
        forced_even=get_exec().moe_force_even_routing,
    )
    run(lambda: runner.load(show))
    maybe_disable_chunked_prefix_cache(
        use_mla_backend=runner.arch.latent is not None, is_draft_worker=runner.role == "draft"
    )
    if "flashinfer" in (runner.attention_pair.prefill, runner.attention_pair.decode):
        show("attention", None)
    if runner.attention_pair.prefill == "flashinfer":
        run(lambda: _have_prefill(runner, show))
    if runner.arch.latent is not None and runner.attention_pair.decode == "flashinfer":
        run(lambda: _have_absorbed(runner, show))
    return runner


def _have_prefill(runner: ModelRunner, show: ShowPhase) -> None:
    dims = runner.arch.head_dim, runner.arch.value_dim
    is_copied = runner.kv_cache_dtype.itemsize == 1  # and read in the type of the queries
    cache = runner.dtype if is_copied else runner.kv_cache_dtype
    have_prefill(*dims, (runner.dtype, cache), runner.device, show)


def _have_absorbed(runner: ModelRunner, show: ShowPhase) -> None:
    latent = runner.arch.latent
    assert latent is not None
    have_absorbed(latent.rank, latent.rope, runner.dtype, runner.device, show)


def _load_drafts(
    context: RuntimeContext, target: ModelRunner, show: ShowPhase, run: Run
) -> list[ModelRunner]:
    drafts = []
    for its in context.drafts:
        show(its.label, None)
        drafts.append(
            build_draft_tp_worker(
                context.args,
                target,
                ops=draft_ops(context, target.ops),
                load=lambda draft: run(lambda: draft.load(show)),
                step=its.step,
            )
        )
    return drafts


def _allocate(context: RuntimeContext, runners: list[ModelRunner]) -> tuple[WorkerFacts, PoolSizes]:
    """Pools of the one budget for all runners, target first, then their backends."""
    target = runners[0]
    needs = [
        PoolNeed(owner=f"{r.spec.label} kv", bytes_per_token=r.kv_bytes_per_token) for r in runners
    ]
    if target.device.type == "cuda":
        torch.cuda.empty_cache()  # what loading left over counts as free
        free, total = torch.cuda.mem_get_info(target.device)
        free = target.group.smallest(free)  # the fullest GPU decides for all ranks
        settle_kv_budget(context, needs, total=total, free=free)
    schedule = get_schedule()
    max_rows, page_size = schedule.max_running, schedule.page_size
    sizes = size_pools(
        needs,
        budget_bytes=round(get_memory().kv_memory_gb * 1e9),
        max_total_tokens=schedule.max_total_tokens,
        page_size=page_size,
        context_length=target.context_length,
    )
    make_pools(runners, num_pages=sizes.num_pages, page_size=page_size, max_rows=max_rows)
    for each in runners:
        each.init_backends()
    model = context.facts.model
    facts = WorkerFacts(
        vocab_size=model.vocab_size,
        context_length=target.context_length,
        num_pages=sizes.num_pages,
        page_size=page_size,
        max_rows=max_rows,
        end_token_ids=model.end_token_ids,
        memory_bytes={f"{r.spec.label} weights": r.weight_bytes for r in runners} | sizes.bytes,
    )
    return facts, sizes


def _build_device(
    context: RuntimeContext,
    cache_folder: str,
    show: ShowPhase,
    group: Group,
    speculate: SpeculateOnDevice | None,
) -> Worker:
    from srt.runner.build_device import build_device_worker  # what only a GPU needs

    show("device", None)
    timeline = open_timeline(_device_of(group))
    with naming_memory(context, "loading the weights"):
        runner = _load_target(context, cache_folder, show, lambda work: work(), group)
        runners = [runner, *_load_drafts(context, runner, show, lambda work: work())]
    with naming_memory(context, "making the KV pools"):
        facts, sizes = _allocate(context, runners)
    with naming_memory(context, "running the first steps"):
        worker = build_device_worker(runners, facts, timeline, show, speculate)
    for each in runners:
        _log(each, sizes)
    return worker


def make_pools(
    runners: list[ModelRunner], *, num_pages: int, page_size: int, max_rows: int
) -> None:
    """The KV pool of each, target first, whose page table is that of all."""
    target = runners[0]
    for each in runners:
        each.allocate(
            num_pages=num_pages,
            page_size=page_size,
            max_rows=max_rows,
            table=None if each is target else target.table,
        )


def _is_all_native(runner: ModelRunner) -> bool:
    pair = runner.attention_pair
    return (
        runner.ops.implementation == "native"
        and runner.kv_cache_dtype == runner.dtype
        and pair.prefill == pair.decode == "native"
    )


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
