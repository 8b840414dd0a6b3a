"""`tandem generate`: continue a prompt, or every line of a file, and leave."""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import orjson

from srt.cli.options import add_connect, add_server_flags, running_engine
from srt.cli.sampling import DEFAULT_MAX_TOKENS, add_sampling, sampling_params
from srt.client import Client
from srt.errors import ConfigError, TandemError
from srt.wire.params import SamplingParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help="the text to continue; - reads it from stdin")
    parser.add_argument("--file", type=Path, help="one prompt per line; answers as JSON lines")
    add_connect(parser)
    add_sampling(parser, DEFAULT_MAX_TOKENS)
    add_server_flags(parser, "[PROMPT]")


def run(options: argparse.Namespace) -> int:
    if (options.prompt is None) == (options.file is None):
        raise ConfigError("give one of PROMPT and --file")
    params = sampling_params(options)
    prompts = read_prompts(options)
    with running_engine(options) as client:
        if options.file is not None:
            return print_batch(client, prompts, params)
        print_stream(client, prompts[0], params)
    return 0


def read_prompts(options: argparse.Namespace) -> list[str]:
    """Raises ConfigError for a file that is not there or is no text."""
    try:
        if options.file is not None:
            text: str = options.file.read_text(encoding="utf-8")
            return text.splitlines()
        return [sys.stdin.read() if options.prompt == "-" else options.prompt]
    except OSError as error:
        raise ConfigError(f"--file {options.file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        where = "stdin" if options.file is None else f"--file {options.file}"
        raise ConfigError(f"{where} is not text in UTF-8: {error}") from None


def print_stream(client: Client, prompt: str, params: SamplingParams) -> None:
    for output in client.stream(prompt, params):
        print(output.text, end="", flush=True)
    print()


def print_batch(client: Client, prompts: list[str], params: SamplingParams) -> int:
    """All at once, answers in the order of the prompts; a refused one has its reason in its place.
    Returns 1 if there was one."""

    def answer(prompt: str) -> dict[str, str | None]:
        try:
            sample = client.generate(prompt, params).samples[0]
        except TandemError as error:
            return {"prompt": prompt, "error": error.message}
        reason = sample.finish.reason if sample.finish else None
        return {"prompt": prompt, "text": sample.text, "finish_reason": reason}

    code = 0
    with ThreadPoolExecutor(max_workers=64) as pool:
        try:
            for row in pool.map(answer, prompts):
                code = max(code, int("error" in row))
                print(orjson.dumps(row).decode(), flush=True)
        except BaseException:  # an interrupt must not wait for what nobody will read
            pool.shutdown(wait=False, cancel_futures=True)
            client.abort()
            raise
    return code
