"""Facts of a model and a machine that do not exist, for tests that seed a whole configuration."""

from __future__ import annotations

from srt.config.facts import Facts, MachineFacts, ModelFacts


def dummy_facts() -> Facts:
    """A Llama of two layers on a machine of two cores, 8 GB, avx512_bf16 and no compiler."""
    return Facts(
        machine=MachineFacts(
            num_cores=2,
            memory_total=16_000_000_000,
            memory_available=8_000_000_000,
            cpu_flags=["avx2", "avx512f", "avx512_bf16"],
            has_cuda=False,
            compiler=None,
            versions={"python": "3.11"},
        ),
        model=ModelFacts(
            name="dummy",
            path="dummy",
            format="safetensors",
            architecture="LlamaForCausalLM",
            config={"architectures": ["LlamaForCausalLM"]},
            context_length=2048,
            dtype="bfloat16",
            num_layers=2,
            hidden_size=64,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            vocab_size=512,
            num_parameters=200_000,
            end_token_ids=[2],
        ),
    )
