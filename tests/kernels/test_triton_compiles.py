"""Triton's own compiler takes the kernels for Hopper: its interpreter lets more pass than it does.

In a process of its own, where nothing is interpreted; the assembler comes with Triton, no GPU is needed.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from tests.hopper import pretend_hopper, run_compiling


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, tests/gpu compiles them")
def test_the_elementwise_kernels_compile_for_hopper(tmp_path):
    assert run_compiling(__file__, tmp_path) == ["9", "compiled"]


def compile_all() -> int:
    from kernels.embedding.triton import gather_rows
    from kernels.merge_state.triton import merge_rows
    from kernels.rms_norm.triton import norm_rows
    from kernels.rope.triton import rotate_token
    from kernels.silu_mul.triton import gate_rows
    from kernels.step_inputs.triton import locate_rows, scatter

    pretend_hopper()
    bf16, e4m3, f32 = torch.bfloat16, torch.float8_e4m3fn, torch.float32
    i32, i64 = torch.int32, torch.int64
    rope = [bf16, i64, f32, i64]
    heads = (40, 8, 64, 8, 64)
    forms = [
        (norm_rows, [bf16] * 4, (0.5,), (5120, 8192, False)),
        (norm_rows, [bf16] * 4, (0.5,), (1024, 1024, True)),
        (gate_rows, [bf16] * 2, (), (3072, 1024)),
        (rotate_token, [*rope, bf16, bf16, bf16, bf16, bf16], (0.5,) * 5, (*heads, True, False)),
        (rotate_token, [*rope, e4m3, e4m3, None, None, bf16], (0.5,) * 5, (*heads, False, True)),
        (gather_rows, [i64, bf16, bf16], (), (1024, 1024)),
        (merge_rows, [bf16, f32, bf16, f32, bf16, f32], (3,), (128, 8, 128)),
        (locate_rows, [i32] * 3 + [i64] * 4, (3,), (512, 16, 128)),
        (scatter, [i64, i32, i64], (3,), (128,)),
    ]
    for kernel, dtypes, numbers, constants in forms:
        compiled = kernel.warmup(
            *dtypes, *numbers, *constants, grid=(1,), PDL=True, launch_pdl=True
        )
        assert compiled.asm["ptx"].count("griddepcontrol") == 2, kernel
        assert len(compiled.asm["cubin"]) > 1000
    return len(forms)


if __name__ == "__main__":
    print(compile_all(), "compiled")
