"""Draft training on a tiny random target: what it computes, and that it learns."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.ops import select
from srt.config.facts import ModelFacts
from srt.loading.dummy import dummy_tensors
from srt.models.arch import read_arch
from srt.models.eagle3 import Eagle3
from srt.models.registry import model_family
from srt.protocols.drafter import Outcome, Wish
from srt.protocols.forward_batch import RowSetup, Slice, TableWrite
from srt.runner.model_runner import ModelRunner
from srt.sampling.sampler import Sampler
from srt.spec.eagle import EagleDrafter
from srt.spec.train.acceptance import Acceptance
from srt.spec.train.attention import attend_flash, attend_plain
from srt.spec.train.bank import KINDS, TEMPLATES, PromptBank, draw_passage_prompt
from srt.spec.train.batches import all_batches
from srt.spec.train.corpus import Corpus, Sequence
from srt.spec.train.export import draft_config, draft_tensors, write_draft
from srt.spec.train.hot import HotMap, choose_hot
from srt.spec.train.loop import Trainer, TrainSettings
from srt.spec.train.network import DraftNetwork, DraftShape
from srt.spec.train.overlap import HeldOut
from srt.spec.train.session import Settings, why_no_passage
from srt.spec.train.target import Causal, DenseTarget, load_target
from srt.spec.train.unroll import guess_right, unroll
from srt.spec.train.writing import Wish as Ask
from srt.spec.train.writing import Writer
from srt.wire.params import SamplingParams
from tests.tiny_models import TINY, Driver, make_runner, make_spec, read_facts

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["LlamaForCausalLM", "Qwen3ForCausalLM", "windows"])
def facts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelFacts:
    return save_tiny(tmp_path_factory.mktemp("tiny"), request.param)


def save_tiny(folder: Path, kind: str, **changes: object) -> ModelFacts:
    """Noise that is loud enough for the greedy text to vary."""
    config = {**TINY, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True}
    config |= {"num_hidden_layers": 6, "head_dim": 8, **changes}
    if kind == "windows":
        kind = "MistralForCausalLM"
        config["sliding_window"] = 5
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [kind]}))
    facts = read_facts(folder)
    parameters = model_family(kind).parameters(read_arch(facts))
    loud = {
        name: value if is_norm(name) else value * 6
        for name, value in dummy_tensors(parameters, seed=3)
    }
    save_file(loud, folder / "model.safetensors")
    return facts


def is_norm(name: str) -> bool:
    return "norm" in name


def make_target(facts: ModelFacts) -> DenseTarget:
    return load_target(facts, dtype=torch.float32, device=CPU, max_tokens=256)


@pytest.fixture(scope="module")
def target(facts: ModelFacts) -> DenseTarget:
    return make_target(facts)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelFacts, DenseTarget]:
    facts = save_tiny(tmp_path_factory.mktemp("llama"), "LlamaForCausalLM")
    return facts, make_target(facts)


def make_shape(target: DenseTarget) -> DraftShape:
    arch = target.arch
    return DraftShape(
        hidden_size=arch.hidden_size,
        target_size=arch.hidden_size,
        intermediate_size=64,
        num_heads=arch.num_heads,
        num_kv_heads=arch.num_kv_heads,
        head_dim=arch.head_dim,
        norm_eps=arch.norm_eps,
    )


def test_the_dense_target_is_the_served_model(facts: ModelFacts, target: DenseTarget) -> None:
    tokens = torch.randint(3, 97, (19,), generator=torch.Generator().manual_seed(0)).tolist()
    served = Driver(make_runner(facts)).run(tokens, [len(tokens)])
    rows = torch.tensor([tokens, tokens[5:] + [0] * 5])  # the second one is padded
    found = target.forward(rows, Causal(target.arch.windows), target.default_taps())
    assert found.features is not None and found.features.shape == (2, 19, 3 * 48)
    torch.testing.assert_close(target.head(found.hidden[0]), served, rtol=1e-4, atol=1e-4)
    alone = target.forward(rows[1:, :14], Causal(target.arch.windows))
    torch.testing.assert_close(found.hidden[1, :14], alone.hidden[0], rtol=1e-4, atol=1e-4)


def test_features_are_the_stream_entering_the_tapped_layers(target: DenseTarget) -> None:
    tokens = torch.arange(3, 12)[None]
    causal = Causal(target.arch.windows)
    found = target.forward(tokens, causal, (0, 2)).features
    assert found is not None
    entering = torch.nn.functional.embedding(tokens, target.embedding)
    torch.testing.assert_close(found[..., :48], entering)
    for index in range(2):
        entering = target._layer(index, entering, target.cos_sin[:9], causal)
    torch.testing.assert_close(found[..., 48:], entering)


def greedy(target: DenseTarget, prompt: list[int], most: int, stops: list[int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(most):
        hidden = target.forward(torch.tensor([tokens]), Causal(target.arch.windows)).hidden
        tokens.append(int(target.head(hidden[0, -1]).argmax()))
        if tokens[-1] in stops:
            break
    return tokens


def test_a_refilled_batch_writes_what_greedy_decoding_writes(target: DenseTarget) -> None:
    draw = random.Random(5)
    prompts = [[draw.randrange(3, 97) for _ in range(draw.randint(1, 20))] for _ in range(11)]
    first = greedy(target, prompts[0], 12, [])
    stops = [first[len(prompts[0]) + 4]]  # so that some rows end early
    writer = Writer(target, rows=3, width=40, stops=stops)
    wishes = [Ask(prompt, 0.0, 3 + i, str(i)) for i, prompt in enumerate(prompts)]
    found = {each.wish.label: each.tokens for each in writer.write(wishes)}
    expected = {
        str(i): greedy(target, prompt, min(3 + i, 40 - len(prompt)), stops)
        for i, prompt in enumerate(prompts)
    }
    assert found == expected


def test_drawn_tokens_follow_the_temperature(target: DenseTarget) -> None:
    wishes = [Ask([5, 6, 7], 1.0, 1) for _ in range(3000)]
    writer = Writer(target, rows=3000, width=8, stops=[], min_share=0.2)
    counts = torch.zeros(97)
    for each in writer.write(wishes):
        counts[each.answer[0]] += 1
    hidden = target.forward(torch.tensor([[5, 6, 7]]), Causal(target.arch.windows)).hidden
    shares = target.head(hidden[0, -1]).softmax(-1)
    shares[shares < 0.2 * shares.max()] = 0
    assert (counts[shares == 0] == 0).all()
    torch.testing.assert_close(counts / 3000, shares / shares.sum(), rtol=0, atol=0.05)


@pytest.mark.parametrize("step", [0, 1, 2, 4])
def test_the_merged_softmax_has_the_plain_one_s_gradients(step: int) -> None:
    generator = torch.Generator().manual_seed(step)

    def noise() -> torch.Tensor:
        return torch.randn(2, 3, 11, 8, generator=generator, requires_grad=True)

    q, weight = noise(), noise().detach()
    keys, values = [noise() for _ in range(step + 1)], [noise() for _ in range(step + 1)]
    results = []
    for attend in (attend_plain, attend_flash):
        out = attend(q, keys, values, 0.4)
        results.append((out, *torch.autograd.grad((out * weight).sum(), [q, *keys, *values])))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_unrolling_is_what_a_serving_draft_computes(
    llama: tuple[ModelFacts, DenseTarget],
) -> None:
    """Each chain alone: slots 0..s with true features, then its own features and right guesses."""
    _, target = llama
    torch.manual_seed(1)
    network = DraftNetwork(make_shape(target))
    frozen = Trainer(target, network, list(range(97)), (1, 2, 3), TrainSettings()).frozen
    tokens = torch.randint(3, 97, (1, 12))
    features = target.forward(tokens, Causal(target.arch.windows), (1, 2, 3)).features
    assert features is not None
    with torch.no_grad():
        steps = list(unroll(network, frozen, tokens, features, 4, attend_plain))
        for start in (0, 3, 8):
            for step, found in enumerate(chain(network, target, tokens[0], features[0], start, 4)):
                torch.testing.assert_close(
                    steps[step][0, start + step], found, rtol=1e-4, atol=1e-5
                )


def chain(
    network: DraftNetwork, target: DenseTarget, tokens: torch.Tensor, features: torch.Tensor,
    start: int, steps: int,
) -> list[torch.Tensor]:  # fmt: skip
    """Slot by slot with a growing cache, as the engine does it: the feature each step ends with."""
    size = network.shape.hidden_size
    fused = [torch.zeros(size), *network.fc(features)]
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []

    def attend(
        q: torch.Tensor, new_keys: list[torch.Tensor], new_values: list[torch.Tensor], scale: float
    ) -> torch.Tensor:
        keys.append(new_keys[-1])
        values.append(new_values[-1])
        return torch.nn.functional.scaled_dot_product_attention(
            q, torch.cat(keys, dim=2), torch.cat(values, dim=2), scale=scale
        )

    found = []
    for slot in range(start + steps):
        feature = fused[slot] if slot <= start else found[-1]
        embedded = target.embedding[tokens[slot]]
        out = network.midlayer(
            embedded[None, None], feature[None, None], target.cos_sin[slot : slot + 1], [], [],
            attend,
        )[0, 0]  # fmt: skip
        if slot >= start:
            found.append(out)
    return found


def test_the_engine_runs_what_was_exported(
    llama: tuple[ModelFacts, DenseTarget], tmp_path: Path
) -> None:
    """The guesses of the engine's drafter are those that training counts."""
    facts, target = llama
    torch.manual_seed(4)
    network = DraftNetwork(make_shape(target))
    hot = HotMap([3, 5, 8, *range(20, 60)], 1.0)
    taps = (0, 2, 5)
    frozen = Trainer(target, network, hot.tokens, taps, TrainSettings()).frozen
    config = draft_config(facts, network, hot, taps)
    write_draft(tmp_path / "draft", draft_tensors(network, hot, torch.float32), config, {})
    served = make_runner(facts)
    draft = replace(
        facts,
        path=str(tmp_path / "draft"),
        architecture=config["architectures"][0],
        num_layers=1,
        config=config,
    )
    runner = ModelRunner(
        make_spec(draft, role="draft"), draft, ops=select("torch"), device=CPU, seed=0,
        network=Eagle3(), lent=served.lend(),
    )  # fmt: skip
    runner.load()
    runner.allocate(num_pages=served.pool.num_pages, page_size=16, max_rows=4, table=served.table)
    runner.init_backends()
    drafter = EagleDrafter(runner, Sampler(4, 97), steps=4, topk=1, confidence=0.0)

    tokens = torch.randint(3, 97, (14,), generator=torch.Generator().manual_seed(8)).tolist()
    features = target.forward(torch.tensor([tokens]), Causal(target.arch.windows), taps).features
    assert features is not None
    last = len(tokens) - 1
    runner.write_table([TableWrite(row=1, first=0, pages=[4, 2])])
    params = SamplingParams(temperature=0.0)
    prompt = tokens[:last]
    drafter.open([RowSetup(row=1, params=params, tokens=prompt, prompt_len=last, stop_ids=[])])
    with torch.inference_mode():
        whole = Slice(row=1, start=0, length=last, tokens=prompt, sample=False)
        drafter.prefill([whole], [features[0, :last]])
        drafter.absorb(
            [Outcome(row=1, tokens=tokens[last:], features=features[0, last - 1 : last])]
        )
        [guess] = drafter.propose([Wish(row=1, start=last, most=4)])

    for step, token in enumerate(guess.tokens):  # a chain is right if each guess is what comes next
        row = torch.tensor([[*tokens, *guess.tokens]])
        padded = torch.cat((features, torch.zeros(1, len(guess.tokens), features.shape[2])), dim=1)
        right = guess_right(network, frozen, row, padded, 4, attend_plain)
        assert bool(right[step, 0, last + step]), (step, token)
    assert len(guess.tokens) == 4


