"""Text of any kind becomes a corpus, once; batches follow from (seed, step) alone; packed documents do not meet."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import datasets
import models
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from transformers import OpenAIGPTConfig, OpenAIGPTLMHeadModel, OPTConfig, OPTForCausalLM, PreTrainedModel

from converter.errors import ConverterError, VerificationError
from converter.files.tokenizer import load_tokenizer
from converter.healing.batches import IGNORE, Batches, Sequences, sequences_of
from converter.healing.packed import check_no_leak, run_packed, run_packed_layers
from converter.text.corpus import Corpus, cached_split, load_corpus
from converter.text.documents import Document, read
from converter.text.tokens import ModelTokens
from converter.text.windows import Split, windows

EXAMPLE = Path(__file__).parent.parent / "examples" / "tiny-gpt2"
VOCAB, EOT = 4096, 0


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(EXAMPLE)


def load(tokenizer, *texts: str | Path, vocab_size: int = VOCAB, **options) -> Corpus:
    return load_corpus(texts, ModelTokens(tokenizer, vocab_size, EOT, (EOT,)), **options)


def of(*documents: list[int] | np.ndarray) -> Corpus:
    return Corpus.of([Document("", np.array(ids)) for ids in documents])


def texts_of(corpus: Corpus, tokenizer) -> list[str]:
    """Each document's text, without the token that opens it."""
    pieces = np.split(corpus.ids, corpus.offsets[1:-1])
    assert all(piece[0] == EOT for piece in pieces)
    return [tokenizer.decode(piece[1:]) for piece in pieces]


def corpus(*lengths: int) -> Corpus:
    """Documents of these lengths; every token of all of them is different, and none is 0."""
    starts = np.cumsum([1, *lengths])
    return of(*(np.arange(start, start + length) for start, length in zip(starts[:-1], lengths, strict=True)))


