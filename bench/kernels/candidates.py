"""The implementations that this machine has, and the model whose sizes the benchmarks use."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels import ops
from kernels.native_build import Unavailable, build

BF16 = torch.bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """SmolLM2-135M."""

    layers: int = 30
    hidden: int = 576
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    ffn: int = 1536
    vocab: int = 49152

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim


def load(*, with_reference: bool = True) -> dict[str, ops.Ops]:
    found = {"reference": ops.select("reference")} if with_reference else {}
    found["torch"] = ops.select("torch")
    library = build(Path(tempfile.gettempdir()) / "tandem-bench-kernels", shutil.which("cc"))
    if isinstance(library, Unavailable):
        print(f"no native kernels: {library.reason}")
    else:
        found["native"] = ops.select("native", library)
    return found
