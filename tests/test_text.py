"""Text becomes documents, documents are split, and windows measure all of them evenly."""

from __future__ import annotations

import difflib
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from converter.errors import ConverterError
from converter.text import windows as text_module
from converter.text.windows import Document, documents_from_strings, hold_out, read_documents, windows

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


# --- read_documents -------------------------------------------------------------------------------------------


def read(path: Path, tokenizer=None, vocab_size: int = 300, end_of_text: int | None = 0) -> list[Document]:
    return read_documents([path], tokenizer, vocab_size=vocab_size, end_of_text=end_of_text)


def test_a_text_is_a_document_opened_by_end_of_text(tmp_path, tokenizer):
    text = "hello world\r\n\thello, naïve 😀 \n"
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode())
    (found,) = read(path, tokenizer)
    assert found.name == str(path)
    assert found.ids.dtype == np.int64
    assert found.ids[0] == 0
    assert tokenizer.decode(found.ids[1:]) == text


def test_without_an_end_of_text_nothing_is_put_in_front(tmp_path, tokenizer):
    path = tmp_path / "a.txt"
    path.write_text("hello", encoding="utf-8")
    opened, bare = read(path, tokenizer, end_of_text=0), read(path, tokenizer, end_of_text=None)
    assert listed(opened) == [[0, *bare[0].ids.tolist()]]


def test_a_text_is_separated_at_the_tokenizers_eos(tmp_path, tokenizer):
    path = tmp_path / "a.txt"
    path.write_text(f"{EOT}hello{EOT}\n{EOT}world{EOT}", encoding="utf-8")
    found = read(path, tokenizer)
    assert [tokenizer.decode(item.ids) for item in found] == [f"{EOT}hello", f"{EOT}world"]
    assert [item.name for item in found] == [f"{path}#1", f"{path}#2"]


def test_files_of_several_kinds_are_read_in_order(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("hello", encoding="utf-8")
    np.save(tmp_path / "b.npy", np.array([[7, 8], [9, 0]], dtype=np.uint16))
    np.array([5, 6], dtype=np.uint16).tofile(tmp_path / "c.bin")
    paths = [tmp_path / name for name in ("c.bin", "b.npy", "a.txt")]
    found = read_documents(paths, tokenizer, vocab_size=300, end_of_text=0)
    assert listed(found)[:3] == [[0, 5, 6], [7, 8], [9, 0]]
    assert tokenizer.decode(found[3].ids) == f"{EOT}hello"


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint16", "uint8", ">i4"])
def test_each_row_of_an_npy_is_a_document_as_it_is(dtype, tmp_path):
    np.save(tmp_path / "a.npy", np.array([[1, 2, 3], [0, 0, 5]], dtype=dtype))
    found = read(tmp_path / "a.npy")
    assert listed(found) == [[1, 2, 3], [0, 0, 5]]
    assert all(item.ids.dtype == np.int64 for item in found)


@pytest.mark.parametrize(
    ("stream", "end_of_text", "expected"),
    [
        ([5, 6, 0, 7, 0], 0, [[0, 5, 6], [0, 7]]),
        ([0, 5, 6, 0, 7], 0, [[0, 5, 6], [0, 7]]),
        ([0, 0, 5, 0, 0], 0, [[0, 5]]),
        ([5, 6, 7], 0, [[0, 5, 6, 7]]),
        ([5, 0, 7], None, [[5, 0, 7]]),
    ],
)
def test_a_bin_is_separated_at_end_of_text(stream, end_of_text, expected, tmp_path):
    np.array(stream, dtype="<u2").tofile(tmp_path / "a.bin")
    assert listed(read(tmp_path / "a.bin", end_of_text=end_of_text)) == expected


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
    "folder": ("a.txt", lambda path: path.mkdir(), "It is a folder"),
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
    "empty bin": ("a.bin", write_bytes(b""), "The file is empty"),
    "odd bin": ("a.bin", write_bytes(b"\x01\x00\x02"), "Its 3 bytes are not whole"),
    "bin id too large": ("a.bin", write_bytes(b"\x01\x00\xff\xff"), "id 65535 is not in the vocabulary"),
    "bin of separators": ("a.bin", write_bytes(b"\x00\x00" * 3), "holds no tokens"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_file_that_holds_no_sound_ids_is_named(case, tmp_path, tokenizer):
    name, write, message = BAD_FILES[case]
    path = tmp_path / name
    write(path)
    with pytest.raises(ConverterError) as caught:
        read(path, tokenizer)
    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)


def test_a_text_needs_a_tokenizer_and_ids_do_not(tmp_path):
    (tmp_path / "a.txt").write_text("hello", encoding="utf-8")
    with pytest.raises(ConverterError, match=r"a\.txt.*no tokenizer.*\.npy or \.bin"):
        read(tmp_path / "a.txt", None)


def test_a_tokenizer_with_more_tokens_than_the_model_is_found_out(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("hello", encoding="utf-8")
    with pytest.raises(ConverterError, match="not in the vocabulary"):
        read(tmp_path / "a.txt", tokenizer, vocab_size=10)


@pytest.mark.parametrize("end_of_text", [-1, 300])
def test_an_end_of_text_outside_the_vocabulary_is_refused(end_of_text, tmp_path):
    np.save(tmp_path / "a.npy", np.ones((2, 2), dtype=np.int64))
    with pytest.raises(ConverterError, match=f"token {end_of_text} is not in the vocabulary"):
        read(tmp_path / "a.npy", end_of_text=end_of_text)


def test_no_files_are_no_text():
    with pytest.raises(ConverterError, match="No text"):
        read_documents([], None, vocab_size=300, end_of_text=0)


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
    monkeypatch.setattr("converter.text.windows._PIECE", 2000)
    monkeypatch.setattr("converter.text.windows._BATCH", 9000)
    pieces = list(text_module._pieces(text, backend))
    assert "".join(pieces) == text
    assert len(pieces) == 1 if kind == "Llama 2" else len(pieces) > 100
    (found,) = documents_from_strings({"a": text}, PreTrainedTokenizerFast(tokenizer_object=backend), None)
    assert found.ids.tolist() == backend.encode(text, add_special_tokens=False).ids


def test_strings_are_documents_under_their_names(tokenizer):
    found = documents_from_strings({"a": "hello", "b": "", "c": " world"}, tokenizer, 0)
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


def test_ten_megabytes_take_seconds(tmp_path, tokenizer):
    path = tmp_path / "a.txt"
    path.write_text("hello world, this is a line of text with a number 12345\n" * 180_000, encoding="utf-8")
    start = time.process_time()
    calibration, _ = hold_out(read(path, tokenizer))
    windows(calibration, 512, 100_000)
    assert time.process_time() - start < 60  # about 6 on one core; a detour through Python objects takes minutes


def test_importing_the_module_imports_no_torch():
    code = "import sys, converter.text.windows; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_an_npy_whose_header_is_no_python_is_refused(tmp_path):
    path = tmp_path / "ids.npy"
    np.save(path, np.zeros((2, 3), np.int64))
    path.write_bytes(path.read_bytes().replace(b"}", b"("))
    with pytest.raises(ConverterError, match=r"not a sound \.npy"):
        read_documents([path], None, vocab_size=10, end_of_text=None)
