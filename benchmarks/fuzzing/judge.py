"""What is wrong with how a case came out: by how each command ended, by the files, and by what the results compute."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from fuzzing import checkpoints
from fuzzing.subjects import SUBJECTS

#: What only the numbers themselves give away, when they are multiplied.
_OVERFLOW = re.compile(" overflow in | are not finite after the steps")
#: Results that were held against something, by what.
COMPARED: Counter[str] = Counter()
#: How a paragraph begins: with the command that says it.
_TOLD = re.compile("(converter( [a-z]+)*|Error|Usage): ")
#: Characters of a paragraph that people still read.
LONGEST = 2_000
#: Largest logit difference over the largest logit that is rounding.
TOLERANCE = 1e-3


@dataclass
class Ended:
    """How one command ended: its exit code, what it printed to stderr, and the traceback where it raised."""

    name: str
    code: int
    stderr: str
    stdout: str
    raised: str | None


def faults_of_command(ended: Ended) -> Iterator[str]:
    """No traceback, an exit code of 0, 1 or 2, and one paragraph where it is not 0."""
    if ended.raised is not None:
        yield f"traceback of `{ended.name}`: {ended.raised}"
        return
    if ended.code not in (0, 1, 2):
        yield f"exit code {ended.code} of `{ended.name}`"
    if "Traceback" in ended.stderr:
        yield f"a traceback is printed by `{ended.name}`: {ended.stderr[-300:]}"
    if any(ord(character) < 32 and character not in "\n\t\r" for character in ended.stderr + ended.stdout):
        yield f"control characters are printed by `{ended.name}`: {ended.stderr[:300]!r}"
    if ended.code == 0:
        return
    told = [line for line in ended.stderr.splitlines() if _TOLD.match(line)]
    is_list = ended.name.startswith("check") and ended.code == 1 and ended.stdout.strip()
    if not told and not is_list:
        yield f"`{ended.name}` ends with {ended.code} and says nothing: {ended.stderr[-300:]!r}"
    for line in told:
        behind = ended.stderr[ended.stderr.index(line) :].rstrip("\n")
        if line.startswith("converter") and "\n" in behind:
            yield f"`{ended.name}` prints more than one paragraph: {behind[:400]!r}"
        if len(line) > LONGEST:
            yield f"`{ended.name}` prints a paragraph of {len(line):,} characters: {line[:200]}"


# --- files ----------------------------------------------------------------------------------------------------


def tree(root: Path) -> dict[str, str]:
    """Everything under a folder: digests of files, targets of links, kinds of the rest."""
    found = {}
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = Path(folder, name)
            mode = path.lstat().st_mode
            key = path.relative_to(root).as_posix()
            if stat.S_ISLNK(mode):
                found[key] = f"-> {os.readlink(path)}"
            elif stat.S_ISREG(mode):
                found[key] = hashlib.sha256(path.read_bytes()).hexdigest()
            else:
                found[key] = str(stat.S_IFMT(mode))
    return found


def faults_of_files(before: Mapping[str, str], after: Mapping[str, str], changes: tuple[str, ...]) -> Iterator[str]:
    """Nothing but the outputs changes: not the input, and nothing beside the folder that a case runs in."""
    for path in sorted({*before, *after}):
        if before.get(path) == after.get(path):
            continue
        top = path.removeprefix("room/").split("/")[0]
        if not path.startswith("room/") or not any(top in (each, f".{each}.partial") for each in changes):
            how = "made" if path not in before else "removed" if path not in after else "changed"
            yield f"a file outside the output is {how}: {path}"


# --- results --------------------------------------------------------------------------------------------------


def faults_of_results(name: str, sound: Path, ended: Mapping[str, Ended]) -> Iterator[str]:
    """What is silently wrong in the current folder; `sound` has the results of the same commands, undamaged."""
    subject = SUBJECTS[name]
    codes = {command: each.code for command, each in ended.items()}
    last = list(codes.values())[-1]
    nothing_done = any("no unfinished swap" in each.stdout for each in ended.values())
    if subject.same and last == 0 and not nothing_done:
        COMPARED["with the sound run"] += 1
        wanted, found = (_matching(folder, subject.same) for folder in (sound, Path()))
        if wanted != found:
            odd = sorted(each for each in {*wanted, *found} if wanted.get(each) != found.get(each))
            yield f"silent: the command succeeds, and {', '.join(odd)} are not what the sound run gives"
    if subject.judge in ("source", "agreement"):
        yield from _disagreement(codes, ended)
        for out in subject.changes:
            yield from _not_finite(Path(out), codes)
    if subject.judge == "source" and codes.get("convert") == 0:
        yield from _other_function(exact=not Path("out/conversion.json").read_text().count("learned_positions"))
    if subject.judge == "put back" and codes == dict.fromkeys(codes, 0):
        yield from _put_back(sound)


def _matching(folder: Path, patterns: tuple[str, ...]) -> dict[str, str]:
    files = [file for pattern in patterns for file in folder.glob(pattern)]
    return {file.relative_to(folder).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def _disagreement(codes: Mapping[str, int], ended: Mapping[str, Ended]) -> Iterator[str]:
    """`check --full` and the dry run together say what `convert` says; what overflows shows only there."""
    sound = codes["check"] == 0 and codes["dry run"] == 0
    if sound is not (codes["convert"] == 0) and not _OVERFLOW.search(ended["convert"].stderr):
        said = [f"{name} {codes[name]} ({_first_line(ended[name])})" for name in ("check", "dry run", "convert")]
        yield f"disagreement: {'; '.join(said)}"


def _first_line(ended: Ended) -> str:
    if ended.stdout.startswith("{") and ended.code == 1:
        faults = json.loads(ended.stdout).get("faults") or [{}]
        return str(faults[0])[:200]
    return ended.stderr.strip().splitlines()[-1][:200] if ended.stderr.strip() else "nothing"


def _not_finite(out: Path, codes: Mapping[str, int]) -> Iterator[str]:
    for file in out.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            if not bool(tensor.isfinite().all()):
                yield f"silent: '{name}' of {file} is not finite"
                return


@torch.no_grad()
def _other_function(exact: bool) -> Iterator[str]:
    """Where transformers' own class loads the damaged source cleanly, we compute what it computes."""
    ids = torch.from_numpy(checkpoints.ids(2, seed=3))
    theirs = _by_transformers(Path("model"), ids)
    if theirs is None or not bool(theirs.isfinite().all()) or float(theirs.abs().max()) > 1e5:
        return
    COMPARED["with transformers"] += 1
    pairs: dict[str, Tensor | None] = {"our reading of the source": _by_reference(Path("model"), ids)}
    if exact:
        pairs["the result"] = _by_transformers(Path("out"), ids)
    for what, ours in pairs.items():
        if ours is None:
            yield f"silent: transformers cannot load {what}"
            continue
        error = float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-6))
        if not error < TOLERANCE:
            yield f"silent: {what} is {error:.2g} of the largest logit from transformers' own class"


