"""Which attention computes each half. What is decided here is proposed: when the runner is built, the
table in `capability` is asked again, with all that only loading knows.

    cuda   prefill  flashinfer where it is ready: its FA3 prefill is the fastest on sm_90; else triton.
                    Of MLA it is what is expanded, by an operator that may have to be compiled first
           decode   triton: split over the keys, in CUDA graphs, every head size. FlashInfer has to
                    be asked for: it plans on the host before every step
    cpu    both     native where its kernels can be had, else sdpa
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from srt.config.args import ServerArgs
from srt.config.capability import FLAG_WORDS, FP8, TABLE, Half, Need, is_ready, lacks
from srt.config.decisions import Decisions
from srt.config.facts import GpuFacts, MachineFacts, ModelFacts
from srt.config.inkling import is_inkling
from srt.config.latent import absorbed_dims, is_latent, value_dim
from srt.config.rules_device import INSTALL
from srt.errors import ConfigError

ROWS = MappingProxyType({row.name: row for row in TABLE})
FLASHINFER_CAPABILITY = 90  # from here on its prefill is faster than ours
CACHE_FLAG = "--kv-cache-dtype"
HOPPER = 90  # whose FA3 it is


def place_of(
    model: ModelFacts,
    machine: MachineFacts,
    gpu: GpuFacts | None,
    *,
    native: bool,
    deterministic: bool,
    dtype: str,
    kv_cache_dtype: str,
) -> Need:
    """What the runner's attention needs, as far as it is known before loading."""
    latent = is_latent(model.architecture)
    trouble = (
        machine.flashinfer_trouble
        if "flashinfer-python" in machine.versions
        else f"flashinfer-python is not installed ({INSTALL})"
    )
    return Need(
        device="cpu" if gpu is None else "cuda",
        capability=0 if gpu is None else gpu.capability,
        has_library=native,
        has_flashinfer=not trouble,
        flashinfer_trouble=_here(trouble),
        has_triton=gpu is not None,  # without it no model runs on a GPU
        deterministic=deterministic,
        dtype=FP8 if kv_cache_dtype == FLAG_WORDS[FP8] else kv_cache_dtype,
        query_dtype=dtype,
        head_dim=model.head_dim,
        window=has_window(model),
        latent=latent,
        value_dim=value_dim(model.config) if latent else 0,
        absorbed_dims=absorbed_dims(model.config) if latent else (0, 0),
        heads=model.num_heads if latent else 0,
        expanded_trouble=_here(machine.flashinfer_latent_trouble),
        absorbed_trouble=_here(machine.flashinfer_absorbed_trouble),
        relative=is_inkling(model.architecture),
    )


def _here(trouble: str) -> str:
    return trouble and f"cannot run here: {trouble}"


def has_window(model: ModelFacts) -> bool:
    """Whether a layer may look back over a window only."""
    config = model.config
    return bool(config.get("sliding_window")) and bool(config.get("use_sliding_window", True))


def lack_of(name: str, place: Need, half: Half) -> str | None:
    """Why this backend cannot compute this half of attention here; None if it can."""
    found = lacks(ROWS[name], place, half)
    return f"{name} {', '.join(found)}" if found else None


def propose(half: Half, place: Need, cache_flag: str = CACHE_FLAG) -> tuple[str, str]:
    """The backend for a half that nobody chose, and why. Raises ConfigError if there is none to trust
    with it. `cache_flag` sets the type of the KV cache."""
    if place.device == "cpu":
        lack = lack_of("native", place, half)
        name, why = (
            ("native", "it reads the paged cache in place") if lack is None else ("sdpa", lack)
        )
    elif half == "decode":
        name, why = "triton", "it splits over the keys and needs no plan before a step"
    else:
        lack = lack_of("flashinfer", place, half) or _not_first(place)
        name, why = "flashinfer", "its FA3 prefill is the fastest here"
        if lack is not None:
            name, why = "triton", lack
    if lack_of(name, place, half) is None:
        return name, why
    listing = "; ".join(lack for each in _candidates(place) if (lack := lack_of(each, place, half)))
    if lack_of("sdpa", place, half) is None:
        listing += "; allowed here: --attention-backend sdpa, which is a slow reference on a GPU"
    else:
        listing += _remedy(place, half, cache_flag)
    raise ConfigError(f"no attention backend can {half} this model: {listing}")


def decide_half(half: Half, args: ServerArgs, place: Need, decisions: Decisions) -> str:
    """The half's own flag, else the common flag, else the proposal."""
    name = f"{half}_attention_backend"
    own = args.prefill_attention_backend if half == "prefill" else args.decode_attention_backend
    asked = own or args.attention_backend
    if asked is None:
        return decisions.decide(name, *propose(half, place))
    flag = "--" + (name if own else "attention_backend").replace("_", "-")
    check_wish(asked, flag, place, half)
    return decisions.take(name, asked, None if own else "attention_backend")


def check_wish(
    asked: str, flag: str, place: Need, half: Half, cache_flag: str = CACHE_FLAG
) -> None:
    """Raises ConfigError if the backend that was asked for cannot compute this half here."""
    lack = lack_of(asked, place, half)
    if lack is None:
        return
    fit = [name for name in ROWS if lack_of(name, place, half) is None]
    others = "; ".join(why for each in _candidates(place) if (why := lack_of(each, place, half)))
    raise ConfigError(
        f"{flag} {asked} was asked for, but {lack}; allowed here: "
        + (", ".join(fit) or f"none of them: {others}{_remedy(place, half, cache_flag)}")
    )


def _remedy(place: Need, half: Half, cache_flag: str) -> str:
    """The flags with which some backend could compute this half; nothing if there are none."""
    plain, free = place.query_dtype or place.dtype, replace(place, deterministic=False)
    cache = f"{cache_flag} {'auto or ' if cache_flag == CACHE_FLAG else ''}{plain}"
    ways = (
        ("--no-deterministic", free),
        (cache, replace(place, dtype=plain)),
        (f"{cache}, with --no-deterministic", replace(free, dtype=plain)),
    )
    for words, way in ways:
        if way != place and any(lack_of(name, way, half) is None for name in ROWS):
            return f"; allowed: {words}"
    return ""


def _candidates(place: Need) -> tuple[str, ...]:
    return ("native", "sdpa") if place.device == "cpu" else ("flashinfer", "triton", "sdpa")


def _not_first(place: Need) -> str | None:
    """Why flashinfer, which can, is not taken unless asked for."""
    if place.capability < FLASHINFER_CAPABILITY:
        least = FLASHINFER_CAPABILITY
        return f"flashinfer is faster from sm_{least} on, this is sm_{place.capability}"
    if place.latent and place.capability != HOPPER:
        return f"flashinfer's MLA prefill is faster on sm_{HOPPER} only"
    if not is_ready(ROWS["flashinfer"], place, "prefill"):
        return "flashinfer would have to compile for this head size and type; ask for it by name"
    return None
