"""Held-out loss by context length: every token once, with the context that it should have, by plain arithmetic."""

from __future__ import annotations

import json
import math
from pathlib import Path

import models
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch.nn import functional as F

import converter
from converter.cli.main import main
from converter.errors import ConverterError
from converter.files.tokenizer import load_tokenizer

EXAMPLE = Path(__file__).parent.parent / "examples" / "tiny-gpt2"
TEXT = "def f(x):\n    return 'naïve'  # 😀\n" * 4


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory) -> Path:
    return models.save(models.gpt2(), tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return models.save(models.llama(), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def documents(tmp_path_factory) -> Path:
    """Documents of 60, of 5 and of 1 token, opened by 0, as a nanoGPT .bin."""
    ids = models.random_ids(1, 66, seed=4)[0].clamp(min=1).numpy().astype(np.uint16)
    ids[[0, 60, 65]] = 0
    path = tmp_path_factory.mktemp("text") / "ids.bin"
    ids.tofile(path)
    return path


def token_by_token(model, documents: Path, context: int, stride: int) -> list[tuple[int, float]]:
    """Position in its window and loss of each token, by a forward of its own over what that window shows it.

    The token behind a document is one of them: 0, which ends it.
    """
    stream = torch.from_numpy(np.fromfile(documents, dtype=np.uint16).astype(np.int64))
    found = []
    for first, end in ((0, 60), (60, 65)):
        for place in range(first + 1, end + 1):
            late = max(0, min(place, end - 1) - first - context + 1)
            start = first + stride * math.ceil(late / stride)
            logits = models.logits_of(model, stream[None, start:place], torch.float64)[0, -1]
            found.append((place - 1 - start, float(F.cross_entropy(logits, stream[place]))))
    return found


@pytest.mark.parametrize(("context", "stride", "used"), [(16, 5, 5), (16, 15, 15), (16, 200, 15), (72, 256, 71)])
def test_every_token_is_scored_once_with_its_context(llama, documents, context, stride, used):
    (found,) = converter.evaluate(llama, text=documents, context=context, stride=stride)
    wanted = token_by_token(models.llama(), documents, context, used)
    (at,) = found.results
    assert (at.context, at.stride, at.tokens) == (context, used, len(wanted))
    assert at.loss == pytest.approx(np.mean([loss for _, loss in wanted]), rel=1e-5)
    assert at.perplexity == pytest.approx(math.exp(at.loss))
    assert (found.no_kl, found.no_context, at.kl, at.agreement) == (None, {}, None, None)
    for bucket in at.buckets:
        inside = [loss for position, loss in wanted if bucket.first <= position <= bucket.last]
        assert (bucket.tokens, bucket.loss) == (len(inside), pytest.approx(np.mean(inside), rel=1e-5))
    assert sum(bucket.tokens for bucket in at.buckets) == at.tokens
    ends = [wanted[59][1], wanted[64][1]]
    assert at.end_of_text.ends == 2
    assert at.end_of_text.places == len(wanted) - 2
    assert at.end_of_text.loss == pytest.approx(np.mean(ends), rel=1e-5)
    assert at.end_of_text.probability == pytest.approx(np.mean(np.exp(np.negative(ends))), rel=1e-5)


def test_the_kl_is_to_the_first(gpt2, llama, documents):
    first, same, other = converter.evaluate([gpt2, gpt2, llama], text=documents, context=[32, 64])
    assert [at.kl for at in first.results] == [None, None]
    assert [(at.kl, at.agreement, at.loss) for at in same.results] == [(0.0, 1.0, at.loss) for at in first.results]
    assert min(at.kl for at in other.results) > 0.1
    compared = converter.verify(gpt2, llama, text=documents, context=64)
    assert other.results[1].kl == pytest.approx(compared.total.kl, rel=1e-6)  # no document is longer: one window each
    assert other.results[1].loss == pytest.approx(compared.total.loss, rel=1e-6)


def test_a_context_beyond_learned_positions_is_said_and_the_rest_is_measured(gpt2, llama, documents):
    learnt, rotary = converter.evaluate([gpt2, llama], text=documents, context=[64, 100])
    assert [at.context for at in learnt.results] == [64]
    assert list(learnt.no_context) == [100]
    assert "learnt 72 positions" in learnt.no_context[100]
    assert [(at.context, at.kl is None) for at in rotary.results] == [(64, False), (100, True)]


def test_a_model_of_another_vocabulary_has_a_loss_and_no_kl(llama, documents, tmp_path):
    wider = models.save(models.llama(vocab_size=models.VOCAB + 3), tmp_path / "wider")
    _, other = converter.evaluate([llama, wider], text=documents, context=32)
    assert "64 tokens" in other.no_kl
    assert "61" in other.no_kl
    (at,) = other.results
    assert at.kl is None
    assert at.loss > 0


def with_tokenizer(folder: Path, **changes: object) -> Path:
    """A small GPT-2 with the example's tokenizer, in whose tokenizer.json something is changed."""
    models.save(models.gpt2(vocab_size=4096), folder)
    pipeline = json.loads((EXAMPLE / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(pipeline | changes))
    return folder


def test_bits_per_byte_are_those_of_the_text(tmp_path):
    folder = with_tokenizer(tmp_path / "model")
    (tmp_path / "a.txt").write_text(TEXT + "<|endoftext|>" + TEXT)
    (found,) = converter.evaluate(folder, text=tmp_path / "a.txt", context=64)
    (at,) = found.results
    assert at.end_of_text.ends == 2
    nats = at.loss * at.tokens - 2 * at.end_of_text.loss  # an end has no bytes
    assert at.bits_per_byte == pytest.approx(nats / math.log(2) / (2 * len(TEXT.encode())))
    # Tokens that cut a character in two are not those of a text.
    ids = load_tokenizer(folder)(TEXT)["input_ids"]
    np.save(tmp_path / "whole.npy", [[0, *ids]])
    broken = next(n for n in range(len(ids)) if "\ufffd" in load_tokenizer(folder).decode(ids[:n]))
    np.save(tmp_path / "cut.npy", [[0, *ids[:broken]]])
    whole, cut = (
        converter.evaluate(folder, text=tmp_path / f"{name}.npy", context=64)[0].results[0].bits_per_byte
        for name in ("whole", "cut")
    )
    assert whole == pytest.approx(at.bits_per_byte, rel=0.5)
    assert cut is None


def test_another_tokenizer_means_no_kl_and_tokens_of_its_own(tmp_path):
    (tmp_path / "a.txt").write_text("hello  world " * 30)
    plain = with_tokenizer(tmp_path / "plain")
    prefixed = with_tokenizer(tmp_path / "prefixed", normalizer={"type": "Prepend", "prepend": "x"})
    first, other = converter.evaluate([plain, prefixed], text=tmp_path / "a.txt", context=64)
    assert "differ on the text" in other.no_kl
    assert "\n" not in other.no_kl
    assert other.results[0].kl is None
    assert other.results[0].tokens != first.results[0].tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 1}, "context of 1"),
        ({"stride": 0}, "stride of 0"),
        ({"max_tokens": 0}, "max_tokens of 0"),
        ({"text": "nowhere.txt"}, "no such file"),
    ],
)
def test_what_cannot_be_measured_is_an_error(llama, documents, options, message):
    with pytest.raises(ConverterError, match=message):
        converter.evaluate(llama, **({"text": documents} | options))


