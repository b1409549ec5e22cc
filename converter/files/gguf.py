"""GGUF, llama.cpp's single file: key-value metadata, a tokenizer, and tensors that may be quantised.

The `gguf` library reads the file and knows the quantised blocks; a tensor is dequantised to fp32 as it is
read. The config is the metadata itself, under its own keys. Install the library with the extra `gguf`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converter.errors import CheckpointError, OnFault, UnsupportedError
from converter.files.container import Container, Contents, refuse_placeholder
from converter.files.huggingface import has_weights
from converter.files.safetensors import Layout

if TYPE_CHECKING:
    import torch

#: Kind of a GGUF tensor -> dtype of what `read` gives.
_KINDS = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "Q8_0": "float32",
    "Q4_0": "float32",
    "Q4_1": "float32",
    "Q4_K": "float32",
    "Q6_K": "float32",
}
#: Metadata that has one entry a token: the tokenizer's, of no use to the architecture.
_LONG = ("tokenizer.ggml.tokens", "tokenizer.ggml.scores", "tokenizer.ggml.token_type", "tokenizer.ggml.merges")
_IDS = {
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}
#: The tensor in which llama.cpp keeps Llama 3's scaling: what each rotary frequency is divided by.
DIVISORS = "rope_freqs.weight"


class GGUFContainer(Container):
    """A `.gguf` file, or a folder with one of them and no weights in Hugging Face's format."""

    def recognises(self, path: Path) -> bool:
        if path.is_dir():
            return bool(list(path.glob("*.gguf"))) and not has_weights(path)
        return path.suffix == ".gguf"

    def open(self, path: Path, on_fault: OnFault) -> Contents:
        files = sorted(path.glob("*.gguf")) if path.is_dir() else [path]
        if len(files) > 1:
            raise CheckpointError(
                f"there are {len(files)} GGUF files",
                where=str(path),
                why="They may be one model in several quantisations, or its parts",
                fix=f"Name one of them, such as {files[0]}",
            )
        file = GGUFFile(files[0])
        return Contents(file.config(), files[0], {files[0]: file})


class GGUFFile:
    """One file; its tensors have llama.cpp's names, and torch's order of axes."""

    def __init__(self, path: Path) -> None:
        refuse_placeholder(path)
        self.path = path
        try:
            import gguf
        except ImportError:
            raise UnsupportedError(
                "GGUF files are read by the library `gguf`, which is not installed",
                where=str(path),
                fix="Install it with `pip install checkpoint-converter[gguf]`",
            ) from None
        try:
            self._reader = gguf.GGUFReader(path)
        except Exception as error:  # the library raises whatever a damaged header leads to
            raise CheckpointError(
                "this is not a sound GGUF file", where=str(path), why=str(error), fix="Download or copy it again"
            ) from error
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self.layout: dict[str, Layout] = {name: self._layout(name) for name in self._tensors}
        self.names = list(self.layout)

    def config(self) -> dict[str, Any]:
        """The metadata, without what has an entry for each token; the token ids under their usual names; DIVISORS."""
        fields = {
            name: _plain(field) for name, field in self._reader.fields.items() if name not in _LONG and "." in name
        }
        fields = {name: value for name, value in fields.items() if not name.startswith("GGUF.")}
        ids = {name: fields[key] for name, key in _IDS.items() if key in fields}
        tokens = self._reader.fields.get("tokenizer.ggml.tokens")
        size = {"vocab_size": len(tokens.data)} if tokens is not None else {}
        divisors = {DIVISORS: self._tensors[DIVISORS].data.tolist()} if DIVISORS in self._tensors else {}
        return {"model_type": "gguf", **size, **fields, **ids, **divisors}

    def read(self, name: str) -> torch.Tensor:
        """One tensor, dequantised where it is quantised."""
        import gguf
        import numpy as np
        import torch

        tensor = self._tensors[name]
        shape, dtype = self.layout[name]
        if tensor.tensor_type.name == "BF16":
            data = torch.from_numpy(np.array(tensor.data)).view(torch.bfloat16)
        elif tensor.tensor_type.name in ("F32", "F16"):
            data = torch.from_numpy(np.array(tensor.data))
        else:
            data = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        assert str(data.dtype) == f"torch.{dtype}"
        return data.reshape(shape)

    def chunks(self, name: str) -> Iterator[bytes]:
        """The tensor's bytes as `read` gives them."""
        import torch

        yield self.read(name).contiguous().view(torch.uint8).numpy().tobytes()

    def _layout(self, name: str) -> Layout:
        tensor = self._tensors[name]
        kind = tensor.tensor_type.name
        if kind not in _KINDS:
            raise UnsupportedError(
                f"tensor '{name}' is stored as {kind}", where=str(self.path), fix=f"Known: {', '.join(_KINDS)}"
            )
        return tuple(int(size) for size in reversed(tensor.shape)), _KINDS[kind]


def _plain(field: Any) -> Any:
    """A metadata value; floats are fp32 there, and are read as their shortest decimal: 1e-05, not 9.9999997e-06."""
    import numpy as np

    value = field.contents()
    return float(str(np.float32(value))) if isinstance(value, float) else value


def tokenizer_file(folder: Path) -> Path | None:
    """The GGUF file whose tokenizer is that of a folder: its only one, where that has a tokenizer."""
    files = list(folder.glob("*.gguf")) if folder.is_dir() else []
    if len(files) != 1:
        return None
    return files[0] if "tokenizer.ggml.model" in GGUFFile(files[0]).config() else None
