"""How many processes divide the model among themselves, and whether it can be divided so.

Each rank has whole heads, a part of the MLP's inner size and a part of the vocabulary. KV heads may be
fewer than ranks: then several ranks keep the same one.
"""

from __future__ import annotations

from srt.config.args import ServerArgs
from srt.config.decisions import Decisions
from srt.config.experts import KEYS as EXPERT_KEYS
from srt.config.facts import Facts, ModelFacts
from srt.config.inkling import is_inkling
from srt.config.latent import is_latent
from srt.errors import ConfigError

FLAG = "--tensor-parallel-size"


def decide_parallel(args: ServerArgs, facts: Facts, is_gpu: bool, decisions: Decisions) -> None:
    """The number of ranks. Raises ConfigError with the numbers that do not go into each other."""
    size, model = args.tensor_parallel_size, facts.model
    _decide_sums(args, is_gpu, decisions)
    if model.format == "sharded" and args.load_format != "dummy":
        check_ranks(model, size)
    if size == 1:
        decisions.default("tensor_parallel_size")
        return
    if model.format == "script":
        raise ConfigError(f"{FLAG} {size}: {model.name} is a script, there is nothing to divide")
    if args.inline:
        raise ConfigError(
            f"{FLAG} {size} means {size} processes, --inline means one; leave one of the two out"
        )
    if args.deterministic and size > 2:
        raise ConfigError(
            f"{FLAG} {size} and --deterministic: in which order the parts of more than two ranks are "
            "added depends on how large the step is; allowed with it: 1, 2"
        )
    num_gpus = len(facts.machine.gpus)
    if is_gpu and size > num_gpus:
        raise ConfigError(
            f"{FLAG} {size} needs {size} GPUs, one for each rank; this machine has {num_gpus} that can "
            "be used"
        )
    trouble = why_not(model, size)
    if trouble:
        fitting = [n for n in range(1, model.num_heads + 1) if not why_not(model, n)]
        raise ConfigError(
            f"{FLAG} {size}: {model.name} has {trouble}; allowed: {', '.join(map(str, fitting))}"
        )
    source, reason = decisions.asked("tensor_parallel_size")
    kv_heads = kv_heads_of_rank(model.num_kv_heads, size)
    copies = kv_heads * size // model.num_kv_heads
    kept = f"{kv_heads} of {model.num_kv_heads} KV heads"
    kept += f", which {copies} ranks share" if copies > 1 else ""
    decisions.decide(
        "tensor_parallel_size",
        size,
        f"{reason}; each rank has {model.num_heads // size} of {model.num_heads} heads and "
        + ("all latents" if is_latent(model.architecture) else kept),
        source=source,
    )


def _decide_sums(args: ServerArgs, is_gpu: bool, decisions: Decisions) -> None:
    if args.rank_sums == "direct" and (args.tensor_parallel_size == 1 or not is_gpu):
        raise ConfigError(
            "--rank-sums direct is for several GPUs (--tensor-parallel-size); allowed here: library"
        )
    library = "NCCL" if is_gpu else "gloo"
    nothing = "one rank has nothing to add"
    reason = f"{library} adds" if args.tensor_parallel_size > 1 else nothing
    decisions.choose("rank_sums", args.rank_sums, "library", reason)


def check_ranks(model: ModelFacts, ranks: int) -> str:
    """For how many ranks a sharded folder is, in words. Raises ConfigError if it is for others."""
    stored = f"{model.shards} rank" + ("" if model.shards == 1 else "s")
    if ranks != model.shards:
        raise ConfigError(
            f"--tensor-parallel-size {ranks}: {model.path} was sharded for {stored}; allowed: "
            f"{model.shards}, or divide the model again with `tandem model shard`"
        )
    return stored


def why_not(model: ModelFacts, size: int) -> str | None:
    """What of the model cannot be divided by `size`."""
    if size == 1:
        return None
    if is_inkling(model.architecture):
        return "short convolutions, which ranks cannot divide yet"
    heads, kv_heads = model.num_heads, model.num_kv_heads
    if heads % size:
        return f"{heads} attention heads, which {size} ranks cannot divide"
    if kv_heads % size and size % kv_heads:
        return f"{kv_heads} KV heads, which {size} ranks can neither divide nor share evenly"
    for key in ("intermediate_size", *EXPERT_KEYS):
        count = model.config.get(key)
        if isinstance(count, int) and count % size:
            return f"{key} {count}, which {size} ranks cannot divide"
    return None


def check_int4(model: ModelFacts, size: int) -> None:
    """Raises ConfigError for int4 weights whose inputs cannot be cut: a group of columns has a scale,
    and lies in memory in units of up to 128."""
    found = model.config.get("quantization_config") or {}
    unit = min(128, 2 * int(found.get("group_size") or found.get("q_group_size") or 128))
    inputs = {"heads": model.num_heads * model.head_dim}
    inputs["intermediate_size"] = int(model.config.get("intermediate_size") or 0)
    for name, count in inputs.items():
        if size > 1 and count // size % unit:
            raise ConfigError(
                f"{FLAG} {size}: {model.name} has int4 weights, which are cut in units of {unit} "
                f"inputs, and {name} of {count} give a rank {count // size}"
            )


def bytes_of_rank(total: int, replicated: int, size: int) -> int:
    """Of weights of `total` bytes, of which every rank has `replicated`."""
    whole = min(replicated, total)
    return whole + (total - whole) // size


def kv_heads_of_rank(num_kv_heads: int, size: int) -> int:
    """At least one: where there are fewer than ranks, several ranks keep the same."""
    return max(1, num_kv_heads // size)
