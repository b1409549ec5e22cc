"""`rope swap`: rows move and nothing else; the layout is settled first (cases R2, R3, R5, R6); a kill loses nothing."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from models import random_ids, relative, run, save, write
from safetensors.torch import load_file, save_file
from test_rope_families import GPTJ, LLAMA_LIKE, NEOX, make

from converter.conversion.run import convert
from converter.errors import CheckpointError, ConverterError, UnsupportedError
from converter.families.opened import SourceModel
from converter.layout import swap_rows
from converter.measure.check import check
from converter.measure.inspect import inspect
from converter.measure.models import RunnableCheckpoint, load_plain
from converter.measure.verify import expected_kl
from converter.rope import journal, patch, scores
from converter.rope.journal import FOLDER
from converter.rope.moves import unit_edges
from converter.rope.patch import roll_back, swap_in_place
from converter.rope.swap import swap
from converter.show.progress import Progress
from converter.spec import RopeLayout

INTERLEAVED, HALF_SPLIT = RopeLayout.INTERLEAVED, RopeLayout.HALF_SPLIT

MODELS = {
    "llama": ("Llama", LLAMA_LIKE),
    "llama with biases": ("Llama", LLAMA_LIKE | {"attention_bias": True}),
    "qwen2": ("Qwen2", {**LLAMA_LIKE, "hidden_size": 96}),
    "qwen3": ("Qwen3", LLAMA_LIKE),
    "gpt_neox": ("GPTNeoX", NEOX | {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    "gptj": ("GPTJ", GPTJ),
}
#: Tensors that a swap touches in each of two layers.
TOUCHED = {"llama": 2, "llama with biases": 4, "qwen2": 4, "qwen3": 4, "gpt_neox": 2, "gptj": 2}


class Said(Progress):
    """What a run says."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def other(layout: RopeLayout) -> RopeLayout:
    return INTERLEAVED if layout is HALF_SPLIT else HALF_SPLIT


def native(folder: Path) -> RopeLayout:
    rope = SourceModel.open(folder).spec.rope
    assert rope is not None
    return rope.layout


def logits(folder: Path, layout: RopeLayout) -> torch.Tensor:
    source = SourceModel.open(folder)
    assert source.spec.rope is not None
    spec = source.spec.replace(rope=dataclasses.replace(source.spec.rope, layout=layout))
    return run(lambda ref: source.read_block(ref, torch.float64), spec, random_ids())


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


@pytest.fixture(params=MODELS)
def case(request, tmp_path: Path) -> tuple[str, Path]:
    return request.param, save(make(*MODELS[request.param]), tmp_path / "model")


