"""Which layout a checkpoint is in, before anything moves: every voice is heard, and they have to agree.

A stamp in `conversion.json` says what this tool wrote, and stands in for the family's declaration: a
stamped checkpoint may be in the layout that its family does not read. `--from` against the
family's declaration is believed where the weights or a text bear it out: that is how a
checkpoint that somebody converted wrongly is repaired.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from converter import __version__
from converter.errors import ConverterError, UnsupportedError
from converter.families.opened import SourceModel
from converter.families.rotating import described, source_digests
from converter.files.record import RECORD, read_record
from converter.rope.detect import Detection
from converter.spec import RopeLayout


@dataclass(frozen=True)
class Settlement:
    """What the rows are in, and who said so."""

    layout: RopeLayout
    #: Who -> the layout that they name; a voice that does not know is absent.
    voices: dict[str, str]
    note: str | None = None


def swap_entry(settlement: Settlement, to: RopeLayout, tensors: int) -> dict[str, Any]:
    """What a record's history of swaps says of one."""
    return {
        "tool_version": __version__,
        "from": settlement.layout.value,
        "to": to.value,
        "tensors": tensors,
        "evidence": settlement.voices,
    }


def swapped_record(source: SourceModel, settlement: Settlement, to: RopeLayout, tensors: int) -> dict[str, Any]:
    """The record of a checkpoint whose rows went into layout `to`: what is known of these weights, and this swap."""
    record = read_record(source.checkpoint.path)
    ours = record is not None and record.speaks_of(source_digests(source))
    content: Mapping[str, Any] = record.content if ours and record is not None else {}
    history = [*(content.get("rope_swaps") or []), swap_entry(settlement, to, tensors)]
    return described(source, content, to) | {"rope_swaps": history}


def declared_voices(source: SourceModel, to: RopeLayout | None, claimed: RopeLayout | None) -> dict[str, str]:
    """The voices that need no weights. Raises where the stamp alone ends the matter."""
    if source.spec.rope is None:
        raise UnsupportedError(
            "there is nothing to swap", where=source.where, why=f"a {source.family.name} has no RoPE"
        )
    assert source.declared_layout is not None
    stamp = source.stamp
    voices = {"--from": claimed.value} if claimed else {}
    if stamp is None:
        return voices | {f"the declaration of family '{source.family.name}'": source.declared_layout.value}
    voices[f"the stamp in {RECORD}"] = stamp.value
    if to is not None and stamp is to and (claimed is None or claimed is stamp):
        raise already(source, to, f"the stamp in {RECORD} says so")
    if claimed is not None and claimed is not stamp:
        raise _disagreement(source, voices)
    return voices


def settle(
    source: SourceModel, to: RopeLayout | None, voices: dict[str, str], claimed: RopeLayout | None, found: Detection
) -> Settlement:
    """Hear the weights, and the text where one was given, beside the declared voices.

    Raises where they do not agree, or agree on `to`.
    """
    if found.fault is not None:
        raise UnsupportedError(
            "the rows are in no single layout, so swapping them would only move the mistake",
            where=str(source.checkpoint.path),
            why=f"by the weights {found.fault}",
            fix="Take the checkpoint from before that permutation",
        )
    evidence: dict[str, str] = {}
    if found.layout in (RopeLayout.INTERLEAVED.value, RopeLayout.HALF_SPLIT.value):
        by_weights = f"the weights (confidence {found.confidence:.2f})"
        evidence["the loss on the text" if found.losses is not None else by_weights] = found.layout
    everyone = voices | evidence
    layouts = set(everyone.values())
    note = None
    if len(layouts) > 1:
        declaration = f"the declaration of family '{source.family.name}'"
        others = {layout for who, layout in everyone.items() if who != declaration}
        if claimed is None or not evidence or len(others) > 1 or declaration not in everyone:
            raise _disagreement(source, everyone)
        layouts = others
        note = (
            f"family '{source.family.name}' reads {everyone[declaration]}, and --from and "
            f"{' and '.join(evidence)} say {claimed.value}: the checkpoint was misread until now"
        )
    layout = RopeLayout(layouts.pop())
    if to is not None and layout is to:
        raise already(source, to, " and ".join(f"{who} says so" for who in everyone))
    return Settlement(layout, everyone, note)


def already(source: SourceModel, to: RopeLayout, why: str) -> ConverterError:
    """Nothing to do, which is refused: a second run by mistake must not undo the first."""
    return ConverterError(f"the rows are {to.value} already", where=str(source.checkpoint.path), why=why)


def _disagreement(source: SourceModel, voices: dict[str, str]) -> ConverterError:
    return ConverterError(
        "the layout is not settled: " + "; ".join(f"{who} says {layout}" for who, layout in voices.items()),
        where=str(source.checkpoint.path),
        why="moving rows that are not where they are thought to be would ruin the model",
        fix="Find out which is right with `converter rope detect PATH --text FILE`; "
        "--from with a --text that bears it out is believed against the family",
    )
