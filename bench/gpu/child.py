"""A process that measures parts on one engine: `python -m bench.gpu.child SECONDS`. Down its stdin
comes one JSON line, a `Job`; up its stdout go JSON lines, one for each part as it is done. If it is
still there after so many seconds, it says on stderr what its threads are doing, and ends."""

from __future__ import annotations

import faulthandler
import sys
import time
import traceback

import msgspec
import orjson

from bench.gpu.engine import Engine
from bench.gpu.parts import PARTS, Bench
from bench.gpu.sets import Sizes
from srt.errors import ConfigError


class Job(msgspec.Struct, kw_only=True):
    """`limit`: seconds that one run of a part may take."""

    flags: list[str]
    cache_folder: str
    parts: list[str]
    sizes: Sizes
    limit: float


def main() -> int:
    faulthandler.dump_traceback_later(float(sys.argv[1]), exit=True)
    job = msgspec.json.decode(sys.stdin.readline(), type=Job)
    out = open(sys.stdout.fileno(), "wb", closefd=False)  # buffered, whatever Python was told
    sys.stdout = sys.stderr  # whatever else is printed is no result

    def say(part: str, **words: object) -> None:
        out.write(orjson.dumps({"part": part, **words}) + b"\n")
        out.flush()

    try:
        engine = Engine(job.flags, job.cache_folder)
    except ConfigError as error:
        say("build", error=str(error))
        return 2
    bench = Bench(engine, job.sizes, job.limit)
    for part in job.parts:
        began = time.perf_counter()
        try:
            figures = PARTS[part](bench)
        except Exception as error:
            traceback.print_exc()
            say(part, error=f"{type(error).__name__}: {error}")
            bench.reset()
            continue
        say(part, figures=figures, seconds=time.perf_counter() - began)
    engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
