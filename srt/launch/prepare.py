"""From what the user typed to a boot record: find the model, probe, resolve once to refuse early."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from srt.config.algorithms import ALGORITHMS
from srt.config.args import ServerArgs
from srt.config.facts import Facts, ModelFacts
from srt.config.probe import probe_machine, probe_model
from srt.config.probe_layers import layer_facts
from srt.config.resolve import Resolution, resolve
from srt.config.trail import InputSource
from srt.launch.boot import Boot, draw_identity
from srt.launch.files import check_files
from srt.launch.kernel_caches import look_for_kernels
from srt.launch.supervisor import Progress, show_nothing
from srt.loading.fetch import find_known
from srt.loading.locate import locate, shipped_draft
from srt.wire.keys import read_server_keys
from srt.wire.topology import Addresses


def probe(args: ServerArgs, cache_folder: str, progress: Progress = show_nothing) -> Facts:
    """Fetches the model if it must. Raises ConfigError."""

    def show(phase: str, fraction: float | None) -> None:
        progress("model", phase, fraction)

    def facts_of(wish: str, flag: str) -> ModelFacts:
        path = locate(wish, cache_folder, show, flag)
        if Path(wish).expanduser().exists():
            return probe_model(path, Path(path).name.removesuffix(".gguf"))
        facts, known = probe_model(path, wish), find_known(wish)
        if known is None:
            return facts
        return replace(facts, generation_defaults={**known.generation_defaults})

    model = facts_of(args.model, "--model")
    known = ALGORITHMS.get(args.speculative_algorithm or "none")
    draft = None
    if known is not None and known.needs_model:  # else `resolve` refuses a draft that was named
        wish = args.speculative_draft_model or shipped_draft(args.model, args.speculative_algorithm)
        draft = None if wish is None else facts_of(wish, "--speculative-draft-model")
        if known.has_layers:
            draft = layer_facts(draft or model)
    machine = look_for_kernels(probe_machine(), cache_folder)
    return Facts(machine=machine, model=model, draft=draft)


def prepare(
    args: ServerArgs,
    sources: Mapping[str, InputSource],
    *,
    folder: str,
    cache_folder: str,
    progress: Progress = show_nothing,
) -> tuple[Boot, Resolution]:
    """`folder` will hold the ipc sockets. Raises ConfigError for any wish that cannot be met, before a
    process is started."""
    if args.zmq_keys is not None:
        read_server_keys(args.zmq_keys)
    check_files(args)
    facts = probe(args, cache_folder, progress)
    engine_id, entropy = draw_identity()
    boot = Boot(
        args=args,
        sources=dict(sources),
        facts=facts,
        addresses=Addresses.in_folder(folder, args.zmq_front),
        engine_id=engine_id,
        entropy=entropy,
        cache_folder=cache_folder,
    )
    return boot, resolve(args, facts, entropy=entropy, sources=sources)
