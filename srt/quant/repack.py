"""From the layouts of AWQ and GPTQ checkpoints (see `srt.quant.stored`) to the kernels' own."""

from __future__ import annotations

import torch

from kernels.linear.quantized import Int4Weight, check_group, pack_nibbles
from srt.quant.stored import AWQ_ORDER, StoredQuantization

PER_WORD = 8  # values of four bits in an int32


def repack(
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales: torch.Tensor,
    stored: StoredQuantization,
    dtype: torch.dtype,
) -> Int4Weight:
    """`dtype`: of the activations. Raises ValueError for shapes that do not fit together."""
    by_columns = stored.layout == "awq"
    columns = qweight.shape[1] * (PER_WORD if by_columns else 1)
    size = qweight.shape[0] * (1 if by_columns else PER_WORD)
    check_group(size, stored.group)
    wanted = (size // stored.group, columns)
    zeros = unpack_columns(qzeros, is_awq=by_columns)
    if tuple(scales.shape) != wanted or tuple(zeros.shape) != wanted:
        raise ValueError(
            f"scales {list(scales.shape)} and zero points {list(zeros.shape)} do not fit groups of "
            f"{stored.group} of {size} rows and {columns} columns"
        )
    if by_columns:
        steps = unpack_columns(qweight, is_awq=True)
    else:
        steps = unpack_rows(qweight)
    return Int4Weight(
        values=pack_nibbles(steps.t().contiguous(), stored.group),
        scales=scales.t().contiguous(),
        zeros=(zeros + stored.zero_offset).t().contiguous(),
        group=stored.group,
        dtype=dtype,
    )


def unpack_columns(words: torch.Tensor, *, is_awq: bool) -> torch.Tensor:
    """[R, C / 8] int32 -> [R, C] uint8."""
    nibbles = _nibbles(words)
    if is_awq:
        places = torch.tensor(AWQ_ORDER, device=words.device).argsort()
        nibbles = nibbles[:, :, places]
    return nibbles.reshape(words.shape[0], -1)


def unpack_rows(words: torch.Tensor) -> torch.Tensor:
    """[R / 8, C] int32 -> [R, C] uint8."""
    return _nibbles(words).transpose(1, 2).reshape(-1, words.shape[1])


def _nibbles(words: torch.Tensor) -> torch.Tensor:
    """[A, B] int32 -> [A, B, 8] uint8, the lowest four bits first."""
    return torch.stack([((words >> 4 * i) & 15).to(torch.uint8) for i in range(PER_WORD)], dim=2)
