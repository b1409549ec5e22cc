"""Heal one checkpoint: open, train, export, measure, report. The output appears by one rename or not at all."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from converter import __version__
from converter.conversion.plan import DtypeName
from converter.files.output import OutputFolder
from converter.healing.controls import Start, run_controls
from converter.healing.export import check_export, config_changes, export_weights, layout_of, write_metadata
from converter.healing.job import Job, heal_settings, open_job
from converter.healing.launch import first, start
from converter.healing.loop import Outcome
from converter.healing.parts import Learner, make_loop, roles_of
from converter.healing.recorded import RECORDS
from converter.healing.report import HealReport, write_reports
from converter.healing.snapshots import Snapshots
from converter.measure.models import load, load_transformers, pick_device
from converter.measure.verify import compare
from converter.show.progress import Progress
from converter.text.gather_heal import HealTexts, gather_heal_texts, listed
from converter.text.windows import windows

if TYPE_CHECKING:
    from accelerate import Accelerator

#: Where a run keeps its tokens and snapshots until it is over, inside the unfinished output.
_WORK = ".heal"


def heal(
    converted: str | Path,
    target: str | Path,
    *,
    teacher: str | Path | None = None,
    text: str | Path | Sequence[str | Path] = (),
    eval_text: str | Path | Sequence[str | Path] = (),
    recipe: str | None = None,
    overrides: Iterable[str] = (),
    control: bool = False,
    starts: Sequence[Start] = (),
    dtype: DtypeName | None = None,
    device: str = "auto",
    max_shard_size: str | int = "5GB",
    log_with: Sequence[str] = (),
    overwrite: bool = False,
    resume: bool = False,
    progress: Progress | None = None,
) -> HealReport:
    """Fine-tune the checkpoint in folder `converted`, by default to agree with its source, into folder `target`.

    `teacher` is the source that it was converted from. Settings are those of `recipe` (a name or file), or of the
    `recipe.yaml` beside the converted checkpoint, with `heal.x=y` overrides. A tenth of `text` is held out to measure
    on, unless `eval_text` names other files. With `control` the source is fine-tuned on the same batches; `starts`
    names other starts to heal in the same way. `resume` goes on from the newest snapshot of a run that was stopped.
    Raises a ConverterError for bad input, and InterruptedRunError after a SIGTERM.
    """
    job = open_job(heal_settings(Path(converted), recipe, overrides), converted, teacher, dtype, max_shard_size)
    output = OutputFolder(Path(target), overwrite=overwrite, resume=resume, source=job.converted.checkpoint.opened)
    accelerator = start(pick_device(device), job.settings, log_with, output.partial / "logs")
    progress = progress if progress is not None and accelerator.is_main_process else Progress()
    work = output.partial / _WORK
    with ExitStack() as stack:
        first(accelerator, lambda: stack.enter_context(output))
        with accelerator.main_process_first():  # the others read what it has put into the cache
            texts = gather_heal_texts(job.source or job.converted, listed(text), listed(eval_text), work / "tokens")
        _announce(job, texts, progress)
        snapshots = Snapshots(work, job.fingerprint(texts), job.settings.keep, accelerator)
        try:
            outcome, whole = _train(job, texts, accelerator, snapshots, output.partial, progress, resume)
        finally:
            output.keep_partial = bool(snapshots.steps() or any(work.glob(RECORDS)))
        accelerator.free_memory()
        report = _report(job, texts, outcome, Path(target))
        if control or starts:
            controls = run_controls(
                *(job, texts, accelerator, work / "controls", progress),
                fine_tuned=control,
                starts=starts,
                resume=resume,
            )
            report = dataclasses.replace(report, controls=controls)

        def finish() -> HealReport:
            finished = _finish(job, texts, report, output.partial, str(accelerator.device), whole)
            output.commit()
            return finished

        return first(accelerator, finish) or report


def _announce(job: Job, texts: HealTexts, progress: Progress) -> None:
    """What a user should know before hours are spent."""
    epochs = job.settings.tokens / texts.corpus.tokens
    progress.say(f"{texts.corpus.tokens:,} tokens of text, to be seen {epochs:.3g} times.")
    if job.source is not None and job.context > job.source.spec.context and job.settings.losses["ce"].weight == 0:
        progress.say(
            f"Note: the teacher sees {job.source.spec.context} tokens, so nothing is learnt at later positions: "
            "give heal.ce a weight."
        )


def _train(
    job: Job,
    texts: HealTexts,
    accelerator: Accelerator,
    snapshots: Snapshots,
    folder: Path,
    progress: Progress,
    resume: bool,
) -> tuple[Outcome, bool]:
    """Train, and write the best weights; how it went, and whether each process had the whole model."""
    learner = Learner(load_transformers(job.converted), roles_of(job.converted), job.source, job.theta)
    loop = make_loop(learner, job.settings, texts, job.context, accelerator, folder / _WORK, progress.say)
    accelerator.init_trackers("heal", config=job.settings.to_dict())
    try:
        outcome = loop.run(folder, snapshots, progress, resume)
    finally:
        for tracker in accelerator.trackers:  # `end_training` would take the process group too
            tracker.finish()
        accelerator.trackers.clear()
    writes = folder if accelerator.is_main_process else None
    export_weights(loop.trainee.gathered(), layout_of(job.converted, job.dtype), writes, job.shard_size)
    return outcome, loop.trainee.whole


def _report(job: Job, texts: HealTexts, outcome: Outcome, target: Path) -> HealReport:
    return HealReport(
        target=target,
        tool_version=__version__,
        converted=job.converted.checkpoint.name,
        source=None if job.source is None else job.source.checkpoint.name,
        settings=job.settings.to_dict(),
        text=texts.description,
        steps=outcome.steps,
        tokens=outcome.tokens,
        skipped=outcome.skipped,
        tokens_per_second=outcome.tokens_per_second,
        evaluations=tuple(outcome.evaluations),
        best=outcome.best,
    )


def _finish(job: Job, texts: HealTexts, report: HealReport, folder: Path, device: str, whole: bool) -> HealReport:
    """Complete the folder, prove it by reloading, and measure it against the source where one process can hold both."""
    changes = config_changes(job.converted, job.theta, job.context)
    write_metadata(job.converted, folder, job.dtype, job.generation_config, changes)
    written = check_export(folder, job.converted, layout_of(job.converted, job.dtype))
    if job.source is not None and whole:
        context = min(job.context, job.source.spec.context, job.converted.spec.context)
        measured = windows(texts.held_out, context, job.settings.evaluation_tokens)
        source = load(job.source).to(device)
        before, after = (compare(source, load(each).to(device), measured) for each in (job.converted, written))
        report = dataclasses.replace(report, before=before, after=after)
    write_reports(report, job.converted.checkpoint.path, folder, job.theta)
    shutil.rmtree(folder / _WORK)
    return report
