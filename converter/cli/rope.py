"""`converter rope`: detect and swap RoPE layouts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from converter.cli.texts import as_text, token_bytes
from converter.errors import ConverterError
from converter.files.json_text import to_json

if TYPE_CHECKING:
    from converter.text.sources import Text

_FILE = click.Path(path_type=Path)
_LAYOUTS = click.Choice(["half_split", "interleaved"])
_as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON and nothing else.")


@click.group()
def rope() -> None:
    """Find out which pairing of rotary rows a checkpoint uses, and swap it.

    \b
    Example:
      converter rope detect my-llama
      converter rope swap my-llama other-llama --to interleaved
    """


@rope.command()
@click.argument("path", type=_FILE)
@click.option("--text", callback=as_text, help="Decide by the loss on this text under both readings.")
@token_bytes
@_as_json
def detect(path: Path, text: Text | None, as_json: bool) -> None:
    """Say which layout the rows of q and k are in, by the weights alone.

    Needs no config flag and no text: pairs that are rotated together agree in a sign over heads and layers, and no
    other rows do. Names permutations that were done partly or with the wrong head count.

    \b
    Example:
      converter rope detect my-llama --json
    """
    from converter.rope.swap import look, open_source

    found = look(open_source(path), text)
    if as_json:
        click.echo(to_json(found.to_dict()))
        return
    click.echo(f"{found.layout} (confidence {found.confidence:.2f}): {found.reason}")
    if found.fault:
        click.echo(f"A mistake: {found.fault}.")
    for layout, loss in (found.losses or {}).items():
        click.echo(f"  read as {layout:12} loss {loss:.4f} nats per token")
    for part, scores in found.evidence.items():
        click.echo(f"  {part}:")
        for name, score in scores.items():
            click.echo(f"    {score:9.1f}  {name}")


@rope.command()
@click.argument("source", type=_FILE, metavar="SRC")
@click.argument("target", type=_FILE, metavar="[DST]", required=False)
@click.option("--to", required=True, type=_LAYOUTS, help="The layout to move to.")
@click.option("--from", "claimed", type=_LAYOUTS, help="What the rows are in now; nothing moves where it is not so.")
@click.option("--text", callback=as_text, help="Settle the layout by the loss on this text too.")
@token_bytes
@click.option("--adapter", is_flag=True, help="SRC is a PEFT folder with a LoRA adapter.")
@click.option("--base", type=_FILE, help="The adapter's base. Default: what its config names.")
@click.option("--in-place", is_flag=True, help="Change SRC itself; journaled, and finished by the same command.")
@click.option("--roll-back", is_flag=True, help="With --in-place: undo a swap that was interrupted.")
@click.option("--overwrite", is_flag=True, help="Replace DST if it is a checkpoint.")
@_as_json
def swap(
    source: Path,
    target: Path | None,
    to: str,
    claimed: str | None,
    text: Text | None,
    adapter: bool,
    base: Path | None,
    in_place: bool,
    roll_back: bool,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Move the rotary rows of checkpoint SRC into the other layout, and write the result to folder DST.

    The layout is settled first: --from, the stamp, the family's declaration and the weights must agree. A GGUF file
    or a folder of Meta's is written as a Hugging Face checkpoint.

    \b
    Example:
      converter rope swap my-llama other-llama --to interleaved
      converter rope swap my-llama --in-place --to interleaved
      converter rope swap my-adapter other-adapter --to interleaved --adapter --base my-llama
    """
    from converter.spec import RopeLayout

    if in_place is (target is not None):
        raise ConverterError("either DST or --in-place is needed, and not both", fix="Name a new folder as DST")
    if roll_back:
        _roll_back(source, in_place)
        return
    facts: dict[str, Any] = {"to": RopeLayout(to), "claimed": RopeLayout(claimed) if claimed else None}
    facts["say"] = lambda line: click.echo(line, err=as_json)
    if target is None:
        from converter.rope.patch import swap_in_place

        report = swap_in_place(source, text=text, **facts)
    elif adapter:
        from converter.rope.adapter import swap_adapter

        report = swap_adapter(source, target, base=base, overwrite=overwrite, **facts)
    else:
        from converter.rope.swap import swap as run

        report = run(source, target, text=text, overwrite=overwrite, **facts)
    if as_json:
        click.echo(to_json(report.to_dict()))
        return
    click.echo(f"Moved {report.tensors} tensors from {report.layout_before} to {report.layout_after}.")
    for who, layout in report.voices.items():
        click.echo(f"  {who}: {layout}")
    if report.score_error is not None:
        click.echo(f"Attention scores at 256 positions differ by {report.score_error:.1e} of the largest.")
    for note in report.notes:
        click.echo(f"Note: {note}.")
    for name in report.left_behind:
        click.echo(f"Left in the old order: {name}")


def _roll_back(source: Path, in_place: bool) -> None:
    from converter.rope.patch import roll_back as run

    if not in_place:
        raise ConverterError("only a swap in place can be rolled back", fix="Add --in-place")
    click.echo("Every byte is as it was before." if run(source) else "There is no unfinished swap: nothing to undo.")
