"""The embedded corpus: the source of the Python standard library in the running interpreter.

It serves the embedded example (`examples/tiny-gpt2`) and nothing else. The held-out modules are fixed
by name and sha256; the ones listed are byte-identical in CPython 3.10 to 3.13, so every supported
interpreter measures on the same text. The example was never trained on them, by name.
"""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

#: Module file, relative to the standard library: sha256 of its bytes.
HELD_OUT = {
    "_markupbase.py": "cb14dd6f2e2439eb70b806cd49d19911363d424c2b6b9f4b73c9c08022d47030",
    "difflib.py": "0c6afc23568d55b3e9ac914f9c5361e3033e778aa5b58d3cc82835fc5c638679",
    "email/_encoded_words.py": "4178321600c0a19ca04cfe8542ce44487f339d15d89a473b58cea63c0b230217",
    "json/__init__.py": "d5d41e2c29049515d295d81a6d40b4890fbec8d8482cfb401630f8ef2f77e4d5",
    "multiprocessing/heap.py": "f6bb79bb99b9ae484935f0d68822e9603a1622dd0b6c4966c79db232a93ba614",
    "optparse.py": "07d224301cba312fa0697bff9cd5a4bb4f778a90629632091b3f4ae874d89af5",
    "pyclbr.py": "e8ca09333701ba41244e20b8c2c37b7ed0499b88c4b2ca82cac51ef89ca9e647",
    "tracemalloc.py": "c2cc84a05b824df79840c98729a0e94ef8909b11c528a1b2c5a00aa436b97b25",
    "unittest/suite.py": "ed2da92bc9f97c53403ee2d3d12cc53b16a96e85d596ebc887b5a93458f3f6bc",
    "urllib/robotparser.py": "389b811835f9a3ba72b192c3487b0266fa31f6e571b7a83ceb2a34792dc0d9fc",
    "xml/sax/handler.py": "64c7aae49f1dd382a7b9012610307bfa1d43a14a5dc09a5c8da30903f6805c3d",
    "xml/sax/saxutils.py": "3fe2cdb6386e0c4d42d37c657bbecb78b69c57aedb1610dbd8bf4043944130ab",
}

#: sha256 of `examples/tiny-gpt2/model.safetensors`: the one checkpoint that this corpus is for.
TINY_GPT2_SHA256 = "de585b72da0769422eb6dceee1bebba4ae5c26d8b180ec12c9c29dca2f2f97f6"

#: Folders that hold no library prose-and-code: installed packages, test suites, character tables.
_EXCLUDED_PARTS = {"site-packages", "dist-packages", "test", "tests", "encodings", "pydoc_data"}


def stdlib_root() -> Path:
    """The folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def training_documents() -> list[str]:
    """Source text of every standard library module that is not held out, in the order of their paths."""
    root = stdlib_root()
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    chosen = [name for name in names if name not in HELD_OUT and not _EXCLUDED_PARTS & set(name.split("/")[:-1])]
    documents = []
    for name in chosen:
        text = (root / name).read_bytes().decode("utf-8", errors="ignore")
        if text.strip():
            documents.append(text)
    return documents


def held_out_documents() -> dict[str, str]:
    """Held-out modules of this interpreter whose bytes are the pinned ones: name -> text."""
    root = stdlib_root()
    found = {}
    for name, digest in HELD_OUT.items():
        path = root / name
        if path.is_file():
            data = path.read_bytes()
            if hashlib.sha256(data).hexdigest() == digest:
                found[name] = data.decode("utf-8")
    return found
