"""Convert one checkpoint: plan, walk, write, verify, report. The output appears by one rename or not at all."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from converter import __version__
from converter.blocks import blocks
from converter.conversion.plan import DtypeName, Plan, make_plan
from converter.conversion.recipe import Recipe, load_recipe, with_overrides
from converter.conversion.report import EXACT_TOLERANCE, ConversionReport, Cost, StepReport
from converter.conversion.resume import Journal
from converter.conversion.walk import Findings, State, Walk
from converter.errors import ConverterError, VerificationError
from converter.families.opened import SourceModel
from converter.files.checkpoint import SourceHash
from converter.files.json_text import write_json
from converter.files.output import OutputFolder
from converter.files.tokenizer import load_tokenizer, same_ids, write_tokenizer
from converter.files.writer import CheckpointWriter, parse_size
from converter.measure.inspect import warnings
from converter.measure.metrics import Comparison
from converter.measure.models import TransformersModel, load, load_written, pick_device, tokens_per_second
from converter.measure.verify import compare
from converter.measure.vocabulary import Vocabulary
from converter.measure.yardstick import yardstick
from converter.reference import flops_per_token, run_embeddings, run_layer
from converter.show.card import model_card
from converter.show.figures import draw_figures
from converter.show.progress import Progress
from converter.spec import ModelSpec
from converter.text.gather import Texts, calibrated_step, gather_texts
from converter.text.windows import Windows, as_paths


def plan_conversion(
    source: str | Path | SourceModel,
    recipe: str | Recipe | None = None,
    overrides: Iterable[str] = (),
    dtype: DtypeName | None = None,
) -> Plan:
    """The plan for a checkpoint and a recipe (a shipped name, a file, or None for the family's own)."""
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
    return make_plan(opened, with_overrides(recipe, overrides), dtype)


def check_conversion(
    plan: Plan,
    target: str | Path,
    text: str | Path | Sequence[str | Path] = (),
    eval_text: str | Path | Sequence[str | Path] = (),
    max_shard_size: str | int = "5GB",
    overwrite: bool = False,
    resume: bool = False,
) -> None:
    """Raise the ConverterError that `convert` would raise for its target, its text, or the size of its shards."""
    parse_size(max_shard_size)
    OutputFolder(Path(target), overwrite=overwrite, resume=resume, source=plan.source.checkpoint.opened).check()
    if text or eval_text:
        gather_texts(plan, as_paths(text), as_paths(eval_text))


def convert(
    source: str | Path,
    target: str | Path,
    *,
    recipe: str | Recipe | None = None,
    overrides: Iterable[str] = (),
    text: str | Path | Sequence[str | Path] = (),
    eval_text: str | Path | Sequence[str | Path] = (),
    dtype: DtypeName | None = None,
    device: str = "auto",
    max_shard_size: str | int = "5GB",
    overwrite: bool = False,
    resume: bool = False,
    verify: bool = True,
    progress: Progress | None = None,
) -> ConversionReport:
    """Convert the checkpoint in folder `source` into the folder `target`.

    `text` are files for calibration, of which a tenth is held out to measure damage on unless
    `eval_text` names other files. `resume` goes on from the last finished block of a run of the same
    conversion that was killed. Raises a ConverterError for bad input, and VerificationError where an
    exact op did not keep the function or the written files compute something else than the conversion.
    """
    progress = progress or Progress()
    opened = SourceModel.open(source)
    source_hash = SourceHash(opened.checkpoint).start()
    plan = plan_conversion(opened, recipe, overrides, dtype)
    for warning in warnings(opened):
        progress.say(f"Note: {warning.rstrip('.')}.")
    device = pick_device(device)
    shard_size = parse_size(max_shard_size)
    with OutputFolder(Path(target), overwrite=overwrite, resume=resume, source=opened.checkpoint.opened) as output:
        output.check_space(plan.output_bytes)
        texts = None
        if verify or calibrated_step(plan) is not None:
            texts = gather_texts(plan, as_paths(text), as_paths(eval_text))
        evaluation = texts.evaluation if texts and verify else None
        walk = Walk(plan, texts.calibration if texts else None, evaluation, device=device, progress=progress.detail)
        journal = Journal(output.partial, _fingerprint(plan, texts, shard_size, verify))
        _write(plan, walk, journal, output.partial, shard_size, progress)
        report = _report(plan, walk.findings, texts, source_hash.result(), Path(target))
        if not report.passed:
            raise _exact_op_failed(report)
        _write_metadata(plan, output.partial)
        plan.target.finish(output.partial, plan.target_spec)
        if verify and texts is not None:
            report = _verified(plan, walk.findings, report, output.partial, texts, device, progress)
        _write_reports(plan, report, output.partial)
        journal.remove()
        output.commit()
    return report


def _fingerprint(plan: Plan, texts: Texts | None, shard_size: int, verify: bool) -> dict[str, Any]:
    """What makes two runs the same conversion."""
    windows = [texts.calibration, texts.evaluation] if texts else []
    digests = [hashlib.sha256(w.ids.tobytes() + w.lengths.tobytes()).hexdigest() for w in windows if w is not None]
    return {
        "tool": __version__,
        "source": plan.source.checkpoint.stats(),
        "recipe": plan.recipe.to_yaml(),
        "text": digests,
        "shards": shard_size,
        "verification": verify,
    }


def _write(plan: Plan, walk: Walk, journal: Journal, folder: Path, shard_size: int, progress: Progress) -> None:
    """Walk and write, block by block, from where the journal says that an earlier run got to."""
    progress.stage("convert", plan.output_bytes)
    saved = journal.load()
    if saved is not None:
        walk.restore(*saved)
    finished = walk.finished_names()
    writer = CheckpointWriter(folder, plan.tensors, shard_size, resume=saved is not None, already_written=finished)
    progress.advance(sum(plan.tensor_bytes(name) for name in finished))
    if (seconds := walk.seconds()) > 1:
        progress.say(f"About {seconds:.0f} s of activations for calibration and measuring.")

    def write_block(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
            progress.advance(plan.tensor_bytes(name))
        tensors.clear()  # one block in memory

    def note_block(written: Future[None], number: int, state: State) -> None:
        written.result()
        writer.sync()
        journal.save(number, *state)

    # A block is written while the next one is converted, and the one before is waited for on its way to the disk.
    with (
        _threads(walk),
        _large_blocks_apart(walk),
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


#: Of glibc's malloc.h.
_M_MMAP_THRESHOLD = -3


@contextlib.contextmanager
def _large_blocks_apart(walk: Walk) -> Iterator[None]:
    """With activations to compute, have glibc map each large block by itself, and give it back when it is freed.

    Otherwise it takes all up to 32 MB from one heap that only grows: a fit left holes of hundreds of megabytes there.
    """
    setting = getattr(ctypes.CDLL(None), "mallopt", None) if walk.has_text else None
    if setting:
        setting(_M_MMAP_THRESHOLD, 1 << 20)
    try:
        yield
    finally:
        if setting:
            setting(_M_MMAP_THRESHOLD, 32 << 20)  # where glibc would have got to by itself


def _report(
    plan: Plan, findings: Findings, texts: Texts | None, hashes: dict[str, str], target: Path
) -> ConversionReport:
    source, rope = plan.source, plan.target_spec.rope
    return ConversionReport(
        source=source.checkpoint.name,
        source_family=source.family.name,
        target_family=plan.target.name,
        target=target,
        tool_version=__version__,
        recipe=plan.recipe.name,
        source_sha256=hashes,
        source_dropped=tuple(source.dropped),
        ignored_config={key: why for key, why in source.config_accounts.items() if why != "read"},
        rope=None if rope is None else {**dataclasses.asdict(rope), "layout": rope.layout.value},
        dtype=plan.dtype,
        source_cost=Cost(source.parameters, source.checkpoint.total_bytes, _flops(source.spec)),
        target_cost=Cost(plan.parameters, plan.output_bytes, _flops(plan.target_spec)),
        text=texts.description if texts else "nothing: --no-verify",
        steps=tuple(_step_report(plan, findings, index, texts) for index in range(len(plan.steps))),
        verification=None,
    )


def _flops(spec: ModelSpec) -> int:
    return flops_per_token(spec, spec.context)


def _step_report(plan: Plan, findings: Findings, index: int, texts: Texts | None) -> StepReport:
    step = plan.steps[index]
    measured = bool(findings.comparisons)
    return StepReport(
        name=step.op.name,
        parameters=dict(vars(step.op)),
        exact=step.exact,
        needed=step.needed,
        dropped=tuple(findings.dropped[index]),
        facts=findings.facts[index],
        errors=findings.errors[index],
        drift=tuple(findings.drifts[index]),
        own_error=tuple(findings.own_errors[index]),
        comparison=findings.comparisons[index] if measured and texts and texts.real else None,
        relative_change=findings.changes[index] if measured else None,
    )


def _exact_op_failed(report: ConversionReport) -> VerificationError:
    step = next(step for step in report.steps if not step.passed)
    return VerificationError(
        f"exact op '{step.name}' changed the function: logits moved by {step.relative_change:.2e} of the largest",
        why=f"an exact op may move them by {EXACT_TOLERANCE:.0e}. Nothing was written",
        fix="This is a defect of the op, or weights of extreme size; please report it with the output of inspect",
    )


def _write_metadata(plan: Plan, folder: Path) -> None:
    """Config, tokenizer, generation config and recipe."""
    ids = plan.source.token_ids()
    config = plan.target.write_config(plan.target_spec) | ids
    config |= {"dtype": plan.dtype, "torch_dtype": plan.dtype, "use_cache": True}
    write_json(folder / "config.json", config)
    inherited = plan.source.checkpoint.generation_config or {}
    kept = {key: value for key, value in inherited.items() if not key.startswith(("_", "transformers_version"))}
    write_json(folder / "generation_config.json", {**kept, **ids})
    if write_tokenizer(plan.source.checkpoint.path, folder):
        before, after = load_tokenizer(plan.source.checkpoint.path), load_tokenizer(folder)
        assert before is not None
        assert after is not None
        same_ids(before, after)
    (folder / "recipe.yaml").write_text(plan.recipe.to_yaml(), encoding="utf-8")


def _verified(
    plan: Plan,
    findings: Findings,
    report: ConversionReport,
    folder: Path,
    texts: Texts,
    device: str,
    progress: Progress,
) -> ConversionReport:
    """The report with what transformers' class of the source and of the written files say."""
    progress.stage("verify", 3, unit="steps")
    models = (load(plan.source).to(device), load_written(folder).to(device))
    progress.advance(1)
    comparison = compare(*models, texts.evaluation)
    progress.advance(1)
    _check_against_walk(findings.comparisons[-1], comparison, folder, texts.evaluation)
    if not texts.real:
        return report
    speeds = [tokens_per_second(model, texts.evaluation) for model in models]
    report = dataclasses.replace(
        report,
        verification=comparison,
        yardstick=yardstick(plan.source, texts.evaluation, device) if plan.source.spec.absolute_positions else (),
        speed=(speeds[0], speeds[1]),
    )
    progress.advance(1)
    return report


def _check_against_walk(claimed: Comparison, found: Comparison, folder: Path, evaluation: Windows) -> None:
    """The files must cost what the walk measured; otherwise name the first block where they part."""
    if abs(found.total.kl - claimed.total.kl) <= 1e-5 + 0.01 * claimed.total.kl:
        return
    raise VerificationError(
        f"the written files are {found.total.kl:.3e} nats per token from the source, and the conversion "
        f"measured {claimed.total.kl:.3e}",
        why="a reader computes something else from the files than the conversion did: " + _parting(folder, evaluation),
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


def _write_reports(plan: Plan, report: ConversionReport, folder: Path) -> None:
    record = report.to_dict() | {"spec": plan.target_spec.to_dict()}
    del record["speed"]  # this machine's; everything else is the same in every run
    write_json(folder / "conversion.json", record)
    if report.verification is not None:
        draw_figures(report.steps, report.verification, folder / "figures")
    (folder / "README.md").write_text(model_card(report), encoding="utf-8")
