"""For which decode batch sizes a CUDA graph is captured. A batch is padded up to the next size."""

from __future__ import annotations

from srt.config.args import ServerArgs
from srt.config.capability import can_record
from srt.config.decisions import Decisions
from srt.config.experts import num_experts
from srt.config.facts import GpuFacts, ModelFacts
from srt.errors import ConfigError

SMALL = (1, 2, 4, 8)
STEPS = ((64, 8), (128, 16), (512, 32))  # (up to, every)

PREFILL_TOKENS = 2048  # of the largest graph, however small the model
BUSY_OPERATIONS = (
    180e9  # of a layer: they take a GPU as long, 0.28 ms, as its launches take the host
)
LEAST_TOKENS = 16
PREFILL_STEPS = ((128, 16), (512, 64), (1024, 128), (8192, 512))  # (up to, every)

Sizes = tuple[tuple[int, ...], str, str]  # sizes, source, reason


def decide_graphs(
    args: ServerArgs, gpu: GpuFacts | None, decode: str, rows: int, decisions: Decisions
) -> Sizes:
    """rows: requests that run at once. Raises ConfigError for sizes that cannot be captured."""
    asked = args.cuda_graph_sizes
    sizes = () if asked is None else tuple(sorted({size for size in asked if size != 0}))
    lack = None
    if gpu is None:
        lack = "a CPU runs eagerly"
    elif not can_record(decode):
        lack = f"decode attention {decode} cannot be captured"
    if asked is None:
        if lack is not None:
            return (), "rule", lack
        return (
            default_sizes(rows),
            "rule",
            f"every decode batch up to {rows} requests, padded a little",
        )
    if sizes and lack is not None:
        raise ConfigError(
            f"--cuda-graph-sizes {_words(sizes)} was asked for, but {lack}; allowed: 0, or leave it out"
        )
    if sizes and (sizes[0] < 0 or sizes[-1] > rows):
        raise ConfigError(
            f"--cuda-graph-sizes {_words(sizes)} was asked for, but a decode step has 1 to {rows} "
            f"requests (--max-running); allowed: sizes from 1 to {rows}"
        )
    source, reason = decisions.asked("cuda_graph_sizes")
    return sizes, source, reason


def default_sizes(rows: int) -> tuple[int, ...]:
    """1, 2, 4, 8, then every 8 to 64, every 16 to 128, every 32 to 512; none above `rows`, and `rows`
    itself if it is no more than 512: larger batches take long enough to launch them eagerly."""
    sizes, low = list(SMALL), SMALL[-1]
    for most, step in STEPS:
        sizes += range(low + step, most + 1, step)
        low = most
    last = min(rows, low)
    return (*(size for size in sizes if size < last), last)


def decide_prefill_graphs(
    args: ServerArgs,
    model: ModelFacts,
    decode: tuple[int, ...],
    step_tokens: int,
    decisions: Decisions,
) -> Sizes:
    """Numbers of tokens of steps with prompts. `decode`: the batch sizes that have graphs; step_tokens:
    the most tokens of a step. Raises ConfigError if graphs were asked for and cannot be had."""
    asked = args.cuda_graph_prefill_tokens
    if not decode:
        if asked:
            raise ConfigError(
                f"--cuda-graph-prefill-tokens {asked} was asked for, but decode steps have no CUDA "
                "graphs here, and prompts have none without them; allowed: 0, or leave it out"
            )
        return (), "rule", "decode steps have no graphs"
    if asked is None:
        most = min(PREFILL_TOKENS, busy_tokens(model), step_tokens)
        return (
            prefill_sizes(most),
            "rule",
            f"steps of up to {most} tokens, whose launches would take longer than their work",
        )
    source, reason = decisions.asked("cuda_graph_prefill_tokens")
    return prefill_sizes(min(asked, step_tokens)), source, reason


def busy_tokens(model: ModelFacts) -> int:
    """A step of so many keeps the GPU busy for as long as the host needs to launch it, two operations a
    token and parameter. With experts, whose weights are read for a few tokens each and by more launches,
    that is more than any graph has."""
    if num_experts(model.config):
        return PREFILL_TOKENS
    tables = 1 if model.config.get("tie_word_embeddings") else 2
    layers = model.num_parameters - tables * model.vocab_size * model.hidden_size
    return int(BUSY_OPERATIONS * model.num_layers / (2 * max(1, layers)))


def prefill_sizes(most: int) -> tuple[int, ...]:
    """From 16 tokens on every 16 to 128, every 64 to 512, every 128 to 1,024, every 512 beyond, so that
    padding stays small; none above `most`."""
    sizes: list[int] = []
    low = 0
    for limit, step in PREFILL_STEPS:
        sizes += range(low + step, limit + 1, step)
        low = limit
    return tuple(size for size in sizes if LEAST_TOKENS <= size <= most)


def _words(sizes: tuple[int, ...]) -> str:
    return " ".join(map(str, sizes))
