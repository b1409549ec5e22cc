"""Sound inputs, the files of each that are damaged, and the commands that read them.

A subject is built once, in a folder of its own. Each case copies the folder, damages one file or two of the copy, and
runs the subject's commands there.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from fuzzing import checkpoints
from fuzzing.checkpoints import PROSE

NAIVE = "gpt2-to-llama-naive"


@dataclass(frozen=True)
class Subject:
    """A sound input.

    `build` makes its files in the current folder. `files` are those that are damaged, with their kinds. `commands`
    have a name for each command line. `judge` names what its results are compared with. `weight` says how often it
    is drawn.
    """

    build: Callable[[], None]
    files: dict[str, str]
    commands: dict[str, str]
    judge: str = ""
    weight: int = 2
    #: What a run with exit code 0 must have made, byte for byte as from the sound input.
    same: tuple[str, ...] = ()
    #: Folders that commands may change, beside what they are told to write.
    changes: tuple[str, ...] = ("out",)


def source_commands(recipe: str, model: str = "model") -> dict[str, str]:
    """What is asked of a checkpoint."""
    return {
        "inspect": f"inspect {model} --json",
        "check": f"check {model} --full --json",
        "dry run": f"convert {model} out --recipe {recipe} --dry-run --no-verify",
        "convert": f"convert {model} out --recipe {recipe} --no-verify",
    }


def _hugging_face(name: str, weights: str = "safetensors", tokenizer: bool = False) -> Callable[[], None]:
    def build() -> None:
        checkpoints.write(Path("model"), name, weights)
        if tokenizer:
            checkpoints.write_tokenizer(Path("model"))
        write_texts()

    return build


def write_texts() -> None:
    """Text in every form that is read."""
    import pyarrow
    import pyarrow.parquet

    ids = checkpoints.ids()
    np.save("ids.npy", ids)
    ids.astype(np.uint16).tofile("ids.bin")
    Path("prose.txt").write_text(PROSE)
    rows = [json.dumps({"text": PROSE[n * 40 : n * 40 + 90], "url": "x"}) for n in range(12)]
    Path("rows.jsonl").write_text("\n".join(rows) + "\n")
    pyarrow.parquet.write_table(pyarrow.table({"text": [PROSE[:90], PROSE[5:200]] * 6}), "rows.parquet")


def _stamped() -> None:
    """A LLaMA that the product wrote itself, with its conversion.json and recipe."""
    _hugging_face("llama")()
    run("convert model stamped --recipe llama-to-llama --text ids.npy")
    shutil.rmtree("model")
    Path("stamped").rename("model")


#: Families that are read and swapped, and the layout that is not theirs.
_FAMILIES = dict.fromkeys(("qwen2", "qwen3", "mistral", "gpt_neox"), "interleaved") | {"gptj": "half_split"}


def _families() -> None:
    for name in _FAMILIES:
        checkpoints.write(Path("model", name), name)


def _adapter() -> None:
    _hugging_face("llama")()
    checkpoints.write_adapter(Path("adapter"), Path("model"))


def _recipe() -> None:
    _hugging_face("gpt2")()
    run(f"recipes copy {NAIVE} recipe.yaml")
    heal = "calibration: {tokens: 64}\nheal:\n  tokens: 400\n  rate: 0.001\n"
    Path("recipe.yaml").write_text(Path("recipe.yaml").read_text() + heal)


def _gguf() -> None:
    Path("model").mkdir()
    checkpoints.write_gguf(Path("model/model.gguf"))
    np.save("ids.npy", checkpoints.ids())


def _meta() -> None:
    checkpoints.write_meta(Path("model"))
    np.save("ids.npy", checkpoints.ids())


def _nanogpt() -> None:
    checkpoints.write_nanogpt(Path("model"))
    np.save("ids.npy", checkpoints.ids())


def run(command: str) -> None:
    """One command of the product, which must succeed."""
    from click.testing import CliRunner

    from converter.cli.main import main

    result = CliRunner().invoke(main, command.split())
    if result.exit_code:
        raise RuntimeError(f"`converter {command}` on a sound input: {result.output}") from result.exception


# --- runs that did not end ------------------------------------------------------------------------------------


class Killed(BaseException):
    """Stands for SIGKILL."""


@contextmanager
def killed(where: str, after: int = 0) -> Iterator[None]:
    """Run what is inside until the function `where` is called once more than `after` times, and stop it there."""
    import pkgutil

    work, calls = pkgutil.resolve_name(where), 0

    def dying(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > after:
            raise Killed
        return work(*arguments, **options)

    try:
        with mock.patch(where, dying):
            yield
    except Killed:
        return
    raise RuntimeError(f"{where} was called {calls} times only")


def _unfinished(where: str, after: int = 0) -> Callable[[], None]:
    def build() -> None:
        _hugging_face("gpt2")()
        with killed(where, after):
            run(f"convert model out --recipe {NAIVE} --text ids.npy --max-shard-size 6KB")

    return build


def _unfinished_swap(where: str) -> Callable[[], None]:
    def build() -> None:
        _hugging_face("llama")()
        with killed(where):
            run("rope swap model --in-place --to interleaved")

    return build


HEAL = (
    "--text ids.npy --set heal.tokens=144 --set heal.context=24 --set heal.sequences_per_step=2 "
    "--set heal.evaluate_every=1 --set heal.save_every=1 --device cpu"
)


def _pair() -> None:
    """A LLaMA that stands for what a GPT-2 became."""
    _hugging_face("gpt2")()
    run(f"convert model llama --recipe {NAIVE} --text ids.npy")


def _unfinished_healing(options: str = "") -> Callable[[], None]:
    def build() -> None:
        _pair()
        with killed("converter.healing.snapshots.Snapshots.save", 2):
            run(f"heal llama out --teacher model {HEAL} {options}")

    return build


_CONFIG = {"model/config.json": "json"}
_WEIGHTS = {"model/model.safetensors": "safetensors"}
_TOKENIZER = {
    "model/tokenizer.json": "json",
    "model/tokenizer_config.json": "json",
    "model/special_tokens_map.json": "json",
    "model/vocab.json": "json",
    "model/merges.txt": "yaml",
}
_SHARDS = {f"model/model-0000{n}-of-00002.safetensors": "safetensors" for n in (1, 2)}
_SWAPS = {
    "inspect": "inspect model",
    "check": "check model --full",
    "detect": "rope detect model",
    "swap": "rope swap model out --to interleaved",
    "eval": "eval model --text ids.npy --device cpu --stride 8",
}


def _hf(name: str, recipe: str, **others: Any) -> Subject:
    files = {**_CONFIG, "model/generation_config.json": "json", **_WEIGHTS}
    return Subject(_hugging_face(name), files, source_commands(recipe), judge="source", **others)


SUBJECTS: dict[str, Subject] = {
    "gpt2": _hf("gpt2", NAIVE, weight=6),
    "gpt2, verified": Subject(
        _hugging_face("gpt2"),
        {**_CONFIG, **_WEIGHTS, "ids.npy": "npy"},
        {
            "eval": "eval model --text ids.npy --device cpu --stride 8 --json",
            "verify": "verify model model --text ids.npy --device cpu",
            "convert": f"convert model out --recipe {NAIVE} --text ids.npy",
        },
        weight=3,
    ),
    "opt": _hf("opt", NAIVE),
    "openai-gpt": Subject(
        _hugging_face("openai-gpt"),
        {**_CONFIG, **_WEIGHTS},
        {"inspect": "inspect model", "check": "check model --full", "dry run": "convert model out --dry-run"},
        weight=1,
    ),
    "llama": _hf("llama", "llama-to-llama", weight=4),
    "llama, scaled": _hf("llama, scaled", "llama-to-llama"),
    "families": Subject(
        _families,
        {f"model/{name}/config.json": "json" for name in _FAMILIES},
        {
            f"{what} {name}": f"{what} model/{name}{rest}"
            for name, other in _FAMILIES.items()
            for what, rest in (("inspect", " --json"), ("check", ""), ("rope swap", f" out-{name} --to {other}"))
        },
        changes=tuple(f"out-{name}" for name in _FAMILIES),
        weight=1,
    ),
    "tokenizer": Subject(
        _hugging_face("gpt2", tokenizer=True),
        _TOKENIZER,
        {
            **source_commands(NAIVE),
            "eval": "eval model --text prose.txt --device cpu --stride 8 --tokens 2000",
        },
        judge="agreement",
        weight=4,
    ),
    "sharded": Subject(
        _hugging_face("gpt2", "sharded"),
        {"model/model.safetensors.index.json": "json", **_SHARDS, **_CONFIG},
        source_commands(NAIVE),
        judge="source",
        weight=3,
    ),
    "bin": Subject(
        _hugging_face("gpt2", "bin"),
        {"model/pytorch_model.bin": "pickle"},
        source_commands(NAIVE),
        judge="source",
        weight=5,
    ),
    "old bin": Subject(
        _hugging_face("llama", "old bin"),
        {"model/pytorch_model.bin": "pickle"},
        source_commands("llama-to-llama"),
        judge="source",
        weight=2,
    ),
    "sharded bin": Subject(
        _hugging_face("gpt2", "sharded bin"),
        {"model/pytorch_model.bin.index.json": "json"}
        | {f"model/pytorch_model-0000{n}-of-00002.bin": "pickle" for n in (1, 2)},
        source_commands(NAIVE),
        judge="source",
    ),
    "nanogpt": Subject(_nanogpt, {"model/ckpt.pt": "pickle"}, source_commands(NAIVE), judge="agreement", weight=3),
    "gguf": Subject(
        _gguf,
        {"model/model.gguf": "gguf"},
        source_commands("gguf-to-hf", "model/model.gguf") | {"swap": "rope swap model/model.gguf out2 --to half_split"},
        judge="agreement",
        weight=5,
        changes=("out", "out2"),
    ),
    "meta": Subject(
        _meta,
        {"model/params.json": "json", "model/consolidated.00.pth": "pickle", "model/consolidated.01.pth": "pickle"},
        source_commands("meta-to-hf") | {"swap": "rope swap model out2 --to half_split"},
        judge="agreement",
        weight=3,
        changes=("out", "out2"),
    ),
    "swap": Subject(_hugging_face("llama"), {**_CONFIG, **_WEIGHTS}, _SWAPS, weight=2),
    "swap in place": Subject(
        _hugging_face("llama"),
        {**_CONFIG, **_WEIGHTS},
        {"swap": "rope swap model --in-place --to interleaved", "back": "rope swap model --in-place --to half_split"},
        judge="put back",
        changes=("model",),
    ),
    "stamp": Subject(
        _stamped,
        {"model/conversion.json": "json", "model/recipe.yaml": "yaml", "model/generation_config.json": "json"},
        {**_SWAPS, "verify": "verify model model --text ids.npy --device cpu"},
        weight=2,
    ),
    "adapter": Subject(
        _adapter,
        {"adapter/adapter_config.json": "json", "adapter/adapter_model.safetensors": "safetensors", **_CONFIG},
        {
            "swap": "rope swap adapter out --adapter --to interleaved",
            "swap of a named base": "rope swap adapter out2 --adapter --base model --to interleaved",
        },
        changes=("out", "out2"),
        weight=3,
    ),
    "recipe": Subject(
        _recipe,
        {"recipe.yaml": "yaml"},
        {
            "check": "recipes check recipe.yaml",
            "dry run": "convert model out --recipe recipe.yaml --dry-run --no-verify",
            "convert": "convert model out --recipe recipe.yaml --no-verify",
        },
        weight=4,
    ),
    "text": Subject(
        _hugging_face("gpt2", tokenizer=True),
        {"ids.npy": "npy", "ids.bin": "bin", "prose.txt": "prose", "rows.jsonl": "jsonl", "rows.parquet": "parquet"},
        {
            f"{what} {file}": line.format(file=file)
            for file in ("ids.npy", "ids.bin", "prose.txt", "rows.jsonl", "rows.parquet")
            for what, line in (
                ("eval", "eval model --text {file} --device cpu --stride 8 --tokens 2000"),
                ("dry run", f"convert model out --recipe {NAIVE} --dry-run --text {{file}}"),
            )
            if (what, file) != ("dry run", "rows.parquet")
        },
        weight=5,
    ),
    "unfinished conversion": Subject(
        _unfinished("converter.files.writer.CheckpointWriter.write", 14),
        {},
        {"resume": f"convert model out --recipe {NAIVE} --text ids.npy --max-shard-size 6KB --resume"},
        same=("out/*.safetensors", "out/config.json", "out/*.index.json"),
        weight=4,
        changes=("out", ".out.partial"),
    ),
    "unfinished swap, begun": Subject(
        _unfinished_swap("converter.rope.journal.Journal.apply"),
        {},
        {"resume": "rope swap model --in-place --to interleaved"},
        same=("model/*.safetensors",),
        changes=("model",),
    ),
    "unfinished swap, done": Subject(
        _unfinished_swap("converter.rope.journal.Journal.finish"),
        {},
        {"roll back": "rope swap model --in-place --to interleaved --roll-back"},
        same=("model/*.safetensors",),
        changes=("model",),
    ),
    "healing": Subject(
        _pair,
        {f"llama/{n}": "json" for n in ("config.json", "generation_config.json", "conversion.json")}
        | {"llama/recipe.yaml": "yaml", "llama/model.safetensors": "safetensors", "model/config.json": "json"},
        {"heal": f"heal llama out --teacher model {HEAL}"},
        weight=1,
    ),
    "unfinished healing": Subject(
        _unfinished_healing(),
        {},
        {"resume": f"heal llama out --teacher model {HEAL} --resume"},
        same=("out/*.safetensors",),
        weight=1,
        changes=("out", ".out.partial"),
    ),
    "recorded answers": Subject(
        _unfinished_healing("--set heal.teacher=recorded --set heal.top_k=5"),
        {},
        {"resume": f"heal llama out --teacher model {HEAL} --set heal.teacher=recorded --set heal.top_k=5 --resume"},
        same=("out/*.safetensors",),
        weight=1,
        changes=("out", ".out.partial"),
    ),
}

#: Where the files of unfinished runs lie; which there are is known when they are built.
UNFINISHED = {
    "unfinished conversion": ".out.partial",
    "unfinished swap, begun": "model/.rope-swap",
    "unfinished swap, done": "model/.rope-swap",
    "unfinished healing": ".out.partial",
    "recorded answers": ".out.partial",
}
_BY_END = {
    ".json": "json",
    ".jsonl": "jsonl",
    ".safetensors": "safetensors",
    ".pt": "pickle",
    ".npy": "bytes",
    "plan": "json",
}


def damageable(name: str, room: Path) -> dict[str, str]:
    """The files of a built subject that are damaged, and their kinds."""
    subject = SUBJECTS[name]
    if name not in UNFINISHED:
        return subject.files
    folder = room / UNFINISHED[name]
    found = sorted(file for file in folder.rglob("*") if file.is_file() and not file.is_symlink())
    if name == "recorded answers":
        found = [file for file in found if "teacher-" in str(file)] or found
    assert found, f"{name} leaves nothing in {folder}"
    return {
        file.relative_to(room).as_posix(): next(
            (kind for end, kind in _BY_END.items() if file.name.endswith(end)), "bytes"
        )
        for file in found
    }
