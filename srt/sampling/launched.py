"""Sampling under way on a device, and its results on the host once the device has come so far."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kernels.sample.table import Drawn
from srt.sampling.logprobs import Wanted, list_logprobs
from srt.sampling.sampler import explain_peaks
from srt.wire.params import TokenLogprobs


@dataclass(slots=True)
class Results:
    """One entry for each row asked. A row with an error has token 0, which means nothing."""

    tokens: list[int]
    logprobs: list[TokenLogprobs | None]
    errors: list[str | None]


@dataclass(slots=True)
class Measured:
    """Log-probabilities of the wanted rows, on their way to the host; see `logprobs.measure`."""

    wanted: Wanted
    values: torch.Tensor
    ids: torch.Tensor


@dataclass(slots=True)
class Launched:
    """`tokens` [S] int64 stand on the device and may be used by whatever is launched next."""

    tokens: torch.Tensor
    drawn: Drawn  # the host's copy
    measured: list[Measured] = field(default_factory=list)

    def finish(self) -> Results:
        """Once an event recorded after `launch` has been waited for."""
        tokens = self.drawn.tokens.tolist()
        errors = explain_peaks(self.drawn.peaks)
        found: list[TokenLogprobs | None] = [None] * len(tokens)
        for part in self.measured:
            places = part.wanted.places
            chosen = [tokens[place] for place in places]
            entries = list_logprobs(part.values, part.ids, chosen, part.wanted.nums)
            for place, entry in zip(places, entries, strict=True):
                found[place] = entry if errors[place] is None else None
        return Results(tokens, found, errors)
