"""Speed and memory of a conversion against `cp` and against the size of the largest tensor.

    python benchmarks/convert.py --layers 48 --hidden 1600 --heads 25      # GPT-2 XL, about 30 GB of disk

Makes a random GPT-2 of that shape, then alternates `cp --reflink=never` of it, synced, with a
conversion of it, source hash and sync included, and prints every run, the ratio of the medians of
bytes written per second, and the peak memory beyond an interpreter with torch loaded.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import click
import torch
from measured import measured

from converter.files.safetensors import Layout
from converter.files.writer import CheckpointWriter

# As the command does it.
_IMPORTS = (
    "from converter.cli.process import before_torch; before_torch(); "
    "import torch, transformers, converter; converter.convert"
)
_WORK = 'converter.convert(sys.argv[1], sys.argv[2], recipe="gpt2-to-llama-naive", verify=False)'


def gpt2_layout(layers: int, hidden: int, vocab: int, context: int) -> dict[str, Layout]:
    """Names, shapes and dtypes of a GPT-2 in fp32."""
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (vocab, hidden), "wpe.weight": (context, hidden)}
    for layer in range(layers):
        for norm in ("ln_1", "ln_2"):
            shapes |= {f"h.{layer}.{norm}.weight": (hidden,), f"h.{layer}.{norm}.bias": (hidden,)}
        sizes = {
            "attn.c_attn": (hidden, 3 * hidden),
            "attn.c_proj": (hidden, hidden),
            "mlp.c_fc": (hidden, 4 * hidden),
            "mlp.c_proj": (4 * hidden, hidden),
        }
        for linear, (rows, columns) in sizes.items():
            shapes |= {f"h.{layer}.{linear}.weight": (rows, columns), f"h.{layer}.{linear}.bias": (columns,)}
    shapes |= {"ln_f.weight": (hidden,), "ln_f.bias": (hidden,)}
    return {f"transformer.{name}": (shape, "float32") for name, shape in shapes.items()}


def make_source(folder: Path, layers: int, hidden: int, heads: int, vocab: int, context: int) -> int:
    """Write a random GPT-2; returns the bytes of its largest tensor."""
    folder.mkdir()
    layout = gpt2_layout(layers, hidden, vocab, context)
    config = {
        "model_type": "gpt2",
        "n_layer": layers,
        "n_embd": hidden,
        "n_head": heads,
        "vocab_size": vocab,
        "n_positions": context,
    }
    (folder / "config.json").write_text(json.dumps(config))
    writer = CheckpointWriter(folder, layout, 5 * 10**9)
    torch.manual_seed(0)
    for name, (shape, _) in layout.items():
        writer.write(name, torch.randn(shape) * 0.02)
    writer.finish()
    return max(4 * int(torch.Size(shape).numel()) for shape, _ in layout.values())


def folder_bytes(folder: Path) -> int:
    """Bytes of all files."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def prepare(cold: bool) -> None:
    """Bring the page cache into the state that was asked for."""
    os.sync()
    if cold:
        Path("/proc/sys/vm/drop_caches").write_text("3")


def copy(source: Path, target: Path) -> float:
    """Bytes per second of a plain copy, synced."""
    started = time.perf_counter()
    subprocess.run(["cp", "--reflink=never", "-r", source, target], check=True)
    for file in target.iterdir():
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    return folder_bytes(target) / (time.perf_counter() - started)


def convert(source: Path, target: Path) -> tuple[float, int]:
    """Bytes written per second of a conversion in a fresh process, and its peak memory beyond the imports."""
    cost = measured(_IMPORTS, _WORK, source, target)
    return folder_bytes(target) / cost.seconds, cost.peak


@click.command()
@click.option("--layers", default=12, show_default=True)
@click.option("--hidden", default=768, show_default=True)
@click.option("--heads", default=12, show_default=True)
@click.option("--vocab", default=50257, show_default=True)
@click.option("--context", default=1024, show_default=True)
@click.option("--runs", default=3, show_default=True)
@click.option("--cold", is_flag=True, help="Drop the page cache before every run; needs root on Linux.")
@click.option(
    "--folder", type=click.Path(path_type=Path), help="Where to work; default: the system's temporary folder."
)
def main(
    layers: int, hidden: int, heads: int, vocab: int, context: int, runs: int, cold: bool, folder: Path | None
) -> None:
    """Time conversions against copies, alternating."""
    with tempfile.TemporaryDirectory(dir=folder) as work:
        source, target = Path(work, "source"), Path(work, "target")
        largest = make_source(source, layers, hidden, heads, vocab, context)
        print(
            f"source: {folder_bytes(source) / 1e9:.2f} GB, largest tensor {largest / 1e6:.0f} MB; "
            + ("page cache dropped before every run" if cold else "just written, so the page cache holds what fits")
        )
        copies, conversions, peaks = [], [], []
        for _ in range(runs):
            prepare(cold)
            copies.append(copy(source, target))
            shutil.rmtree(target)
            prepare(cold)
            speed, peak = convert(source, target)
            conversions.append(speed)
            peaks.append(peak)
            shutil.rmtree(target)
            print(f"cp {copies[-1] / 1e6:,.0f} MB/s   convert {speed / 1e6:,.0f} MB/s   peak {peak / 1e6:,.0f} MB")
        ratio = statistics.median(conversions) / statistics.median(copies)
        print(
            f"bytes written per second: {ratio:.2f} x cp;  peak memory: {max(peaks) / largest:.2f} x the largest tensor"
        )


if __name__ == "__main__":
    main()
