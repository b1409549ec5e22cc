"""Damage to pickles: what they hold, their opcodes, and the zip file around them."""

from __future__ import annotations

import io
import os
import pickle
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fuzzing.files import flip, overwrite


class Unknown:
    """A class that a pickle names and no reader of weights may import."""

    def __init__(self) -> None:
        self.value = 1


class Payload:
    """Code in a pickle: it makes a file where it is run."""

    def __reduce__(self) -> tuple[Any, tuple[str, ...]]:
        return os.system, (f"touch {Path.cwd().parent / 'outside' / 'payload-was-run'}",)


def state_dict(path: Path, rng: random.Random) -> str:
    """What the pickle holds."""
    content = torch.load(path, weights_only=True)
    state = next((content[key] for key in ("model", "state_dict") if isinstance(content.get(key), dict)), content)
    names = [name for name in state if isinstance(state[name], torch.Tensor)]
    name = rng.choice(names)
    told, value = _odd_value(state[name], rng)
    target: Any = rng.choice((state, state, content)) if content is not state else state
    target[rng.choice((name, name, name, "extra", 7, f"module.{name}", ""))] = value
    if rng.random() < 0.1:
        told, content = rng.choice((("a list", [content]), ("the tensor", value), ("nested", {"module": content})))
    old = rng.random() < 0.2
    torch.save(content, path, _use_new_zipfile_serialization=not old)
    return f"{name}: {told}{', in the old format' if old else ''}"


def _odd_value(tensor: torch.Tensor, rng: random.Random) -> tuple[str, Any]:
    """Something else than a tensor of floats that fits."""
    nested: list[Any] = []
    for _ in range(60):
        nested = [nested, nested]
    deep: list[Any] = []
    for _ in range(800):
        deep = [deep]
    loop: list[Any] = []
    loop.append(loop)
    poisoned = tensor.clone()
    poisoned.view(-1)[0] = rng.choice((float("nan"), float("inf")))
    makes: tuple[tuple[str, Callable[[], Any]], ...] = (
        ("NaN or Inf", lambda: poisoned),
        ("int8", lambda: tensor.to(torch.int8)),
        ("int64", lambda: tensor.to(torch.int64)),
        ("bool", lambda: tensor.bool()),
        ("complex", lambda: tensor.to(torch.complex64)),
        ("float64", lambda: tensor.double()),
        ("float8", lambda: tensor.to(torch.float8_e4m3fn)),
        ("sparse", lambda: tensor.to_sparse()),
        ("quantized", lambda: torch.quantize_per_tensor(tensor.float(), 0.1, 0, torch.qint8)),
        ("meta", lambda: tensor.to("meta")),
        ("transposed", lambda: tensor.mT if tensor.ndim == 2 else tensor[None]),
        ("a view of the half", lambda: tensor[: len(tensor) // 2]),
        ("one number 10^12 times", lambda: torch.zeros(1).expand(10**6, 10**6)),
        ("one number as large as it", lambda: tensor.flatten()[:1].expand(tensor.shape)),
        ("empty", lambda: torch.empty(0)),
        ("a number", lambda: 5),
        ("None", lambda: None),
        ("a list", lambda: tensor.tolist()),
        ("a parameter", lambda: torch.nn.Parameter(tensor)),
        ("lists in pairs 60 deep", lambda: nested),
        ("800 lists in each other", lambda: deep),
        ("a list of itself", lambda: loop),
        ("a numpy scalar", lambda: np.float32(2)),
        ("a numpy array", lambda: tensor.numpy()),
        ("an unknown class", Unknown),
        ("code", Payload),
        ("a set", lambda: {1, 2}),
        ("a class", lambda: Unknown),
        ("text", lambda: "x" * 100_000),
        ("a huge number", lambda: 10**400),
    )
    told, make = rng.choice(makes)
    return told, make()


def zipped(path: Path, rng: random.Random) -> str:
    """One entry of the zip file, under a right checksum."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = {name: archive.read(name) for name in archive.namelist()}
    except zipfile.BadZipFile:
        return flip(path, rng)
    name = rng.choice([*[each for each in entries if each.endswith("data.pkl")] * len(entries), *entries])
    data = bytearray(entries[name])
    act = rng.choice(("flip", "flip", "flip", "cut", "drop", "rename", "bomb", "opcode"))
    if act == "flip" and data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif act == "opcode" and data:
        data[rng.randrange(len(data))] = rng.choice(b"(02\x8bcRbuQh.")  # MARK, POP, DUP, LONG4, GLOBAL, REDUCE, ...
    elif act == "cut":
        del data[rng.randrange(len(data) + 1) :]
    entries[name] = bytes(data)
    if act == "drop":
        del entries[name]
    elif act == "rename":
        entries[rng.choice(("../outside/evil", "/evil", name.upper(), "x" * 300))] = entries.pop(name)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for each, content in entries.items():
            if act == "bomb" and each == name:
                archive.writestr(each, bytes(300_000_000), zipfile.ZIP_DEFLATED, 1)
            else:
                archive.writestr(each, content)
    return f"{act} of {name}"


def crafted(path: Path, rng: random.Random) -> str:
    """A pickle of the old kind, or none of torch's at all."""
    loop: dict[str, Any] = {}
    loop["self"] = loop
    told, content = rng.choice(
        (
            ("code", Payload()),
            ("an unknown class", {"a": Unknown()}),
            ("a dict of itself", loop),
            ("numbers", {"a": 1, "b": [2.5]}),
            ("None", None),
            ("text", "text"),
            ("numpy", {"a": np.zeros(3)}),
        )
    )
    protocol = rng.choice((0, 2, 4, 5))
    if rng.random() < 0.5:
        return overwrite(path, pickle.dumps(content, protocol), f"a plain pickle of {told}, protocol {protocol}")
    buffer = io.BytesIO()
    torch.save(content, buffer, pickle_protocol=protocol, _use_new_zipfile_serialization=rng.random() < 0.5)
    return overwrite(path, buffer.getvalue(), f"torch.save of {told}, protocol {protocol}")
