"""What a file is by its first bytes, so that nothing is read as text or as token ids that is neither."""

from __future__ import annotations

import pickletools
from pathlib import Path

from converter.errors import ConverterError

#: First bytes and what they mean. Four bytes or more, so that no stream of token ids begins so by chance.
_FIRST_BYTES = {
    b"version https://git-lfs": "a git-lfs pointer, not the file itself",
    b"\x7fELF": "a program",
    b"PK\x03\x04": "a zip archive, such as torch.save writes",
    b"\x1f\x8b\x08\x00": "compressed with gzip",
    b"\x1f\x8b\x08\x08": "compressed with gzip",
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
    b"\xfd7zXZ\x00": "compressed with xz",
    b"BZh91AY&SY": "compressed with bzip2",
    b"\x89PNG\r\n": "an image",
    b"\xff\xd8\xff\xe0": "an image",
    b"\xff\xd8\xff\xe1": "an image",
    b"\xff\xd8\xff\xdb": "an image",
    b"GIF87a": "an image",
    b"GIF89a": "an image",
    b"RIFF": "an image or a sound",
    b"OggS": "a sound",
    b"%PDF-": "a PDF",
    b"SQLite format 3": "a database",
    b"PAR1": "a parquet file",
    b"ARROW1\x00\x00": "an arrow file",
    b"GGUF": "a GGUF checkpoint",
    b"\x93NUMPY": "an array of numpy",
    b"\x89HDF\r\n": "an HDF5 file",
}
#: What to do about some of them.
_FIXES = {
    "a git-lfs pointer, not the file itself": "Run `git lfs pull` in the repository, or download with `hf download`",
    "a parquet file": "Name it .parquet",
    "an arrow file": "Name it .arrow",
    "an array of numpy": "Name it .npy",
    "compressed with gzip": "Name it .gz",
    "compressed with zstd": "Name it .zst",
    "compressed with xz": "Name it .xz",
    "compressed with bzip2": "Name it .bz2",
}
#: Bytes that are looked at.
HEAD = 4096
#: So many opcodes of a pickle in a row, or this many printable bytes, are no token ids: by chance 1e-27 and less.
_OPCODES, _PRINTABLE = 24, 64
_ASCII = frozenset(range(0x20, 0x7F)) | {9, 10, 12, 13}


def head_of(path: Path) -> bytes:
    """The first bytes of a file; raises ConverterError for one that is empty or cannot be read."""
    try:
        with path.open("rb") as file:
            head = file.read(HEAD)
    except OSError as error:
        raise ConverterError("The file cannot be read", where=str(path), why=error.strerror) from error
    if not head:
        raise ConverterError("The file is empty", where=str(path), fix="Name a file with text in it")
    return head


def refuse_no_text(path: Path, head: bytes) -> None:
    """Raise ConverterError for a file that is no text."""
    kind = kind_of(head)
    if kind is None and not any(head):
        kind = "nothing but zeros"
    if kind is None and b"\x00" in head and not head.startswith((b"\xff\xfe", b"\xfe\xff")):
        kind = "binary: there are zero bytes in it"
    _refuse(path, kind, "text")


def refuse_no_ids(path: Path, head: bytes) -> None:
    """Raise ConverterError for a `.bin` that is no stream of token ids."""
    kind = kind_of(head)
    start = head[:_PRINTABLE].lower().lstrip(b"\xef\xbb\xbf \t\r\n")
    if kind is None and start.startswith((b"<!doctype", b"<html", b"<?xml")):
        kind = "XML" if start.startswith(b"<?xml") else "HTML: a web page, as a failed download leaves it"
    elif kind is None and len(head) >= _PRINTABLE and _ASCII.issuperset(head[:_PRINTABLE]):
        kind = "text"
    _refuse(path, kind, "a stream of token ids")


def _refuse(path: Path, kind: str | None, wanted: str) -> None:
    if kind is not None:
        fix = _FIXES.get(kind, "Name it .txt" if kind == "text" else "Name a file of text or of token ids")
        raise ConverterError(f"The file is not {wanted}", where=str(path), why=f"It is {kind}", fix=fix)


def kind_of(head: bytes) -> str | None:
    """What a file is, where it is neither text nor token ids, by its first bytes."""
    for first, kind in _FIRST_BYTES.items():
        if head.startswith(first):
            return kind
    if head[7:10] == b'\x00{"' and int.from_bytes(head[:8], "little") < 1 << 32:
        return "a safetensors file"
    if head.startswith(b"\x80") and head[1:2] in b"\x02\x03\x04\x05" and _is_pickle(head):
        return "a pickle"
    return None


def _is_pickle(head: bytes) -> bool:
    """Whether the bytes are a pickle's, read without running it: its end, or many opcodes in a row."""
    count = 0
    try:
        for opcode, _, _ in pickletools.genops(head):
            count += 1
            if opcode.name == "STOP" or count == _OPCODES:
                return True
    except Exception:  # whatever genops says about other bytes, or about a pickle that goes on
        return count > 2 and len(head) == HEAD and head[1:3] in (b"\x04\x95", b"\x05\x95")
    return False
