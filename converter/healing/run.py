"""Heal one checkpoint: open, train, and the steps of `finish`. The output appears by one rename or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from converter import __version__
from converter.conversion.plan import DtypeName
from converter.conversion.run import recipe_files
from converter.families.companions import pad_remark
from converter.files.output import OutputFolder
from converter.healing.controls import Start
from converter.healing.export import refuse_overflow
from converter.healing.finish import AFTER_THE_TRAINING, Trained
from converter.healing.job import Job, heal_settings, open_job
from converter.healing.launch import first, share, start
from converter.healing.loop import Outcome
from converter.healing.parts import Learner, make_loop, roles_of
from converter.healing.recorded import RECORDS
from converter.healing.report import HealReport
from converter.healing.snapshots import Snapshots
from converter.healing.trainee import Trainee
from converter.measure.models import load_transformers, pick_device
from converter.show.progress import Progress
from converter.text.gather import HealTexts, gather_heal_texts
from converter.text.sources import Text, listed

if TYPE_CHECKING:
    from accelerate import Accelerator


def heal(
    converted: str | Path,
    target: str | Path,
    *,
    teacher: str | Path | None = None,
    text: Text | Sequence[Text] = (),
    eval_text: Text | Sequence[Text] = (),
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
    names other starts to heal in the same way. `resume` goes on from the newest snapshot of a run that was stopped,
    or from the step after the training that it was at. Raises a ConverterError for bad input, and InterruptedRunError
    after a SIGTERM.
    """
    job = open_job(heal_settings(Path(converted), recipe, overrides), converted, teacher, dtype, max_shard_size)
    read = [model.checkpoint.opened for model in (job.converted, job.source) if model is not None]
    inputs = (*read, *listed(text), *listed(eval_text), *recipe_files(recipe))
    output = OutputFolder(Path(target), overwrite=overwrite, resume=resume, inputs=inputs)
    accelerator = start(pick_device(device), job.settings, log_with, output.partial / "logs")
    with ExitStack() as stack:
        first(accelerator, lambda: stack.enter_context(output))
        return heal_into(
            output, job, accelerator, text, eval_text, control=control, starts=starts, resume=resume, progress=progress
        )


def heal_into(
    output: OutputFolder,
    job: Job,
    accelerator: Accelerator,
    text: Text | Sequence[Text],
    eval_text: Text | Sequence[Text],
    *,
    control: bool,
    starts: Sequence[Start],
    resume: bool,
    progress: Progress | None,
) -> HealReport:
    """Heal into a folder that the main process has entered."""
    progress = progress if progress is not None and accelerator.is_main_process else Progress()
    with accelerator.main_process_first():  # the others read what it has put into the cache
        texts = gather_heal_texts(
            *(job.reader, listed(text), listed(eval_text), output.work / "tokens"),
            learn=job.settings.tokens,
            hold=job.settings.evaluation_tokens,
        )
    fingerprint = job.fingerprint(texts) | {"controls": [*(["source fine-tuned"] if control else []), *starts]}
    first(accelerator, lambda: output.claim("healing", fingerprint))
    if share(accelerator, output.finished):
        return HealReport.from_dict(output.recall("report"), output.target)
    _announce(job, texts, progress)
    snapshots = Snapshots(output.work, job.settings.keep, accelerator)
    try:
        outcome, trainee = _train(job, texts, accelerator, snapshots, output, progress, resume)
    finally:
        if snapshots.steps() or any(output.work.glob(RECORDS)):
            output.keep()
    report = _report(job, texts, outcome, output.target)
    trained = Trained(
        *(job, texts, accelerator, output, trainee, trainee.whole, report, control, starts, resume, progress)
    )
    del trainee  # `write_weights` frees it
    for step in AFTER_THE_TRAINING:
        step(trained)
    return trained.report


def _announce(job: Job, texts: HealTexts, progress: Progress) -> None:
    """What a user should know before hours are spent."""
    epochs = job.settings.tokens / texts.corpus.tokens
    progress.say(f"{texts.corpus.tokens:,} tokens of text, to be seen {epochs:.3g} times.")
    for note in texts.notes:
        progress.say(f"Note: {note}.")
    if remark := pad_remark(job.converted):
        progress.say(f"Note: {remark}.")
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
    output: OutputFolder,
    progress: Progress,
    resume: bool,
) -> tuple[Outcome, Trainee]:
    """Train to the best weights; how it went, and what holds them."""
    model = load_transformers(job.converted)
    for name, parameter in model.named_parameters():
        refuse_overflow(name, parameter.detach(), job.dtype)
    learner = Learner(model, roles_of(job.converted), job.source, job.theta)
    loop = make_loop(learner, job.settings, texts, job.context, accelerator, output.work, progress.say)
    accelerator.init_trackers("heal", config=job.settings.to_dict())
    try:
        outcome = loop.run(output.partial, snapshots, progress, resume)
    finally:
        for tracker in accelerator.trackers:  # `end_training` would take the process group too
            tracker.finish()
        accelerator.trackers.clear()
    return outcome, loop.trainee


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
