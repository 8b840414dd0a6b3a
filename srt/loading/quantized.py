"""Puts the tensors of a quantized linear together, under the name its plain weight would have."""

from __future__ import annotations

from collections.abc import Iterator, Set

import torch

from kernels.linear.quantized import FP8, Fp8Weight, QuantizedWeight
from srt.errors import ConfigError
from srt.quant.repack import repack
from srt.quant.stored import StoredQuantization

Value = torch.Tensor | QuantizedWeight
INT4_PIECES = ("qweight", "qzeros", "scales")
FP8_PIECES = ("weight", "weight_scale")
GROUPS_OF_ROWS = "g_idx"
INPUT_SCALE = "input_scale"  # activations are scaled by token here


def combine(
    tensors: Iterator[tuple[str, torch.Tensor]],
    stored: StoredQuantization,
    *,
    wanted: Set[str],
    dtype: torch.dtype,
    device: torch.device | str,
    origin: str,
) -> Iterator[tuple[str, Value]]:
    """Plain tensors pass, but for biases of zeros that the model does not want; pieces wait on `device`
    for their last one and leave as `prefix.weight`. Raises ConfigError naming a linear whose pieces are
    missing, or not what the checkpoint's kind has."""
    waiting: dict[str, dict[str, torch.Tensor]] = {}
    needed = FP8_PIECES if stored.layout == "fp8" else INT4_PIECES
    for name, value in tensors:
        prefix, _, piece = name.rpartition(".")
        if piece == GROUPS_OF_ROWS and stored.layout == "gptq":
            _check_groups(value, stored.group, origin, name)
            continue
        if piece == "bias" and name not in wanted and not value.any():
            continue
        if piece == INPUT_SCALE and stored.layout == "fp8":
            continue
        is_plain = piece not in needed or (piece == "weight" and value.dtype != FP8)
        if is_plain:
            yield name, value
            continue
        pieces = waiting.setdefault(prefix, {})
        pieces[piece] = value.to(device)
        if len(pieces) == len(needed):
            del waiting[prefix]
            try:
                whole = _join(pieces, stored, dtype)
            except ValueError as error:
                raise ConfigError(f"{origin}: {prefix}: {error}") from error
            yield f"{prefix}.weight", whole
    for prefix, pieces in waiting.items():
        missing = ", ".join(sorted(set(needed) - pieces.keys()))
        raise ConfigError(f"{origin}: {prefix} lacks {missing}")


def _join(
    pieces: dict[str, torch.Tensor], stored: StoredQuantization, dtype: torch.dtype
) -> QuantizedWeight:
    if stored.layout != "fp8":
        qweight, qzeros, scales = (pieces[piece] for piece in INT4_PIECES)
        return repack(qweight, qzeros, scales, stored, dtype)
    values, scale = pieces["weight"], pieces["weight_scale"].float().flatten()
    if scale.numel() not in (1, values.shape[0]):
        raise ValueError(
            f"weight_scale {list(pieces['weight_scale'].shape)} of a weight {list(values.shape)}; "
            "supported: one scale, or one for each row"
        )
    scales = scale.expand(values.shape[0]).contiguous()
    return Fp8Weight(values=values, scales=scales, dtype=dtype)


def _check_groups(groups: torch.Tensor, group: int, origin: str, name: str) -> None:
    in_order = torch.arange(groups.numel(), device=groups.device) // group
    if not torch.equal(groups.to(in_order.dtype), in_order):
        raise ConfigError(
            f"{origin}: {name} mixes the rows of groups (desc_act), which is not supported"
        )
