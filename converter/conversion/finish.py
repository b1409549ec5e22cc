"""What a conversion does when every block is written: a list of steps.

Each step can be done again, and what takes long is noted when it is done: a run that was stopped before, in or after
any of them goes on with `--resume` to the same bytes, and converts no block twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from converter.blocks import blocks
from converter.conversion.plan import Plan
from converter.conversion.report import EXACT_TOLERANCE, ConversionReport, verification_from
from converter.conversion.streamed import compare_streamed, fits
from converter.conversion.walk import Findings, Walk, spread
from converter.errors import VerificationError
from converter.families.companions import write_companions
from converter.families.opened import SourceModel
from converter.families.rotating import source_digests
from converter.files.json_text import write_json
from converter.files.output import OutputFolder
from converter.files.record import save_record
from converter.measure.metrics import Comparison
from converter.measure.models import TransformersModel, load, load_written, tokens_per_second
from converter.measure.verify import compare
from converter.measure.yardstick import yardstick
from converter.reference import run_embeddings, run_layer
from converter.show.card import model_card
from converter.show.figures import draw_figures
from converter.show.progress import Progress
from converter.text.gather import Texts
from converter.text.windows import Windows

#: What runs source and result for the verification.
_BY_CLASSES = "transformers' own class of each"
_BY_REFERENCE = "the reference forward, where transformers has no class"
_STREAMED = "the reference forward of each, block by block: both together do not fit into memory"


@dataclass
class Written:
    """A conversion whose blocks lie in `weights`, as safetensors; `report` grows step by step."""

    plan: Plan
    findings: Findings
    texts: Texts | None
    verify: bool
    device: str
    output: OutputFolder
    weights: Path
    report: ConversionReport
    progress: Progress


def hold_exact_ops(run: Written) -> None:
    """Raise VerificationError where an exact op changed the function; what passes is kept, whatever comes."""
    if not run.report.passed:
        run.report = _without_rounding(run)
    if run.report.passed:
        run.output.keep()
        return
    step = next(step for step in run.report.steps if not step.passed)
    raise VerificationError(
        f"exact op '{step.name}' changed the function: logits moved by {step.relative_change:.2e} of the largest",
        why=f"an exact op may move them by {EXACT_TOLERANCE:.0e}, {step.measured_in} measured. Nothing was written",
        fix="This is a defect of the op, or weights of extreme size; please report it with the output of inspect",
    )


#: Tokens of the second look, and what rounding in fp32 never makes: SmolLM2-135M, 30 layers of quantised weights, is
#: at 2.1e-5 of the largest logit when the rows of q and k change places.
_SECOND_LOOK, _LARGEST_ROUNDING = 1024, 1e-3


def _without_rounding(run: Written) -> ConversionReport:
    """The report with the changes of the exact ops that failed measured again, in fp64.

    In fp32 a deep model differs from itself when its sums are only taken in another order. In fp64 what an op does
    to the function is left. A change that rounding cannot make stays as it was measured.
    """
    report, texts = run.report, run.texts
    again = [not step.passed and (step.relative_change or 0) <= _LARGEST_ROUNDING for step in report.steps]
    if texts is None or not any(again):
        return report
    run.progress.say("An exact op moved logits by more than rounding usually does: measuring again in fp64.")
    windows = spread(texts.evaluation, _SECOND_LOOK)
    walk = Walk(run.plan, texts.calibration, windows, device=run.device, dtype=torch.float64)
    for _ in walk:
        pass
    steps = (
        dataclasses.replace(step, relative_change=change, measured_in="fp64") if chosen else step
        for step, change, chosen in zip(report.steps, walk.findings.changes, again, strict=True)
    )
    return dataclasses.replace(report, steps=tuple(steps))


def write_metadata(run: Written) -> None:
    """Config, tokenizer, generation config and recipe."""
    plan, folder = run.plan, run.output.partial
    write_json(run.weights / "config.json", plan.config())
    write_companions(plan.source, folder)
    (folder / "recipe.yaml").write_text(plan.recipe.to_yaml(), encoding="utf-8")


def write_container(run: Written) -> None:
    """The target's own files, where it keeps no safetensors."""
    if run.plan.target.own_container:
        run.plan.target.write_container(run.weights, run.output.partial, run.plan.target_spec)


