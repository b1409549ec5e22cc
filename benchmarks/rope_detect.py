"""Train small RoPE models, and calibrate and test the layout detection on them.

    python benchmarks/rope_detect.py train ZOO [--minutes 25]    one file of q, k and facts a model
    python benchmarks/rope_detect.py evaluate ZOO [--split test]  error rates on variants, right and mis-permuted

The models are trained from scratch on the Python standard library, byte by byte, by the reference model; weights stay
outside the repository.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from converter import reference as model
from converter.blocks import BlockRef, block_shapes, blocks
from converter.layout import other_layout, swap_rows
from converter.rope.columns import Columns
from converter.rope.detect import COLUMNS, Detection, detect_layers
from converter.spec import Activation, ModelSpec, Norm, Positions, RopeLayout, RopeSpec
from converter.text.stdlib import training_documents

Layers = list[tuple[torch.Tensor, torch.Tensor]]

LENGTH = 128
BATCH = 12


@dataclasses.dataclass(frozen=True)
class Shape:
    """One model of the zoo."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    theta: float
    layout: str
    rotary: int = 0  # 0: all of head_dim
    #: "calibrate"; "test": looked at late; "fresh": trained when the rule was final; "none": trained without RoPE
    split: str = "calibrate"
    steps: int = 500

    def spec(self, trained_as: bool = False) -> ModelSpec:
        """Its architecture as it is declared, or as it was trained: a byte-level LLaMA."""
        return ModelSpec(
            vocab_size=256,
            hidden_size=self.hidden,
            intermediate_size=self.hidden * 2,
            num_layers=self.layers,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            context=LENGTH,
            norm=Norm.RMSNORM,
            norm_eps=1e-5,
            activation=Activation.SILU,
            gated_mlp=True,
            positions=Positions.ROPE,
            attention_scales=(self.head_dim**-0.5,) * self.layers,
            tied_head=True,
            rope=RopeSpec(
                self.theta,
                self.rotary or self.head_dim,
                RopeLayout(self.layout),
                skipped_layers=tuple(range(self.layers)) if trained_as and self.split == "none" else (),
            ),
        )


ZOO = (
    Shape("a0", 128, 3, 8, 2, 16, 1e4, "half_split"),
    Shape("a1", 128, 3, 4, 2, 32, 1e4, "interleaved"),
    Shape("a2", 96, 4, 6, 2, 32, 5e5, "half_split"),
    Shape("a3", 128, 2, 4, 1, 64, 1e4, "interleaved"),
    Shape("a4", 96, 3, 9, 3, 16, 1e5, "interleaved"),
    Shape("a5", 160, 2, 8, 8, 32, 1e6, "half_split"),
    Shape("a6", 64, 4, 4, 4, 32, 1e4, "half_split"),
    Shape("a7", 128, 2, 2, 2, 64, 5e5, "interleaved"),
    Shape("a8", 128, 3, 8, 4, 32, 1e4, "half_split", rotary=16),
    Shape("a9", 96, 3, 4, 4, 32, 1e4, "interleaved", rotary=16),
    Shape("a10", 64, 3, 6, 3, 24, 1e4, "interleaved"),
    Shape("a11", 128, 2, 6, 2, 48, 1e5, "half_split"),
    Shape("a12", 96, 3, 4, 2, 64, 1e6, "half_split"),
    Shape("t0", 128, 3, 6, 2, 32, 1e4, "half_split", split="test"),
    Shape("t1", 112, 3, 8, 2, 32, 5e5, "interleaved", split="test"),
    Shape("t2", 96, 2, 4, 2, 64, 1e4, "half_split", split="test"),
    Shape("t3", 128, 3, 8, 4, 16, 1e4, "interleaved", split="test"),
    Shape("t4", 96, 4, 4, 4, 32, 1e4, "half_split", rotary=16, split="test"),
    Shape("t5", 128, 2, 9, 3, 32, 1e5, "interleaved", split="test"),
    Shape("t6", 96, 3, 6, 6, 16, 1e4, "half_split", split="test", steps=300),
    Shape("t7", 160, 2, 8, 2, 32, 1e6, "interleaved", split="test"),
    Shape("t8", 80, 4, 4, 2, 24, 1e4, "half_split", split="test", steps=800),
    Shape("f0", 96, 3, 6, 3, 32, 3e4, "half_split", split="fresh"),
    Shape("f1", 112, 3, 4, 4, 40, 2e5, "interleaved", split="fresh"),
    Shape("f2", 128, 2, 8, 4, 24, 1e7, "half_split", split="fresh"),
    Shape("f3", 96, 4, 5, 5, 32, 5e3, "interleaved", split="fresh"),
    Shape("n0", 96, 3, 6, 2, 32, 1e4, "half_split", split="none"),
    Shape("f4", 128, 3, 12, 4, 16, 7e4, "half_split", split="fresh"),
    Shape("f5", 80, 3, 4, 2, 56, 2e4, "interleaved", split="fresh"),
    Shape("n1", 128, 2, 4, 4, 32, 1e4, "interleaved", split="none"),
    Shape("f6", 96, 3, 8, 2, 32, 3e5, "interleaved", rotary=24, split="fresh"),
    Shape("f7", 112, 2, 4, 4, 64, 5e4, "half_split", rotary=20, split="fresh"),
    Shape("n2", 96, 4, 8, 2, 16, 1e4, "half_split", split="none"),
)


