"""Which attention computes each half. What is decided here is proposed: when the runner is built, the
capability table of `srt/attention` is asked again, with all that only loading knows.

    cuda   prefill  flashinfer where it is ready: its FA3 prefill is the fastest on sm_90; else triton.
                    Of MLA it is what is expanded, by an operator that may have to be compiled first
           decode   triton: split over the keys, in CUDA graphs, every head size
    cpu    both     native where its kernels can be had, else sdpa
"""

from __future__ import annotations

from dataclasses import dataclass

from srt.config.args import ServerArgs
from srt.config.decisions import Decisions
from srt.config.facts import GpuFacts, MachineFacts, ModelFacts
from srt.config.inkling import is_inkling
from srt.config.latent import is_latent, value_dim
from srt.config.rules_device import INSTALL
from srt.errors import ConfigError

NAMES = ("native", "flashinfer", "triton", "sdpa")
FLASHINFER_HEAD_DIMS = (64, 128, 256)  # what its FA3 kernels are made for
FLASHINFER_CAPABILITY = 90  # from here on its prefill is faster than ours
FLASHINFER_LATENT_DIMS = (192, 128)  # of MLA's queries and values: it has no other FA3 kernel
HOPPER = 90  # whose FA3 it is
READY_HEAD_DIM = 128  # others it compiles at first use, for a minute
MOST_HEAD_DIM = 256  # of the Triton kernels: a tile of keys must fit beside its queries
HALF_TYPES = ("bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What a runner's attention depends on. `gpu` None: the CPU. `native`: its compiled kernels.
    `flashinfer_trouble`: why FlashInfer cannot run on this machine, whatever the model, and
    `flashinfer_latent_trouble`, why it cannot compute MLA. `value_dim`: of MLA's heads."""

    gpu: GpuFacts | None
    flashinfer_trouble: str
    native: bool
    deterministic: bool
    dtype: str
    kv_cache_dtype: str
    head_dim: int
    has_window: bool
    has_latent: bool = False  # MLA: heads of any size
    value_dim: int = 0
    flashinfer_latent_trouble: str = ""
    has_relative: bool = False  # scores depend on the distance


def place_of(
    model: ModelFacts,
    machine: MachineFacts,
    gpu: GpuFacts | None,
    *,
    native: bool,
    deterministic: bool,
    dtype: str,
    kv_cache_dtype: str,
) -> Place:
    return Place(
        gpu=gpu,
        flashinfer_trouble=(
            machine.flashinfer_trouble
            if "flashinfer-python" in machine.versions
            else f"flashinfer-python is not installed ({INSTALL})"
        ),
        native=native,
        deterministic=deterministic,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        head_dim=model.head_dim,
        has_window=has_window(model),
        has_latent=is_latent(model.architecture),
        value_dim=value_dim(model.config) if is_latent(model.architecture) else 0,
        flashinfer_latent_trouble=machine.flashinfer_latent_trouble,
        has_relative=is_inkling(model.architecture),
    )


def has_window(model: ModelFacts) -> bool:
    """Whether a layer may look back over a window only."""
    config = model.config
    return bool(config.get("sliding_window")) and bool(config.get("use_sliding_window", True))


def lacks(name: str, place: Place) -> str | None:
    """Why this backend cannot compute attention here; None if it can."""
    if place.has_relative and name != "sdpa":
        return f"{name} attention has no relative positions"
    match name:
        case "native":
            return _native_lack(place)
        case "flashinfer":
            return _flashinfer_lack(place)
        case "triton":
            return _triton_lack(place)
    assert name == "sdpa", name
    if place.deterministic:
        return "the sums of sdpa depend on the batch, which --deterministic forbids"
    return None


def propose(half: str, place: Place) -> tuple[str, str]:
    """The backend for a half that nobody chose, and why. Raises ConfigError if there is none to trust
    with it."""
    if place.gpu is None:
        lack = lacks("native", place)
        name, why = (
            ("native", "it reads the paged cache in place") if lack is None else ("sdpa", lack)
        )
    elif half == "decode":
        name, why = "triton", "it splits over the keys and needs no plan before a step"
    else:
        lack = lacks("flashinfer", place) or _not_first(place)
        name, why = "flashinfer", "its FA3 prefill is the fastest here"
        if lack is not None:
            name, why = "triton", lack
    if lacks(name, place) is None:
        return name, why
    listing = "; ".join(lack for each in _candidates(place) if (lack := lacks(each, place)))
    if lacks("sdpa", place) is None:
        listing += "; allowed here: --attention-backend sdpa, which is a slow reference on a GPU"
    else:
        listing += "; allowed: --no-deterministic"
    raise ConfigError(f"no attention backend can {half} this model: {listing}")


def decide_half(half: str, args: ServerArgs, place: Place, decisions: Decisions) -> str:
    """The half's own flag, else the common flag, else the proposal."""
    name = f"{half}_attention_backend"
    own = args.prefill_attention_backend if half == "prefill" else args.decode_attention_backend
    asked = own or args.attention_backend
    if asked is None:
        return decisions.decide(name, *propose(half, place))
    flag = "--" + (name if own else "attention_backend").replace("_", "-")
    check_wish(asked, flag, place)
    if (half, asked, place.has_latent) == ("decode", "flashinfer", True):
        raise ConfigError(
            f"{flag} flashinfer was asked for, but it computes MLA's prompts only; allowed here: "
            "triton, sdpa; --prefill-attention-backend flashinfer is for prompts"
        )
    return decisions.take(name, asked, None if own else "attention_backend")


def check_wish(asked: str, flag: str, place: Place) -> None:
    """Raises ConfigError if the backend that was asked for cannot compute attention here."""
    lack = lacks(asked, place)
    if lack is None:
        return
    fit = [name for name in NAMES if lacks(name, place) is None]
    others = "; ".join(why for each in _candidates(place) if (why := lacks(each, place)))
    raise ConfigError(
        f"{flag} {asked} was asked for, but {lack}; allowed here: "
        + (", ".join(fit) or f"none of them: {others}")
    )


def _candidates(place: Place) -> tuple[str, ...]:
    return ("native", "sdpa") if place.gpu is None else ("flashinfer", "triton", "sdpa")


def _native_lack(place: Place) -> str | None:
    if place.gpu is not None:
        return "native attention runs on CPUs, and this model runs on the GPU"
    if place.has_latent:
        return "native attention has no MLA"
    if not place.native:
        return "the native kernels are off"
    if place.kv_cache_dtype != "bfloat16":
        return f"native attention reads a bfloat16 cache, this one is {place.kv_cache_dtype}"
    return None


def _triton_lack(place: Place) -> str | None:
    if place.gpu is None:
        return "triton attention runs on GPUs, and this model runs on the CPU"
    if place.dtype not in HALF_TYPES or place.kv_cache_dtype == "float32":
        return f"triton computes in {' or '.join(HALF_TYPES)}, not float32"
    if place.has_latent:
        return None
    if place.head_dim > MOST_HEAD_DIM:
        return f"triton takes head sizes up to {MOST_HEAD_DIM}, not {place.head_dim}"
    return None


def _flashinfer_lack(place: Place) -> str | None:
    if place.gpu is None:
        return "flashinfer runs on GPUs, and this model runs on the CPU"
    if place.flashinfer_trouble:
        return place.flashinfer_trouble
    if place.deterministic:
        return "flashinfer splits its work by the batch, which --deterministic forbids"
    if place.dtype not in HALF_TYPES:
        return f"flashinfer computes in {' or '.join(HALF_TYPES)}, not {place.dtype}"
    if place.kv_cache_dtype not in HALF_TYPES:
        return f"flashinfer reads a cache in {' or '.join(HALF_TYPES)}, not {place.kv_cache_dtype}"
    if place.has_latent:
        return _flashinfer_latent_lack(place)
    if place.head_dim not in FLASHINFER_HEAD_DIMS:
        sizes = ", ".join(map(str, FLASHINFER_HEAD_DIMS))
        return f"flashinfer takes head sizes {sizes}, not {place.head_dim}"
    if place.has_window:
        return "flashinfer is not used with sliding windows"
    return None


def _flashinfer_latent_lack(place: Place) -> str | None:
    if place.flashinfer_latent_trouble:
        return place.flashinfer_latent_trouble
    sizes = (place.head_dim, place.value_dim)
    if sizes != FLASHINFER_LATENT_DIMS:
        query, value = FLASHINFER_LATENT_DIMS
        return (
            f"flashinfer takes MLA's heads of {query} and {value} numbers, not {sizes[0]} and "
            f"{sizes[1]}"
        )
    return None


def _not_first(place: Place) -> str | None:
    """Why flashinfer, which can, is not taken unless asked for."""
    assert place.gpu is not None
    if place.gpu.capability < FLASHINFER_CAPABILITY:
        least = FLASHINFER_CAPABILITY
        return f"flashinfer is faster from sm_{least} on, this is sm_{place.gpu.capability}"
    if place.has_latent and place.gpu.capability != HOPPER:
        return f"flashinfer's MLA prefill is faster on sm_{HOPPER} only"
    ready_dim = place.head_dim if place.has_latent else READY_HEAD_DIM
    if place.head_dim != ready_dim or "float16" in (place.dtype, place.kv_cache_dtype):
        return "flashinfer would have to compile for this head size and type; ask for it by name"
    return None
