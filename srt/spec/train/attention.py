"""Attention of the unrolled draft: true keys up to where guessing began, then the guesses' own.

Step j at position p sees K_0[k] for k <= p - j, and K_i[p - j + i] for i = 1..j: the chain of guesses
that leads to p. All in one softmax. Positions p < j began before the text did: their rows are zero.

`attend_plain` writes that down. `attend_flash` does the large part with the flash kernel: with the
merged output and the merged log-sum-exp, that kernel's backward gives exactly the merged softmax's
gradients, for P = exp(S - lse) and D = rowsum(dO * O) are all it knows of the forward.
"""

from __future__ import annotations

from typing import Any

import torch


def attend_plain(
    q: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor], scale: float
) -> torch.Tensor:
    """q and each of `keys`, `values` (of steps 0..j) [B, heads, T, D], rotated. Returns q's shape."""
    step = len(keys) - 1
    length = q.shape[2] - step
    late = q[:, :, step:]
    scores = (late @ keys[0][:, :, :length].transpose(-1, -2)).float() * scale
    place = torch.arange(length, device=q.device)
    scores = scores.masked_fill(place[:, None] < place[None], -torch.inf)
    own = [(late * _at(keys, i, length)).sum(-1, keepdim=True).float() * scale for i in _own(keys)]
    weights = torch.cat([scores, *own], dim=-1).softmax(dim=-1).to(q.dtype)
    mixed = weights[..., :length] @ values[0][:, :, :length]
    for i in _own(keys):
        mixed = mixed + weights[..., length + i - 1, None] * _at(values, i, length)
    return _pad(mixed, step)


def attend_flash(
    q: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor], scale: float
) -> torch.Tensor:
    """The same as `attend_plain`."""
    step = len(keys) - 1
    length = q.shape[2] - step
    own_keys = [_at(keys, i, length) for i in _own(keys)]
    own_values = [_at(values, i, length) for i in _own(keys)]
    mixed: torch.Tensor = _Merged.apply(  # type: ignore[no-untyped-call]
        q[:, :, step:], keys[0][:, :, :length], values[0][:, :, :length], scale,
        *own_keys, *own_values,
    )  # fmt: skip
    return _pad(mixed, step)


def _own(keys: list[torch.Tensor]) -> range:
    return range(1, len(keys))


def _at(tensors: list[torch.Tensor], i: int, length: int) -> torch.Tensor:
    """Step i's tensor at the positions (p - j + i) for p = j..: a slice."""
    return tensors[i][:, :, i : i + length]


def _pad(mixed: torch.Tensor, step: int) -> torch.Tensor:
    if not step:
        return mixed
    return torch.cat((torch.zeros_like(mixed[:, :, :1]).expand(-1, -1, step, -1), mixed), dim=2)


class _Merged(torch.autograd.Function):
    """Causal attention over k, v and one more key and value per own step at the query's place."""

    @staticmethod
    def forward(
        context: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float,
        *own: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        own_keys, own_values = own[: len(own) // 2], own[len(own) // 2 :]
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out, lse, *rest = _flash(q, k, v, scale)
        if own:
            scores = torch.stack([(q * key).sum(-1).float() * scale for key in own_keys], dim=-1)
            merged = torch.logaddexp(lse, scores.logsumexp(-1))
            total = (lse - merged).exp().unsqueeze(-1) * out
            shares = (scores - merged.unsqueeze(-1)).exp()
            for i, value in enumerate(own_values):
                total = total + shares[..., i, None] * value
            out, lse = total.to(q.dtype), merged
        context.save_for_backward(q, k, v, out, lse, *own)
        context.scale, context.rest = scale, rest
        result: torch.Tensor = out
        return result

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse, *own = context.saved_tensors
        grad, scale = gradients[0].contiguous(), context.scale
        own_keys, own_values = own[: len(own) // 2], own[len(own) // 2 :]
        to_q, to_k, to_v = _flash_backward(grad, q, k, v, out, lse, context.rest, scale)
        spread = (grad.float() * out).sum(-1)
        to_keys, to_values = [], []
        for key, value in zip(own_keys, own_values, strict=True):
            share = ((q * key).sum(-1).float() * scale - lse).exp()
            slope = share * ((grad * value).sum(-1).float() - spread) * scale
            slope = slope.unsqueeze(-1).to(q.dtype)
            to_q = to_q + slope * key
            to_keys.append(slope * q)
            to_values.append(share.unsqueeze(-1).to(q.dtype) * grad)
        return (to_q, to_k, to_v, None, *to_keys, *to_values)


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> list[Any]:
    """Output, log-sum-exp [B, heads, T], and what the backward wants besides."""
    ops = torch.ops.aten
    if q.device.type == "cuda":
        return list(ops._scaled_dot_product_flash_attention(q, k, v, 0.0, True, scale=scale))
    return list(ops._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale))


def _flash_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor, rest: list[Any], scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    ops = torch.ops.aten
    if q.device.type == "cuda":
        cum_q, cum_k, max_q, max_k, seed, offset = rest[:6]
        found = ops._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, 0.0, True, seed, offset,
            scale=scale,
        )  # fmt: skip
    else:
        found = ops._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, True, scale=scale
        )
    return found[0], found[1], found[2]
