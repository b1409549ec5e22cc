"""Damage every kind of input that is read, and judge what the commands do with it.

    python benchmarks/fuzz.py --cases 5000
    python benchmarks/fuzz.py --seed 0 --only 123 --keep /tmp/case
    python benchmarks/fuzz.py --subject gguf --cases 500

A case is a copy of a sound input with one or two files damaged, and the commands that read it, each in this process's
child with a limit on time, memory and the size of files. Every outcome must be a right result, or one paragraph with
exit code 1 or 2: no traceback, no file outside the output, memory bounded by the input, at most 30 s. Where a command
succeeds, its result is held against transformers' own class or against that of the sound input; `check --full` and
`convert --dry-run` must say what `convert` says. Everything follows from the seed and the number of the case.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
os.environ |= {"TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "critical", "MPLBACKEND": "agg"}

from fuzzing import judge
from fuzzing.damage import damage
from fuzzing.judge import Ended
from fuzzing.subjects import SUBJECTS, damageable

#: Seconds of a command.
SECONDS = 30
#: Bytes that a case may take beside what is there before it: of memory, of address space, and of a file.
MEMORY, ADDRESSES, FILE = 400 << 20, 6 << 30, 256 << 20


@dataclass(frozen=True)
class Case:
    """One damaged input: its number, its subject, what was done to it, and what is wrong with how it came out."""

    number: int
    subject: str
    damage: tuple[str, ...]
    faults: tuple[str, ...]
    codes: dict[str, int]
    compared: dict[str, int]


class Fuzzer:
    """Sound inputs in `work`, and cases that damage copies of them."""

    def __init__(self, work: Path, seed: int = 0, subjects: Iterable[str] = ()) -> None:
        import converter.cli.main

        assert converter.cli.main  # children share what is imported here
        self._work, self._seed = work, seed
        self._names = list(subjects) or list(SUBJECTS)
        self._built: set[str] = set()

    def build(self) -> None:
        """All sound inputs; otherwise each is built with its first case."""
        for name in self._names:
            self._build(name)
        gc.collect()
        gc.freeze()

    def run(self, number: int, keep: Path | None = None) -> Case:
        """One case."""
        rng = random.Random(f"{self._seed}/{number}")
        name = rng.choices(self._names, [SUBJECTS[name].weight for name in self._names])[0]
        self._build(name)
        folder = keep or self._work / "case"
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "outside").mkdir(parents=True)
        shutil.copytree(self._sound(name), folder / "room", symlinks=True)
        files = damageable(name, folder / "room")
        told: list[str] = []

        def act() -> dict[str, Any]:
            os.chdir(folder / "room")
            for path in rng.sample(sorted(files), min(len(files), rng.choice((1, 1, 1, 1, 2)))):
                told.append(damage(Path(path), files[path], rng))
            before = judge.tree(folder)
            Path(folder, "before.json").write_text(json.dumps(before))
            Path(folder, "damage.json").write_text(json.dumps(told))
            return self._commands(name, folder, before)

        outcome, death = _in_child(act, folder / "report.json", folder / "log")
        made = folder / "damage.json"
        told = json.loads(made.read_text()) if made.exists() else ["the damage itself did not succeed"]
        faults = list(outcome.get("faults", ()))
        if death and not outcome.get("judging"):
            faults.append(f"{death} in `{outcome.get('at', 'nothing yet')}`")
        return Case(number, name, tuple(told), tuple(faults), outcome.get("codes", {}), outcome.get("compared", {}))

    def _commands(self, name: str, folder: Path, before: dict[str, str]) -> dict[str, Any]:
        """Run a subject's commands in the current folder, then judge."""
        report, subject = folder / "report.json", SUBJECTS[name]
        outcome: dict[str, Any] = {"faults": [], "codes": {}}
        ended: dict[str, Ended] = {}
        with _limits() as memory:
            for each, command in subject.commands.items():
                report.write_text(json.dumps(outcome | {"at": each}))
                ended[each] = _run(each, command)
                outcome["codes"][each] = ended[each].code
                outcome["faults"] += judge.faults_of_command(ended[each])
                if (grown := memory()) > MEMORY:
                    outcome["faults"].append(f"memory grew by {grown >> 20} MB with `{each}`")
                    break
        beside = {"report.json", "log", "before.json", "damage.json"}
        after = {path: what for path, what in judge.tree(folder).items() if path not in beside}
        outcome["faults"] += judge.faults_of_files(
            {path: what for path, what in before.items() if path not in beside}, after, subject.changes
        )
        report.write_text(json.dumps(outcome | {"judging": True}))
        if not outcome["faults"]:
            signal.alarm(SECONDS)
            outcome["faults"] += judge.faults_of_results(name, self._sound(name, "results"), ended)
            signal.alarm(0)
        return outcome | {"compared": judge.COMPARED}

    def _sound(self, name: str, what: str = "input") -> Path:
        return self._work / "sound" / name.replace(" ", "-").replace(",", "") / what

    def _build(self, name: str) -> None:
        """A sound input, and the results of its commands, which must all succeed."""
        if name in self._built:
            return
        self._built.add(name)
        made, results = self._sound(name), self._sound(name, "results")
        made.mkdir(parents=True)

        def build() -> dict[str, Any]:
            os.chdir(made)
            SUBJECTS[name].build()
            shutil.copytree(made, results, symlinks=True)
            os.chdir(results)
            faults = []
            for each, command in SUBJECTS[name].commands.items():
                ended = _run(each, command)
                if ended.code or ended.raised:
                    faults.append(f"{each}: {ended.raised or ended.stderr or ended.stdout}")
            return {"faults": faults, "modules": list(sys.modules)}

        outcome, death = _in_child(build, self._work / "build.json", self._work / "build.log")
        if death or outcome["faults"]:
            log = (self._work / "build.log").read_text()
            raise RuntimeError(f"{name} undamaged: {death} {outcome.get('faults')} {log[-2000:]}")
        _import(outcome["modules"])


