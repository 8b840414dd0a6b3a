"""Which GPUs this process may use, and which CUDA its torch is built for. Nothing heavy is imported."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable
from pathlib import Path

from srt.config.facts import GpuFacts
from srt.config.nvml import Nvml, NvmlError

VISIBLE = "CUDA_VISIBLE_DEVICES"


def probe_gpus(
    visible: str | None = None, open_nvml: Callable[[], Nvml] = Nvml
) -> tuple[list[GpuFacts], str]:
    """The usable GPUs in CUDA's order, and why there is none ("" if there is one).

    visible: what CUDA_VISIBLE_DEVICES says, None if it is not set.
    """
    try:
        nvml = open_nvml()
    except NvmlError as error:
        return [], str(error)
    try:
        driver, handles = nvml.driver_version(), nvml.handles()
        if not handles:
            return [], "the NVIDIA driver knows no GPU"
        order = list(range(len(handles)))
        if visible is not None:
            order = visible_order(visible, [nvml.uuid(handle) for handle in handles])
        gpus = []
        for index, position in enumerate(order):
            total, free = nvml.memory(handles[position])
            gpus.append(
                GpuFacts(
                    index=index,
                    name=nvml.name(handles[position]),
                    capability=nvml.capability(handles[position]),
                    memory_total=total,
                    memory_free=free,
                    driver=driver,
                )
            )
        if not gpus:
            return [], f"{VISIBLE}={visible!r} hides every GPU of this machine ({len(handles)})"
        return gpus, ""
    except NvmlError as error:
        return [], str(error)
    finally:
        nvml.close()


def visible_order(visible: str, uuids: list[str]) -> list[int]:
    """Positions of the named cards. As CUDA reads it: numbers or the beginnings of UUIDs; the first
    name that fits no card, or fits one again, ends the list."""
    order: list[int] = []
    for word in (part.strip() for part in visible.split(",")):
        if word.isdecimal():
            fits = [int(word)] if int(word) < len(uuids) else []
        else:
            fits = [i for i, uuid in enumerate(uuids) if word and uuid.startswith(word)]
        if len(fits) != 1 or fits[0] in order:
            break
        order += fits
    return order


def probe_visible() -> tuple[list[GpuFacts], str]:
    """`probe_gpus` of this process, as its environment lets it see them."""
    return probe_gpus(os.environ.get(VISIBLE))


def torch_cuda() -> str:
    """The CUDA version of the installed torch, e.g. "13.0"; "" if it is built for CPUs or not there."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return ""
    return cuda_of(text)


def cuda_of(version_file: str) -> str:
    """Of the text of torch/version.py."""
    found = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", version_file, re.MULTILINE)
    return found.group(1) if found else ""