def write_corpus(target: DenseTarget, count: int) -> Corpus:
    draw = random.Random(2)
    wishes = [
        Ask([draw.randrange(3, 97) for _ in range(6)], 0.0, 24, draw.choice(("a", "b")))
        for _ in range(count)
    ]
    writer = Writer(target, rows=count, width=32, stops=[2])
    return Corpus(
        [Sequence(w.wish.label, w.tokens, len(w.wish.prompt)) for w in writer.write(wishes)], CPU
    )


def test_a_draft_learns_its_text(llama: tuple[ModelFacts, DenseTarget]) -> None:
    _, target = llama
    corpus = write_corpus(target, 24)
    hot = choose_hot(corpus.count_answer_tokens(97), coverage=1.0, most=97)
    torch.manual_seed(0)
    network = DraftNetwork(make_shape(target))
    settings = TrainSettings(steps=4, learning_rate=2e-2, batch_tokens=2048, hard_share=1.0)
    trainer = Trainer(target, network, hot.tokens, target.default_taps(), settings)
    before = trainer.measure(corpus, 4)["all"].mean_length
    batches = list(all_batches(corpus, settings.batch_tokens))
    losses = [
        trainer.learn(batch, min(1.0, 2 * (1 - n / 100))).loss.item()
        for n in range(100)
        for batch in batches
    ]
    after = trainer.measure(corpus, 4)
    assert losses[-1] < 0.5 * losses[0]
    assert before < 2.5 < 4.5 < after["all"].mean_length <= 5
    assert set(after) == {"all", "a", "b"}


