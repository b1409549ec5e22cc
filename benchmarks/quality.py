"""What a conversion keeps: every figure of docs/conversion.md, measured anew.

    python benchmarks/quality.py            # the embedded example
    python benchmarks/quality.py my-gpt2    # another model that reads the standard library
    python benchmarks/quality.py runs/openai-gpt --only recipes    # a post-LN model, healed too

Converts with the naive, the default and the compact recipe, each calibrated on library modules and measured on the
held-out ones; then zeroes biases instead of folding them, fits twice with one seed, and measures the peak memory of
a calibrated conversion at GPT-2-XL's width. About fifteen minutes on two cores for the embedded example.
"""

from __future__ import annotations

import dataclasses
import hashlib
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import torch
from convert import make_source
from measured import measured

from converter.blocks import LINEARS, Block, BlockRef, block_shapes
from converter.conversion.recipe import load_recipe
from converter.conversion.report import ConversionReport
from converter.conversion.run import convert, plan_conversion
from converter.conversion.walk import Walk
from converter.families.opened import SourceModel
from converter.files.tokenizer import load_tokenizer
from converter.healing.run import heal
from converter.measure.metrics import Figures
from converter.ops import Calibration, Notes, Op
from converter.ops.drop_biases import DropBiases
from converter.ops.fit_blocks import MICRO_BATCH
from converter.spec import ModelSpec
from converter.text.gather import gather_texts, is_embedded_example
from converter.text.stdlib import held_out_documents, training_documents

RECIPES = ("gpt2-to-llama-naive", "gpt2-to-llama", "gpt2-to-llama-compact")
POST_LN_RECIPES = ("postln-to-llama", "postln-to-llama-compact")
#: How the result for a post-LN source is healed.
HEALING = ["heal.ce=0.1"]
#: Characters of calibration text for a model that is not the embedded example: 1 M tokens or so.
_CHARACTERS = 4_000_000


@dataclass(frozen=True)
class ZeroBiases(Op):
    """Zero the biases, but for the constant `up`: that has no way out other than `drop_biases`' own."""

    name = "zero_biases"
    summary = "for comparison"

    def exact(self, spec: ModelSpec) -> bool:
        return False

    def change(self, spec: ModelSpec) -> ModelSpec:
        return spec

    def apply(self, block: Block, spec: ModelSpec, notes: Notes, calibration: Calibration | None) -> Block:
        return Block({r: t * 0 if r.endswith(".bias") and not r.startswith("up") else t for r, t in block.items()})


def texts_for(model: Path, folder: Path) -> tuple[list[Path], list[Path]]:
    """Calibration and held-out text; nothing for the embedded example, which finds its own."""
    if is_embedded_example(SourceModel.open(model)):
        return [], []
    tokenizer = load_tokenizer(model)
    assert tokenizer is not None
    order = torch.randperm(len(documents := training_documents()), generator=torch.Generator().manual_seed(0)).tolist()
    separator = tokenizer.eos_token or "\n"
    calibration, held_out = folder / "calibration.txt", folder / "held-out.txt"
    calibration.write_text(separator.join(documents[i] for i in order)[:_CHARACTERS], encoding="utf-8")
    held_out.write_text(separator.join(held_out_documents().values()), encoding="utf-8")
    return [calibration], [held_out]


def after(report: ConversionReport, op: str) -> Figures:
    """The figures after an op."""
    comparison = next(step.comparison for step in report.steps if step.name == op)
    assert comparison is not None
    return comparison.total


def judge(what: str, figure: float, limit: float) -> None:
    """One line: a figure and what it may be."""
    print(f"  {what:<58} {figure:>10.5f}   at most {limit:.5f}   {'reached' if figure <= limit else 'MISSED'}")


