"""`tandem chat`: a conversation in the terminal. Ctrl-C stops an answer, Ctrl-D leaves."""

from __future__ import annotations

import argparse
import sys

from srt.cli.options import add_connect, add_server_flags, running_engine
from srt.cli.sampling import add_sampling, sampling_params
from srt.client import Client
from srt.errors import RequestError
from srt.wire.params import SamplingParams

HELP = "Type and press Enter. /new starts over, /quit or Ctrl-D leaves, Ctrl-C stops an answer."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", help="what the model is told first")
    add_connect(parser)
    add_sampling(parser)
    add_server_flags(parser)


def run(options: argparse.Namespace) -> int:
    params = sampling_params(options)
    first = [{"role": "system", "content": options.system}] if options.system else []
    with running_engine(options) as client:
        print(f"{client.welcome.model}. {HELP}", file=sys.stderr)
        turns = list(first)
        while (line := read_line()) is not None:
            if line == "/quit":
                break
            if line == "/new":
                turns = list(first)
            elif line:
                answer_turn(client, turns, line, params)
    return 0


def read_line() -> str | None:
    """None at the end of the input."""
    prompt = "> " if sys.stdin.isatty() else ""
    try:
        return input(prompt).strip()
    except EOFError:
        return None
    except KeyboardInterrupt:
        print()
        return ""
    except UnicodeDecodeError:
        print("refused: that was not text in UTF-8", file=sys.stderr)
        return ""


def answer_turn(
    client: Client, turns: list[dict[str, str]], line: str, params: SamplingParams
) -> None:
    """Streams the answer and adds both sides to `turns`; an interrupted answer counts as far as it got,
    a refused question is taken back."""
    turns.append({"role": "user", "content": line})
    said = ""
    try:
        for output in client.stream_chat(turns, params):
            said += output.text
            print(output.text, end="", flush=True)
    except KeyboardInterrupt:
        pass
    except RequestError as error:
        print(f"refused: {error.message}", file=sys.stderr)
        turns.pop()
        return
    print()
    turns.append({"role": "assistant", "content": said})
