"""Outputs load in transformers 4.57 as in transformers 5, with the same logits. `make slow` sets up the old one."""

import os
import subprocess

import models
import numpy as np
import pytest
import torch

from converter import convert
from converter.measure.models import load_plain

_READ = """
import sys
import numpy as np, torch
from transformers import AutoModelForCausalLM, __version__
assert __version__.startswith("4.57."), __version__
model, info = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32, output_loading_info=True)
assert not any(info.values()), info
ids = torch.from_numpy(np.load(sys.argv[2]))
with torch.no_grad():
    np.save(sys.argv[3], model(input_ids=ids, use_cache=False).logits.numpy())
"""


@pytest.fixture
def old_python():
    path = os.environ.get("CONVERTER_OLD_PYTHON")
    assert path, "CONVERTER_OLD_PYTHON must name an interpreter with transformers 4.57: run `make slow`"
    return path


@pytest.mark.slow
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_output_gives_the_same_logits_in_old_and_new_transformers(old_python, text, tmp_path, theta, dtype):
    source = models.save(models.gpt2(), tmp_path / "source")
    overrides = [f"learned_positions_to_rope.theta={theta}"]
    convert(source, tmp_path / "out", text=[text], overrides=overrides, dtype=dtype, max_shard_size="50KB")
    ids = models.random_ids()
    np.save(tmp_path / "ids.npy", ids.numpy())
    command = [old_python, "-c", _READ, tmp_path / "out", tmp_path / "ids.npy", tmp_path / "logits.npy"]
    subprocess.run(command, check=True)
    with torch.no_grad():
        new = load_plain(tmp_path / "out")(input_ids=ids, use_cache=False).logits
    old = torch.from_numpy(np.load(tmp_path / "logits.npy"))
    assert models.relative(old, new) <= 1e-5
