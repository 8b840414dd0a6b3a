"""What a runner takes of a GPU's memory besides its KV cache: weights, activations, graphs. Pure.

Activations. A step of T tokens has at its peak, in bytes of the compute type (b),

    T * b * (2 H + max(3 Q + 2 KV + H, 3 I + H))

the residual and its norm (2 H), and the larger of two moments: in attention the projected q, k and v,
q rotated, what attention gives back (3 Q + 2 KV together) and its projection (H); in the MLP gate and up
(2 I), their product (I) and its projection (H); with experts, for each that a token has its product (I)
and projection (H), and their sum (H). Layers come one after the other, so it is one layer's.
Behind the last one R rows have logits of V each: once as computed (b), three times in float32 while they
are sampled, and the counts of penalties (4 bytes). T is bounded by `max_step_tokens`, R by
`max_running`.

Graphs. All share one pool whose size is that of the largest, whose logits are sampled outside of it,
plus what the driver keeps of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from srt.config.experts import expert_inner, experts_per_token, num_experts
from srt.config.facts import ModelFacts
from srt.config.latent import expanded_bytes, is_latent

ITEM_BYTES: Mapping[str, int] = MappingProxyType(
    {"bfloat16": 2, "float16": 2, "float32": 4, "fp8_e4m3": 1}
)
WORKSPACE_BYTES = 400_000_000  # of cuBLAS and of the attention's plans and split sums
GRAPH_BYTES = 4_000_000  # kept by the driver for one captured decode step
CONTEXT_BYTES = 700_000_000  # CUDA's own context with its modules, before it can be measured
FLOAT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """Bytes beside weights and KV."""

    activations: int
    graphs: int

    @property
    def total(self) -> int:
        return self.activations + self.graphs + WORKSPACE_BYTES

    def __add__(self, other: Reserve) -> Reserve:
        """Of two runners that take turns: one's activations are free when the other computes."""
        return Reserve(
            activations=max(self.activations, other.activations), graphs=self.graphs + other.graphs
        )


def reserve_of(
    model: ModelFacts,
    dtype: str,
    *,
    step_tokens: int,
    rows: int,
    graph_sizes: Sequence[int],
    prefix_chunk: int = 0,
) -> Reserve:
    """step_tokens: most tokens of one step. rows: most requests of one step. prefix_chunk: tokens of
    prefixes whose K and V are made of their latents at once, beside those of the step."""
    largest = max(graph_sizes, default=0)
    pool = activation_bytes(model, dtype, tokens=largest, rows=0)
    pool += largest * model.vocab_size * ITEM_BYTES[dtype]
    expanded = 0
    if is_latent(model.architecture):
        tokens = step_tokens + prefix_chunk
        expanded = tokens * expanded_bytes(model, ITEM_BYTES[dtype])
    return Reserve(
        activations=activation_bytes(model, dtype, tokens=step_tokens, rows=rows) + expanded,
        graphs=pool + len(graph_sizes) * GRAPH_BYTES,
    )


def activation_bytes(model: ModelFacts, dtype: str, *, tokens: int, rows: int) -> int:
    """The peak of one step, by the formula above."""
    item = ITEM_BYTES[dtype]
    hidden = model.hidden_size
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    inner = int(model.config.get("intermediate_size") or 4 * hidden)
    moment = max(3 * queries + 2 * keys + hidden, 3 * inner + hidden)
    if num_experts(model.config):
        each = experts_per_token(model.config) * (expert_inner(model.config) + hidden)
        moment = max(moment, each + hidden)
    return tokens * item * (2 * hidden + moment) + rows * model.vocab_size * (item + 4 * FLOAT)


def weight_bytes(model: ModelFacts, dtype: str, quantization: str | None) -> int:
    """Of every parameter in the compute type, or as stored if the checkpoint is quantized, or with the
    linears in one byte each; the embedding stays as it is, and a tied head is then a second copy."""
    item = ITEM_BYTES[dtype]
    if quantization is None:
        return model.num_parameters * item
    if quantization == "int4" or (model.config.get("quantization_config") and model.stored_bytes):
        return model.stored_bytes or model.num_parameters * item // 4
    embedding = model.vocab_size * model.hidden_size
    head = embedding if model.config.get("tie_word_embeddings") else 0
    return embedding * item + model.num_parameters - embedding + head
