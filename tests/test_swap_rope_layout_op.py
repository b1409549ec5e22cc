"""The op `swap_rope_layout`, in fp64 on the reference model: exact, its own inverse, and not done where not needed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from models import Converted, gpt2, random_ids, relative, save
from test_rope_families import GPTJ, LLAMA_LIKE, NEOX, make

from converter.blocks import Block
from converter.conversion.recipe import parse_recipe
from converter.conversion.run import convert
from converter.errors import UnsupportedError, VerificationError
from converter.families.opened import SourceModel
from converter.ops.learned_positions_to_rope import LearnedPositionsToRope
from converter.ops.swap_rope_layout import SwapRopeLayout
from converter.ops.untie_head import UntieHead
from converter.rope.swap import swap
from converter.spec import RopeLayout

MODELS = {
    "llama": ("Llama", LLAMA_LIKE | {"attention_bias": True}),
    "qwen3": ("Qwen3", LLAMA_LIKE),
    "gpt_neox": ("GPTNeoX", NEOX | {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    "gptj": ("GPTJ", GPTJ),
}


@pytest.mark.parametrize("case", MODELS)
def test_exact_and_its_own_inverse(case: str, tmp_path: Path):
    source = SourceModel.open(save(make(*MODELS[case]), tmp_path / "model"))
    ids = random_ids()
    before = Converted(source).logits(ids)
    assert source.spec.rope is not None
    native = source.spec.rope.layout
    to = "interleaved" if native is RopeLayout.HALF_SPLIT else "half_split"
    swapped = Converted(source).after(SwapRopeLayout(to=to))
    assert swapped.spec.rope is not None
    assert swapped.spec.rope.layout is RopeLayout(to)
    assert relative(swapped.logits(ids), before) <= 1e-12
    swapped.spec = swapped.spec.replace(rope=source.spec.rope)
    assert relative(swapped.logits(ids), before) > 1e-2
    back = Converted(source).after(SwapRopeLayout(to=to), SwapRopeLayout(to=native.value))
    for ref, block in Converted(source).blocks.items():
        assert all(torch.equal(tensor, back.blocks[ref][role]) for role, tensor in block.items())


def test_layers_without_rope_keep_their_rows(tmp_path: Path):
    source = SourceModel.open(save(make("Llama", LLAMA_LIKE), tmp_path / "model"))
    assert source.spec.rope is not None
    source.spec = source.spec.replace(rope=dataclasses.replace(source.spec.rope, skipped_layers=(1,)))
    ids = random_ids()
    swapped = Converted(source).after(SwapRopeLayout(to="interleaved"))
    assert relative(swapped.logits(ids), Converted(source).logits(ids)) <= 1e-12
    for ref, block in Converted(source).blocks.items():
        same = all(torch.equal(tensor, swapped.blocks[ref][role]) for role, tensor in block.items())
        assert same is (str(ref) != "layers.0")


def test_learned_positions_become_rope_of_either_layout(tmp_path: Path):
    source = SourceModel.open(save(gpt2(), tmp_path / "model"))
    ids = random_ids()
    split, inter = (
        Converted(source).after(UntieHead(), LearnedPositionsToRope(layout=layout))
        for layout in ("half_split", "interleaved")
    )
    assert relative(split.after(SwapRopeLayout(to="interleaved")).logits(ids), inter.logits(ids)) > 1e-3
    same = Converted(source).after(UntieHead(), LearnedPositionsToRope(layout="interleaved"))
    assert relative(same.after(SwapRopeLayout()).logits(ids), inter.logits(ids)) <= 1e-12


def test_a_model_without_rope_is_refused_and_recipes_know_the_op(tmp_path: Path):
    source = SourceModel.open(save(gpt2(), tmp_path / "model"))
    with pytest.raises(UnsupportedError, match="no RoPE"):
        SwapRopeLayout().change(source.spec)
    text = "name: r\ntarget: llama\nsteps:\n  - swap_rope_layout: {to: interleaved}\n"
    assert parse_recipe(text, "r").steps == (SwapRopeLayout(to="interleaved"),)


class TestGate:
    """A model in which fp32's rounding moves logits by more than the gate allows: sharp attention over many layers."""

    @pytest.fixture
    def noisy(self, tmp_path: Path) -> Path:
        model = make("Llama", LLAMA_LIKE | {"num_hidden_layers": 12})
        for name, parameter in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                parameter.data *= 2
        save(model, tmp_path / "model")
        swap(tmp_path / "model", tmp_path / "interleaved", to=RopeLayout.INTERLEAVED)
        return tmp_path / "interleaved"

    def test_rounding_is_told_from_the_op_in_fp64(self, noisy: Path, tmp_path: Path):
        report = convert(noisy, tmp_path / "out", recipe="llama-to-llama")
        (step,) = (step for step in report.steps if step.name == "swap_rope_layout")
        assert (step.measured_in, step.passed) == ("fp64", True)
        assert step.relative_change is not None
        assert step.relative_change < 1e-9

    @pytest.mark.parametrize("heads", [1, 8])
    def test_rows_of_one_head_that_stay_fail(self, heads: int, noisy: Path, tmp_path: Path, monkeypatch):
        right = SwapRopeLayout.apply

        def wrong(self, block, spec, notes, calibration):
            moved = right(self, block, spec, notes, calibration)
            if str(notes.ref) == "layers.11":
                rows = heads * spec.head_dim
                weight = moved["q.weight"].clone()
                weight[:rows] = block["q.weight"][:rows]
                moved = Block({**moved, "q.weight": weight})
            return moved

        monkeypatch.setattr(SwapRopeLayout, "apply", wrong)
        with pytest.raises(VerificationError, match="exact op 'swap_rope_layout' changed the function"):
            convert(noisy, tmp_path / "out", recipe="llama-to-llama")
        assert not (tmp_path / "out").exists()
