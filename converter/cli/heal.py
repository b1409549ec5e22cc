"""`converter heal` and `converter upgrade`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from converter.cli.texts import as_texts, token_bytes
from converter.files.json_text import to_json
from converter.show.progress import print_all, progress

if TYPE_CHECKING:
    from converter.healing.report import HealReport

_FILE = click.Path(path_type=Path)
_DTYPES = click.Choice(["float32", "bfloat16", "float16"])
#: Options that are short for a setting.
_SETTINGS = ("tokens", "rope_theta", "context")

_OPTIONS = (
    click.option("--text", multiple=True, callback=as_texts, help="Text to learn from; a tenth is held out."),
    click.option(
        "--eval-text", multiple=True, callback=as_texts, help="Text to measure on, instead of the held-out tenth."
    ),
    token_bytes,
    click.option("--set", "overrides", multiple=True, metavar="heal.x=y", help="Override a setting of the recipe."),
    click.option("--tokens", metavar="2M", help="Tokens to see in all: short for --set heal.tokens."),
    click.option("--rope-theta", metavar="1e6", help="A new rotary base: short for --set heal.rope_theta."),
    click.option("--context", metavar="2048", help="Length of a sequence: short for --set heal.context."),
    click.option("--control", is_flag=True, help="Also fine-tune the source on the same batches, at three rates."),
    click.option(
        "--start", "starts", multiple=True, type=click.Choice(["naive", "random"]), help="Also heal from another start."
    ),
    click.option("--dtype", type=_DTYPES, help="Of the result. Default: that of what is healed."),
    click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True),
    click.option("--max-shard-size", default="5GB", show_default=True),
    click.option("--log-with", multiple=True, metavar="TRACKER", help="tensorboard, or another that accelerate knows."),
    click.option("--overwrite", is_flag=True, help="Replace DST if it is a checkpoint."),
    click.option("--resume", is_flag=True, help="Go on from where a run was stopped."),
    click.option("--json", "as_json", is_flag=True, help="Print JSON and nothing else."),
)


def _shared(command: Any) -> Any:
    """The options that both commands have."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@click.command()
@click.argument("converted", type=_FILE, metavar="CONVERTED")
@click.argument("target", type=_FILE, metavar="DST")
@click.option("--teacher", type=_FILE, metavar="SOURCE", help="The checkpoint that CONVERTED was converted from.")
@click.option("--recipe", metavar="NAME_OR_FILE", help="Its heal section counts. Default: CONVERTED/recipe.yaml.")
@_shared
def heal(converted: Path, target: Path, **options: Any) -> None:
    """Fine-tune the checkpoint CONVERTED, so that it agrees with its source again, into folder DST.

    --text is plain text, jsonl, json, csv, tsv, parquet, arrow, token ids (.npy, .bin), a folder of them or
    hub:owner/name, and can be given several times. Of a long text as much is read as --tokens asks for. The embedded
    example needs none. `torchrun` or `accelerate launch -m converter heal ...` runs it on several processes.

    \b
    Example:
      converter heal tiny-llama healed --teacher examples/tiny-gpt2
      converter heal my-llama healed --teacher my-gpt2 --text corpus.jsonl --tokens 50M --rope-theta 1e6
    """
    from converter.healing.run import heal as run

    with progress(hidden=options["as_json"]) as bars:
        report = _run(options, lambda given: run(converted, target, progress=bars, **given))
    _show(report, **options)


@click.command()
@click.argument("source", type=_FILE, metavar="SRC")
@click.argument("target", type=_FILE, metavar="DST")
@click.option("--recipe", metavar="NAME_OR_FILE", help="Default: the recipe for SRC's family.")
@_shared
def upgrade(source: Path, target: Path, **options: Any) -> None:
    """Convert checkpoint SRC, heal the result with SRC as its teacher, and write folder DST.

    \b
    Example:
      converter upgrade examples/tiny-gpt2 tiny-llama
      converter upgrade my-gpt2 my-llama --text corpus.txt --tokens 50M --set fit_blocks.steps=400
    """
    from converter.healing.upgrade import upgrade as run

    with progress(hidden=options["as_json"]) as bars:
        report = _run(options, lambda given: run(source, target, progress=bars, **given))
    _show(report, **options)


def _run(options: dict[str, Any], run: Callable[[dict[str, Any]], HealReport]) -> HealReport:
    """Run with the command's options as the Python functions have them."""
    given = {name: value for name, value in options.items() if name not in ("as_json", *_SETTINGS)}
    short = tuple(f"heal.{name}={options[name]}" for name in _SETTINGS if options[name] is not None)
    return run(given | {"overrides": given["overrides"] + short})


def _show(report: HealReport, as_json: bool, **_: Any) -> None:
    """Print the report, by the main process of a launch alone, and part from the others."""
    from accelerate import PartialState

    from converter.healing.launch import leave

    state = PartialState()
    if state.is_main_process:
        if as_json:
            click.echo(to_json(report.to_dict()))
        else:
            from converter.show.tables import heal_tables

            print_all(heal_tables(report))
            speed = f"{report.tokens:,} tokens seen, {report.tokens_per_second:,.0f} a second"
            click.echo(f"Wrote {report.target}: {speed}.")
    leave(state)
