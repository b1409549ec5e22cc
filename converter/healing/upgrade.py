"""Convert, then heal, in one go."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from converter.conversion.plan import DtypeName
from converter.conversion.run import convert
from converter.errors import ConverterError
from converter.healing.controls import Start
from converter.healing.launch import first, join
from converter.healing.report import HealReport
from converter.healing.run import heal
from converter.measure.models import pick_device
from converter.show.progress import Progress
from converter.text.documents import HUB_PREFIX
from converter.text.gather_heal import listed


def upgrade(
    source: str | Path,
    target: str | Path,
    *,
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
    """Convert the checkpoint `source`, heal the result with it as the teacher, and write folder `target`.

    One recipe holds the steps of the conversion and the settings of the healing. The conversion's record, card and
    figures are in the result too. With `resume` both go on from where they were stopped. Raises a ConverterError for
    bad input, and InterruptedRunError after a SIGTERM.
    """
    text, eval_text = listed(text), listed(eval_text)
    _check_text((*text, *eval_text))
    target = Path(target).resolve()
    work = target.with_name(f".{target.name}.converted")
    converted = work / target.name  # the name that its card tells

    def once() -> None:
        if resume and converted.exists():
            return
        convert(
            source,
            converted,
            recipe=recipe,
            overrides=overrides,
            text=text,
            eval_text=eval_text,
            device=device,
            overwrite=overwrite,
            resume=resume,
            progress=progress,
        )

    state = join(pick_device(device))
    first(state, once)
    report = heal(
        converted,
        target,
        teacher=source,
        text=text,
        eval_text=eval_text,
        control=control,
        starts=starts,
        dtype=dtype,
        device=device,
        max_shard_size=max_shard_size,
        log_with=log_with,
        overwrite=overwrite,
        resume=resume,
        progress=progress,
    )
    first(state, lambda: shutil.rmtree(work))
    return report


def _check_text(texts: Sequence[str | Path]) -> None:
    """A conversion reads plain text and token files; healing reads more."""
    for text in texts:
        if str(text).startswith(HUB_PREFIX) or Path(text).is_dir() or Path(text).suffix in (".jsonl", ".parquet"):
            raise ConverterError(
                "the conversion reads plain text, .npy and .bin files only",
                where=str(text),
                fix="Convert with such a file, then heal with this text: `converter convert`, `converter heal`",
            )
