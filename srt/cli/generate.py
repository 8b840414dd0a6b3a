"""`tandem generate`: continue a prompt, or every line of a file, and leave."""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import orjson

from srt.cli.options import add_connect, add_server_flags, running_engine
from srt.cli.sampling import add_sampling, sampling_params
from srt.client import Client
from srt.errors import ConfigError, TandemError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help="the text to continue; - reads it from stdin")
    parser.add_argument("--file", type=Path, help="one prompt per line; answers as JSON lines")
    add_connect(parser)
    add_sampling(parser)
    add_server_flags(parser, "[PROMPT]")


def run(options: argparse.Namespace) -> int:
    if (options.prompt is None) == (options.file is None):
        raise ConfigError("give one of PROMPT and --file")
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    with running_engine(options) as client:
        if options.file is None:
            print_stream(client, prompt, options)
        else:
            return print_batch(client, options.file.read_text().splitlines(), options)
    return 0


def print_stream(client: Client, prompt: str, options: argparse.Namespace) -> None:
    for output in client.stream(prompt, sampling_params(options)):
        print(output.text, end="", flush=True)
    print()


def print_batch(client: Client, prompts: list[str], options: argparse.Namespace) -> int:
    """All at once, answers in the order of the prompts; a refused one has its reason in its place.
    Returns 1 if there was one."""
    params = sampling_params(options)

    def answer(prompt: str) -> dict[str, str | None]:
        try:
            sample = client.generate(prompt, params).samples[0]
        except TandemError as error:
            return {"prompt": prompt, "error": error.message}
        reason = sample.finish.reason if sample.finish else None
        return {"prompt": prompt, "text": sample.text, "finish_reason": reason}

    code = 0
    with ThreadPoolExecutor(max_workers=64) as pool:
        for row in pool.map(answer, prompts):
            code = max(code, int("error" in row))
            print(orjson.dumps(row).decode(), flush=True)
    return code