def recipe_reports(
    model: Path, recipes: tuple[str, ...], text: tuple[list[Path], list[Path]], folder: Path
) -> list[ConversionReport]:
    """The reports of some recipes; prints time, KL and loss after every op of each."""
    reports = []
    for recipe in recipes:
        started = time.perf_counter()
        report = convert(model, folder / recipe, recipe=recipe, text=text[0], eval_text=text[1], dtype="float32")
        reports.append(report)
        print(f"\n{recipe}: {time.perf_counter() - started:.0f} s, {report.text}")
        for step in report.steps:
            if step.comparison is not None and step.needed and not step.exact:
                total = step.comparison.total
                print(
                    f"  {step.name:<28} KL {total.kl:.5f}  loss {total.loss_increase:+.5f}  top-1 {total.agreement:.2%}"
                )
                for name, values in step.errors.items():
                    print(f"      {name}: " + " ".join(f"{value:.1%}" for value in values.values()))
    return reports


def post_ln_table(model: Path, text: tuple[list[Path], list[Path]], folder: Path) -> None:
    """The recipes for a post-LN source, and the limits of the default one, before healing and after."""
    default, _ = recipe_reports(model, POST_LN_RECIPES, text, folder)
    converted, healed_to = folder / POST_LN_RECIPES[0], folder / "healed"
    report = heal(converted, healed_to, teacher=model, text=text[0], eval_text=text[1], overrides=HEALING)
    assert report.after is not None
    healed = report.after.total
    print(f"\nhealed, {report.tokens:,} tokens, {' '.join(HEALING)}: KL {healed.kl:.5f}")
    print("\nLimits")
    judge("default recipe: loss above the source's", after(default, "fold_final_norm_bias").loss_increase, 0.02)
    judge("healed: loss above the source's", healed.loss_increase, 0.0)


def recipes_table(model: Path, text: tuple[list[Path], list[Path]], folder: Path) -> None:
    """The recipes for a pre-LN source, and the limits of each."""
    naive, default, compact = recipe_reports(model, RECIPES, text, folder)
    print("\nLimits")
    lost = after(naive, "learned_positions_to_rope").loss_increase
    positions = after(default, "learned_positions_to_rope").kl
    judge("gelu_to_swiglu, K = 1: KL", after(default, "gelu_to_swiglu").kl, 1e-3)
    judge("positions, calibrated: KL", after(default, "fit_blocks").kl, positions / 4)
    shift = next(row for row in default.yardstick if row.shift == 1)
    judge("  the same, against the yardstick of a shift by 1", after(default, "fit_blocks").kl, shift.figures.kl)
    for name, report, limit in (("default", default, max(5e-3, lost / 10)), ("compact", compact, max(2e-2, lost / 5))):
        judge(f"{name} recipe: loss above the source's", after(report, "fold_final_norm_bias").loss_increase, limit)


def biases_table(model: Path, text: tuple[list[Path], list[Path]]) -> None:
    """Biases folded against biases zeroed, both before any fitting, after the same steps."""
    recipe = load_recipe("gpt2-to-llama", ["calibration.tokens=65536"])
    steps = [step for step in recipe.steps if step.name != "fit_blocks"]
    kls = {}
    for op in (DropBiases(), ZeroBiases()):
        place = len(steps) - 1
        chosen = (*steps[:place], op, *steps[place:])
        plan = plan_conversion(model, dataclasses.replace(recipe, steps=chosen, places=("",) * len(chosen)))
        found = gather_texts(plan, *text)
        walk = Walk(plan, found.calibration, found.evaluation)
        for _ in walk:
            pass
        before, now = (walk.findings.comparisons[place + by].total.kl for by in (-1, 0))
        kls[op.name] = now - before
        print(f"  {op.name:<28} KL {now:.5f}, {now - before:+.5f} by this op")
    judge("drop_biases: KL that it adds", kls["drop_biases"], kls["zero_biases"] / 3)


def seed_table(model: Path, text: tuple[list[Path], list[Path]], folder: Path) -> None:
    """The same seed twice."""
    digests = set()
    for run in ("first", "second"):
        settings = ["fit_blocks.steps=20", "calibration.tokens=16384", "verify.tokens=2048"]
        convert(model, folder / run, overrides=settings, text=text[0], eval_text=text[1])
        digests.add(hashlib.sha256((folder / run / "model.safetensors").read_bytes()).hexdigest())
    print(f"  the same seed twice: {'the same bytes' if len(digests) == 1 else 'OTHER BYTES'}")


