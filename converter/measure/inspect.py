"""What a checkpoint is, from its config and headers alone. Imports no torch for safetensors files."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from converter.blocks import Dropped
from converter.errors import CheckpointError, printable
from converter.families.companions import pad_remark
from converter.families.config import TOKEN_IDS
from converter.families.opened import SourceModel
from converter.files.tokenizer import vocabulary_size
from converter.measure.examine import examine
from converter.spec import ModelSpec, Positions


@dataclass(frozen=True)
class MappingRow:
    """One tensor, or the same tensor of all layers: names with `{0...N}` for the layer."""

    tensor: str
    shape: tuple[int, ...]
    roles: str
    how: str


@dataclass(frozen=True)
class Inspection:
    """The facts of a checkpoint, as far as they are known, and what stops its conversion."""

    #: What was opened: a folder, or the file that holds everything.
    path: Path
    #: None where we do not know it.
    family: str | None
    #: None where the config does not tell what the model is; `config_facts` is all there is then.
    spec: ModelSpec | None
    #: The plain values of the config.
    config_facts: dict[str, Any]
    dtypes: dict[str, int]
    parameters: int
    bytes: int
    mapping: tuple[MappingRow, ...]
    dropped: tuple[Dropped, ...]
    config_accounts: dict[str, str]
    warnings: tuple[str, ...]
    #: What `convert` refuses about it; empty for a checkpoint that converts.
    stops: tuple[str, ...]

    @property
    def mlp_ratio(self) -> float | None:
        """intermediate_size / hidden_size: 4.0 or 2.67 is evidence of the MLP's kind, not proof."""
        return None if self.spec is None else self.spec.intermediate_size / self.spec.hidden_size

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "path": str(self.path),
            "family": self.family,
            "spec": None if self.spec is None else self.spec.to_dict(),
            "mlp_ratio": None if self.mlp_ratio is None else round(self.mlp_ratio, 4),
            "config_facts": self.config_facts,
            "dtypes": self.dtypes,
            "parameters": self.parameters,
            "bytes": self.bytes,
            "mapping": [asdict(row) for row in self.mapping],
            "dropped": [asdict(each) for each in self.dropped],
            "config": self.config_accounts,
            "warnings": list(self.warnings),
            "stops": list(self.stops),
        }


def inspect(path: str | Path) -> Inspection:
    """Describe a checkpoint, by path or Hub id, also one that does not convert; `stops` says why it does not.

    Raises a ConverterError where there is no config to describe.
    """
    examined = examine(path)
    checkpoint, source = examined.checkpoint, examined.source
    if not checkpoint.config:
        raise examined.faults[0]
    plain = {key: value for key, value in checkpoint.config.items() if isinstance(value, (str, int, float))}
    return Inspection(
        path=checkpoint.opened,
        family=None if examined.family is None else examined.family.name,
        spec=None if source is None else source.spec,
        config_facts=plain,
        dtypes=dict(Counter(info.dtype for info in checkpoint.tensors.values())),
        parameters=checkpoint.num_parameters if source is None else source.parameters,
        bytes=checkpoint.total_bytes,
        mapping=() if source is None else tuple(_mapping_rows(source)),
        dropped=() if source is None else tuple(source.dropped),
        config_accounts={} if source is None else source.config_accounts,
        warnings=() if source is None else tuple(warnings(source)),
        stops=tuple(str(fault) for fault in examined.faults),
    )


def _mapping_rows(source: SourceModel) -> list[MappingRow]:
    """One row a tensor, the layers folded into one row each: never 400 lines where 14 say it."""
    from converter.blocks import EMBEDDINGS, HEAD, BlockRef

    rows = []
    last = source.spec.num_layers - 1
    for ref in (EMBEDDINGS, BlockRef("layer", 0), HEAD):
        for mapping in source.family.mappings(source.spec, ref):
            for name in mapping.names:
                if name not in source.names:
                    continue
                info = source.checkpoint.tensors[source.names[name]]
                shown = info.name.replace(".0.", f".{{0...{last}}}.", 1) if ref.kind == "layer" else info.name
                if ref.kind == "layer" and info.name.startswith("0."):
                    shown = f"{{0...{last}}}{info.name[1:]}"
                where = f"layers.{{0...{last}}}" if ref.kind == "layer" else str(ref)
                roles = f"{where}: {', '.join(mapping.roles)}"
                rows.append(MappingRow(shown, info.shape, roles, str(mapping)))
    return rows


def warnings(source: SourceModel) -> list[str]:
    """What a user should know, but what does not stop a conversion."""
    dtypes = Counter(info.dtype for info in source.checkpoint.tensors.values())
    spec, config = source.spec, source.checkpoint.config
    found = list(source.notes)
    stated = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    if stated and stated != source.dtype:
        found.append(f"the config says {stated}, and most weights are stored in {source.dtype}")
    if len(dtypes) > 1:
        listed = ", ".join(f"{count} {dtype}" for dtype, count in sorted(dtypes.items()))
        found.append(f"tensors of several dtypes: {listed}")
    flag = config.get("tie_word_embeddings", source.family.ties_by_default)
    if flag and not spec.tied_head:
        found.append("the config ties the head to the embeddings, and the files hold another head: the files rule")
    if spec.norm_eps > 1e-3 or spec.norm_eps < 1e-8:
        found.append(f"a norm eps of {spec.norm_eps} is unusual")
    if spec.positions is Positions.ROPE and spec.rope is not None and not 1e3 <= spec.rope.theta <= 1e9:
        found.append(f"a rope theta of {spec.rope.theta} is unusual")
    ratio = spec.intermediate_size / spec.hidden_size
    if spec.gated_mlp and ratio >= 3.9:
        found.append(f"the MLP is gated by its matrices, yet its ratio {ratio:.2f} is that of a plain one")
    if not spec.gated_mlp and ratio < 3:
        found.append(f"the MLP is plain by its matrices, yet its ratio {ratio:.2f} is that of a gated one")
    for key in TOKEN_IDS:
        if (account := source.config_accounts.get(key, "read")) != "read":
            found.append(f"{key} = {account}, so it is none")
    if remark := pad_remark(source):
        found.append(remark)
    return [printable(warning) for warning in found + _vocabulary_warnings(source)]


def _vocabulary_warnings(source: SourceModel) -> list[str]:
    """What the tokenizer says about the rows of the embeddings, and what the family has to say."""
    rows, found, tokens = source.spec.vocab_size, [], None
    with contextlib.suppress(CheckpointError):  # a broken tokenizer stops the conversion, and is told there
        tokens = vocabulary_size(source.checkpoint.path)
    if tokens is not None and tokens < rows:
        found.append(f"the embeddings have {rows} rows and the tokenizer {tokens} ids: all rows are kept, padding too")
    return found + source.family.remarks(source.checkpoint.config, tokens)
