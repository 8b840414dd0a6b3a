"""Inkling's text model, as the transformers library computes it: relative positions, windows in most
layers, short convolutions (of K, V, attention and MLP), and experts of which some are shared.

The router scores shared experts too: they take part in the softmax over the chosen ones' log-sigmoids,
and so drain weight from them. Here they are experts like the others, behind them in one stack, which
every token has.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.linear import Linear
from kernels.moe import Experts
from kernels.ops import Ops
from srt.attention.relative import RelativeAttention
from srt.cache.state_pool import StatePool
from srt.config.context import get_model
from srt.errors import ConfigError
from srt.layers.convolution import PastPlan, convolve, plan_past
from srt.layers.moe import MoeArch
from srt.layers.parameters import Weights
from srt.layers.relative import RelativeLayer, stretch
from srt.models.arch import Arch
from srt.models.blocks import GatedMlp, Taps
from srt.protocols.attention import Attention, AttentionBatch
from srt.protocols.kv_pool import KVPool


def one_scale(scale: torch.Tensor, name: str) -> torch.Tensor:
    """The one number that a stack of experts is scaled by, [1] float32, of a checkpoint's [n]. Noise in
    its place (load format dummy, of whichever runner is loading) becomes ones, so that a model of noise
    computes at the size of a real one. Raises ConfigError if real ones differ."""
    if get_model().load_format == "dummy":
        return torch.ones(1, device=scale.device)
    flat = scale.float().flatten()
    if not bool((flat == flat[0]).all()):
        raise ConfigError(
            f"{name} is not one number but several ({flat.min():g} to {flat.max():g}); shared experts "
            "are computed in one stack with the others, which has one scale; reshard the checkpoint so "
            "that its parts have a common scale"
        )
    return flat[:1]


class SinkRouter:
    """Which experts a token has, and with what weights; the shared ones come last."""

    def __init__(self, weights: Weights, name: str, moe: MoeArch) -> None:
        self._router: Linear = weights.linears[f"{name}.router"]
        self._bias = weights.tensors[f"{name}.router_bias"].float()
        self._scale = one_scale(weights.tensors[f"{name}.router_scale"], f"{name}.router_scale")
        self._routing = moe.routing

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, H] -> weights [T, k + shared] float32 and experts [T, k + shared] int32."""
        routing = self._routing
        logits = self._router(x)
        count, shared = routing.num_experts, routing.shared
        own = logits[:, :count]
        if routing.forced_even:
            places = torch.arange(len(x) * routing.top_k, device=x.device)
            chosen = places.view(len(x), routing.top_k) % count
        else:
            chosen = (own.sigmoid() + self._bias).topk(routing.top_k, dim=-1).indices
        drains = torch.arange(count, count + shared, device=x.device).expand(len(x), -1)
        scores = F.logsigmoid(torch.cat([own.gather(1, chosen), logits[:, count:]], dim=1))
        parts = scores.softmax(dim=-1) * (routing.scale * self._scale)
        return parts.to(x.dtype).float(), torch.cat([chosen, drains], dim=1).to(torch.int32)


class InklingMlp:
    """A dense one, or one of experts."""

    def __init__(self, arch: Arch, weights: Weights, index: int, ops: Ops) -> None:
        name = f"layers.{index}"
        moe = arch.moe
        assert moe is not None
        self._route: SinkRouter | None = None
        if index in moe.layers:
            self._route = SinkRouter(weights, name, moe)
            self._experts: Experts = weights.experts[name]
        else:
            self._dense = GatedMlp(weights, name, ops)
            scale = weights.tensors[f"{name}.scale"]
            self._scale = one_scale(scale, f"{name}.scale")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._route is not None:
            return self._experts(x, *self._route(x))
        return self._dense(x) * self._scale.to(x.dtype)