def _by_transformers(folder: Path, ids: Tensor) -> Tensor | None:
    """Logits by transformers' class, or None where it does not load all of the folder and nothing but it."""
    from transformers import AutoModelForCausalLM

    try:
        model, told = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
        if any(told.get(key) for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")):
            return None
        logits: Tensor = model.eval()(ids, use_cache=False).logits
    except Exception:
        return None
    return logits


def _by_reference(folder: Path, ids: Tensor) -> Tensor:
    """Logits by our own reading of a source."""
    from converter import reference
    from converter.blocks import blocks
    from converter.families.opened import SourceModel

    source = SourceModel.open(folder)
    states = ids
    for ref in blocks(source.spec):
        block = source.read_block(ref, torch.float32)
        if ref.kind == "embeddings":
            states = reference.run_embeddings(block, source.spec, ids)
        elif ref.kind == "layer":
            states = reference.run_layer(block, source.spec, ref.index, states)
    return reference.run_head(block, source.spec, states)


def _put_back(sound: Path) -> Iterator[str]:
    """There and back again is every byte as it was."""
    before = json.loads(Path("../before.json").read_text())
    for file in Path("model").glob("*.safetensors"):
        if hashlib.sha256(file.read_bytes()).hexdigest() != before.get(f"room/{file}"):
            yield f"silent: {file} is another after two swaps"


def describe(error: BaseException) -> str:
    """The type and message of an exception, and the innermost lines of ours on its way."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in frames if "/converter/" in f.filename]
    where = f" at {frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {str(error)[:160]!r}{where}, from {' < '.join(reversed(ours[-3:]))}"
