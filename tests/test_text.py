"""Text becomes documents, documents are split, and windows measure all of them evenly."""

from __future__ import annotations

import bz2
import difflib
import gzip
import json
import lzma
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.parquet
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from converter.errors import ConverterError
from converter.measure.metrics import predictions
from converter.text import tokens as text_module
from converter.text.documents import Document, at_least, documents_of, read
from converter.text.sources import Text, TokenFile
from converter.text.tokens import ModelTokens
from converter.text.windows import hold_out, read_split, windows

EOT = "<|endoftext|>"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE that adds a bos token by itself and truncates, so that either would show; id 0 is eos."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=[EOT], initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(["hello world, hello text\n"] * 9, trainer)
    backend.post_processor = processors.TemplateProcessing(f"{EOT} $A", special_tokens=[(EOT, 0)])
    backend.enable_truncation(4)
    backend.enable_padding(length=9)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOT)


def document(name: str, *ids: int) -> Document:
    return Document(name, np.array(ids, dtype=np.int64))


def documents(*sizes: int) -> list[Document]:
    """Documents of these sizes; every token of all of them is different."""
    starts = np.cumsum([0, *sizes])
    return [Document(str(i), np.arange(starts[i], starts[i + 1])) for i in range(len(sizes))]


def listed(found: list[Document]) -> list[list[int]]:
    return [item.ids.tolist() for item in found]


# --- read -----------------------------------------------------------------------------------------------------


def tokens_of(tokenizer=None, size: int = 300, opening: int | None = 0, ends: tuple[int, ...] = (0,)) -> ModelTokens:
    return ModelTokens(tokenizer, size, opening, ends)


def read_one(path: Text, tokenizer=None, **facts) -> list[Document]:
    return read([path], tokens_of(tokenizer, **facts)).documents


def test_a_text_is_a_document_opened_by_end_of_text(tmp_path, tokenizer):
    text = "hello world\r\n\thello, naïve 😀 \n"
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode())
    (found,) = read_one(path, tokenizer)
    assert found.name == str(path)
    assert found.ended
    assert found.ids[0] == 0
    assert tokenizer.decode(found.ids[1:]) == text


def test_without_an_end_of_text_nothing_is_put_in_front(tmp_path, tokenizer):
    path = tmp_path / "a.txt"
    path.write_text("hello", encoding="utf-8")
    opened, bare = read_one(path, tokenizer), read_one(path, tokenizer, opening=None)
    assert listed(opened) == [[0, *bare[0].ids.tolist()]]


def test_a_text_is_separated_at_the_tokenizers_eos(tmp_path, tokenizer):
    path = tmp_path / "a.txt"
    path.write_text(f"{EOT}hello{EOT}\n{EOT}world{EOT}", encoding="utf-8")
    found = read_one(path, tokenizer)
    assert [tokenizer.decode(item.ids) for item in found] == [f"{EOT}hello", f"{EOT}world"]