class InklingLayer:
    """x is normed before each half, and each half's result convolved before it is added."""

    def __init__(self, arch: Arch, weights: Weights, index: int, ops: Ops) -> None:
        assert arch.relative is not None
        name, tensors = f"layers.{index}", weights.tensors
        self.index = index
        self.shape: RelativeLayer = arch.relative.layers[index]
        self._arch, self._alpha, self._ops = arch, arch.relative.alpha, ops
        self._inputs = weights.linears[f"{name}.inputs"]
        self._out = weights.linears[f"{name}.out"]
        self._q_norm, self._k_norm = tensors[f"{name}.q_norm"], tensors[f"{name}.k_norm"]
        self._bank = tensors[f"{name}.bank"]
        self._mlp = InklingMlp(arch, weights, index, ops)
        self._input_norm, self._mlp_norm = (
            tensors[f"{name}.input_norm"],
            tensors[f"{name}.mlp_norm"],
        )
        self._taps = {
            kind: tensors[f"{name}.{kind}_taps"].float().squeeze(1).T.contiguous()
            for kind in ("k", "v", "attention", "mlp")
        }

    def __call__(
        self,
        stream: torch.Tensor,
        batch: AttentionBatch,
        past: PastPlan,
        pool: StatePool,
        attention: RelativeAttention,
    ) -> torch.Tensor:
        eps, size, hidden = self._arch.norm_eps, self.shape.kv_size, self._arch.hidden_size
        memory = torch.split(pool.memory(self.index), [size, size, hidden, hidden], dim=1)
        x = self._ops.rms_norm(stream, self._input_norm, eps)
        x = self._attend(x, batch, past, pool, memory, attention)
        stream = stream + convolve(x, self._taps["attention"], past, memory[2])
        x = self._mlp(self._ops.rms_norm(stream, self._mlp_norm, eps))
        return stream + convolve(x, self._taps["mlp"], past, memory[3])

    def _attend(
        self,
        x: torch.Tensor,
        batch: AttentionBatch,
        past: PastPlan,
        pool: StatePool,
        memory: tuple[torch.Tensor, ...],
        attention: RelativeAttention,
    ) -> torch.Tensor:
        shape, eps = self.shape, self._arch.norm_eps
        made = self._inputs(x)
        rest = made.shape[1] - shape.q_size - 2 * shape.kv_size
        q, k, v, r = torch.split(made, [shape.q_size, shape.kv_size, shape.kv_size, rest], dim=1)
        k = convolve(k, self._taps["k"], past, memory[0])
        v = convolve(v, self._taps["v"], past, memory[1])
        q = self._norm_heads(q, self._q_norm, eps)
        keys, values = pool.keys(self.index), pool.values(self.index)
        keys[batch.slots] = self._norm_heads(k, self._k_norm, eps).to(keys.dtype)
        values[batch.slots] = v.view(len(x), -1, shape.head_dim).to(values.dtype)
        biases = r.reshape(len(x), shape.num_heads, -1) @ self._bank
        if shape.floor is not None:
            longer = stretch(batch.positions, shape.floor, self._alpha)[:, None, None]
            q, biases = (q.float() * longer).to(q.dtype), (biases.float() * longer).to(q.dtype)
        out = attention.related(
            q, biases, self.index, pool, scale=1 / shape.head_dim, window=shape.window
        )
        return self._out(out.reshape(len(x), -1))

    def _norm_heads(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """[T, heads * head_dim] -> [T, heads, head_dim], each head by itself."""
        size = self.shape.head_dim
        normed = self._ops.rms_norm(x.reshape(-1, size), weight, eps)
        return normed.view(len(x), -1, size)


class InklingModel:
    """See `srt.models.blocks.CausalModel` for the contract."""

    def __init__(self, arch: Arch, weights: Weights, ops: Ops) -> None:
        assert arch.relative is not None
        self._arch, self._relative, self._ops = arch, arch.relative, ops
        self._embedding = weights.tensors["embedding"]
        self._embedding_norm = weights.tensors["embedding_norm"]
        self._layers = [InklingLayer(arch, weights, i, ops) for i in range(arch.num_layers)]
        self._norm = weights.tensors["norm"]
        self._head = weights.linears["head"]

    def forward(
        self,
        token_ids: torch.Tensor,
        batch: AttentionBatch,
        pool: KVPool,
        attention: Attention,
        keep: torch.Tensor | None,
        taps: Taps | None = None,
    ) -> torch.Tensor:
        assert isinstance(pool, StatePool) and isinstance(attention, RelativeAttention)
        eps = self._arch.norm_eps
        past = plan_past(batch, self._relative.taps)
        embedded = self._ops.embed(token_ids, self._embedding)
        stream = self._ops.rms_norm(embedded, self._embedding_norm, eps)
        for layer in self._layers:
            if taps is not None:
                taps.take(layer.index, stream)
            stream = layer(stream, batch, past, pool, attention)
        x = self._ops.rms_norm(stream, self._norm, eps)
        if taps is not None:
            taps.take(self._arch.num_layers, x)
        return x if keep is None else x[keep]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head(hidden / self._relative.divisor)
