"""`tandem`: one command, a module for each word after it."""

from __future__ import annotations

import importlib
import sys

from srt.cli.parser import Parser
from srt.errors import ConfigError, TandemError

COMMANDS = {  # word: (module, one line of help). A module has add_arguments(parser) and run(options).
    "serve": ("srt.cli.serve", "start the engine and the HTTP gateway"),
    "chat": ("srt.cli.chat", "talk to a model in the terminal"),
    "generate": ("srt.cli.generate", "continue one prompt, or one per line of a file"),
    "explain": ("srt.cli.explain", "show every setting with its value, source and reason"),
    "verify": ("srt.cli.verify", "prove on this machine that speed changes no answer"),
    "warm": ("srt.cli.warm", "compile now what a start would have to, and ship it"),
    "doctor": ("srt.cli.doctor", "check this machine and installation"),
    "bench": ("bench.command", "measure a server, compare results"),
    "model": ("srt.cli.model", "fetch, list and inspect models"),
    "keys": ("srt.cli.keys", "make the keys of ZMQ clients on other machines"),
    "draft": ("srt.cli.draft", "train a draft for a model that is served"),
    "replay": ("srt.cli.replay", "run a recorded journal of the scheduler again"),
}


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 fine, 1 failed, 2 wrong use or a setting that cannot be met, 130 interrupted."""
    words = sys.argv[1:] if argv is None else argv
    parser = Parser(prog="tandem", description="Tandem, an LLM serving engine.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module, help_line) in COMMANDS.items():
        command = commands.add_parser(
            name, help=help_line, description=help_line[0].upper() + help_line[1:] + ".",
            allow_abbrev=False,
        )  # fmt: skip
        if words and words[0] == name:  # import only what is asked for
            importlib.import_module(module).add_arguments(command)
    options = parser.parse_args(words)
    try:
        code: int = importlib.import_module(COMMANDS[options.command][0]).run(options)
        return code
    except ConfigError as error:
        print(f"tandem {options.command}: {error}", file=sys.stderr)
        return 2
    except TandemError as error:
        print(f"tandem {options.command}: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 0


if __name__ == "__main__":
    sys.exit(main())