def test_files_of_several_kinds_are_read_in_order(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("hello", encoding="utf-8")
    np.save(tmp_path / "b.npy", np.array([[7, 8], [9, 0]], dtype=np.uint16))
    np.array([5, 6], dtype=np.uint16).tofile(tmp_path / "c.bin")
    paths = [tmp_path / name for name in ("c.bin", "b.npy", "a.txt")]
    found = read(paths, tokens_of(tokenizer)).documents
    assert listed(found)[:3] == [[0, 5, 6], [7, 8], [9, 0]]
    assert tokenizer.decode(found[3].ids) == f"{EOT}hello"


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint16", "uint8", ">i4"])
def test_each_row_of_an_npy_is_a_document_as_it_is(dtype, tmp_path):
    np.save(tmp_path / "a.npy", np.array([[1, 2, 3], [0, 0, 5]], dtype=dtype))
    found = read_one(tmp_path / "a.npy")
    assert listed(found) == [[1, 2, 3], [0, 0, 5]]
    assert not any(item.ended for item in found)


@pytest.mark.parametrize(
    ("stream", "opening", "ends", "expected", "ended"),
    [
        ([5, 6, 0, 7, 0], 0, (0,), [[0, 5, 6], [0, 7]], [True, True]),
        ([0, 5, 6, 0, 7], 0, (0,), [[0, 5, 6], [0, 7]], [True, False]),
        ([0, 0, 5, 0, 0], 0, (0,), [[0, 5]], [True]),
        ([5, 6, 7], 0, (0,), [[0, 5, 6, 7]], [False]),
        ([5, 0, 7], None, (), [[5, 0, 7]], [False]),
        ([5, 2, 7, 2, 8], 1, (2,), [[1, 5], [1, 7], [1, 8]], [True, True, False]),
        ([1, 5, 2, 1, 7, 2], 1, (2,), [[1, 5], [1, 7]], [True, True]),
        ([1, 5, 6, 1, 7, 8], 1, (2,), [[1, 5, 6], [1, 7, 8]], [True, False]),
        ([5, 2, 7, 3, 8, 9], None, (2, 3), [[5], [7], [8, 9]], [True, True, False]),
    ],
)
def test_a_bin_is_separated_at_special_tokens_which_tell_real_ends(stream, opening, ends, expected, ended, tmp_path):
    """bos and eos may differ; the end of a file is no end of a document: shards are cut anywhere."""
    np.array(stream, dtype="<u2").tofile(tmp_path / "a.bin")
    found = read_one(tmp_path / "a.bin", opening=opening, ends=ends)
    assert listed(found) == expected
    assert [item.ended for item in found] == ended


def llm_c(dtype: type, count: int = 90) -> bytes:
    """A file of llm.c's: 256 int32 of header, then the ids."""
    magic, version = (20240520, 1) if dtype is np.uint16 else (20240801, 7)
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, version, count
    return header.tobytes() + np.arange(1, count + 1).astype(dtype).tobytes()


def write_npy(array: object):
    return lambda path: np.save(path, array, allow_pickle=True)


def write_bytes(content: bytes):
    return lambda path: path.write_bytes(content)


def header_of_a_giant(path: Path) -> None:
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<i8", "fortran_order": False, "shape": (10**9, 10**9)})


def save_npz(path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, ids=np.ones((2, 2), dtype=np.int64))


BAD_FILES = {
    "missing": ("a.txt", lambda path: None, "no such file"),
    "folder": ("a.txt", lambda path: path.mkdir(), "folder holds no files"),
    "empty text": ("a.txt", write_bytes(b""), "The file is empty"),
    "blank text": ("a.txt", write_bytes(b" \n" + EOT.encode() + b"\n"), "holds no tokens"),
    "latin-1 text": ("a.txt", write_bytes(b"caf\xe9 au lait"), "not UTF-8 text. Byte 3 is 0xe9"),
    "no array": ("a.npy", write_bytes(b"not an array"), "not a sound .npy"),
    "empty npy file": ("a.npy", write_bytes(b""), "not a sound .npy"),
    "pickled array": ("a.npy", write_npy(np.array([[object()]])), "not a sound .npy"),
    "truncated array": ("a.npy", header_of_a_giant, "not a sound .npy"),
    "archive of arrays": ("a.npy", save_npz, "not a sound .npy"),
    "floats": ("a.npy", write_npy(np.ones((2, 2))), "It is 2-D float64"),
    "booleans": ("a.npy", write_npy(np.ones((2, 2), dtype=bool)), "It is 2-D bool"),
    "one dimension": ("a.npy", write_npy(np.ones(3, dtype=np.int64)), "It is 1-D int64"),
    "no rows": ("a.npy", write_npy(np.ones((0, 4), dtype=np.int64)), "array is empty"),
    "id too large": (
        "a.npy",
        write_npy(np.array([[1, 300]])),
        "id 300 is not in the vocabulary. The model has ids 0 to 299",
    ),
    "id beyond int64": ("a.npy", write_npy(np.array([[2**64 - 1]], dtype=np.uint64)), "id 18446744073709551615 is not"),
    "negative id": ("a.npy", write_npy(np.array([[1, -100]])), "id -100 is not in the vocabulary"),
    "zeros": ("a.bin", write_bytes(bytes(5000)), "holds no tokens"),
    "zeros as text": ("a.txt", write_bytes(bytes(5000)), "not text. It is nothing but zeros"),
    "web page": ("a.bin", write_bytes(b"<!DOCTYPE html>\n<html><body>404</body></html>"), "It is HTML"),
    "XML": ("a.bin", write_bytes(b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>'), "It is XML"),
    "text as bin": ("a.bin", write_bytes(b"hello world, " * 20), "It is text"),
    "program": ("a.txt", write_bytes(b"\x7fELF\x02\x01\x01" + bytes(99)), "It is a program"),
    "torch.save": ("a.bin", write_bytes(b"PK\x03\x04" + bytes(99)), "It is a zip archive, such as torch.save writes"),
    "pickle": ("a.txt", write_bytes(pickle.dumps({"text": ["hello"] * 9}, protocol=4)), "It is a pickle"),
    "pickle as bin": ("a.bin", write_bytes(pickle.dumps([*range(300)], protocol=4)), "It is a pickle"),
    "large pickle": ("a.bin", write_bytes(pickle.dumps([*range(9000)], protocol=2)), "It is a pickle"),
    "git-lfs": ("a.txt", write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0"), "git-lfs pointer"),
    "git-lfs as jsonl": ("a.jsonl", write_bytes(b"version https://git-lfs.github.com/spec/v1\n"), "git-lfs pointer"),
    "image": ("a.csv", write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(20)), "It is an image"),
    "gzip without its name": ("a.txt", lambda path: path.write_bytes(gzip.compress(b"hello")), "Name it .gz"),
    "UTF-16": ("a.txt", write_bytes("hello".encode("utf-16")), "It is UTF-16"),
    "ids of four bytes": ("a.bin", lambda path: np.arange(1, 200, dtype=np.uint32).tofile(path), "--token-bytes 4"),
    "ids of eight bytes": ("a.bin", lambda path: np.arange(1, 201, dtype=np.int64).tofile(path), "--token-bytes 8"),
    "cut llm.c": ("a.bin", lambda path: path.write_bytes(llm_c(np.uint16)[:-20]), "Its header says 90 tokens"),
    "empty bin": ("a.bin", write_bytes(b""), "The file is empty"),
    "odd bin": ("a.bin", write_bytes(b"\x01\x00\x02"), "Its 3 bytes are not whole"),
    "bin id too large": ("a.bin", write_bytes(b"\x01\x00\xff\xff"), "id 65535 is not in the vocabulary"),
    "bin of separators": ("a.bin", write_bytes(b"\x00\x00" * 3), "holds no tokens"),
    "no JSON": ("a.jsonl", write_bytes(b'{"text": "a"}\n{"text": "b'), "A line is no JSON"),
    "cut list": ("a.json", write_bytes(b'[{"text": "a"}, {"text"'), "no JSON"),
    "rows of numbers": ("a.jsonl", write_bytes(b"5\n6\n"), "A row is no object: '5'"),
    "no column": ("a.tsv", write_bytes(b"id\tbody\n1\thello\n"), "no column 'text'. Its first line names 'id', 'body'"),
    "cut gzip": ("a.txt.gz", lambda path: path.write_bytes(gzip.compress(b"hello" * 99)[:-9]), "cannot be read"),
    "no gzip": ("a.jsonl.gz", write_bytes(b"hello"), "cannot be read"),
    "no arrow": ("a.arrow", write_bytes(b"hello"), "cannot be read"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_file_that_holds_no_sound_ids_is_named(case, tmp_path, tokenizer):
    name, write, message = BAD_FILES[case]
    path = tmp_path / name
    write(path)
    with pytest.raises(ConverterError) as caught:
        read_one(path, tokenizer)
    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)


def test_a_text_needs_a_tokenizer_and_ids_do_not(tmp_path):
    (tmp_path / "a.txt").write_text("hello", encoding="utf-8")
    with pytest.raises(ConverterError, match=r"a\.txt.*no tokenizer.*\.npy or \.bin"):
        read_one(tmp_path / "a.txt", None)


def test_a_tokenizer_with_more_tokens_than_the_model_is_found_out(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("hello", encoding="utf-8")
    with pytest.raises(ConverterError, match="not in the vocabulary"):
        read_one(tmp_path / "a.txt", tokenizer, size=10)


@pytest.mark.parametrize("end_of_text", [-1, 300])
def test_an_end_of_text_outside_the_vocabulary_is_refused(end_of_text, tmp_path):
    np.save(tmp_path / "a.npy", np.ones((2, 2), dtype=np.int64))
    with pytest.raises(ConverterError, match=f"token {end_of_text} is not in the vocabulary"):
        read_one(tmp_path / "a.npy", opening=end_of_text)


def test_no_files_are_no_text():
    with pytest.raises(ConverterError, match="No text"):
        read([], tokens_of())


LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


PRE_TOKENIZERS = {
    "GPT-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "Llama 3": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA_3), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
    "prefix space": pre_tokenizers.ByteLevel(add_prefix_space=True),
    "Metaspace": pre_tokenizers.Metaspace(),
    "Llama 2": None,
}


@pytest.mark.parametrize("kind", PRE_TOKENIZERS)
def test_a_long_text_is_cut_only_where_no_token_changes(kind, monkeypatch):
    """Real text, with runs of spaces and lines at every place, and a line as long as all the rest."""
    source = Path(difflib.__file__).read_text(encoding="utf-8")
    text = source + "\n\n \t\n  ".join(source.split()) + "é\r\n\r\n" + source.replace("\n", " ") + source
    backend = Tokenizer(models.BPE(unk_token=EOT))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if PRE_TOKENIZERS[kind] is None:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = PRE_TOKENIZERS[kind]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=[EOT], initial_alphabet=alphabet, max_token_length=16, show_progress=False
    )
    backend.train_from_iterator(text.splitlines(keepends=True), trainer)
    monkeypatch.setattr("converter.text.tokens._PIECE", 2000)
    monkeypatch.setattr("converter.text.tokens._BATCH", 9000)
    pieces = list(text_module._pieces(text, backend))
    assert "".join(pieces) == text
    assert len(pieces) == 1 if kind == "Llama 2" else len(pieces) > 100
    (found,) = documents_of({"a": text}, ModelTokens(PreTrainedTokenizerFast(tokenizer_object=backend), 600, None))
    assert found.ids.tolist() == backend.encode(text, add_special_tokens=False).ids


def test_strings_are_documents_under_their_names(tokenizer):
    found = documents_of({"a": "hello", "b": "", "c": " world"}, tokens_of(tokenizer))
    assert [item.name for item in found] == ["a", "b", "c"]
    assert [tokenizer.decode(item.ids) for item in found] == [f"{EOT}hello", EOT, f"{EOT} world"]


# --- hold_out -------------------------------------------------------------------------------------------------


def test_held_out_documents_are_whole_others_and_about_the_fraction():
    rng = np.random.default_rng(1)
    given = documents(*rng.integers(50, 500, size=100).tolist())
    calibration, held_out = hold_out(given, 0.1)
    names = [item.name for item in given]
    assert sorted([item.name for item in calibration + held_out], key=int) == names
    assert [names.index(item.name) for item in held_out] == sorted(names.index(item.name) for item in held_out)
    share = sum(len(item.ids) for item in held_out) / sum(len(item.ids) for item in given)
    assert 0.09 < share < 0.11


def test_the_split_is_the_same_each_time_and_another_for_another_seed():
    given = documents(*[10] * 50)
    first, again, other = (hold_out(given, seed=seed)[1] for seed in (3, 3, 4))
    assert [item.name for item in first] == [item.name for item in again]
    assert [item.name for item in first] != [item.name for item in other]


@pytest.mark.parametrize("sizes", [(1000, 10), (10, 1000), (500, 500), (900, 50, 50)])
@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.99])
def test_each_side_has_a_document(sizes, fraction):
    for seed in range(5):
        calibration, held_out = hold_out(documents(*sizes), fraction, seed)
        assert calibration
        assert held_out
        assert len(calibration) + len(held_out) == len(sizes)


def test_a_document_that_is_most_of_the_text_is_not_held_out():
    for seed in range(5):
        _, held_out = hold_out(documents(20, 1000, 30), seed=seed)
        assert all(len(item.ids) < 1000 for item in held_out)


def test_a_single_document_loses_its_end():
    (calibration,), (held_out,) = hold_out(documents(1000))
    assert calibration.ids.tolist() == list(range(900))
    assert held_out.ids.tolist() == list(range(900, 1000))


def test_a_short_single_document_leaves_something_to_predict_on_each_side():
    (calibration,), (held_out,) = hold_out(documents(4))
    assert (len(calibration.ids), len(held_out.ids)) == (2, 2)


def test_a_document_with_nothing_to_predict_is_no_side():
    calibration, held_out = hold_out([document("empty", 0), *documents(100)])
    assert (len(calibration[0].ids), len(held_out[0].ids)) == (90, 10)


@pytest.mark.parametrize("given", [[], documents(3), documents(1, 1, 1)])
def test_too_little_text_cannot_be_split(given):
    with pytest.raises(ConverterError, match="too little text"):
        hold_out(given)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, float("nan")])
