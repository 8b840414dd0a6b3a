"""Who guesses, how much, and the draft model's own values: those that cannot be global because target
and draft live in one process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType

from srt.config.algorithms import ALGORITHMS, LAYERS_KEY, Algorithm
from srt.config.args import ServerArgs
from srt.config.capability import Half, Need
from srt.config.decisions import Decisions
from srt.config.facts import Facts, ModelFacts
from srt.config.footprint import ITEM_BYTES, weight_bytes
from srt.config.inkling import why_no_guesses
from srt.config.latent import is_latent, kv_items
from srt.config.leaves import leaf_table
from srt.config.rules_attention import check_wish, lack_of, place_of, propose
from srt.config.rules_block import decide_block
from srt.config.rules_model import ModelPlan, check_kv_dtype
from srt.config.rules_quantization import check_quantization
from srt.config.rules_shape import decide_force, decide_shape
from srt.config.runner_spec import RunnerSpec
from srt.config.trail import TrailEntry
from srt.errors import ConfigError

BATCH_TOKENS = 16
GPU_BATCH_TOKENS = 128
ONE_RUNNER = "one runner makes all guesses; a number where each layer of the draft has its own"
DRAFT_ONLY = ("attention_backend", "load_format", "kv_cache_dtype", "quantization")
CACHE_FLAG = "--speculative-draft-kv-cache-dtype"
STEPPING = ("num_steps", "confidence")
PLANNING = ("dspark_planner", "dspark_budget")
SETTINGS = ("num_draft_tokens", "batch_tokens", *STEPPING, "eagle_topk", "lookup", *PLANNING)
OFF: Mapping[str, object] = MappingProxyType({"lookup": False, "dspark_planner": "static"})
DRAFT_SETTINGS = ("draft_model", *(f"draft_{name}" for name in DRAFT_ONLY))

Reasoned = tuple[str | None, str, str]  # value, source, reason


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPlan:
    """What was decided about the draft, each with its source and reason. `num_layers`: how many of its
    layers run, each in a runner of its own; 0: it is one runner. Sizes are of one runner."""

    facts: ModelFacts
    load_format: Reasoned
    kv_cache_dtype: Reasoned
    quantization: Reasoned
    backend: Reasoned
    prefill: Reasoned
    decode: Reasoned
    bytes_per_token: int
    weight_bytes: int
    num_layers: int = 0

    def join(self, target: ModelPlan) -> ModelPlan:
        """All runners' appetite for the one memory: every KV token is held by each."""
        count = max(self.num_layers, 1)
        return replace(
            target,
            bytes_per_token=target.bytes_per_token + count * self.bytes_per_token,
            weight_bytes=target.weight_bytes + count * self.weight_bytes,
        )


def decide_spec(
    args: ServerArgs,
    facts: Facts,
    plan: ModelPlan,
    backends: tuple[str, str],
    decisions: Decisions,
) -> DraftPlan | None:
    """Raises ConfigError for a draft that cannot work, with both numbers where two do not fit."""
    algorithm = None if args.speculative_algorithm == "none" else args.speculative_algorithm
    if algorithm is None:
        _refuse(args, (*SETTINGS, "force_accept", *DRAFT_SETTINGS), "nobody guesses")
        decisions.decide("speculative_algorithm", None, "off unless asked for")
        decisions.decide("speculative_draft_model", None, "nobody guesses")
        for name in (*SETTINGS, "force_accept"):
            decisions.decide(f"speculative_{name}", OFF.get(name, 0), "nobody guesses")
        return None
    for model in (facts.model, facts.draft):
        trouble = None if model is None else why_no_guesses(model.architecture)
        if model is not None and trouble is not None:
            raise ConfigError(
                f"--speculative-algorithm {algorithm}: {model.name} has {trouble}; allowed: none"
            )
    decisions.take("speculative_algorithm", algorithm)
    known = ALGORITHMS[algorithm]
    decide_force(args, algorithm, plan.gpu is not None, decisions)
    draft = _find_draft(args, algorithm, known, facts) if known.needs_model else None
    if not known.has_steps:
        wrong = STEPPING[:1] if known.has_planner else STEPPING
        _refuse(args, wrong, f"{algorithm} guesses all tokens at once or one after the other")
    if not known.has_tree:
        _refuse(args, ("eagle_topk",), f"{algorithm} guesses chains")
    elif (
        (args.speculative_eagle_topk or 1) > 1 and plan.gpu and is_latent(facts.model.architecture)
    ):
        raise ConfigError(
            f"--speculative-eagle-topk {args.speculative_eagle_topk} makes trees of guesses, which "
            "latent attention cannot verify on a GPU; allowed here: 1"
        )
    if not (known.has_steps or known.has_block):
        _refuse(args, ("lookup",), f"{algorithm} guesses alone")
    if not known.has_planner:
        _refuse(args, PLANNING, f"{algorithm} does not say how sure it is of a guess")
    if known.has_block:
        assert draft is not None
        decide_block(args, algorithm, known, facts.model, draft, decisions)
    else:
        layers = draft.config.get(LAYERS_KEY) if draft is not None and known.has_layers else None
        decide_shape(args, algorithm, known, layers, plan.gpu is not None, decisions)
    if not known.has_planner:
        decisions.decide("speculative_dspark_planner", "static", "every guess is verified")
        decisions.decide("speculative_dspark_budget", 0, "nothing is planned")
    device, tokens = ("CPU", BATCH_TOKENS) if plan.gpu is None else ("GPU", GPU_BATCH_TOKENS)
    decisions.choose(
        "speculative_batch_tokens",
        args.speculative_batch_tokens,
        tokens,
        f"up to there a {device} waits for weights, past it each guess costs arithmetic",
    )
    if draft is None:
        _refuse(args, DRAFT_SETTINGS, f"{algorithm} guesses without a model")
        decisions.decide("speculative_draft_model", None, f"{algorithm} guesses without a model")
        return None
    decisions.choose(
        "speculative_draft_model",
        args.speculative_draft_model,
        draft.path,
        f"comes with {facts.model.name}",
    )
    found = _plan_draft(args, facts, draft, plan, backends, decisions)
    if known.has_layers:
        return replace(found, num_layers=decisions.values["speculative_num_steps"])
    return found


