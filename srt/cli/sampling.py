"""Sampling flags of `chat` and `generate`."""

from __future__ import annotations

import argparse

from srt.errors import ConfigError, InvalidRequest
from srt.wire.limits import check_sampling
from srt.wire.params import SamplingParams

DEFAULT_MAX_TOKENS = 256  # of `generate`: a base model would go on to the end of its context


def add_sampling(parser: argparse.ArgumentParser, max_tokens: int | None = None) -> None:
    group = parser.add_argument_group("sampling")
    end = "the end of the context" if max_tokens is None else max_tokens
    group.add_argument(
        "--max-tokens", type=int, default=max_tokens,
        help=f"tokens to generate at most (default: {end})",
    )  # fmt: skip
    group.add_argument("--temperature", type=float, default=0.0, help="0: the likeliest token")
    group.add_argument("--top-p", type=float, default=1.0)
    group.add_argument("--top-k", type=int, default=0, help="0: off")
    group.add_argument("--request-seed", type=int, help="the same seed gives the same text")
    group.add_argument("--stop", action="append", default=[], help="end at this text; repeatable")


def sampling_params(options: argparse.Namespace) -> SamplingParams:
    """Raises ConfigError naming the flag, so that nothing is loaded for a wish that cannot be met."""
    params = SamplingParams(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        seed=options.request_seed,
        stop=options.stop,
    )
    try:
        check_sampling(params)
    except InvalidRequest as error:
        name = error.param or ""
        flag = "--request-seed" if name == "seed" else "--" + name.replace("_", "-")
        raise ConfigError(error.message.replace(name, flag, 1)) from None
    return params