def test_a_fraction_lies_between_nothing_and_everything(fraction):
    with pytest.raises(ConverterError, match="fraction"):
        hold_out(documents(10, 10), fraction)


# --- windows --------------------------------------------------------------------------------------------------


def test_windows_are_consecutive_and_padded_on_the_right():
    found = windows([document("a", 1, 2, 3, 4, 5), document("b", 6, 0)], context=3, max_tokens=None)
    assert found.ids.tolist() == [[1, 2, 3], [4, 5, 0], [6, 0, 0]]
    assert found.lengths.tolist() == [3, 2, 2]
    assert found.ids.dtype == found.lengths.dtype == np.int64
    assert (found.tokens, found.predictions) == (7, 4)


def test_every_token_is_in_one_window_but_for_single_last_ones():
    given = documents(64, 65, 66, 1, 2, 200)
    found = windows(given, context=64, max_tokens=None)
    seen = [token for row, length in zip(found.ids, found.lengths, strict=True) for token in row[:length].tolist()]
    lost = [given[1].ids[-1], given[3].ids[-1]]
    assert seen == [token for item in given for token in item.ids.tolist() if token not in lost]


def ended(*sizes: int) -> list[Document]:
    return [Document(item.name, item.ids, ended=True) for item in documents(*sizes)]


