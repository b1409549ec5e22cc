"""Models that run, whoever runs them: `eval` and `verify` against transformers' own forward, at all positions."""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from pathlib import Path

import models
import numpy as np
import pytest
import torch
from test_rope_containers import EVEN, WIDE, gguf_file, meta_folder
from test_rope_families import make
from torch import Tensor
from torch.nn import functional as F
from transformers import BloomConfig, BloomForCausalLM, PreTrainedModel

import converter
from converter.errors import CheckpointError, ConverterError, UnsupportedError
from converter.measure.models import RunnableCheckpoint, load

EXAMPLE = Path(__file__).parent.parent / "examples" / "tiny-gpt2"


def bloom(seed: int = 0) -> PreTrainedModel:
    facts = {"vocab_size": models.VOCAB, "hidden_size": 48, "n_layer": 2, "n_head": 3, "layer_norm_epsilon": 3e-4}
    return models.jitter(BloomForCausalLM(BloomConfig(**facts, bos_token_id=0, eos_token_id=0)), seed)


def saved(kind: str, folder: Path, seed: int = 0) -> tuple[Path, PreTrainedModel]:
    """A checkpoint of a kind, and transformers' model of the same function."""
    folder.mkdir(parents=True)
    if kind == "bloom":
        model = bloom(seed)
        model.save_pretrained(folder)
        return folder, model
    model = models.jitter(make("Llama", EVEN if kind == "meta" else WIDE), seed)
    if kind == "meta":
        return meta_folder(folder / "meta", model, 2), model
    return gguf_file(folder / "model.gguf", model, "llama"), model


