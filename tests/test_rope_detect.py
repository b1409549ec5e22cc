"""Detection from the weights, on planted weights: rows of a pair whose sin coefficients share a sign.

`benchmarks/rope_detect.py` does it on trained models, and `docs/rope.md` has the figures.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from models import gpt2, save, write_ids
from safetensors.torch import load_file, save_file
from test_rope_families import LLAMA_LIKE, make
from torch import Tensor

from converter.cli.main import main
from converter.errors import ConverterError
from converter.families.opened import SourceModel
from converter.layout import swap_rows
from converter.rope.detect import LEAST_SCORE, Detection, detect_layers
from converter.rope.hypotheses import hypotheses
from converter.rope.swap import detect, swap
from converter.spec import ModelSpec, RopeLayout

INTERLEAVED, HALF_SPLIT = RopeLayout.INTERLEAVED, RopeLayout.HALF_SPLIT
LAYERS, HEADS, KV_HEADS, D = 4, 8, 2, 32
SHAPE = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": D, "hidden_size": 96}


def planted(
    layout: RopeLayout, seed: int = 0, strength: float = 0.6, *, turned: bool = True
) -> list[tuple[Tensor, Tensor]]:
    """q and k that have a part in common, turned in each pair by an angle that changes slowly with the frequency.

    Not turned, they are compared row by row, as in a model without positions.
    """
    generator = torch.Generator().manual_seed(seed)
    half, hidden = D // 2, 96
    angle = torch.linspace(2.0, -2.5, half)[:, None]
    layers = []
    for _ in range(LAYERS):
        k = torch.randn(KV_HEADS, D, hidden, generator=generator)
        a, b = k.repeat_interleave(HEADS // KV_HEADS, dim=0).chunk(2, dim=1)
        own = angle + 0.7 * torch.randn(HEADS, 1, 1, generator=generator)
        own = own if turned else torch.zeros_like(own)
        common = torch.cat([own.cos() * a + own.sin() * b, own.cos() * b - own.sin() * a], dim=1)
        q = torch.randn(HEADS, D, hidden, generator=generator)
        q = q + strength * common
        pair = (q.reshape(-1, hidden), k.reshape(-1, hidden))
        layers.append(pair if layout is HALF_SPLIT else moved(pair, INTERLEAVED))
    return layers


def moved(pair: tuple[Tensor, Tensor], to: RopeLayout, q: int | None = HEADS, k: int | None = KV_HEADS):
    return tuple(
        rows if heads is None else swap_rows(rows, heads, rows.shape[0] // heads, rows.shape[0] // heads, to)
        for rows, heads in zip(pair, (q, k), strict=True)
    )


def detected(layers: list[tuple[Tensor, Tensor]], spec: ModelSpec) -> Detection:
    return detect_layers([(q.numpy(), k.numpy()) for q, k in layers], spec)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    config = {**LLAMA_LIKE, **SHAPE}
    folder = save(make("Llama", {**config, "num_hidden_layers": LAYERS}), tmp_path_factory.mktemp("m") / "model")
    return SourceModel.open(folder).spec


@pytest.mark.parametrize("layout", list(RopeLayout))
def test_either_layout_is_seen(layout, spec):
    found = detected(planted(layout), spec)
    assert found.layout == layout.value
    assert found.fault is None
    assert found.confidence > 0.7
    assert next(iter(found.evidence["q"])) == next(iter(found.evidence["k"])) == layout.value


@pytest.mark.parametrize(
    ("heads", "words"),
    [
        ({"k": None}, "only one of q and k was moved: q is half_split; k is interleaved"),
        ({"q": None}, "only one of q and k was moved: q is interleaved; k is half_split"),
        ({"k": HEADS}, "k is interleaved, moved to half_split by the head count of q (8 instead of 2)"),
        ({"q": KV_HEADS}, "q is interleaved, moved to half_split by the head count of k (2 instead of 8)"),
    ],
)
def test_mistakes_are_named(heads, words, spec):
    found = detected([moved(pair, HALF_SPLIT, **heads) for pair in planted(INTERLEAVED)], spec)
    assert found.layout == "unknown"
    assert found.fault is not None
    assert words in found.fault


def test_twice_and_the_wrong_way_is_named(spec):
    found = detected([moved(pair, INTERLEAVED) for pair in planted(INTERLEAVED)], spec)
    assert "q and k are interleaved, moved to interleaved once more" in str(found.fault)


def test_untrained_weights_are_unknown(spec):
    for seed in range(20):
        found = detected(planted(HALF_SPLIT, seed, strength=0.0), spec)
        assert (found.layout, found.fault) == ("unknown", None)


def test_rows_that_match_without_any_rotation_are_unknown(spec):
    """Each q_a.k_a leans to one sign in a model without positions too, and that alone makes a score."""
    for seed in range(10):
        found = detected(planted(HALF_SPLIT, seed, strength=0.1, turned=False), spec)
        assert (found.layout, found.fault) == ("unknown", None)
        assert found.score > LEAST_SCORE


def test_one_layer_or_one_head_does_not_decide_alone(spec):
    """The model is ranked as a whole, and a head of great size has no more to say than another."""
    layers = planted(HALF_SPLIT)
    loud = [(q * (1e4 if index == 0 else 1), k) for index, (q, k) in enumerate(layers)]
    assert detected(loud, spec).score == pytest.approx(detected(layers, spec).score, rel=1e-3)


def test_partial_rotary_knows_whole_heads_moved():
    names = [order.name for order in hypotheses(32, 8, 4, {"q": 4})]
    assert "half_split" in names
    assert "interleaved, moved to half_split by whole heads instead of their 8 rotary rows" in names
    assert len(names) == len(set(names))


def test_a_model_without_rope_has_none(tmp_path):
    assert detect(save(gpt2(), tmp_path / "model")).layout == "none"


def written(folder: Path, layers: list[tuple[Tensor, Tensor]]) -> Path:
    """A llama with these q and k."""
    config = {**LLAMA_LIKE, **SHAPE}
    save(make("Llama", {**config, "num_hidden_layers": LAYERS}), folder)
    tensors = load_file(folder / "model.safetensors")
    for index, (q, k) in enumerate(layers):
        tensors[f"model.layers.{index}.self_attn.q_proj.weight"] = 0.02 * q
        tensors[f"model.layers.{index}.self_attn.k_proj.weight"] = 0.02 * k
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


class TestSwapHearsTheWeights:
    def test_weights_against_the_family_are_an_error_that_names_both(self, tmp_path):
        folder = written(tmp_path / "model", planted(INTERLEAVED))
        with pytest.raises(ConverterError) as caught:
            swap(folder, tmp_path / "out", to=INTERLEAVED)
        assert "family 'llama' says half_split" in str(caught.value)
        assert "the weights" in str(caught.value)
        assert not (tmp_path / "out").exists()

    def test_a_claim_against_the_weights_is_an_error(self, tmp_path):
        folder = written(tmp_path / "model", planted(HALF_SPLIT))
        with pytest.raises(ConverterError, match="--from says interleaved"):
            swap(folder, tmp_path / "out", to=HALF_SPLIT, claimed=INTERLEAVED)

    def test_a_claim_that_the_weights_bear_out_repairs_a_misread_checkpoint(self, tmp_path):
        folder = written(tmp_path / "model", planted(INTERLEAVED))
        report = swap(folder, tmp_path / "out", to=HALF_SPLIT, claimed=INTERLEAVED)
        assert "misread" in report.notes[0]
        assert detect(tmp_path / "out").layout == "half_split"

    def test_a_mistake_is_refused_by_name(self, tmp_path):
        layers = [moved(pair, HALF_SPLIT, k=None) for pair in planted(INTERLEAVED)]
        with pytest.raises(ConverterError, match="only one of q and k was moved"):
            swap(written(tmp_path / "model", layers), tmp_path / "out", to=INTERLEAVED)


class TestCommands:
    def run(self, *arguments: object) -> str:
        result = CliRunner().invoke(main, [str(argument) for argument in arguments])
        assert result.exit_code == 0, result.output
        return result.output

    def test_detect_as_json(self, tmp_path):
        folder = written(tmp_path / "model", planted(INTERLEAVED))
        found = json.loads(self.run("rope", "detect", folder, "--json"))
        assert found["layout"] == "interleaved"
        assert {"confidence", "evidence", "fault"} <= found.keys()

    def test_detect_by_text_prints_both_losses(self, tmp_path):
        folder = written(tmp_path / "model", planted(HALF_SPLIT))
        text = write_ids(tmp_path / "ids.npy")
        losses = json.loads(self.run("rope", "detect", folder, "--text", text, "--json"))["losses"]
        assert losses.keys() == {"half_split", "interleaved"}
        assert "read as half_split" in self.run("rope", "detect", folder, "--text", text)

    def test_swap_there_and_back_in_place(self, tmp_path):
        folder = written(tmp_path / "model", planted(HALF_SPLIT))
        said = self.run("rope", "swap", folder, tmp_path / "out", "--to", "interleaved")
        assert said.startswith("Will move rows in 8 tensors (4 layers)")
        said = self.run("rope", "swap", tmp_path / "out", "--in-place", "--to", "half_split")
        assert "Moved 8 tensors from interleaved to half_split" in said
        assert (tmp_path / "out/model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
        assert "nothing to undo" in self.run("rope", "swap", folder, "--in-place", "--roll-back", "--to", "half_split")

    def test_usage(self, tmp_path):
        for arguments in (["x", "--to", "half_split"], ["x", "y", "--to", "half_split", "--in-place"]):
            result = CliRunner().invoke(main, ["rope", "swap", *arguments])
            assert result.exit_code == 2
            assert "DST" in result.output
