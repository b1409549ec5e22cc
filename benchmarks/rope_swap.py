"""Speed and memory of `rope swap`, beside `cp --reflink=never`, on a 7B-shaped checkpoint; and kills.

    python benchmarks/rope_swap.py FOLDER [--gigabytes 4] [--runs 3] [--cold] [--kills 50]

Writes a bf16 checkpoint of random weights in the shape of a 7B LLaMA with 32 query and 8 key-value heads,
as many layers as fit, into FOLDER, and alternates cp, the copying swap and the swap in place. Everything is
fsynced on both sides; the source is read once before each run, so that it is in the page cache as far as it fits, or
with --cold it is dropped from there.
Times are those of the work inside the process, after its libraries are imported; the whole command is told beside
them, and the peak memory beyond that of the interpreter with them. A kill is of the swap in place, at a random
moment after its journal appeared; it is then finished or rolled back, and every byte compared with what it has to be.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from measured import measured

from converter.files.record import read_record
from converter.spec import RopeLayout

HIDDEN, MLP, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 4096, 11008, 32, 8, 128, 32000
CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Tensor names and shapes of a LLaMA."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for layer in range(layers):
        stem = f"model.layers.{layer}"
        found |= {
            f"{stem}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"{stem}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{stem}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{stem}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"{stem}.mlp.gate_proj.weight": (MLP, HIDDEN),
            f"{stem}.mlp.up_proj.weight": (MLP, HIDDEN),
            f"{stem}.mlp.down_proj.weight": (HIDDEN, MLP),
            f"{stem}.input_layernorm.weight": (HIDDEN,),
            f"{stem}.post_attention_layernorm.weight": (HIDDEN,),
        }
    return found | {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}


def write_checkpoint(folder: Path, gigabytes: float) -> None:
    """A checkpoint of about this size."""
    import torch

    from converter.files.writer import CheckpointWriter

    layer = sum(a * b for a, b in [(HEADS * HEAD_DIM, HIDDEN)] * 2 + [(KV_HEADS * HEAD_DIM, HIDDEN)] * 2)
    layer = 2 * (layer + 3 * MLP * HIDDEN)
    layers = max(1, round((gigabytes * 1e9 - 4 * VOCAB * HIDDEN) / layer))
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}))
    plan = shapes(layers)
    writer = CheckpointWriter(folder, {name: (shape, "bfloat16") for name, shape in plan.items()}, 2_000_000_000)
    for seed, (name, shape) in enumerate(plan.items()):
        generator = torch.Generator().manual_seed(seed)
        writer.write(name, (torch.rand(shape, generator=generator) - 0.5).to(torch.bfloat16))
    writer.finish()


def settle(folder: Path, cold: bool) -> None:
    """Let the disk come to rest, with every file read once, or dropped from the page cache."""
    os.sync()
    for file in folder.iterdir():
        with file.open("rb", buffering=0) as handle:
            if cold:
                os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                continue
            while handle.read(1 << 24):
                pass


def copy(source: Path, target: Path) -> float:
    """Seconds of cp and an fsync of everything that it wrote."""
    start = time.perf_counter()
    subprocess.run(["cp", "-r", "--reflink=never", source, target], check=True)
    for path in (*target.iterdir(), target):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    return time.perf_counter() - start


_IMPORTS = """
from pathlib import Path
from converter.rope import patch, swap
from converter.spec import RopeLayout
"""
_WORK = """
source, target, to = Path(sys.argv[1]), sys.argv[2], RopeLayout(sys.argv[3])
if target:
    swap.swap(source, target, to=to)
else:
    patch.swap_in_place(source, to=to)