def bytes_of_corpus() -> torch.Tensor:
    """The standard library as one stream of bytes."""
    text = "\n\n".join(training_documents()).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def train(shape: Shape, corpus: torch.Tensor, seed: int) -> tuple[dict[str, torch.Tensor], float]:
    """Roles by "block.role" and the mean loss of the last steps, nats per byte."""
    spec = shape.spec(trained_as=True)
    generator = torch.Generator().manual_seed(seed)
    parameters: dict[BlockRef, dict[str, torch.Tensor]] = {}
    for ref in blocks(spec):
        roles = {}
        for role, size in block_shapes(spec, ref).items():
            if "norm" in role:
                tensor = torch.ones(size)
            else:
                tensor = torch.randn(size, generator=generator) * (
                    0.02 if ref.kind != "layer" else size[-1] ** -0.5 / 2
                )
            roles[role] = tensor.requires_grad_()
        parameters[ref] = roles
    refs = list(parameters)
    parameters[refs[-1]]["head.weight"] = parameters[refs[0]]["embed.weight"]
    flat = list({id(t): t for roles in parameters.values() for t in roles.values()}.values())
    optimizer = torch.optim.AdamW(flat, lr=4e-3, betas=(0.9, 0.95), weight_decay=0.1)
    losses = []
    for step in range(shape.steps):
        rate = min(1.0, (step + 1) / 50) * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / shape.steps)))
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * rate
        starts = torch.randint(0, len(corpus) - LENGTH - 1, (BATCH,), generator=generator)
        ids = torch.stack([corpus[s : s + LENGTH + 1] for s in starts.tolist()]).long()
        states = model.run_embeddings(parameters[refs[0]], spec, ids[:, :-1])
        for ref in refs[1:-1]:
            states = model.run_layer(parameters[ref], spec, ref.index, states)
        logits = model.run_head(parameters[refs[-1]], spec, states)
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(flat, 1.0)
        optimizer.step()
        losses.append(loss.item())
    named = {f"{ref}.{role}": t.detach().clone() for ref, roles in parameters.items() for role, t in roles.items()}
    return named, sum(losses[-20:]) / 20


def train_zoo(folder: Path, minutes: float, only: list[str]) -> None:
    """Train what is not there yet, as long as the time lasts."""
    torch.set_num_threads(1)
    corpus = bytes_of_corpus()
    begin = time.monotonic()
    for index, shape in enumerate(ZOO):
        path = folder / f"{shape.name}.pt"
        if path.exists() or (only and shape.name not in only):
            continue
        if time.monotonic() - begin > minutes * 60:
            print("out of time")
            return
        start = time.process_time()
        roles, loss = train(shape, corpus, seed=index)
        torch.save({"roles": roles, "shape": dataclasses.asdict(shape), "loss": loss}, path)
        print(
            json.dumps({"name": shape.name, "loss": round(loss, 3), "cpu_s": round(time.process_time() - start, 1)}),
            flush=True,
        )


def load(path: Path) -> tuple[Shape, Layers]:
    """A trained model's facts, and its q and k by layer."""
    saved = torch.load(path)
    shape = Shape(**saved["shape"])
    roles = saved["roles"]
    return shape, [(roles[f"layers.{i}.q.weight"], roles[f"layers.{i}.k.weight"]) for i in range(shape.layers)]


def permuted(
    layers: Layers, shape: Shape, to: RopeLayout, *, q: int | None = 0, k: int | None = 0, whole: bool = False
) -> Layers:
    """q and k moved to a layout by these head counts; 0 is the right count, None leaves the part alone."""
    result = []
    for pair in layers:
        moved = []
        for rows, count, right in zip(pair, (q, k), (shape.heads, shape.kv_heads), strict=True):
            heads = right if count == 0 else count
            if heads is None:
                moved.append(rows)
                continue
            unit = rows.shape[0] // heads
            width = unit if whole or heads != right else shape.rotary or unit
            moved.append(swap_rows(rows, heads, unit, width, to))
        result.append((moved[0], moved[1]))
    return result


