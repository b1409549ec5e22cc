"""How much slower a conversion is beside programs that keep every core busy: seconds and CPU seconds, and their ratio.

python benchmarks/busy.py examples/tiny-gpt2

Threads of one sum that wait for each other by spinning, while another program has the core of one of them, burn CPU
time and finish late. With two of two cores busy a fair share of the machine is a half: a ratio near 2 is the best.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

FEW_STEPS = ["fit_blocks.steps=10", "calibration.tokens=16384", "verify.tokens=4096"]


def main() -> None:
    """Convert idle and busy; exits with 1 where the ratio of the seconds is above the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("--set", dest="overrides", action="append", default=FEW_STEPS)
    parser.add_argument("--limit", type=float, default=3.0)
    arguments = parser.parse_args()
    idle = convert(arguments.source, arguments.overrides)
    with busy(os.cpu_count() or 1):
        beside = convert(arguments.source, arguments.overrides)
    ratio = beside[0] / idle[0]
    for name, (seconds, cpu) in (("idle", idle), ("busy", beside)):
        print(f"{name}: {seconds:.1f} s, {cpu:.1f} s of CPU")
    print(f"{ratio:.1f} times the seconds, {beside[1] / idle[1]:.1f} times the CPU seconds")
    sys.exit(ratio > arguments.limit)


def convert(source: Path, overrides: list[str]) -> tuple[float, float]:
    """Seconds of a conversion, and CPU seconds."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "converter", "convert", str(source), f"{folder}/out", "--json"]
        for override in overrides:
            command += ["--set", override]
        before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """So many processes that do nothing but run."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


if __name__ == "__main__":
    main()
