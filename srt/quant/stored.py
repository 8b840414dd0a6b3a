"""What a checkpoint's `quantization_config` says of its linears.

awq     qweight [K, N/8] int32, eight columns in each, in the order of AWQ_ORDER; qzeros [K/group, N/8]
        alike; scales [K/group, N]. Of the layouts only "gemm" is one that is read.
gptq    qweight [K/8, N] int32, eight rows in each, the first lowest; qzeros [K/group, N/8], by columns,
        and one too low in format "gptq", as they are in "gptq_v2"; scales [K/group, N]; g_idx [K], the
        group of each row.
fp8     weight [N, K] float8_e4m3fn, weight_scale of one number or [N, 1]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from srt.errors import ConfigError

KEY = "quantization_config"
BITS = 4
GROUPS = (32, 64, 128)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
SUPPORTED = (
    "awq (4 bits, version gemm), gptq (4 bits, desc_act false), fp8 (a scale for each tensor or "
    "channel), compressed-tensors (format float-quantized)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredQuantization:
    """`group`: columns with a scale; 0 for fp8. `zero_offset`: what is added to a stored zero point."""

    layout: Literal["awq", "gptq", "fp8"]
    group: int = 0
    zero_offset: int = 0


def read_stored(config: Mapping[str, Any], origin: str) -> StoredQuantization | None:
    """None: not quantized. Raises ConfigError naming what is not supported."""
    found = config.get(KEY)
    if not found:
        return None
    method = str(found.get("quant_method", "")).lower() if isinstance(found, dict) else ""
    if method == "awq":
        _expect(found, origin, "bits", found.get("w_bit", BITS), (BITS,))
        _expect(found, origin, "version", "gemm", ("gemm", "GEMM"))
        return StoredQuantization(layout="awq", group=_group(found, origin))
    if method == "gptq":
        _expect(found, origin, "bits", BITS, (BITS,))
        _expect(found, origin, "desc_act", False, (False,))
        form = _expect(found, origin, "checkpoint_format", "gptq", ("gptq", "gptq_v2"))
        offset = 1 if form == "gptq" else 0
        return StoredQuantization(layout="gptq", group=_group(found, origin), zero_offset=offset)
    if method == "fp8":
        _expect(found, origin, "weight_block_size", None, (None,))
        _expect(found, origin, "fmt", "e4m3", ("e4m3",))
        return StoredQuantization(layout="fp8")
    if method == "compressed-tensors":
        _expect(found, origin, "format", None, ("float-quantized",))
        for group in (found.get("config_groups") or {}).values():
            weights = group.get("weights") or {}
            _expect(weights, origin, "num_bits", None, (8,))
            _expect(weights, origin, "strategy", None, ("channel", "tensor"))
        return StoredQuantization(layout="fp8")
    raise ConfigError(f"{origin}: {KEY} is {method or found!r}; supported: {SUPPORTED}")


def _expect(
    found: Mapping[str, Any], origin: str, key: str, default: Any, allowed: tuple[Any, ...]
) -> Any:
    value = found.get(key, default)
    if value not in allowed:
        raise ConfigError(
            f"{origin}: {KEY} has {key} {value!r}; supported: {', '.join(map(str, allowed))}"
        )
    return value


def _group(found: Mapping[str, Any], origin: str) -> int:
    size = found.get("group_size", found.get("q_group_size"))
    return int(_expect({"group_size": size}, origin, "group_size", None, GROUPS))
