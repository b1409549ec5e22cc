"""`converter heal` and `converter upgrade`: a run from the command line, controls, and words for people."""

from __future__ import annotations

import json

import models
import numpy as np
import pytest
from click.testing import CliRunner

from converter.cli.main import main
from converter.families.opened import SourceModel
from converter.measure.models import load_plain

SHORT = ("--tokens", "480", "--context", "40", "--set", "heal.sequences_per_step=4", "--set", "heal.rate=3e-3")


def invoke(*arguments):
    return CliRunner().invoke(main, [str(each) for each in arguments], catch_exceptions=False)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    return models.save(models.gpt2(), tmp_path_factory.mktemp("source") / "gpt2")


@pytest.fixture(scope="module")
def llama(gpt2, tmp_path_factory):
    from converter import convert

    target = tmp_path_factory.mktemp("converted") / "llama"
    convert(gpt2, target, recipe="gpt2-to-llama-naive", verify=False)
    return target


def test_heal_with_its_controls(gpt2, llama, text, tmp_path):
    out = tmp_path / "healed"
    done = invoke("heal", llama, out, "--teacher", gpt2, "--text", text, *SHORT, "--control", "--start", "random")
    assert done.exit_code == 0, done.output
    assert "source fine-tuned, rate 0.003" in done.output
    assert "(best)" in done.output
    assert "480 tokens seen" in done.output
    record = json.loads((out / "healing.json").read_text())
    assert [control["rate"] for control in record["controls"]] == pytest.approx([3e-3, 9e-3, 3e-2, 3e-3])
    assert [control["name"] for control in record["controls"]] == [*["source fine-tuned"] * 3, "random start"]
    assert (out / "figures" / "healing.png").stat().st_size > 10_000
    conversion = json.loads((out / "conversion.json").read_text())
    assert conversion["verification"]["total"]["kl"] == record["after"]["total"]["kl"]
    stored = SourceModel.open(out).checkpoint.total_bytes
    assert (conversion["target_cost"]["bytes"], conversion["spec"]["context"]) == (stored, 72)
    card = (out / "README.md").read_text()
    assert card.index("## What each step cost") < card.index("## Healing")


def test_the_naive_start_is_healed_in_the_same_way(gpt2, llama, text, tmp_path):
    from converter.healing.run import heal

    overrides = ("heal.tokens=320", "heal.context=40", "heal.sequences_per_step=4")
    report = heal(llama, tmp_path / "out", teacher=gpt2, text=[text], overrides=overrides, starts=["naive"])
    (naive,) = report.controls
    # It is what was healed here, so that it must have come to the same.
    assert naive.best.kl == pytest.approx(report.best.kl, rel=1e-5)


def test_the_naive_start_of_a_source_with_norms_behind_its_sublayers(text, tmp_path):
    from converter.healing.run import heal

    source = models.save(models.openai_gpt(), tmp_path / "source")
    overrides = ("heal.tokens=320", "heal.context=40", "heal.sequences_per_step=4")
    converted = models.save(models.llama(), tmp_path / "llama")
    report = heal(converted, tmp_path / "out", teacher=source, text=[text], overrides=overrides, starts=["naive"])
    (naive,) = report.controls
    assert naive.name == "naive start"
    assert naive.evaluations[0].kl > 0


def test_upgrade_converts_and_heals_with_one_recipe(gpt2, text, tmp_path):
    out = tmp_path / "upgraded"
    recipe = tmp_path / "mine.yaml"
    invoke("recipes", "copy", "gpt2-to-llama-naive", recipe)
    recipe.write_text(recipe.read_text() + "heal: {sequences_per_step: 4, rate: 3e-3}\n")
    options = ("--text", text, "--recipe", recipe, "--set", "gelu_to_swiglu.units=2", *SHORT[:4])
    done = invoke("upgrade", gpt2, out, *options, "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["settings"]["sequences_per_step"] == 4
    assert report["after"]["total"]["kl"] < report["before"]["total"]["kl"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.yaml", "upgraded"]
    assert "gelu_to_swiglu(units=2" in (out / "README.md").read_text()
    load_plain(out)


@pytest.mark.parametrize("kind", ["rows", "wide"])
def test_both_halves_of_an_upgrade_hold_out_the_same(gpt2, kind, text, tmp_path, monkeypatch):
    """T9. Both read any text; a `.bin` of other widths as well, and a folder."""
    from converter.text import gather

    splits = []
    read = gather.read_split
    monkeypatch.setattr(gather, "read_split", lambda *given: splits.append(read(*given)) or splits[-1])
    options = ["--recipe", "gpt2-to-llama-naive", *SHORT]
    (tmp_path / "texts").mkdir()
    ids = np.load(text)
    if kind == "wide":
        stream = np.concatenate([np.append(row, 0) for row in ids])
        stream.astype(np.uint32).tofile(tmp_path / "texts" / "ids.bin")
        options += ["--token-bytes", "4"]
    else:
        np.save(tmp_path / "texts" / "part[1].npy", ids)
    done = invoke("upgrade", gpt2, tmp_path / "out", "--text", tmp_path / "texts", *options)
    assert done.exit_code == 0, done.output
    one, other = (sorted(document.ids.tolist() for document in split.held_out) for split in splits)
    assert one == other
    assert one


def test_a_wrong_setting_is_one_paragraph(llama, tmp_path):
    done = invoke("heal", llama, tmp_path / "out", "--set", "heal.rats=1")
    assert done.exit_code == 2
    assert "unknown parameter 'rats' of heal. Did you mean 'rate'?" in done.output
    assert done.output.count("\n") == 1