def test_an_exported_draft_is_in_the_public_format_and_small(
    llama: tuple[ModelFacts, DenseTarget], tmp_path: Path
) -> None:
    """Sizes of SmolLM2-135M; the target's identity is the tiny one's."""
    facts, _ = llama
    shape = DraftShape(
        hidden_size=576, target_size=576, intermediate_size=1280, num_heads=9, num_kv_heads=3,
        head_dim=64, norm_eps=1e-5,
    )  # fmt: skip
    network = DraftNetwork(shape)
    hot = HotMap([2 * i for i in range(8192)], 0.9)
    config = draft_config(facts, network, hot, (2, 15, 27))
    write_draft(tmp_path / "draft", draft_tensors(network, hot), config, {"a": 1})
    path = tmp_path / "draft" / "model.safetensors"
    assert path.stat().st_size < 10_000_000
    tensors = load_file(path)
    shapes = {name: tuple(value.shape) for name, value in tensors.items()}
    layer = "midlayer."
    assert shapes == {
        "fc.weight": (576, 1728),
        f"{layer}input_layernorm.weight": (576,),
        f"{layer}hidden_norm.weight": (576,),
        f"{layer}post_attention_layernorm.weight": (576,),
        f"{layer}self_attn.q_proj.weight": (576, 1152),
        f"{layer}self_attn.k_proj.weight": (192, 1152),
        f"{layer}self_attn.v_proj.weight": (192, 1152),
        f"{layer}self_attn.o_proj.weight": (576, 576),
        f"{layer}mlp.gate_proj.weight": (1280, 576),
        f"{layer}mlp.up_proj.weight": (1280, 576),
        f"{layer}mlp.down_proj.weight": (576, 1280),
        "norm.weight": (576,),
        "d2t": (8192,),
    }
    assert tensors["d2t"].dtype == torch.int64 and int(tensors["d2t"][7]) == 7
    stored = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert stored["architectures"] == ["LlamaForCausalLMEagle3"]
    assert stored["eagle_aux_hidden_state_layer_ids"] == [2, 15, 27]
    assert stored["draft_vocab_size"] == 8192 and len(stored["target_sha256"]) == 64


