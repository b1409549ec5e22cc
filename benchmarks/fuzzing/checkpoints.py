"""Tiny checkpoints of every kind that is read, every parameter random."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB, CONTEXT = 48, 24

_IDS = {"bos_token_id": 0, "eos_token_id": 0}
_LLAMA = {
    "vocab_size": VOCAB,
    "max_position_embeddings": CONTEXT,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 3e-4,
    "tie_word_embeddings": False,
    **_IDS,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "vocab_size": VOCAB,
        "n_positions": CONTEXT,
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
        "n_inner": 24,
        "layer_norm_epsilon": 3e-4,
        **_IDS,
    },
    "opt": {
        "vocab_size": VOCAB,
        "max_position_embeddings": CONTEXT,
        "hidden_size": 16,
        "word_embed_proj_dim": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "ffn_dim": 24,
        "pad_token_id": 1,
        **_IDS,
    },
    "openai-gpt": {"vocab_size": VOCAB, "n_positions": CONTEXT, "n_embd": 16, "n_layer": 2, "n_head": 2},
    "llama": _LLAMA,
    "llama, scaled": {
        **_LLAMA,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8,
        },
    },
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "mistral": _LLAMA | {"sliding_window": None},
    "gpt_neox": {
        "vocab_size": VOCAB,
        "max_position_embeddings": CONTEXT,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "layer_norm_eps": 3e-4,
        **_IDS,
    },
    "gptj": {
        "vocab_size": VOCAB,
        "n_positions": CONTEXT,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 2,
        "n_inner": 40,
        "rotary_dim": 8,
        "layer_norm_epsilon": 3e-4,
        **_IDS,
    },
}


def make(name: str) -> PreTrainedModel:
    """A model with every parameter random, by a fixed seed."""
    config = AutoConfig.for_model(name.partition(",")[0], **CONFIGS[name])
    model = AutoModelForCausalLM.from_config(config).float().eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            gain = float(parameter.ndim == 1 and key.endswith("weight"))
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * (0.3 if gain else 0.2) + gain)
    return model


def state(model: PreTrainedModel) -> dict[str, Tensor]:
    """Its tensors; of a tied pair the embedding only."""
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    return tensors


def ids(rows: int = 6, seed: int = 0) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Random token ids (rows, CONTEXT)."""
    return np.random.default_rng(seed).integers(1, VOCAB, (rows, CONTEXT))


