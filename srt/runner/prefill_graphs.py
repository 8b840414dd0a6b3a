"""Steps with prompts recorded for a few numbers of tokens and played back, all but their attention.

Attention depends on which rows the tokens belong to and how long these are, so it runs eagerly between
the recorded parts, one for each layer and one behind the last. The rest depends on the number of tokens
only: a step is padded to the next recorded number, with tokens of page 0, which is nobody's. What a
step of few tokens costs the host falls from a launch per kernel to two per layer; a step of many keeps
the device busy anyway and runs eagerly.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch

from srt.protocols.attention import AttentionBackend, AttentionBatch
from srt.protocols.kv_pool import KVPool
from srt.runner.inputs import StepInputs
from srt.runner.model_runner import ModelRunner
from srt.runner.timeline import Pause, Timeline

logger = logging.getLogger(__name__)

LEAST_TOKENS = 16
MOST_PADDING = 2.0  # a step is not padded to more than this many times its tokens


class PausedAttention:
    """An attention backend for a forward pass that is being recorded: queries and results pass through
    two static tensors, and the backend itself runs while the recording pauses."""

    wants_new = False  # they would have to pass through static tensors too

    def __init__(
        self, backend: AttentionBackend, queries: torch.Tensor, results: torch.Tensor
    ) -> None:
        self.name = backend.name
        self.num_tokens = 0  # of the step that is played; 0: there is nothing to attend
        self.pause: Pause | None = None
        self._backend = backend
        self._queries = queries
        self._results = results

    def forward(
        self,
        q: torch.Tensor,
        layer: int,
        pool: KVPool,
        *,
        scale: float,
        window: int | None,
        cap: float | None = None,
        new: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        assert self.pause is not None
        self._queries[: len(q)].copy_(q)

        def attend() -> None:
            num = self.num_tokens
            if num:
                found = self._backend.forward(
                    self._queries[:num], layer, pool, scale=scale, window=window, cap=cap
                )
                self._results[:num].copy_(found)

        self.pause(attend)
        return self._results[: len(q)]


@dataclass(slots=True, kw_only=True)
class Recorded:
    """`made`: the hidden states [size, H] of the last time it was played."""

    play: Callable[[], None]
    made: list[torch.Tensor]


class PrefillCudaGraphRunner:
    """`sizes`: numbers of tokens, ascending; () records nothing, and no step fits then."""

    def __init__(self, runner: ModelRunner, timeline: Timeline, sizes: tuple[int, ...]) -> None:
        self._runner = runner
        self._timeline = timeline
        self._sizes = sizes
        self._recorded: dict[int, Recorded] = {}
        most, arch, device = max(sizes, default=0), runner.arch, runner.device
        self._token_ids, self._positions, self._slots = (
            torch.zeros(most, dtype=torch.int64, device=device) for _ in range(3)
        )
        self._attention = PausedAttention(
            runner.backend,
            *(
                torch.zeros(most, arch.num_heads, dim, dtype=runner.dtype, device=device)
                for dim in (arch.head_dim, arch.value_dim)
            ),
        )

    @property
    def missing(self) -> list[int]:
        """Sizes not recorded yet."""
        return [size for size in self._sizes if size not in self._recorded]

    def size_for(self, num_tokens: int) -> int | None:
        """The recorded size that a step of so many tokens is padded to; None: it runs eagerly. The
        next size up must be recorded, and the padding not more than the step is worth."""
        for size in self._sizes[bisect_left(self._sizes, num_tokens) :]:
            if size > max(MOST_PADDING * num_tokens, LEAST_TOKENS):
                return None
            if size in self._recorded:
                return size
        return None

    @property
    def max_addressable_prefix_len(self) -> int:
        """How many tokens may stand before a step's: as many as the runner's own context, if it has one,
        and as its rows of the page table can name. Never what a flag said: a draft and a target may
        differ in both."""
        runner = self._runner
        width = runner.table.tensor.shape[1] * runner.pool.page_size
        return min(width, runner.context_length) if runner.context_length > 0 else width

    def can_run(self, inputs: StepInputs) -> bool:
        """The one rule of eligibility: plain chains, no prefix past what can be named, and a recorded
        size that fits."""
        batch = inputs.attention
        return (
            batch.bases is None
            and max(batch.starts_host, default=0) <= self.max_addressable_prefix_len
            and self.size_for(len(inputs.token_ids)) is not None
        )

    def run(self, inputs: StepInputs) -> torch.Tensor:
        """Like `ModelRunner.forward`, for a step that `can_run`. Valid until the next step."""
        num = len(inputs.token_ids)
        size = self.size_for(num)
        assert size is not None, "no recorded size fits"
        recorded = self._recorded[size]
        for static, given in (
            (self._token_ids, inputs.token_ids),
            (self._positions, inputs.attention.positions),
            (self._slots, inputs.attention.slots),
        ):
            static[:num].copy_(given)
            static[num:size].zero_()
        self._attention.num_tokens = num
        recorded.play()
        hidden = recorded.made[0]
        return hidden[:num] if inputs.keep is None else hidden[inputs.keep]

    def record(self, size: int) -> None:
        """Records a step of `size` tokens."""
        began = perf_counter()
        runner = self._runner
        nobody = torch.zeros(1, dtype=torch.int32, device=runner.device)
        batch = AttentionBatch(
            num_decode=0,
            page_size=runner.pool.page_size,
            page_table=runner.table.tensor,
            rows=nobody,
            starts=nobody,
            lengths=nobody,
            rows_host=[],
            starts_host=[],
            lengths_host=[],
            slots=self._slots[:size],
            positions=self._positions[:size],
        )
        for static in (self._token_ids, self._positions, self._slots):
            static.zero_()
        self._attention.num_tokens = 0
        made: list[torch.Tensor] = []

        def work(pause: Pause) -> None:
            self._attention.pause = pause
            made[:] = [runner.model_forward(self._token_ids[:size], batch, self._attention)]

        self._recorded[size] = Recorded(play=self._timeline.capture_broken(work), made=made)
        logger.info("prefill graph of %d tokens: %.3f s", size, perf_counter() - began)
