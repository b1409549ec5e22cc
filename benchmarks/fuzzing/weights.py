"""Damage to files of weights: safetensors and GGUF."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path

from fuzzing.files import overwrite
from fuzzing.values import damage_json

#: What a length, a count or an offset is replaced by.
_NUMBERS = (0, 1, 2, 3, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)


# --- safetensors ----------------------------------------------------------------------------------------------


def split_safetensors(data: bytes) -> tuple[str, bytes]:
    """Header and data."""
    (size,) = struct.unpack("<Q", data[:8])
    return data[8 : 8 + size].decode(), data[8 + size :]


def join_safetensors(header: str, data: bytes) -> bytes:
    """A file with a right header length."""
    raw = header.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(raw)) + raw + data


def header_json(path: Path, rng: random.Random) -> str:
    """A value of the header, under a right length."""
    header, data = split_safetensors(path.read_bytes())
    text, told = damage_json(header, rng)
    return overwrite(path, join_safetensors(text, data), f"header: {told}")


def header_facts(path: Path, rng: random.Random) -> str:
    """A dtype, shape, name or place of one tensor."""
    text, data = split_safetensors(path.read_bytes())
    header = json.loads(text)
    names = [name for name in header if name != "__metadata__"]
    name, other = rng.choice(names), rng.choice(names)
    entry = header[name]
    act = rng.choice(("dtype", "shape", "transpose", "offsets", "swap", "prefix", "overlap", "drop", "add"))
    if act == "dtype":
        entry["dtype"] = rng.choice(("I32", "U32", "F16", "BF16", "F64", "F8_E4M3", "BOOL", "X", "f32", "C64", "I8"))
    elif act == "shape":
        entry["shape"] = rng.choice(([2**62, 4], [-1, -4], [0], [], entry["shape"] + [1], [2**31] * 3, [1.0], ["4"]))
    elif act == "transpose":
        entry["shape"].reverse()
    elif act == "offsets":
        entry["data_offsets"][rng.randrange(2)] = rng.choice((*_NUMBERS, -1, 4))
    elif act == "swap":
        header[name], header[other] = header[other], header[name]
    elif act == "prefix":
        header[rng.choice(("module.", "../", "/", "a\u0000", "x" * 5000)) + name] = header.pop(name)
    elif act == "overlap":
        entry["data_offsets"] = list(header[other]["data_offsets"])
    elif act == "drop":
        del header[name]
    else:
        header[f"{name}.more"] = {**entry}
    return overwrite(path, join_safetensors(json.dumps(header), data), f"{act} of {name}: {entry}"[:200])


def header_length(path: Path, rng: random.Random) -> str:
    """Another length of the header."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    new = rng.choice((*_NUMBERS, size + 1, size - 1, size + 8, len(data), 100_000_000, 100_000_001))
    return overwrite(path, struct.pack("<Q", new) + data[8:], f"header length {new}")


def floats(path: Path, rng: random.Random) -> str:
    """NaN, Inf or another float32 somewhere in the data."""
    header, data = split_safetensors(path.read_bytes())
    values = bytearray(data)
    told = rng.choice((float("nan"), float("inf"), float("-inf"), 3e38, -3e38, 1e-40, 0.0, 1e20))
    at = 4 * rng.randrange(len(values) // 4)
    values[at : at + 4] = struct.pack("<f", told)
    return overwrite(path, join_safetensors(header, bytes(values)), f"{told} at byte {at} of the data")


# --- GGUF -----------------------------------------------------------------------------------------------------


def gguf_number(path: Path, rng: random.Random) -> str:
    """A number of the header: counts, lengths, types, values, dimensions, places."""
    data = bytearray(path.read_bytes())
    size = rng.choice((4, 8))
    at = rng.choice((8, 16, *(rng.randrange(24, min(len(data) - 8, 2400)) for _ in range(6))))
    value = rng.choice(_NUMBERS) & (2 ** (8 * size) - 1)
    data[at : at + size] = value.to_bytes(size, "little")
    return overwrite(path, bytes(data), f"{size} bytes at {at} = {value}")


def gguf_name(path: Path, rng: random.Random) -> str:
    """One name of the metadata or of a tensor, in place."""
    data = path.read_bytes()
    names: tuple[bytes, ...] = (
        b"llama.block_count",
        b"llama.rope.freq_base",
        b"attention.head_count",
        b"blk.0.attn_q",
        b"token_embd",
    )
    names += (b"general.architecture", b"blk.1.ffn_up", b"output_norm", b"tokenizer.ggml", b"context_length")
    name = rng.choice(names)
    new = rng.choice((name[::-1], b"../" + name[3:], b"\xff" * len(name), name[:-1] + b"\0", name.upper()))
    return overwrite(path, data.replace(name, new, rng.choice((1, 99))), f"{name!r} -> {new!r}")
