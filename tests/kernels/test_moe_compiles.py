"""Triton's own compiler takes the experts' kernels for Hopper, in every planned shape."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from kernels.moe.plans import FEW, LARGE, LARGEST, MIDDLE, SMALL, DownPlan, FewPlan, TilePlan, widen
from tests.hopper import pretend_hopper, run_compiling

SHARED_MEMORY = 227 * 1024
HIDDEN, INNER, TOP = 2048, 768, 8


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, tests/gpu compiles them")
def test_the_experts_kernels_compile_for_hopper(tmp_path):
    assert run_compiling(__file__, tmp_path) == ["33", "compiled"]


def compile_all() -> int:
    from kernels.moe.choose import choose_experts
    from kernels.moe.few import down_few, gate_few
    from kernels.moe.grouped import add_entries, multiply_blocks
    from kernels.moe.sort import count_entries, sort_entries, sort_few_entries

    pretend_hopper()
    bf16, e4m3, f32, i32 = torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.int32
    plain = (0, 1, 1, True, True, False, 1, 128, TOP)
    grouped = (1, 8, 4, False, True, False, 8, 32, 2 * TOP)
    forms = [
        (choose_experts, [f32, None, f32, i32], (0.5,), (128, TOP, *plain), 1),
        (choose_experts, [f32, f32, f32, i32], (0.5,), (256, TOP, *grouped), 1),
        (sort_few_entries, [i32] * 3, (3,) * 3, (16, 512, 128), 4),
        (sort_few_entries, [i32] * 3, (3,) * 3, (16, 2048, 8), 8),
        (count_entries, [i32] * 2, (3,) * 3, (256, 8), 8),
        (count_entries, [i32] * 2, (3,) * 3, (512, 512), 8),
        (sort_entries, [i32] * 4, (3,) * 4, (128, 256, 128, 128), 8),
        (sort_entries, [i32] * 4, (3,) * 4, (64, 512, 512, 32), 8),
        (add_entries, [bf16, i32, bf16, bf16], (3, 3), (HIDDEN, TOP, 1024), 4),
    ]
    for weight, scale in ((bf16, None), (e4m3, f32)):
        for plan in (FEW, SMALL, MIDDLE, LARGE, LARGEST):
            gate, down = plan.gate_up, plan.down
            if isinstance(gate, FewPlan) and isinstance(down, DownPlan):
                shape = (gate.rows, gate.block, gate.stages, True)
                types = [bf16, bf16, weight, scale, i32, bf16]
                forms.append((gate_few, types, (3, 3, 3, 0.5), (TOP, HIDDEN, *shape), gate.warps))
                types = [bf16, weight, scale, i32, f32, bf16, bf16]
                for size in (INNER, 1408, 2048):
                    own = widen(down, size)
                    constants = (size, own.rows, own.block)
                    forms.append((down_few, types, (3,) * 4, constants, own.warps))
                continue
            for own, size in ((gate, HIDDEN), (down, INNER)):
                assert isinstance(own, TilePlan)
                shape = (plan.tile, own.rows, own.block, own.stages, own.swap, True, False)
                types = [bf16, weight, scale, i32, i32, None if own is gate else f32, bf16]
                constants = (TOP, size, *shape, own is gate)
                forms.append((multiply_blocks, types, (3,), constants, own.warps))
    for kernel, dtypes, numbers, constants, warps in forms:
        compiled = kernel.warmup(
            *dtypes, *numbers, *constants, grid=(1,), num_warps=warps, PDL=True, launch_pdl=True
        )
        assert compiled.asm["ptx"].count("griddepcontrol") == 2, kernel
        assert compiled.metadata.shared <= SHARED_MEMORY, (kernel, constants)
    return len(forms)


if __name__ == "__main__":
    print(compile_all(), "compiled")
