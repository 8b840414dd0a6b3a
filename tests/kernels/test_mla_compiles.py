"""Triton's own compiler takes the kernels of latent attention for Hopper, at the sizes of DeepSeek."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.hopper import pretend_hopper, run_compiling


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, tests/gpu compiles them")
def test_the_kernels_of_latent_attention_compile_for_hopper(tmp_path: Path) -> None:
    assert run_compiling(__file__, tmp_path) == ["7", "compiled"]


def compile_all() -> int:
    from kernels.latent_write.triton import write_tokens
    from kernels.mla_attention.triton import decode_shape, extend_shape
    from kernels.mla_attention.triton_few import absorb_row, release_row
    from kernels.mla_attention.triton_join import fold
    from kernels.mla_attention.triton_kernel import attend
    from kernels.mla_attention.triton_spans import BLOCK, ROWS, STAGES, WARPS
    from kernels.mla_attention.triton_spans import attend as attend_spans

    pretend_hopper()
    bf16, f32, i32, i64 = torch.bfloat16, torch.float32, torch.int32, torch.int64
    stride, up = 3648, 256 * 512
    forms = []
    for shape, is_listed in ((decode_shape(), False), (extend_shape(), True)):
        constants = (16, 16, 512, 64, 16 * 512, stride, 192, 16, shape.rows, shape.block)
        flags = (shape.least, 0 if is_listed else 1, not is_listed, False)
        types = [*[bf16] * 4, i32, i32, i32, f32]
        sizes = (shape.warps, shape.stages)
        forms.append((attend, types, (3, 0.5), (*constants, *flags), *sizes))
    forms += [
        (
            attend_spans,
            [*[bf16] * 4, f32, i32],
            (0.5,),
            (16, 128, 64, 128, stride, 576, ROWS, BLOCK, True, False),
            WARPS,
            STAGES,
        ),
        (fold, [f32, bf16, i32], (3,), (16, 512, 32, 128, 128, 16, 1, 1), 4, 3),
        (absorb_row, [bf16] * 3, (), (16, 128, 512, stride, 192, up, 128), 4, 3),
        (
            release_row,
            [bf16, f32, i32, bf16, bf16],
            (3,),
            (16, 512, 128, up, 32, 128, 32, 16, True, 5, 4),
            4,
            3,
        ),
        (
            write_tokens,
            [bf16, bf16, bf16, i64, f32, i64, bf16],
            (0.5,),
            (stride, stride, 16, 128, 32, 512, 16, 32, 512, True),
            4,
            3,
        ),
    ]
    for kernel, types, numbers, constants, warps, stages in forms:
        options = {"num_warps": warps, "num_stages": stages, "launch_pdl": True}
        compiled = kernel.warmup(*types, *numbers, *constants, grid=(1,), PDL=True, **options)
        assert compiled.asm["ptx"].count("griddepcontrol") == 2, kernel
        assert compiled.metadata.shared <= 227 * 1024, kernel
        assert len(compiled.asm["cubin"]) > 1000
    return len(forms)


if __name__ == "__main__":
    print(compile_all(), "compiled")
