"""What holds for all tests."""

from __future__ import annotations

import os
from pathlib import Path

# Triton reads it when it is first imported, by whichever test does that: without a GPU its kernels are
# interpreted.
if not Path("/dev/nvidia0").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