def _find_draft(args: ServerArgs, algorithm: str, known: Algorithm, facts: Facts) -> ModelFacts:
    if facts.draft is None or (known.any_draft and args.speculative_draft_model is None):
        what = f"a draft made for this target ({', '.join(sorted(known.drafts or ()))})"
        if known.any_draft:
            what = "a smaller model with the target's vocabulary"
        if known.has_layers:
            given = args.speculative_draft_model or facts.model.name
            what = f"a folder with MTP layers ({LAYERS_KEY}); {given} has none"
        raise ConfigError(
            f"--speculative-algorithm {algorithm} needs --speculative-draft-model: {what}"
        )
    if known.drafts is not None and facts.draft.architecture not in known.drafts | known.likenesses:
        raise ConfigError(
            f"--speculative-draft-model {facts.draft.name} is a {facts.draft.architecture}; "
            f"{algorithm} guesses with {', '.join(sorted(known.drafts))}"
        )
    return facts.draft


def _refuse(args: ServerArgs, names: Iterable[str], why: str) -> None:
    given = asdict(args)
    for name in names:
        flag = f"speculative_{name}"
        if given[flag] is not None:
            raise ConfigError(
                f"{leaf_table()[flag].words(given[flag])} was given, but {why}; leave it out, or "
                "choose another --speculative-algorithm"
            )


def _plan_draft(
    args: ServerArgs,
    facts: Facts,
    draft: ModelFacts,
    plan: ModelPlan,
    backends: tuple[str, str],
    decisions: Decisions,
) -> DraftPlan:
    target = facts.model
    if plan.load_format == "script" or draft.format == "script":
        raise ConfigError(
            f"the draft {draft.name} ({draft.format}) cannot guess for {target.name} "
            f"({plan.load_format}): a script runs no second model; use ngram"
        )
    if draft.vocab_size != target.vocab_size:
        raise ConfigError(
            f"the draft {draft.name} has a vocabulary of {draft.vocab_size} tokens, the target "
            f"{target.name} one of {target.vocab_size}; they must be the same"
        )
    width = draft.config.get("target_hidden_size", draft.hidden_size)
    known = ALGORITHMS[str(args.speculative_algorithm)]
    if known.drafts is not None and width != target.hidden_size:
        raise ConfigError(
            f"the draft {draft.name} is made for a target of hidden size {width}, {target.name} has "
            f"{target.hidden_size}; they must be the same"
        )
    asked, found = args.speculative_draft_load_format, draft.format
    if asked not in (None, found, "dummy"):
        raise ConfigError(
            f"--speculative-draft-load-format {asked} was asked for, but {draft.path} is {found}; "
            f"allowed: {found}, dummy"
        )
    if found == "sharded" and asked != "dummy":
        _check_shards(draft, str(args.speculative_algorithm), known.drafts is None)
    words = {name: decisions.asked(f"speculative_draft_{name}") for name in DRAFT_ONLY}
    format_found: Reasoned = (str(found), "model", f"{draft.path} is {found}")
    if draft.path == target.path and plan.load_format == "dummy":
        format_found = ("dummy", "rule", "the target's, in whose folder it is")
    load_format = _choose(asked, words["load_format"], format_found)
    kv_dtype = _choose(
        args.speculative_draft_kv_cache_dtype,
        words["kv_cache_dtype"],
        (plan.dtype, "rule", "the type the draft computes in"),
    )
    kv_name = str(kv_dtype[0])
    check_kv_dtype(CACHE_FLAG, kv_name, plan.gpu)
    place = place_of(
        draft,
        facts.machine,
        plan.gpu,
        native=bool(decisions.values["native_kernels"]),
        deterministic=False,  # a guess may vary: it never changes an answer
        dtype=plan.dtype,
        kv_cache_dtype=kv_name,
    )
    own = args.speculative_draft_attention_backend
    halves: tuple[Half, ...] = ("prefill", "decode")
    if own is not None:
        for half in halves:
            check_wish(own, "--speculative-draft-attention-backend", place, half, CACHE_FLAG)
    wishes = (args.prefill_attention_backend, args.decode_attention_backend)
    inherited = [
        _inherit(backend, half, place, bool(wish or args.attention_backend))
        for backend, half, wish in zip(backends, halves, wishes, strict=True)
    ]
    prefill, decode = (_choose(own, words["attention_backend"], each) for each in inherited)
    return DraftPlan(
        facts=draft,
        load_format=load_format,
        kv_cache_dtype=kv_dtype,
        quantization=_quantization(args, plan, words["quantization"]),
        backend=_choose(
            own, words["attention_backend"], (None, "rule", "it takes the target's pair")
        ),
        prefill=prefill,
        decode=decode,
        bytes_per_token=kv_items(draft, draft.num_kv_heads) * ITEM_BYTES[kv_name],
        weight_bytes=weight_bytes(draft, plan.dtype, None),
    )