def test_a_corpus_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    corpus = Corpus([Sequence("x", [1, 2, 3, 4], 2), Sequence("y", [5, 6, 6], 1)], CPU)
    corpus.save(tmp_path / "corpus.safetensors")
    again = Corpus.load(tmp_path / "corpus.safetensors", CPU)
    assert again.tokens.tolist() == [1, 2, 3, 4, 5, 6, 6]
    assert (again.lengths, again.prompt_lengths) == ([4, 3], [2, 1])
    assert (again.starts, again.labels) == ([0, 4], ["x", "y"])
    assert again.count_answer_tokens(8) == [0, 0, 0, 1, 1, 0, 2, 0]
    (batch,) = all_batches(again, 1000)
    assert batch.tokens.shape == (2, 64) and batch.rows == [1, 0]
    assert batch.places.tolist() == [0, 1, 64 + 1, 64 + 2]


def test_rounds_are_walked_as_the_engine_walks_them() -> None:
    acceptance = Acceptance(2)
    right = [
        [False, True, True, False, True, True, True],
        [True, True, False, True, True, False, True],
    ]
    acceptance.walk(right, first=1, last=6)
    # at 1: right[0][1], not right[1][2] -> 2 tokens, at 3: none -> 1, at 4: one, then the text ends
    assert (acceptance.tokens, acceptance.rounds) == (5, 3)
    assert acceptance.reached == [2, 0]
    assert acceptance.mean_length == pytest.approx(5 / 3)