def test_the_token_behind_a_real_end_is_predicted():
    """T6. Also where a window ends with its document; not where a document or a window is cut."""
    given = [*ended(5, 6, 4), Document("cut", np.arange(100, 105)), Document("empty", np.array([0]), ended=True)]
    found = windows(given, context=3, max_tokens=None, end_of_text=99)
    assert found.lengths.tolist() == [3, 2, 3, 3, 2, 3, 2, 3, 2]
    assert found.ended.tolist() == [False, True, False, False, True, False, True, False, False]
    assert found.predictions == 14 + 3
    rows, positions, targets = (each.tolist() for each in predictions(found, slice(0, 9)))
    assert list(zip(rows, positions, targets, strict=True)) == [
        *[(0, 0, 1), (0, 1, 2), (1, 0, 4), (1, 1, 99)],
        *[(2, 0, 6), (2, 1, 7), (3, 0, 9), (3, 1, 10), (4, 0, 10), (4, 1, 99)],
        *[(5, 0, 12), (5, 1, 13), (6, 0, 14), (6, 1, 99)],
        *[(7, 0, 101), (7, 1, 102), (8, 0, 104)],
    ]
    assert not windows(given, context=3, max_tokens=None).ended.any()
    assert found.rows(slice(7, 9), 2).ended.tolist() == [False, False]