class TestCopy:
    def test_the_function_is_the_same_under_the_other_layout_and_only_head_rows_moved(self, case, tmp_path):
        name, folder = case
        before = native(folder)
        said: list[str] = []
        report = swap(folder, tmp_path / "out", to=other(before), say=said.append)
        out = tmp_path / "out"
        assert relative(logits(out, other(before)), logits(folder, before)) <= 1e-12
        assert relative(logits(out, before), logits(folder, before)) > 1e-3
        assert report.score_error <= 1e-12
        old, new = load_file(folder / "model.safetensors"), load_file(out / "model.safetensors")
        changed = [key for key in old if not torch.equal(old[key], new[key])]
        assert len(changed) == report.tensors == 2 * TOUCHED[name]
        assert f"{report.tensors} tensors" in said[0]
        assert SourceModel.open(out).stamp is other(before)
        assert (out / "config.json").read_bytes() == (folder / "config.json").read_bytes()

    def test_back_again_is_every_byte_of_the_weights(self, case, tmp_path):
        _, folder = case
        before = native(folder)
        swap(folder, tmp_path / "there", to=other(before))
        swap(tmp_path / "there", tmp_path / "back", to=before)
        assert (tmp_path / "back/model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
        history = json.loads((tmp_path / "back/conversion.json").read_text())["rope_swaps"]
        assert [each["to"] for each in history] == [other(before).value, before.value]

    def test_shards_and_other_files(self, tmp_path):
        model = make("Llama", LLAMA_LIKE)
        model.save_pretrained(tmp_path / "model", max_shard_size="20KB")
        (tmp_path / "model/notes.txt").write_text("kept")
        (tmp_path / "model/pytorch_model_old.bin").write_bytes(b"weights of the old order")
        report = swap(tmp_path / "model", tmp_path / "out", to=INTERLEAVED)
        assert relative(logits(tmp_path / "out", INTERLEAVED), logits(tmp_path / "model", HALF_SPLIT)) <= 1e-12
        assert (tmp_path / "out/notes.txt").read_text() == "kept"
        assert report.left_behind == ("pytorch_model_old.bin",)
        assert not (tmp_path / "out/pytorch_model_old.bin").exists()

    def test_the_check_of_the_scores_sees_rows_that_are_elsewhere(self, tmp_path, monkeypatch):
        folder = save(make("Llama", LLAMA_LIKE), tmp_path / "model")
        monkeypatch.setattr("converter.rope.moves.np.take", lambda rows, order, axis, out, mode: np.copyto(out, rows))
        with pytest.raises(ConverterError, match="scores of layer 0 differ"):
            swap(folder, tmp_path / "out", to=INTERLEAVED)
        assert not (tmp_path / "out").exists()
        before = contents(folder)
        with pytest.raises(ConverterError, match="scores of layer 0 differ"):
            swap_in_place(folder, to=INTERLEAVED)
        assert contents(folder) == before
        assert not (folder / FOLDER).exists()

    def test_units_that_no_row_leaves(self):
        assert unit_edges(np.array([0, 2, 1, 3, 5, 4])).tolist() == [0, 1, 3, 4, 6]

    def test_scores_are_looked_at_far_enough(self):
        assert scores.POSITIONS >= 256


class TestSettling:
    def test_stamped_in_the_wanted_layout_is_refused(self, tmp_path):
        folder = save(make("Llama", LLAMA_LIKE), tmp_path / "model")
        swap(folder, tmp_path / "out", to=INTERLEAVED)
        with pytest.raises(ConverterError, match="interleaved already"):
            swap(tmp_path / "out", tmp_path / "again", to=INTERLEAVED)
        assert not (tmp_path / "again").exists()

    def test_unstamped_in_the_declared_layout_is_refused(self, tmp_path):
        folder = save(make("Llama", LLAMA_LIKE), tmp_path / "model")
        with pytest.raises(ConverterError, match="half_split already"):
            swap(folder, tmp_path / "out", to=HALF_SPLIT)

    @pytest.mark.parametrize("stamped", [True, False])
    def test_a_claim_that_stamp_or_family_contradict_is_an_error_that_names_both(self, stamped, tmp_path):
        folder = save(make("Llama", LLAMA_LIKE), tmp_path / "model")
        claimed, to = INTERLEAVED, HALF_SPLIT
        if stamped:
            swap(folder, tmp_path / "stamped", to=INTERLEAVED)
            folder, claimed, to = tmp_path / "stamped", HALF_SPLIT, INTERLEAVED
        before = contents(folder)
        with pytest.raises(ConverterError) as caught:
            swap(folder, tmp_path / "out", to=to, claimed=claimed)
        message = str(caught.value)
        assert "--from" in message
        assert ("stamp" if stamped else "family 'llama'") in message
        assert "interleaved" in message
        assert "half_split" in message
        with pytest.raises(ConverterError):
            swap_in_place(folder, to=to, claimed=claimed)
        assert contents(folder) == before
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize(
        "record",
        [
            *('{"rope": {"layout": "sideways"}}', '{"rope": {"layout": []}}', '{"rope": ["layout"]}', "[]", "{", ""),
            *('{"rope_swaps": {"a": 1}}', '{"verification": 1}', '{"a":' * 10_000 + "1" + "}" * 10_000),
        ],
        ids=lambda record: record[:20],
    )
    def test_a_damaged_record_is_an_error(self, record, tmp_path):
        folder = save(make("Llama", LLAMA_LIKE), tmp_path / "model")
        (folder / "conversion.json").write_text(record)
        with pytest.raises(CheckpointError, match=r"conversion\.json: the record of the conversion cannot be read"):
            swap(folder, tmp_path / "out", to=INTERLEAVED)

    @pytest.mark.parametrize("kl", ["NaN", "1e999", '"much"', "null", "[]"])
    def test_a_record_whose_kl_is_no_number_allows_nothing(self, kl, tmp_path):
        (tmp_path / "conversion.json").write_text(f'{{"verification": {{"total": {{"kl": {kl}}}}}}}')
        with pytest.raises(CheckpointError, match="no KL"):
            expected_kl(tmp_path)

    def test_a_model_without_rope_is_refused(self, tmp_path):
        from models import gpt2

        with pytest.raises(UnsupportedError, match="no RoPE"):
            swap(save(gpt2(), tmp_path / "model"), tmp_path / "out", to=INTERLEAVED)

    @pytest.mark.parametrize(
        ("replaced", "by"),
        [
            ("q_proj.weight", {"q_proj.qweight": torch.int32, "q_proj.scales": torch.float16}),  # GPTQ, AWQ
            ("k_proj.weight", {"k_proj.weight": torch.float8_e4m3fn, "k_proj.weight_scale": torch.float32}),
            ("q_proj.weight", {"q_proj.weight": torch.uint8, "q_proj.weight.absmax": torch.float32}),
        ],
    )
    def test_quantised_q_or_k_is_refused_by_name(self, replaced, by, tmp_path):
        folder = save(make("Llama", LLAMA_LIKE), tmp_path / "model")
        tensors = load_file(folder / "model.safetensors")
        stem = "model.layers.0.self_attn."
        weight = tensors.pop(stem + replaced)
        for name, dtype in by.items():
            tensors[stem + name] = torch.zeros(weight.shape).to(dtype)
        config = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "some"}}
        write(folder, config, tensors)
        with pytest.raises(UnsupportedError, match=r"layers\.0\.self_attn\.[qk]_proj\.\w+.*quantised"):
            swap(folder, tmp_path / "out", to=INTERLEAVED)

    def test_a_pickle_is_refused(self, tmp_path):
        folder = save(make("Llama", LLAMA_LIKE), tmp_path / "model")
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
        with pytest.raises(UnsupportedError, match="pickle"):
            swap(folder, tmp_path / "out", to=INTERLEAVED)


