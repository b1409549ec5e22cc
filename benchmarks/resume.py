"""Kill a conversion with SIGKILL at random moments, resume it, and compare every byte with an uninterrupted run.

python benchmarks/resume.py examples/tiny-gpt2 --kills 30
"""

from __future__ import annotations

import hashlib
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click


def digest(folder: Path) -> dict[str, str]:
    """sha256 of every file."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {file.relative_to(folder).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@click.command()
@click.argument("source", type=click.Path(exists=True, path_type=Path))
@click.option("--kills", default=30, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--option", "options", multiple=True, help="Passed on to convert, as --option=--set=a.b=c.")
def main(source: Path, kills: int, seed: int, options: tuple[str, ...]) -> None:
    """Kill and resume; exits with 1 where a byte differs or a killed run left something that looks finished."""
    random.seed(seed)
    faults = 0
    with tempfile.TemporaryDirectory() as work:
        whole, target = Path(work, "run-0", "result"), Path(work, "run-1", "result")

        def command(folder: Path, *extra: str) -> list[str]:
            return [sys.executable, "-m", "converter", "convert", str(source), str(folder), "--json", *options, *extra]

        started = time.perf_counter()
        subprocess.run(command(whole), check=True, stdout=subprocess.DEVNULL)
        duration = time.perf_counter() - started
        expected = digest(whole)
        for number in range(kills):
            moment = random.uniform(0.1, 1.0) * duration
            process = subprocess.Popen(command(target, "--resume"), stdout=subprocess.DEVNULL)
            try:
                process.wait(timeout=moment)
                outcome = "finished before the kill"
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.wait()
                outcome = "left a finished-looking folder" if target.exists() else "killed"
                if target.exists() and digest(target) == expected:
                    outcome = "killed after the rename"
                elif target.exists():
                    faults += 1
            if not target.exists():
                subprocess.run(command(target, "--resume"), check=True, stdout=subprocess.DEVNULL)
            same = digest(target) == expected
            faults += not same
            print(f"{number + 1:3} of {kills}: {outcome} at {moment:.1f} s, then {'equal' if same else 'OTHER BYTES'}")
            subprocess.run(["rm", "-rf", str(target.parent)], check=True)
    print(f"{kills} kills, {faults} faults")
    sys.exit(faults > 0)


if __name__ == "__main__":
    main()
