"""Which family runs which architecture. A family is imported when it is asked for."""

from __future__ import annotations

from srt.config.checkpoint_keys import MODEL_ARCHITECTURES
from srt.errors import ConfigError
from srt.models.blocks import Family


def model_family(architecture: str) -> Family:
    """Raises ConfigError naming the architecture and those that are known."""
    match architecture:
        case "LlamaForCausalLM" | "MistralForCausalLM":
            from srt.models.llama import Llama

            return Llama()
        case "Qwen2ForCausalLM" | "MiMoForCausalLM":
            from srt.models.qwen2 import Qwen2

            return Qwen2()
        case "MixtralForCausalLM":
            from srt.models.mixtral import Mixtral

            return Mixtral()
        case "Qwen3MoeForCausalLM":
            from srt.models.qwen3_moe import Qwen3Moe

            return Qwen3Moe()
        case "Qwen3ForCausalLM":
            from srt.models.qwen3 import Qwen3

            return Qwen3()
        case "DeepseekV2ForCausalLM" | "DeepseekV3ForCausalLM":
            from srt.models.deepseek import Deepseek

            return Deepseek()
        case "InklingForCausalLM":
            from srt.models.inkling_map import Inkling

            return Inkling()
    raise ConfigError(
        f"architecture {architecture!r} is not implemented; known: {', '.join(MODEL_ARCHITECTURES)}"
    )
