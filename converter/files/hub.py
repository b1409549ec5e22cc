"""Sources by Hub id: fetched through huggingface_hub's cache, which obeys HF_HUB_OFFLINE, HF_HOME and the login."""

from __future__ import annotations

import re
from pathlib import Path

from converter.errors import CheckpointError
from converter.files.tokenizer import CONFIG_FILE, VOCABULARY_FILES

#: `gpt2` or `openai-community/gpt2`.
_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
#: A name that ends so means a file.
_SUFFIXES = (".pt", ".pth", ".bin", ".safetensors", ".gguf", ".json")
_CACHED = re.compile(r"models--(.+)/snapshots/[^/]+")

_TOKENIZER = (*VOCABULARY_FILES, CONFIG_FILE, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
_CONFIG = ("config.json", "generation_config.json")
_SAFETENSORS = ("model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors")
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*-of-*.bin")


def local_path(source: str | Path) -> Path:
    """Where a source lies: the path itself where it exists, else the cached snapshot of the model of this Hub id.

    The config, the tokenizer and the safetensors are fetched, or the pickles where there are none. What
    cannot be a Hub id is returned as it is. Raises `CheckpointError` where nothing can be fetched.
    """
    path = Path(source)
    if path.exists() or path.suffix in _SUFFIXES or not _ID.fullmatch(path.as_posix()):
        return path
    return _fetch(path.as_posix())


def hub_id(folder: Path) -> str | None:
    """The id of the model whose snapshot in the cache a folder is."""
    found = _CACHED.fullmatch("/".join(folder.parts[-3:]))
    return found[1].replace("--", "/") if found else None


def _fetch(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, allow_patterns=[*_CONFIG, *_TOKENIZER, *_SAFETENSORS]))
        if not any(folder.glob("model*.safetensors")):
            snapshot_download(name, allow_patterns=list(_PICKLES))
    except Exception as error:  # which one it is depends on the client's version and its transport
        raise CheckpointError(
            "this is neither a file or folder here, nor could it be fetched from the Hugging Face Hub",
            where=name,
            why=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
            fix="Check the spelling, the network (HF_HUB_OFFLINE must not be set), and for a private or gated "
            "model the login: `hf auth login`",
        ) from error
    return folder
