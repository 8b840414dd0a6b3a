"""Sampling flags of `chat` and `generate`."""

from __future__ import annotations

import argparse

from srt.wire.params import SamplingParams


def add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, help="tokens to generate at most")
    group.add_argument("--temperature", type=float, default=0.0, help="0: the likeliest token")
    group.add_argument("--top-p", type=float, default=1.0)
    group.add_argument("--top-k", type=int, default=0, help="0: off")
    group.add_argument("--request-seed", type=int, help="the same seed gives the same text")
    group.add_argument("--stop", action="append", default=[], help="end at this text; repeatable")


def sampling_params(options: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        seed=options.request_seed,
        stop=options.stop,
    )
