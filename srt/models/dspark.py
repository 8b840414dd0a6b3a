"""DSPARK's network: DFLASH's, with two small heads behind it.

    Markov head       logits of place j += W2 f(W1[token before j]), so guesses know of the one before:
                      vanilla   f(e) = e
                      gated     f(e) = sigmoid(G [x_j, e]) * e
                      rnn       f = tanh(o), with [g, c, o] = J [s, e, x_j] and the memory
                                s <- sigmoid(g) * s + (1 - sigmoid(g)) * tanh(c)
    confidence head   the chance that guess j is right if all before it are: sigmoid(w [x_j, e] + b)

x_j is the backbone's state, e = W1[token before j], of `markov_rank` channels. The checkpoint format is
that of the public DSpark drafts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.ops import Ops
from srt.layers.parameters import Parameter, Weights, linear, tensor
from srt.models.dflash import BlockNetwork, backbone_parameters, shape_of
from srt.models.draft import DraftSource, Lent

CONFIDENCE = "confidence_head.proj"


class DsparkNetwork:
    """N guesses, H hidden size, V vocabulary, M channels of memory: 0 unless the head is an rnn."""

    def __init__(
        self, source: DraftSource, weights: Weights, ops: Ops, cos_sin: torch.Tensor, lent: Lent
    ) -> None:
        self.backbone = BlockNetwork(source, weights, ops, cos_sin, lent)
        shape = self.backbone.shape
        self._kind = shape.markov
        self._rank = shape.markov_rank
        self._before = weights.tensors["markov.before"]
        self._after = weights.linears["markov.after"]
        self._mix = weights.linears.get("markov.mix")
        self._sees_token = shape.confidence_sees_token
        self._confidence = weights.tensors.get("confidence.weight")
        self._confidence_bias = weights.tensors.get("confidence.bias")

    @property
    def has_confidence(self) -> bool:
        return self._confidence is not None

    def memory(self, count: int) -> torch.Tensor:
        """[count, M], of blocks of which nothing was guessed yet."""
        return self._before.new_zeros(count, self._rank if self._kind == "rnn" else 0)

    def bias(
        self, before: torch.Tensor, states: torch.Tensor, memory: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the tokens `before` [N] int64 add to the logits of the places after them, [N, V], and
        their blocks' new memory. states [N, H] are those of these places."""
        known = F.embedding(before, self._before)
        if self._mix is None:
            return self._after(known), memory
        if self._kind == "gated":
            gate = self._mix(torch.cat((states, known), dim=1)).sigmoid()
            return self._after(gate * known), memory
        mixed = self._mix(torch.cat((memory, known, states), dim=1))
        gate, fresh, out = mixed.chunk(3, dim=1)
        gate = gate.sigmoid()
        memory = gate * memory + (1 - gate) * fresh.tanh()
        return self._after(out.tanh()), memory

    def confidence(self, before: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """[N] float32: how likely each guess is right if those before it in its block are."""
        assert self._confidence is not None and self._confidence_bias is not None
        seen = states
        if self._sees_token:
            seen = torch.cat((states, F.embedding(before, self._before)), dim=1)
        score = seen.float() @ self._confidence[0].float() + self._confidence_bias.float()
        return score.sigmoid()


class Dspark:
    """A `srt.models.draft.DraftFamily`."""

    @staticmethod
    def build(
        source: DraftSource, weights: Weights, ops: Ops, cos_sin: torch.Tensor, lent: Lent
    ) -> DsparkNetwork:
        return DsparkNetwork(source, weights, ops, cos_sin, lent)

    @staticmethod
    def parameters(source: DraftSource) -> list[Parameter]:
        arch = source.arch
        shape = shape_of(source)
        rank, hidden = shape.markov_rank, arch.hidden_size
        found = [
            *backbone_parameters(source),
            tensor("markov.before", "markov_head.markov_w1.weight", arch.vocab_size, rank),
            linear("markov.after", "markov_head.", {"markov_w2": arch.vocab_size}, rank),
        ]
        if shape.markov == "gated":
            mix = {"gate_proj": rank}
            found.append(linear("markov.mix", "markov_head.", mix, hidden + rank, bias=True))
        if shape.markov == "rnn":
            mix = {"joint_proj": 3 * rank}
            found.append(linear("markov.mix", "markov_head.", mix, 2 * rank + hidden, bias=True))
        if shape.has_confidence:
            width = hidden + (rank if shape.confidence_sees_token else 0)
            found.append(tensor("confidence.weight", f"{CONFIDENCE}.weight", 1, width))
            found.append(tensor("confidence.bias", f"{CONFIDENCE}.bias", 1))
        return found
