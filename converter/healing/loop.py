"""The training loop: what a step is, when to measure, when to save, when to stop.

accelerate owns devices, precision, sharding and collectives. The loop owns the data order, the label shift and the
loss denominator: the losses of a step are sums over all its micro-batches and ranks, divided once by the number of
its targets, so that no split of the same sequences changes the step.
"""

from __future__ import annotations

import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from accelerate import Accelerator

from converter.conversion.settings import HealSettings
from converter.errors import ConverterError
from converter.files.json_text import to_json
from converter.files.output import damaged_work
from converter.healing.batches import Batches, Sequences
from converter.healing.optimizer import rate_at, set_rate
from converter.healing.recorded import RecordedTeacher
from converter.healing.report import HeldOutFigures
from converter.healing.schedules import ramp, set_theta
from converter.healing.snapshots import Snapshots
from converter.healing.student import Answer, Sums, Teacher
from converter.healing.trainee import Trainee
from converter.losses import Loss
from converter.show.progress import Progress

#: Steps in a row without a finite gradient after which a run is over.
_HOPELESS = 10


class InterruptedRunError(ConverterError):
    """The run was told to stop, and has saved where it is."""

    exit_code = 143  # 128 + SIGTERM, as shells have it


@dataclass(frozen=True)
class Outcome:
    """How a run went. The module holds the weights of the best evaluation."""

    evaluations: list[HeldOutFigures]
    best: HeldOutFigures
    steps: int
    tokens: int
    skipped: int
    tokens_per_second: float


