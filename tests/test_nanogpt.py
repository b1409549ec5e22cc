"""nanoGPT's ckpt.pt (case S5): read as it is, run as it was trained, converted like any GPT-2."""

from __future__ import annotations

import json
import os
import pickle
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

import converter
from converter.cli.main import main
from converter.conversion.plan import make_plan
from converter.conversion.recipe import load_recipe
from converter.errors import CheckpointError, ConverterError, UnsupportedError
from converter.families.opened import SourceModel
from converter.files.checkpoint import Checkpoint
from converter.files.tokenizer import load_tokenizer
from converter.measure.models import load_transformers
from converter.spec import Activation

HEADS, HIDDEN, LAYERS = 3, 48, 2


class Norm(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))
        self.bias = nn.Parameter(torch.zeros(HIDDEN)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        normed = self.weight * centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return normed if self.bias is None else normed + self.bias


class Layer(nn.Module):
    def __init__(self, bias: bool, gelu: str) -> None:
        super().__init__()
        self.gelu = gelu
        self.ln_1, self.ln_2 = Norm(bias), Norm(bias)
        linear = {"c_attn": (HIDDEN, 3 * HIDDEN), "c_proj": (HIDDEN, HIDDEN)}
        self.attn = nn.ModuleDict({name: nn.Linear(*shape, bias=bias) for name, shape in linear.items()})
        linear = {"c_fc": (HIDDEN, 4 * HIDDEN), "c_proj": (4 * HIDDEN, HIDDEN)}
        self.mlp = nn.ModuleDict({name: nn.Linear(*shape, bias=bias) for name, shape in linear.items()})

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = self.attn["c_attn"](self.ln_1(x)).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT * q.shape[-1] ** -0.5
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
        x = x + self.attn["c_proj"]((scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape))
        z = self.mlp["c_fc"](self.ln_2(x))
        if self.gelu == "erf":
            z = z * (1 + torch.erf(z / 2**0.5)) / 2
        else:
            z = z * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (z + 0.044715 * z**3))) / 2
        return x + self.mlp["c_proj"](z)


