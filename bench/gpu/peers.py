"""What is to be beaten: the targets, and two other engines measured on one NVIDIA H200 (bf16, weights of
noise, prefix cache off, token ids in, nothing detokenized), with the sets of `bench.gpu.sets`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

VLLM = "vLLM 0.24.0"
MINI_SGLANG = "mini-sglang"


@dataclass(frozen=True, slots=True)
class Row:
    """A figure of one shape. `target` is a floor for rates and a ceiling for times; None: none is set or
    nobody measured it."""

    title: str
    target: float | None
    vllm: float | None
    mini_sglang: float | None
    is_rate: bool = False

    def is_met(self, value: float) -> bool | None:
        if self.target is None:
            return None
        return value >= self.target if self.is_rate else value <= self.target


Rows = Mapping[str, Row]
Cells = tuple[float | None, float | None, float | None]  # target, vLLM, mini-sglang


def _rows(
    offline: Cells,
    batch1: Cells,
    short: Cells,
    long: Cells,
    batch32: Cells,
    batch256: Cells,
    start: Cells,
    gateway: float | None = None,
    more: Mapping[str, Row] = MappingProxyType({}),
) -> Rows:
    return MappingProxyType(
        {
            "offline": Row("offline set, out tok/s", *offline, is_rate=True),
            "batch1": Row("batch 1, ms per token", *batch1),
            "ttft 1024": Row("TTFT 1,024 tokens, ms", *short),
            "ttft 8192": Row("TTFT 8,192 tokens, ms", *long),
            "decode 32": Row("batch 32 decode, tok/s", *batch32, is_rate=True),
            "decode 256": Row("batch 256 decode, tok/s", *batch256, is_rate=True),
            "start": Row("start to ready, s", *start),
            "gateway": Row("gateway, share of in-process", gateway, None, None, is_rate=True),
            **more,
        }
    )


UNKNOWN: Cells = (None, None, None)
PEERS: Mapping[str, Rows] = MappingProxyType(
    {
        "qwen3-0.6b": _rows(
            offline=(28_000, 23_946, 22_090),
            batch1=(1.1, 1.90, 1.77),
            short=(6, 17.4, 8.1),
            long=(26, 32.6, 44.1),
            batch32=(20_000, 12_820, 17_255),
            batch256=(72_000, 49_622, 64_657),
            start=(6, 194, 57),
            gateway=0.95,
        ),
        "llama-8b": _rows(
            offline=(11_200, 9_987, 10_197),
            batch1=(4.1, 5.09, 4.90),
            short=(22, 29.5, 24.4),
            long=(190, 209.8, 234.4),
            batch32=(6_400, 5_644, 5_660),
            batch256=(25_000, 23_143, 23_030),
            start=(10, 81, 17),
            gateway=0.95,
            more={
                "graphs": Row("TTFT 64-256 tokens, times eager", 0.7, None, None),
                "fp8": Row("fp8 offline, times bf16", 1.4, None, None, is_rate=True),
                "online": Row("online p99 ITL, times median", 3.0, None, None),
            },
        ),
        "qwen3-14b": _rows(
            offline=(6_900, 6_206, None),
            batch1=(7.5, 8.66, None),
            short=(38, 45.1, None),
            long=(345, 379.8, None),
            batch32=(3_950, 3_517, None),
            batch256=(15_500, 14_410, None),
            start=(14, 77, None),
            gateway=0.95,
        ),
        "qwen3-30b-a3b": _rows(
            offline=UNKNOWN,
            batch1=(4.0, None, None),
            short=UNKNOWN,
            long=UNKNOWN,
            batch32=UNKNOWN,
            batch256=UNKNOWN,
            start=UNKNOWN,
        ),
        "deepseek-v2-lite": _rows(
            offline=(None, 16_168, None),
            batch1=(2.2, 3.47, None),
            short=(30, 87.6, None),
            long=(95, 105.6, None),
            batch32=(None, 7_980, None),
            batch256=(None, 22_387, None),
            start=(None, 134.9, None),
            more={
                "ttft 32768": Row("TTFT 32,768 tokens, ms", 500, 584, None),
                "prefix 32768+512": Row("512 on 32,768 cached, ms", 35, 52.5, None),
                "prefix 4096+128": Row("128 on 4,096 cached, ms", None, 21.2, None),
            },
        ),
    }
)
NOBODY = _rows(UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN)


def rows_of(shape: str, is_comparable: bool = True) -> Rows:
    """`is_comparable`: it was measured as the others were, on a GPU with the full sets."""
    return PEERS.get(shape, NOBODY) if is_comparable else NOBODY
