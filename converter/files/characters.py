"""nanoGPT's `meta.pkl`: a character-level tokenizer as a pickle of two dicts, `stoi` and `itos`, and `vocab_size`.

The pickle is read only if it is made of plain dicts, text and numbers: its opcodes are looked at before it is loaded,
and none of them can name, build or call anything.
"""

from __future__ import annotations

import pickle
import pickletools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converter.errors import CheckpointError, ConverterError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

META_FILE = "meta.pkl"

#: Characters are a few thousand at most.
_LARGEST = 16 << 20

#: Opcodes that push plain values and put them into dicts and lists.
# fmt: off
_PLAIN = (
    "PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1", "BININT2",
    "LONG", "LONG1", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "EMPTY_DICT", "DICT", "SETITEM",
    "SETITEMS", "EMPTY_LIST", "LIST", "APPEND", "APPENDS", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "GET",
    "BINGET", "LONG_BINGET",
)
# fmt: on
_FIX = "Remove it to convert the weights alone, or write it again with nanoGPT's data/shakespeare_char/prepare.py"


def read_characters(file: Path) -> dict[str, int]:
    """Character -> id of a `meta.pkl`; raises `CheckpointError` for a file that is another thing."""
    meta = _read_plain(file)
    stoi = meta.get("stoi") if isinstance(meta, dict) else None
    problem = None
    if not isinstance(stoi, dict) or not stoi:
        problem = "it has no dict 'stoi' from characters to ids"
    elif not all(isinstance(key, str) and len(key) == 1 and type(value) is int for key, value in stoi.items()):
        problem = "its 'stoi' does not map single characters to whole numbers"
    elif sorted(stoi.values()) != list(range(len(stoi))):
        problem = f"its ids are not the numbers from 0 to {len(stoi) - 1}, each once"
    elif meta.get("itos", inverse := {index: each for each, index in stoi.items()}) != inverse:
        problem = "its 'itos' is not the inverse of its 'stoi'"
    elif meta.get("vocab_size", len(stoi)) != len(stoi):
        problem = f"its vocab_size is {meta['vocab_size']}, and it has {len(stoi)} characters"
    if problem is not None:
        raise CheckpointError("this is no table of characters", where=str(file), why=problem, fix=_FIX)
    assert isinstance(stoi, dict)
    return stoi


def character_pipeline(characters: dict[str, int]) -> Tokenizer:
    """A pipeline of `tokenizers` that gives each character its id; like nanoGPT's it has no id for any other one."""
    from tokenizers import Regex, Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split

    pipeline = Tokenizer(WordLevel(characters, unk_token=""))
    pipeline.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    pipeline.decoder = Fuse()
    return pipeline


def _read_plain(file: Path) -> Any:
    size = file.stat().st_size
    if size > _LARGEST:
        raise CheckpointError(
            f"the file has {size:,} bytes", where=str(file), why="a table of characters has some thousand", fix=_FIX
        )
    data = file.read_bytes()
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name not in _PLAIN:
                raise CheckpointError(
                    f"the pickle has the opcode {opcode.name}",
                    where=str(file),
                    why="only plain dicts, text and numbers are read from it, as the rest could run code",
                    fix=_FIX,
                )
            if "PUT" in opcode.name and isinstance(argument, int) and argument > len(data):
                raise ValueError("a number for the memo is larger than the file")
        return pickle.loads(data)
    except ConverterError:
        raise
    except Exception as error:  # a damaged pickle fails in any way
        raise CheckpointError(
            "the pickle is damaged", where=str(file), why=f"{type(error).__name__}: {error}", fix=_FIX
        ) from error
