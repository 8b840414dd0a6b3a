"""What a quantization costs: perplexity and top-1 agreement with the plain model, on our own text.

    python -m bench.accuracy --quantization int8

Starts the engine twice, one after the other, and asks both for the logprobs of the same tokens.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import orjson

from bench.report import describe_machine
from srt.cli.options import add_connect, add_server_flags, running_engine
from srt.client import SamplingParams
from srt.wire.params import TokenLogprobs

TEXT = Path(__file__).parent / "texts" / "harbour.txt"
WINDOW = 256  # tokens scored in one request


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_connect(parser)
    add_server_flags(parser)
    options = parser.parse_args()
    asked = options.quantization
    options.quantization = "none"
    plain = score(options)
    options.quantization = asked
    other = score(options)
    result = {
        "quantization": asked,
        "tokens": len(plain),
        "perplexity_plain": round(perplexity(plain), 4),
        "perplexity": round(perplexity(other), 4),
        "top1_agreement": round(agreement(plain, other), 4),
        "mean_abs_logprob_difference": round(difference(plain, other), 4),
        "machine": describe_machine(),
    }
    for name, value in result.items():
        print(f"{name:<30}{value}")
    print(orjson.dumps(result).decode())


def score(options: argparse.Namespace) -> list[TokenLogprobs]:
    """Every token of the text but the first of each window, given the ones before it in its window."""
    scored = []
    with running_engine(options) as client:
        tokens = client.tokenize(TEXT.read_text()).token_ids
        for first in range(0, len(tokens) - 1, WINDOW):
            answer = client.generate(
                tokens[first : first + WINDOW], SamplingParams(max_tokens=0, prompt_logprobs=1)
            )
            scored += [entry for entry in answer.prompt_logprobs or [] if entry is not None]
    return scored


def perplexity(scored: list[TokenLogprobs]) -> float:
    return math.exp(-sum(entry.chosen.logprob for entry in scored) / len(scored))


def agreement(one: list[TokenLogprobs], two: list[TokenLogprobs]) -> float:
    """How often both find the same token the likeliest."""
    same = sum(a.top[0].token == b.top[0].token for a, b in zip(one, two, strict=True))
    return same / len(one)


def difference(one: list[TokenLogprobs], two: list[TokenLogprobs]) -> float:
    pairs = zip(one, two, strict=True)
    return sum(abs(a.chosen.logprob - b.chosen.logprob) for a, b in pairs) / len(one)


if __name__ == "__main__":
    main()
