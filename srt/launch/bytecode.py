"""Where Python keeps what it compiles of the modules that the engine's processes import.

Usually that is beside the sources. But after an installer that compiles nothing, in a place where Python
may not write or is told not to (`PYTHONDONTWRITEBYTECODE`, as in many container images), every process
of every start compiles torch again, for seconds. Then we keep it in our cache, as we keep kernels.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib.util import cache_from_source, find_spec
from pathlib import Path

FOLDER = "bytecode"
PREFIX = "PYTHONPYCACHEPREFIX"


def bytecode_cache(cache_folder: str, package: str = "torch") -> Mapping[str, str]:
    """Environment variables for children that import `package`; none if its bytecode is where Python
    looks for it, or will be after the first import, if the user chose a place, or if ours cannot be
    written: Python then looks nowhere else. Makes the folder, imports nothing."""
    spec = find_spec(package)
    if spec is None or spec.origin is None or sys.pycache_prefix is not None:
        return {}
    source = Path(spec.origin)
    if Path(cache_from_source(str(source))).is_file():
        return {}
    if not sys.dont_write_bytecode and os.access(source.parent, os.W_OK):
        return {}
    folder = Path(cache_folder).absolute() / FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return {}
    if not os.access(folder, os.W_OK):
        return {}
    return {PREFIX: str(folder), "PYTHONDONTWRITEBYTECODE": ""}
