"""Models that no family reads: what each is, and why it does not convert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from converter.families.foreign import is_known

_EXPERTS = "a mixture of experts: each token takes its own way through the MLPs, and a LLaMA has one MLP a layer"
_STATE = (
    "no plain attention model: most of its layers carry a state or convolve, and a LLaMA's attend to all earlier tokens"
)
_GEMMA = (
    "a Gemma: its norms multiply by 1 + weight and its embeddings are scaled, and later ones cap logits or use windows"
)
_PARALLEL = (
    "a model whose attention and MLP read one and the same norm, in parallel; a LLaMA's MLP reads what attention wrote"
)
_ENCODER = "an encoder: its attention sees later tokens too, so it is no language model that goes from left to right"
_SEQ2SEQ = "an encoder with a decoder that reads it, and a LLaMA has no cross-attention"
_VISION = "a model of images or sound and text, and only language models are converted"
_FUSED = "close to a LLaMA, but its q, k, v or its gate and up lie in one tensor, in an order that no family here reads"
_ALIBI = "a model with ALiBi: its attention is biased by distance, and a LLaMA rotates q and k instead"
_WINDOWS = "a model that attends to a window in some or all of its layers, and a LLaMA attends to everything"

#: What a model is -> the model types that are it, as transformers calls them.
# fmt: off
_KINDS: dict[str, tuple[str, ...]] = {
    _EXPERTS: (
        "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "olmoe", "flex_olmo", "dbrx", "gpt_oss",
        "granitemoe", "granitemoeshared", "phimoe", "glm4_moe", "ernie4_5_moe", "minimax", "jetmoe", "grok-1",
        "switch_transformers", "hunyuan_v1_moe", "dots1",
    ),
    "a Llama 4: a mixture of experts with layers that do not rotate q and k and others that attend in chunks": (
        "llama4", "llama4_text",
    ),
    "close to a LLaMA, but every fourth layer does not rotate q and k (`no_rope_layers`), which a LLaMA cannot say": (
        "smollm3",
    ),
    "a GPT-2 whose heads all share one k and v, which lie behind q in one tensor: no family reads that order": (
        "gpt_bigcode",
    ),
    _STATE: (
        "mamba", "mamba2", "falcon_mamba", "rwkv", "recurrent_gemma", "xlstm", "jamba", "bamba", "zamba", "zamba2",
        "nemotron_h", "falcon_h1", "granitemoehybrid", "lfm2", "qwen3_next", "kimi_linear", "retnet",
    ),
    _PARALLEL: ("phi", "falcon", "cohere", "cohere2", "codegen"),
    _FUSED: ("phi3", "internlm2", "baichuan", "qwen", "chatglm", "glm", "glm4"),
    _GEMMA: ("gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n", "vaultgemma"),
    _ALIBI: ("bloom", "mpt"),
    _WINDOWS: ("gpt_neo", "starcoder2", "ministral", "olmo3", "cwm"),
    "a model whose norms have no weights or stand behind the sublayers, and a LLaMA's stand before them": (
        "olmo", "olmo2",
    ),
    "a model that scales its embeddings, residuals or logits by constants of its config": (
        "granite", "minicpm", "minicpm3",
    ),
    _ENCODER: (
        "bert", "roberta", "distilbert", "albert", "electra", "deberta", "deberta-v2", "xlm-roberta", "modernbert",
        "camembert", "mpnet", "nomic_bert",
    ),
    _SEQ2SEQ: ("t5", "mt5", "umt5", "bart", "mbart", "pegasus", "marian", "m2m_100", "led", "longt5", "blenderbot"),
    _VISION: (
        "clip", "vit", "llava", "llava_next", "llava_onevision", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "mllama",
        "paligemma", "idefics", "idefics2", "idefics3", "smolvlm", "whisper", "wav2vec2", "internvl", "pixtral",
        "mistral3", "gemma4",
    ),
}
# fmt: on
_BY_TYPE = {model_type: what for what, types in _KINDS.items() for model_type in types}

#: Config fields that tell what a model is, whatever it is called.
_BY_FIELD = {
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), _EXPERTS),
    **dict.fromkeys(("vision_config", "audio_config"), _VISION),
    **dict.fromkeys(("state_size", "ssm_cfg", "mamba_d_state", "linear_num_key_heads"), _STATE),
    "is_encoder_decoder": _SEQ2SEQ,
    "alibi": _ALIBI,
    "no_rope_layers": "a model with layers that do not rotate q and k, which a LLaMA cannot say",
    "parallel_attn": _PARALLEL,
}


def what_it_is(model_type: str, config: Mapping[str, Any]) -> str | None:
    """What a model of this type is and why it does not convert, in words; None for one that nobody knows."""
    if model_type in _BY_TYPE:
        return _BY_TYPE[model_type]
    for field, what in _BY_FIELD.items():
        if config.get(field) not in (None, False, 0, 1, {}, []):
            return what
    if is_known(model_type):
        return "a model of transformers that no family here reads, so what its tensors mean is not known"
    return None
