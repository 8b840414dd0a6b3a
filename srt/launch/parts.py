"""The engine's parts, built from the published configuration. Processes and `--inline` build the same
ones and differ only in the channels that join them."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from srt.config.context import (
    get_context,
    get_device,
    get_memory,
    get_model,
    get_observability,
    get_schedule,
    get_serving,
    get_spec,
)
from srt.launch.boot import Boot
from srt.launch.early_context import open_early
from srt.launch.kernel_caches import announce_compiles, use_kernel_caches
from srt.launch.supervisor import LAST_WORDS_SECONDS
from srt.parallel.group import ALONE, Group
from srt.wire.channels import Receiver, RouterEnd, Sender
from srt.wire.limits import Limits
from srt.wire.messages import TextMessage

if TYPE_CHECKING:
    from srt.gateway.settings import GatewaySettings
    from srt.protocols.worker import Worker
    from srt.scheduler.budget import Settings
    from srt.scheduler.loop import Scheduler
    from srt.structured.service import ThreadedGrammars
    from srt.structured.tokens import TokenTable
    from srt.wire.sockets import ZmqSender
    from tokenizer_proc.codec import Codec
    from tokenizer_proc.text_stream import TokenBytes
    from tokenizer_proc.tokenizer import TokenizerService

ShowPhase = Callable[[str, float | None], None]


@dataclass(slots=True)
class SchedulerPart:
    scheduler: Scheduler
    worker: Worker
    grammars: ThreadedGrammars

    def describe(self) -> dict[str, Any]:
        """For the ready line: who got how much memory, how many tokens fit."""
        facts = self.worker.facts
        return {
            "memory_bytes": facts.memory_bytes,
            "kv_tokens": (facts.num_pages - 1) * facts.page_size,
            "max_running": facts.max_rows,
        }

    def close(self) -> None:
        self.scheduler.close()
        self.grammars.close()
        self.worker.close()


def build_scheduler_part(
    boot: Boot,
    outbox: Sender,
    show: ShowPhase,
    group: Group = ALONE,
    others: Sequence[ZmqSender] = (),
) -> SchedulerPart:
    """Weights, pools, backends, scheduler. `others`: where the ranks beside this one take orders. Raises
    ConfigError."""
    from srt.scheduler.build import build_scheduler
    from srt.structured.service import ThreadedGrammars
    from tokenizer_proc.load import load_vocabulary

    model, tokenizer = boot.facts.model, get_model().tokenizer
    grammars = ThreadedGrammars(
        lambda: load_tokens(
            load_vocabulary(model, tokenizer), model.vocab_size, model.end_token_ids
        )
    )
    watch = PhaseWatch(show)
    worker = build_worker(boot, watch.show, group, grammars.warm)
    if others:
        from srt.runner.ranks import LeadingWorker

        worker = LeadingWorker(worker, others, group)
    settings = scheduler_settings()
    journal = get_observability().journal
    scheduler = build_scheduler(
        worker,
        settings,
        outbox,
        time.monotonic,
        get_context().describe,
        None if journal is None else Path(journal),
        grammars,
    )
    scheduler.note_start(watch.end())
    return SchedulerPart(scheduler, worker, grammars)


class PhaseWatch:
    """Passes phases on to whoever shows them, and knows how long each took. "compile: NAME" is a detail
    of the phase it comes in."""

    def __init__(self, show: ShowPhase) -> None:
        self._show = show
        self._seconds: dict[str, float] = {}
        self._phase: str | None = None
        self._began = time.monotonic()

    def show(self, phase: str, fraction: float | None) -> None:
        if phase != self._phase and ": " not in phase:
            self.end()
            self._phase = phase
        self._show(phase, fraction)

    def end(self) -> dict[str, float]:
        """Seconds by phase, up to now."""
        now = time.monotonic()
        if self._phase is not None:
            self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now - self._began
        self._phase, self._began = None, now
        return dict(self._seconds)


def scheduler_settings() -> Settings:
    """What the published configuration says about scheduling."""
    from srt.scheduler.budget import Settings

    schedule, memory, spec = get_schedule(), get_memory(), get_spec()
    return Settings(
        max_running=schedule.max_running,
        max_step_tokens=schedule.max_step_tokens,
        chunked_prefill_size=schedule.chunked_prefill_size,
        max_queued=schedule.max_queued,
        max_queued_tokens=schedule.max_queued_tokens,
        policy=schedule.policy,
        depth=1 if schedule.overlap else 0,
        radix_cache=not memory.disable_radix_cache,
        eviction_policy=memory.eviction_policy,
        step_log=get_observability().step_log,
        max_itl=None if schedule.max_itl_ms is None else schedule.max_itl_ms / 1000,
        draft_tokens=spec.speculative_num_draft_tokens,
        draft_budget=spec.speculative_batch_tokens,
        draft_knows_when=spec.speculative_confidence > 0 or spec.speculative_eagle_topk > 1,
    )


def build_worker(
    boot: Boot,
    show: ShowPhase,
    group: Group = ALONE,
    on_imported: Callable[[], None] = lambda: None,
) -> Worker:
    """`on_imported`: called when the weights are about to load, which leaves the interpreter to others
    at times; imports do not."""
    if boot.facts.model.format == "script":
        on_imported()
        return build_scripted_worker(boot)
    show("imports", None)
    is_cuda = get_device().device == "cuda"
    if is_cuda:
        use_kernel_caches(boot.cache_folder, boot.facts.machine)
        open_early(group.rank)
    was_collecting = gc.isenabled()
    gc.disable()  # what is imported stays: to look through it again and again takes a tenth of the time
    try:
        from srt.runner.build import build_worker as build
        from srt.spec.build import speculate, speculate_on_device, stays_on_device

        if is_cuda:
            announce_compiles(show)
    finally:
        if was_collecting:
            gc.enable()
    on_imported()
    on_device = speculate_on_device if stays_on_device() and group.size == 1 else None
    return build(boot.cache_folder, show, speculate, group, on_device)


def build_scripted_worker(boot: Boot) -> Worker:
    """A fake model with the memory and the limits that the configuration gives a real one."""
    from srt.runner.script import ScriptedWorker, load_script

    schedule = get_schedule()
    return ScriptedWorker(
        load_script(Path(boot.facts.model.path)),
        num_pages=1 + schedule.max_total_tokens // schedule.page_size,
        page_size=schedule.page_size,
        max_rows=schedule.max_running,
    )


def load_text(boot: Boot) -> Codec:
    from tokenizer_proc.load import load_codec

    model = get_model()
    return load_codec(boot.facts.model, model.tokenizer, model.chat_template)


def load_tokens(vocabulary: TokenBytes, vocab_size: int, end_ids: list[int]) -> TokenTable:
    """`vocab_size` and `end_ids` are the model's."""
    from srt.structured.tokens import build_table

    return build_table(vocabulary.token_bytes, vocabulary.is_special, vocab_size, end_ids)


