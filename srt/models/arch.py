"""A checkpoint's config.json as typed numbers. Unknown kinds are refused by name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from srt.config.facts import ModelFacts
from srt.config.latent import is_latent
from srt.errors import ConfigError
from srt.layers.latent import LatentArch
from srt.layers.moe import MoeArch
from srt.layers.relative import RelativeArch
from srt.layers.rope import RopeScaling, read_rope_scaling
from srt.models.arch_moe import read_moe
from srt.models.arch_parts import need, read_latent
from srt.models.arch_relative import read_relative


@dataclass(frozen=True, slots=True, kw_only=True)
class Arch:
    """What a dense decoder of the Llama kind needs to know about itself.

    `windows` has one entry per layer: how many tokens back a token sees, itself included; None: all.
    `latent`: attention is MLA, and `head_dim` is that of its queries. `moe`: some layers have experts.
    `relative`: layers that differ in their heads, and see distances, see `srt.layers.relative`.
    """

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    tied: bool
    attention_bias: bool
    mlp_bias: bool
    rope: RopeScaling
    windows: tuple[int | None, ...]
    moe: MoeArch | None = None
    latent: LatentArch | None = None
    relative: RelativeArch | None = None

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def value_dim(self) -> int:
        """Of what a head's attention gives back."""
        return self.head_dim if self.latent is None else self.latent.value

    @property
    def absorbed_dims(self) -> tuple[int, int]:
        """Of MLA's latent and rotated key; (0, 0) without."""
        return (0, 0) if self.latent is None else (self.latent.rank, self.latent.rope)

    @property
    def kv_items(self) -> int:
        """Numbers that a token leaves in the KV cache, over all layers."""
        if self.relative is not None:
            return self.relative.kv_items
        return self.num_layers * (2 * self.kv_size if self.latent is None else self.latent.width)

    def with_shared_experts(self) -> Arch:
        """The MLP that every token passes is one of the experts, or several, where it is as wide: two
        launches less in a layer."""
        moe = self.moe
        if moe is None or not moe.shared_inner or moe.shared_inner % moe.inner:
            return self
        routing = replace(moe.routing, shared=moe.shared_inner // moe.inner)
        return replace(self, moe=replace(moe, routing=routing))

    def with_forced_routing(self) -> Arch:
        """For measuring: tokens get experts in turn."""
        assert self.moe is not None
        routing = replace(self.moe.routing, forced_even=True)
        return replace(self, moe=replace(self.moe, routing=routing))

    def share(self, size: int) -> Arch:
        """What one of `size` ranks computes: its heads, and its part of the MLP."""
        return replace(
            self,
            num_heads=self.num_heads // size,
            num_kv_heads=max(1, self.num_kv_heads // size),
            intermediate_size=self.intermediate_size // size,
        )


def arch_for(facts: ModelFacts, ranks: int) -> Arch:
    """The whole model as so many ranks compute it. Several would have to wait for the one who has what
    all tokens want, so shared experts join the others on one rank only. Raises as `read_arch`."""
    whole = read_arch(facts)
    return whole.with_shared_experts() if ranks == 1 else whole


def read_arch(facts: ModelFacts) -> Arch:
    """Raises ConfigError naming the key that this engine cannot honour."""
    config = facts.config
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ConfigError(
            f"{facts.name}: hidden_act {activation!r} is not implemented for "
            f"{facts.architecture}, only silu"
        )
    latent = read_latent(facts) if is_latent(facts.architecture) else None
    head_dim = facts.head_dim if latent is None else latent.query
    return Arch(
        name=facts.architecture,
        num_layers=facts.num_layers,
        hidden_size=facts.hidden_size,
        intermediate_size=need(config, "intermediate_size", facts.name),
        num_heads=facts.num_heads,
        num_kv_heads=facts.num_kv_heads,
        head_dim=head_dim,
        vocab_size=facts.vocab_size,
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        tied=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
        rope=read_rope_scaling(config, head_dim if latent is None else latent.rope, facts.name),
        windows=_windows(config, facts.num_layers),
        moe=read_moe(facts),
        latent=latent,
        relative=read_relative(facts),
    )


def _windows(config: dict[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Mistral gives one window for all layers. Qwen gives one, a switch, and the layers it is for:
    `layer_types` in newer files, all from `max_window_layers` on in older ones."""
    window = config.get("sliding_window")
    if not window or not config.get("use_sliding_window", True):
        return (None,) * num_layers
    kinds = config.get("layer_types")
    if kinds is not None:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    first = config.get("max_window_layers", 0)
    return tuple(window if layer >= first else None for layer in range(num_layers))
