"""A converted checkpoint speaks the source's tokens, whatever reads it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from converter.errors import CheckpointError, UnsupportedError, VerificationError
from converter.files.tokenizer import PROBE_TEXTS, load_tokenizer, same_ids, write_tokenizer

TRAINING_TEXT = [
    "def hello(name):\n    return 'naïve café, 2024-02-30' if name else 12345\n\n",
    "The quick brown fox jumps over the lazy dog. Привет мир 你好 世界 😀\r\n\tIndented  text\n",
] * 20


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test here fails if anything so much as tries to reach the network."""
    attempts: list[object] = []

    def refuse(*args: object, **kwargs: object) -> None:
        attempts.append(args)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    yield
    assert not attempts


def byte_level_bpe(special: tuple[str, ...] = ("<|endoftext|>",), prefix_space: bool = False) -> Tokenizer:
    """GPT-2's kind of tokenizer, in small."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TRAINING_TEXT, trainer)
    return tokenizer


def save_json(folder: Path, name: str, content: dict[str, object]) -> None:
    (folder / name).write_text(json.dumps(content), encoding="utf-8")


def slow_files(folder: Path) -> Tokenizer:
    """vocab.json and merges.txt, and nothing else."""
    tokenizer = byte_level_bpe()
    tokenizer.model.save(str(folder))
    return tokenizer


def slow_files_with_config(folder: Path) -> Tokenizer:
    """The same in a GPT-2 checkpoint that says how to use it."""
    tokenizer = byte_level_bpe(prefix_space=True)
    tokenizer.model.save(str(folder))
    save_json(folder, "config.json", {"model_type": "gpt2"})
    save_json(
        folder,
        "tokenizer_config.json",
        {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True, "model_max_length": 77, "pad_token": "<|pad|>"},
    )
    tokenizer.add_special_tokens(["<|pad|>"])
    return tokenizer


def opt_files(folder: Path) -> Tokenizer:
    """An OPT: vocabulary files, and a bos token in front of every text."""
    tokenizer = byte_level_bpe(("<s>", "<pad>", "</s>", "<unk>"))
    tokenizer.model.save(str(folder))
    save_json(folder, "config.json", {"model_type": "opt"})
    tokens = {"bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>"}
    save_json(
        folder, "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True} | dict(tokens)
    )
    oracle = Tokenizer(models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
    oracle.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    oracle.add_special_tokens(["</s>", "<pad>"])  # <s> and <unk> are in the vocabulary, but nothing names them
    oracle.post_processor = processors.TemplateProcessing("</s> $A", "</s> $A $B", special_tokens=[("</s>", 2)])
    return oracle


def tokenizer_json(folder: Path) -> Tokenizer:
    """tokenizer.json alone."""
    tokenizer = byte_level_bpe()
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def tokenizer_json_of_gpt2(folder: Path) -> Tokenizer:
    """tokenizer.json in a GPT-2 checkpoint; the class, unsaid, follows from the model type."""
    save_json(folder, "config.json", {"model_type": "gpt2"})
    return tokenizer_json(folder)


def tokenizer_json_with_prefix_space(folder: Path) -> Tokenizer:
    """A plain tokenizer.json whose texts start with a space; no other file repeats it."""
    tokenizer = byte_level_bpe(prefix_space=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def tokenizer_json_of_its_own_kind(folder: Path) -> Tokenizer:
    """A GPT-2 checkpoint whose tokenizer.json composes accents and splits digits, as GPT-2's does not."""
    tokenizer = byte_level_bpe()
    tokenizer.normalizer = normalizers.NFC()
    digits = pre_tokenizers.Split(Regex(r"\d"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    save_json(folder, "config.json", {"model_type": "gpt2"})
    return tokenizer


def tokenizer_json_with_flags(folder: Path) -> Tokenizer:
    """Added tokens that eat the spaces beside them or match whole words only, and eos behind every text."""
    tokenizer = byte_level_bpe()
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True), AddedToken("<end>", rstrip=True)])
    tokenizer.add_tokens([AddedToken("FooBar", single_word=True)])
    end = tokenizer.token_to_id("<end>")
    tokenizer.post_processor = processors.TemplateProcessing("$A <end>", "$A $B", special_tokens=[("<end>", end)])
    tokenizer.save(str(folder / "tokenizer.json"))
    save_json(
        folder,
        "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<end>",
            "mask_token": "<mask>",
            "additional_special_tokens": ["<|endoftext|>"],
            "padding_side": "left",
            "clean_up_tokenization_spaces": True,
            "chat_template": "{{ messages[0].content }}",
        },
    )
    return tokenizer