class TestStamp:
    """A stamp stands in for the family's declaration, wherever a checkpoint is read."""

    @pytest.fixture
    def stamped(self, tmp_path: Path) -> Path:
        save(make("Llama", LLAMA_LIKE | {"attention_bias": True}), tmp_path / "model")
        swap(tmp_path / "model", tmp_path / "stamped", to=INTERLEAVED)
        return tmp_path / "stamped"

    def test_it_is_read_by_the_reference_model_and_by_transformers_class(self, stamped):
        model, ids = load_plain(stamped.parent / "model"), random_ids()
        source = SourceModel.open(stamped)
        assert (source.spec.rope.layout, source.declared_layout) == (INTERLEAVED, HALF_SPLIT)
        with torch.no_grad():
            wanted = model(ids).logits
            found = run(lambda ref: source.read_block(ref, torch.float32), source.spec, ids)
            assert relative(found, wanted) <= 1e-5
            assert relative(RunnableCheckpoint(stamped).model.logits(ids), wanted) <= 1e-5
            (stamped / "conversion.json").unlink()
            assert relative(RunnableCheckpoint(stamped).model.logits(ids), wanted) > 1e-2

    def test_a_conversion_writes_the_layout_that_its_target_reads(self, stamped, tmp_path):
        ids = random_ids()
        convert(stamped, tmp_path / "out", verify=False)
        with torch.no_grad():
            wanted = load_plain(stamped.parent / "model")(ids).logits
            assert torch.equal(load_plain(tmp_path / "out")(ids).logits, wanted)
            assert relative(load_plain(stamped)(ids).logits, wanted) > 1e-2
        assert SourceModel.open(tmp_path / "out").stamp is HALF_SPLIT

    @pytest.mark.parametrize("how", ["saved by transformers", "trained", "copied", "rows swapped by others"])
    def test_it_does_not_speak_for_other_weights(self, how, stamped, tmp_path):
        """Whatever is saved into the folder is read as if there were no record, and every command says so."""
        model = load_plain(stamped.parent / "model")
        if how == "trained":  # a fine-tune of q alone
            for name, parameter in model.named_parameters():
                parameter.data += 1e-3 * torch.randn(parameter.shape) * ("q_proj" in name)
        if how == "copied":  # with all metadata that its file has
            shutil.copy(stamped.parent / "model/model.safetensors", stamped / "model.safetensors")
        elif how == "rows swapped by others":
            tensors = load_file(stamped / "model.safetensors")
            for name in tensors:
                for part, heads in (
                    ("q_proj", LLAMA_LIKE["num_attention_heads"]),
                    ("k_proj", LLAMA_LIKE["num_key_value_heads"]),
                ):
                    if part in name:
                        width = len(tensors[name]) // heads
                        tensors[name] = swap_rows(tensors[name], heads, width, width, HALF_SPLIT).contiguous()
            save_file(tensors, stamped / "model.safetensors", metadata={"format": "pt"})
        else:
            model.save_pretrained(stamped)
        ids = random_ids()
        source = SourceModel.open(stamped)
        assert (source.stamp, source.spec.rope.layout) == (None, HALF_SPLIT)
        with torch.no_grad():
            assert relative(RunnableCheckpoint(stamped).model.logits(ids), model(ids).logits) <= 1e-5
        said = Said()
        convert(stamped, tmp_path / "out", verify=False, progress=said)
        for remarks in (said.lines, inspect(stamped).warnings, [fault.what for fault in check(stamped)]):
            assert any("conversion.json speaks of other weights" in remark for remark in remarks)
        assert SourceModel.open(tmp_path / "out").stamp is HALF_SPLIT

    def test_it_speaks_for_its_rows_whatever_else_changes(self, stamped):
        tensors = load_file(stamped / "model.safetensors")
        tensors["lm_head.weight"] += 1
        save_file(tensors, stamped / "model.safetensors", metadata={"format": "pt"})
        assert SourceModel.open(stamped).stamp is INTERLEAVED
        assert not inspect(stamped).warnings

    def test_what_was_measured_is_not_carried_on_to_other_weights(self, stamped, tmp_path):
        file = stamped / "conversion.json"
        content = json.loads(file.read_text()) | {"verification": {"total": {"kl": 0.25}}}
        file.write_text(json.dumps(content))
        assert expected_kl(stamped) == 0.25
        swap(stamped, tmp_path / "back", to=HALF_SPLIT)
        assert expected_kl(tmp_path / "back") == 0.25
        load_plain(stamped.parent / "model").save_pretrained(tmp_path / "back")  # the same weights
        assert expected_kl(tmp_path / "back") == 0.25
        tensors = load_file(stamped / "model.safetensors")
        tensors["lm_head.weight"] += 1
        save_file(tensors, stamped / "model.safetensors", metadata={"format": "pt"})
        assert expected_kl(stamped) is None
        swap(stamped, tmp_path / "again", to=HALF_SPLIT)
        assert "verification" not in json.loads((tmp_path / "again/conversion.json").read_text())

    def test_it_does_not_speak_for_other_files(self, stamped):
        weights = load_file(stamped / "model.safetensors")
        torch.save(weights, stamped / "pytorch_model.bin")
        (stamped / "model.safetensors").unlink()
        assert SourceModel.open(stamped).stamp is None
        assert native(stamped) is HALF_SPLIT


