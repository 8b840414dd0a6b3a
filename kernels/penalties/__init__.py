"""Repetition, presence and frequency penalties, and the counts they need.

    repetition   of every token seen in prompt or output: logit / r if it is positive, else logit * r
                 (Keskar et al., "CTRL", 2019, section 4.1)
    frequency    then minus f times the number of times it stands in the output
    presence     then minus p if it stands in the output at all

What a request has seen is a line of `seen`, [slots, V] int32: how often each token stands in the output,
plus `PROMPT` if it stands in the prompt. Its `history` lists the same tokens: those of the prompt once,
then the output in its order; behind it, any of these again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from kernels.choice import check_dtype, check_shape, refuse_implementation, require_triton

if TYPE_CHECKING:
    import torch

PROMPT = 1 << 24  # more tokens than any output has


class Penalize(Protocol):
    def __call__(
        self,
        logits: torch.Tensor,
        places: torch.Tensor,
        slots: torch.Tensor,
        rates: torch.Tensor,
        history: torch.Tensor,
        seen: torch.Tensor,
        /,
    ) -> None: ...


class Remember(Protocol):
    def __call__(
        self,
        tokens: torch.Tensor,
        places: torch.Tensor,
        slots: torch.Tensor,
        history: torch.Tensor,
        lengths: torch.Tensor,
        seen: torch.Tensor,
        /,
    ) -> None: ...


class Penalties(NamedTuple):
    penalize: Penalize
    remember: Remember


def select(implementation: str) -> Penalties:
    """The unchecked functions: "reference" or "torch", any device; "triton". None waits for it."""
    match implementation:
        case "reference" | "torch":
            from kernels.penalties import reference

            return Penalties(reference.penalize, reference.remember)
        case "triton":
            require_triton()
            from kernels.penalties import triton

            return triton.bind()
    refuse_implementation(implementation)


def penalize(
    logits: torch.Tensor,
    places: torch.Tensor,
    slots: torch.Tensor,
    rates: torch.Tensor,
    history: torch.Tensor,
    seen: torch.Tensor,
    *,
    implementation: str = "reference",
) -> None:
    """Changes the P lines `places` of logits [S, V] float32 in place; line i belongs to `slots[i]`.

    places, slots: [P] int64, all different. rates: [P, 3] float32: repetition, presence, frequency.
    history: [slots, W] int64, W no less than the longest of these slots'. seen: [slots, V] int32.
    """
    import torch

    num, vocab_size = len(places), logits.shape[1]
    check_shape("slots", slots, (num,))
    check_shape("rates", rates, (num, 3))
    check_shape("seen", seen, (None, vocab_size))
    check_shape("history", history, (len(seen), None))
    check_dtype("logits", logits, torch.float32)
    check_dtype("rates", rates, torch.float32)
    check_dtype("seen", seen, torch.int32)
    for name, tensor in (("places", places), ("slots", slots), ("history", history)):
        check_dtype(name, tensor, torch.int64)
    if not logits.is_contiguous() or not seen.is_contiguous():
        raise ValueError("logits and seen must be contiguous")
    select(implementation).penalize(logits, places, slots, rates, history, seen)


def remember(
    tokens: torch.Tensor,
    places: torch.Tensor,
    slots: torch.Tensor,
    history: torch.Tensor,
    lengths: torch.Tensor,
    seen: torch.Tensor,
    *,
    implementation: str = "reference",
) -> None:
    """`tokens[places[i]]` was put out by `slots[i]`: it goes behind the history and is counted.

    tokens: [S] int64; places, slots: [P] int64, all different; history: [slots, W] int64, with room;
    lengths: [slots] int64; seen: [slots, V] int32.
    """
    import torch

    check_shape("slots", slots, (len(places),))
    check_shape("lengths", lengths, (len(seen),))
    check_shape("history", history, (len(seen), None))
    check_dtype("seen", seen, torch.int32)
    for name, tensor in (("tokens", tokens), ("lengths", lengths), ("history", history)):
        check_dtype(name, tensor, torch.int64)
    select(implementation).remember(tokens, places, slots, history, lengths, seen)