# --- load_corpus ----------------------------------------------------------------------------------------------


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """A folder with every kind of file."""
    folder = tmp_path / "mixed"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.txt").write_text("one text<|endoftext|>and another")
    rows = [{"text": "jsonl"}, {"text": ""}, {"text": None}, {"text": "two\nlines", "url": "x"}]
    (folder / "b.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pyarrow.parquet.write_table(pyarrow.table({"n": [1, 2], "text": ["par", "quet"]}), folder / "c.parquet")
    np.save(folder / "deep" / "d.npy", np.array([[EOT, 7, 8]]))
    np.array([EOT, 9, 10, 11, EOT, 12], dtype=np.uint16).tofile(folder / "deep" / "e.bin")
    (folder / ".hidden.txt").write_text("nobody reads this")
    return folder


def test_a_folder_of_all_kinds_is_one_corpus_in_the_order_of_its_paths(mixed, tokenizer):
    found = load(tokenizer, mixed)
    assert texts_of(found, tokenizer)[:6] == ["one text", "and another", "jsonl", "two\nlines", "par", "quet"]
    assert [piece.tolist() for piece in np.split(found.ids, found.offsets[1:-1])[6:]] == [
        [EOT, 7, 8],
        [EOT, 9, 10, 11],
        [EOT, 12],
    ]
    assert (found.tokens, found.documents) == (len(found.ids), 9)
    same = load(tokenizer, *sorted(file for file in mixed.rglob("[!.]*") if file.is_file()))
    assert same.fingerprint == found.fingerprint
    assert load(tokenizer, mixed / "a.txt").fingerprint != found.fingerprint


def test_jsonl_may_be_compressed_and_json_a_list(tokenizer, tmp_path):
    rows = [{"text": "one"}, {"text": "two"}]
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write("\n".join(map(json.dumps, rows)))
    (tmp_path / "b.json").write_text(json.dumps(rows))
    for name in ("a.jsonl.gz", "b.json"):
        assert texts_of(load(tokenizer, tmp_path / name), tokenizer) == ["one", "two"]
    (tmp_path / "config.json").write_text('{"vocab_size": 5}')
    with pytest.raises(ConverterError, match=r"config\.json.*'vocab_size' \(int\)"):
        load(tokenizer, tmp_path)


def cached(tokenizer, folder: Path, text: Path, *decisive: int) -> tuple[Corpus, Corpus, tuple[str, ...]]:
    """The text, and the same as the held-out side."""
    tokens = ModelTokens(tokenizer, VOCAB, EOT, (EOT,))

    def make() -> Split:
        reading = read([text], tokens)
        return Split(reading.documents, reading.documents[1:], reading.notes)

    return cached_split([text], tokens, decisive, folder, make)


def test_the_cache_is_used_until_a_file_changes(mixed, tokenizer, tmp_path, monkeypatch):
    plain, (first, held_out, notes) = load(tokenizer, mixed), cached(tokenizer, tmp_path / "cache", mixed)
    assert first.fingerprint == plain.fingerprint != held_out.fingerprint
    for name in ("ids", "offsets", "ended"):
        assert np.array_equal(getattr(first, name), getattr(plain, name))
    assert first.ended.tolist() == [True] * 6 + [False, True, False]
    assert (first.end_of_text, held_out.documents) == (EOT, 8)
    assert "2 rows have no text" in notes[0]
    assert isinstance(first.ids, np.memmap)
    with monkeypatch.context() as patch:
        patch.setattr(f"{__name__}.read", lambda *_: pytest.fail("read again"))
        again, _, told = cached(tokenizer, tmp_path / "cache", mixed)
    assert (again.fingerprint, told) == (first.fingerprint, notes)
    assert np.array_equal(again.ids, first.ids)
    cached(tokenizer, tmp_path / "cache", mixed, 5)
    (mixed / "a.txt").write_text("a new text")
    assert texts_of(cached(tokenizer, tmp_path / "cache", mixed)[0], tokenizer)[0] == "a new text"
    assert len(list((tmp_path / "cache").iterdir())) == 3


def test_a_failed_run_leaves_nothing_in_the_cache(mixed, tokenizer, tmp_path):
    (mixed / "z.jsonl").write_text('{"text": "sound"}\n{"text": dama')
    with pytest.raises(ConverterError, match=r"z\.jsonl.*cannot be read"):
        cached(tokenizer, tmp_path / "cache", mixed)
    assert not (tmp_path / "cache").exists()


def test_a_damaged_cache_is_an_error_that_names_it(mixed, tokenizer, tmp_path):
    cached(tokenizer, tmp_path / "cache", mixed)
    (ids,) = (tmp_path / "cache").glob("*/learnt/ids.bin")
    ids.write_bytes(ids.read_bytes()[:-4])
    with pytest.raises(ConverterError, match=r"cache are damaged.*Remove this folder") as caught:
        cached(tokenizer, tmp_path / "cache", mixed)
    assert str(ids.parent.parent) in str(caught.value)


def test_reading_stops_with_the_document_that_reaches_max_tokens(tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": f"document {n}"}) for n in range(9)))
    whole = load(tokenizer, tmp_path)
    enough = int(whole.offsets[3])
    assert load(tokenizer, tmp_path, max_tokens=enough).documents == 3
    assert load(tokenizer, tmp_path, max_tokens=enough + 1).documents == 4
    assert load(tokenizer, tmp_path, max_pieces=5).documents == 5


def test_a_dataset_of_the_hub_is_streamed(tokenizer, monkeypatch):
    asked = []

    def load_dataset(*names, **options):
        asked.append((*names, options["split"], options["streaming"]))
        return iter([{"text": "from the hub", "id": 1}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for name in ("hub:owner/name", "hub:owner/name:validation", "hub:owner/name/config:test"):
        assert texts_of(load(tokenizer, name), tokenizer) == ["from the hub"]
    assert asked == [
        ("owner/name", None, "train", True),
        ("owner/name", None, "validation", True),
        ("owner/name", "config", "test", True),
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"body": "x", "n": 3}', r"no text in a field 'text'.*'body' \(str\), 'n' \(int\)"),
        ("a.jsonl", '{"text": 5}', r"no text in a field 'text'.*'text' \(int\)"),
        ("a.jsonl", '{"text": "x"}\n{"text":', "cannot be read.*A line is no JSON"),
        ("a.jsonl", "", "file is empty"),
        ("a.jsonl", '{"text": " "}', "no text in it"),
        ("a.parquet", "no parquet", "cannot be read.*Parquet"),
        ("a.txt", "", "file is empty"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(name, content, message, tokenizer, tmp_path):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ConverterError, match=message) as caught:
        load(tokenizer, path)
    assert str(path) in str(caught.value)


def test_what_is_missing_is_said(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.jsonl").write_text('{"text": "hello"}')
    for texts, reader, message in (
        ([], tokenizer, "No text was given"),
        ([tmp_path / "none"], tokenizer, "no such file or folder"),
        ([tmp_path / "empty"], tokenizer, "holds no files"),
        ([tmp_path / "a.jsonl"], None, "checkpoint has no tokenizer"),
    ):
        with pytest.raises(ConverterError, match=message):
            load(reader, *texts)
    with pytest.raises(ConverterError, match=r"Token id \d+ is not in the vocabulary"):
        load(tokenizer, tmp_path / "a.jsonl", vocab_size=40)


# --- batches --------------------------------------------------------------------------------------------------


def test_documents_are_packed_cut_and_their_last_token_has_no_target():
    batches = Batches(corpus(5, 7, 4), context=8, sequences_per_step=2, seed=0)
    assert batches.sequences_per_epoch == 2
    found = batches.step(0)
    order = [int(row[0]) for row in found.ids]
    rows = [found.rows(slice(order.index(first), order.index(first) + 1)) for first in (1, 9)]
    assert rows[0].ids.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]
    assert rows[0].documents.tolist() == [[0, 0, 0, 0, 0, 1, 1, 1]]
    assert rows[0].positions.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]]
    assert rows[0].targets.tolist() == [[2, 3, 4, 5, IGNORE, 7, 8, IGNORE]]
    # The second document goes on in the second row, as a piece of its own.
    assert rows[1].documents.tolist() == [[0, 0, 0, 0, 1, 1, 1, 1]]
    assert rows[1].targets.tolist() == [[10, 11, 12, IGNORE, 14, 15, 16, IGNORE]]
    assert found.valid == 12


def test_the_token_behind_a_real_end_is_a_target():
    """T6. Not where a document is cut by a row, by a budget, or by the end of its data; nor behind nothing."""
    lengths, ends = (5, 7, 4, 8, 1), (True, True, False, True, True)
    starts = np.cumsum([1, *lengths]).tolist()
    documents = [
        Document("", np.arange(start, start + length), end)
        for start, length, end in zip(starts[:-1], lengths, ends, strict=True)
    ]
    found, without = (
        Batches(Corpus.of(documents, token), 8, sequences_per_step=4, seed=0)._sequences(np.arange(4))
        for token in (0, None)
    )
    assert found.targets.tolist() == [
        [2, 3, 4, 5, 0, 7, 8, IGNORE],
        [10, 11, 12, 0, 14, 15, 16, IGNORE],
        [18, 19, 20, 21, 22, 23, 24, 0],
        [IGNORE] * 8,
    ]
    assert 0 not in without.targets
    assert torch.equal(without.ids, found.ids)


def test_held_out_windows_have_the_same_targets():
    documents = [Document("", np.arange(1, 6), ended=True), Document("", np.arange(6, 14), ended=True)]
    cut = windows(documents, 9, None, end_of_text=0)
    found = sequences_of(cut, 1).targets.tolist()
    assert found == [[2, 3, 4, 5, 0, *[IGNORE] * 3], [7, 8, 9, 10, 11, 12, 13, 0]]


def test_padding_is_known_by_length_and_an_end_of_text_inside_is_a_target():
    """H5: pad = eos = 0."""
    found = Batches(of([0, 4, 0, 0, 5]), context=8, sequences_per_step=1, seed=0).step(0)
    assert found.ids.tolist() == [[0, 4, 0, 0, 5, 0, 0, 0]]
    assert found.targets.tolist() == [[4, 0, 0, 5, IGNORE, IGNORE, IGNORE, IGNORE]]
    assert found.documents.tolist() == [[0, 0, 0, 0, 0, -1, -1, -1]]


def test_an_empty_document_changes_nothing():
    lengths = (3, 0, 4, 1, 0)
    plain = Batches(corpus(*(n for n in lengths if n)), 6, 2, seed=0).step(0)
    other = Batches(corpus(*lengths), 6, 2, seed=0).step(0)
    assert all(torch.equal(getattr(plain, name), getattr(other, name)) for name in vars(plain))


def test_each_sequence_comes_once_an_epoch_each_epoch_in_a_new_order():
    """H2. Three sequences a step and eleven an epoch: steps straddle the epochs' ends."""
    batches = Batches(corpus(*([9] * 9), 4), context=8, sequences_per_step=3, seed=5)
    assert batches.sequences_per_epoch == 11
    firsts = [int(row[0]) for step in range(11) for row in batches.step(step).ids]
    epochs = [firsts[start : start + 11] for start in (0, 11, 22)]
    assert all(sorted(epoch) == list(range(1, 86, 8)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    other = Batches(corpus(*([9] * 9), 4), context=8, sequences_per_step=3, seed=6)
    assert [int(row[0]) for row in other.step(0).ids] != firsts[:3]


def test_a_batch_does_not_know_what_came_before_it_nor_how_many_ranks_share_it():
    """H2 and H3: stopped anywhere, resumed with another world size, the same batches."""
    text = corpus(*range(2, 40))
    run = Batches(text, 16, 5, seed=1)
    uninterrupted = [run.step(step) for step in range(25)]
    assert uninterrupted[24].ids.shape == (5, 16)
    for step in (24, 0, 10, 9):  # in mid-epoch, at an epoch's end (47 sequences), and backwards
        resumed = Batches(text, 16, 5, seed=1)
        assert torch.equal(resumed.step(step).ids, uninterrupted[step].ids)
        for world in (1, 2, 3, 7):
            shares = [resumed.share(step, rank, world) for rank in range(world)]
            assert {len(share.ids) for share in shares} == {-(-5 // world)}
            for name in ("ids", "documents", "positions", "targets"):
                rows = torch.cat([getattr(share, name) for share in shares])
                assert torch.equal(rows[:5], getattr(uninterrupted[step], name))
            assert sum(share.valid for share in shares) == uninterrupted[step].valid  # rows beyond are padding


def test_micro_batches_are_the_rows_in_order():
    found = Batches(corpus(*range(2, 40)), 16, 10, seed=0).step(0)
    for size in (10, 5, 3, 1):
        parts = list(found.split(size))
        assert torch.equal(torch.cat([part.targets for part in parts]), found.targets)
        assert len(parts) == -(-10 // size)


def test_a_step_reads_its_own_tokens_and_no_others():
    """Of a corpus of 10^9 tokens, which has to stay on its disk."""

    class Ids:
        def __len__(self) -> int:
            return 10**9

        def __getitem__(self, places: np.ndarray) -> np.ndarray:
            assert places.shape == (4, 1024)
            return places % 50

    big = Corpus(Ids(), np.arange(0, 10**9 + 1, 1000), np.zeros(10**6, bool), None, "")  # type: ignore[arg-type]
    assert Batches(big, 1024, 4, seed=0).step(10**5).valid > 4000


def test_a_corpus_without_a_target_is_an_error():
    with pytest.raises(ConverterError, match="nothing to predict"):
        Batches(corpus(1, 1, 0), 8, 1, seed=0)
    with pytest.raises(ConverterError, match="context of 1"):
        Batches(corpus(5), 1, 1, seed=0)


# --- documents ------------------------------------------------------------------------------------------------


def opt() -> OPTForCausalLM:
    facts = {"vocab_size": models.VOCAB, "max_position_embeddings": models.CONTEXT, "num_attention_heads": 3}
    config = OPTConfig(**facts, hidden_size=48, word_embed_proj_dim=40, ffn_dim=64, num_hidden_layers=2, dropout=0.0)
    return models.jitter(OPTForCausalLM(config), 0)


def openai_gpt() -> OpenAIGPTLMHeadModel:
    facts = {"vocab_size": models.VOCAB, "n_positions": models.CONTEXT, "n_embd": 48, "n_layer": 2, "n_head": 3}
    config = OpenAIGPTConfig(**facts, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return models.jitter(OpenAIGPTLMHeadModel(config), 0)


MODELS = {"llama": models.llama, "gpt2": models.gpt2, "opt": opt, "openai-gpt": openai_gpt}


def packed(*lengths: int, context: int = 12) -> Sequences:
    """Documents of these lengths, of random tokens, in rows of `context`."""
    ids = models.random_ids(1, sum(lengths), seed=3)[0].numpy()
    documents = np.split(ids, np.cumsum(lengths)[:-1])
    batches = Batches(of(*documents), context, -(-sum(lengths) // context), seed=0)
    return batches._sequences(np.arange(batches.sequences_per_epoch))


def alone(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    return model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0]


@pytest.mark.parametrize("kind", MODELS)
@torch.no_grad()
def test_a_packed_document_has_the_states_it_has_alone(kind):
    """H1, with rows of two documents, of three, of one and padding."""
    model = MODELS[kind]().train()
    sequences = packed(5, 7, 3, 2, 7, 6)
    found = run_packed(model, sequences)
    assert found.shape == (3, 12, model.get_output_embeddings().weight.shape[1])
    for row, ids, numbers in zip(found, sequences.ids, sequences.documents, strict=True):
        for number in range(int(numbers.max()) + 1):
            wanted = alone(model, ids[numbers == number])
            assert models.relative(row[numbers == number], wanted) < 3e-6
    layers = run_packed_layers(model, sequences)
    assert torch.equal(layers[-1][sequences.documents >= 0], found[sequences.documents >= 0])
    assert len(layers) == model.config.num_hidden_layers + 1


@torch.no_grad()
def test_the_wrong_ways_to_pack_leak():
    """What H1 is about: an attention mask of ones, and a cache, let document 2 see document 1."""
    model, sequences = models.llama(), packed(5, 7)
    right = alone(model, sequences.ids[0, 5:])
    for wrong in ({"attention_mask": torch.ones_like(sequences.ids)}, {"use_cache": True}):
        inputs = {"input_ids": sequences.ids, "position_ids": sequences.positions}
        states = model.base_model(**inputs, **wrong).last_hidden_state[0, 5:]
        assert models.relative(states, right) > 0.1


@pytest.mark.parametrize("kind", MODELS)
def test_the_self_test_passes_a_model_that_does_not_leak(kind):
    model = MODELS[kind]().train()
    check_no_leak(model)
    assert model.training


def test_the_self_test_stops_a_model_that_leaks():
    model = opt()
    model.base_model.rotary_emb = None  # OPT takes positions, and makes no mask from them
    with pytest.raises(VerificationError, match=r"OPTForCausalLM lets a packed document see the one before it"):
        check_no_leak(model)


@pytest.mark.parametrize("kind", ["gpt2", "opt"])
@torch.no_grad()
def test_a_piece_beyond_a_position_table_has_states_up_to_there(kind):
    model = MODELS[kind]()
    sequences = packed(models.CONTEXT + 8, 5, context=models.CONTEXT + 12)
    states = run_packed(model, sequences)
    long = sequences.ids[0, : models.CONTEXT]
    assert models.relative(states[0, : models.CONTEXT], alone(model, long)) < 3e-6
    assert not states[0, models.CONTEXT : models.CONTEXT + 8].any()
    assert states[0, models.CONTEXT + 8 :].any()


def test_gradients_flow_through_packing_and_unpacking():
    for kind in ("llama", "opt"):
        model = MODELS[kind]()
        run_packed(model, packed(5, 7, 3)).square().sum().backward()
        assert all(p.grad is not None for p in model.base_model.parameters() if p.requires_grad)
