"""What healing reaches on the embedded example, and how fast the loop is beside transformers' Trainer.

    python benchmarks/heal.py --work runs/heal              # the figures; hours on two cores, and resumable
    python benchmarks/heal.py --work runs/heal --only kl    # one run: kl, mixed (KL + CE) or compact
    python benchmarks/heal.py --only speed                  # minutes

Converts the example, heals it, and holds what comes out against the goals. The runs with cross-entropy fine-tune the
source on the same batches too.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from converter.conversion.run import convert
from converter.conversion.settings import HealSettings
from converter.errors import ConverterError
from converter.families.opened import SourceModel
from converter.healing.launch import start
from converter.healing.loop import Loop
from converter.healing.parts import Learner, make_loop
from converter.healing.report import HealReport
from converter.healing.run import heal
from converter.measure.models import quiet_transformers
from converter.show.progress import Bars, progress
from converter.text.corpus import Corpus
from converter.text.documents import Document
from converter.text.gather import HealTexts

EXAMPLE = Path(__file__).parent.parent / "examples" / "tiny-gpt2"
#: How far the loss may be above that of the unhealed model at any evaluation.
_ABOVE = 0.005


@dataclass(frozen=True)
class Run:
    """One healing run: the recipe of the conversion, the settings, and how close to the control it must come."""

    recipe: str
    settings: tuple[str, ...]
    above_control: float | None = None


RUNS = {
    "kl": Run("gpt2-to-llama", ("heal.tokens=2M",)),
    "mixed": Run("gpt2-to-llama", ("heal.tokens=2M", "heal.ce=1"), above_control=0.01),
    "compact": Run("gpt2-to-llama-compact", ("heal.tokens=4M", "heal.ce=1"), above_control=0.03),
}


def healed(name: str, run: Run, work: Path, overrides: tuple[str, ...], bars: Bars) -> HealReport:
    """Convert once a recipe, then heal; a run that was stopped goes on."""
    converted = work / run.recipe
    if not converted.exists():
        convert(EXAMPLE, converted, recipe=run.recipe, resume=True, progress=bars)
    settings, control = (*run.settings, *overrides), run.above_control is not None
    return heal(
        converted,
        work / name,
        teacher=EXAMPLE,
        overrides=settings,
        control=control,
        resume=True,
        progress=bars,
        device="cpu",
    )


def goals(report: HealReport, run: Run, work: Path) -> list[tuple[str, float, float]]:
    """What was measured, and what it may be at most."""
    assert report.after is not None
    assert report.before is not None
    highest = max(each.loss for each in report.evaluations[1:])
    found = [("highest held-out loss of all evaluations", highest, report.evaluations[0].loss + _ABOVE)]
    if run.above_control is None:
        rows = json.loads((work / run.recipe / "conversion.json").read_text(encoding="utf-8"))["yardstick"]
        shift = next(row["figures"]["kl"] for row in rows if row["shift"] == 1 and not row["first_kept"])
        found.append(("held-out loss against the source's", report.after.total.loss, report.after.total.source_loss))
        found.append(("KL to the source", report.after.total.kl, max(0.02, 1.2 * shift)))
    else:
        assert report.control is not None
        best = report.control.best.loss
        found.append(("held-out loss against the control's", report.after.total.loss, best + run.above_control))
    return found


def small_models(folder: Path) -> tuple[Any, Any]:
    """A LLaMA to train and a GPT-2 to learn from: hidden size 256, 4 layers, GPT-2's vocabulary."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
    student = LlamaForCausalLM(LlamaConfig(vocab_size=50257, max_position_embeddings=256, **shape))
    teacher = GPT2LMHeadModel(GPT2Config(vocab_size=50257, n_positions=256, n_embd=256, n_layer=4, n_head=4))
    teacher.save_pretrained(folder / "teacher")
    return student, SourceModel.open(folder / "teacher")


