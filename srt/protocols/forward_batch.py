"""What the scheduler hands a runner for one step, and what comes back. No torch: plain numbers.

Words: a *row* is a live request's place in the runner's tables (page table, sampler state, last
token), a small int that is reused; a *page* is `page_size` consecutive token slots of the KV pool,
page 0 is padding and belongs to nobody; a *slice* is one request's share of a step.

Steps execute in launch order, like work on a CUDA stream: whatever a later batch writes (page table,
sampler state, KV of a page that changed hands) happens after everything an earlier batch reads. That
order is the only thing that makes the overlap loop safe, so a runner must keep it.

There are hundreds of slices in a step, so they are structs that cost little to make; `gc=False`: the
collector need not walk over what cannot be part of a cycle.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from srt.wire.params import SamplingParams, TokenLogprobs

# The `SliceResult.error` that is the request's own doing: its bans took every token away.
NOTHING_LEFT = "no token can be chosen: every one is forbidden"


LookAhead = Callable[[list[int]], bytes | None]


class RowSetup(msgspec.Struct, kw_only=True):
    """A row changes hands at the start of a step: forget its state and take this one.

    `prompt_len` splits `tokens` into the prompt and what was generated before a retraction, so that
    penalties, `min_tokens` and the noise counter continue where they were.
    """

    row: int
    params: SamplingParams
    tokens: list[int]
    prompt_len: int
    stop_ids: list[int]  # ids that cannot come before `min_tokens`: stop ids and end tokens
    salt: str = ""  # what this request may share is shared with those of the same salt only


class TableWrite(msgspec.Struct, kw_only=True, gc=False):
    """`page_table[row, first : first + len(pages)] = pages`, before the step's forward."""

    row: int
    first: int
    pages: list[int]


class Window(msgspec.Struct, kw_only=True):
    """What a slice's tokens see where that is not simply whatever came before them: a tree of guesses,
    or a block whose tokens all see each other.

    Every token sees the row's keys in slots before `base`, and of those at `base + j` the ones whose bit
    j is set in its `visible`; j < 62. `positions` are where the tokens stand in the text, which in a
    tree is not where their keys lie.
    """

    base: int
    visible: list[int]
    positions: list[int]


class Slice(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """Compute `length` tokens of `row` at positions `start .. start + length - 1`.

    `tokens` None means one token: the last one sampled on this row, which may not have reached the
    scheduler yet. `sample` draws a token from the last position; it becomes the row's last token.
    `prompt_logprobs` k: also return, for each of these tokens, the logprob of the *next* prompt token,
    given in `targets` (length `length`, or one less on the slice that ends the prompt).
    `draft`: with `tokens` None, up to that many guessed tokens may be computed and verified along with
    this one; pages for them are there, and the result has 1 to 1 + draft tokens. With `tokens` given,
    the last `draft` of these are guesses: each is kept only if it is what the token before it draws.
    `parents`: the guesses are a tree; for each the index of the guess before it, -1: the first token.
    `window`: what the tokens see, if it is not what lies before them.
    `allowed`: only these tokens may be drawn, bit `i % 8` of byte `i // 8` for token i, one bit for
    each of the vocabulary. `look_ahead`: with guesses, what is allowed after the tokens drawn in this
    step; None: nothing, the text is complete. It may be called until the step's result is there.
    """

    row: int
    start: int
    length: int
    tokens: list[int] | None
    sample: bool
    prompt_logprobs: int | None = None
    targets: list[int] = []
    draft: int = 0
    parents: list[int] | None = None
    window: Window | None = None
    allowed: bytes | None = None
    look_ahead: LookAhead | None = None


class ForwardBatch(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One step. Decode slices (length 1, `tokens` None) come first, then prefill slices."""

    step: int
    slices: list[Slice]
    setups: list[RowSetup] = []
    table_writes: list[TableWrite] = []

    @property
    def num_tokens(self) -> int:
        """Positions computed, over all slices."""
        return sum(piece.length for piece in self.slices)


class SliceResult(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """What one slice gave. `tokens` is empty unless the slice sampled; speculation gives several."""

    tokens: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    error: str | None = None  # this request failed (for example NaN logits); the others did not
    num_drafted: int = 0  # guessed tokens that were verified; len(tokens) - 1 of them were right
    num_deep: int = 0  # how many of them could have been right together: less than all in a tree
    kept: list[int] = []  # which of the guesses were right, by index

    @property
    def is_plain(self) -> bool:
        """Whether this is a token and nothing else."""
        return (
            len(self.tokens) == 1
            and self.logprobs is None
            and self.prompt_logprobs is None
            and self.error is None
            and self.num_drafted == 0
        )


class StepResult(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Results in the order of the batch's slices, and seconds for the step's profile.

    `plain` is the short form for decodes: token i of it is what slice i of the batch gave, for the
    first `len(plain)` slices, and `slices` has the results of the slices behind those. A slice may be
    in it if it is a decode (`tokens` None, `sample`) that gave exactly one token and nothing else: no
    logprobs, no error, no guesses verified. So a worker in whose step all decodes are such gives
    `plain=[their tokens]` and `slices=[results of the prompts]`; one with nothing to say in short
    leaves `plain` empty. Both forms mean the same; the short one costs the scheduler a fraction.

    `draft`, `prepare`, `forward` and `sample` add up to what the step took where it was computed.
    `launch_seconds` is the time of the launching thread, beside those, where a device computes.
    """

    slices: list[SliceResult]
    plain: list[int] = []
    draft_seconds: float = 0.0
    prepare_seconds: float = 0.0
    launch_seconds: float = 0.0
    forward_seconds: float = 0.0
    sample_seconds: float = 0.0


def shorten(slices: list[Slice], results: list[SliceResult]) -> list[int]:
    """The longest `StepResult.plain` for these results; what it covers is to be left out of `slices`."""
    plain: list[int] = []
    for piece, got in zip(slices, results, strict=True):
        if piece.tokens is not None or not got.is_plain:
            break
        plain.append(got.tokens[0])
    return plain