"""


def swap(source: Path, target: Path | None, to: str) -> dict[str, float]:
    """One swap in a process of its own: seconds of its work, of the whole command, and memory beyond the imports."""
    start = time.perf_counter()
    cost = measured(_IMPORTS, _WORK, source, str(target or ""), to)
    return {"seconds": cost.seconds, "peak_mb": cost.peak / 2**20, "command": time.perf_counter() - start}


def detection(source: Path) -> dict[str, float]:
    """Seconds of a detection, and for each GB of q and k."""
    from converter.families.opened import SourceModel
    from converter.rope.detect import detect_source

    start, cpu = time.perf_counter(), time.process_time()
    opened = SourceModel.open(source)
    detect_source(opened)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    size = sum(info.nbytes for name, info in opened.checkpoint.tensors.items() if "q_proj" in name or "k_proj" in name)
    return {"seconds": seconds, "cpu_seconds": cpu, "gb": size / 1e9, "seconds_per_gb": seconds / (size / 1e9)}


def in_place_command(source: Path, *more: str) -> list[str]:
    """The command line of a swap in place."""
    return [sys.executable, "-m", "converter", "rope", "swap", str(source), "--in-place", *more]


def digest(source: Path) -> str:
    """Of all weights."""
    found = hashlib.sha256()
    for file in sorted(source.glob("*.safetensors")):
        with file.open("rb", buffering=0) as content:
            while piece := content.read(1 << 22):
                found.update(piece)
    return found.hexdigest()


def start_and_wait(command: list[str], journal: Path) -> subprocess.Popen[bytes]:
    """A swap in place, when it has begun its journal."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while not journal.exists() and process.poll() is None:
        time.sleep(0.001)
    return process


def kill(source: Path, kills: int, seed: int = 0) -> None:
    """Kill swaps at random moments, finish or undo them, and compare; raises where bytes differ."""
    choose, journal = random.Random(seed), source / ".rope-swap"
    digests, states = {}, ["interleaved", "half_split"]
    if (record := read_record(source)) and record.layout is RopeLayout.INTERLEAVED:  # left by an earlier run
        states.reverse()
    for state in states:
        process = start_and_wait(in_place_command(source, "--to", state), journal)
        start = time.perf_counter()
        if process.wait():
            raise SystemExit("the swap that is to be killed does not even work")
        seconds = time.perf_counter() - start
        digests[state] = digest(source)
    outcomes: Counter[str] = Counter()
    state = states[1]
    for _ in range(kills):
        to = next(other for other in states if other != state)
        process = start_and_wait(in_place_command(source, "--to", to), journal)
        time.sleep(seconds * choose.random())
        process.kill()
        process.wait()
        unfinished, undo = (journal / "plan").exists(), choose.random() < 0.5
        done = subprocess.run(
            in_place_command(source, "--to", to, *(["--roll-back"] if undo else [])), capture_output=True, text=True
        )
        if done.returncode and "already" not in done.stderr:
            raise SystemExit(done.stderr)
        found = digest(source)
        state = next(name for name, each in digests.items() if each == found)
        if unfinished and (state == to) is undo:
            raise SystemExit(f"after {'--roll-back' if undo else 'going on'} the rows are {state}")
        outcomes[("rolled back" if undo else "finished") if unfinished else "nothing was half done"] += 1
    print(json.dumps({"kills": outcomes}))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--kills", type=int, default=0)
    arguments = parser.parse_args()
    source = arguments.folder / "source"
    if not source.exists():
        write_checkpoint(source, arguments.gigabytes)
    results = []
    for run in range(arguments.runs):
        row: dict[str, object] = {"run": run}
        for name in ("cp", "swap", "in_place"):
            target = arguments.folder / "target"
            shutil.rmtree(target, ignore_errors=True)
            settle(source, arguments.cold)
            if name == "cp":
                row[name] = {"seconds": copy(source, target)}
            elif name == "swap":
                row[name] = swap(source, target, "interleaved")
            else:
                row[name] = swap(source, None, "interleaved")
                settle(source, arguments.cold)
                row["back"] = swap(source, None, "half_split")
        results.append(row)
        print(json.dumps(row), flush=True)
    shutil.rmtree(arguments.folder / "target", ignore_errors=True)
    settle(source, cold=False)
    print(json.dumps({"detection": detection(source)}))
    if arguments.kills:
        kill(source, arguments.kills)


if __name__ == "__main__":
    main()