class TestInPlace:
    def test_equals_the_copy_and_comes_back(self, case, tmp_path):
        _, folder = case
        before, bytes_before = native(folder), contents(folder)
        swap(folder, tmp_path / "copy", to=other(before))
        report = swap_in_place(folder, to=other(before))
        assert report.score_error <= 1e-12
        assert contents(folder) == contents(tmp_path / "copy")
        assert sorted(file.name for file in folder.iterdir()) == ["config.json", "conversion.json", "model.safetensors"]
        swap_in_place(folder, to=before)
        assert contents(folder)["model.safetensors"] == bytes_before["model.safetensors"]

    def test_links_are_refused(self, tmp_path):
        folder = save(make("Llama", LLAMA_LIKE), tmp_path / "model")
        os.link(folder / "model.safetensors", tmp_path / "elsewhere")
        with pytest.raises(ConverterError, match="link"):
            swap_in_place(folder, to=INTERLEAVED)

    def test_what_the_disk_says_in_the_background_stops_the_swap(self, tmp_path, monkeypatch):
        """The system tells of a page that could not be written once, to whoever syncs first."""
        folder = save(make("Llama", LLAMA_LIKE), tmp_path / "model")
        before, sync, told = contents(folder), journal.fsync, []

        def broken(path):
            if path.suffix == ".safetensors" and not told:
                told.append(path)
                raise OSError(errno.EIO, "Input/output error")
            sync(path)

        monkeypatch.setattr(journal, "fsync", broken)
        with pytest.raises(ConverterError, match="Input/output error"):
            swap_in_place(folder, to=INTERLEAVED)
        assert roll_back(folder)
        assert contents(folder) == before

    @pytest.mark.parametrize("finish", ["resume", "roll back"])
    def test_stopped_at_every_system_call(self, finish, tmp_path, monkeypatch):
        """Each call that writes, syncs, renames or removes is once the last one."""
        original = save(make("Llama", LLAMA_LIKE), tmp_path / "model")
        done = shutil.copytree(original, tmp_path / "done")
        swap_in_place(done, to=INTERLEAVED)
        stops = 0
        for stop in range(200):
            folder = shutil.copytree(original, tmp_path / f"run{stop}")
            with monkeypatch.context() as patched:
                stopped = not run_until(stop, folder, patched)
            if not stopped:
                break
            stops += 1
            if finish == "resume":
                finish_swap(folder)
                assert contents(folder) == contents(done)
            elif roll_back(folder):
                assert contents(folder) == contents(original)
            else:
                assert contents(folder) in (contents(original), contents(done))
            assert not (folder / FOLDER).exists()
            shutil.rmtree(folder)
        assert stops > 10

    def test_another_direction_does_not_go_on_with_it(self, tmp_path, monkeypatch):
        folder = save(make("Llama", LLAMA_LIKE), tmp_path / "model")
        with monkeypatch.context() as patched:
            patched.setattr(patch.Journal, "apply", stop)
            with pytest.raises(Stopped):
                swap_in_place(folder, to=INTERLEAVED)
        with pytest.raises(ConverterError, match="unfinished swap to interleaved"):
            swap_in_place(folder, to=HALF_SPLIT)
        with pytest.raises(CheckpointError, match="its rows are in two layouts"):  # nobody reads it meanwhile
            SourceModel.open(folder)
        assert any("its rows are in two layouts" in fault.what for fault in check(folder))
        assert roll_back(folder)
        assert not check(folder)
        assert not roll_back(folder)

    @pytest.mark.parametrize("name", ["old", "plan"])
    def test_a_journal_with_one_other_bit_touches_nothing(self, name, tmp_path, monkeypatch):
        folder = save(make("Llama", LLAMA_LIKE), tmp_path / "model")
        with monkeypatch.context() as patched:
            patched.setattr(patch.Journal, "apply", stop)
            with pytest.raises(Stopped):
                swap_in_place(folder, to=INTERLEAVED)
        before, file = contents(folder), folder / FOLDER / name
        whole = file.read_bytes()
        for back in range(1, 1500, 100):  # the end of `old` is a tensor's
            file.write_bytes(whole[:-back] + bytes([whole[-back] ^ 4]) + whole[len(whole) - back + 1 :])
            for finish in (lambda folder: swap_in_place(folder, to=INTERLEAVED), roll_back):
                with pytest.raises(
                    CheckpointError, match="the journal of a swap is damaged, and this command changes nothing"
                ):
                    finish(folder)
                assert contents(folder) == before
        file.write_bytes(whole)
        assert roll_back(folder)

    @pytest.mark.slow
    def test_killed_at_fifty_random_moments(self, tmp_path):
        """Moments after the journal appeared: before it a kill has nothing to lose."""
        original = save(make("Llama", {**LLAMA_LIKE, "hidden_size": 768, "num_hidden_layers": 12}), tmp_path / "model")
        done = shutil.copytree(original, tmp_path / "done")
        took = started(done)[1]()
        unfinished = 0
        for seed in range(50):
            folder = shutil.copytree(original, tmp_path / "run")
            process, _ = started(folder)
            time.sleep(took * random.Random(seed).random())
            process.send_signal(signal.SIGKILL)
            process.wait()
            unfinished += (folder / FOLDER).exists()
            finish_swap(folder)
            assert contents(folder) == contents(done)
            shutil.rmtree(folder)
        assert unfinished >= 10


