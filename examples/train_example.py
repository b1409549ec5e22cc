"""Train a small model on the source of the Python standard library: a GPT-2, an openai-gpt or an OPT.

    python examples/train_example.py --out examples/tiny-gpt2
    python examples/train_example.py --family openai-gpt --context 256 --rate 1e-3 --out runs/openai-gpt
    python examples/train_example.py --family opt --context 256 --out runs/opt

The first line rebuilds the embedded example and its tokenizer from nothing but the running interpreter, in about an
hour on two cores. The held-out modules of `converter.text.stdlib` are never trained on.
"""

from __future__ import annotations

import copy
import math
import time
from pathlib import Path

import click
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    OpenAIGPTConfig,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from converter.text.stdlib import held_out_documents, training_documents

END_OF_TEXT = "<|endoftext|>"


def train_tokenizer(documents: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE, as GPT-2 has."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, unk_token=END_OF_TEXT
    )


def token_stream(tokenizer: PreTrainedTokenizerFast, documents: list[str]) -> torch.Tensor:
    """All documents in one row of ids, each one opened by the end-of-text token."""
    encoded = tokenizer(documents, verbose=False)["input_ids"]
    ids = [token for document in encoded for token in (tokenizer.eos_token_id, *document)]
    return torch.tensor(ids, dtype=torch.long)


def make_config(
    family: str, vocab: int, context: int, layers: int, hidden: int, heads: int, end: int
) -> PreTrainedConfig:
    """A config of that family's own class, without dropout: one pass over little text has no need of it."""
    tokens = {"vocab_size": vocab, "bos_token_id": end, "eos_token_id": end}
    if family == "opt":
        return OPTConfig(
            **tokens,
            pad_token_id=None,
            max_position_embeddings=context,
            num_hidden_layers=layers,
            hidden_size=hidden,
            ffn_dim=4 * hidden,
            num_attention_heads=heads,
            word_embed_proj_dim=hidden,
            dropout=0.0,
        )
    shape = {"n_positions": context, "n_embd": hidden, "n_layer": layers, "n_head": heads}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    kind = OpenAIGPTConfig if family == "openai-gpt" else GPT2Config
    return kind(**tokens, **shape, **dropout)


def held_out_loss(model: PreTrainedModel, stream: torch.Tensor, context: int) -> float:
    """Mean next-token loss over consecutive windows, in nats per token."""
    windows = stream[: stream.numel() // context * context].view(-1, context)
    model.eval()
    with torch.no_grad():
        losses = [model(input_ids=chunk, labels=chunk).loss.item() * len(chunk) for chunk in windows.split(8)]
    model.train()
    return float(sum(losses) / len(windows))


def rate_at(step: int, steps: int, peak: float, warmup: int = 200) -> float:
    """Linear warm-up, then a cosine down to nothing."""
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write the checkpoint in half precision, leaving the model in training as it is."""
    copy.deepcopy(model).half().save_pretrained(out)
    tokenizer.save_pretrained(out)


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder to write the checkpoint to.")
@click.option("--family", default="gpt2", show_default=True, type=click.Choice(["gpt2", "openai-gpt", "opt"]))
@click.option("--tokens", default=16_000_000, show_default=True, help="Tokens to train on.")
@click.option("--layers", default=4, show_default=True)
@click.option("--hidden", default=192, show_default=True)
@click.option("--heads", default=3, show_default=True)
@click.option("--context", default=512, show_default=True)
@click.option("--vocab", default=4096, show_default=True)
@click.option("--batch", default=8, show_default=True, help="Sequences a step.")
@click.option("--rate", default=2e-3, show_default=True, help="Peak learning rate.")
@click.option("--seed", default=0, show_default=True)
def main(
    out: Path,
    family: str,
    tokens: int,
    layers: int,
    hidden: int,
    heads: int,
    context: int,
    vocab: int,
    batch: int,
    rate: float,
    seed: int,
) -> None:
    """Train a small model on the standard library and save it in Hugging Face format."""
    torch.manual_seed(seed)
    documents = training_documents()
    tokenizer = train_tokenizer(documents, vocab)
    train, held_out = token_stream(tokenizer, documents), token_stream(tokenizer, list(held_out_documents().values()))
    end = tokenizer.eos_token_id
    config = make_config(family, vocab, context, layers, hidden, heads, end)
    model = AutoModelForCausalLM.from_config(config)
    steps = math.ceil(tokens / (batch * context))
    print(f"{model.num_parameters():,} parameters, {train.numel():,} tokens of text, {steps:,} steps", flush=True)

    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))
    started = time.perf_counter()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, steps, rate)
        starts = torch.randint(train.numel() - context, (batch,)).tolist()
        ids = torch.stack([train[s : s + context] for s in starts])
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 250 == 0 or step + 1 == steps:
            seen = (step + 1) * batch * context
            print(
                f"{seen:>11,} tokens  loss {loss.item():.3f}  held-out {held_out_loss(model, held_out, context):.4f}"
                f"  {seen / (time.perf_counter() - started):,.0f} tokens/s",
                flush=True,
            )
            save(model, tokenizer, out)


if __name__ == "__main__":
    main()
