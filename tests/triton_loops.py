"""Loops in interpreted Triton kernels.

Triton 3.6's interpreter makes a loop's bound an int by `int(array)` of an array with one number in it,
which numpy 2.4 takes from arrays without dimensions only.
"""

from __future__ import annotations

from typing import Any

import pytest


def mend_loop_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the test at hand. Does nothing to compiled kernels."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)