def saved_by_transformers(folder: Path) -> Tokenizer:
    """What `save_pretrained` of the installed transformers writes: transformers 5 names its own class."""
    tokenizer = byte_level_bpe()
    saved = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
        unk_token="<|endoftext|>",
        model_input_names=["input_ids", "attention_mask"],
    )
    saved.save_pretrained(folder)
    save_json(folder, "config.json", {"model_type": "gpt2"})
    return tokenizer


SOURCES = [
    slow_files,
    slow_files_with_config,
    opt_files,
    tokenizer_json,
    tokenizer_json_of_gpt2,
    tokenizer_json_with_prefix_space,
    tokenizer_json_of_its_own_kind,
    tokenizer_json_with_flags,
    saved_by_transformers,
]

TEXTS = [*PROBE_TEXTS, "x<|endoftext|>y <mask> z <end>  FooBar FooBars</s><pad> <|pad|>!"]


def convert(source: Path, target: Path) -> list[str]:
    """Write the tokenizer beside a LLaMA's config, as a conversion does."""
    written = write_tokenizer(source, target)
    save_json(target, "config.json", {"model_type": "llama"})
    return written


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    return source, target


@pytest.mark.parametrize("build", SOURCES)
def test_a_llama_with_the_written_tokenizer_gives_the_sources_ids(build, folders):
    source, target = folders
    oracle = build(source)  # the `tokenizers` library by itself, no class of transformers involved
    assert convert(source, target) == ["tokenizer.json", "tokenizer_config.json"]
    reloaded = AutoTokenizer.from_pretrained(target)
    for text in TEXTS:
        assert reloaded(text)["input_ids"] == oracle.encode(text).ids, repr(text)
    same_ids(load_tokenizer(source), reloaded)


@pytest.mark.parametrize("build", SOURCES)
def test_the_written_tokenizer_keeps_what_surrounds_the_ids(build, folders):
    source, target = folders
    build(source)
    convert(source, target)
    ours, reloaded = load_tokenizer(source), AutoTokenizer.from_pretrained(target)
    for name in (
        "model_max_length",
        "padding_side",
        "truncation_side",
        "model_input_names",
        "clean_up_tokenization_spaces",
        "chat_template",
        "special_tokens_map",
        "all_special_tokens",
    ):
        assert getattr(reloaded, name) == getattr(ours, name), name


def test_class_defaults_are_kept_where_the_source_leaves_them_unsaid(folders):
    source, target = folders
    slow_files(source)
    convert(source, target)
    reloaded = AutoTokenizer.from_pretrained(target)
    assert (reloaded.bos_token, reloaded.eos_token, reloaded.unk_token) == ("<|endoftext|>",) * 3
    assert reloaded.pad_token is None
    assert set(reloaded("a")) == {"input_ids", "attention_mask"}