def our_loop(student: Any, teacher: SourceModel | None, ids: np.ndarray[Any, Any], folder: Path) -> Loop:
    """Our loop over rows of 256 tokens, 8 a step."""
    settings = HealSettings(tokens=10**9).replace(kl=float(teacher is not None), ce=float(teacher is None))
    documents = [Document(str(number), row) for number, row in enumerate(ids)]
    texts = HealTexts(Corpus.of(documents), documents[:8], "random tokens")
    return make_loop(Learner(student, {}, teacher), settings, texts, 256, start("cpu", settings, (), folder), folder)


def their_steps(student: Any, ids: np.ndarray[Any, Any], steps: int, folder: Path) -> list[float]:
    """Seconds of each step of transformers' Trainer on the same rows."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Clock(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.ends.append(time.perf_counter())

    rows = [{"input_ids": torch.from_numpy(row), "labels": torch.from_numpy(row)} for row in ids]
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=8,
        max_steps=steps + 1,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    clock = Clock()
    Trainer(student, arguments, train_dataset=rows, callbacks=[clock]).train()
    return np.diff(clock.ends).tolist()


def our_steps(loop: Loop, steps: int) -> list[float]:
    """Seconds of each step of our loop."""
    loop.student.train()
    return [1 / (loop.step(number)[0]["tokens_per_second"] / (8 * 256)) for number in range(steps + 1)][1:]


def measure_speed(rounds: int, steps: int, say: Callable[[str], None]) -> None:
    """Tokens per second of Trainer, our loop, and our loop with a teacher; medians over alternating rounds."""
    quiet_transformers()
    ids = np.random.default_rng(0).integers(0, 50257, (64, 256))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        student, teacher = small_models(folder)
        alone, taught = (our_loop(student, source, ids, folder) for source in (None, teacher))
        seconds: dict[str, list[float]] = {"Trainer": [], "ours": [], "ours with a teacher": []}
        for _ in range(rounds):
            seconds["Trainer"] += their_steps(student, ids, steps, folder)
            seconds["ours"] += our_steps(alone, steps)
            seconds["ours with a teacher"] += our_steps(taught, steps)
    speeds = {name: 8 * 256 / statistics.median(each) for name, each in seconds.items()}
    for name, speed in speeds.items():
        say(f"{name:22} {speed:8,.0f} tokens/s")
    say(f"ours against Trainer: {speeds['ours'] / speeds['Trainer']:.2f} x (at least 1.0, aim 1.2)")
    say(f"with a teacher against without: {speeds['ours with a teacher'] / speeds['ours']:.2f} x (at least 0.6)")


@click.command()
@click.option("--work", type=click.Path(path_type=Path), help="Folder for models and runs; needed for the figures.")
@click.option("--only", type=click.Choice([*RUNS, "speed"]), multiple=True, help="Default: the three runs.")
@click.option("--set", "overrides", multiple=True, help="Settings of all runs, as heal.x=y.")
@click.option("--rounds", default=5, show_default=True, help="Of the speed.")
@click.option("--steps", default=4, show_default=True, help="Of each round.")
def main(work: Path | None, only: tuple[str, ...], overrides: tuple[str, ...], rounds: int, steps: int) -> None:
    """Measure; exits with 1 where a goal is missed."""
    missed = 0
    for name in only or tuple(RUNS):
        if name == "speed":
            measure_speed(rounds, steps, click.echo)
            continue
        if work is None:
            raise ConverterError("the figures need a folder", fix="Name one with --work")
        with progress(hidden=False) as bars:
            report = healed(name, RUNS[name], work, overrides, bars)
        for control in report.controls:
            click.echo(f"{name}: {control.name}, rate {control.rate:g}: held-out loss {control.best.loss:.4f}")
        for what, found, limit in goals(report, RUNS[name], work):
            missed += found > limit
            click.echo(f"{name}: {what}: {found:.4f}, at most {limit:.4f}{'' if found <= limit else ' MISSED'}")
    raise SystemExit(missed > 0)


if __name__ == "__main__":
    main()
