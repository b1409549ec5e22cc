"""Sources by Hub id, from a cache made by hand as huggingface_hub makes it; no network."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import models
import pytest
import torch
from click.testing import CliRunner
from huggingface_hub import constants

import converter
from converter.cli.main import main
from converter.errors import CheckpointError
from converter.families.opened import SourceModel
from converter.files.hub import hub_id, local_path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def store(cache: Path, name: str, folder: Path) -> Path:
    """A folder as a snapshot: links to blobs that are named by their hash."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / COMMIT
    for part in (snapshot, repository / "blobs", repository / "refs"):
        part.mkdir(parents=True)
    for file in folder.iterdir():
        blob = repository / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
        file.rename(blob)
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    (repository / "refs" / "main").write_text(COMMIT)
    return snapshot


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, offline, seen from an empty folder."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "hub"


@pytest.fixture
def tiny(cache: Path, tmp_path: Path) -> Path:
    """The snapshot of `gpt2` in the cache."""
    return store(cache, "gpt2", models.save(models.gpt2(), tmp_path / "tiny"))


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, list(map(str, arguments)))
    return result.exit_code, result.output


def test_a_cached_model_is_a_source_for_every_command(tiny: Path, text: Path, tmp_path: Path) -> None:
    assert local_path("gpt2") == tiny
    code, output = run("inspect", "gpt2", "--json")
    assert (code, json.loads(output)["path"]) == (0, str(tiny))
    assert run("check", "gpt2", "--full") == (0, "gpt2: sound, 0 remarks (files, headers and tensors)\n")
    code, output = run("convert", "gpt2", "llama", "--text", text)
    assert code == 0, output
    assert Path("llama/model.safetensors").is_file()
    code, output = run("verify", "gpt2", "llama", "--text", text)
    assert code == 0, output
    assert not Path("gpt2").exists()


def test_an_id_with_an_organisation(cache: Path, tmp_path: Path, ids: torch.Tensor) -> None:
    model = models.gpt2()
    snapshot = store(cache, "some-org/GPT.2_b", models.save(model, tmp_path / "tiny"))
    source = SourceModel.open("some-org/GPT.2_b")
    assert source.checkpoint.path == snapshot
    assert source.checkpoint.name == "some-org/GPT.2_b"
    assert torch.equal(models.reference_logits(Path("some-org/GPT.2_b"), ids), models.reference_logits(snapshot, ids))


def test_a_folder_here_wins(tiny: Path, tmp_path: Path) -> None:
    models.save(models.llama(), Path("gpt2"))
    assert converter.inspect("gpt2").family == "llama"


def test_the_name_of_a_snapshot() -> None:
    assert hub_id(Path("/cache/models--a--b-c/snapshots/0123")) == "a/b-c"
    assert hub_id(Path("/cache/models--gpt2/snapshots/0123")) == "gpt2"
    assert hub_id(Path("/models/gpt2")) is None


@pytest.mark.parametrize("command", [("inspect", "gpt3"), ("check", "org/gpt3"), ("convert", "gpt3", "out")])
def test_what_is_neither_here_nor_to_be_had_is_one_clear_error(command: tuple[str, ...], cache: Path) -> None:
    code, output = run(*command)
    assert code == 2
    assert output.startswith(f"converter: {command[1]}: this is neither a file or folder here, nor could it be fetched")
    assert "HF_HUB_OFFLINE" in output
    assert output.count("\n") == 1
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    "path", ["../gpt2", "/gpt2", "a/b/c", "ckpt.pt", "model.safetensors", "runs/ckpt.pt", "~/gpt2"]
)
def test_a_path_is_never_looked_for_on_the_hub(path: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the Hub was asked")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(CheckpointError, match="no such file or folder"):
        SourceModel.open(path)


REPOSITORY = {
    "both": ("model.safetensors", "pytorch_model.bin"),
    "shards": ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"),
    "pickle": ("pytorch_model.bin",),
    "pickled shards": ("pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json"),
}


@pytest.mark.parametrize("weights", REPOSITORY)
def test_only_what_a_conversion_needs_is_fetched(
    weights: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """safetensors where there are some, pickles else; no other framework's weights and no exports."""
    needed = ("config.json", "generation_config.json", "tokenizer.json", "vocab.json", "merges.txt")
    others = ("tf_model.h5", "flax_model.msgpack", "rust_model.ot", "README.md", "onnx/config.json", "onnx/model.onnx")
    fetched: set[str] = set()

    def download(name: str, allow_patterns: list[str]) -> str:
        assert name == "org/model"
        for file in (*needed, *others, *REPOSITORY[weights]):
            if any(fnmatch.fnmatch(file, pattern) for pattern in allow_patterns):
                fetched.add(file)
                (tmp_path / "snapshot").mkdir(exist_ok=True)
                (tmp_path / "snapshot" / file).touch()
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert local_path("org/model") == tmp_path / "snapshot"
    assert fetched == {*needed, *REPOSITORY[weights]} - ({"pytorch_model.bin"} if weights == "both" else set())


def environment(tmp_path: Path, **variables: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    return {**kept, "HF_HOME": str(tmp_path), **variables}


def test_the_variables_of_huggingface_hub_are_obeyed(cache: Path, tiny: Path, tmp_path: Path) -> None:
    """In a process of its own, as users run it: the cache of HF_HOME, and HF_HUB_OFFLINE."""
    command = [sys.executable, "-m", "converter", "inspect", "gpt2", "--json"]
    done = subprocess.run(
        command, env=environment(tmp_path, HF_HUB_OFFLINE="1"), capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["path"] == str(tiny)
    assert done.stderr == ""


@pytest.mark.parametrize("cached", [True, False])
def test_a_network_that_is_not_there(cached: bool, cache: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The cache still serves; what it lacks is one clear error."""
    if cached:
        request.getfixturevalue("tiny")
    command = [sys.executable, "-m", "converter", "inspect", "gpt2", "--json"]
    variables = environment(tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60)
    assert done.returncode == (0 if cached else 2)
    if not cached:
        assert done.stderr.splitlines()[-1].startswith(
            "converter: gpt2: this is neither a file or folder here, nor could"
        )
        assert "Traceback" not in done.stderr
