"""Awkward random checkpoints, and their logits by the reference model.

Awkward as design.md section 5 asks: odd vocabulary, head_dim 16, an MLP that is not four times as wide, an eps that is
not the default, more than 64 positions, and every parameter random, norms and biases too: a fresh GPT-2 has zero
biases and unit gains, and hides most mistakes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
)

from converter import reference
from converter.blocks import HEAD, Block, BlockRef, blocks
from converter.families.opened import SourceModel
from converter.ops import Calibration, Notes, Op
from converter.spec import ModelSpec

M = TypeVar("M", bound=PreTrainedModel)

VOCAB = 61
CONTEXT = 72

#: Largest logit difference over the largest logit that rounding alone may make (design.md section 5).
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}

GPT2 = {
    "vocab_size": VOCAB,
    "n_positions": CONTEXT,
    "n_embd": 48,
    "n_layer": 3,
    "n_head": 3,
    "n_inner": 80,
    "layer_norm_epsilon": 3e-4,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}

OPENAI_GPT = {
    "vocab_size": VOCAB,
    "n_positions": CONTEXT,
    "n_embd": 48,
    "n_layer": 3,
    "n_head": 3,
    "layer_norm_epsilon": 3e-4,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}

OPT = {
    "vocab_size": VOCAB,
    "max_position_embeddings": CONTEXT,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "ffn_dim": 80,
    "dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 1,
}

LLAMA = {
    "vocab_size": VOCAB,
    "max_position_embeddings": CONTEXT,
    "hidden_size": 40,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 3e-4,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def gpt2(seed: int = 0, **facts: Any) -> GPT2LMHeadModel:
    """A jittered GPT-2."""
    return jitter(GPT2LMHeadModel(GPT2Config(**{**GPT2, **facts})), seed)


def llama(seed: int = 0, **facts: Any) -> LlamaForCausalLM:
    """A jittered LLaMA: 8 query heads on 2 key-value heads, of 16 rows in a hidden size of 40."""
    return jitter(LlamaForCausalLM(LlamaConfig(**{**LLAMA, **facts})), seed)


def openai_gpt(seed: int = 0, **facts: Any) -> OpenAIGPTLMHeadModel:
    """A jittered openai-gpt: post-LN, without a final norm."""
    return jitter(OpenAIGPTLMHeadModel(OpenAIGPTConfig(**{**OPENAI_GPT, **facts})), seed)


def opt(seed: int = 0, **facts: Any) -> OPTForCausalLM:
    """A jittered OPT; `do_layer_norm_before=False` and a `word_embed_proj_dim` make it one like OPT-350m."""
    return jitter(OPTForCausalLM(OPTConfig(**{**OPT, **facts})), seed)


def jitter(model: M, seed: int) -> M:
    """Random values in every parameter: std 0.2 for matrices, 0.3 around 0 or 1 for biases and gains."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            gain = parameter.ndim == 1 and name.endswith("weight")
            parameter.copy_(noise * (0.2 if parameter.ndim > 1 else 0.3) + float(gain))
    return model.eval()


def tensors_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """Its state dict; of a tied pair only the embedding."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    return state


def config_of(model: PreTrainedModel, **changes: Any) -> dict[str, Any]:
    """Its config as save_pretrained writes it, with fields changed; a field changed to `...` is left out."""
    config = json.loads(model.config.to_json_string()) | changes
    return {key: value for key, value in config.items() if value is not ...}


def write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """A checkpoint folder, byte for byte what is given."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def save(model: PreTrainedModel, folder: Path, **config_changes: Any) -> Path:
    """A model as a checkpoint folder."""
    return write(folder, config_of(model, **config_changes), tensors_of(model))


def edit_config(folder: Path, **changes: Any) -> Path:
    """Change fields of a folder's config; a field changed to `...` is left out."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
    return folder


def random_ids(rows: int = 2, length: int = CONTEXT, seed: int = 0) -> Tensor:
    """Token ids (rows, length)."""
    return torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def write_ids(path: Path, rows: int = 40, seed: int = 1) -> Path:
    """Random documents as a 2-D .npy, for --text."""
    np.save(path, random_ids(rows, CONTEXT, seed).numpy())
    return path


@torch.no_grad()
def logits_of(model: PreTrainedModel, ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Logits of transformers' own class, at every position."""
    return model.to(dtype)(input_ids=ids, use_cache=False).logits


@torch.no_grad()
def run(read: Callable[[BlockRef], Block], spec: ModelSpec, ids: Tensor) -> Tensor:
    """Logits of the reference model, block by block."""
    for ref in blocks(spec):
        block = read(ref)
        if ref.kind == "embeddings":
            states = reference.run_embeddings(block, spec, ids)
        elif ref.kind == "layer":
            states = reference.run_layer(block, spec, ref.index, states)
    return reference.run_head(block, spec, states)


def reference_logits(folder: Path, ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Logits of a checkpoint by the reference model."""
    source = SourceModel.open(folder)
    return run(lambda ref: source.read_block(ref, dtype), source.spec, ids)


def relative(found: Tensor, wanted: Tensor) -> float:
    """Largest difference over the largest wanted value."""
    return float((found - wanted).abs().max() / wanted.abs().max())


class Given(Calibration):
    """Given states (B, T, D) in the place of a walk's stream, and given blocks in the place of a source."""

    def __init__(self, states: Tensor, blocks: Mapping[BlockRef, Block] | None = None) -> None:
        self.states, self.blocks = states, blocks or {}
        self.count, self.length = states.shape[:2]

    def batches(self) -> Iterator[Tensor]:
        yield from self.states.flatten(0, 1).split(50)

    def inputs(self, rows: Tensor) -> Tensor:
        return self.states[rows]

    def targets(self, rows: Tensor) -> Tensor:
        raise LookupError("there is no stream of a source")

    def mask(self, rows: Tensor) -> Tensor:
        return torch.ones(len(rows), self.length, dtype=torch.bool)

    def source_block(self, ref: BlockRef) -> Block:
        return self.blocks[ref]


class Converted:
    """A source after some ops, all blocks in memory."""

    def __init__(self, source: SourceModel, dtype: torch.dtype = torch.float64) -> None:
        self.spec = source.spec
        self.blocks = {ref: source.read_block(ref, dtype) for ref in blocks(source.spec)}
        self.notes = {ref: Notes(ref) for ref in self.blocks}

    def after(self, *steps: Op, calibration: Any = None) -> Converted:
        """This model after these ops too."""
        for op in steps:
            spec = self.spec
            self.spec = op.change(spec)
            for ref, block in self.blocks.items():
                given = calibration if ref == HEAD else None
                self.blocks[ref] = op.apply(block, spec, self.notes[ref], given)
        return self

    def logits(self, ids: Tensor) -> Tensor:
        """Logits by the reference model."""
        return run(self.blocks.__getitem__, self.spec, ids)
