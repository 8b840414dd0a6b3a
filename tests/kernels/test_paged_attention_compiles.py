"""Triton's own compiler takes the attention kernel for Hopper, in the shapes that are served. Keys of
8 bits that come in pairs are not read byte by byte from shared memory."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.hopper import SMALLEST_ROOM, pretend_hopper, run_compiling


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, tests/gpu compiles them")
def test_attention_compiles_for_hopper(tmp_path: Path) -> None:
    assert run_compiling(__file__, tmp_path) == ["8", "compiled"]


def compile_all() -> int:
    from kernels.launch import ANY_FLOAT, ANY_INT
    from kernels.paged_attention import triton as subject
    from kernels.paged_attention.triton_gather import copy_rows
    from kernels.paged_attention.triton_kernel import attend

    pretend_hopper()
    bf16, e4m3, i16, i32 = torch.bfloat16, torch.float8_e4m3fn, torch.int16, torch.int32
    decode = subject.choose_shape(4, 128, 4, narrow=True)
    verify = subject.choose_shape(32, 128, 4, narrow=True)
    assert decode.rows == 16 and verify.rows == 32
    forms = [
        (bf16, subject.tall_shape(), False),
        (bf16, subject.early_shape(), False),
        (i16, decode, False),
        (i16, subject.paired_shape(decode, 128, 227 << 10), False),
        (i16, replace(subject.early_shape(), rows=16), False),
        (i16, verify, True),
        (e4m3, subject.choose_shape(512, 128, 4, narrow=True), True),
    ]
    for kind, shape, is_listed in forms:
        types = [bf16, kind, kind, bf16, None, i32, i32, i32, *[None] * 3, torch.float32, i32]
        numbers = [ANY_INT, ANY_INT, ANY_FLOAT, ANY_FLOAT, ANY_FLOAT]
        sizes = (8, 4, 128, 4096, 16, shape.rows, shape.rows if is_listed else 4, shape.block)
        flags = (shape.least, is_listed, 1, False, True, *[False] * 4, shape.two_loops, shape.carry)
        compiled = attend.warmup(
            *(*types, *numbers, *sizes, *flags, shape.early, False, True),
            grid=(1,),
            num_warps=shape.warps,
            num_stages=shape.stages,
            launch_pdl=True,
        )
        ptx = compiled.asm["ptx"]
        assert ptx.count("griddepcontrol") == 2
        assert kind != i16 or "ld.shared.b8" not in ptx and "ld.shared.u8" not in ptx, shape
    copy_rows.warmup(
        *[e4m3, e4m3, bf16, bf16, torch.int64, ANY_INT, ANY_FLOAT, ANY_FLOAT, 1024, 1024, 4],
        grid=(1,),
        PDL=True,
        launch_pdl=True,
    )
    return len(forms) + 1


def test_a_gpu_with_little_shared_memory_keeps_the_smaller_shape() -> None:
    from kernels.paged_attention import triton as subject

    decode = subject.choose_shape(4, 128, 4, narrow=True)
    assert subject.paired_shape(decode, 128, 227 << 10).block == 2 * decode.block
    assert subject.paired_shape(decode, 128, SMALLEST_ROOM) == decode
    assert subject.paired_shape(decode, 64, SMALLEST_ROOM).block == 2 * decode.block


if __name__ == "__main__":
    print(compile_all(), "compiled")