def variants(shape: Shape, layers: Layers) -> dict[str, tuple[Layers, str]]:
    """Name -> q and k, and the verdict that is right: a layout, or "fault"."""
    native = RopeLayout(shape.layout)
    other = other_layout(native)
    heads, kv_heads, d = shape.heads, shape.kv_heads, shape.head_dim
    found = {
        "as trained": (layers, native.value),
        "swapped": (permuted(layers, shape, other), other.value),
        "there and back": (permuted(permuted(layers, shape, other), shape, native), native.value),
        "q only": (permuted(layers, shape, other, k=None), "fault"),
        "k only": (permuted(layers, shape, other, q=None), "fault"),
        "once more": (permuted(layers, shape, native), "fault"),
    }
    if shape.rotary:
        found["whole heads"] = (permuted(layers, shape, other, whole=True), "fault")
    elif heads != kv_heads:
        found["q by k's heads"] = (permuted(layers, shape, other, q=kv_heads), "fault")
        if (kv_heads * d) % (2 * heads) == 0 and kv_heads * d > 2 * heads:
            found["k by q's heads"] = (permuted(layers, shape, other, k=heads), "fault")
    return found


def nulls(layers: Layers, shape: Shape, seed: int) -> dict[str, Layers]:
    """Models in which no order is right.

    Fresh weights; the trained rows in random order; and in one that q and k have in common in each head, as in a model
    that learnt to compare q and k without any rotation.
    """
    generator = torch.Generator().manual_seed(seed)
    shuffled = [tuple(rows[torch.randperm(rows.shape[0], generator=generator)] for rows in pair) for pair in layers]
    fresh = [tuple(torch.randn(rows.shape, generator=generator) for rows in pair) for pair in layers]
    alike = []
    for q, k in layers:
        within = torch.stack([torch.randperm(shape.head_dim, generator=generator) for _ in range(shape.kv_heads)])
        of_k = (within + torch.arange(shape.kv_heads)[:, None] * shape.head_dim).flatten()
        within = within.repeat_interleave(shape.heads // shape.kv_heads, dim=0)
        of_q = (within + torch.arange(shape.heads)[:, None] * shape.head_dim).flatten()
        alike.append((q[of_q], k[of_k]))
    return {
        "rows shuffled": [(q, k) for q, k in shuffled],
        "untrained": [(q, k) for q, k in fresh],
        "shuffled alike": alike,
        "alike, q moved": permuted(alike, shape, RopeLayout.INTERLEAVED, k=None),
    }


def arrays(layers: Layers) -> list[tuple[Columns, Columns]]:
    """As the detection reads them from a checkpoint: the first columns only."""
    return [(q[:, :COLUMNS].numpy(), k[:, :COLUMNS].numpy()) for q, k in layers]


def verdict(found: Detection) -> str:
    """What a detection says: a layout, "fault" or "unknown"."""
    return "fault" if found.fault else found.layout


def evaluate(folder: Path, split: str) -> None:
    """Count right, unknown and wrong verdicts."""
    tally = dict.fromkeys(("right", "unknown", "wrong"), 0)
    null_rotations, false_alarms = [], 0
    for path in sorted(folder.glob("*.pt")):
        shape, layers = load(path)
        if shape.split != split:
            continue
        spec = shape.spec()
        for name, (rows, wanted) in variants(shape, layers).items():
            found = detect_layers(arrays(rows), spec)
            wanted = "unknown" if shape.split == "none" else wanted
            outcome = "right" if verdict(found) == wanted else "unknown" if verdict(found) == "unknown" else "wrong"
            tally[outcome] += 1
            facts = f"score {found.score:6.1f} rotation {found.rotation:6.1f} margin {found.margin:6.1f}"
            print(f"{shape.name:4} {name:16} {outcome:8} {facts} {found.fault or ''}")
        for seed in range(5):
            for rows in nulls(layers, shape, seed).values():
                found = detect_layers(arrays(rows), spec)
                null_rotations.append(found.rotation)
                false_alarms += verdict(found) != "unknown"
    total = sum(tally.values())
    if not total:
        raise SystemExit(f"{folder} has no trained model of the split '{split}'")
    print(f"{split}: {tally} of {total} variants; at 95 % confidence at most {3 / total:.1%} wrong if none was")
    print(f"nulls: {false_alarms} of {len(null_rotations)} got a verdict; highest rotation {max(null_rotations):.1f}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["train", "evaluate"])
    parser.add_argument("zoo", type=Path)
    parser.add_argument("--minutes", type=float, default=25.0)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--split", choices=["calibrate", "test", "fresh", "none"], default="calibrate")
    arguments = parser.parse_args()
    arguments.zoo.mkdir(parents=True, exist_ok=True)
    if arguments.command == "train":
        train_zoo(arguments.zoo, arguments.minutes, arguments.only)
    else:
        evaluate(arguments.zoo, arguments.split)


if __name__ == "__main__":
    main()
