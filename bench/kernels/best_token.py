"""python -m bench.kernels.best_token"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from bench.kernels.candidates import load
from bench.timing import report

VOCAB = 49152


def cases() -> Iterator[tuple[str, dict[str, Callable[[], object]]]]:
    for rows in (1, 8, 32):
        logits = torch.randn(rows, VOCAB)
        yield (
            f"{rows} rows",
            {name: partial(ops.best_token, logits) for name, ops in load().items()},
        )


if __name__ == "__main__":
    report("best_token", cases())