class Loop:
    """One run over prepared parts."""

    def __init__(
        self,
        settings: HealSettings,
        accelerator: Accelerator,
        trainee: Trainee,
        teacher: Teacher | RecordedTeacher | None,
        batches: Batches,
        held_out: Sequences,
        thetas: tuple[float, float] | None = None,
    ) -> None:
        self.settings, self.accelerator = settings, accelerator
        self.trainee, self.student, self.teacher = trainee, trainee.student, teacher
        self.batches, self.held_out, self.thetas = batches, held_out, thetas
        self.steps = batches.steps(settings.tokens)
        rows = settings.micro_batch // batches.context if settings.micro_batch else batches.sequences_per_step
        self._rows = max(1, rows)
        # The last step is at the final theta, whatever the ramp: that is what is exported.
        self._ramp_steps = min(round(settings.theta_ramp * self.steps), self.steps - 1) if thetas else 0
        self._skipped = self._in_a_row = 0
        self._seconds = 0.0  # in steps, without evaluations and snapshots
        self._evaluations: list[HeldOutFigures] = []
        #: What evaluations measure, each loss at its defaults: figures of runs with other settings compare.
        self._measured = tuple(
            type(loss)()
            for loss in settings.losses.values()
            if (loss.weight or loss.watched) and (teacher is not None or not loss.asks_teacher)
        )

    def run(self, folder: Path, snapshots: Snapshots, progress: Progress, resume: bool = False) -> Outcome:
        """Train to the end, or to the target; `metrics.jsonl` in `folder` gets a line a step.

        Raises InterruptedRunError after a SIGTERM, and ConverterError where no gradient is finite any more.
        """
        start = self._resume(snapshots) if resume else 0
        metrics = _Metrics(folder / "metrics.jsonl", start, self.accelerator.is_main_process)
        tokens = self.batches.tokens_per_step
        progress.stage("heal", self.steps * tokens, done=start * tokens, unit="tokens")
        step = start
        with _sigterm() as told_to_stop, metrics:
            if start == 0:
                self._evaluate(0, metrics, progress)
            while step < self.steps and not self._reached_target():
                record, stop = self.step(step, told_to_stop)
                step += 1
                self._note(record, metrics)
                progress.advance(tokens, record)
                improved = False
                if self._due(step, self.settings.evaluate_every) or step == self.steps:
                    improved = self._evaluate(step, metrics, progress)
                last = step == self.steps or self._reached_target()
                if improved or stop or last or self._due(step, self.settings.save_every):
                    snapshots.save(step, self._state(), self.trainee, best=self._best_step())
                if stop:
                    raise InterruptedRunError(
                        f"stopped after step {step} of {self.steps}", fix="Repeat the command with --resume to go on"
                    )
        best = min(self._counting(), key=self._objective)
        if best.step != step:
            snapshots.load_weights(best.step, self.trainee)
        tokens = step * self.batches.tokens_per_step
        return Outcome(self._evaluations, best, step, tokens, self._skipped, tokens / self._seconds)

    def step(self, step: int, told_to_stop: Callable[[], bool] = lambda: False) -> tuple[dict[str, float], bool]:
        """One optimizer step: what is worth noting about it, and whether some rank was told to stop."""
        accelerator, settings, started = self.accelerator, self.settings, time.perf_counter()
        if self.thetas is not None:
            set_theta(self.student.model, ramp(*self.thetas, step, self._ramp_steps))
        rate = rate_at(step, self.steps, settings)
        set_rate(self.trainee.optimizer, rate)
        share = self.batches.share(step, accelerator.process_index, accelerator.num_processes)
        (valid,) = self._over_ranks(share.valid)
        # DDP and FSDP average gradients over ranks, and a sum is wanted.
        scale = accelerator.num_processes / max(valid, 1.0)
        layers = step < round(settings.stage_one * self.steps)
        minimised = () if layers else settings.minimised
        sums = torch.zeros(2 + len(minimised), device=accelerator.device)
        micro_batches = list(share.split(self._rows))
        for number, micro_batch in enumerate(micro_batches, start=1):
            losses = partial(self._losses, micro_batch, layers)
            found = self.trainee.add_gradient(losses, scale, last=number == len(micro_batches))
            sums += _stacked(found, minimised).float()
        norm = self.trainee.step()
        self._count(norm)
        total, answered, *values, stops = self._over_ranks(*sums.tolist(), told_to_stop())
        seconds = time.perf_counter() - started
        self._seconds += seconds
        record = {
            "step": step + 1,
            "loss": total / max(valid, 1.0),
            **_means(minimised, values, valid, answered),
            "rate": rate,
            "gradient_norm": norm,
            "tokens": (step + 1) * self.batches.tokens_per_step,
            "tokens_per_second": self.batches.tokens_per_step / seconds,
            "skipped": self._skipped,
        }
        return record, stops > 0

    def _count(self, norm: float) -> None:
        """Count a step that was not taken: one bad batch must not cost the run, many mean it is lost."""
        if math.isfinite(norm):
            self._in_a_row = 0
        else:
            self._skipped += 1
            self._in_a_row += 1
        if self._in_a_row >= _HOPELESS:
            raise ConverterError(
                f"the gradients of {_HOPELESS} steps in a row were not finite",
                why="The weights have diverged, or the precision does not hold the activations",
                fix="Start again with a lower heal.rate, or with heal.precision=float32",
            )

    def _losses(self, sequences: Sequences, layers: bool = False, losses: tuple[Loss, ...] | None = None) -> Sums:
        sequences = sequences.to(self.accelerator.device)
        answer: Answer | None = None
        if layers or any(loss.asks_teacher for loss in losses or self.student.losses):
            assert self.teacher is not None
            answer = self.teacher(sequences, layers)
        tensors = (sequences.ids, sequences.documents, sequences.positions, sequences.targets)
        found: Sums = self.trainee.module(*tensors, answer, losses)
        return found

    @torch.no_grad()
    def _evaluate(self, step: int, metrics: _Metrics, progress: Progress) -> bool:
        """Measure on held-out text; whether it is the best so far."""
        accelerator, settings, measured = self.accelerator, self.settings, self._measured
        sums = torch.zeros(2 + len(measured), dtype=torch.float64, device=accelerator.device)
        valid = 0
        share = self.held_out.share(accelerator.process_index, accelerator.num_processes)
        for micro_batch in share.split(self._rows):
            sums += _stacked(self._losses(micro_batch, losses=measured), measured).double()
            valid += micro_batch.valid
        valid_total, _, answered, *values = self._over_ranks(valid, *sums.tolist())
        evaluation = HeldOutFigures(step, _means(measured, values, valid_total, answered))
        self._evaluations.append(evaluation)
        self._note({"step": step} | {f"held_out_{name}": mean for name, mean in evaluation.losses.items()}, metrics)
        of_kl = "" if evaluation.kl is None else f", KL to {settings.compared_with} {evaluation.kl:.4f}"
        progress.say(f"step {step} of {self.steps}: held-out loss {evaluation.loss:.4f}{of_kl}")
        return step > 0 and self._best_step() == step

    def _note(self, record: dict[str, float], metrics: _Metrics) -> None:
        """To `metrics.jsonl` and to the trackers."""
        metrics.write(record)
        values = {name: value for name, value in record.items() if name != "step"}
        self.accelerator.log(values, step=int(record["step"]))

    def _objective(self, evaluation: HeldOutFigures) -> float:
        """What the run minimises, on held-out text."""
        losses = evaluation.losses
        figure = sum(loss.weight * losses[loss.name] for loss in self.settings.minimised if loss.name in losses)
        return figure if math.isfinite(figure) else math.inf

    def _counting(self) -> list[HeldOutFigures]:
        """Evaluations of what would be exported: not the unhealed model, and nothing at another theta."""
        return [each for each in self._evaluations if each.step > self._ramp_steps]

    def _best_step(self) -> int | None:
        return min(self._counting(), key=self._objective).step if self._counting() else None

    def _reached_target(self) -> bool:
        if not self._counting() or self.settings.target == 0:
            return False
        last = self._counting()[-1]
        by_kl = last.kl is not None and self.settings.losses["kl"].weight > 0
        return last.losses["kl" if by_kl else "ce"] <= self.settings.target

    def _due(self, step: int, every: int) -> bool:
        return step % (every or max(1, self.steps // 10)) == 0

    def _over_ranks(self, *values: float) -> list[float]:
        """Sums over all ranks."""
        if self.accelerator.num_processes == 1:
            return [float(value) for value in values]
        tensor = torch.tensor(values, dtype=torch.float64, device=self.accelerator.device)
        return [float(value) for value in self.accelerator.reduce(tensor, "sum").tolist()]

    def _state(self) -> dict[str, Any]:
        return {
            "skipped": self._skipped,
            "in_a_row": self._in_a_row,
            "seconds": self._seconds,
            "evaluations": [asdict(evaluation) for evaluation in self._evaluations],
        }

    def _resume(self, snapshots: Snapshots) -> int:
        """Go on from the newest snapshot; the number of steps that are done."""
        steps = snapshots.steps()
        if not steps:
            return 0
        state = snapshots.load(steps[-1], self.trainee)
        self._skipped, self._in_a_row, self._seconds = (state[key] for key in ("skipped", "in_a_row", "seconds"))
        self._evaluations = [HeldOutFigures(**each) for each in state["evaluations"]]
        return steps[-1]


def _stacked(found: Sums, losses: tuple[Loss, ...]) -> torch.Tensor:
    """What is minimised, the targets with a teacher, and each loss, as one vector."""
    return torch.stack([found.total, found.answered, *(found.losses[loss.name] for loss in losses)]).detach()


def _means(losses: tuple[Loss, ...], sums: list[float], valid: float, answered: float) -> dict[str, float]:
    """Each loss over the targets that it has; none where no target has an answer."""
    counts = {loss.name: answered if loss.asks_teacher else max(valid, 1.0) for loss in losses}
    return {loss.name: total / counts[loss.name] for loss, total in zip(losses, sums, strict=True) if counts[loss.name]}


class _Metrics:
    """`metrics.jsonl`: a line a step and a line an evaluation. A resumed run drops what it does again."""

    def __init__(self, path: Path, start: int, writes: bool) -> None:
        self._file = None
        if writes:
            kept = []
            if start and path.is_file():
                lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
                try:
                    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= start]
                except (ValueError, TypeError, KeyError, RecursionError) as error:
                    raise damaged_work(path, error) from error
            path.write_text("".join(kept), encoding="utf-8")
            self._file = path.open("a", encoding="utf-8")

    def __enter__(self) -> _Metrics:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, record: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(to_json(record, indent=None) + "\n")
            self._file.flush()


@contextmanager
def _sigterm() -> Iterator[Callable[[], bool]]:
    """A function that tells whether SIGTERM has come; elsewhere than in the main thread it never does."""
    told = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield told.is_set
        return

    def note(number: int, frame: FrameType | None) -> None:
        told.set()

    before = signal.signal(signal.SIGTERM, note)
    try:
        yield told.is_set
    finally:
        signal.signal(signal.SIGTERM, before)