def build_tokenizer(
    boot: Boot, front: RouterEnd, work: Sender, text: Receiver[TextMessage], codec: Codec
) -> TokenizerService:
    from srt.structured.service import Compiler
    from tokenizer_proc.card import EngineCard
    from tokenizer_proc.tokenizer import TokenizerService

    serving = get_serving()
    context = get_context()
    model = boot.facts.model
    compiler = Compiler(
        lambda: load_tokens(codec, model.vocab_size, model.end_token_ids), "check-grammar"
    )
    compiler.warm()
    return TokenizerService(
        front,
        work,
        text,
        codec,
        Limits(
            max_prompt_chars=serving.max_prompt_chars,
            max_messages=serving.max_messages,
            max_n=most_samples(),
            max_logprobs=serving.max_logprobs,
            max_stop=serving.max_stop,
            max_stop_chars=serving.max_stop_chars,
            max_stop_token_ids=serving.max_stop_token_ids,
            max_logit_bias=serving.max_logit_bias,
            max_grammar_chars=serving.max_grammar_chars,
            max_name_chars=serving.max_name_chars,
            default_deadline=serving.default_deadline,
        ),
        EngineCard(
            model=get_model().served_model_name,
            context_length=context.target.context_length,
            vocab_size=model.vocab_size,
            engine_id=boot.engine_id,
            config_hash=context.describe()["config_hash"],
        ),
        stall_seconds=serving.stall_seconds,
        drain_seconds=serving.drain_seconds,
        seed=get_device().seed,
        compiler=compiler,
    )


def most_samples() -> int:
    """Samples of one request: all of them must find a place in the queue at once."""
    return max(1, min(get_serving().max_n, get_schedule().max_queued))


def gateway_settings() -> GatewaySettings:
    from srt.gateway.settings import Defaults, GatewaySettings

    serving = get_serving()
    known = {field.name for field in fields(Defaults)}
    given = get_context().facts.model.generation_defaults if serving.generation_defaults else {}
    return GatewaySettings(
        defaults=Defaults(**{name: given[name] for name in given.keys() & known}),
        api_keys=(serving.api_key,) if serving.api_key else (),
        admin_keys=(serving.admin_key,) if serving.admin_key else (),
        cors_origins=serving.cors_origins,
        strict_fields=serving.strict_fields,
        max_body_bytes=int(serving.max_body_mb * 1024 * 1024),
        receive_seconds=serving.receive_seconds,
        stream_buffer_bytes=serving.stream_buffer_kb * 1024,
        max_prompts=serving.max_prompts,
        max_n=most_samples(),
        max_logprobs=serving.max_logprobs,
        max_stop=serving.max_stop,
        max_stop_chars=serving.max_stop_chars,
        max_stop_token_ids=serving.max_stop_token_ids,
        max_logit_bias=serving.max_logit_bias,
        max_name_chars=serving.max_name_chars,
        default_deadline=serving.default_deadline,
        stall_seconds=serving.stall_seconds,
        drain_seconds=serving.drain_seconds + LAST_WORDS_SECONDS / 2,  # the engine ends them first
    )
