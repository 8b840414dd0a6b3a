"""CPU or GPU: the first decision, for most others hang on it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from srt.config.args import ServerArgs
from srt.config.decisions import Decisions
from srt.config.facts import Facts, GpuFacts, MachineFacts
from srt.errors import ConfigError

LEAST_CAPABILITY = 80  # bfloat16 tensor cores, asynchronous copies
# The oldest driver that runs a CUDA of this major version (NVIDIA's release notes, minor version
# compatibility).
LEAST_DRIVER: Mapping[int, int] = MappingProxyType({11: 450, 12: 525, 13: 580})
TRITON = "3.6."  # `kernels.launch` calls what this version compiles
INSTALL = "pip install 'tandem-serve[gpu]'"


def decide_device(args: ServerArgs, facts: Facts, decisions: Decisions) -> GpuFacts | None:
    """The GPU to run on; None: the CPU. Raises ConfigError if cuda was asked for and cannot be had."""
    lack = why_no_gpu(facts)
    if args.device == "cuda" and lack is not None:
        raise ConfigError(
            f"--device cuda was asked for, but {lack}; allowed here: --device cpu, or auto, which "
            "takes the best that there is"
        )
    if args.device == "cpu":
        decisions.take("device", "cpu")
        return None
    if lack is not None:
        decisions.decide("device", "cpu", lack)
        return None
    gpu = facts.machine.gpus[0]
    if args.device == "cuda":
        decisions.take("device", "cuda")
    else:
        about = f"{gpu.name}, sm_{gpu.capability}, {gpu.memory_free / 1e9:.1f} GB free"
        decisions.decide("device", "cuda", about)
    return gpu


def why_no_gpu(facts: Facts) -> str | None:
    """Why the model cannot run on a GPU here; None if it can."""
    if facts.model.format == "script":
        return "a script has nothing to compute"
    return why_machine_has_no_gpu(facts.machine)


def why_machine_has_no_gpu(machine: MachineFacts) -> str | None:
    """The same without looking at the model: hardware first, then driver, then packages."""
    if not machine.gpus:
        return machine.gpu_trouble or "this machine has no GPU"
    gpu = machine.gpus[0]
    if gpu.capability < LEAST_CAPABILITY:
        return f"{gpu.name} is sm_{gpu.capability}, and the kernels need sm_{LEAST_CAPABILITY} or newer"
    torch = machine.versions.get("torch", "unknown")
    if not machine.torch_cuda:
        return (
            f"torch {torch} is a build for CPUs; a CUDA build can use this {gpu.name} ({INSTALL})"
        )
    needed = LEAST_DRIVER.get(int(machine.torch_cuda.split(".")[0]), 0)
    if _major(gpu.driver) < needed:
        return (
            f"the NVIDIA driver {gpu.driver} is too old for torch {torch}, which is built for CUDA "
            f"{machine.torch_cuda} and needs driver {needed} or newer; update the driver, or install a "
            f"torch for CUDA {_newest_cuda(_major(gpu.driver))}"
        )
    if "triton" not in machine.versions:
        return f"triton is not installed, which the kernels are written in ({INSTALL})"
    triton = machine.versions["triton"]
    if not triton.startswith(TRITON):
        return (
            f"triton is {triton}, and the kernels are launched by what {TRITON}x compiles ({INSTALL} "
            "brings it with the torch that goes with it)"
        )
    return machine.triton_trouble or None


def _major(version: str) -> int:
    head = version.split(".")[0]
    return int(head) if head.isdecimal() else 0


def _newest_cuda(driver: int) -> str:
    """The newest CUDA that a driver runs."""
    fits = [major for major, least in LEAST_DRIVER.items() if driver >= least]
    return str(max(fits)) if fits else "11 or older"
