"""Convert one checkpoint: plan, walk and write; what comes then is in `finish`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from converter import __version__
from converter.conversion.finish import AFTER_THE_WALK, Written
from converter.conversion.plan import DtypeName, Plan, check_config, make_plan, without_padding
from converter.conversion.recipe import Recipe, load_recipe, with_overrides
from converter.conversion.report import ConversionReport, make_report
from converter.conversion.resume import Journal
from converter.conversion.walk import State, Walk
from converter.errors import ConverterError
from converter.families.opened import SourceModel
from converter.files.checkpoint import hash_beside
from converter.files.output import OutputFolder
from converter.files.writer import CheckpointWriter, parse_size
from converter.measure.inspect import warnings
from converter.measure.models import pick_device
from converter.measure.vocabulary import Vocabulary
from converter.show.progress import Progress
from converter.text.gather import Texts, calibrated_step, gather_texts
from converter.text.sources import Text, listed


def plan_conversion(
    source: str | Path | SourceModel,
    recipe: str | Recipe | None = None,
    overrides: Iterable[str] = (),
    dtype: DtypeName | None = None,
    trim_vocab: bool = False,
) -> Plan:
    """The plan for a checkpoint and a recipe (a shipped name, a file, or None for the family's own).

    With `trim_vocab` its first step drops the rows of embeddings and head that have no token.
    """
    opened = source if isinstance(source, SourceModel) else SourceModel.open(source)
    opened.check_contents()
    Vocabulary.of(opened).check()  # and the tokenizer loads
    if recipe is None:
        recipe = opened.family.recipe_for(opened.spec)
        if recipe is None:
            raise ConverterError(
                f"family '{opened.family.name}' has no default recipe", where=opened.where, fix="Name one: --recipe"
            )
    if isinstance(recipe, str):
        recipe = load_recipe(recipe)
    recipe = with_overrides(recipe, overrides)
    plan = make_plan(opened, without_padding(recipe, opened) if trim_vocab else recipe, dtype)
    check_config(plan)
    return plan


def check_conversion(
    plan: Plan,
    target: str | Path,
    text: Text | Sequence[Text] = (),
    eval_text: Text | Sequence[Text] = (),
    max_shard_size: str | int = "5GB",
    overwrite: bool = False,
    resume: bool = False,
) -> None:
    """Raise the ConverterError that `convert` would raise for its target, its text, or the size of its shards."""
    parse_size(max_shard_size)
    inputs = (plan.source.checkpoint.opened, *listed(text), *listed(eval_text))
    OutputFolder(Path(target), overwrite=overwrite, resume=resume, inputs=inputs).check()
    if text or eval_text:
        check_ids_are_kept(plan, gather_texts(plan, listed(text), listed(eval_text)))


def check_ids_are_kept(plan: Plan, texts: Texts) -> None:
    """Raise ConverterError where a text has ids whose rows are not in the result."""
    rows = plan.target_spec.vocab_size
    for windows in (texts.calibration, texts.evaluation):
        largest = -1 if windows is None else int(windows.ids.max(initial=-1))
        if largest >= rows:
            raise ConverterError(
                f"the text has the id {largest}, and the result has {rows} rows",
                why="the rows beyond them are dropped as padding, and this text uses them",
                fix="Give text of the checkpoint's own tokens",
            )


def convert(
    source: str | Path,
    target: str | Path,
    *,
    recipe: str | Recipe | None = None,
    overrides: Iterable[str] = (),
    text: Text | Sequence[Text] = (),
    eval_text: Text | Sequence[Text] = (),
    dtype: DtypeName | None = None,
    trim_vocab: bool = False,
    device: str = "auto",
    max_shard_size: str | int = "5GB",
    overwrite: bool = False,
    resume: bool = False,
    verify: bool = True,
    progress: Progress | None = None,
) -> ConversionReport:
    """Convert the checkpoint in folder `source` into the folder `target`.

    `trim_vocab` drops rows of embeddings and head that have no token. `text` are files for calibration, of which a
    tenth is held out to measure damage on unless `eval_text` names other files. `resume` goes on from the last
    finished block, or the last finished step after the blocks, of a run of the same conversion that was stopped.
    Raises a ConverterError for bad input, and VerificationError where an exact op did not keep the function or the
    written files compute something else than the conversion.
    """
    conversion = Conversion.open(
        *(source, recipe, overrides, dtype, trim_vocab),
        device=device,
        max_shard_size=max_shard_size,
        verify=verify,
        progress=progress,
    )
    inputs = (conversion.plan.source.checkpoint.opened, *listed(text), *listed(eval_text), *recipe_files(recipe))
    with OutputFolder(Path(target), overwrite=overwrite, resume=resume, inputs=inputs) as output:
        conversion.gather(text, eval_text)
        return conversion.into(output)


def recipe_files(recipe: object) -> tuple[Path, ...]:
    """The file that a recipe is read from; none for a shipped name."""
    return (Path(recipe),) if isinstance(recipe, str) and Path(recipe).is_file() else ()


@dataclass
class Conversion:
    """One conversion, planned, with its text."""

    plan: Plan
    device: str
    shard_size: int
    verify: bool
    progress: Progress
    source_hash: Future[dict[str, str]]
    texts: Texts | None = None

    @classmethod
    def open(
        cls,
        source: str | Path,
        recipe: str | Recipe | None = None,
        overrides: Iterable[str] = (),
        dtype: DtypeName | None = None,
        trim_vocab: bool = False,
        *,
        device: str = "auto",
        max_shard_size: str | int = "5GB",
        verify: bool = True,
        progress: Progress | None = None,
    ) -> Conversion:
        """Open a source and plan. Raises ConverterError for what can be refused before any weight is read."""
        progress = progress or Progress()
        opened = SourceModel.open(source)
        source_hash = hash_beside(opened.checkpoint)
        plan = plan_conversion(opened, recipe, overrides, dtype, trim_vocab)
        for warning in warnings(opened):
            progress.say(f"Note: {warning.rstrip('.')}.")
        return cls(plan, pick_device(device), parse_size(max_shard_size), verify, progress, source_hash)

    def gather(self, text: Text | Sequence[Text] = (), eval_text: Text | Sequence[Text] = ()) -> None:
        """Read the text, where something is calibrated or measured."""
        if self.verify or calibrated_step(self.plan) is not None:
            self.texts = gather_texts(self.plan, listed(text), listed(eval_text))
            check_ids_are_kept(self.plan, self.texts)
            for note in self.texts.notes:
                self.progress.say(f"Note: {note}.")

    def fingerprint(self) -> dict[str, Any]:
        """What makes two runs the same conversion."""
        windows = {"text": self.texts.calibration, "held-out text": self.texts.evaluation} if self.texts else {}
        digests = {name: each.digest() for name, each in windows.items() if each is not None}
        return {
            "tool": __version__,
            "source": self.plan.source.checkpoint.stats(),
            **self.plan.recipe.fingerprint(),
            **digests,
            "shard size": self.shard_size,
            "verification": self.verify,
        }

    def into(self, output: OutputFolder) -> ConversionReport:
        """Convert into a folder, from where an earlier run of the same conversion got to."""
        output.claim("conversion", self.fingerprint())
        if output.finished:
            return ConversionReport.from_dict(output.recall("report"), output.target)
        plan, texts = self.plan, self.texts
        output.check_space(plan.output_bytes * (2 if plan.target.own_container else 1))
        evaluation = texts.evaluation if texts and self.verify else None
        walk = Walk(
            plan, texts.calibration if texts else None, evaluation, device=self.device, progress=self.progress.detail
        )
        weights = output.work / "weights" if plan.target.own_container else output.partial
        weights.mkdir(exist_ok=True)
        _write(plan, walk, output, weights, self.shard_size, self.progress)
        findings = walk.findings
        del walk  # with its activations
        report = make_report(plan, findings, texts, self.source_hash.result(), output.target)
        written = Written(*(plan, findings, texts, self.verify, self.device, output, weights, report, self.progress))
        for step in AFTER_THE_WALK:
            step(written)
        return written.report


def _write(plan: Plan, walk: Walk, output: OutputFolder, folder: Path, shard_size: int, progress: Progress) -> None:
    """Walk and write, block by block, from where the journal says that an earlier run got to."""
    progress.stage("convert", plan.output_bytes)
    journal = Journal(output.work / "walk")
    saved = journal.load()
    if saved is not None:
        walk.restore(*saved)
    sums = saved[0]["written"] if saved is not None else {}
    finished = {name: sums[name] for name in walk.finished_names()}
    writer = CheckpointWriter(folder, plan.tensors, shard_size, resume=saved is not None, already_written=finished)
    progress.advance(sum(plan.tensor_bytes(name) for name in finished))
    if saved is None and (seconds := walk.seconds()) > 1:
        progress.say(f"About {seconds:.0f} s of activations for calibration and measuring.")

    def write_block(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
            progress.advance(plan.tensor_bytes(name))
        tensors.clear()  # one block in memory

    def note_block(written: Future[None], number: int, state: State) -> None:
        written.result()
        writer.sync()
        facts, streams = state
        journal.save(number, {**facts, "written": writer.written}, streams)
        output.keep(unless_refused=True)

    # A block is written while the next one is converted, and the one before is waited for on its way to the disk.
    with (
        _threads(walk),
        ThreadPoolExecutor(max_workers=1) as pages,
        ThreadPoolExecutor(max_workers=1) as disk,
    ):
        written: Future[None] | None = None
        noted: Future[None] | None = None
        for number, (_, tensors) in enumerate(walk):
            if written is not None:
                written.result()
            state = walk.state()
            written = pages.submit(write_block, tensors)
            del tensors
            if noted is not None:
                noted.result()
            noted = disk.submit(note_block, written, number, state)
            if state[1]:
                noted.result()  # the walk goes on in the same streams
        if noted is not None:
            noted.result()
    writer.finish()


@contextlib.contextmanager
def _threads(walk: Walk) -> Iterator[None]:
    """Without activations to compute, leave two cores to the threads that write and that hash the source.

    Threads of one sum that wait for each other while their cores are taken cost a walk on two cores 12 % of its time.
    """
    threads = torch.get_num_threads()
    if not walk.has_text:
        torch.set_num_threads(max(1, threads - 2))
    try:
        yield
    finally:
        torch.set_num_threads(threads)