def verify_files(run: Written) -> None:
    """Put into the report what transformers' classes of the source and of the written files say."""
    if not run.verify or run.texts is None:
        return
    found = run.output.recall("verification")
    if found is None:
        found = _measure(run, run.texts)
        run.output.note("verification", found)
    run.report = dataclasses.replace(run.report, **verification_from(found))


def _measure(run: Written, texts: Texts) -> dict[str, Any]:
    """The comparison, the yardstick and the speeds; nothing where there is no real text."""
    run.progress.stage("verify", 3, unit="steps")
    folder, source, windows = run.output.partial, run.plan.source, texts.evaluation
    speeds = None
    if whole := fits(source.parameters + run.plan.parameters, run.device):
        models = (load(source).to(run.device), load_written(folder).to(run.device))
        run.progress.advance(1)
        comparison = compare(*models, windows)
        own = all(isinstance(model, TransformersModel) for model in models)
        verified_by = _BY_CLASSES if own else _BY_REFERENCE
        if texts.real:
            speeds = [tokens_per_second(model, windows) for model in models]
        del models
    else:
        comparison = compare_streamed(source, SourceModel.open(folder), windows, run.device)
        verified_by = _STREAMED
        run.progress.advance(1)
    run.progress.advance(1)
    _check_against_walk(run.findings.comparisons[-1], comparison, folder, windows, whole)
    if not texts.real:
        return {}
    shifts = yardstick(source, windows, run.device) if source.spec.absolute_positions else ()
    run.progress.advance(1)
    return {
        "verification": comparison.to_dict(),
        "verified_by": verified_by,
        "yardstick": [dataclasses.asdict(each) for each in shifts],
        "speed": speeds,
    }


def _check_against_walk(claimed: Comparison, found: Comparison, folder: Path, evaluation: Windows, whole: bool) -> None:
    """The files must cost what the walk measured; otherwise name the first block where they part."""
    if abs(found.total.kl - claimed.total.kl) <= 1e-5 + 0.01 * claimed.total.kl:
        return
    raise VerificationError(
        f"the written files are {found.total.kl:.3e} nats per token from the source, and the conversion "
        f"measured {claimed.total.kl:.3e}",
        why="a reader computes something else from the files than the conversion did"
        + (": " + _parting(folder, evaluation) if whole else ""),
        fix="This is a defect; please report it with the output of inspect",
    )


def _parting(folder: Path, evaluation: Windows) -> str:
    """The first block of a written checkpoint whose states differ between transformers and the reference model."""
    written, loaded = SourceModel.open(folder), load_written(folder)
    if not isinstance(loaded, TransformersModel):
        return "the files do not hold what was converted"
    ids = torch.from_numpy(evaluation.ids[:1])
    with torch.no_grad():
        hidden = loaded.model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
        states = torch.empty(0)
        for depth, ref in enumerate(list(blocks(written.spec))[:-1]):
            block = written.read_block(ref, torch.float32)
            if ref.kind == "embeddings":
                states = run_embeddings(block, written.spec, ids)
            else:
                states = run_layer(block, written.spec, ref.index, states)
            if depth < written.spec.num_layers:  # transformers' last entry has passed the final norm
                error = float((hidden[depth] - states).norm() / states.norm())
                if error > 1e-3:
                    return f"{ref} is the first block whose output differs, by {error:.1%}"
    return "all blocks but the last layer and the head agree"


def write_record(run: Written) -> None:
    """`conversion.json`."""
    record = run.report.to_dict() | {"spec": run.plan.target_spec.to_dict()}
    del record["speed"]  # this machine's; everything else is the same in every run
    folder = run.output.partial
    save_record(folder, record, source_digests(SourceModel.open(folder)))


def write_figures(run: Written) -> None:
    """Figures, where something was measured."""
    if run.report.verification is not None:
        draw_figures(run.report.steps, run.report.verification, run.output.partial / "figures")


def write_card(run: Written) -> None:
    """`README.md`."""
    (run.output.partial / "README.md").write_text(model_card(run.report), encoding="utf-8")


def commit(run: Written) -> None:
    """Make the folder the target, with the report kept for a run that comes after this rename."""
    run.output.note("report", run.report.to_dict())
    run.output.commit()


def clear(run: Written) -> None:
    """Remove what the run went on from."""
    run.output.clear()


AFTER_THE_WALK: tuple[Callable[[Written], None], ...] = (
    hold_exact_ops,
    write_metadata,
    write_container,
    verify_files,
    write_record,
    write_figures,
    write_card,
    commit,
    clear,
)
