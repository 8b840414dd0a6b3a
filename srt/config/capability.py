"""What each attention backend can do. Resolving asks this table, and selection asks again when a runner
is built, with all that only loading knows; nothing else decides. Without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Half = Literal["prefill", "decode"]
Library = Literal["native", "flashinfer", "triton"]

FP8 = "float8_e4m3fn"
HALVES = frozenset({"bfloat16", "float16"})

DEVICES = {"cpu": ("CPUs", "the CPU"), "cuda": ("GPUs", "the GPU")}
MOST_HEADS = 128  # of MLA absorbed by FlashInfer
LITTLE_MEMORY = frozenset({86, 89, 120, 121})  # 99 KiB of it are shared; tiles of our MLA take 128
FLAG_WORDS = {FP8: "fp8_e4m3"}  # types that flags call otherwise than torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """`dtypes`: of the KV pool. `head_dims` None: any up to `max_head_dim`. `library`: what must be
    there. `min_capability`: the oldest GPU, 80 for 8.0. `has_latent`: the halves of MLA it computes.
    `latent_dims`: of MLA's queries and values where they are expanded, None: any. `absorbed_dims`: of
    its latents and rotated keys, None: any; then its masks want a power of two of heads, up to
    `MOST_HEADS`. `ready`: what an open wish takes, as (KV
    dtype, head_dim), since it is compiled or worth it; None: nothing is compiled for minutes.
    `copied_dtypes`: of a pool that its prefill half reads by way of a copy in the queries' type, which
    takes Triton."""

    name: str
    devices: frozenset[str]
    dtypes: frozenset[str]
    query_dtypes: frozenset[str]
    head_dims: frozenset[int] | None
    max_head_dim: int
    has_window: bool
    has_tree: bool
    has_cap: bool
    has_graph: bool
    plans_on_host: bool
    is_deterministic: bool
    library: Library | None
    min_capability: int
    ready: frozenset[tuple[str, int]] | None
    copied_dtypes: frozenset[str] = frozenset()
    has_latent: frozenset[Half] = frozenset()
    latent_dims: tuple[int, int] | None = None
    absorbed_dims: tuple[int, int] | None = None
    has_relative: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a runner asks of its backends. `dtype` is the KV pool's; `query_dtype` what the model
    computes in, None: the same. `has_library`: the compiled CPU kernels are there. `capability`: of the
    GPU, 90 for 9.0, 0 where unknown. `tree`: slices whose tokens do not simply see what lies before
    them. `cap`: scores are capped. `deterministic`: the same bits whatever else is in the batch.
    `latent`: attention is MLA; its heads are of any size. `value_dim`: of V, where it matters: MLA.
    `absorbed_dims`: of MLA's latent and rotated key. `heads`: of the queries, where it matters: MLA.
    `relative`: scores depend on the distance. `flashinfer_trouble`: what it lacks where `has_flashinfer`
    is False. `expanded_trouble`, `absorbed_trouble`: why its operators for MLA cannot be had."""

    device: str
    dtype: str
    head_dim: int
    window: bool
    has_library: bool
    query_dtype: str | None = None
    capability: int = 0
    has_flashinfer: bool = False
    flashinfer_trouble: str = "needs the package flashinfer-python, which is not installed"
    has_triton: bool = False
    tree: bool = False
    cap: bool = False
    deterministic: bool = False
    latent: bool = False
    value_dim: int = 0
    absorbed_dims: tuple[int, int] = (0, 0)
    heads: int = 0
    expanded_trouble: str = ""
    absorbed_trouble: str = ""
    relative: bool = False


TABLE: tuple[Capability, ...] = (
    Capability(
        name="native",
        devices=frozenset({"cpu"}),
        dtypes=frozenset({"bfloat16"}),
        query_dtypes=frozenset({"bfloat16"}),
        head_dims=None,
        max_head_dim=512,
        has_window=True,
        has_tree=True,
        has_cap=False,
        has_graph=False,
        plans_on_host=False,
        is_deterministic=True,
        library="native",
        min_capability=0,
        ready=None,
    ),
    Capability(
        name="flashinfer",
        devices=frozenset({"cuda"}),
        dtypes=HALVES,
        query_dtypes=HALVES,
        head_dims=frozenset({64, 128, 256}),
        max_head_dim=256,
        has_window=False,
        has_tree=False,
        has_cap=False,
        has_graph=True,
        plans_on_host=True,
        is_deterministic=False,
        library="flashinfer",
        min_capability=80,
        ready=frozenset({("bfloat16", 128), ("bfloat16", 192)}),
        copied_dtypes=frozenset({FP8}),
        has_latent=frozenset({"prefill", "decode"}),
        latent_dims=(192, 128),
        absorbed_dims=(512, 64),
    ),
    Capability(
        name="triton",
        devices=frozenset({"cuda"}),
        dtypes=HALVES | {FP8},
        query_dtypes=HALVES,
        head_dims=None,
        max_head_dim=256,
        has_window=True,
        has_tree=True,
        has_cap=True,
        has_graph=True,
        plans_on_host=False,
        is_deterministic=True,
        library="triton",
        min_capability=80,
        ready=None,
        has_latent=frozenset({"prefill", "decode"}),
    ),
    Capability(
        name="sdpa",
        devices=frozenset({"cpu", "cuda"}),
        dtypes=HALVES | {"float32", FP8},
        query_dtypes=HALVES | {"float32"},
        head_dims=None,
        max_head_dim=1 << 16,
        has_window=True,
        has_tree=True,
        has_cap=False,
        has_graph=False,
        plans_on_host=False,
        is_deterministic=False,
        library=None,
        min_capability=0,
        ready=None,
        has_latent=frozenset({"prefill", "decode"}),
        has_relative=True,
    ),
)

