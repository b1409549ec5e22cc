"""GGUF files and Meta's folders (case R8): read by the container's own rule, and written as Hugging Face checkpoints.

The reference is transformers' own class of the model that the files were made from.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from models import VOCAB, random_ids, run, save, write_ids
from test_rope_families import LLAMA_LIKE, make
from transformers import PreTrainedModel

from converter import check, inspect
from converter.conversion.recipe import Recipe, load_recipe
from converter.conversion.run import convert, plan_conversion
from converter.errors import CheckpointError, ConverterError, UnsupportedError, VerificationError
from converter.families import llama_meta
from converter.families.llama_meta import context_of, feed_forward_size
from converter.families.opened import SourceModel
from converter.families.scaling import scaling_of
from converter.files.llama_meta import write_shards
from converter.layout import swap_rows
from converter.measure.models import RunnableCheckpoint, load_plain
from converter.ops.cut_for_ranks import CutForRanks
from converter.rope.swap import swap
from converter.spec import RopeLayout

gguf = pytest.importorskip("gguf")

IDS = random_ids()
WIDE = {**LLAMA_LIKE, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
WIDE |= {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048}


def state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def interleaved(name: str, tensor: torch.Tensor) -> torch.Tensor:
    for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if part in name:
            head_dim = tensor.shape[0] // WIDE[heads]
            return swap_rows(tensor, WIDE[heads], head_dim, head_dim, RopeLayout.INTERLEAVED)
    return tensor


@torch.no_grad()
def error(found: torch.Tensor, model: PreTrainedModel) -> float:
    wanted = model(IDS).logits
    return float((found - wanted).abs().max() / wanted.abs().max())


def logits(path: Path) -> torch.Tensor:
    source = SourceModel.open(path)
    return run(lambda ref: source.read_block(ref, torch.float32), source.spec, IDS)


META_NAMES = {
    "model.embed_tokens.weight": "tok_embeddings.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}


def renamed(name: str, names: dict[str, str]) -> str:
    for old, new in names.items():
        name = name.replace(old, new)
    return name.removeprefix("model.")


def meta_folder(folder: Path, model: PreTrainedModel, ranks: int, *, old_embedding: bool = False) -> Path:
    tensors = {renamed(name, META_NAMES): interleaved(name, tensor) for name, tensor in state(model).items()}
    folder.mkdir()
    write_shards(folder, tensors, ranks, 64)
    if old_embedding:  # LLaMA 1 and 2 cut the embedding along its columns
        for rank, part in enumerate(tensors["tok_embeddings.weight"].chunk(ranks, dim=1)):
            shard = torch.load(folder / f"consolidated.{rank:02}.pth")
            torch.save({**shard, "tok_embeddings.weight": part.clone()}, folder / f"consolidated.{rank:02}.pth")
    params = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": -1, "norm_eps": 3e-4}
    params |= {"multiple_of": 32, "ffn_dim_multiplier": 0.565}
    (folder / "params.json").write_text(json.dumps(params))
    return folder


def edit_params(folder: Path, **changes: object) -> None:
    path = folder / "params.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_rank(folder: Path, rank: int, change: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    file = folder / f"consolidated.{rank:02}.pth"
    torch.save({name: change(name, tensor) for name, tensor in torch.load(file).items()}, file)


def with_a_wrong_head(folder: Path, tensors: dict[str, torch.Tensor], *rest: int) -> None:
    write_shards(folder, {**tensors, "output.weight": tensors["output.weight"] * 1.3}, *rest)


EVEN = {**WIDE, "vocab_size": 64}


class TestMeta:
    @pytest.mark.parametrize(("ranks", "old"), [(1, False), (2, False), (2, True)])
    def test_shards_are_merged_and_rotated_interleaved(self, ranks, old, tmp_path):
        model = make("Llama", EVEN)
        folder = meta_folder(tmp_path / "meta", model, ranks, old_embedding=old)
        source = SourceModel.open(folder)
        assert source.family.name == "llama_meta"
        assert source.spec.rope is not None
        assert source.spec.rope.layout is RopeLayout.INTERLEAVED
        assert source.spec.intermediate_size == 96
        assert error(logits(folder), model) <= 1e-5
        with torch.no_grad():
            assert error(RunnableCheckpoint(folder).model.logits(IDS), model) <= 1e-5

    def test_to_hf_by_recipe_and_by_swap(self, tmp_path):
        model = make("Llama", EVEN)
        folder = meta_folder(tmp_path / "meta", model, 2)
        convert(folder, tmp_path / "hf", recipe="meta-to-hf", text=[write_ids(tmp_path / "ids.npy")])
        swap(folder, tmp_path / "swapped", to=RopeLayout.HALF_SPLIT)
        from transformers import AutoModelForCausalLM

        for result in ("hf", "swapped"):
            with torch.no_grad():
                assert error(AutoModelForCausalLM.from_pretrained(tmp_path / result)(IDS).logits, model) <= 1e-5
            stamp = json.loads((tmp_path / result / "conversion.json").read_text())
            assert stamp["rope"]["layout"] == "half_split"

    @pytest.mark.parametrize("tied", [False, True])
    def test_from_hf_and_back(self, tied, tmp_path):
        model = make("Llama", {**WIDE, "tie_word_embeddings": tied})
        save(model, tmp_path / "hf")
        convert(tmp_path / "hf", tmp_path / "meta", recipe="hf-to-meta")
        names = {file.name for file in (tmp_path / "meta").iterdir()}
        assert {"params.json", "consolidated.00.pth", "conversion.json"} <= names
        assert not {"config.json", "model.safetensors"} & names
        stored = torch.load(tmp_path / "meta/consolidated.00.pth")
        wanted = {renamed(name, META_NAMES): interleaved(name, tensor) for name, tensor in state(model).items()}
        assert stored.keys() == wanted.keys()
        assert all(torch.equal(stored[name], tensor) for name, tensor in wanted.items())
        assert error(logits(tmp_path / "meta"), model) <= 1e-5
        assert SourceModel.open(tmp_path / "meta").spec.tied_head is tied

    def test_as_many_ranks_as_asked_for(self, tmp_path):
        model = make("Llama", EVEN)
        save(model, tmp_path / "hf")
        convert(tmp_path / "hf", tmp_path / "meta", recipe="hf-to-meta", overrides=["cut_for_ranks.ranks=2"])
        wanted = meta_folder(tmp_path / "wanted", model, 2)
        for shard in ("consolidated.00.pth", "consolidated.01.pth"):
            found, right = torch.load(tmp_path / "meta" / shard), torch.load(wanted / shard)
            assert found.keys() == right.keys()
            assert all(torch.equal(found[name], tensor) for name, tensor in right.items())
        assert error(logits(tmp_path / "meta"), model) <= 1e-5
        assert not (tmp_path / "meta/consolidated.02.pth").exists()

    def test_files_that_do_not_hold_what_was_converted_fail(self, tmp_path, monkeypatch):
        # transformers has no class for Meta's files: the message cannot name a block, and must not be a traceback.
        monkeypatch.setattr(llama_meta, "write_shards", with_a_wrong_head)
        folder = save(make("Llama", EVEN), tmp_path / "hf")
        text = write_ids(tmp_path / "ids.npy")
        with pytest.raises(VerificationError, match="the files do not hold what was converted"):
            convert(folder, tmp_path / "meta", recipe="hf-to-meta", text=[text])

    def test_ranks_that_do_not_share_evenly_or_have_no_files_are_refused(self, tmp_path):
        folder = save(make("Llama", EVEN), tmp_path / "hf")
        with pytest.raises(UnsupportedError, match=r"2 key-value heads cannot be shared evenly by 4 ranks"):
            plan_conversion(folder, "hf-to-meta", ["cut_for_ranks.ranks=4"])
        with pytest.raises(UnsupportedError, match="cut for 2 ranks"):
            plan_conversion(folder, Recipe("r", "llama", (CutForRanks(2),)))

    def test_uneven_cuts_and_missing_shards_are_errors(self, tmp_path):
        model = make("Llama", WIDE)
        with pytest.raises(CheckpointError, match="cannot be cut"):
            meta_folder(tmp_path / "odd", model, 2)
        folder = meta_folder(tmp_path / "meta", make("Llama", EVEN), 4)
        (folder / "consolidated.02.pth").unlink()
        with pytest.raises(CheckpointError, match=r"consolidated\.02\.pth is missing"):
            SourceModel.open(folder)

    @pytest.mark.parametrize("gone", [0, 1, 3])
    def test_a_missing_rank_is_named_the_first_and_the_last_too(self, gone, tmp_path):
        folder = meta_folder(tmp_path / "meta", make("Llama", {**EVEN, "num_key_value_heads": 4}), 4)
        edit_params(folder, n_kv_heads=4)
        (folder / f"consolidated.{gone:02}.pth").unlink()
        with pytest.raises(CheckpointError, match=rf"consolidated\.{gone:02}\.pth is missing"):
            SourceModel.open(folder)

    def test_one_rank_too_many(self, tmp_path):
        folder = meta_folder(tmp_path / "meta", make("Llama", EVEN), 2)
        shutil.copy(folder / "consolidated.01.pth", folder / "consolidated.02.pth")
        with pytest.raises(CheckpointError, match="3 shards, and each holds one of 2 parts"):
            SourceModel.open(folder)

    @pytest.mark.parametrize(("by", "dtype", "told"), [(1e-5, torch.float32, True), (0.0, torch.float32, False)])
    def test_copies_of_norms_that_differ_by_rounding_are_a_remark(self, by, dtype, told, tmp_path):
        folder = meta_folder(tmp_path / "meta", make("Llama", EVEN), 2)
        change_rank(folder, 1, lambda name, tensor: tensor * (1 + by) if "norm" in name else tensor)
        remarks = [remark for remark in inspect(folder).warnings if "the ranks' copies" in remark]
        assert bool(remarks) == told
        assert not told or "differ, by 1.0e-05 of the largest value: the first one is taken" in remarks[0]
        assert [fault.remark for fault in check(folder)] == [True] * told

    @pytest.mark.parametrize("other", [lambda x: x + 0.3, lambda x: x * 1.02, lambda x: x * torch.nan])
    def test_ranks_of_different_checkpoints_are_refused(self, other, tmp_path):
        folder = meta_folder(tmp_path / "meta", make("Llama", EVEN), 2)
        change_rank(folder, 1, lambda name, tensor: other(tensor) if name == "layers.1.ffn_norm.weight" else tensor)
        with pytest.raises(CheckpointError, match=r"01\.pth: 'layers\.1\.ffn_norm\.weight' differs from its copy in"):
            SourceModel.open(folder)
        assert [fault.tensor for fault in check(folder)] == ["layers.1.ffn_norm.weight"]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_stored_frequencies_are_those_of_the_config_or_refused(self, dtype, tmp_path):
        folder = meta_folder(tmp_path / "meta", make("Llama", EVEN), 1)
        file = folder / "consolidated.00.pth"
        tensors = torch.load(file)
        for theta, name in ((10000.0, "right"), (500000.0, "wrong")):
            frequencies = (theta ** -(torch.arange(0, 16, 2) / 16)).to(dtype)
            torch.save({**tensors, "rope.freqs": frequencies}, file)
            if name == "right":
                assert plan_conversion(folder, "meta-to-hf").source.dropped[0].name == "rope.freqs"
                continue
            with pytest.raises(UnsupportedError) as caught:
                plan_conversion(folder, "meta-to-hf")
            found = re.search(r"those of a theta of ([\d.e+]+), and the config says 10000", str(caught.value))
            assert found is not None
            assert float(found[1]) == pytest.approx(500000, rel=0.1)

    def test_one_rank_twice_is_refused(self, tmp_path):
        folder = meta_folder(tmp_path / "meta", make("Llama", EVEN), 2)
        shutil.copy(folder / "consolidated.00.pth", folder / "consolidated.01.pth")
        with pytest.raises(CheckpointError, match="is the very same part as in consolidated"):
            SourceModel.open(folder)

    @pytest.mark.parametrize(
        ("model", "params", "context", "certain"),
        [
            ("LLaMA 7B", {"dim": 4096, "n_layers": 32, "norm_eps": 1e-6}, 2048, True),
            ("LLaMA 65B", {"dim": 8192, "n_layers": 80, "norm_eps": 1e-5}, 2048, True),
            ("Llama 2 7B", {"dim": 4096, "n_layers": 32, "norm_eps": 1e-5}, 4096, True),
            ("Llama 2 70B", {"dim": 8192, "n_layers": 80, "norm_eps": 1e-5, "n_kv_heads": 8}, 4096, True),
            ("Code Llama 7B", {"dim": 4096, "n_layers": 32, "norm_eps": 1e-5, "rope_theta": 1e6}, 16384, True),
            ("another theta", {"dim": 512, "n_layers": 8, "norm_eps": 1e-5, "rope_theta": 5e4}, 16384, False),
            ("Llama 3 8B", {"dim": 4096, "n_layers": 32, "norm_eps": 1e-5, "rope_theta": 5e5}, 8192, True),
            ("Llama 3.1 8B", {"dim": 4096, "rope_theta": 5e5, "use_scaled_rope": True}, 131072, True),
            ("another", {"dim": 512, "n_layers": 8, "norm_eps": 1e-6}, 2048, False),
            ("another, newer", {"dim": 512, "n_layers": 8, "norm_eps": 1e-5}, 4096, False),
        ],
    )
    def test_the_context_follows_from_what_tells_metas_models_apart(self, model, params, context, certain):
        assert context_of(params)[::2] == (context, certain), model

    def test_a_guessed_context_is_told_and_can_be_stated(self, tmp_path):
        folder = meta_folder(tmp_path / "meta", make("Llama", EVEN), 1)
        assert SourceModel.open(folder).spec.context == 4096
        told = "params.json does not say the context: 4096 is taken, that of Llama 2"
        assert any(told in warning for warning in inspect(folder).warnings)
        edit_params(folder, max_position_embeddings=3000)
        assert SourceModel.open(folder).spec.context == 3000
        assert not any("the context" in warning for warning in inspect(folder).warnings)

    @pytest.mark.parametrize(
        ("hidden", "multiple", "factor", "width"),
        [(4096, 256, None, 11008), (8192, 4096, 1.3, 28672), (4096, 1024, 1.3, 14336), (5120, 256, None, 13824)],
    )
    def test_the_width_by_metas_rule(self, hidden, multiple, factor, width):
        assert feed_forward_size(hidden, multiple, factor) == width


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_file(
    path: Path,
    model: PreTrainedModel,
    architecture: str,
    kind: str = "F32",
    divisors: list[float] | None = None,
    **fields: object,
) -> Path:
    """A model as llama.cpp's converter would write it: q and k of arch llama interleaved, others as they are."""
    writer = gguf.GGUFWriter(path, architecture)
    c = model.config
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(c.head_dim)
    writer.add_vocab_size(c.vocab_size)
    for key, value in fields.items():
        writer.add_string(key.replace("__", "."), str(value))
    quantised = gguf.GGMLQuantizationType[kind]
    for name, tensor in state(model).items():
        data = (interleaved(name, tensor) if architecture == "llama" else tensor).numpy()
        if tensor.ndim == 1 or kind == "F32":
            writer.add_tensor(renamed(name, GGUF_NAMES), data)
        else:
            writer.add_tensor(renamed(name, GGUF_NAMES), gguf.quants.quantize(data, quantised), raw_dtype=quantised)
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(divisors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class TestGGUF:
    @pytest.mark.parametrize(
        ("family", "architecture", "layout"),
        [("Llama", "llama", "interleaved"), ("Qwen2", "qwen2", "half_split"), ("Qwen3", "qwen3", "half_split")],
    )
    def test_the_layout_is_the_architectures(self, family, architecture, layout, tmp_path):
        model = make(family, WIDE)
        source = SourceModel.open(gguf_file(tmp_path / "model.gguf", model, architecture))
        assert source.spec.rope is not None
        assert source.spec.rope.layout.value == layout
        assert source.spec.norm_eps == 3e-4
        assert error(logits(tmp_path / "model.gguf"), model) <= 1e-5
        assert error(logits(tmp_path), model) <= 1e-5
        with torch.no_grad():
            assert error(RunnableCheckpoint(tmp_path / "model.gguf").model.logits(IDS), model) <= 1e-5

    @pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
    def test_becomes_a_hugging_face_checkpoint_of_its_architecture(self, family, tmp_path):
        model = make(family, WIDE)
        (tmp_path / "in").mkdir()
        gguf_file(tmp_path / "in/model.gguf", model, family.lower())
        swap(tmp_path / "in/model.gguf", tmp_path / "out", to=RopeLayout.HALF_SPLIT)
        from transformers import AutoModelForCausalLM

        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        assert type(loaded).__name__ == f"{family}ForCausalLM"
        with torch.no_grad():
            assert error(loaded(IDS).logits, model) <= 1e-5

    @pytest.mark.parametrize(
        ("kind", "tolerance"), [("F16", 1e-3), ("BF16", 1e-2), ("Q8_0", 1e-2), ("Q4_0", 0.2), ("Q4_1", 0.2)]
    )
    def test_kinds_of_tensors(self, kind, tolerance, tmp_path):
        model = make("Llama", WIDE)
        source = SourceModel.open(gguf_file(tmp_path / "model.gguf", model, "llama", kind))
        for name, tensor in state(model).items():
            found = source.checkpoint.read(renamed(name, GGUF_NAMES)).float()
            wanted = interleaved(name, tensor)
            assert float((found - wanted).abs().max()) <= tolerance * float(wanted.abs().max())

    @pytest.mark.parametrize(("kind", "size"), [("Q4_K", 144), ("Q6_K", 210)])
    def test_k_quants_by_their_definition(self, kind, size, tmp_path):
        """Random blocks of 256: Q6_K is (q - 32) * scale * d, Q4_K is d * s * q - dmin * m, written out here."""
        blocks = np.random.default_rng(0).integers(0, 256, (8, size), dtype=np.uint8)
        half = np.float16([0.5, 0.25]).view(np.uint8)
        if kind == "Q4_K":
            blocks[:, :4] = half
        else:
            blocks[:, -2:] = half[:2]
        writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
        writer.add_tensor("x", blocks, raw_dtype=gguf.GGMLQuantizationType[kind])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        from converter.files.gguf import GGUFFile

        found = GGUFFile(tmp_path / "model.gguf").read("x").numpy().reshape(8, 256)
        assert np.allclose(found, np.stack([globals()[f"unpack_{kind.lower()}"](block) for block in blocks]))

    def test_others_are_refused(self, tmp_path):
        model = make("Llama", WIDE)
        with pytest.raises(UnsupportedError, match="'bloom'"):
            SourceModel.open(gguf_file(tmp_path / "bloom.gguf", model, "bloom"))
        with pytest.raises(UnsupportedError, match="Q5_0"):
            SourceModel.open(gguf_file(tmp_path / "q5.gguf", model, "llama", "Q5_0"))
        with pytest.raises(UnsupportedError, match="scaled by 'yarn'"):
            SourceModel.open(gguf_file(tmp_path / "yarn.gguf", model, "llama", llama__rope__scaling__type="yarn"))
        with pytest.raises(ConverterError, match="unknown to this family"):
            SourceModel.open(gguf_file(tmp_path / "key.gguf", model, "llama", llama__attention__sink="x"))
        (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(20))
        with pytest.raises(CheckpointError, match="sound"):
            SourceModel.open(tmp_path / "broken.gguf")
        with pytest.raises(CheckpointError, match="GGUF files"):
            SourceModel.open(tmp_path)


#: Llama 3.1's, but for a context short enough to see what the scaling does to far positions.
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 256}