@torch.no_grad()
def log_probabilities(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return model.double()(input_ids=ids, use_cache=False).logits.log_softmax(-1)


@pytest.mark.parametrize("kind", ["meta", "gguf", "bloom"])
def test_eval_and_verify_measure_what_transformers_does(kind, tmp_path):
    """Today's AttributeError: no `device` of the one, no `max_position_embeddings` of the other."""
    (one, a), (two, b) = saved(kind, tmp_path / "a"), saved(kind, tmp_path / "b", seed=1)
    text, ids = models.write_ids(tmp_path / "ids.npy", rows=6), models.random_ids(6, models.CONTEXT, seed=1)
    wanted_a, wanted_b = (log_probabilities(model, ids)[:, :-1] for model in (a, b))
    losses = [float(F.nll_loss(each.flatten(0, 1), ids[:, 1:].flatten())) for each in (wanted_a, wanted_b)]
    kl = float((wanted_a.exp() * (wanted_a - wanted_b)).sum(-1).mean())
    assert kl > 0.1

    first, other = converter.evaluate([one, two], text=text, context=models.CONTEXT)
    assert [each.results[0].loss for each in (first, other)] == pytest.approx(losses, rel=1e-5)
    assert other.results[0].kl == pytest.approx(kl, rel=1e-5)
    compared = converter.verify(one, two, text=text)
    assert (compared.total.source_loss, compared.total.loss) == pytest.approx(losses, rel=1e-5)
    assert compared.total.kl == pytest.approx(kl, rel=1e-5)
    assert compared.total.tokens == 6 * (models.CONTEXT - 1)


@pytest.mark.parametrize("kind", ["meta", "gguf"])
def test_a_container_is_compared_with_a_hugging_face_folder(kind, tmp_path):
    path, model = saved(kind, tmp_path / "a")
    model.save_pretrained(tmp_path / "hf")
    text = models.write_ids(tmp_path / "ids.npy", rows=4)
    assert abs(converter.verify(path, tmp_path / "hf", text=text, context=64).total.kl) < 1e-9


@pytest.mark.parametrize(
    ("kind", "context", "longest"), [("bloom", None, None), ("gguf", 2048, None), ("gpt2", 72, 72), ("llama", 72, None)]
)
def test_how_long_a_sequence_may_be(kind, context, longest, tmp_path):
    if kind in ("gpt2", "llama"):
        path = models.save(getattr(models, kind)(), tmp_path / kind)
    else:
        path, _ = saved(kind, tmp_path / kind)
    loaded = RunnableCheckpoint(path)
    assert (loaded.model.context, loaded.model.longest, loaded.model.device.type) == (context, longest, "cpu")
    assert loaded.tokens().opening == (None if kind == "gguf" else 0)


def test_verify_refuses_a_window_beyond_learned_positions(tmp_path):
    gpt2, llama = models.save(models.gpt2(), tmp_path / "gpt2"), models.save(models.llama(), tmp_path / "llama")
    np.save(tmp_path / "ids.npy", models.random_ids(2, 100).numpy())
    with pytest.raises(ConverterError, match="the models see 72 tokens at most"):
        converter.verify(gpt2, llama, text=tmp_path / "ids.npy", context=100)
    assert converter.verify(llama, llama, text=tmp_path / "ids.npy", context=100).total.tokens == 2 * 99


def test_evaluate_holds_two_models_at_most(tmp_path, monkeypatch):
    paths = [models.save(models.llama(seed), tmp_path / str(seed)) for seed in range(4)]
    text = models.write_ids(tmp_path / "ids.npy", rows=2)
    loaded: list[weakref.ref] = []
    alive: list[int] = []

    def load_counting(source):
        gc.collect()
        alive.append(sum(reference() is not None for reference in loaded))
        found = load(source)
        loaded.append(weakref.ref(found.model))
        return found

    monkeypatch.setattr("converter.measure.models.load", load_counting)
    assert len(converter.evaluate(paths, text=text, context=32)) == 4
    assert alive == [0, 1, 1, 1]  # before each is loaded: nothing, and then the first alone


# Vocabularies


def with_tokenizer(folder: Path, rows: int, **pipeline: object) -> Path:
    """A small GPT-2 of so many rows with the example's tokenizer of 4096 ids, something in it changed."""
    models.save(models.gpt2(vocab_size=rows), folder)
    tokenizer = json.loads((EXAMPLE / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer | pipeline))
    return folder


@pytest.fixture
def text(tmp_path) -> Path:
    (tmp_path / "a.txt").write_text("def f(x):\n    return {k: v for k, v in x.items()}\n" * 20)
    return tmp_path / "a.txt"


def test_two_tokenizers_that_differ_are_named(tmp_path, text):
    one = with_tokenizer(tmp_path / "one", 4096)
    two = with_tokenizer(tmp_path / "two", 4096, normalizer={"type": "Lowercase"})
    with pytest.raises(UnsupportedError) as raised:
        converter.verify(one, two, text=text)
    message = str(raised.value)
    assert str(one) in message
    assert str(two) in message
    assert "report" not in message
    assert "target" not in message
    with pytest.raises(UnsupportedError, match=r"tokenizers of .*one and .*two differ on the text"):
        converter.heal(two, tmp_path / "out", teacher=one, text=text)
    assert not (tmp_path / "out").exists()


def padded(folder: Path, target: Path, rows: int) -> Path:
    """The same model with random rows of padding."""
    shutil.copytree(folder, target)
    source, wide = models.gpt2(vocab_size=4096), models.gpt2(seed=5, vocab_size=rows)
    state = source.state_dict()
    for name in ("transformer.wte.weight", "lm_head.weight"):
        state[name] = torch.cat([state[name], wide.state_dict()[name][4096:]])
    wide.load_state_dict(state)
    return models.save(wide, target)


def test_padding_rows_are_left_out_of_the_kl_and_not_of_the_loss(tmp_path, text):
    one = with_tokenizer(tmp_path / "one", 4096)
    two = padded(one, tmp_path / "two", 4104)
    for a, b in ((one, two), (two, one)):
        total = converter.verify(a, b, text=text, context=64).total
        assert abs(total.kl) < 1e-9
        narrow, wide = (total.source_loss, total.loss) if a == one else (total.loss, total.source_loss)
        assert wide > narrow + 1e-5  # what the padding rows get, the tokens lack
    (alone,) = converter.evaluate(two, text=text, context=64)
    _, beside = converter.evaluate([one, two], text=text, context=64)
    assert beside.no_kl is None
    assert abs(beside.results[0].kl) < 1e-9
    assert beside.results[0].loss == pytest.approx(alone.results[0].loss, rel=1e-6)


def test_rows_that_have_a_token_are_no_padding(tmp_path, text):
    one = with_tokenizer(tmp_path / "one", 4096)
    added = json.loads((EXAMPLE / "tokenizer.json").read_text())["added_tokens"]
    more = {**added[0], "id": 4096, "content": "<more>"}
    two = with_tokenizer(tmp_path / "two", 4097, added_tokens=[*added, more])
    with pytest.raises(UnsupportedError, match=r"differ on the text .*<more>"):
        converter.verify(one, two, text=text)
    (one / "tokenizer.json").unlink()
    with pytest.raises(UnsupportedError, match="4097 tokens, so what only one of them has is no padding"):
        converter.verify(one, two, text=text)
    (two / "tokenizer.json").unlink()
    with pytest.raises(UnsupportedError, match="Neither has a tokenizer"):
        converter.verify(one, two, text=models.write_ids(tmp_path / "ids.npy"))


def test_a_tokenizer_larger_than_the_embeddings_is_an_error(tmp_path, text):
    small, sound = with_tokenizer(tmp_path / "small", 4095), with_tokenizer(tmp_path / "sound", 4096)
    for measure in (
        lambda: converter.verify(sound, small, text=text),
        lambda: converter.evaluate(small, text=text, context=64),
    ):
        with pytest.raises(CheckpointError, match="4096 ids and the embeddings have 4095 rows"):
            measure()
