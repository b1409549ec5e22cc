"""Why norms are worth moving: gradients by depth before and after, and the speed of RMSNorm.

    python benchmarks/norms.py runs/openai-gpt runs/openai-gpt-llama

The two checkpoints are a post-LN model that reads the standard library and what it was converted to. For every layer
the gradient of the held-out loss is printed, relative to the weights: the root of the sum over its matrices of
(|dL/dW| |W|)^2, which no scale of a stream or of a pair of matrices changes. Then the tokens per second of one layer
of GPT-2's size with LayerNorm and with RMSNorm, all else equal: a forward, and a forward with its backward.
"""

from __future__ import annotations

import time
from pathlib import Path

import click
import torch

from converter import reference as model
from converter.blocks import Block, BlockRef, block_shapes, blocks
from converter.families.opened import SourceModel
from converter.spec import Activation, ModelSpec, Norm, Positions
from converter.text.documents import documents_of
from converter.text.gather import tokens_of
from converter.text.stdlib import held_out_documents
from converter.text.windows import Windows, windows

#: Tokens that the gradient is taken over.
_TOKENS = 8192
#: Windows and tokens of the layers that are timed, and how often; the fastest counts.
_SHAPE, _REPEATS = (4, 512), 15


def relative_gradients(path: Path, text: Windows) -> tuple[list[float], float]:
    """The relative gradient of each layer, and the loss."""
    source = SourceModel.open(path)
    spec = source.spec
    read = {ref: source.read_block(ref, torch.float32) for ref in blocks(spec)}
    layers = [read[BlockRef("layer", index)] for index in range(spec.num_layers)]
    weights = [[t.requires_grad_() for role, t in block.items() if t.ndim == 2] for block in layers]
    loss = torch.zeros(())
    count = text.predictions
    for row, length in zip(torch.from_numpy(text.ids), text.lengths.tolist(), strict=True):
        ids = row[None, :length]
        states = model.run_embeddings(read[BlockRef("embeddings")], spec, ids)
        for index, block in enumerate(layers):
            states = model.run_layer(block, spec, index, states)
        logits = model.run_head(read[BlockRef("head")], spec, states)[0, :-1]
        part = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum") / count
        part.backward()
        loss += part.detach()
    found = [
        sum(float(t.grad.norm() * t.detach().norm()) ** 2 for t in each if t.grad is not None) ** 0.5
        for each in weights
    ]
    return found, float(loss)


def held_out_windows(path: Path) -> Windows:
    """Held-out modules in a checkpoint's tokens."""
    source = SourceModel.open(path)
    assert source.tokenizer is not None, "the checkpoint has no tokenizer"
    documents = documents_of(held_out_documents(), tokens_of(source))
    return windows(documents, source.spec.context, _TOKENS)


def gradients_table(source: Path, converted: Path) -> None:
    """Both models, layer by layer."""
    text = held_out_windows(source)
    found = {path: relative_gradients(path, text) for path in (source, converted)}
    print(f"Relative gradient of the held-out loss by layer, {text.predictions:,} predictions")
    for path, (gradients, loss) in found.items():
        shown = "  ".join(f"{gradient:.4f}" for gradient in gradients)
        ratio = gradients[-1] / gradients[0]
        print(f"  {path.name:<28} loss {loss:.4f}   {shown}   last over first {ratio:.2f}")


def layer_of(norm: Norm) -> ModelSpec:
    """GPT-2's layer with one norm or the other."""
    return ModelSpec(
        vocab_size=1,
        hidden_size=768,
        intermediate_size=3072,
        num_layers=1,
        num_heads=12,
        num_kv_heads=12,
        head_dim=64,
        context=_SHAPE[1],
        norm=norm,
        norm_eps=1e-5,
        activation=Activation.GELU_TANH,
        gated_mlp=False,
        positions=Positions.LEARNED,
        attention_scales=(0.125,),
        tied_head=False,
        norm_bias=norm is Norm.LAYERNORM,
        biases=frozenset({"q", "k", "v", "o", "up", "down"}),
    )


def speed_table() -> None:
    """Tokens per second of both kinds, taking turns."""
    states = torch.randn(*_SHAPE, 768)
    print(f"Tokens per second of one layer of GPT-2's size on {states.shape[0]} x {states.shape[1]} tokens")
    for what in ("forward", "forward and backward"):
        seconds = {norm: [] for norm in Norm}  # type: dict[Norm, list[float]]
        for _ in range(_REPEATS):
            for norm in Norm:
                seconds[norm].append(run_once(layer_of(norm), states, backward="backward" in what))
        best = {norm: states.shape[0] * states.shape[1] / min(times) for norm, times in seconds.items()}
        shown = ", ".join(f"{norm.value} {speed:,.0f}" for norm, speed in best.items())
        print(f"  {what:<22} {shown}, {best[Norm.RMSNORM] / best[Norm.LAYERNORM]:.3f} times as fast")


def run_once(spec: ModelSpec, states: torch.Tensor, backward: bool) -> float:
    """Seconds of one pass."""
    shapes = block_shapes(spec, BlockRef("layer"))
    block = Block({role: (torch.randn(shape) * 0.02).requires_grad_(backward) for role, shape in shapes.items()})
    with torch.set_grad_enabled(backward):
        started = time.perf_counter()
        output = model.run_layer(block, spec, 0, states)
        if backward:
            output.square().sum().backward()
        return time.perf_counter() - started


@click.command()
@click.argument("source", type=click.Path(path_type=Path, exists=True))
@click.argument("converted", type=click.Path(path_type=Path, exists=True))
def main(source: Path, converted: Path) -> None:
    """Print both tables."""
    gradients_table(source, converted)
    speed_table()


if __name__ == "__main__":
    main()
