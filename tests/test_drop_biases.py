"""drop_biases: much less is lost than by zeroing them, what may stay stays, and what is lost is told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import models
import pytest
import torch
from transformers import AutoModelForCausalLM
from walks import EXACT, source, walk

import converter
from converter.blocks import Block, BlockRef
from converter.families.opened import SourceModel
from converter.ops import Calibration, Notes, Op
from converter.ops.drop_biases import DropBiases, _move_to_v
from converter.ops.drop_final_norm_bias import DropFinalNormBias
from converter.ops.gelu_to_swiglu import GeluToSwiglu
from converter.ops.learned_positions_to_rope import LearnedPositionsToRope
from converter.spec import ModelSpec

BEFORE = (*EXACT, DropFinalNormBias(), GeluToSwiglu(), LearnedPositionsToRope())


@dataclass(frozen=True)
class ZeroBiases(Op):
    """What a conversion without calibration would do; the constant `up` alone has no such way out."""

    name = "zero_biases"
    summary = "for tests"

    def exact(self, spec: ModelSpec) -> bool:
        return False

    def change(self, spec: ModelSpec) -> ModelSpec:
        return spec

    def apply(self, block: Block, spec: ModelSpec, notes: Notes, calibration: Calibration | None) -> Block:
        return Block({r: t * 0 if r.endswith(".bias") and not r.startswith("up") else t for r, t in block.items()})


def test_the_start_beats_zeroed_biases_by_far(tmp_path: Path) -> None:
    opened = source(tmp_path)
    rope = "learned_positions_to_rope"
    folded, zeroed = walk(opened, *BEFORE, DropBiases()), walk(opened, *BEFORE, ZeroBiases(), rows=2)
    lost = folded.findings.drifts, zeroed.findings.drifts
    assert folded.kl("drop_biases") - folded.kl(rope) < (zeroed.kl("zero_biases") - zeroed.kl(rope)) / 3, lost


@pytest.mark.parametrize(("keep", "target", "left"), [("none", "mistral", set()), ("qkv", "qwen2", {"q", "k", "v"})])
def test_only_the_biases_that_may_stay_are_left(keep: str, target: str, left: set[str], tmp_path: Path) -> None:
    walked = walk(source(tmp_path), *BEFORE, DropBiases(keep), target=target, rows=8)  # type: ignore[arg-type]
    parts = {name.split(".")[-2].removesuffix("_proj") for name in walked.tensors if name.endswith(".bias")}
    assert parts == left
    assert walked.plan.target_spec.biases == left


def test_every_bias_is_told_with_what_is_lost_of_it(tmp_path: Path) -> None:
    walked = walk(source(tmp_path), *BEFORE, DropBiases(), rows=8)
    dropped = walked.findings.dropped[-2]
    assert {each.name for each in dropped} == {
        f"layers.{layer}.{part}.bias" for layer in range(2) for part in ("q", "k", "v", "o", "gate", "up", "down")
    }
    assert all(each.norm is not None for each in dropped)


@pytest.mark.parametrize("kv_heads", [8, 4])
def test_the_bias_of_o_goes_into_v_exactly_where_it_can(kv_heads: int, tmp_path: Path) -> None:
    spec = SourceModel.open(models.save(models.llama(num_key_value_heads=kv_heads), tmp_path)).spec
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(40, 128, generator=generator, dtype=torch.float64)
    bias = torch.randn(40, generator=generator, dtype=torch.float64)
    notes = Notes(BlockRef("layer"))
    moved = _move_to_v(Block({"o.weight": weight, "o.bias": bias}), spec, notes)["v.bias"]
    heads = moved.view(kv_heads, 16).repeat_interleave(8 // kv_heads, dim=0).flatten()
    torch.testing.assert_close(weight @ heads, bias, rtol=1e-4, atol=1e-4)
    assert notes.dropped[0].norm == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize(("target", "cls"), [("mistral", "MistralForCausalLM"), ("qwen2", "Qwen2ForCausalLM")])
def test_the_targets_load_in_their_own_class_with_the_figures_of_the_walk(
    target: str, cls: str, tmp_path: Path, text: Path
) -> None:
    overrides = ["fit_blocks.steps=2"] + (["narrow_mlp.multiple_of=16"] if target == "mistral" else [])
    recipe = f"gpt2-to-{target}"
    report = converter.convert(
        models.save(models.gpt2(), tmp_path / "gpt2"), tmp_path / "out", recipe=recipe, overrides=overrides, text=[text]
    )
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(loaded).__name__ == cls
    assert report.verification is not None
    measured = report.steps[-1].comparison
    assert measured is not None
    assert report.verification.total.kl == pytest.approx(measured.total.kl, rel=1e-2)
