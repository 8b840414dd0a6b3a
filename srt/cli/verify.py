"""`tandem verify`: does anything that is only about speed or memory change an answer on this machine?

Takes the flags of `tandem serve`. A set of prompts is answered one at a time, then again by engines that
batch, cut prompts into chunks, cache, overlap, page, stream, run out of memory and speculate; tokens,
ends and text must be the same. Exit code 1 if one is not.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import orjson
from rich.console import Console
from rich.table import Table

from srt.cli.options import add_server_flags, cache_folder, server_args, start_logging
from srt.cli.progress import PhaseBars
from srt.config.args import ServerArgs
from srt.config.context import get_context, get_device, get_model, get_schedule, get_spec, publish
from srt.config.inkling import why_no_guesses
from srt.config.probe import probe_model
from srt.config.trail import InputSource
from srt.errors import ConfigError
from srt.launch.ending import leaving_on_sigterm
from srt.launch.prepare import prepare
from srt.loading.locate import shipped_draft

if TYPE_CHECKING:
    from srt.launch.boot import Boot
    from srt.verify.check import Report
    from srt.verify.rig import Rig
    from srt.wire.messages import Work

SHIPPED = "eagle3"  # the algorithm of the drafts that come with Tandem
EXACT = "they compute each token by itself, bit for bit: any difference is a fault"
ROUNDED = (
    "they may round a token's numbers otherwise in another batch, and a near tie then falls the other "
    "way: such a difference comes from rounding, not from a fault of the engine. "
)
WITHOUT = {  # by device
    "cpu": "Native kernels with native attention do not have it; --dtype float32 makes it rare",
    "cuda": "With --deterministic there is none",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of the table")
    add_server_flags(parser)


def run(options: argparse.Namespace) -> int:
    from srt.launch.parts import load_text, scheduler_settings
    from srt.verify.check import verify
    from srt.verify.requests import build_requests
    from srt.verify.variants import baseline, plan

    args, sources = server_args(options)
    if args.tensor_parallel_size > 1:
        raise ConfigError(
            "--tensor-parallel-size: verify compares engines in one process; leave it out"
        )
    start_logging("error")
    began = time.monotonic()
    with leaving_on_sigterm(), PhaseBars() as bars:
        boot, _ = prepare(
            args, sources, folder="verify", cache_folder=cache_folder(), progress=bars.show
        )
        publish(args, boot.facts, role="verify", entropy=boot.entropy, sources=sources)
        codec = load_text(boot)
        requests = build_requests(codec, get_context().target.context_length)
        page_size, config_hash = get_schedule().page_size, get_context().describe()["config_hash"]
        algorithm, yours = get_spec().speculative_algorithm, scheduler_settings()
        drafter = publish_shipped_draft(args, sources, boot)
        rig = build_rig(boot, bars)
        try:
            report = verify(
                rig,
                requests,
                codec,
                baseline(requests, page_size),
                plan(
                    requests,
                    page_size=page_size,
                    algorithm=algorithm,
                    yours=yours,
                    no_guesses=why_no_guesses(boot.facts.model.architecture),
                    drafter=drafter,
                ),
                lambda name, fraction: bars.show("verify", name, fraction),
            )
        finally:
            rig.close()
    seconds = time.monotonic() - began
    model = get_model().served_model_name
    if options.json:
        print(orjson.dumps(as_data(report, requests, model, seconds, config_hash)).decode())
    else:
        print_table(report, requests, model, seconds)
    return 0 if report.is_equal else 1


def publish_shipped_draft(
    args: ServerArgs, sources: Mapping[str, InputSource], boot: Boot
) -> tuple[str, int] | None:
    """If the flags give no draft and Tandem has one for this model, it is built too, to be verified:
    publishes that configuration. Returns the algorithm and how many tokens it guesses; None, and
    nothing is published, where the flags rule it out."""
    folder = shipped_draft(args.model, SHIPPED)
    if folder is None or get_spec().speculative_algorithm not in (None, "ngram"):
        return None
    facts = replace(boot.facts, draft=probe_model(folder, Path(folder).name))
    given = replace(args, speculative_algorithm=SHIPPED)
    try:
        publish(given, facts, role="verify", entropy=boot.entropy, sources=sources)
    except ConfigError:
        return None
    return SHIPPED, get_spec().speculative_num_draft_tokens


def build_rig(boot: Boot, bars: PhaseBars) -> Rig:
    if boot.facts.model.format == "script":
        from srt.verify.rig import ScriptRig

        return ScriptRig(Path(boot.facts.model.path))
    from srt.verify.model_rig import open_rig

    return open_rig(boot.cache_folder, lambda phase, fraction: bars.show("model", phase, fraction))


def as_data(
    report: Report, requests: list[Work], model: str, seconds: float, config_hash: str
) -> dict[str, object]:
    return {
        "model": model,
        "equal": report.is_equal,
        "kernels": report.kernels,
        "exact_kernels": report.is_exact,
        "seconds": round(seconds, 1),
        "config_hash": config_hash,
        "versions": get_context().describe()["versions"],
        "requests": [
            {
                "uid": work.uid,
                "prompt_tokens": len(work.token_ids),
                "temperature": work.params.temperature,
            }
            for work in requests
        ],
        "variants": [
            {
                "name": row.name,
                "requests": row.num_requests,
                "equal": row.num_equal,
                "differences": row.differences,
                "evidence": row.evidence,
                "seconds": round(row.seconds, 2),
                "not_applicable": row.why_not,
                "broke": row.broke,
            }
            for row in report.rows
        ],
    }


def print_table(report: Report, requests: list[Work], model: str, seconds: float) -> None:
    drawn = {work.uid for work in requests if work.params.temperature}
    table = Table(box=None, pad_edge=False)
    for title in ("variant", "requests", "equal", "seconds", "seen", "first difference"):
        table.add_column(
            title, justify="right" if title in ("requests", "equal", "seconds") else "left"
        )
    for row in report.rows:
        if row.why_not is not None:
            table.add_row(row.name, "-", "-", "-", f"not run: {row.why_not}", "")
            continue
        first = row.broke or ""
        if row.differences:
            found = row.differences[0]
            gap = "unknown" if found.gap is None else f"{found.gap:.4f}"
            how = "drawn" if found.uid in drawn else "greedy"
            first = (
                f"request {found.uid} ({how}), {found.what}, position {found.position}: "
                f"{_token(found.found)} instead of {_token(found.expected)}, top-2 gap {gap}"
            )
        table.add_row(
            row.name,
            str(row.num_requests),
            str(row.num_equal),
            f"{row.seconds:.1f}",
            row.evidence,
            first,
        )
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 200)
    console.print(table, highlight=False)
    print(f"\nkernels: {report.kernels}")
    print(f"         {EXACT if report.is_exact else ROUNDED + WITHOUT[get_device().device]}")
    verdict = "every answer is the same" if report.is_equal else "ANSWERS DIFFER"
    print(f"{model}: {verdict} ({seconds:.0f} s)")


def _token(token: int | None) -> str:
    return "the end" if token is None else str(token)