def write(folder: Path, name: str, weights: str = "safetensors") -> Path:
    """A Hugging Face folder; `weights` says how they are stored."""
    model = make(name)
    folder.mkdir(parents=True)
    config = json.loads(model.config.to_json_string()) | {"architectures": [type(model).__name__]}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 5], "do_sample": False}))
    tensors = state(model)
    names = sorted(tensors)
    halves = {"00001": names[: len(names) // 2], "00002": names[len(names) // 2 :]}
    if weights == "safetensors":
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    elif weights == "bin":
        buffers = {f"transformer.h.{n}.attn.bias": torch.ones(1, 1, CONTEXT, CONTEXT).tril() for n in range(2)}
        torch.save(tensors | (buffers if name == "gpt2" else {}), folder / "pytorch_model.bin")
    elif weights == "old bin":
        torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    elif weights in ("sharded", "sharded bin"):
        stem, end = ("model", "safetensors") if weights == "sharded" else ("pytorch_model", "bin")
        index: dict[str, str] = {}
        for part, held in halves.items():
            file = f"{stem}-{part}-of-00002.{end}"
            half = {each: tensors[each] for each in held}
            if end == "bin":
                torch.save(half, folder / file)
            else:
                save_file(half, folder / file, {"format": "pt"})
            index |= dict.fromkeys(held, file)
        size = sum(tensor.nbytes for tensor in tensors.values())
        content = {"metadata": {"total_size": size}, "weight_map": index}
        (folder / f"{stem}.{end}.index.json").write_text(json.dumps(content, indent=1))
    return folder


def write_tokenizer(folder: Path) -> None:
    """A BPE of 48 tokens over a few letters, in the files that GPT-2 has."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=["<|endoftext|>"], show_progress=False)
    tokenizer.train_from_iterator([PROSE], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    facts = {"tokenizer_class": "GPT2TokenizerFast", "model_max_length": CONTEXT, "eos_token": "<|endoftext|>"}
    facts |= {"bos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))
    tokens = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    (folder / "special_tokens_map.json").write_text(json.dumps(tokens))
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    pairs = [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(pairs) + "\n")


PROSE = "the cat sat on the mat and the rat sat on the cat <|endoftext|> a hat is not a cat nor a mat " * 12


def write_nanogpt(folder: Path) -> None:
    """`ckpt.pt` as nanoGPT's train.py writes it, from the GPT-2."""
    folder.mkdir()
    tensors = state(make("gpt2"))
    transposed = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    tensors = {name: tensor.T.contiguous() if name.endswith(transposed) else tensor for name, tensor in tensors.items()}
    wide = {"c_fc": (64, 16), "c_proj": (16, 64)}  # its MLP is always four times as wide
    generator = torch.Generator().manual_seed(6)
    for name in [name for name in tensors if ".mlp." in name]:
        part = name.split(".")[-2]
        shape = wide[part] if name.endswith("weight") else wide[part][:1]
        tensors[name] = torch.randn(shape, generator=generator) * 0.2
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"]
    facts = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": CONTEXT, "bias": True, "vocab_size": VOCAB}
    content = {
        "model": {f"_orig_mod.{name}": tensor for name, tensor in tensors.items()},
        "optimizer": {"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": [{"lr": 1e-3, "params": [0]}]},
        "model_args": facts | {"dropout": 0.0},
        "iter_num": 7,
        "best_val_loss": torch.tensor(1.5),
        "config": {"out_dir": "out", "compile": True},
    }
    torch.save(content, folder / "ckpt.pt")


_META = {
    "model.embed_tokens.weight": "tok_embeddings.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "model.layers": "layers",
}
_GGUF = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _llama(names: dict[str, str]) -> dict[str, Tensor]:
    """The LLaMA under other names, its rows of q and k interleaved."""
    tensors = {}
    for name, tensor in state(make("llama")).items():
        if "q_proj" in name or "k_proj" in name:
            tensor = tensor.view(-1, 2, 4, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape).contiguous()
        for old, new in names.items():
            name = name.replace(old, new)
        tensors[name] = tensor
    return tensors


def write_meta(folder: Path) -> None:
    """Meta's folder, in two ranks."""
    folder.mkdir()
    columns = ("attention.wo.weight", "feed_forward.w2.weight", "tok_embeddings.weight")
    config = CONFIGS["llama"]
    for rank in range(2):
        parts = {}
        for name, tensor in _llama(_META).items():
            axis = None if tensor.ndim == 1 else 1 if name.endswith(columns) else 0
            parts[name] = tensor if axis is None else tensor.chunk(2, axis)[rank].clone()
        torch.save(parts, folder / f"consolidated.{rank:02}.pth")
    params = {"dim": config["hidden_size"], "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": VOCAB}
    params |= {"multiple_of": 8, "norm_eps": 3e-4, "rope_theta": 10000.0, "ffn_dim_multiplier": 0.45}
    (folder / "params.json").write_text(json.dumps(params))


def write_gguf(path: Path) -> None:
    """A GGUF file as llama.cpp's converter writes it, with a tokenizer's tokens."""
    import gguf

    config = CONFIGS["llama"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_vocab_size(VOCAB)
    for name, tensor in _llama(_GGUF).items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_adapter(folder: Path, base: Path) -> None:
    """A LoRA on q, k and v of a LLaMA."""
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for name, weight in state(make("llama")).items():
        if any(part in name for part in ("q_proj", "k_proj", "v_proj")):
            stem = "base_model.model." + name.removesuffix(".weight")
            tensors[f"{stem}.lora_A.weight"] = torch.randn(4, weight.shape[1], generator=generator)
            tensors[f"{stem}.lora_B.weight"] = torch.randn(weight.shape[0], 4, generator=generator)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    facts = {"peft_type": "LORA", "base_model_name_or_path": str(base), "r": 4, "lora_alpha": 8}
    facts |= {"target_modules": ["q_proj", "k_proj", "v_proj"], "bias": "none", "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(facts))
