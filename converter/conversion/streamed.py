"""Two checkpoints compared on text with one block of either in memory: by the reference forward, block by block."""

from __future__ import annotations

import os

import torch

from converter.blocks import HEAD, blocks
from converter.conversion.streams import Streams, Variant, logits
from converter.families.opened import SourceModel
from converter.measure.metrics import Comparison, Tally
from converter.text.windows import Windows

#: What loading a model takes beyond its weights: the logits of a batch, and what the allocator holds on to.
_BESIDE = 1 << 30


@torch.no_grad()
def compare_streamed(source: SourceModel, other: SourceModel, windows: Windows, device: str = "cpu") -> Comparison:
    """As `compare`. States (n, T, D) of all windows lie in memory, or in a file where they are large."""
    place = torch.device(device)
    heads = {}
    for key, model in enumerate((source, other)):
        streams = Streams(windows, [0], torch.float32, place)
        for ref in blocks(model.spec):
            block = Variant(model.read_block(ref, torch.float32, place), model.spec)
            if ref == HEAD:
                heads[key] = block, streams.states[0]
                break
            streams.begin_block()
            streams.advance(0, block, ref)
    tally = Tally(windows.ids.shape[1])
    for found, targets, positions in logits(windows, heads, place):
        tally.add(found[0], found[1], targets, positions)
    return tally.comparison()


def fits(parameters: int, device: str = "cpu") -> bool:
    """Whether models of so many parameters together can be held in fp32."""
    return 4 * parameters + _BESIDE <= available_memory(device)


def available_memory(device: str = "cpu") -> int:
    """Bytes that a program can still take, of the CPU's memory or of a GPU's."""
    if device != "cpu":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            kilobytes = next(int(line.split()[1]) for line in file if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # no Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return kilobytes * 1024
