"""On a GPU with less shared memory than Hopper's, linears have plans that fit it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.hopper import SMALLEST_ROOM, pretend_hopper, run_compiling

HOPPER_ROOM = 227 << 10
BF16, E4M3, F32 = torch.bfloat16, torch.float8_e4m3fn, torch.float32
CASES = (  # kind, weight, tokens, whether no token's bits may depend on how many there are
    ("plain", (4096, 4096), 16, False),
    ("plain", (28672, 4096), 64, False),
    ("plain", (1024, 2048), 200, True),
    ("fp8", (6144, 4096), 16, False),
    ("fp8", (28672, 4096), 64, False),
    ("fp8", (4096, 14336), 128, False),
    ("fp8", (4096, 4096), 200, True),
)


def test_hopper_has_room_for_every_measured_plan() -> None:
    from kernels.linear import plans

    for kind, table in (("plain", plans.PLAIN), ("fp8", plans.FP8), ("int4", plans.INT4)):
        for (_, _, tokens), plan in table.items():
            assert plans.fit(plan, tokens, kind, HOPPER_ROOM) == plan


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="compiles for another GPU than this one")
def test_plans_fit_a_gpu_with_little_shared_memory(tmp_path: Path) -> None:
    assert run_compiling(__file__, tmp_path) == [str(len(CASES)), "compiled"]


def compile_all() -> int:
    from kernels.launch import ANY_INT
    from kernels.linear.plans import Plans, TilePlan
    from kernels.linear.tiles import tile_rows

    pretend_hopper(89)
    for kind, (num_rows, size), tokens, invariant in CASES:
        rules = {"kind": kind, "invariant": invariant}
        plan = Plans(num_rows, size, room=SMALLEST_ROOM, **rules).find(tokens)
        assert isinstance(plan, TilePlan)
        assert plan != Plans(num_rows, size, room=HOPPER_ROOM, **rules).find(tokens)
        x, weight, scale = (E4M3, E4M3, F32) if kind == "fp8" else (BF16, BF16, None)
        parts = F32 if plan.splits > 1 else None
        cuts = (plan.tokens or tokens, plan.rows, plan.block, plan.stages, plan.splits, plan.pieces)
        compiled = tile_rows.warmup(
            *(x, scale, weight, scale, None, BF16, BF16, parts, torch.int32, *[ANY_INT] * 4),
            *(size, *cuts, True, False, False, False),
            grid=(1,),
            num_warps=plan.warps,
        )
        assert compiled.metadata.shared <= SMALLEST_ROOM, (kind, plan)
    return len(CASES)


if __name__ == "__main__":
    print(compile_all(), "compiled")
