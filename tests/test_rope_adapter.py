"""`rope swap --adapter` (case R7): permuting the rows of B is permuting W + BA; the rest is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from models import save
from safetensors.torch import load_file, save_file
from test_rope_families import LLAMA_LIKE, NEOX, make
from torch import Tensor

from converter.errors import CheckpointError, ConverterError, UnsupportedError
from converter.rope.adapter import swap_adapter
from converter.rope.swap import swap
from converter.spec import RopeLayout

TO = RopeLayout.INTERLEAVED
STEM = "base_model.model."
RANK = 4


def adapter(folder: Path, base: Path, modules: list[str], *, dora: bool = False, **config: object) -> Path:
    """A random LoRA on some modules of a base."""
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for name, weight in load_file(base / "model.safetensors").items():
        if name.endswith(".weight") and any(name.endswith(f".{module}.weight") for module in modules):
            stem = STEM + name.removesuffix(".weight")
            tensors[f"{stem}.lora_A.weight"] = torch.randn(RANK, weight.shape[1], generator=generator)
            tensors[f"{stem}.lora_B.weight"] = torch.randn(weight.shape[0], RANK, generator=generator)
            if dora:
                tensors[f"{stem}.lora_magnitude_vector"] = torch.rand(weight.shape[0], generator=generator) + 0.5
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    facts = {"peft_type": "LORA", "base_model_name_or_path": str(base), "target_modules": modules, "r": RANK}
    (folder / "adapter_config.json").write_text(json.dumps(facts | config))
    return folder


def merged(base: Path, adapter: Path) -> dict[str, Tensor]:
    """W + BA, or with magnitudes m (W + BA) / |W + BA|, in fp64."""
    weights = {name: tensor.double() for name, tensor in load_file(base / "model.safetensors").items()}
    lora = {name: tensor.double() for name, tensor in load_file(adapter / "adapter_model.safetensors").items()}
    for name in lora:
        if name.endswith(".lora_A.weight"):
            stem = name.removesuffix(".lora_A.weight")
            target = f"{stem.removeprefix(STEM)}.weight"
            sum_ = weights[target] + lora[f"{stem}.lora_B.weight"] @ lora[name]
            if (magnitude := lora.get(f"{stem}.lora_magnitude_vector")) is not None:
                sum_ = magnitude[:, None] * sum_ / sum_.norm(dim=1, keepdim=True)
            weights[target] = sum_
    return weights


BASES = {
    "llama": ("Llama", LLAMA_LIKE, ["q_proj", "k_proj", "v_proj", "o_proj"]),
    "gpt_neox": (
        "GPTNeoX",
        NEOX | {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        ["query_key_value"],
    ),
}


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("case", BASES)
def test_equals_swapping_the_merged_model(case: str, dora: bool, tmp_path: Path):
    family, config, modules = BASES[case]
    base = save(make(family, config), tmp_path / "base")
    lora = adapter(tmp_path / "lora", base, modules, dora=dora)
    report = swap_adapter(lora, tmp_path / "swapped", to=TO)
    assert report.tensors == {"llama": 4, "gpt_neox": 2}[case] * (2 if dora else 1)
    swap(base, tmp_path / "new-base", to=TO)
    found = merged(tmp_path / "new-base", tmp_path / "swapped")
    wanted_base = tmp_path / "merged"
    wanted_base.mkdir()
    (wanted_base / "config.json").write_text((base / "config.json").read_text())
    save_file(merged(base, lora), wanted_base / "model.safetensors")
    swap(wanted_base, tmp_path / "wanted", to=TO)
    wanted = load_file(tmp_path / "wanted/model.safetensors")
    for name, tensor in wanted.items():
        assert torch.allclose(found[name], tensor, rtol=1e-12, atol=0), name
    untouched = merged(tmp_path / "new-base", lora)
    assert max(float((untouched[name] - wanted[name]).abs().max()) for name in wanted) > 0.5
    old, new = (load_file(folder / "adapter_model.safetensors") for folder in (lora, tmp_path / "swapped"))
    assert all(torch.equal(old[name], new[name]) for name in old if "lora_A" in name or "v_proj" in name)


def test_twice_is_refused_by_the_stamp(tmp_path: Path):
    base = save(make("Llama", LLAMA_LIKE), tmp_path / "base")
    lora = adapter(tmp_path / "lora", base, ["q_proj"])
    swap_adapter(lora, tmp_path / "swapped", to=TO)
    with pytest.raises(ConverterError, match="interleaved already"):
        swap_adapter(tmp_path / "swapped", tmp_path / "again", to=TO)


@pytest.mark.parametrize(
    "config", [{"peft_type": "LOHA"}, {"fan_in_fan_out": True}, {"layer_replication": [[0, 2]]}], ids=str
)
def test_what_cannot_follow_is_to_be_merged_first(config: dict[str, object], tmp_path: Path):
    base = save(make("Llama", LLAMA_LIKE), tmp_path / "base")
    lora = adapter(tmp_path / "lora", base, ["q_proj"], **config)
    with pytest.raises(UnsupportedError, match="Merge first"):
        swap_adapter(lora, tmp_path / "swapped", to=TO)


@pytest.mark.parametrize("end", ["weight", "lora_X.weight", "modules_to_save.weight"])
def test_unknown_tensors_of_q_are_to_be_merged_first(end: str, tmp_path: Path):
    base = save(make("Llama", LLAMA_LIKE), tmp_path / "base")
    lora = adapter(tmp_path / "lora", base, ["q_proj"])
    tensors = load_file(lora / "adapter_model.safetensors")
    tensors[f"{STEM}model.layers.0.self_attn.k_proj.{end}"] = torch.zeros(32, 42)
    save_file(tensors, lora / "adapter_model.safetensors")
    with pytest.raises(UnsupportedError, match=r"Merge first"):
        swap_adapter(lora, tmp_path / "swapped", to=TO)


def test_another_base_is_an_error(tmp_path: Path):
    base = save(make("Llama", LLAMA_LIKE), tmp_path / "base")
    other = save(make("Llama", LLAMA_LIKE | {"head_dim": 8}), tmp_path / "other")
    lora = adapter(tmp_path / "lora", base, ["q_proj"])
    with pytest.raises(CheckpointError, match="rows"):
        swap_adapter(lora, tmp_path / "swapped", to=TO, base=other)
    with pytest.raises(ConverterError, match="--base"):
        swap_adapter(adapter(tmp_path / "b", base, ["q_proj"], base_model_name_or_path="gone"), tmp_path / "s", to=TO)


def test_an_adapter_beside_q_and_k_needs_no_swap(tmp_path: Path):
    base = save(make("Llama", LLAMA_LIKE), tmp_path / "base")
    lora = adapter(tmp_path / "lora", base, ["v_proj", "o_proj"])
    with pytest.raises(ConverterError, match="neither q nor k"):
        swap_adapter(lora, tmp_path / "swapped", to=TO)
