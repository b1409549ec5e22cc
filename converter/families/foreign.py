"""Config fields that a family does not know: whether transformers reads them, and whose they are.

Told from the text of transformers' own modules, of the version that is installed. Nothing of it is imported, so
inspecting stays as quick as the headers are.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

#: Modules of transformers that read the config of any model: masks, caches, rotary frequencies, loading.
_SHARED = (
    "configuration_utils.py",
    "modeling_utils.py",
    "masking_utils.py",
    "cache_utils.py",
    "modeling_rope_utils.py",
    "integrations/*attention*.py",
)

#: `config.x`, `getattr(config, "x", ...)` and `"x" in config`.
_READ = re.compile(r"""config\.(\w+)|config, ["'](\w+)["']|["'](\w+)["'] in (?:self\.)?config""")
#: A field of a config class: of a dataclass in transformers 5, a parameter of `__init__` in 4.
_DECLARED = re.compile(r"^\s+(\w+)\s*(?::[^=\n]+)?=|^    (\w+): ", re.M)


@cache
def fields_read(model_class: str) -> frozenset[str] | None:
    """The config fields that this model class of transformers may read; None for a class that it does not have.

    A name that stands in the class's module, in its config's module or in a module that all models share counts.
    """
    root = _root()
    homes = (
        []
        if root is None
        else [file for file in sorted(root.glob("models/*/modeling_*.py")) if _has(file, model_class)]
    )
    if root is None or not homes:
        return None
    texts = [file.read_text(encoding="utf-8") for pattern in _SHARED for file in sorted(root.glob(pattern))]
    texts.append(homes[0].read_text(encoding="utf-8"))
    names = {name for text in texts for found in _READ.findall(text) for name in found if name}
    return frozenset(names | _declared(homes[0].parent))


def owners(field: str) -> list[str]:
    """The model types of transformers whose config has this field."""
    root = _root()
    folders = [] if root is None else sorted(path for path in root.glob("models/*") if path.is_dir())
    return [folder.name for folder in folders if field in _declared(folder)]


def is_known(model_type: str) -> bool:
    """Whether transformers has a model of this type."""
    root = _root()
    name = model_type.replace("-", "_")
    return root is not None and name.isidentifier() and (root / "models" / name).is_dir()


@cache
def _root() -> Path | None:
    spec = find_spec("transformers")
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def _has(file: Path, model_class: str) -> bool:
    return f"class {model_class}(" in file.read_text(encoding="utf-8")


@cache
def _declared(folder: Path) -> frozenset[str]:
    found = [_DECLARED.findall(file.read_text(encoding="utf-8")) for file in folder.glob("configuration_*.py")]
    return frozenset(name for names in found for pair in names for name in pair if name)