def started(folder: Path) -> tuple[subprocess.Popen[bytes], Callable[[], float]]:
    """A swap in place that has begun its journal, and what waits for its end and tells how long that took."""
    process = subprocess.Popen(command(folder), stdout=subprocess.DEVNULL)
    while not (folder / FOLDER).exists() and process.poll() is None:
        time.sleep(0.0005)
    start = time.monotonic()

    def wait() -> float:
        assert process.wait() == 0
        return time.monotonic() - start

    return process, wait


class Stopped(BaseException):
    """As a kill: nothing may catch it."""


def stop(*arguments: object, **keywords: object) -> None:
    raise Stopped


class Dying:
    """Counts system calls, and dies before number `stop`, as by a power cut: pages written since the last sync of
    their file may have reached the disk or not."""

    CALLS = ("fsync", "pwrite", "unlink", "rmdir", "mkdir", "replace")

    def __init__(self, stop: int, patched: pytest.MonkeyPatch) -> None:
        self.left, self.lost = stop, random.Random(stop)
        #: Of each file what was there before what has not been synced.
        self.unsynced: dict[str, list[tuple[int, bytes]]] = {}
        self.lock = threading.Lock()
        self.write = os.pwrite
        for name in self.CALLS:
            patched.setattr(os, name, self.counted(name, getattr(os, name)))

    def counted(self, name: str, function):
        def call(*arguments, **keywords):
            with self.lock:
                if not self.left:  # and every later one: a dead process does nothing more
                    raise Stopped
                self.left -= 1
                if name == "pwrite":
                    handle, data, offset = arguments
                    file = os.readlink(f"/proc/self/fd/{handle}")
                    with open(file, "rb") as content:
                        content.seek(offset)
                        self.unsynced.setdefault(file, []).append(
                            (offset, content.read(len(data)).ljust(len(data), b"\0"))
                        )
                elif name == "fsync":
                    self.unsynced.pop(os.readlink(f"/proc/self/fd/{arguments[0]}"), None)
            return function(*arguments, **keywords)

        return call

    def lose(self) -> None:
        """Take back some pages, last writes first."""
        for file, writes in self.unsynced.items():
            if os.path.exists(file):
                with open(file, "r+b") as target:
                    for offset, old in reversed(writes):
                        for start in range(0, len(old), 512):
                            if self.lost.random() < 0.5:
                                self.write(target.fileno(), old[start : start + 512], offset + start)


