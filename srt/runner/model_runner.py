"""One model with its weights, KV pool and attention backends. Target and draft are the same class.

Everything that may differ between two runners in one process comes in through the `RunnerSpec` and
stays on the runner. Life: construct (stamps only), `load`, `allocate`, `init_backends`, `forward`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

import kernels.step_inputs
from kernels.linear import Linear
from kernels.moe import Experts
from kernels.ops import Ops
from srt.attention.select import BackendPair, select_backend
from srt.config.capability import Need
from srt.config.context import get_exec
from srt.config.facts import ModelFacts
from srt.config.runner_spec import RunnerSpec
from srt.layers.parameters import Parameter
from srt.layers.rope import build_cos_sin
from srt.layers.sharding import pack_own_experts, pack_share, shard
from srt.loading.checkpoint import Checkpoint, LoadConfig, open_checkpoint
from srt.loading.fill import Value, fill
from srt.loading.safetensors_files import tensor_names
from srt.loading.shards import as_stored, whole_rows
from srt.models.arch import arch_for
from srt.models.blocks import CausalModel, Taps
from srt.models.draft import DraftFamily, DraftSource, Lent
from srt.models.mtp import foreign_tensors
from srt.models.registry import model_family
from srt.models.stack import StackDecoder
from srt.parallel.group import ALONE, Group
from srt.protocols.attention import Attention, AttentionBackend, AttentionBatch
from srt.protocols.forward_batch import ForwardBatch, Slice, TableWrite
from srt.protocols.kv_pool import KVPool
from srt.quant.methods import quantization_of
from srt.quant.stored import KEY
from srt.runner.attention_pair import (
    resolve_attention_backend_strs,
    resolve_draft_attention_backend,
)
from srt.runner.dtypes import torch_dtype
from srt.runner.families import attention_of, build_pool
from srt.runner.inputs import StepInputs, build_inputs, locate, send_nowhere
from srt.runner.page_table import Ints, PageTable
from srt.runner.staging import Array, Staging

Progress = Callable[[str, float], None]


def quiet(phase: str, fraction: float) -> None:
    """A progress callback that shows nothing."""


class ModelRunner:
    """Stamps, all set before anything is built: role, context_length, load_format, dtype,
    kv_cache_dtype, quantization and the (prefill, decode) pair of attention backends."""

    def __init__(
        self,
        spec: RunnerSpec,
        facts: ModelFacts,
        *,
        ops: Ops,
        device: torch.device,
        seed: int,
        draft_attention_backend: str | None = None,
        network: DraftFamily | None = None,
        lent: Lent | None = None,
        group: Group = ALONE,
        forced_even: bool = False,
    ) -> None:
        """`draft_attention_backend`: what the algorithm of a draft asks for; a target ignores it.
        `network` and `lent`: a draft that is no model of its own, and what the target lends it. `group`:
        whose ranks have a share of the model each. `forced_even`: see `kernels.moe.Routing`. Raises
        ConfigError for a model, type or backend that cannot run here."""
        self.spec = spec
        self.role = spec.role
        self.context_length = spec.context_length
        self.load_format = spec.load_format
        self.quantization = spec.quantization
        self.dtype = torch_dtype(spec.dtype, "dtype")
        self.kv_cache_dtype = torch_dtype(spec.kv_cache_dtype, "kv_cache_dtype")
        self.device = device
        self.seed = seed
        self.ops = ops
        self.step_ops = kernels.step_inputs.select(ops.implementation)
        self.facts = facts
        # On a CPU it is settled by which kernels are chosen.
        # A draft's sums may depend on the batch: what it guesses changes no answer.
        is_bound = device.type == "cuda" and spec.role == "target"
        self.deterministic = is_bound and get_exec().deterministic
        self.group = group
        whole = arch_for(facts, group.size)
        self._whole = whole.with_forced_routing() if forced_even else whole
        self.arch = self._whole.share(group.size)
        self.draft_attention_backend = resolve_draft_attention_backend(
            spec, draft_attention_backend
        )
        self.attention_pair = self._select_pair()
        self._draft_family = network
        self._lent = lent
        self._model_family = None if network is not None else model_family(facts.architecture)
        self._model: CausalModel | None = None
        self._network: object | None = None
        self._pool: KVPool | None = None
        self._backend: AttentionBackend | None = None
        self._table: PageTable | None = None
        self.last_tokens = torch.empty(0, dtype=torch.int64, device=device)
        self._tap_layers: tuple[int, ...] = ()
        self.features: torch.Tensor | None = None
        self.weight_bytes = 0

    @property
    def kv_bytes_per_token(self) -> int:
        relative = self.arch.relative
        state = 0 if relative is None else relative.state_bytes
        return self.arch.kv_items * self.kv_cache_dtype.itemsize + state

    @property
    def network(self) -> object:
        """The draft network that was loaded; whoever calls it knows what it is."""
        assert self._network is not None, "load comes first, and a whole model has none"
        return self._network

    @property
    def backend(self) -> AttentionBackend:
        assert self._backend is not None, "init_backends comes first"
        return self._backend

    @property
    def pool(self) -> KVPool:
        assert self._pool is not None, "allocate comes first"
        return self._pool

    @property
    def table(self) -> PageTable:
        assert self._table is not None, "allocate comes first"
        return self._table

    def load(self, progress: Progress = quiet) -> None:
        """Reads, converts and packs the weights. Raises ConfigError naming the tensor at fault."""
        config = self.build_load_config(self._draft_load_format())
        source = self._draft_source(config)
        parameters = self._parameters(source)
        checkpoint = self._open(config, parameters)
        own = shard(parameters, self.arch.head_dim, self.group)
        weights = fill(
            as_stored(own) if config.load_format == "sharded" else own,
            checkpoint.tensors,
            dtype=self.dtype,
            device=self.device,
            pack=self._pack,
            pack_experts=self._pack_experts,
            origin=str(config.path),
            progress=lambda fraction: progress("weights", fraction),
        )
        cos_sin = build_cos_sin(
            self.arch.rope, self.context_length, self.device, checkpoint.rope_divisors
        )
        if self._model_family is not None:
            self._model = self._model_family.build(self.arch, weights, self.ops, cos_sin)
        else:
            assert self._draft_family is not None and self._lent is not None
            self._network = self._draft_family.build(source, weights, self.ops, cos_sin, self._lent)
        self.weight_bytes = sum(value.nbytes for value in weights.tensors.values())
        self.weight_bytes += sum(packed.bytes for packed in weights.linears.values())
        self.weight_bytes += sum(packed.bytes for packed in weights.experts.values())

    def lend(self) -> Lent:
        """What a draft network borrows of this runner's model, after `load`."""
        model = self._model
        assert isinstance(model, StackDecoder), "drafts do not lend"
        return Lent(
            num_layers=self.arch.num_layers,
            hidden_size=self.arch.hidden_size,
            embedding=model.embedding,
            head=model.head,
            head_rows=self._head_rows,
        )

    def _head_rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The packed head cannot be cut; a tied one is the embedding, another is read once more."""
        model = self._model
        assert isinstance(model, StackDecoder)
        if self.arch.tied:
            return model.embedding[token_ids]
        config = self.build_load_config(self._draft_load_format())
        if config.load_format == "sharded":
            return whole_rows(config.path, "head").to(self.device, self.dtype)[token_ids]
        parameters = self._parameters(self._draft_source(config))
        [part] = next(each for each in parameters if each.name == "head").parts
        checkpoint = self._open(config, parameters)
        found = next(value for name, value in checkpoint.tensors if name == part.source)
        assert isinstance(found, torch.Tensor), "heads are not quantized in checkpoints"
        return found.to(device=self.device, dtype=self.dtype)[token_ids]

    def _open(self, config: LoadConfig, parameters: list[Parameter]) -> Checkpoint:
        return open_checkpoint(
            config.path,
            config.load_format,
            self.facts,
            parameters,
            dtype=self.dtype,
            seed=self.seed,
            device=self.device,
            is_foreign=foreign_tensors(self.facts.config, self.spec.step),
            rank=self.group.rank,
            ranks=self.group.size,
        )

    def _draft_source(self, config: LoadConfig) -> DraftSource:
        has_names = self._draft_family is not None and config.load_format == "safetensors"
        return DraftSource(
            arch=self.arch,
            config=self.facts.config,
            stored=tensor_names(config.path) if has_names else frozenset(),
            quantization=self.quantization,
        )

    def _parameters(self, source: DraftSource) -> list[Parameter]:
        if self._model_family is not None:
            return self._model_family.parameters(self._whole)
        assert self._draft_family is not None
        return self._draft_family.parameters(source)

    def allocate(
        self, *, num_pages: int, page_size: int, max_rows: int, table: PageTable | None = None
    ) -> None:
        """The KV pool and the per-row tables; former ones make room first. A draft gets the target's
        `table`: it shares its rows and slots, and fills planes of its own there."""
        self._pool = self._backend = None
        self._pool = build_pool(
            self.arch, num_pages=num_pages, page_size=page_size, dtype=self.kv_cache_dtype,
            device=self.device,
        )  # fmt: skip
        max_pages = -(-self.context_length // page_size)
        self._table = table or PageTable(max_rows=max_rows, max_pages=max_pages, device=self.device)
        self.last_tokens = torch.zeros(max_rows + 1, dtype=torch.int64, device=self.device)

    def capture(self, layers: tuple[int, ...]) -> None:
        """From now on every forward leaves in `features` what its tokens were like at these layers, see
        `Taps`: [T, len(layers) * H], side by side, valid until the next one."""
        known = self.arch.num_layers
        assert list(layers) == sorted(set(layers)) and all(0 <= layer <= known for layer in layers)
        self._tap_layers = layers

    def init_backends(self) -> None:
        """Builds the stamped pair; nothing configured may change afterwards."""
        self._backend = attention_of(
            self._model,
            self.arch,
            self.ops,
            self.spec,
            self.attention_pair,
            deterministic=self.deterministic,
            narrow=self.kv_cache_dtype.itemsize == 1,
        )

    def write_table(self, writes: list[TableWrite]) -> None:
        self.table.write(writes)

    def prepare(self, batch: ForwardBatch) -> StepInputs:
        """Applies the step's table writes and builds its tensors."""
        assert self._backend is not None
        self.write_table(batch.table_writes)
        inputs = build_inputs(batch, self.table, self.last_tokens, self.pool.page_size, self._send)
        self._backend.plan(inputs.attention)
        return inputs

    def prepare_on(
        self, staging: Staging, batch: ForwardBatch, where: Ints, pages: Ints
    ) -> StepInputs:
        """Like `prepare`, by way of `staging`; `where` and `pages` are what `PageTable.note` gave."""
        if len(where):
            self.apply_table(*staging.send([where, pages]))
        inputs = build_inputs(
            batch, self.table, self.last_tokens, self.pool.page_size, staging.send
        )
        self.backend.plan(inputs.attention)
        return inputs

    def _send(self, arrays: Sequence[Array]) -> list[torch.Tensor]:
        return [tensor.to(self.device) for tensor in send_nowhere(arrays)]

    def apply_table(self, where: torch.Tensor, pages: torch.Tensor) -> None:
        """Brings the device's page table up to date: both [N] int32, see `PageTable.note`."""
        self.step_ops.write_table(self.table.tensor, where, pages)

    def model_forward(
        self, token_ids: torch.Tensor, batch: AttentionBatch, attention: Attention
    ) -> torch.Tensor:
        """Hidden states of every token, [T, H], for a batch that is planned; nothing is tapped."""
        assert self._model is not None
        return self._model.forward(token_ids, batch, self.pool, attention, None, None)

    def tapped_forward(
        self, token_ids: torch.Tensor, batch: AttentionBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`model_forward` with the runner's own attention, and the features of every token, [T, F]."""
        assert self._model is not None
        taps = Taps(layers=self._tap_layers)
        hidden = self._model.forward(token_ids, batch, self.pool, self.backend, None, taps)
        return hidden, torch.cat(taps.taken, dim=1)

    def locate(self, slices: list[Slice]) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions and slots of the slices' tokens, [T] int64 each; nothing is planned for them."""
        return locate(slices, self.table, self.pool.page_size)

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        """Hidden states of the kept tokens, [K, H]. K and V of all the step's tokens are written."""
        assert self._model is not None and self._backend is not None
        taps = Taps(layers=self._tap_layers) if self._tap_layers else None
        hidden = self._model.forward(
            inputs.token_ids, inputs.attention, self.pool, self._backend, inputs.keep, taps
        )
        self.features = None if taps is None else torch.cat(taps.taken, dim=1)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, H] -> [S, V] float32."""
        assert self._model is not None
        return self._model.logits(hidden)

    def remember(self, rows: list[int], tokens: torch.Tensor) -> None:
        """`tokens` [len(rows)] int64 become the rows' last tokens, read by their next decode slice."""
        self.last_tokens[rows] = tokens

    def build_load_config(self, load_format: str | None = None) -> LoadConfig:
        """Where the weights are and how they are stored; None: as the runner's spec says."""
        path = Path(self.spec.model_path)
        return LoadConfig(path=path, load_format=load_format or self.load_format)

    def _draft_load_format(self) -> str | None:
        """A draft's own load format; a target has none."""
        return self.load_format if self.role == "draft" else None

    def _select_pair(self) -> BackendPair:
        is_cuda = self.device.type == "cuda"
        major, minor = torch.cuda.get_device_capability(self.device) if is_cuda else (0, 0)
        need = Need(
            device=self.device.type,
            dtype=str(self.kv_cache_dtype).removeprefix("torch."),
            query_dtype=self.spec.dtype,
            head_dim=self.arch.head_dim,
            latent=self.arch.latent is not None,
            value_dim=self.arch.value_dim,
            absorbed_dims=self.arch.absorbed_dims,
            heads=self.arch.num_heads,
            relative=self.arch.relative is not None,
            window=any(window is not None for window in self.arch.windows),
            has_library=self.ops.implementation == "native",
            capability=10 * major + minor,
            has_flashinfer=find_spec("flashinfer") is not None,
            has_triton=find_spec("triton") is not None,
            deterministic=self.deterministic,
        )
        wish = resolve_attention_backend_strs(self)
        fields = ("prefill_attention_backend", "decode_attention_backend")
        if wish.is_draft_override:
            fields = ("speculative_draft_attention_backend",) * 2
        return BackendPair(
            prefill=select_backend(wish.prefill, need, fields[0], "prefill"),
            decode=select_backend(wish.decode, need, fields[1], "decode"),
        )

    def _pack(self, name: str, weight: Value, bias: torch.Tensor | None) -> Linear:
        pack = partial(
            self.ops.pack_linear,
            quantization=self._method_of(name),
            out_dtype=torch.float32 if name == "head" or name.endswith(".router") else None,
            gated=self.ops.implementation == "triton" and name.endswith(".gate_up"),
            invariant=self.deterministic,
        )
        return pack_share(name, weight, bias, pack, self.group, self.arch.vocab_size)

    def _method_of(self, name: str) -> str | None:
        """What a quantized checkpoint leaves as it is stays so."""
        is_stored = self.load_format == "safetensors" and bool(self.facts.config.get(KEY))
        return None if is_stored else quantization_of(name, self.quantization)

    def _pack_experts(self, name: str, gate_up: Value, down: Value) -> Experts:
        assert self.arch.moe is not None, name
        method = self._method_of(name)
        count = self.arch.moe.num_experts
        pack = self.ops.moe.pack_experts
        return pack_own_experts(
            gate_up, down, count, method, pack, self.group, invariant=self.deterministic
        )
