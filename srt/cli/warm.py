"""`tandem warm`: compiles and records now what a start would have to, and ships it.

Takes the flags of `tandem serve`. The engine is built as a start would build it, in this process, goes
through every kind of step, and ends; what was compiled stays in the cache. `--load-format dummy` needs
no weights, only the model's shape.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
import time
from pathlib import Path

from srt.cli.options import add_server_flags, cache_folder, server_args, start_logging
from srt.cli.progress import PhaseBars
from srt.config.context import get_device, get_schedule, publish
from srt.config.facts import MachineFacts
from srt.config.probe import probe_machine
from srt.errors import ConfigError
from srt.launch.ending import leaving_on_sigterm
from srt.launch.kernel_caches import FOLDER, PACKAGE
from srt.launch.kernel_pack import about, collect_ready, pack, unpack
from srt.launch.prepare import prepare


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--pack", type=Path, metavar="FILE", help="also write the GPU's kernels into FILE (tar.gz)"
    )
    parser.add_argument(
        "--unpack",
        type=Path,
        metavar="FILE",
        help="put the kernels of FILE into the cache, and leave",
    )
    add_server_flags(parser)


def run(options: argparse.Namespace) -> int:
    cache = cache_folder()
    if options.unpack is not None and options.pack is not None:
        raise ConfigError("--pack writes and --unpack reads; give one of them")
    check_writable(cache)
    if options.unpack is not None:
        count = unpack(options.unpack, cache, probe_machine())
        print(f"{count} files of compiled kernels put into {Path(cache) / FOLDER}")
        return 0
    if options.pack is not None:
        about(probe_machine())  # better refused before anything is built
    began = time.monotonic()
    machine, device = warm(options, cache)
    if device == "cuda":
        operators = collect_ready(cache, machine, installed_operators(Path(cache)))
        print(f"FlashInfer operators ready to load: {operators}")
    print(f"warm in {time.monotonic() - began:.1f} s: {cache}")
    if options.pack is not None:
        size = pack(cache, machine, options.pack)
        print(f"{options.pack}: {size / 1e6:.1f} MB")
    return 0


def check_writable(cache: str) -> None:
    """A start goes on without a cache, but nothing of this command would stay. Raises ConfigError."""
    try:
        Path(cache).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):
            pass
    except OSError as error:
        raise ConfigError(
            f"the cache {cache} cannot be written: {error.strerror}; name another folder in TANDEM_CACHE"
        ) from None


def warm(options: argparse.Namespace, cache: str) -> tuple[MachineFacts, str]:
    """Returns the machine's facts and the device that was warmed."""
    from srt.launch.exercise import exercise
    from srt.launch.parts import build_worker

    args, sources = server_args(options)
    start_logging("warning")
    with leaving_on_sigterm(), PhaseBars() as bars:
        boot, _ = prepare(args, sources, folder="warm", cache_folder=cache, progress=bars.show)
        publish(args, boot.facts, role="warm", entropy=boot.entropy, sources=sources)
        schedule = get_schedule()
        worker = build_worker(boot, lambda phase, part: bars.show("engine", phase, part))
        try:
            chunk = schedule.chunked_prefill_size or schedule.max_step_tokens
            exercise(worker, chunk, lambda phase, part: bars.show("engine", phase, part))
        finally:
            worker.close()
    return boot.facts.machine, get_device().device


def installed_operators(cache: Path) -> Path | None:
    """The `flashinfer_jit_cache` that is installed, if it is not ours."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None or cache.absolute() in Path(spec.origin).parents:
        return None
    return Path(spec.origin).parent