def test_a_budget_sees_the_ends_of_documents():
    """An eighth of it, where full windows would have taken it all."""
    found = windows(ended(*[100] * 50), context=64, max_tokens=1280, end_of_text=0)
    assert found.ended.sum() >= 2
    assert set(found.lengths[found.ended].tolist()) == {63}  # with the end as many as the others
    assert set(found.lengths[~found.ended].tolist()) == {64}
    assert found.tokens > 1280 - 64
    assert np.diff(found.ids[found.ended, 0]).min() >= 200


def test_windows_are_no_wider_than_the_longest_piece():
    assert windows(documents(5, 7), context=1000, max_tokens=None).ids.shape == (2, 7)


def test_a_budget_that_covers_everything_changes_nothing():
    given = documents(100, 33)
    everything, bounded = windows(given, 32, None), windows(given, 32, 133)
    assert np.array_equal(everything.ids, bounded.ids)


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
@pytest.mark.parametrize("budget", [64, 100, 640, 1000, 3333])
def test_a_budget_is_kept_and_used_up(budget, seed):
    found = windows(documents(*[200] * 50), context=64, max_tokens=budget, seed=seed)
    assert budget - 64 < found.tokens <= budget
    assert set(found.lengths.tolist()) == {64}


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_a_budget_is_spread_over_all_documents(seed):
    given = documents(*[640] * 20)  # 10 windows each, 40 of 200 to take
    found = windows(given, context=64, max_tokens=40 * 64, seed=seed)
    taken = np.bincount(found.ids[:, 0] // 640, minlength=20)
    assert taken.min() >= 1
    assert taken.max() <= 3
    starts = found.ids[:, 0] // 64  # which of the 200 windows
    assert np.diff(np.sort(starts)).max() <= 10
    assert starts.tolist() == sorted(set(starts.tolist()))


def test_full_windows_are_preferred_so_that_late_positions_are_measured():
    given = documents(*[30] * 50, 64, *[30] * 50, 64)
    found = windows(given, context=64, max_tokens=128 + 5 * 30)
    assert sorted(found.lengths.tolist()) == [30] * 5 + [64] * 2


def test_short_documents_are_sampled_evenly_too():
    found = windows(documents(*[20] * 100), context=64, max_tokens=200)
    which = found.ids[:, 0] // 20
    assert len(which) == 10
    assert np.diff(which).max() <= 20


def test_the_selection_is_the_same_each_time_and_another_for_another_seed():
    given = documents(*[640] * 20)
    first, again, one, two = (windows(given, 64, 1280, seed).ids for seed in (None, None, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, one)
    assert not np.array_equal(one, two)


def test_a_budget_below_one_window_cuts_it():
    found = windows(documents(640, 640), context=64, max_tokens=10)
    assert found.lengths.tolist() == [10]
    assert found.ids.shape == (1, 10)


@pytest.mark.parametrize(("context", "budget"), [(1, None), (0, None), (64, 1), (64, 0)])
def test_a_window_of_one_token_is_none(context, budget):
    with pytest.raises(ConverterError, match="at least 2"):
        windows(documents(10), context, budget)


@pytest.mark.parametrize("given", [[], documents(1, 1)])
def test_no_windows_are_an_error(given):
    with pytest.raises(ConverterError, match="no text to run"):
        windows(given, 64, None)


# --- cost -----------------------------------------------------------------------------------------------------


def test_megabytes_take_seconds(tmp_path, tokenizer):
    path = tmp_path / "a.txt"
    path.write_text("hello world, this is a line of text with a number 12345\n" * 50_000, encoding="utf-8")
    start = time.process_time()
    calibration, _ = hold_out(read_one(path, tokenizer))
    windows(calibration, 512, 100_000)
    assert time.process_time() - start < 20  # about 2 on one core; a detour through Python objects takes minutes


def test_importing_the_module_imports_no_torch():
    code = "import sys, converter.text.windows; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_an_npy_whose_header_is_no_python_is_refused(tmp_path):
    path = tmp_path / "ids.npy"
    np.save(path, np.zeros((2, 3), np.int64))
    path.write_bytes(path.read_bytes().replace(b"}", b"("))
    with pytest.raises(ConverterError, match=r"not a sound \.npy"):
        read_one(path, size=10)


# --- formats --------------------------------------------------------------------------------------------------


ROWS = [{"text": "one"}, {"text": None}, {"text": "two\nlines"}, {"text": "  "}, {"text": "three", "id": 5}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
TEXTS = ["one", "two\nlines", "three"]


def zstd(data: bytes) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


def table() -> pyarrow.Table:
    return pyarrow.table({"id": range(5), "text": [row["text"] for row in ROWS]})


def save_arrow(path: Path, new: Callable[..., Any]) -> None:
    with new(str(path), table().schema) as writer:
        writer.write_table(table())


FORMATS: dict[str, Callable[[Path], Any]] = {
    "a.jsonl": write_bytes(LINES),
    "a.JSONL": write_bytes(b"\xef\xbb\xbf" + LINES),
    "a.ndjson": write_bytes(LINES.replace(b"\n", b"\r\n")),
    "part[1].jsonlines": write_bytes(LINES + b"\n\nnull\n"),
    "a.jsonl.gz": write_bytes(gzip.compress(LINES)),
    "a.jsonl.zst": write_bytes(zstd(LINES)),
    "a.ndjson.bz2": write_bytes(bz2.compress(LINES)),
    "a.jsonl.XZ": write_bytes(lzma.compress(LINES)),
    "a.json": write_bytes(json.dumps(ROWS, indent=1).encode()),
    "b.json": write_bytes(b"\xef\xbb\xbf" + LINES),
    "a.json.gz": write_bytes(gzip.compress(json.dumps(ROWS).encode())),
    "a.csv": write_bytes(b'\xef\xbb\xbfid,text\r\n1,one\r\n2,\r\n3,"two\nlines"\r\n4\r\n5,three\r\n'),
    "a.tsv": write_bytes(b'text\tid\none\t1\n\t2\n"two\nlines"\t3\nthree\t4\n'),
    "a.tsv.gz": write_bytes(gzip.compress(b'text\tid\none\t1\n"two\nlines"\t3\nthree\t4\n')),
    "part*.parquet": lambda path: pyarrow.parquet.write_table(table(), path),
    "a.arrow": lambda path: save_arrow(path, pyarrow.ipc.new_file),
    "b.arrow": lambda path: save_arrow(path, pyarrow.ipc.new_stream),
    "saved": lambda path: datasets.Dataset(table()).save_to_disk(path),
    "splits": lambda path: datasets.DatasetDict(
        test=datasets.Dataset(table()), train=datasets.Dataset(table())
    ).save_to_disk(path),
    "a.txt": write_bytes(b"\xef\xbb\xbfone" + EOT.encode() + b"two\nlines" + EOT.encode() + b"three"),
    "a.txt.gz": write_bytes(gzip.compress(b"one" + EOT.encode() + b"two\nlines" + EOT.encode() + b"three")),
    "no suffix": write_bytes(f"one{EOT}two\nlines{EOT}three{EOT}".encode()),
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_documents(name, tmp_path, tokenizer):
    """T9. Paths are literal, a byte order mark is no text, and rows without text are counted."""
    (tmp_path / "part1.jsonlines").write_bytes(b'{"text": "by pattern"}')
    FORMATS[name](tmp_path / name)
    reading = read([tmp_path / name], tokens_of(tokenizer))
    assert [tokenizer.decode(item.ids[1:]) for item in reading.documents] == TEXTS
    assert all(item.ended and item.ids[0] == 0 for item in reading.documents)
    rows = {"a.tsv": 1, "a.tsv.gz": 0, "part[1].jsonlines": 3}.get(name, 0 if ".txt" in name or " " in name else 2)
    said = f"{rows} {'row has' if rows == 1 else 'rows have'} no text"
    assert [said in note for note in reading.notes] == [True] * bool(rows)


def test_a_folder_holds_files_and_saved_datasets(tmp_path, tokenizer):
    for name in ("saved", "a.jsonl", "a.txt.gz"):
        FORMATS[name](tmp_path / name)
    (tmp_path / ".hidden").write_bytes(bytes(9))
    (tmp_path / "empty").mkdir()
    assert len(read([tmp_path], tokens_of(tokenizer)).documents) == 9


def test_ids_of_other_widths_are_read_when_told(tmp_path):
    ids = np.array([5, 6, 0, 299, 0, 7, 8, 9, 0], dtype=np.uint32)
    ids.tofile(tmp_path / "a.bin")
    assert listed(read_one(TokenFile(tmp_path / "a.bin", 4))) == [[0, 5, 6], [0, 299], [0, 7, 8, 9]]
    for dtype in (np.uint16, np.uint32):
        (tmp_path / "c.bin").write_bytes(llm_c(dtype))
        assert listed(read_one(tmp_path / "c.bin")) == [[0, *range(1, 91)]]
    with pytest.raises(ConverterError, match="not whole 8-byte ids"):
        read_one(TokenFile(tmp_path / "a.bin", 8))


def test_ids_of_a_large_vocabulary_tell_their_width(tmp_path):
    """Of ids up to 128,255 the upper halves are 0 and 1."""
    np.random.default_rng(0).integers(1, 128256, 4000, dtype=np.uint32).tofile(tmp_path / "a.bin")
    with pytest.raises(ConverterError, match="--token-bytes 4"):
        read_one(tmp_path / "a.bin", size=128256)


# --- budget ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.txt.gz", "a.bin"])
def test_what_is_cut_into_slots_is_whole_again(name, tmp_path, tokenizer, monkeypatch):
    """Every document is as it is read in one piece, whether or not it is longer than a slot."""
    rng = np.random.default_rng(3)
    lengths = [*rng.integers(1, 400, 60).tolist(), 3000, 5, 2500, 1]
    texts = [" ".join(map(str, rng.integers(0, 10**6, size=length))) for length in lengths]
    ids = [rng.integers(1, 300, size=length) for length in lengths]
    if name == "a.bin":
        np.concatenate([np.append(each, 0) for each in ids]).astype(np.uint16).tofile(tmp_path / name)
    elif name == "a.jsonl":
        (tmp_path / name).write_text("\n".join(json.dumps({"text": text}) for text in texts))
    else:
        data = EOT.join(texts).encode()
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    for module in ("sources", "sequential"):
        monkeypatch.setattr(f"converter.text.{module}.SLOT_BYTES", 1000)
    monkeypatch.setattr("converter.text.sources.SLOT_IDS", 300)
    found = read_one(tmp_path / name, tokenizer)
    if name == "a.bin":
        assert listed(found) == [[0, *each] for each in ids]
    else:
        assert [tokenizer.decode(item.ids[1:]) for item in found] == texts
    assert all(item.ended for item in found)


def test_a_budget_is_spread_over_files_and_places(tmp_path, tokenizer):
    """Of 40 M ids in two files, from everywhere; and only what is read is looked at."""
    for number in range(2):
        ids = np.repeat(np.arange(number * 100 + 1, number * 100 + 81), 250_000).astype(np.uint16)
        ids[::1000] = 0
        ids[777_777] = 60_000  # in no slot that is read
        ids.tofile(tmp_path / f"{number}.bin")
    reading = read([tmp_path], tokens_of(), at_least(2_000_000))
    assert 2_000_000 <= reading.tokens < 2_100_000
    seen = np.unique(np.concatenate([item.ids for item in reading.documents]))
    assert len(seen) > 50
    assert {len(item.ids) for item in reading.documents if item.ended} == {1000}


def big_text(path: Path, documents: int) -> None:
    with path.open("w") as file:
        for number in range(documents):
            file.write(json.dumps({"text": f"{number} hello world, " * 30}) + "\n")


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "bin", "txt"])
def test_what_is_held_out_does_not_depend_on_the_budget(kind, tmp_path, tokenizer):
    """No command of a run learns from what another one is measured on."""
    path = tmp_path / f"a.{kind}"
    if kind == "bin":
        np.random.default_rng(0).integers(0, 250, 3_000_000, dtype=np.uint16).tofile(path)
    else:
        big_text(tmp_path / "a.jsonl", 3000)
        data = (tmp_path / "a.jsonl").read_bytes()
        if kind != "jsonl":
            path.write_bytes(gzip.compress(data) if kind.endswith("gz") else data.replace(b"\n", EOT.encode()))
    small, large = (read_split([path], tokens_of(tokenizer), learn, 1000) for learn in (1000, 10**9))

    def texts(documents: list[Document]) -> set[bytes]:
        return {item.ids.tobytes() for item in documents}

    assert sum(len(item.ids) for item in small.learnt) < sum(len(item.ids) for item in large.learnt)
    assert texts(small.held_out) <= texts(large.held_out)
    assert texts(small.learnt) <= texts(large.learnt)
    assert not texts(large.learnt) & texts(large.held_out)
    sizes = [sum(len(item.ids) for item in side) for side in (large.learnt, large.held_out)]
    assert 0.07 < sizes[1] / sum(sizes) < 0.13


def test_a_small_text_is_split_as_a_whole(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("hello world, " * 1000)
    split = read_split([tmp_path / "a.txt"], tokens_of(tokenizer), 10, 10)
    (learnt,), (held_out,) = split.learnt, split.held_out
    assert abs(len(held_out.ids) / (len(learnt.ids) + len(held_out.ids)) - 0.1) < 0.01
    assert (learnt.ended, held_out.ended) == (False, True)


def test_eight_gigabytes_cost_what_ten_megabytes_do(tmp_path):
    """A sparse file; a process of its own for each, for the peak of its memory."""
    ids = np.random.default_rng(0).integers(0, 4096, 5_000_000, dtype=np.uint16)
    ids.tofile(tmp_path / "small.bin")
    ids.tofile(tmp_path / "large.bin")
    os.truncate(tmp_path / "large.bin", 8 << 30)
    with (tmp_path / "large.bin").open("r+b") as file:
        file.seek(5 << 30)
        file.write(ids.tobytes())
    code = """if True:
        import resource, sys, time
        from converter.text.tokens import ModelTokens
        from converter.text.windows import read_split
        start = time.process_time()
        split = read_split([sys.argv[1]], ModelTokens(None, 4096, 0, (0,)), 131072, 65536)
        assert sum(len(each.ids) for each in split.learnt) >= 131072
        print(time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    """
    runs = [
        subprocess.run([sys.executable, "-c", code, str(tmp_path / name)], capture_output=True, text=True, check=True)
        for name in ("small.bin", "large.bin")
    ]
    (small_time, small_memory), (time_, memory) = (tuple(map(float, run.stdout.split())) for run in runs)
    assert time_ - small_time < 2
    assert memory - small_memory < 200