def _import(modules: list[str]) -> None:
    """Import here what a child needed, so that the next ones have it."""
    for module in modules:
        if module not in sys.modules and module.startswith(
            ("converter", "transformers", "torch", "accelerate", "rich")
        ):
            try:
                __import__(module)
            except Exception:  # a lazy module of another name
                continue


def _run(name: str, command: str) -> Ended:
    """One command line, by the product's own entry, with `SECONDS` to live."""
    from click.testing import CliRunner

    from converter.cli.main import main

    signal.alarm(SECONDS)
    result = CliRunner().invoke(main, command.split())
    signal.alarm(0)
    raised = None
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raised = judge.describe(result.exception)
    return Ended(name, result.exit_code, result.stderr, result.stdout, raised)


def _in_child(act: Callable[[], dict[str, Any]], report: Path, log: Path) -> tuple[dict[str, Any], str]:
    """What `act` returns in a process of its own, and how that died, if it did; then the last report it left."""
    report.unlink(missing_ok=True)
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.setsid()
        try:
            handle = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            os.dup2(handle, 1)
            os.dup2(handle, 2)
            report.write_text(json.dumps(act()))
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
            sys.stderr.flush()
            os._exit(70)
    _, status = os.waitpid(child, 0)
    _end_group(child)
    try:
        outcome = json.loads(report.read_text())
    except (OSError, ValueError):
        outcome = {}
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        hang = f"hang: more than {SECONDS} s"
        return outcome, hang if number == signal.SIGALRM else f"killed by {signal.Signals(number).name}"
    code = os.WEXITSTATUS(status)
    return outcome, f"the child ended with {code}: {log.read_text(errors='replace')[-600:]}" if code else ""


def _end_group(leader: int) -> None:
    """End what a child left running in the session that it opened."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return


@contextmanager
def _limits() -> Iterator[Callable[[], int]]:
    """Limits of a child while commands run; gives how many bytes of memory were taken at the peak."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew here
    before = _memory("VmRSS")
    old = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_memory("VmSize") + ADDRESSES, old[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        yield lambda: _memory("VmHWM") - before
    finally:
        resource.setrlimit(resource.RLIMIT_AS, old)


def _memory(key: str) -> int:
    with open("/proc/self/status") as status:
        return 1024 * next(int(line.split()[1]) for line in status if line.startswith(key))


def kind_of(fault: str) -> str:
    """A fault without its numbers and names, to count by."""
    if "traceback of" in fault:
        return fault.split(": ", 1)[1].split(":")[0] + " <- " + fault.rsplit("from ", 1)[-1]
    return fault.split(":")[0].split(" by ")[0]


def main() -> None:
    """Run cases, print each that fails, and count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--only", type=int, help="this case alone")
    parser.add_argument("--subject", action="append", default=[], choices=list(SUBJECTS))
    parser.add_argument("--keep", type=Path, help="with --only: run the case in this folder, and leave it there")
    parser.add_argument("--verbose", action="store_true", help="print sound outcomes too")
    options = parser.parse_args()
    numbers = range(options.first, options.first + options.cases) if options.only is None else [options.only]
    kinds: Counter[str] = Counter()
    exits: Counter[str] = Counter()
    compared: Counter[str] = Counter()
    failed, started = 0, time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as work:
        fuzzer = Fuzzer(Path(work), options.seed, options.subject)
        if options.only is None:
            fuzzer.build()
        built = time.perf_counter() - started
        for number in numbers:
            case = fuzzer.run(number, options.keep and options.keep.resolve())
            exits.update(f"exit {code}" for code in case.codes.values())
            if case.faults or options.verbose or options.only is not None:
                drawn = "".join(f" --subject '{name}'" for name in options.subject)
                print(f"--seed {options.seed} --only {number}{drawn} ({case.subject}) {'; '.join(case.damage)}")
                for fault in case.faults:
                    print(f"    {fault}")
                if not case.faults:
                    print(f"    {case.codes}")
                sys.stdout.flush()
            failed += bool(case.faults)
            compared.update(case.compared)
            kinds.update({kind_of(fault) for fault in case.faults})
            if (done := number - options.first + 1) % 100 == 0 and options.only is None:
                print(f"{done} inputs, {failed} failed so far", file=sys.stderr, flush=True)
    seconds = time.perf_counter() - started
    print(f"{len(numbers)} inputs, {failed} failed, {seconds:.0f} s ({built:.0f} s to build); {dict(exits)}")
    print(f"Results held against others: {dict(compared)}")
    for kind, count in kinds.most_common():
        print(f"{count:6}  {kind}")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