def run_until(stop: int, folder: Path, patched: pytest.MonkeyPatch) -> bool:
    """Swap, and die before system call number `stop`; whether it got to the end."""
    dying = Dying(stop, patched)
    try:
        swap_in_place(folder, to=INTERLEAVED)
    except Stopped:
        dying.lose()
        return False
    return True


def finish_swap(folder: Path) -> None:
    """Run the command again; one that was done already says so."""
    try:
        swap_in_place(folder, to=INTERLEAVED)
    except ConverterError as error:
        assert "interleaved already" in str(error)  # noqa: PT017
        shutil.rmtree(folder / FOLDER, ignore_errors=True)


def command(folder: Path) -> list[str]:
    return [sys.executable, "-m", "converter", "rope", "swap", str(folder), "--in-place", "--to", "interleaved"]


def test_half_bytes_are_not_a_thing(tmp_path: Path):
    """bf16 and fp16 rows move as they are."""
    for dtype in (torch.bfloat16, torch.float16):
        folder = save(make("Llama", LLAMA_LIKE), tmp_path / str(dtype))
        tensors = {name: t.to(dtype) for name, t in load_file(folder / "model.safetensors").items()}
        save_file(tensors, folder / "model.safetensors")
        swap(folder, tmp_path / f"{dtype}-out", to=INTERLEAVED)
        assert relative(logits(tmp_path / f"{dtype}-out", INTERLEAVED), logits(folder, HALF_SPLIT)) <= 1e-12