def test_what_the_config_says_is_kept(folders):
    source, target = folders
    tokenizer_json_with_flags(source)
    convert(source, target)
    reloaded = AutoTokenizer.from_pretrained(target)
    assert (reloaded.eos_token, reloaded.mask_token, reloaded.bos_token) == ("<end>", "<mask>", None)
    assert reloaded.padding_side == "left"
    assert reloaded.clean_up_tokenization_spaces is True
    assert reloaded.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    assert "<|endoftext|>" in reloaded.all_special_tokens
    config = json.loads((target / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert (config["add_bos_token"], config["add_eos_token"]) == (False, True)


def test_several_chat_templates_are_kept(folders):
    source, target = folders
    tokenizer_json(source)
    (source / "chat_template.jinja").write_text("default", encoding="utf-8")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("tools", encoding="utf-8")
    convert(source, target)
    assert AutoTokenizer.from_pretrained(target).chat_template == {"default": "default", "tool_use": "tools"}


def test_the_written_config_says_what_transformers_4_would_guess_wrong(folders):
    source, target = folders
    tokenizer_json_with_prefix_space(source)
    convert(source, target)
    config = json.loads((target / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert config["add_prefix_space"] is True
    assert "model_input_names" in config


def test_a_gpt2_puts_a_space_in_front_only_where_its_config_says_so(folders):
    source, target = folders
    tokenizer_json_with_prefix_space(source)
    save_json(source, "config.json", {"model_type": "gpt2"})
    convert(source, target)
    original = AutoTokenizer.from_pretrained(source)  # transformers 4 and 5 agree on this one
    assert AutoTokenizer.from_pretrained(target)("a b")["input_ids"] == original("a b")["input_ids"]
    assert original("a b")["input_ids"] == byte_level_bpe().encode("a b").ids


def test_added_tokens_that_only_the_config_knows_are_kept(folders):
    source, target = folders
    oracle = tokenizer_json_of_gpt2(source)
    flags = {"lstrip": True, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    save_json(source, "tokenizer_config.json", {"added_tokens_decoder": {"400": {"content": "<new>"} | flags}})
    oracle.add_special_tokens([AddedToken("<new>", lstrip=True)])
    convert(source, target)
    reloaded = AutoTokenizer.from_pretrained(target)
    assert reloaded("a  <new> b")["input_ids"] == oracle.encode("a  <new> b").ids
    assert len(reloaded) == oracle.get_vocab_size()


def test_a_bos_token_in_front_of_every_text_stays_there(folders):
    source, target = folders
    opt_files(source)
    convert(source, target)
    reloaded = AutoTokenizer.from_pretrained(target)
    assert reloaded("")["input_ids"] == [2]
    assert reloaded("", add_special_tokens=False)["input_ids"] == []
    assert json.loads((target / "tokenizer_config.json").read_text(encoding="utf-8"))["add_bos_token"] is True


def test_a_truncating_tokenizer_json_truncates_no_probe(folders):
    source, target = folders
    tokenizer = byte_level_bpe()
    expected = tokenizer.encode("one two three four five six").ids
    tokenizer.enable_truncation(3)
    tokenizer.save(str(source / "tokenizer.json"))
    convert(source, target)
    assert len(expected) > 3
    assert AutoTokenizer.from_pretrained(target)("one two three four five six")["input_ids"] == expected


def test_a_folder_without_tokenizer_files_has_no_tokenizer(folders):
    source, target = folders
    save_json(source, "config.json", {"model_type": "gpt2"})
    assert load_tokenizer(source) is None
    assert write_tokenizer(source, target) == []
    assert not target.exists()


@pytest.mark.parametrize("build", [slow_files, tokenizer_json])
def test_an_unknown_model_type_is_no_obstacle(build, folders):
    source, _ = folders
    oracle = build(source)
    save_json(source, "config.json", {"model_type": "of_our_own", "auto_map": {"AutoConfig": "code.Config"}})
    tokenizer = load_tokenizer(source)
    assert tokenizer("some text")["input_ids"] == oracle.encode("some text").ids


def test_code_in_the_folder_is_never_run(folders):
    source, _ = folders
    marker = source / "was_run"
    (source / "evil.py").write_text(f"open({str(marker)!r}, 'w').close()\nclass EvilTokenizer: pass\n")
    remote = {"tokenizer_class": "EvilTokenizer", "auto_map": {"AutoTokenizer": ["evil.EvilTokenizer", None]}}
    save_json(source, "tokenizer_config.json", remote)
    slow_files(source)
    with pytest.raises(UnsupportedError, match="EvilTokenizer is not part of transformers"):
        load_tokenizer(source)
    oracle = tokenizer_json(source)
    assert load_tokenizer(source)("text")["input_ids"] == oracle.encode("text").ids
    assert not marker.exists()


@pytest.mark.parametrize("name", ["AutoModel", "pipeline", "models", "GPT2Config"])
def test_a_class_that_is_no_tokenizer_is_not_called(name, folders):
    source, _ = folders
    slow_files(source)
    save_json(source, "tokenizer_config.json", {"tokenizer_class": name})
    with pytest.raises(UnsupportedError, match=name):
        load_tokenizer(source)


def test_a_tokenizer_without_a_fast_form_is_refused(folders):
    source, _ = folders
    slow_files(source)
    save_json(source, "tokenizer_config.json", {"tokenizer_class": "CTRLTokenizer"})
    with pytest.raises(UnsupportedError, match="CTRLTokenizer has no fast form"):
        load_tokenizer(source)


@pytest.mark.parametrize("missing", ["vocab.json", "merges.txt"])
def test_half_a_vocabulary_is_refused(missing, folders):
    source, _ = folders
    slow_files(source)
    save_json(source, "config.json", {"model_type": "gpt2"})
    (source / missing).unlink()
    with pytest.raises(CheckpointError, match=f"incomplete: {missing} missing"):
        load_tokenizer(source)


def test_a_config_without_a_vocabulary_is_refused(folders):
    source, _ = folders
    save_json(source, "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer"})
    with pytest.raises(CheckpointError, match=r"vocab.json and merges.txt missing"):
        load_tokenizer(source)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe{}", b'{"model": {}}'])
def test_a_damaged_file_is_an_error_that_names_the_folder(name, content, folders):
    source, _ = folders
    tokenizer_json_of_gpt2(source)
    if name != "tokenizer.json" and content.startswith(b'{"'):
        content = b"null"
    (source / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=str(source)) as caught:
        load_tokenizer(source)
    assert caught.value.why
    assert caught.value.fix


def test_merges_of_tokens_that_do_not_exist_are_an_error(folders):
    source, _ = folders
    slow_files(source)
    with (source / "merges.txt").open("a", encoding="utf-8") as file:
        file.write("nowhere tobefound\n")
    with pytest.raises(CheckpointError, match="tokenizer cannot be read"):
        load_tokenizer(source)


def plain(tokenizer: Tokenizer, **settings: object) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings)


def test_same_ids_names_the_first_text_that_differs():
    composing = byte_level_bpe()
    composing.normalizer = normalizers.NFC()
    same_ids(plain(byte_level_bpe()), plain(byte_level_bpe()))
    with pytest.raises(VerificationError, match=r"the text 'nai.ve cafe.*from token 0 on"):
        same_ids(plain(byte_level_bpe()), plain(composing))


def test_same_ids_sees_a_token_added_by_itself():
    ending = byte_level_bpe()
    ending.post_processor = processors.TemplateProcessing("$A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)])
    with pytest.raises(VerificationError, match="add_special_tokens=True"):
        same_ids(plain(byte_level_bpe()), plain(ending))


def test_same_ids_sees_a_changed_flag_of_an_added_token():
    stripping, keeping = byte_level_bpe(), byte_level_bpe()
    stripping.add_special_tokens([AddedToken("<m>", lstrip=True)])
    keeping.add_special_tokens(["<m>"])
    with pytest.raises(VerificationError, match="one<m>two"):
        same_ids(plain(stripping), plain(keeping))


def test_same_ids_sees_a_lost_special_token():
    with pytest.raises(VerificationError, match="pad_token"):
        same_ids(plain(byte_level_bpe(), pad_token="<|endoftext|>"), plain(byte_level_bpe()))


def test_same_ids_sees_a_vocabulary_that_differs_where_no_probe_looks():
    def renamed(name: str) -> PreTrainedTokenizerFast:
        vocabulary = byte_level_bpe().get_vocab() | {name: 400}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        return plain(tokenizer)

    with pytest.raises(VerificationError, match="'never' with id 400"):
        same_ids(renamed("never"), renamed("probed"))


def test_importing_the_module_imports_neither_torch_nor_transformers():
    code = "import sys, converter.files.tokenizer; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_result_asks_for_what_a_llama_takes_though_the_source_lists_more(tmp_path):
    """U11: `generate(**tokenizer(...))` fails on token_type_ids."""
    source = tmp_path / "source"
    source.mkdir()
    tokenizer_json_of_gpt2(source)
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    config["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    (source / "tokenizer_config.json").write_text(json.dumps(config))
    convert(source, tmp_path / "llama")
    assert set(AutoTokenizer.from_pretrained(tmp_path / "llama")("a b")) == {"input_ids", "attention_mask"}
    assert set(load_tokenizer(source)("a b")) == {"input_ids", "attention_mask"}


#: Run by the other interpreter: for each folder the class, the names and, for each text, the ids.
OLD_SCRIPT = """
import json, sys
import transformers
assert transformers.__version__.startswith("4.57."), transformers.__version__
job = json.load(sys.stdin)
found = {}
for folder in job["folders"]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    names = {name: getattr(tokenizer, name) for name in job["names"]}
    found[folder] = [[tokenizer(text)["input_ids"] for text in job["texts"]], sorted(tokenizer("a")), names]
json.dump(found, sys.stdout)
"""


@pytest.mark.slow
def test_transformers_4_57_reads_the_same_ids(tmp_path):
    interpreter = os.environ.get("CONVERTER_OLD_PYTHON")
    assert interpreter, (
        "Set CONVERTER_OLD_PYTHON to the interpreter of a virtual environment with transformers 4.57: "
        "python -m venv old && old/bin/pip install 'transformers==4.57.*'"
    )
    assert shutil.which(interpreter), f"CONVERTER_OLD_PYTHON={interpreter} cannot be run"
    names = ["bos_token", "eos_token", "unk_token", "pad_token", "padding_side", "model_max_length", "chat_template"]
    targets: dict[str, Tokenizer] = {}
    sources: dict[str, Tokenizer] = {}
    for build in SOURCES:
        source = tmp_path / build.__name__
        source.mkdir()
        oracle = build(source)
        target = tmp_path / f"{build.__name__}_as_llama"
        convert(source, target)
        targets[str(target)] = oracle
        if build in (slow_files_with_config, opt_files, tokenizer_json_of_gpt2, tokenizer_json_of_its_own_kind):
            sources[str(source)] = oracle  # 4.57 can read these by themselves too
    job = {"folders": [*targets, *sources], "texts": TEXTS, "names": names}
    done = subprocess.run([interpreter, "-c", OLD_SCRIPT], input=json.dumps(job), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    for folder, oracle in (targets | sources).items():
        ids, _, _ = found[folder]
        assert ids == [oracle.encode(text).ids for text in TEXTS], folder
    for folder in targets:
        _, keys, given = found[folder]
        reloaded = AutoTokenizer.from_pretrained(folder)
        assert "token_type_ids" not in keys or "token_type_ids" in reloaded.model_input_names, folder
        assert given == {name: getattr(reloaded, name) for name in names}, folder


@pytest.mark.parametrize("length", ["512", [512], {"a": 1}])
def test_a_length_that_is_no_number_is_refused_when_it_is_read(length, folders):
    source, _ = folders
    tokenizer_json(source)
    save_json(source, "tokenizer_config.json", {"model_max_length": length})
    with pytest.raises(CheckpointError, match="The tokenizer cannot be read"):
        load_tokenizer(source)
