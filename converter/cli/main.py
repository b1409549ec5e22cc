"""The command line: thin, and quick to say what it can do. Each command imports what it needs."""

from __future__ import annotations

import io
import sys
import traceback
from collections.abc import Callable, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from converter import __version__
from converter.cli.heal import heal, upgrade
from converter.cli.process import before_torch, large_blocks_apart
from converter.cli.rope import rope
from converter.cli.texts import as_texts, token_bytes
from converter.errors import ConverterError, VerificationError, paragraph
from converter.files.json_text import to_json
from converter.show.progress import print_all, progress

if TYPE_CHECKING:
    from converter.conversion.plan import DtypeName
    from converter.text.sources import Text

#: A KL up to this, in nats per token, is the rounding of a cast: bf16 costs 7e-6, fp16 1e-7.
_SAME_FUNCTION = 1e-4


class _Group(click.Group):
    """Shows a ConverterError as one paragraph and exits with its code; `--debug` shows the traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        for stream in (sys.stdout, sys.stderr):  # a name of the input may not be text at all
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        try:
            return super().invoke(ctx)
        except ConverterError as error:
            if ctx.params.get("debug"):
                traceback.print_exc()
            command = "converter" if error.where else f"converter {ctx.invoked_subcommand}"
            click.echo(f"{command}: {error}", err=True)
            ctx.exit(error.exit_code)
        except KeyboardInterrupt as error:
            click.echo(f"converter: {paragraph('interrupted', str(error))}", err=True)
            ctx.exit(130)


def _options(*decorators: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def apply(command: Any) -> Any:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return apply


_FILE = click.Path(path_type=Path)
_as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON and nothing else.")
_device = click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="converter")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def main(debug: bool) -> None:
    """Upgrade trained GPT-2-style checkpoints to LLaMA-style ones, and keep what they learnt.

    \b
    Example:
      converter inspect examples/tiny-gpt2
      converter convert examples/tiny-gpt2 tiny-llama
    """
    before_torch()


# RoPE layouts: detect and swap, in `converter.cli.rope`.
main.add_command(rope)
# Healing, in `converter.cli.heal`.
main.add_command(heal)
main.add_command(upgrade)


@main.command()
@click.argument("path", type=_FILE)
@click.option("--mapping", is_flag=True, help="Show which tensor becomes which role.")
@click.option("--text", multiple=True, callback=as_texts, help="Also measure how much the model cares for positions.")
@token_bytes
@_as_json
def inspect(path: Path, mapping: bool, text: tuple[Text, ...], as_json: bool) -> None:
    """Say what a checkpoint is, from its headers and config, and what stops its conversion.

    With --text it also runs the model against itself with all positions shifted.

    \b
    Example:
      converter inspect examples/tiny-gpt2 --mapping
    """
    from converter.measure.inspect import inspect as run

    found = run(path)
    facts: dict[str, Any] = found.to_dict()
    rows = None
    if text:
        from dataclasses import asdict

        from converter.measure.yardstick import measure_yardstick

        rows = measure_yardstick(path, text)
        facts["yardstick"] = [asdict(row) for row in rows]
    if as_json:
        click.echo(to_json(facts))
        return
    from converter.show.tables import inspection_table, mapping_table, yardstick_table

    tables = [inspection_table(found), *([mapping_table(found)] if mapping else [])]
    print_all(tables + ([yardstick_table(rows)] if rows is not None else []))


@main.command()
@click.argument("path", type=_FILE)
@click.option("--full", is_flag=True, help="Also read every tensor: NaN, Inf, weights of zeros.")
@_as_json
@click.pass_context
def check(context: click.Context, path: Path, full: bool, as_json: bool) -> None:
    """Say everything that `convert` refuses about a checkpoint's files, not the first fault alone.

    Fails (exit code 1) where there is a fault; remarks are none.

    \b
    Example:
      converter check examples/tiny-gpt2
      converter check my-gpt2 --full --json
    """
    from converter.measure.check import check as run

    with progress(hidden=as_json) as bars:
        found = run(path, full, progress=bars)
    faults, remarks = ([each for each in found if each.remark is remark] for remark in (False, True))
    if as_json:
        lists = {"faults": [each.to_dict() for each in faults], "remarks": [each.to_dict() for each in remarks]}
        click.echo(to_json({"path": str(path), "full": full, "sound": not faults} | lists))
    else:
        for line in (*found, *dict.fromkeys(f"  to do: {each.fix}" for each in found if each.fix)):
            click.echo(str(line))
        looked = "files, headers and tensors" if full else "files and headers; --full reads the tensors too"
        click.echo(f"{path}: {_count(faults, 'fault') if faults else 'sound'}, {_count(remarks, 'remark')} ({looked})")
    context.exit(1 if faults else 0)


@main.group()
def recipes() -> None:
    """List, show, copy and check recipes.

    \b
    Example:
      converter recipes copy gpt2-to-llama mine.yaml
      converter recipes check mine.yaml
    """


@recipes.command("list")
def recipes_list() -> None:
    """List the recipes that come with the package.

    \b
    Example:
      converter recipes list
    """
    import yaml

    from converter.conversion.recipe import shipped_recipes

    for name, text in shipped_recipes().items():
        click.echo(f"{name:24} {yaml.safe_load(text)['description']}")


@recipes.command("show")
@click.argument("name")
def recipes_show(name: str) -> None:
    """Print a recipe.

    \b
    Example:
      converter recipes show gpt2-to-llama
    """
    from converter.conversion.recipe import recipe_text

    click.echo(recipe_text(name)[0], nl=False)


@recipes.command("copy")
@click.argument("name")
@click.argument("file", type=_FILE)
def recipes_copy(name: str, file: Path) -> None:
    """Copy a recipe to a file, to change it there.

    \b
    Example:
      converter recipes copy gpt2-to-llama mine.yaml
    """
    from converter.conversion.recipe import recipe_text

    text, _ = recipe_text(name)
    try:
        with file.open("x", encoding="utf-8") as handle:
            handle.write(text)
    except FileExistsError:
        raise ConverterError("the file exists", where=str(file), fix="Name a new one") from None
    except OSError as error:
        raise ConverterError("the file cannot be written", where=str(file), why=error.strerror) from error


@recipes.command("check")
@click.argument("file")
def recipes_check(file: str) -> None:
    """Check a recipe, by file or name, and print it with every parameter.

    \b
    Example:
      converter recipes check mine.yaml
    """
    from converter.conversion.recipe import load_recipe

    click.echo(load_recipe(file).to_yaml(), nl=False)


@main.command()
@click.argument("source", type=_FILE, metavar="SRC")
@click.argument("target", type=_FILE, metavar="DST")
@click.option("--recipe", metavar="NAME_OR_FILE", help="Default: the recipe for SRC's family.")
@click.option("--set", "overrides", multiple=True, metavar="STEP.PARAM=VALUE", help="Override a recipe's parameter.")
@click.option("--text", multiple=True, callback=as_texts, help="Text for calibration; a tenth is held out.")
@click.option("--eval-text", multiple=True, callback=as_texts, help="Text to measure on, not a held-out tenth.")
@token_bytes
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), help="Default: the source's.")
@click.option("--trim-vocab", is_flag=True, help="Drop rows of embeddings and head that have no token: padding.")
@_device
@click.option("--max-shard-size", default="5GB", show_default=True)
@click.option("--dry-run", is_flag=True, help="Show the plan, made on meta tensors, and write nothing.")
@click.option("--overwrite", is_flag=True, help="Replace DST if it is a checkpoint.")
@click.option("--resume", is_flag=True, help="Go on from the last finished block of a run that was killed.")
@click.option("--no-verify", is_flag=True, help="Measure nothing.")
@_as_json
def convert(
    source: Path,
    target: Path,
    recipe: str | None,
    overrides: tuple[str, ...],
    text: tuple[Text, ...],
    eval_text: tuple[Text, ...],
    dtype: DtypeName | None,
    trim_vocab: bool,
    device: str,
    max_shard_size: str,
    dry_run: bool,
    overwrite: bool,
    resume: bool,
    no_verify: bool,
    as_json: bool,
) -> None:
    """Convert checkpoint SRC and write the result to folder DST.

    --text is plain text, jsonl, json, csv, tsv, parquet, arrow, token ids (.npy, .bin), a folder of them or
    hub:owner/name, and can be given several times. Of a long text as much is read as is needed.

    \b
    Example:
      converter convert examples/tiny-gpt2 tiny-llama
      converter convert my-gpt2 my-llama --text corpus.txt --set gelu_to_swiglu.units=2
    """
    from converter.conversion import run as conversion

    if dry_run:
        from converter.conversion.memory import expected_memory
        from converter.show.tables import plan_tables

        plan = conversion.plan_conversion(source, recipe, overrides, dtype, trim_vocab)
        conversion.check_conversion(plan, target, text, eval_text, max_shard_size, overwrite, resume)
        memory = expected_memory(plan)
        if as_json:
            click.echo(to_json(plan.to_dict() | {"memory": memory.to_dict(), "peak_bytes": memory.peak}))
            return
        print_all(plan_tables(plan, memory))
        return
    if not no_verify:  # there are activations to compute
        large_blocks_apart()
    with progress(hidden=as_json) as bars:
        report = conversion.convert(
            source,
            target,
            recipe=recipe,
            overrides=overrides,
            text=text,
            eval_text=eval_text,
            dtype=dtype,
            trim_vocab=trim_vocab,
            device=device,
            max_shard_size=max_shard_size,
            overwrite=overwrite,
            resume=resume,
            verify=not no_verify,
            progress=bars,
        )
    if as_json:
        click.echo(to_json(report.to_dict()))
        return
    from converter.show.tables import conversion_tables

    print_all(conversion_tables(report))
    click.echo(f"Wrote {target}: {report.target_cost.parameters:,} parameters, {report.dtype}.")


@main.command()
@click.argument("a", type=_FILE, metavar="A")
@click.argument("b", type=_FILE, metavar="B")
@click.option("--text", multiple=True, required=True, callback=as_texts, help="Text to compare on.")
@token_bytes
@click.option("--tokens", default=65536, show_default=True, type=click.IntRange(min=2), help="At most so many tokens.")
@click.option("--context", type=click.IntRange(min=2), help="Length of a window. Default: what both allow.")
@click.option("--max-kl", type=click.FloatRange(min=0), help="Fail above this KL, nats per token.")
@_device
@_as_json
def verify(
    a: Path,
    b: Path,
    text: tuple[Text, ...],
    tokens: int,
    context: int | None,
    max_kl: float | None,
    device: str,
    as_json: bool,
) -> None:
    """Compare two checkpoints on text, each run by transformers' own class, or by ours where it has none.

    Fails (exit code 1) where B is further from A than --max-kl: by default 1e-4 nats per token, or twice what
    B's own conversion.json says that its conversion cost.

    \b
    Example:
      converter verify my-gpt2 my-llama --text other.txt
    """
    from converter.measure import verify as verification

    comparison = verification.verify(a, b, text=text, tokens=tokens, context=context or 0, device=device)
    limit = max_kl
    if limit is None:
        limit = max(_SAME_FUNCTION, 2 * (verification.expected_kl(b) or 0.0))
    if as_json:
        click.echo(to_json(comparison.to_dict() | {"max_kl": limit, "passed": comparison.total.kl <= limit}))
    else:
        from converter.show.tables import comparison_table, ends_tables

        shown = [comparison_table(comparison, f"{a} against {b}, nats per token")]
        print_all(shown + ends_tables((str(b), comparison), source=str(a)))
    if not comparison.total.kl <= limit:
        raise VerificationError(
            f"{b} is {comparison.total.kl:.3g} nats per token from {a}, and {limit:.3g} were allowed",
            fix="If this much is meant, allow it with --max-kl",
        )


@main.command("eval")
@click.argument("paths", nargs=-1, required=True, type=_FILE, metavar="PATH...")
@click.option("--text", multiple=True, required=True, callback=as_texts, help="Held-out text.")
@token_bytes
@click.option(
    "--context", "contexts", multiple=True, type=click.IntRange(min=2), help="Length of a window. Repeatable."
)
@click.option("--stride", default=256, show_default=True, type=click.IntRange(min=1), help="Tokens that a window adds.")
@click.option(
    "--tokens",
    type=click.IntRange(min=2),
    help="Stop with the document that reaches so many of the first model's tokens.",
)
@_device
@_as_json
def evaluate(
    paths: tuple[Path, ...],
    text: tuple[Text, ...],
    contexts: tuple[int, ...],
    stride: int,
    tokens: int | None,
    device: str,
    as_json: bool,
) -> None:
    """Score checkpoints on held-out text, by context length and by position, and their KL to the first.

    Without --context windows are as long as the first model allows, up to 2048. A model that has not as many
    positions as a --context asks for gets no figures there, and the command fails (exit code 2).

    \b
    Example:
      converter eval my-gpt2 my-llama --text held-out.txt --context 512 --context 1024
    """
    from converter.measure import evaluate as evaluation

    with progress(hidden=as_json) as bars:
        found = evaluation.evaluate(
            paths, text=text, context=contexts, stride=stride, max_tokens=tokens, device=device, progress=bars
        )
    if as_json:
        click.echo(to_json([each.to_dict() for each in found]))
    else:
        from converter.show.tables import evaluation_tables

        print_all(evaluation_tables(found))
        for each in found:
            for note in each.notes:
                click.echo(f"Note on {each.path}: {note.rstrip('.')}.")
            if each.no_kl:
                click.echo(f"No KL of {each.path}: {each.no_kl}.")
    missing = [f"{each.path} {reason}" for each in found for reason in each.no_context.values()]
    if missing:
        raise ConverterError("; ".join(missing), fix="Choose a shorter --context for it")


def _count(things: Sized, name: str) -> str:
    return f"{len(things)} {name}{'' if len(things) == 1 else 's'}"