def llama_cpp_divisors(theta: float, width: int, factor: float, high: float, original: int) -> list[float]:
    """As convert_hf_to_gguf.py of llama.cpp computes `rope_freqs.weight`, in fp32."""
    found = []
    for frequency in 1.0 / (theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)):
        wavelength = 2 * math.pi / frequency
        if wavelength < original / high:
            found.append(1.0)
        elif wavelength > original:
            found.append(factor)
        else:
            smooth = (original / wavelength - 1.0) / (high - 1.0)
            found.append(float(1 / ((1 - smooth) / factor + smooth)))
    return found


class TestDivisorsOfFrequencies:
    """`rope_freqs.weight` of a GGUF: Llama 3's scaling, kept as a rule and verified past 1024 positions, or refused."""

    @pytest.mark.parametrize(("theta", "width", "factor"), [(5e5, 128, 8.0), (5e5, 64, 32.0), (5e5, 64, 8.0)])
    def test_the_rule_is_found_again(self, theta, width, factor):
        rule = scaling_of(llama_cpp_divisors(theta, width, factor, 4.0, 8192), theta)
        assert rule == {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }

    def test_one_divisor_for_all_is_linear_and_ones_are_none(self):
        assert scaling_of([4.0] * 8, 1e4) == {"rope_type": "linear", "factor": 4.0}
        assert scaling_of([1.0] * 8, 1e4) is None

    @pytest.mark.parametrize(
        ("divisors", "why"),
        [
            ([1.0, 1.0, 3.0, 8.0], "two are needed"),
            ([1.0, 3.0, 2.0, 8.0], "do not rise"),
            ([*llama_cpp_divisors(5e5, 128, 8.0, 4.0, 8192)[:-1], 7.0], "whatever its constants"),
            ([1.0, float("nan"), 8.0], "positive numbers"),
        ],
    )
    def test_others_are_refused_with_the_reason(self, divisors, why):
        with pytest.raises(ValueError, match=why):
            scaling_of(divisors, 5e5)

    def test_far_positions_agree_and_do_not_without_it(self, tmp_path):
        model = make("Llama", {**WIDE, "head_dim": 64, "rope_parameters": LLAMA3})
        ids = torch.randint(VOCAB, (1, 1100), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            wanted = model(ids).logits
        divisors = llama_cpp_divisors(5e5, 64, 8.0, 4.0, 256)
        file = gguf_file(tmp_path / "model.gguf", model, "llama", divisors=divisors)
        source = SourceModel.open(file)
        found = run(lambda ref: source.read_block(ref, torch.float32), source.spec, ids)
        assert float((found - wanted)[:, 1024:].abs().max()) <= 1e-4 * float(wanted.abs().max())
        swap(file, tmp_path / "out", to=RopeLayout.HALF_SPLIT)
        with torch.no_grad():
            loaded = load_plain(tmp_path / "out")
            assert float((loaded(ids).logits - wanted)[:, 1024:].abs().max()) <= 1e-4 * float(wanted.abs().max())
        bare = SourceModel.open(gguf_file(tmp_path / "bare.gguf", model, "llama"))
        found = run(lambda ref: bare.read_block(ref, torch.float32), bare.spec, ids)
        assert float((found - wanted)[:, 1024:].abs().max()) > 1e-2 * float(wanted.abs().max())

    def test_a_table_of_another_length_is_refused(self, tmp_path):
        with pytest.raises(UnsupportedError, match="There are 3, for 8 frequencies"):
            SourceModel.open(gguf_file(tmp_path / "m.gguf", make("Llama", WIDE), "llama", divisors=[1.0, 1.0, 1.0]))


def unpack_q6_k(block: np.ndarray) -> np.ndarray:
    low, high, scales = block[:128], block[128:192], block[192:208].view(np.int8)
    d = float(block[208:].view(np.float16)[0])
    result = np.empty(256)
    for n in range(256):
        part, rest = divmod(n, 128)
        row, column = divmod(rest, 32)
        nibble = low[64 * part + 32 * (row % 2) + column] >> (4 * (row // 2)) & 15
        bits = high[32 * part + column] >> (2 * row) & 3
        result[n] = d * int(scales[n // 16]) * (int(nibble | bits << 4) - 32)
    return result


def unpack_q4_k(block: np.ndarray) -> np.ndarray:
    d, dmin = (float(x) for x in block[:4].view(np.float16))
    packed, low = [int(x) for x in block[4:16]], block[16:]
    result = np.empty(256)
    for n in range(256):
        group = n // 32
        if group < 4:
            scale, least = packed[group] & 63, packed[group + 4] & 63
        else:
            scale = packed[group + 4] & 15 | packed[group - 4] >> 6 << 4
            least = packed[group + 4] >> 4 | packed[group] >> 6 << 4
        nibble = low[32 * (n // 64) + n % 32] >> (4 * (group % 2)) & 15
        result[n] = d * scale * int(nibble) - dmin * least
    return result


def test_recipes_are_exact():
    for name, steps in {"meta-to-hf": 1, "hf-to-meta": 2, "gguf-to-hf": 1}.items():
        names = [step.name for step in load_recipe(name).steps]
        assert names == ["swap_rope_layout", "cut_for_ranks"][:steps]
    assert VOCAB % 2
