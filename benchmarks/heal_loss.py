"""Memory and speed of healing's losses in chunks, beside the form with full logits and autograd.

    python benchmarks/heal_loss.py [--tokens 8192] [--hidden 256] [--vocab 50257] [--runs 3] [--threads 2]
    python benchmarks/heal_loss.py --chunks 64,128,256,512   # speed by tokens of a chunk

Each measurement is a process of its own: states, head and teacher are made, then losses and gradients are
computed three times. Memory is the peak beyond what was there before, gradients included, of the
process on a CPU or of the device; the time is the best of the three. The forms alternate.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys

_CHILD = """
import json, sys, time
import torch
from torch.nn import functional as F
from converter.healing.head import Head, Told, head_losses
from converter.losses.cross_entropy import CrossEntropy
from converter.losses.kl import KL

form, loss, chunk, tokens, hidden, vocab, threads = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
torch.set_num_threads(threads)
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
losses = [{"ce": CrossEntropy(1.0), "kl": KL()}[name] for name in loss.split("+")]
states, teacher = (torch.randn(tokens, hidden, device=device, requires_grad=n == 0) for n in range(2))
heads = [torch.nn.Linear(hidden, vocab, bias=False, device=device).requires_grad_(n == 0) for n in range(2)]
targets = torch.randint(vocab, (tokens,), device=device)

def full():
    log_q = heads[0](states).log_softmax(-1)
    total = 0.0
    if "ce" in loss:
        total = total + F.nll_loss(log_q, targets, reduction="sum")
    if "kl" in loss:
        with torch.no_grad():
            log_p = heads[1](teacher).log_softmax(-1)
        total = total + F.kl_div(log_q, log_p, reduction="sum", log_target=True)
    return total

def chunked():
    told = Told(teacher, Head(heads[1].weight)) if "kl" in loss else None
    return head_losses(
        states, Head(heads[0].weight), targets, losses=losses, told=told, chunk_tokens=chunk or None
    ).total

def memory(key):  # kB
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key))

if device == "cuda":
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() / 1024
else:
    open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew here
    before = memory("VmRSS")
times = []
for _ in range(3):
    states.grad = heads[0].weight.grad = None
    start = time.perf_counter()
    total = {"full": full, "chunked": chunked}[form]()
    (total / tokens).backward()
    value = float(total) / tokens
    times.append(time.perf_counter() - start)
peak = torch.cuda.max_memory_allocated() / 1024 if device == "cuda" else memory("VmHWM")
print(json.dumps({"seconds": min(times), "peak_mb": (peak - before) / 1024, "loss": value}))
"""


def measure(form: str, loss: str, chunk: int, arguments: argparse.Namespace) -> dict[str, float]:
    """One form of one loss in a process of its own."""
    sizes = (chunk, arguments.tokens, arguments.hidden, arguments.vocab, arguments.threads)
    command = [sys.executable, "-c", _CHILD, form, loss, *map(str, sizes)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    facts: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return facts


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 8192), ("hidden", 256), ("vocab", 50257), ("runs", 3), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--chunks", type=lambda text: [int(part) for part in text.split(",")])
    arguments = parser.parse_args()
    forms = [("chunked", chunk) for chunk in arguments.chunks] if arguments.chunks else [("full", 0), ("chunked", 0)]
    for loss in ("ce", "kl", "kl+ce"):
        found: dict[tuple[str, int], list[dict[str, float]]] = {form: [] for form in forms}
        for _ in range(arguments.runs):
            for form in forms:
                found[form].append(measure(form[0], loss, form[1], arguments))
        for (name, chunk), runs in found.items():
            seconds, peak = (statistics.median(run[key] for run in runs) for key in ("seconds", "peak_mb"))
            best = min(run["seconds"] for run in runs)
            print(
                f"{loss:6} {name:8} {chunk or '':>5} {arguments.tokens / seconds:8,.0f} tokens/s "
                f"(best {arguments.tokens / best:,.0f})  {peak:8,.0f} MB  loss {runs[0]['loss']:.6f}"
            )


if __name__ == "__main__":
    main()
