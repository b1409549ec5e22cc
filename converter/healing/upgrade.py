"""Convert, then heal, in one go."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

from converter.conversion.plan import DtypeName
from converter.conversion.run import Conversion, recipe_files
from converter.files.output import OutputFolder
from converter.healing.controls import Start
from converter.healing.export import check_exportable, check_generation_config
from converter.healing.job import heal_settings, open_job, what_is_learnt
from converter.healing.launch import first, join, start
from converter.healing.report import HealReport
from converter.healing.run import heal_into
from converter.measure.models import pick_device
from converter.show.progress import Progress
from converter.text.sources import Text, listed


def upgrade(
    source: str | Path,
    target: str | Path,
    *,
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
    """Convert the checkpoint `source`, heal the result with it as the teacher, and write folder `target`.

    One recipe holds the steps of the conversion and the settings of the healing. The conversion's record, card and
    figures are in the result too. With `resume` both go on from where they were stopped. Raises a ConverterError for
    bad input, and InterruptedRunError after a SIGTERM.
    """
    text, eval_text, overrides = listed(text), listed(eval_text), tuple(overrides)
    inputs = (source, *text, *eval_text, *recipe_files(recipe))
    output = OutputFolder(Path(target), overwrite=overwrite, resume=resume, inputs=inputs)
    converted = output.work / "converted" / output.target.name  # the name that its card tells
    state = join(pick_device(device))

    def convert_once() -> None:
        conversion = Conversion.open(source, recipe, overrides, device=device, progress=progress)
        plan = conversion.plan
        check_generation_config(plan.source)
        check_exportable(plan.target, f"recipe '{plan.recipe.name}'")
        what_is_learnt(plan.recipe.heal, plan.target, plan.target_spec, plan.config())
        stack.enter_context(output)
        conversion.gather(text, eval_text)
        fingerprint = conversion.fingerprint()
        output.claim("upgrade", {name: fingerprint[name] for name in fingerprint if not name.startswith("heal.")})
        if not converted.exists():
            _convert(conversion, converted, output)
        # Settings of the healing that change nothing about the conversion may be others now.
        (converted / "recipe.yaml").write_text(plan.recipe.to_yaml(), encoding="utf-8")

    with ExitStack() as stack:
        first(state, convert_once)
        job = open_job(heal_settings(converted, None, ()), converted, source, dtype, max_shard_size)
        accelerator = start(pick_device(device), job.settings, log_with, output.partial / "logs")
        return heal_into(
            output, job, accelerator, text, eval_text, control=control, starts=starts, resume=resume, progress=progress
        )


def _convert(conversion: Conversion, converted: Path, output: OutputFolder) -> None:
    """Convert, from where an earlier run got to, into the work that the upgrade keeps."""
    try:
        with OutputFolder(converted, resume=True) as inner:
            conversion.into(inner)
    finally:
        if converted.parent.exists() and any(converted.parent.iterdir()):
            output.keep()
