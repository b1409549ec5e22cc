"""A family, an op and a loss are one file each: those of docs/plug-ins.md, as they stand there, installed and used."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import models
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GPT2LMHeadModel

import converter

PAGE = (Path(__file__).parents[1] / "docs/plug-ins.md").read_text(encoding="utf-8")
WIDTH, DEPTH, HEADS, LENGTH = 48, 2, 3, models.CONTEXT
CONFIG = {
    "model_type": "tiny-lm",
    "tokens": models.VOCAB,
    "width": WIDTH,
    "depth": DEPTH,
    "heads": HEADS,
    "length": LENGTH,
    "eps": 3e-4,
    "dropout": 0.1,
}
RECIPE = "{name: mine, target: gpt2, steps: [untie_head, absorb_final_gain]}"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder of installed packages with the page's files and the entry points that it shows."""
    site = tmp_path / "site"
    (site / "tiny-1.dist-info").mkdir(parents=True)
    for name, code in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL):
        (site / name).write_text(code, encoding="utf-8")
    shown = re.findall(r'\[project\.entry-points\."(.+?)"\]\n(.+?) = "(.+?)"', PAGE)
    entries = "".join(f"[{group}]\n{name} = {module}\n" for group, name, module in shown)
    (site / "tiny-1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: tiny\nVersion: 1\n")
    (site / "tiny-1.dist-info/entry_points.txt").write_text(entries)
    assert len(shown) == 3
    return site


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"tokens.weight": (models.VOCAB, WIDTH), "places.weight": (LENGTH, WIDTH), "last_norm.weight": (WIDTH,)}
    for layer in range(DEPTH):
        block = {f"attention.{part}.weight": (WIDTH, WIDTH) for part in "qkvo"}
        block |= {f"before_{part}.weight": (WIDTH,) for part in ("attention", "mlp")}
        block |= {"wide.weight": (4 * WIDTH, WIDTH), "narrow.weight": (WIDTH, 4 * WIDTH)}
        shapes |= {f"blocks.{layer}.{name}": shape for name, shape in block.items()}
    return {
        name: torch.randn(shape, generator=generator) * 0.2 + float(len(shape) == 1) for name, shape in shapes.items()
    }


def forward(w: dict[str, Tensor], ids: Tensor) -> Tensor:
    """The model, written down by itself."""

    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, (WIDTH,), w[f"{name}.weight"], eps=CONFIG["eps"])

    x = w["tokens.weight"][ids] + w["places.weight"][: ids.shape[1]]
    for layer in range(DEPTH):
        at = f"blocks.{layer}"
        read = norm(f"{at}.before_attention", x)
        q, k, v = (
            (read @ w[f"{at}.attention.{part}.weight"].T).view(*ids.shape, HEADS, -1).transpose(1, 2) for part in "qkv"
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + mixed @ w[f"{at}.attention.o.weight"].T
        wide = norm(f"{at}.before_mlp", x) @ w[f"{at}.wide.weight"].T
        x = x + wide.relu() @ w[f"{at}.narrow.weight"].T
    return norm("last_norm", x) @ w["tokens.weight"].T


def run(site: Path, code: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(site)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_family_and_an_op_are_one_file_each(site: Path, tmp_path: Path, ids: Tensor) -> None:
    source, target = models.write(tmp_path / "source", CONFIG, weights()), tmp_path / "target"
    (tmp_path / "mine.yaml").write_text(RECIPE)
    models.write_ids(tmp_path / "text.npy")
    code = "from converter.losses import losses; "
    code += f"import converter; source, folder = {str(source)!r}, {str(tmp_path)!r}; "
    code += "print(converter.plan_conversion(source).recipe.name, *losses()); "
    code += "converter.convert(source, folder + '/target', recipe=folder + '/mine.yaml', text=folder + '/text.npy')"
    assert run(site, code) == "gpt2-to-llama kl ce certainty\n"
    report = json.loads((target / "conversion.json").read_text())
    assert [step["name"] for step in report["steps"] if step["exact"]] == ["untie_head", "absorb_final_gain", "cast"]
    model = GPT2LMHeadModel.from_pretrained(target)
    assert bool((model.transformer.ln_f.weight == 1).all())
    assert models.relative(models.logits_of(model, ids), forward(weights(), ids)) <= 1e-5


@pytest.mark.parametrize("name", ["Family", "TargetFamily", "Op", "Calibration", "Loss", "detect_rope", "swap_rope"])
def test_what_plug_ins_need_is_public(name: str) -> None:
    assert name in converter.__all__
    assert getattr(converter, name).__doc__


def test_layouts_are_detected_and_swapped_from_python(tmp_path: Path) -> None:
    source = models.save(models.llama(), tmp_path / "source")
    report = converter.swap_rope(source, tmp_path / "target", to="interleaved", claimed="half_split")
    assert (report.layout_before, report.layout_after) == ("half_split", "interleaved")
    assert converter.detect_rope(tmp_path / "target").layout == "unknown"  # random weights say nothing
    with pytest.raises(converter.ConverterError, match=r"'interleavd' is no layout\. Did you mean 'interleaved'"):
        converter.swap_rope(source, tmp_path / "other", to="interleavd")