def memory_table(folder: Path) -> None:
    """Peak memory of a calibrated conversion of a GPT-2 of XL's width on 16 x 512 tokens, in a process of its own.

    One layer, for the peak of the others is the same; the embeddings and the head are there.
    """
    spec = xl_spec()
    source, ids = folder / "xl", folder / "xl.npy"
    make_source(source, 1, spec.hidden_size, spec.num_heads, spec.vocab_size, spec.context)
    np.save(ids, np.random.default_rng(0).integers(0, spec.vocab_size, (18, 512), dtype=np.int32))
    peak = measured(_IMPORTS, _CALIBRATED, source, folder / "xl-llama", ids).peak
    block = Block({role: torch.zeros(shape) for role, shape in block_shapes(spec, BlockRef("layer")).items()})
    graph = graph_bytes(block, spec, torch.zeros(MICRO_BATCH // 512, 512, spec.hidden_size))
    source_bytes, block_bytes = 4 * 12 * spec.hidden_size**2, sum(tensor.nbytes for tensor in block.values())
    print(f"  MB: a source block {source_bytes / 1e6:.0f}, a target block {block_bytes / 1e6:.0f}", end="")
    print(f", a micro-batch's graph {graph / 1e6:.0f}")
    limit = source_bytes + 4 * block_bytes + graph + 5e8
    judge("peak memory of calibration, GPT-2-XL shape, GB", peak / 1e9, limit / 1e9)


_IMPORTS = "import torch, transformers, converter; converter.convert"
_CALIBRATED = """
settings = ["fit_blocks.steps=2", "fit_blocks.sequences=16", "calibration.tokens=8192"]
converter.convert(sys.argv[1], sys.argv[2], recipe="gpt2-to-llama", text=sys.argv[3], overrides=settings, verify=False)
"""


def graph_bytes(block: Block, spec: ModelSpec, states: torch.Tensor) -> int:
    """Bytes that autograd keeps for the backward of one micro-batch, the parameters left out."""
    from converter.reference import run_layer

    own = {tensor.data_ptr() for tensor in block.values()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    few = states[:1]
    roles = {role: tensor.requires_grad_() for role, tensor in block.items()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run_layer(roles, spec, 0, few)
    for tensor in block.values():
        tensor.requires_grad_(False)
    return sum(kept.values()) * len(states)


def xl_spec() -> ModelSpec:
    """A GPT-2-XL after the ops before `fit_blocks`."""
    from converter.spec import Activation, Norm, Positions, RopeSpec

    return ModelSpec(
        vocab_size=50257,
        hidden_size=1600,
        intermediate_size=6400,
        num_layers=48,
        num_heads=25,
        num_kv_heads=25,
        head_dim=64,
        context=1024,
        norm=Norm.RMSNORM,
        norm_eps=1e-5,
        activation=Activation.SILU,
        gated_mlp=True,
        positions=Positions.ROPE,
        attention_scales=(0.125,) * 48,
        tied_head=False,
        biases=frozenset(LINEARS),
        rope=RopeSpec(10000.0, 64),
    )


@click.command()
@click.argument("model", type=click.Path(path_type=Path, exists=True), default=Path("examples/tiny-gpt2"))
@click.option("--only", type=click.Choice(["recipes", "biases", "seed", "memory"]), help="One table of the four.")
def main(model: Path, only: str | None) -> None:
    """Print every table."""
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        text = texts_for(model, folder)
        print(f"{model}: nats per token on held-out library modules, {torch.get_num_threads()} threads")
        if only in (None, "recipes"):
            table = recipes_table if SourceModel.open(model).spec.pre_norm else post_ln_table
            table(model, text, folder)
        if only in (None, "biases"):
            print("\nBiases away, before any fitting")
            biases_table(model, text)
        if only in (None, "seed"):
            print("\nDeterminism")
            seed_table(model, text, folder)
        if only in (None, "memory"):
            print("\nMemory", flush=True)
            memory_table(folder)


if __name__ == "__main__":
    main()
