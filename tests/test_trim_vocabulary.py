"""Rows without a token go: the logits of all tokens stay, and what is dropped is told."""

from __future__ import annotations

import json
from pathlib import Path

import models
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from test_running import padded, with_tokenizer
from transformers import AutoModelForCausalLM

import converter
from converter.blocks import EMBEDDINGS, HEAD
from converter.cli.main import main
from converter.errors import ConverterError, UnsupportedError
from converter.families.opened import SourceModel
from converter.ops.trim_vocabulary import TrimVocabulary


@pytest.mark.parametrize("tied", [True, False])
def test_the_logits_of_all_tokens_stay(tied: bool, tmp_path: Path) -> None:
    source = SourceModel.open(models.save(models.gpt2(tie_word_embeddings=tied), tmp_path))
    ids = models.random_ids().clamp(max=49)
    wanted = models.Converted(source).logits(ids)
    trimmed = models.Converted(source).after(TrimVocabulary(50))
    assert torch.equal(trimmed.logits(ids), wanted[..., :50])
    assert trimmed.spec.vocab_size == 50
    dropped = [*trimmed.notes[EMBEDDINGS].dropped, *trimmed.notes[HEAD].dropped]
    assert [each.name for each in dropped] == [
        "embeddings.embed.weight, rows 50 to 60",
        "head.head.weight, rows 50 to 60",
    ]
    rows = source.read_block(EMBEDDINGS, torch.float64)["embed.weight"][50:]
    assert dropped[0].norm == pytest.approx(float(rows.norm()))


def test_it_is_lossy_where_it_does_something(tmp_path: Path) -> None:
    spec = SourceModel.open(models.save(models.llama(), tmp_path)).spec
    assert [(TrimVocabulary(n).needed(spec), TrimVocabulary(n).exact(spec)) for n in (0, 60, 61)] == [
        (False, True),
        (True, False),
        (False, True),
    ]
    with pytest.raises(UnsupportedError, match="there are 61 rows, not 62"):
        TrimVocabulary(62).change(spec)


# --trim-vocab


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A GPT-2 of 4096 tokens and 8 rows of padding."""
    padded(with_tokenizer(tmp_path / "plain", 4096), tmp_path / "source", 4104)
    return tmp_path / "source"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("def f(x):\n    return {k: v for k, v in x.items()}\n" * 200)
    return tmp_path / "a.txt"


def test_padding_rows_go_and_the_result_is_that_of_the_source_without_them(source, text, tmp_path) -> None:
    arguments = [str(source), str(tmp_path / "out"), "--recipe", "gpt2-to-llama-naive", "--text", str(text)]
    result = CliRunner().invoke(main, ["convert", *arguments, "--trim-vocab"])
    assert result.exit_code == 0, result.output
    assert "trim_vocabulary(tokens=4096)" in result.output
    assert "embed.weight, rows 4096 to 4103" in result.output
    record = json.loads((tmp_path / "out/conversion.json").read_text())
    assert record["spec"]["vocab_size"] == json.loads((tmp_path / "out/config.json").read_text())["vocab_size"] == 4096
    first = record["steps"][0]
    assert (first["name"], first["exact"], first["parameters"]) == ("trim_vocabulary", False, {"tokens": 4096})
    assert abs(first["comparison"]["total"]["kl"]) < 1e-9
    assert first["comparison"]["total"]["loss"] < first["comparison"]["total"]["source_loss"]
    assert "trim_vocabulary" in (tmp_path / "out/recipe.yaml").read_text()

    converter.convert(tmp_path / "plain", tmp_path / "wanted", recipe="gpt2-to-llama-naive", text=text)
    ids = models.random_ids()
    loaded = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("out", "wanted"))
    found, wanted = (models.logits_of(model, ids) for model in loaded)
    assert models.relative(found, wanted) <= 1e-6
    assert converter.verify(source, tmp_path / "out", text=text, context=64).total.kl > 0


def test_a_dry_run_shows_it_and_nothing_changes_without_padding(source, tmp_path) -> None:
    from converter.conversion.run import plan_conversion

    trimmed = plan_conversion(source, "gpt2-to-llama-naive", trim_vocab=True)
    assert trimmed.steps[0].op == TrimVocabulary(4096)
    assert trimmed.tensors["model.embed_tokens.weight"][0][0] == 4096
    kept = plan_conversion(tmp_path / "plain", "gpt2-to-llama-naive", trim_vocab=True)
    assert "trim_vocabulary" not in [step.op.name for step in kept.steps]


def test_without_a_text_it_is_gated_on_tokens_that_stay(source, tmp_path) -> None:
    report = converter.convert(source, tmp_path / "out", recipe="gpt2-to-llama-naive", trim_vocab=True)
    assert report.passed


def test_what_cannot_be_trimmed_is_refused_before_anything_is_written(source, text, tmp_path) -> None:
    def refused(**options) -> str:
        given = {"recipe": "gpt2-to-llama-naive", "trim_vocab": True, "text": text} | options
        with pytest.raises(ConverterError) as raised:
            converter.convert(source, tmp_path / "out", **given)
        assert not (tmp_path / "out").exists()
        return str(raised.value)

    ids = models.random_ids(40, 64)
    ids[3, 5] = 4100
    np.save(tmp_path / "ids.npy", ids.numpy())
    assert "the id 4100" in refused(text=tmp_path / "ids.npy")
    models.edit_config(source, eos_token_id=4099)
    assert "eos_token_id is 4099, and the tokenizer has 4096 tokens" in refused()
    (source / "tokenizer.json").unlink()
    assert "no tokenizer, so which rows are padding is not known" in refused(text=tmp_path / "ids.npy")


@pytest.mark.parametrize("where", ["whole", "recorded"])
def test_a_padded_teacher_teaches_as_it_does_without_padding(where, source, text, tmp_path) -> None:
    converter.convert(source, tmp_path / "llama", recipe="gpt2-to-llama-naive", trim_vocab=True, verify=False)
    settings = ["heal.tokens=256", "heal.context=32", "heal.sequences_per_step=4", f"heal.teacher={where}"]
    padded_teacher, plain = (
        converter.heal(tmp_path / "llama", tmp_path / name, teacher=teacher, text=text, overrides=settings)
        for name, teacher in (("a", source), ("b", tmp_path / "plain"))
    )
    assert padded_teacher.best.losses == pytest.approx(plain.best.losses, rel=1e-6)
    assert padded_teacher.after.total.loss == pytest.approx(plain.after.total.loss, rel=1e-6)
    assert padded_teacher.after.total.kl == pytest.approx(plain.after.total.kl, rel=1e-5)


def test_padding_that_only_the_student_has_is_refused_with_what_to_do(source, text, tmp_path) -> None:
    converter.convert(source, tmp_path / "llama", recipe="gpt2-to-llama-naive", verify=False)
    with pytest.raises(UnsupportedError, match=r"4104 rows and its teacher 4096"):
        converter.heal(tmp_path / "llama", tmp_path / "out", teacher=tmp_path / "plain", text=text)
    assert not (tmp_path / "out").exists()
