"""Damage to a file of some kind, by that kind's ways or by those of any file."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from fuzzing import files, pickles, texts, weights

Act = Callable[[Path, random.Random], str]

_ANY: tuple[Act, ...] = (files.flip, files.flip, files.truncate, files.splice, files.whole, files.place)
_KINDS: dict[str, tuple[Act, ...]] = {
    "json": (texts.as_json,) * 4,
    "yaml": (texts.as_lines,) * 4,
    "jsonl": (texts.as_json_lines,) * 3,
    "prose": (texts.as_prose,) * 3,
    "safetensors": (
        *(weights.header_json, weights.header_facts, weights.header_facts, weights.header_length),
        *(weights.floats, weights.floats),
    ),
    "pickle": (pickles.state_dict, pickles.state_dict, pickles.zipped, pickles.zipped, pickles.crafted),
    "gguf": (weights.gguf_number, weights.gguf_number, weights.gguf_name),
    "npy": (texts.npy,) * 3,
    "bin": (texts.token_bin,) * 3,
    "parquet": (texts.parquet,),
    "bytes": (),
}


def damage(path: Path, kind: str, rng: random.Random) -> str:
    """Damage one file, and say what was done."""
    act = rng.choice((*_KINDS[kind], *(rng.choice(_ANY) for _ in range(2))))
    try:
        return f"{path}: {act(path, rng)}"
    except Exception as error:  # damaged too much to be damaged in this way again
        if not path.is_file():
            return f"{path}: {act.__name__} does not apply to what is no file"
        return f"{path}: {files.flip(path, rng)} ({act.__name__} does not apply: {type(error).__name__})"