class Model(nn.Module):
    """nanoGPT's architecture under nanoGPT's names, written down independently of our reference model."""

    def __init__(self, bias: bool = False, gelu: str = "erf", vocab_size: int = models.VOCAB) -> None:
        super().__init__()
        self.bias, self.vocab_size = bias, vocab_size
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocab_size, HIDDEN),
                "wpe": nn.Embedding(models.CONTEXT, HIDDEN),
                "h": nn.ModuleList(Layer(bias, gelu) for _ in range(LAYERS)),
                "ln_f": Norm(bias),
            }
        )
        self.lm_head = nn.Linear(HIDDEN, vocab_size, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight
        models.jitter(self, seed=3)  # type: ignore[type-var]

    @torch.no_grad()
    def forward(self, ids: Tensor) -> Tensor:
        parts = self.transformer
        x = parts["wte"](ids) + parts["wpe"](torch.arange(ids.shape[1]))
        for layer in parts["h"]:
            x = layer(x)
        return self.lm_head(parts["ln_f"](x))


def saved(model: Model) -> dict[str, Any]:
    """What nanoGPT's train.py saves."""
    arguments = {
        "n_layer": LAYERS,
        "n_head": HEADS,
        "n_embd": HIDDEN,
        "block_size": models.CONTEXT,
        "bias": model.bias,
        "vocab_size": model.vocab_size,
        "dropout": 0.1,
    }
    optimizer = torch.optim.AdamW(model.parameters())
    sum(parameter.sum() for parameter in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    models.jitter(model, seed=3)  # type: ignore[type-var]
    return {
        "model": {
            name: tensor.clone() if "lm_head" not in name else tensor for name, tensor in model.state_dict().items()
        },
        "optimizer": optimizer.state_dict(),
        "model_args": arguments,
        "iter_num": 7,
        "best_val_loss": torch.tensor(1.5),
        "config": {"out_dir": "out", "compile": True, "learning_rate": 6e-4},
    }


def write(folder: Path, content: Any) -> Path:
    folder.mkdir(exist_ok=True)
    torch.save(content, folder / "ckpt.pt")
    return folder / "ckpt.pt"


def logits_by_both(path: Path, ids: Tensor) -> list[Tensor]:
    """By the reference model, and by the class of transformers that stands in."""
    return [models.reference_logits(path, ids), models.logits_of(load_transformers(SourceModel.open(path)), ids)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A checkpoint without biases."""
    return write(tmp_path / "run", saved(Model()))


def refusal(path: Path, kind: type[ConverterError] = CheckpointError) -> str:
    with pytest.raises(kind) as caught:
        SourceModel.open(path).check_contents()
    return str(caught.value)


# The function


@pytest.mark.parametrize("bias", [False, True])
def test_it_computes_what_it_was_trained_to(bias: bool, tmp_path: Path, ids: Tensor) -> None:
    model = Model(bias)
    path = write(tmp_path, saved(model))
    for found in logits_by_both(path, ids):
        assert models.relative(found, model(ids)) <= 1e-5


def test_a_head_of_its_own(tmp_path: Path, ids: Tensor) -> None:
    model = Model()
    content = saved(model)
    model.lm_head.weight = nn.Parameter(torch.randn(models.VOCAB, HIDDEN))
    content["model"]["lm_head.weight"] = model.lm_head.weight.detach()
    path = write(tmp_path, content)
    assert not SourceModel.open(path).spec.tied_head
    for found in logits_by_both(path, ids):
        assert models.relative(found, model(ids)) <= 1e-5


def test_a_tied_head_that_is_not_stored(path: Path, tmp_path: Path, ids: Tensor) -> None:
    content = saved(Model())
    del content["model"]["lm_head.weight"]
    assert torch.equal(models.reference_logits(write(tmp_path / "b", content), ids), models.reference_logits(path, ids))
    assert SourceModel.open(path).spec.tied_head


def test_the_folder_is_the_same_as_the_file(path: Path, ids: Tensor) -> None:
    assert torch.equal(models.reference_logits(path.parent, ids), models.reference_logits(path, ids))
    assert SourceModel.open(path.parent).checkpoint.name == "run"
    assert SourceModel.open(path).checkpoint.name == "run/ckpt.pt"


def test_any_name_that_ends_in_pt(path: Path, ids: Tensor) -> None:
    other = path.rename(path.with_name("best.pt"))
    assert converter.inspect(other).family == "nanogpt"


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "_orig_mod.module."])
def test_names_as_torch_compile_and_ddp_leave_them(prefix: str, path: Path, tmp_path: Path, ids: Tensor) -> None:
    content = saved(Model())
    content["model"] = {prefix + name: tensor for name, tensor in content["model"].items()}
    other = write(tmp_path / "wrapped", content)
    assert torch.equal(models.reference_logits(other, ids), models.reference_logits(path, ids))


def test_mask_buffers_of_models_without_flash_attention(path: Path, tmp_path: Path, ids: Tensor) -> None:
    content = saved(Model())
    mask = torch.ones(models.CONTEXT, models.CONTEXT).tril()[None, None]
    content["model"] |= {f"transformer.h.{layer}.attn.bias": mask for layer in range(LAYERS)}
    other = write(tmp_path / "masked", content)
    assert torch.equal(models.reference_logits(other, ids), models.reference_logits(path, ids))
    content["model"]["transformer.h.1.attn.bias"] = mask.triu(-8)
    assert "windowed" in refusal(write(tmp_path / "windowed", content), UnsupportedError)


def test_a_file_in_the_format_before_zip(tmp_path: Path, path: Path, ids: Tensor) -> None:
    torch.save(saved(Model()), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert torch.equal(models.reference_logits(tmp_path / "old.pt", ids), models.reference_logits(path, ids))


# Which GELU


@pytest.mark.parametrize(
    ("facts", "arguments", "gelu", "taken"),
    [
        ({}, {}, "erf", "erf is taken"),
        ({"activation_function": "gelu"}, {}, "erf", None),
        ({"activation_function": "gelu_new"}, {}, "tanh", None),
        ({}, {"bias": ...}, "tanh", "the tanh form is taken"),
        ({"activation_function": "gelu"}, {"bias": ...}, "erf", None),
    ],
    ids=str,
)
def test_the_gelu_that_is_said_or_else_that_of_the_time(
    facts: dict[str, Any], arguments: dict[str, Any], gelu: str, taken: str | None, tmp_path: Path, ids: Tensor
) -> None:
    model = Model(bias=True, gelu=gelu)
    content = saved(model)
    given = content["model_args"] | arguments
    content["model_args"] = {key: value for key, value in given.items() if value is not ...}
    path = write(tmp_path, content)
    if facts:
        (tmp_path / "nanogpt.json").write_text(json.dumps(facts))
    for found in logits_by_both(path, ids):
        assert models.relative(found, model(ids)) <= 1e-5
    other = Model(bias=True, gelu="tanh" if gelu == "erf" else "erf")
    assert models.relative(found, other(ids)) > 2e-5  # the wrong one would show
    remarks = [each for each in converter.inspect(path).warnings if "GELU" in each]
    assert len(remarks) == (taken is not None)
    assert taken is None or taken in remarks[0]
    assert taken is None or "nanogpt.json" in remarks[0]


def test_a_fact_that_contradicts_the_file_is_an_error(path: Path) -> None:
    (path.parent / "nanogpt.json").write_text('{"n_layer": 3}')
    message = refusal(path)
    assert message.startswith(str(path.parent / "nanogpt.json"))
    assert "'n_layer' is 3, and the model_args say 2" in message


def test_a_fact_that_is_not_understood_is_an_error(path: Path) -> None:
    (path.parent / "nanogpt.json").write_text('{"activation": "gelu"}')
    assert "Did you mean 'activation_function'?" in refusal(path, UnsupportedError)
    (path.parent / "nanogpt.json").write_text('{"activation_function": "gelu_nww"}')
    assert "Did you mean 'gelu_new'?" in refusal(path, UnsupportedError)


def test_ids_of_special_tokens(tmp_path: Path, path: Path) -> None:
    assert SourceModel.open(path).token_ids() == dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    (path.parent / "nanogpt.json").write_text('{"eos_token_id": 5}')
    assert SourceModel.open(path).token_ids()["eos_token_id"] == 5


# The accounts


def test_what_is_beside_the_model_is_left_out_with_a_reason(path: Path) -> None:
    source = SourceModel.open(path)
    assert {drop.name for drop in source.dropped} == {
        "optimizer",
        "iter_num",
        "best_val_loss",
        "config",
        "lm_head.weight",
    }
    assert all(drop.reason for drop in source.dropped)
    assert source.config_accounts["dropout"] == "dropout, training only"
    assert source.spec.activation is Activation.GELU_ERF
    assert source.spec.biases == frozenset()


@pytest.mark.parametrize("tokenizer", [False, True])
def test_a_padded_vocabulary_is_kept_and_said(tokenizer: bool, tmp_path: Path) -> None:
    path = write(tmp_path, saved(Model(vocab_size=50304)))
    if tokenizer:
        vocabulary = {str(index): index for index in range(50256)}
        added = [{"id": 50256, "content": "<|endoftext|>"}]
        (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": added}))
    found = converter.inspect(path)
    assert found.spec.vocab_size == 50304
    (remark,) = [each for each in found.warnings if "50304" in each]
    assert "50257" in remark
    assert "rows are kept" in remark


def test_biases_that_the_config_denies(tmp_path: Path) -> None:
    content = saved(Model(bias=True))
    content["model_args"]["bias"] = False
    assert "unknown to family 'nanogpt'" in refusal(write(tmp_path, content), UnsupportedError)
    content = saved(Model(bias=False))
    content["model_args"]["bias"] = True
    assert "'h.0.ln_1.bias' is missing" in refusal(write(tmp_path, content))


# What is not nanoGPT's, and what is not safe


@dataclass
class GPTConfig:
    n_layer: int = 2


class Payload:
    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.made}",)


def test_a_payload_is_refused_and_not_run(tmp_path: Path) -> None:
    message = refusal(write(tmp_path, saved(Model()) | {"scaler": Payload(tmp_path / "made")}))
    assert f"{os.name}.system" in message
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_args": Namespace(n_layer=2)}, "not a dict of plain values"),
        ({"config": GPTConfig()}, "GPTConfig"),
        ({"model": nn.Linear(2, 2)}, "torch.nn.modules.linear.Linear"),
        ({"model_args": ...}, "no model_args"),
        ({"model_args": [1]}, "not a dict of plain values"),
        ({"model": ...}, "no entry 'model'"),
        ({"model": {"a": {"b": torch.ones(2)}}}, "more than named tensors: 'a' (dict)"),
    ],
    ids=str,
)
def test_another_content_is_refused_by_name(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    content = {key: value for key, value in (saved(Model()) | changes).items() if value is not ...}
    message = refusal(write(tmp_path, content))
    assert message.startswith(str(tmp_path / "ckpt.pt"))
    assert words in message


def test_a_plain_state_dict_in_a_pt_file(tmp_path: Path) -> None:
    message = refusal(write(tmp_path, Model().state_dict()))
    assert "A .pt file is read as nanoGPT's" in message
    assert "pytorch_model.bin" in message


def test_check_lists_the_faults_of_a_pt_file(path: Path, tmp_path: Path) -> None:
    assert converter.check(path) == converter.check(path.parent, full=True) == ()
    content = saved(Model())
    content["model"]["transformer.ln_f.weight"][3] = float("nan")
    del content["model"]["transformer.wpe.weight"]
    content["model"]["h._flat_param"] = torch.ones(3)
    faults = converter.check(write(tmp_path / "b", content), full=True)
    assert [fault.tensor for fault in faults] == ["h._flat_param", "transformer.ln_f.weight"]
    (tmp_path / "b" / "ckpt.pt").write_bytes(path.read_bytes()[:-100])
    (fault,) = converter.check(tmp_path / "b")
    assert (fault.file, "damaged" in fault.what) == (tmp_path / "b" / "ckpt.pt", True)


def test_a_folder_of_hugging_faces_format_stays_one(tmp_path: Path) -> None:
    folder = models.save(models.gpt2(), tmp_path)
    (folder / "ckpt.pt").write_bytes(b"never looked at")
    assert converter.inspect(folder).family == "gpt2"


# Conversion


def test_it_converts_by_the_recipe_of_gpt2(path: Path, text: Path, tmp_path: Path, ids: Tensor) -> None:
    target = tmp_path / "llama"
    result = CliRunner().invoke(main, ["convert", str(path), str(target), "--text", str(text), "--json"])
    assert result.exit_code == 0, result.output
    record = json.loads((target / "conversion.json").read_text())
    assert record["recipe"] == "gpt2-to-llama"
    assert record["source_family"] == "nanogpt"
    assert set(record["source_sha256"]) == {"ckpt.pt"}
    exact = [step["relative_change"] for step in record["steps"] if step["exact"]]
    assert max(exact) <= 1e-5
    assert converter.verify(path, target, text=[text]).total.kl == pytest.approx(
        record["verification"]["total"]["kl"], rel=0.2
    )


def test_what_nanogpt_json_says_is_part_of_the_source(path: Path) -> None:
    (path.parent / "nanogpt.json").write_text('{"activation_function": "gelu_new"}')
    assert set(Checkpoint.open(path).sha256()) == {"nanogpt.json", "ckpt.pt"}


@pytest.mark.parametrize("bias", [False, True])
def test_it_can_be_written_as_a_gpt2(bias: bool, tmp_path: Path, text: Path, ids: Tensor) -> None:
    """The stand-in is a target like any other: a GPT-2 that anybody can load."""
    model = Model(bias)
    recipe = tmp_path / "to-gpt2.yaml"
    recipe.write_text("name: to-gpt2\ntarget: gpt2\nsteps: []\n")
    converter.convert(write(tmp_path, saved(model)), tmp_path / "gpt2", recipe=str(recipe), text=[text])
    assert converter.inspect(tmp_path / "gpt2").family == "gpt2"
    assert models.relative(models.reference_logits(tmp_path / "gpt2", ids), model(ids)) <= 1e-5


def test_a_gpt2_holds_no_llama(tmp_path: Path) -> None:
    recipe = tmp_path / "to-gpt2.yaml"
    recipe.write_text("name: to-gpt2\ntarget: gpt2\nsteps: []\n")
    source = SourceModel.open(models.save(models.llama(), tmp_path / "llama"))
    with pytest.raises(UnsupportedError, match="a GPT-2 cannot hold the converted model: its norm is RMSNorm"):
        make_plan(source, load_recipe(str(recipe)))


@pytest.mark.parametrize("facts", [{"scale_attn_weights": False}, {"scale_attn_by_inverse_layer_idx": True}], ids=str)
def test_a_gpt2_written_again_is_the_same(facts: dict[str, Any], tmp_path: Path, ids: Tensor) -> None:
    model = models.gpt2(**facts)
    recipe = tmp_path / "again.yaml"
    recipe.write_text("name: again\ntarget: gpt2\nsteps: []\n")
    converter.convert(models.save(model, tmp_path / "a"), tmp_path / "b", recipe=str(recipe), verify=False)
    assert torch.equal(models.reference_logits(tmp_path / "b", ids), models.reference_logits(tmp_path / "a", ids))


@pytest.mark.parametrize("deep", [False, True])
def test_lists_within_lists_beside_the_weights_are_looked_at_once(deep, tmp_path):
    nested: list[Any] = []
    for _ in range(200 if deep else 60):
        nested = [nested] if deep else [nested, nested]  # in pairs: 2^60 ways to the innermost
    loop: dict[str, Any] = {}
    loop["self"] = loop
    content = saved(Model()) | {"lists": nested, "loop": loop}
    assert SourceModel.open(write(tmp_path / "model", content)).family.name == "nanogpt"


# A tokenizer of characters


CHARACTERS = sorted(set("\n !$&',-.3:;?" + "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"))


def meta(folder: Path, **changes: Any) -> Path:
    """What nanoGPT's data/shakespeare_char/prepare.py writes."""
    content = {
        "vocab_size": len(CHARACTERS),
        "itos": dict(enumerate(CHARACTERS)),
        "stoi": {character: index for index, character in enumerate(CHARACTERS)},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "meta.pkl").write_bytes(pickle.dumps({**content, **changes}))
    return folder


def test_a_model_of_characters_is_converted_with_its_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    path = write(tmp_path / "run", saved(Model(vocab_size=len(CHARACTERS))))
    assert "meta.pkl" in " ".join(converter.inspect(path).warnings)
    meta(path.parent)
    assert "meta.pkl" not in " ".join(converter.inspect(path).warnings)
    lines = "First Citizen:\nBefore we proceed any further, hear me speak.\n\n"
    tokenizer = load_tokenizer(path.parent)
    assert tokenizer is not None
    wanted = [CHARACTERS.index(character) for character in lines]
    assert tokenizer(lines)["input_ids"] == wanted
    (tmp_path / "shakespeare.txt").write_text(lines * 60)
    converter.convert(path, tmp_path / "llama", text=[tmp_path / "shakespeare.txt"])
    (tmp_path / "other.txt").write_text(lines + "1 + 1 = 2 and café")
    with pytest.raises(
        ConverterError, match=r"other.txt: the tokenizer cannot read the text. It has no '\+', '1', '2', "
    ):
        converter.verify(path, tmp_path / "llama", text=[tmp_path / "other.txt"])
    written = AutoTokenizer.from_pretrained(tmp_path / "llama")
    assert written(lines)["input_ids"] == wanted
    assert written.decode(wanted) == lines


class Runs:
    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.made}",)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stoi": None}, "no dict 'stoi'"),
        ({"stoi": {"ab": 0}}, "single characters"),
        ({"stoi": {"a": 0, "b": 2}}, "from 0 to 1, each once"),
        ({"itos": {0: "x"}}, "not the inverse"),
        ({"vocab_size": 3}, "vocab_size is 3"),
        ({"more": Namespace(a=1)}, "plain dicts, text and numbers"),
    ],
    ids=str,
)
def test_a_meta_that_is_no_table_of_characters(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        load_tokenizer(meta(tmp_path, **changes))
    assert str(caught.value).startswith(str(tmp_path / "meta.pkl"))
    assert words in str(caught.value)


def test_a_meta_with_a_payload_or_a_huge_memo_is_refused_and_not_run(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="could run code"):
        load_tokenizer(meta(tmp_path, more=Runs(tmp_path / "made")))
    assert not (tmp_path / "made").exists()
    (tmp_path / "meta.pkl").write_bytes(b"\x80\x04}r\xff\xff\xff\x7f.")
    with pytest.raises(CheckpointError, match="larger than the file"):
        load_tokenizer(tmp_path)
    (tmp_path / "meta.pkl").write_bytes(b"\x80\x04}")
    with pytest.raises(CheckpointError, match="the pickle is damaged"):
        load_tokenizer(tmp_path)
