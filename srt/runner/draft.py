"""The second runner of the process: the model that guesses.

It is built from the published configuration without publishing anything and without a copy of it: what
differs from the target is in its RunnerSpec. It has no tokenizer, and no memory budget of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kernels.ops import Ops
from srt.config.args import ServerArgs
from srt.config.context import get_context, get_model, get_spec
from srt.config.gate import maybe_disable_chunked_prefix_cache
from srt.errors import ConfigError
from srt.models.draft import draft_family
from srt.runner.model_runner import ModelRunner

logger = logging.getLogger(__name__)


def build_draft_tp_worker(
    args: ServerArgs,
    target: ModelRunner,
    *,
    ops: Ops,
    load: Callable[[ModelRunner], None] = ModelRunner.load,
    draft_attention_backend: str | None = None,
    step: int | None = None,
) -> ModelRunner:
    """The loaded draft; pools and backends come later, together with the target's. `args` is the very
    object that was published. `load` loads the weights, on whichever thread computes. `step`: which of
    the draft's layers, if each has a runner.

    `draft_attention_backend` is the algorithm's own wish and goes before the user's. Raises ConfigError
    for a draft that cannot work beside this target.
    """
    context = get_context()
    assert args is context.args, "a draft is built from what was published, not from a variant"
    spec = next((each for each in context.drafts if each.step == step), None)
    facts = context.facts.draft
    assert spec is not None and facts is not None, "no such draft was resolved"
    network = draft_family(get_spec().speculative_algorithm, step)
    runner = ModelRunner(
        spec,
        facts,
        ops=ops,
        device=target.device,
        seed=target.seed,
        draft_attention_backend=draft_attention_backend,
        network=network,
        lent=None if network is None else target.lend(),
    )
    if runner.arch.vocab_size != target.arch.vocab_size:
        raise ConfigError(
            f"the draft {facts.name} has a vocabulary of {runner.arch.vocab_size} tokens, the target "
            f"one of {target.arch.vocab_size}; they must be the same"
        )
    assert runner.context_length == target.context_length, "a draft works at the target's positions"
    with load_scope(runner):
        load(runner)
    maybe_disable_chunked_prefix_cache(
        use_mla_backend=runner.arch.latent is not None, is_draft_worker=True
    )
    return runner


@contextmanager
def load_scope(runner: ModelRunner) -> Iterator[None]:
    """While a draft loads, the bag says the draft's load format; model code that asks while it is built
    gets the truth. The target's value is back afterwards, whatever happened."""
    load_format = runner._draft_load_format()
    if load_format is None:
        yield
        return
    with get_model().override(load_format=load_format):
        yield