# Best first: an open wish takes the first one that lacks nothing. FlashInfer's prefill is the faster
# one; our decode has no plan to make on the host before every step.
PREFERENCE: dict[Half, tuple[str, ...]] = {
    "prefill": ("native", "flashinfer", "triton", "sdpa"),
    "decode": ("native", "triton", "flashinfer", "sdpa"),
}


def lacks(row: Capability, need: Need, half: Half = "decode") -> list[str]:
    """Why this backend cannot serve this half of the runner; empty if it can.

    Trees are asked of the decode half only: it takes the batches with trees that the other cannot.
    """
    if need.device not in row.devices:
        runs_on = " or ".join(DEVICES[device][0] for device in sorted(row.devices))
        return [f"runs on {runs_on}, and this model runs on {DEVICES[need.device][1]}"]
    found = []
    query_dtype = need.query_dtype or need.dtype
    if query_dtype not in row.query_dtypes:
        found.append(f"computes in {_words(row.query_dtypes)}, not {query_dtype}")
    is_copied = _is_copied(row, need, half)
    if need.dtype != query_dtype and need.dtype not in row.dtypes and not is_copied:
        found.append(f"reads a KV cache in {_words(row.dtypes)}, not {_word(need.dtype)}")
    if is_copied and not need.has_triton:
        found.append(
            f"copies a KV cache in {_word(need.dtype)} with Triton, which is not installed"
        )
    if need.latent:
        found += _lacks_of_latents(row, need, half)
    elif row.head_dims is not None and need.head_dim not in row.head_dims:
        sizes = ", ".join(map(str, sorted(row.head_dims)))
        found.append(f"takes heads of {sizes}, not {need.head_dim}")
    elif need.head_dim > row.max_head_dim:
        found.append(f"takes heads of up to {row.max_head_dim}, not {need.head_dim}")
    if need.device == "cuda" and "cuda" in row.devices and 0 < need.capability:
        oldest = max(row.min_capability, 89 if need.dtype == FP8 and row.library else 0)
        if need.capability < oldest:
            found.append(
                f"needs a GPU of compute capability {_version(oldest)}, this one has "
                f"{_version(need.capability)}"
            )
    if need.relative and not row.has_relative:
        found.append("has no relative positions")
    if need.window and not row.has_window:
        found.append("has no sliding window")
    if need.cap and not row.has_cap:
        found.append("cannot cap scores")
    if need.tree and half == "decode" and not row.has_tree:
        found.append("cannot verify a tree of guesses")
    if need.deterministic and not row.is_deterministic:
        found.append("sums in an order that depends on the batch, which --deterministic forbids")
    match row.library:
        case "native" if not need.has_library:
            found.append("needs the compiled kernels, which are off or could not be built")
        case "flashinfer" if not need.has_flashinfer:
            found.append(need.flashinfer_trouble)
        case "triton" if not need.has_triton:
            found.append("needs the package triton, which is not installed")
    return found


def _lacks_of_latents(row: Capability, need: Need, half: Half) -> list[str]:
    if half not in row.has_latent:
        return [f"cannot {half} MLA"]
    if need.dtype == FP8:
        return [f"reads no latents in {_word(need.dtype)}"]
    found = []
    if half == "prefill":
        if row.latent_dims not in (None, dims := (need.head_dim, need.value_dim)):
            can, asked = _sizes(row.latent_dims), _sizes(dims)
            found.append(f"takes MLA's heads of {can} numbers, not {asked}")
        if row.name == "flashinfer" and not need.has_triton:
            found.append("joins its parts with Triton, which is not installed")
    elif row.absorbed_dims is not None:
        if row.absorbed_dims != need.absorbed_dims:
            can, asked = _sizes(row.absorbed_dims), _sizes(need.absorbed_dims)
            found.append(f"takes MLA's latents and rotated keys of {can} numbers, not {asked}")
        if need.heads & (need.heads - 1) or need.heads > MOST_HEADS:
            found.append(f"takes 1, 2, 4 .. {MOST_HEADS} heads of MLA, not {need.heads}")
        if need.query_dtype not in (None, need.dtype):
            found.append(f"reads latents in the type it computes in, not {_word(need.dtype)}")
    if row.name == "triton" and need.capability in LITTLE_MEMORY:
        here = _version(need.capability)
        found.append(
            f"needs more shared memory for MLA than a GPU of compute capability {here} has"
        )
    trouble = need.expanded_trouble if half == "prefill" else need.absorbed_trouble
    if row.library == "flashinfer" and trouble:
        found.append(trouble)
    return found


def is_ready(row: Capability, need: Need, half: Half) -> bool:
    """Whether it runs without minutes of compiling; an open wish takes no other."""
    if row.ready is None:
        return True
    query_dtype = need.query_dtype or need.dtype
    is_read = query_dtype == need.dtype or _is_copied(row, need, half)
    return is_read and (query_dtype, need.head_dim) in row.ready


def _is_copied(row: Capability, need: Need, half: Half) -> bool:
    return half == "prefill" and need.dtype in row.copied_dtypes


def can_record(name: str) -> bool:
    """Whether a decode step of this backend can be a CUDA graph."""
    return next(row.has_graph for row in TABLE if row.name == name)


def plans_on_host(name: str) -> bool:
    """Whether a recorded step needs the host to know its rows' lengths."""
    return next(row.plans_on_host for row in TABLE if row.name == name)


def _sizes(dims: tuple[int, int] | None) -> str:
    return " and ".join(map(str, dims or ()))


def _words(names: frozenset[str]) -> str:
    return ", ".join(sorted(map(_word, names)))


def _word(dtype: str) -> str:
    return FLAG_WORDS.get(dtype, dtype)


def _version(capability: int) -> str:
    return f"{capability // 10}.{capability % 10}"
