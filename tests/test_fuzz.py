"""The short version of benchmarks/fuzz.py: damaged inputs end with a right result or one paragraph."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FUZZ = Path(__file__).parent.parent / "benchmarks" / "fuzz.py"
SUBJECTS = (
    *("gpt2", "llama", "tokenizer", "sharded", "bin", "nanogpt", "gguf", "meta", "stamp", "adapter", "recipe", "text"),
    *("unfinished conversion", "unfinished swap, begun", "unfinished swap, done"),
)


def test_damaged_inputs_end_with_a_right_result_or_one_paragraph() -> None:
    """In a process of its own: each input is run in a child, and children of this one would have pytest's filters."""
    drawn = [word for name in SUBJECTS for word in ("--subject", name)]
    command = [sys.executable, FUZZ, "--seed", "1", "--cases", "60", *drawn]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    assert "60 inputs, 0 failed" in done.stdout