def run(*arguments: object):
    return CliRunner().invoke(main, ["eval", *map(str, arguments)])


def test_the_command_prints_a_table_or_json(gpt2, llama, documents):
    result = run(gpt2, llama, "--text", documents, "--context", 32, "--context", 64, "--stride", 8)
    assert result.exit_code == 0, result.output
    for words in ("Held-out loss", "bits per byte", "Loss by position in a window of 32", "window of 64", "16-30"):
        assert words in result.stdout
    found = json.loads(run(gpt2, llama, "--text", documents, "--context", 32, "--json").stdout)
    assert [model["path"] for model in found] == [str(gpt2), str(llama)]
    assert found[1]["results"][0]["kl"] > 0
    assert found[0]["results"][0]["buckets"][0]["first"] == 0


def test_the_command_fails_for_a_missing_position_and_prints_the_rest(gpt2, llama, documents, tmp_path):
    result = run(gpt2, llama, "--text", documents, "--context", 64, "--context", 100)
    assert result.exit_code == 2
    assert "Loss by position in a window of 100" in result.stdout
    assert "has learnt 72 positions, too few for a context of 100" in result.stderr
    wider = models.save(models.llama(vocab_size=models.VOCAB + 3), tmp_path / "wider")
    result = run(llama, wider, "--text", documents)
    assert result.exit_code == 0
    assert f"No KL of {wider}" in result.stdout.replace("\n", "")


def test_the_text_ends_with_the_document_that_reaches_the_tokens(llama, documents):
    found = [converter.evaluate(llama, text=documents, context=16, max_tokens=most)[0] for most in (None, 61, 20)]
    assert [each.results[0].tokens for each in found] == [60 + 5, 60 + 5, 60]


def test_models_of_different_tokens_end_with_the_same_document(tmp_path):
    """The other's tokens are more, so that by its own count it would end a document earlier."""
    texts = [tmp_path / f"{name}.txt" for name in "abc"]
    for text in texts:
        text.write_text("hello world " * 5)
    plain = with_tokenizer(tmp_path / "plain")
    padded = with_tokenizer(
        tmp_path / "padded", normalizer={"type": "Replace", "pattern": {"String": " "}, "content": "xy xy"}
    )
    whole = converter.evaluate([plain, padded], text=texts, context=64)
    alone = [each.results[0].tokens // 3 for each in whole]
    assert alone[1] > alone[0]
    cut = converter.evaluate([plain, padded], text=texts, context=64, max_tokens=alone[0] + 3)
    assert [each.results[0].tokens for each in cut] == [2 * each for each in alone]
