"""Models that run: a checkpoint as transformers' own class, strictly and by clean names."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from converter import reference
from converter.blocks import EMBEDDINGS, HEAD, BlockRef, blocks
from converter.errors import CheckpointError, ConverterError, UnsupportedError
from converter.families import Family, TargetFamily, get_family
from converter.families.opened import SourceModel
from converter.families.rotating import stored_orders
from converter.text.windows import Windows

if TYPE_CHECKING:
    from transformers import PreTrainedModel
from converter.measure.metrics import batches


def tokens_per_second(model: PreTrainedModel, windows: Windows, device: str = "cpu") -> float:
    """Speed of a forward over full windows on this machine, the best of three after a warm-up."""
    ids = torch.from_numpy(windows.ids[next(batches(windows))]).to(device)
    times = []
    with torch.no_grad():
        for _ in range(4):
            started = time.perf_counter()
            float(model(input_ids=ids, use_cache=False).logits[0, 0, 0])
            times.append(time.perf_counter() - started)
    return ids.numel() / min(times[1:])


def load_transformers(source: SourceModel) -> PreTrainedModel:
    """A checkpoint as transformers' own class in fp32, by clean names and strictly: nothing stays random.

    transformers itself would silently leave weights random whose names carry a wrapper such as
    `module.` or `_orig_mod.`. A family that it has no class for runs as its stand-in.
    """
    quiet_transformers()
    if source.family.model_class is None and source.family.stand_in is None:
        return cast("PreTrainedModel", ReferenceModel(source).eval())
    if source.family.stand_in is None:
        family, config, state = _as_stored(source)
    else:
        family, config, state = _as_stand_in(source, source.family.stand_in)
    config.tie_word_embeddings = source.spec.tied_head
    model: PreTrainedModel = _class_of(family)(config).float()
    missing, unexpected = model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    tied = {family.full_name(family.head)} if source.spec.tied_head else set()
    if set(missing) - tied or unexpected:
        raise CheckpointError(
            f"transformers' {family.model_class} has other tensors than our mapping",
            where=str(source.checkpoint.opened),
            why=f"missing: {sorted(set(missing) - tied)}, unexpected: {sorted(unexpected)}",
        )
    return model.eval()


def _as_stored(source: SourceModel) -> tuple[Family, Any, dict[str, Tensor]]:
    """The config as transformers itself reads it, and the tensors under their own names."""
    family, checkpoint = source.family, source.checkpoint
    try:
        config = _class_of(family).config_class.from_pretrained(checkpoint.path, local_files_only=True)
    except Exception as error:
        raise CheckpointError("transformers refuses this config", where=source.where, why=str(error)) from error
    for key, token in source.token_ids().items():
        setattr(config, key, token)
    state = {family.full_name(bare): checkpoint.read(source.names[bare]).float() for bare in source.used}
    if source.declared_layout is not None and source.stamp not in (None, source.declared_layout):
        for bare, order in stored_orders(source, source.declared_layout):
            state[family.full_name(bare)] = state[family.full_name(bare)][torch.from_numpy(order)]
    return family, config, state


def _as_stand_in(source: SourceModel, name: str) -> tuple[Family, Any, dict[str, Tensor]]:
    """Config and tensors as another family writes them."""
    family = get_family(name)
    assert isinstance(family, TargetFamily), f"{source.family.name}'s stand-in {name} cannot be written"
    spec = family.accept(source.spec)
    config = _class_of(family).config_class.from_dict(family.write_config(spec) | source.token_ids())
    state: dict[str, Tensor] = {}
    for ref in blocks(source.spec):
        state |= family.write_block(spec, ref, source.read_block(ref, torch.float32))
    return family, config, state


def _class_of(family: Family) -> Any:
    import transformers

    assert family.model_class is not None, f"{family.name} has neither a model_class nor a stand_in"
    return getattr(transformers, family.model_class)


def load_plain(path: Path) -> PreTrainedModel:
    """A folder as anybody would load it; raises where a tensor is missing, left over or of another shape."""
    from transformers import AutoModelForCausalLM

    quiet_transformers()
    if not (path / "config.json").exists():  # a format that transformers does not read
        return load_transformers(SourceModel.open(path))
    model, info = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, output_loading_info=True, local_files_only=True, trust_remote_code=False
    )
    faults = {kind: info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") if info.get(kind)}
    if faults:
        raise CheckpointError("transformers does not find its tensors in the files", where=str(path), why=str(faults))
    loaded: PreTrainedModel = model.eval()
    return loaded


def pick_device(device: str) -> str:
    """cuda where there is one, for "auto"."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ConverterError("there is no CUDA device", where="--device cuda", fix="Use --device cpu")
    return device


def is_rotary(model: PreTrainedModel) -> bool:
    """Whether a model of transformers rotates q and k: positions have no end then."""
    return hasattr(model.base_model, "rotary_emb")


def load_any(path: Path) -> PreTrainedModel:
    """Through our family where we know it, plainly otherwise."""
    try:
        return load_transformers(SourceModel.open(path))
    except UnsupportedError as error:
        try:
            return load_plain(path)
        except ConverterError:
            raise
        except Exception:
            raise error from None


def quiet_transformers() -> None:
    """No progress bars and no advice from transformers between our own lines."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


class ReferenceModel(torch.nn.Module):
    """A whole checkpoint in memory, in fp32; a forward gives `logits` (B, T, V)."""

    def __init__(self, source: SourceModel) -> None:
        super().__init__()
        self.spec = source.spec
        self.config = SimpleNamespace(
            vocab_size=source.spec.vocab_size, max_position_embeddings=source.spec.context, **source.token_ids()
        )
        refs = [EMBEDDINGS, *(BlockRef("layer", index) for index in range(source.spec.num_layers)), HEAD]
        self._blocks = [dict(source.read_block(ref, torch.float32)) for ref in refs]

    def to(self, *arguments: Any, **keywords: Any) -> ReferenceModel:
        """Move every block."""
        self._blocks = [{role: t.to(*arguments, **keywords) for role, t in block.items()} for block in self._blocks]
        return self

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> SimpleNamespace:
        """Logits of token ids (B, T)."""
        states = reference.run_embeddings(self._blocks[0], self.spec, input_ids)
        for index, block in enumerate(self._blocks[1:-1]):
            states = reference.run_layer(block, self.spec, index, states)
        return SimpleNamespace(logits=reference.run_head(self._blocks[-1], self.spec, states))
