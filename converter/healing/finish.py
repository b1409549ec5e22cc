"""What a healing run does when the last step is trained: a list of steps.

Each can be done again, from the snapshots and from what was noted: a run that was stopped before, in or after any of
them goes on with `--resume` to the same bytes, and trains no step twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from converter.families.opened import SourceModel
from converter.files.output import OutputFolder
from converter.healing import records
from converter.healing.controls import Start, run_controls
from converter.healing.export import check_export, export_weights, layout_of
from converter.healing.export import write_metadata as write_files
from converter.healing.job import Job
from converter.healing.launch import first
from converter.healing.report import HealReport, comparisons_from
from converter.healing.trainee import Trainee
from converter.measure.models import load
from converter.measure.verify import compare
from converter.show.progress import Progress
from converter.text.gather import HealTexts

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass
class Trained:
    """A run whose trainee holds the weights of the best evaluation; the main process's `report` grows step by step."""

    job: Job
    texts: HealTexts
    accelerator: Accelerator
    output: OutputFolder
    #: Until the weights are written.
    trainee: Trainee | None
    #: Whether each process has the whole model.
    whole: bool
    report: HealReport
    control: bool
    starts: Sequence[Start]
    resume: bool
    progress: Progress


def write_weights(run: Trained) -> None:
    """The weights, which all processes gather; the model's memory is free afterwards."""
    assert run.trainee is not None
    folder = run.output.partial if run.accelerator.is_main_process else None
    export_weights(run.trainee.gathered(), layout_of(run.job.converted, run.job.dtype), folder, run.job.shard_size)
    run.trainee = None
    run.accelerator.free_memory()


def train_controls(run: Trained) -> None:
    """What the healed model is to be compared with, where that was asked for; each control has its own snapshots."""
    if run.control or run.starts:
        controls = run_controls(
            *(run.job, run.texts, run.accelerator, run.output.work / "controls", run.progress),
            fine_tuned=run.control,
            starts=run.starts,
            resume=run.resume,
        )
        run.report = dataclasses.replace(run.report, controls=controls)


def write_metadata(run: Trained) -> None:
    """Config, generation config, tokenizer and recipe."""
    job = run.job
    write_files(job.converted, run.output.partial, job.dtype, job.config)


def check_files(run: Trained) -> None:
    """Every name, shape and dtype must be in the files."""
    check_export(run.output.partial, run.job.converted, layout_of(run.job.converted, run.job.dtype))


def compare_with_source(run: Trained) -> None:
    """Put into the report how far the model was from its source and is now, where one process can hold both."""
    if run.job.source is None or not run.whole:
        return
    found = run.output.recall("comparisons")
    if found is None:
        found = _compare(run)
        run.output.note("comparisons", found)
    run.report = dataclasses.replace(run.report, **comparisons_from(found))


def _compare(run: Trained) -> dict[str, Any]:
    job, source = run.job, run.job.source
    assert source is not None
    written = SourceModel.open(run.output.partial)
    measured = run.texts.windows(job.compared_context, job.settings.evaluation_tokens)
    device = str(run.accelerator.device)
    teacher, others = load(source).to(device), {"before": job.converted, "after": written}
    return {name: compare(teacher, load(each).to(device), measured).to_dict() for name, each in others.items()}


def write_record(run: Trained) -> None:
    """`healing.json`, and `conversion.json` brought up to date."""
    records.write_record(run.report, run.job.converted.checkpoint.path, run.output.partial)


def write_figures(run: Trained) -> None:
    """The conversion's figures, and the curves of the healing."""
    records.write_figures(run.report, run.job.converted.checkpoint.path, run.output.partial)


def write_card(run: Trained) -> None:
    """The conversion's card, and a section about the healing."""
    records.write_card(run.report, run.job.converted.checkpoint.path, run.output.partial)


def commit(run: Trained) -> None:
    """Make the folder the target, with the report kept for a run that comes after this rename."""
    run.output.note("report", run.report.to_dict())
    run.output.commit()


def clear(run: Trained) -> None:
    """Remove what the run went on from."""
    run.output.clear()


Step = Callable[[Trained], None]


def by_main(step: Step) -> Step:
    """A step that the main process does while the others wait."""

    def run_step(run: Trained) -> None:
        first(run.accelerator, lambda: step(run))

    run_step.__name__ = step.__name__
    return run_step


AFTER_THE_TRAINING: tuple[Step, ...] = (
    write_weights,
    train_controls,
    by_main(write_metadata),
    by_main(check_files),
    by_main(compare_with_source),
    by_main(write_record),
    by_main(write_figures),
    by_main(write_card),
    by_main(commit),
    by_main(clear),
)
