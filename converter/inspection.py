"""What a checkpoint is, from its config and headers alone. Imports no torch for safetensors files."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from converter.source import Dropped, SourceModel
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
    """The facts of a checkpoint."""

    path: Path
    family: str
    spec: ModelSpec
    dtypes: dict[str, int]
    parameters: int
    bytes: int
    mapping: tuple[MappingRow, ...]
    dropped: tuple[Dropped, ...]
    config_accounts: dict[str, str]
    warnings: tuple[str, ...]

    @property
    def mlp_ratio(self) -> float:
        """intermediate_size / hidden_size: 4.0 or 2.67 is evidence of the MLP's kind, not proof."""
        return self.spec.intermediate_size / self.spec.hidden_size

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "path": str(self.path),
            "family": self.family,
            "spec": self.spec.to_dict(),
            "mlp_ratio": round(self.mlp_ratio, 4),
            "dtypes": self.dtypes,
            "parameters": self.parameters,
            "bytes": self.bytes,
            "mapping": [asdict(row) for row in self.mapping],
            "dropped": [asdict(each) for each in self.dropped],
            "config": self.config_accounts,
            "warnings": list(self.warnings),
        }


def inspect(path: str | Path) -> Inspection:
    """Describe a checkpoint folder; raises a ConverterError for whatever is wrong with it."""
    source = SourceModel.open(path)
    infos = source.checkpoint.tensors
    dtypes = Counter(info.dtype for info in infos.values())
    return Inspection(
        path=source.checkpoint.path,
        family=source.family.name,
        spec=source.spec,
        dtypes=dict(dtypes),
        parameters=source.parameters,
        bytes=source.checkpoint.total_bytes,
        mapping=tuple(_mapping_rows(source)),
        dropped=tuple(source.dropped),
        config_accounts=source.config_accounts,
        warnings=tuple(_warnings(source, dict(dtypes))),
    )


def _mapping_rows(source: SourceModel) -> list[MappingRow]:
    """One row a tensor, the layers folded into one row each: never 400 lines where 14 say it."""
    from converter.spec import EMBEDDINGS, HEAD, BlockRef

    rows = []
    last = source.spec.num_layers - 1
    for ref in (EMBEDDINGS, BlockRef("layer", 0), HEAD):
        for mapping in source.family.mappings(source.spec, ref):
            for name in mapping.names:
                info = source.checkpoint.tensors[source.names[name]]
                shown = info.name.replace(".0.", f".{{0...{last}}}.", 1) if ref.kind == "layer" else info.name
                if ref.kind == "layer" and info.name.startswith("0."):
                    shown = f"{{0...{last}}}{info.name[1:]}"
                where = f"layers.{{0...{last}}}" if ref.kind == "layer" else str(ref)
                roles = f"{where}: {', '.join(mapping.roles)}"
                rows.append(MappingRow(shown, info.shape, roles, str(mapping)))
    return rows


def _warnings(source: SourceModel, dtypes: dict[str, int]) -> list[str]:
    """What looks wrong but does not stop a conversion."""
    spec, config = source.spec, source.checkpoint.config
    found = []
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
    ids = source.token_ids()
    for key, value in ids.items():
        values = value if isinstance(value, list) else [value]
        if any(each is not None and not 0 <= each < spec.vocab_size for each in values):
            found.append(f"{key} = {value} is outside the vocabulary of {spec.vocab_size}")
    return found
