"""Wishes for chunks of MLA prefixes: what asks for them, and the answer where there can be none."""

from __future__ import annotations

from collections.abc import Sequence

from srt.config.args import ServerArgs
from srt.errors import ConfigError

NOT_MLA = "the model's attention is not MLA"
NOTHING_TO_CHUNK = f"{NOT_MLA}: its cache holds K and V as they are, there is nothing to chunk"


def wish_of(args: ServerArgs, origin: str | None) -> str | None:
    """The words that ask for chunks; None: nobody does. `origin`: the source of
    `disable_chunked_prefix_cache`; only a user's off is a wish."""
    if args.disable_chunked_prefix_cache:
        return None
    if args.max_prefix_chunk_tokens is not None:
        return f"--max-prefix-chunk-tokens {args.max_prefix_chunk_tokens}"
    if origin == "file":
        return "disable_chunked_prefix_cache = false, in the config file,"
    return "--no-disable-chunked-prefix-cache" if origin == "typed" else None


def refuse(wish: str, reason: str, able: Sequence[str]) -> ConfigError:
    """`able`: prefill backends that could be chosen instead."""
    ways = f"allowed here: --prefill-attention-backend {' or '.join(able)}, or " if able else ""
    return ConfigError(f"{wish} was asked for, but {reason}; {ways}leave it out")


def check_prefix_wish(args: ServerArgs, origin: str | None, is_latent: bool) -> None:
    """What is known without loading. Raises ConfigError. Backends are asked by the gate, once others
    from outside this project have registered."""
    wish = wish_of(args, origin)
    if wish is not None and not is_latent:
        raise refuse(wish, NOTHING_TO_CHUNK, ())
