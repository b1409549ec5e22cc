"""What a piece of work takes in a process of its own: seconds, and peak memory beyond what its imports take."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

_PROGRAM = """
import json, sys, time
{imports}
def memory(key):  # kB
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key))
open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew here
before = memory("VmRSS")
started = time.perf_counter()
{work}
seconds = time.perf_counter() - started
print(json.dumps([seconds, (memory("VmHWM") - before) * 1024]))
"""


class Cost(NamedTuple):
    """Seconds of the work, without its imports, and bytes beyond them at its peak."""

    seconds: float
    peak: int


def measured(imports: str, work: str, *arguments: str | Path) -> Cost:
    """Run two pieces of Python, of which the second is measured; `arguments` are in `sys.argv[1:]`. Linux only."""
    program = _PROGRAM.format(imports=imports, work=work)
    done = subprocess.run([sys.executable, "-c", program, *arguments], check=True, stdout=subprocess.PIPE, text=True)
    return Cost(*json.loads(done.stdout.splitlines()[-1]))
