"""nanoGPT's `ckpt.pt`: one pickle of {model, model_args, optimizer, config, iter_num, best_val_loss}.

`model_args` is the config. What it does not say - the kind of GELU, the ids of special tokens - can be
said in a file `nanogpt.json` beside it; see `converter.families.nanogpt`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from converter.errors import CheckpointError, OnFault, reporting
from converter.files.container import Container, Contents, read_json, refuse_placeholder
from converter.files.huggingface import has_weights
from converter.files.pickles import TorchFile

FILE = "ckpt.pt"
ADDITIONS = "nanogpt.json"
_NEEDED = (
    "A .pt file is read as nanoGPT's. Other weights belong into a folder with their config.json, as pytorch_model.bin."
)


class NanoGPTFile(Container):
    """A `.pt` file, or a folder with a `ckpt.pt` and no weights in Hugging Face's format."""

    def recognises(self, path: Path) -> bool:
        if path.is_dir():
            return (path / FILE).exists() and not has_weights(path)
        return path.suffix == ".pt"

    def open(self, path: Path, on_fault: OnFault) -> Contents:
        file = path / FILE if path.is_dir() else path
        refuse_placeholder(file)
        try:
            weights = TorchFile(file, on_fault, entry="model")
        except CheckpointError as error:
            error.fix = error.fix or _NEEDED
            raise
        config = weights.beside.get("model_args")
        if not isinstance(config, dict):
            what = (
                "the file has no model_args"
                if "model_args" not in weights.beside
                else "its model_args are not a dict of plain values"
            )
            why = "They are the config of a nanoGPT checkpoint"
            raise CheckpointError(what, where=str(file), why=why, fix=_NEEDED)
        additions = file.with_name(ADDITIONS)
        described_by = (additions,) if additions.exists() else ()
        with reporting(on_fault, additions):
            config = _joined(config, read_json(additions, on_fault) if described_by else {}, additions)
        others = [key for key in weights.beside if key != "model_args"]
        left_out = dict.fromkeys(others, "an entry beside the model, of the training run")
        return Contents({**config, "model_type": "nanogpt"}, file, {file: weights}, described_by, left_out=left_out)


def _joined(config: dict[str, Any], additions: dict[str, Any], file: Path) -> dict[str, Any]:
    for key, value in additions.items():
        if key in config and config[key] != value:
            raise CheckpointError(
                f"'{key}' is {value!r}, and the model_args say {config[key]!r}",
                where=str(file),
                why="this file is for what they do not say",
            )
    return config | additions