def _check_shards(draft: ModelFacts, algorithm: str, is_model: bool) -> None:
    """Raises ConfigError for a sharded folder that holds no such draft, or a part of it."""
    if not is_model:
        raise ConfigError(
            f"{draft.path} is sharded, and such a folder holds a model, not the network of {algorithm}; "
            "name the folder of safetensors with --speculative-draft-model"
        )
    if draft.shards != 1:
        raise ConfigError(
            f"the draft {draft.path} was sharded for {draft.shards} ranks, but every rank has a whole "
            "draft; divide it with `tandem model shard --tensor-parallel-size 1`"
        )


def _inherit(backend: str, half: Half, place: Need, is_asked: bool) -> Reasoned:
    """The target's backend for this half, or what suits the draft better: nobody asked for the target's,
    or the draft cannot have it."""
    lack = lack_of(backend, place, half)
    if lack is None and (is_asked or place.device == "cpu"):
        return backend, "rule", f"what the target has for {half}"
    name, why = propose(half, place, CACHE_FLAG)
    return name, "rule", f"what the target has for {half}" if name == backend else lack or why


def _quantization(args: ServerArgs, plan: ModelPlan, words: tuple[str, str]) -> Reasoned:
    asked = args.speculative_draft_quantization
    if asked is not None:
        if asked != "none":
            what = f"--speculative-draft-quantization {asked} was asked for"
            check_quantization(what, asked, plan.gpu)
        return (None if asked == "none" else asked, *words)
    known = ALGORITHMS[str(args.speculative_algorithm)]
    if plan.gpu is None and known.drafts is not None and plan.dtype == "bfloat16":
        return "int8", "rule", "its bytes are its time, and a guess need not be exact"
    return None, "rule", "off: it would make guesses worse"


def _choose(asked: str | None, words: tuple[str, str], decided: Reasoned) -> Reasoned:
    return decided if asked is None else (asked, *words)


def draft_runners(
    draft: DraftPlan, plan: ModelPlan, context_length: int, target: RunnerSpec
) -> tuple[list[RunnerSpec], list[TrailEntry]]:
    """The draft's specs, of which there are several if each of its layers has a runner, and an entry
    for each of their values."""
    specs, trail = [], []
    for step in range(draft.num_layers) if draft.num_layers else (None,):
        spec, reasoned = _draft_runner(draft, plan, context_length, target, step)
        specs.append(spec)
        trail += [
            TrailEntry(field=f"{spec.label}.{name}", value=value, source=source, reason=reason)
            for name, (value, source, reason) in reasoned.items()
        ]
    return specs, trail


def _draft_runner(
    draft: DraftPlan, plan: ModelPlan, context_length: int, target: RunnerSpec, step: int | None
) -> tuple[RunnerSpec, dict[str, tuple[object, str, str]]]:
    reasoned: dict[str, tuple[object, str, str]] = {
        "role": ("draft", "rule", "the model that guesses"),
        "model_path": (draft.facts.path, "model", "where --speculative-draft-model was found"),
        "load_format": draft.load_format,
        "dtype": (plan.dtype, "rule", "the target's"),
        "quantization": draft.quantization,
        "context_length": (context_length, "rule", "the target's: it works at the same positions"),
        "kv_cache_dtype": draft.kv_cache_dtype,
        "prefill_attention_backend": draft.prefill,
        "decode_attention_backend": draft.decode,
        "graph_sizes": (target.graph_sizes, "rule", "the target's: they decode together"),
        "prefill_graph_sizes": ((), "rule", "a draft's prompts are short work"),
        "draft_attention_backend": draft.backend,
        "step": (step, "rule", ONE_RUNNER if step is None else "a runner for each layer"),
    }
    spec = RunnerSpec(
        role="draft",
        model_path=draft.facts.path,
        load_format=str(draft.load_format[0]),
        dtype=plan.dtype,
        quantization=draft.quantization[0],
        context_length=context_length,
        kv_cache_dtype=str(draft.kv_cache_dtype[0]),
        prefill_attention_backend=str(draft.prefill[0]),
        decode_attention_backend=str(draft.decode[0]),
        graph_sizes=target.graph_sizes,
        draft_attention_backend=draft.backend[0],
        step=step,
    )
    return spec, reasoned