def test_the_hot_tokens_are_the_frequent_ones() -> None:
    counts = [0] * 1000
    counts[900], counts[17], counts[500] = 50, 30, 20
    hot = choose_hot(counts, coverage=0.9, most=256, always=[999])
    assert len(hot.tokens) == 256 and {17, 500, 900, 999} <= set(hot.tokens)
    assert hot.coverage == 1.0
    assert [i + d for i, d in enumerate(hot.offsets)] == hot.tokens
    few = choose_hot(counts, coverage=1.0, most=2)
    assert few.tokens == [17, 900] and few.coverage == 0.8


def test_the_bank_fills_every_template() -> None:
    rng = random.Random(0)
    passage = (
        "One fine day the farmer went out. He found gold! Was it real? Nobody knows. It rained."
    )
    bank = PromptBank([passage, " "])
    texts = {kind: {bank.draw(rng, kind).text for _ in range(300)} for kind in KINDS}
    assert set(TEMPLATES) == set(KINDS)
    for kind, found in texts.items():
        assert len(found) > 30, kind
        assert not [text for text in found if "{a" in text or "{passage" in text]
    assert any(draw_passage_prompt(rng) for _ in range(20))
    with pytest.raises(ValueError, match="passages"):
        PromptBank([""])


def test_held_out_prompts_are_refused() -> None:
    held_out = HeldOut(["What is a good way to start exercising again after a break?", "Say hi!"])
    assert held_out.refuses("say HI")
    assert held_out.refuses("Tell me: what is a good way, to start exercising again today?")
    assert not held_out.refuses("What is a good way to start cooking again after a break?")
    assert not held_out.refuses("Say hi to Anna!")


def test_too_short_a_time_is_told_in_figures(tmp_path: Path) -> None:
    """Of 1.5 minutes a tenth of 30 s is for passages; 224 tokens at 0.2 s are 44.8 s."""
    settings = Settings(
        out=tmp_path, work=tmp_path, write_seconds=30.0, train_seconds=60.0, rows=16
    )
    said = why_no_passage(settings, 0, 0.2)
    assert "no passage was finished in the 3.0 s" in said and "16 at once" in said
    assert "224 tokens takes 45 s" in said and "--minutes 28" in said
    short = why_no_passage(settings, 7, 0.001)
    assert "7 passages were finished, none of more than 200 characters" in short
    assert "allow more --minutes" in short
