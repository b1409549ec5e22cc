"""A checkpoint's tokenizer: read it, write it beside a LLaMA model, prove that its ids are the source's.

A converted checkpoint says `model_type: llama` and keeps a GPT-2 tokenizer. transformers 4 picks the
class by model type, and would load it as LLaMA's own, which is of another kind. So the target names the
plain class, `PreTrainedTokenizerFast`, which takes `tokenizer.json` as it stands and is known to
transformers 4 and 5; 5's own name for it, `TokenizersBackend`, is an error in 4.

`tokenizer.json`, if it exists, is the authority. transformers 5 takes only vocabulary and merges
from it where the class is `GPT2Tokenizer`, and loses a normalizer, a pre-tokenizer or an unknown token
that is not GPT-2's; transformers 4 and the `tokenizers` library take all of it, and so do we.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converter.errors import CheckpointError, UnsupportedError, VerificationError
from converter.files.characters import META_FILE, character_pipeline, read_characters

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"

#: Files that hold a vocabulary. A folder with none of them, and no `tokenizer_config.json`, has no tokenizer.
VOCABULARY_FILES = (TOKENIZER_FILE, "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model")

#: Files of another tokenizer or another format, beside which a `meta.pkl` is not nanoGPT's.
_NOT_NANOGPT = (*VOCABULARY_FILES, CONFIG_FILE, "config.json")

#: What a LLaMA takes. Tokenizers of other models list token_type_ids too, and `generate(**tokenizer(...))` fails on it.
_INPUTS = ["input_ids", "attention_mask"]

#: The class that takes `tokenizer.json` as it is. Read from `transformers` by name, to import it late.
_PLAIN_CLASS = "PreTrainedTokenizerFast"

#: Names that mean that class: in transformers 4, in transformers 5, and their slow counterparts.
_PLAIN_NAMES = {_PLAIN_CLASS, "PreTrainedTokenizer", "TokenizersBackend", "PythonBackend"}

#: How transformers says that a file needs one: sentencepiece, tiktoken, protobuf.
_NEEDS_PACKAGE = re.compile(r"is required|pip install|not found in your environment|need to have .* installed")

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")

#: Texts on which tokenizers tend to part ways: whitespace, line ends, bytes, scripts, composition, digits, code.
PROBE_TEXTS = (
    "",
    "a",
    " a",
    "The quick brown fox doesn't jump; it's 'tired'.",
    "  two leading, two trailing  ",
    " ",
    "   \t  ",
    "\n",
    "one\n\n\ntwo\n  three\n",
    "tab\tseparated\t\tvalues",
    "windows\r\nline\r\nends\r",
    "nul\x00inside\x00\x01\x7f",
    "def f(x):\n    return {k: v**2 for k, v in x.items() if v != 0}  # noqa\n",
    "#include <stdio.h>\nint main(void) { return a[i++] << 3 | ~b; }",
    "3.14159 1,000,000 0x7fff 2024-02-30 12345678901234567890",
    "naïve café coöperate Ångström",
    "nai\u0308ve cafe\u0301 A\u030angstro\u0308m",
    "Привет, мир! Γειά σου Κόσμε",  # noqa: RUF001
    "你好,世界。こんにちは 안녕하세요",
    "مرحبا بالعالم שלום עולם",
    "हिन्दी ไทย",
    "😀👍🏽👩‍👩‍👧‍👦🇳🇴",
    "\u200b zero width \ufeff bom \u00a0 nbsp \u3000 wide \u2028 line",
    "𝒎𝒂𝒕𝒉 𐍈 \U0010fffd \ufffd",
    "https://example.org/a?b=c&d=%20#e user@example.org",
    "CamelCase snake_case SCREAMING_CASE kebab-case",
    "<s> </s> <unk> <pad> [INST] <|endoftext|> <|im_start|> ▁ Ġ Ċ",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "!!!???...,,,;;;:::---___===+++***///\\\\\\",
)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast | None:
    """The tokenizer in `folder` as a plain fast tokenizer, or None if there are no tokenizer files.

    Reads `tokenizer.json`, or GPT-2's `vocab.json` + `merges.txt`, or what else transformers can turn
    into a fast tokenizer, or the `meta.pkl` of a nanoGPT that was trained on characters. Needs no `config.json`,
    runs no code from the folder, asks no network. Special tokens and their defaults are those of the class that the
    folder declares.

    Raises `CheckpointError` for a damaged tokenizer, `UnsupportedError` for one that has no fast form or
    whose class is code of the folder's own.
    """
    present = {name for name in (*VOCABULARY_FILES, CONFIG_FILE) if (folder / name).is_file()}
    if not present:
        return _character_tokenizer(folder) or _gguf_tokenizer(folder)
    config = _read_json(folder / CONFIG_FILE)
    name = _class_name(folder, config, slow_gpt2={"vocab.json", "merges.txt"} <= present)
    try:
        import transformers

        cls = _find_class(name)
        if cls is None and TOKENIZER_FILE not in present:
            raise UnsupportedError(
                f"The tokenizer class {name} is not part of transformers {transformers.__version__}",
                where=str(folder),
                why="Code that lies in a checkpoint's folder is never run",
                fix=f"Save the tokenizer as {TOKENIZER_FILE} (`tokenizer.backend_tokenizer.save`) and try again",
            )
        cls = cls or getattr(transformers, _PLAIN_CLASS)
        if TOKENIZER_FILE not in present:
            _require_files(cls, folder)
        loaded = cls.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if not loaded.is_fast:
            raise UnsupportedError(
                f"{type(loaded).__name__} has no fast form",
                where=str(folder),
                why=f"A LLaMA checkpoint carries its tokenizer as {TOKENIZER_FILE}, which only fast ones can be",
                fix="Remove the tokenizer's files to convert the weights alone",
            )
        plain = _plain(loaded, folder / TOKENIZER_FILE)
        plain("a")  # what the config says otherwise, such as a text for a length, shows when it is used
        return plain
    except (CheckpointError, UnsupportedError):
        raise
    except Exception as error:  # `tokenizers` raises bare Exception for every damaged file
        if isinstance(error, ImportError) or _NEEDS_PACKAGE.search(str(error)):
            raise UnsupportedError(
                "The tokenizer needs a package that is not installed",
                where=str(folder),
                why=" ".join(str(error).split())[:300],
                fix=f"Install it (`pip install sentencepiece protobuf tiktoken`), or put a {TOKENIZER_FILE} there",
            ) from error
        raise CheckpointError(
            "The tokenizer cannot be read",
            where=str(folder),
            why=f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no details'}",
            fix="Copy the tokenizer's files from the original again, or remove them to convert the weights alone",
        ) from error


def write_tokenizer(source: Path, target: Path) -> list[str]:
    """Write the tokenizer of folder `source` into folder `target`; the names of the files written.

    `AutoTokenizer.from_pretrained(target)` then gives the source's ids, in transformers 4.57 and 5, beside
    a `config.json` of model type llama or mistral. (transformers 5.24 turns any tokenizer of a qwen2 into
    Qwen's; `same_ids` shows it.) Nothing is written, and the list is empty, where `source` has no tokenizer.
    Raises what `load_tokenizer` raises.
    """
    tokenizer = load_tokenizer(source)
    if tokenizer is None:
        return []
    target.mkdir(parents=True, exist_ok=True)
    tokenizer.backend_tokenizer.save(str(target / TOKENIZER_FILE))
    text = json.dumps(_tokenizer_config(tokenizer), indent=2, ensure_ascii=False, sort_keys=True)
    (target / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")
    return [TOKENIZER_FILE, CONFIG_FILE]


def vocabulary_size(folder: Path) -> int | None:
    """How many ids the tokenizer in `folder` knows, by its JSON files alone; None where they do not say it.

    Raises `CheckpointError` for a damaged file.
    """
    if _has_characters(folder):
        return len(read_characters(folder / META_FILE))
    pipeline, _ = (_read_json(folder / name) for name in (TOKENIZER_FILE, CONFIG_FILE))
    file = folder / (TOKENIZER_FILE if pipeline else "vocab.json")
    model = pipeline.get("model") if pipeline else {"vocab": _read_json(file)}
    vocabulary = model.get("vocab", {}) if isinstance(model, dict) else None
    added = pipeline.get("added_tokens") or []
    if not isinstance(vocabulary, (dict, list)):
        raise _not_as_it_should("it holds no vocabulary", file)
    if not isinstance(added, list) or not all(isinstance(token, dict) for token in added):
        raise _not_as_it_should("its added_tokens are no list of tokens", file)
    if not vocabulary:
        return None
    ids = list(range(len(vocabulary)) if isinstance(vocabulary, list) else vocabulary.values())
    ids += [token.get("id") for token in added] + list(_read_json(folder / "added_tokens.json").values())
    if not all(type(each) is int and each >= 0 for each in ids):
        raise _not_as_it_should("some of its ids are no whole numbers from 0 on", file)
    return int(max(ids)) + 1


def ids_without_rows(where: str, tokens: int, rows: int) -> CheckpointError:
    """The error of a tokenizer that is larger than the embeddings."""
    return CheckpointError(
        f"the tokenizer has {tokens} ids and the embeddings have {rows} rows",
        where=where,
        why="text can give ids without a row, and a model cannot read those",
        fix="Take the added tokens out of the tokenizer's files, or resize the embeddings "
        "(`model.resize_token_embeddings(len(tokenizer))`) and train them",
    )


def _not_as_it_should(why: str, file: Path) -> CheckpointError:
    return CheckpointError(
        "The tokenizer's file is damaged", where=str(file), why=why, fix="Copy it from the original again"
    )


def same_ids(a: PreTrainedTokenizerFast, b: PreTrainedTokenizerFast) -> None:
    """Prove that the tokenizer `b` that we wrote gives the ids of `a`: on `PROBE_TEXTS` and around every added token.

    Both with and without the special tokens that a tokenizer adds by itself. Vocabularies and the ids of
    bos, eos, pad and the like must agree too. Raises `VerificationError` with the first text that differs.
    """
    names = ("the source's tokenizer", "the target's")
    difference = first_difference(a, b, names) or first_difference(a, b, names, special=True)
    if difference is None:
        for name in _NAMED_TOKENS:
            wanted, given = ((getattr(t, name), getattr(t, f"{name}_id")) for t in (a, b))
            if wanted != given:
                difference = f"on {name}: {wanted} became {given}"
                break
    if difference is not None:
        raise VerificationError(
            f"The tokenizers differ {difference}",
            fix="Do not use the target's tokenizer; please report this with the source's tokenizer files",
        )


def first_difference(
    a: PreTrainedTokenizerFast, b: PreTrainedTokenizerFast, names: tuple[str, str], *, special: bool = False
) -> str | None:
    """What two tokenizers do not have in common, in words; None where texts have the same ids in both.

    Looked for on `PROBE_TEXTS`, around every added token of either, and in the vocabularies. With `special` texts
    include the tokens that a tokenizer adds by itself.
    """
    for text in (*PROBE_TEXTS, *_around_added_tokens(a), *_around_added_tokens(b)):
        one, two = (_ids(each, text, special) for each in (a, b))
        if one != two:
            pairs = enumerate(zip(one, two, strict=False))
            first = next((i for i, (x, y) in pairs if x != y), min(len(one), len(two)))
            return (
                f"on the text {text!r}: from token {first} on {names[0]} gives the ids {one[first : first + 8]}, and "
                f"{names[1]} {two[first : first + 8]} (add_special_tokens={special})"
            )
    differing = set(a.get_vocab().items()) ^ set(b.get_vocab().items())
    if not differing:
        return None
    token, index = min(differing, key=lambda item: (item[1], item[0]))
    owner = names[0] if a.get_vocab().get(token) == index else names[1]
    return f"in their vocabularies: only {owner} has {token!r} with id {index}"


def _ids(tokenizer: PreTrainedTokenizerFast, text: str, special: bool) -> list[int]:
    """The ids of a text; none for a text that the tokenizer refuses, as one of characters does with those it lacks."""
    try:
        return list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])
    except Exception:  # `tokenizers` raises bare Exception
        return []


def _around_added_tokens(tokenizer: PreTrainedTokenizerFast) -> Iterator[str]:
    """A text for each added token: inside words and between spaces, where its strip flags show."""
    for token in tokenizer.get_added_vocab():
        yield f"one{token}two  {token}  three{token}{token}"


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where the file is missing."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            "The file cannot be read as JSON",
            where=str(path),
            why=str(error),
            fix="Copy it from the original again, or remove it",
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(
            "The file does not hold a JSON object",
            where=str(path),
            why=f"It holds a {type(content).__name__}",
            fix="Copy it from the original again, or remove it",
        )
    return content


def _class_name(folder: Path, config: dict[str, Any], *, slow_gpt2: bool) -> str:
    """The tokenizer class that a folder declares: in its tokenizer's config, in its model's, or by its model type."""
    model = _read_json(folder / "config.json")
    declared = config.get("tokenizer_class") or model.get("tokenizer_class")
    if isinstance(declared, str):
        return declared
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    known = TOKENIZER_MAPPING_NAMES.get(str(model.get("model_type")))
    if isinstance(known, tuple):  # transformers 4: (slow, fast), either may be missing
        known = known[1] or known[0]
    return str(known or ("GPT2Tokenizer" if slow_gpt2 else _PLAIN_CLASS))


def _find_class(name: str) -> Any:
    """A tokenizer class of transformers by name, the fast one of a pair; None for a name that is not one."""
    import transformers

    stem = name.removesuffix("Fast")
    candidates = (_PLAIN_CLASS,) if name in _PLAIN_NAMES else (f"{stem}Fast", stem)
    for candidate in candidates:
        found = getattr(transformers, candidate, None)
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedTokenizerBase):
            return found
    return None


def _require_files(cls: Any, folder: Path) -> None:
    """Raise if a vocabulary file of `cls` is missing. transformers 5 would make up the merges, and go on."""
    needed = [file for key, file in cls.vocab_files_names.items() if key != "tokenizer_file"]
    missing = [file for file in needed if not (folder / file).is_file()]
    if missing:
        raise CheckpointError(
            f"The tokenizer is incomplete: {' and '.join(missing)} missing",
            where=str(folder),
            why=f"{cls.__name__} reads {TOKENIZER_FILE}, or else {' + '.join(needed)}",
            fix="Copy the missing file from the original",
        )


def _plain(loaded: PreTrainedTokenizerFast, file: Path) -> PreTrainedTokenizerFast:
    """What `loaded` is, as a plain fast tokenizer, with the pipeline of the tokenizer.json `file` if it exists."""
    import transformers
    from tokenizers import Tokenizer

    plain_class = getattr(transformers, _PLAIN_CLASS)
    backend = loaded.backend_tokenizer
    if file.is_file():
        prefix_space = _prefix_space(backend)
        backend = Tokenizer.from_file(str(file))
        # GPT2Tokenizer's add_prefix_space, said in tokenizer_config.json or false, prevails over tokenizer.json.
        if type(loaded) is not plain_class and None not in (prefix_space, _prefix_space(backend)):
            pre_tokenizer = backend.pre_tokenizer
            pre_tokenizer.add_prefix_space = prefix_space
            backend.pre_tokenizer = pre_tokenizer
    named = {name: token for name in _NAMED_TOKENS if (token := getattr(loaded, name)) is not None}
    return plain_class(
        tokenizer_object=backend,
        added_tokens_decoder=loaded.added_tokens_decoder,
        additional_special_tokens=[token for token in loaded.all_special_tokens if token not in named.values()],
        model_max_length=loaded.model_max_length,
        padding_side=loaded.padding_side,
        truncation_side=loaded.truncation_side,
        model_input_names=_INPUTS,
        clean_up_tokenization_spaces=loaded.clean_up_tokenization_spaces,
        split_special_tokens=loaded.split_special_tokens,
        chat_template=loaded.chat_template,
        add_prefix_space=bool(_prefix_space(backend)),
        **named,
    )


def _prefix_space(backend: Any) -> bool | None:
    """Whether a byte-level pre-tokenizer puts a space in front of a text; None for any other pre-tokenizer."""
    from tokenizers.pre_tokenizers import ByteLevel

    return bool(backend.pre_tokenizer.add_prefix_space) if isinstance(backend.pre_tokenizer, ByteLevel) else None


def _tokenizer_config(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """The `tokenizer_config.json` that keeps `tokenizer` what it is, in transformers 4.57 and 5.

    `add_prefix_space` must be said: 4.57 takes its absence for false and changes tokenizer.json's
    pre-tokenizer. So must `model_input_names`, whatever the source's files list: 4.57's plain class adds
    token_type_ids, which a LLaMA does not take. `additional_special_tokens` is the name that both know. The
    flags of added tokens are in tokenizer.json, where both look. `add_bos_token` and `add_eos_token` say, for
    readers other than transformers, what tokenizer.json's post-processor does.
    """
    named = {name: token for name in _NAMED_TOKENS if (token := getattr(tokenizer, name)) is not None}
    extra = [token for token in tokenizer.all_special_tokens if token not in named.values()]
    bare, dressed = (_ids(tokenizer, "a", on) for on in (False, True))
    config: dict[str, Any] = {
        "tokenizer_class": _PLAIN_CLASS,
        "model_max_length": tokenizer.model_max_length,
        "padding_side": tokenizer.padding_side,
        "truncation_side": tokenizer.truncation_side,
        "model_input_names": _INPUTS,
        "clean_up_tokenization_spaces": tokenizer.clean_up_tokenization_spaces,
        "split_special_tokens": tokenizer.split_special_tokens,
        "add_prefix_space": bool(_prefix_space(tokenizer.backend_tokenizer)),
        "add_bos_token": len(dressed) > len(bare) and dressed[0] == tokenizer.bos_token_id,
        "add_eos_token": len(dressed) > len(bare) and dressed[-1] == tokenizer.eos_token_id,
        **named,
    }
    if extra:
        config["additional_special_tokens"] = extra
    template = tokenizer.chat_template
    if isinstance(template, dict):
        config["chat_template"] = [{"name": name, "template": text} for name, text in template.items()]
    elif template is not None:
        config["chat_template"] = template
    return config


def _has_characters(folder: Path) -> bool:
    """Whether a folder is one of nanoGPT's with a tokenizer of characters."""
    return (folder / META_FILE).is_file() and not any((folder / name).is_file() for name in _NOT_NANOGPT)


def _character_tokenizer(folder: Path) -> PreTrainedTokenizerFast | None:
    """The tokenizer of characters in a folder of nanoGPT's."""
    if not _has_characters(folder):
        return None
    import transformers

    plain = getattr(transformers, _PLAIN_CLASS)
    tokenizer: PreTrainedTokenizerFast = plain(
        tokenizer_object=character_pipeline(read_characters(folder / META_FILE)),
        model_input_names=_INPUTS,
        clean_up_tokenization_spaces=False,
    )
    return tokenizer


def _gguf_tokenizer(folder: Path) -> PreTrainedTokenizerFast | None:
    """The tokenizer in the GGUF file of a folder, as transformers reads it; None without such a file."""
    from converter.files.gguf import tokenizer_file

    file = tokenizer_file(folder)
    if file is None:
        return None
    import transformers

    try:
        loaded = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file.name, local_files_only=True)
    except Exception as error:
        raise CheckpointError(
            "The tokenizer in the GGUF cannot be read", where=str(file), why=f"{type(error).__name__}: {error}"
        ) from error
    return _plain(loaded, folder / TOKENIZER_FILE)
