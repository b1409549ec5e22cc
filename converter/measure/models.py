"""Models that run, behind one interface: transformers' own classes, strictly and by clean names, and ours."""

from __future__ import annotations

import time
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from converter.blocks import blocks
from converter.errors import CheckpointError, ConverterError, UnsupportedError
from converter.families import Family, TargetFamily, get_family
from converter.families.config import TOKEN_IDS
from converter.families.opened import SourceModel, ends_of, opening_of
from converter.families.rotating import stored_orders
from converter.files.hub import local_path
from converter.files.tokenizer import load_tokenizer
from converter.measure.metrics import batches
from converter.measure.vocabulary import Vocabulary
from converter.reference import ReferenceModel, RunningModel
from converter.text.tokens import ModelTokens
from converter.text.windows import Windows

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

#: Names of the length of a sequence in transformers' configs. Those of the first have a table of so many positions,
#: unless they rotate; models with ALiBi have no end.
_CONTEXT = ("max_position_embeddings", "max_seq_len", "seq_length", "n_ctx")


class TransformersModel(RunningModel):
    """A model of one of transformers' own classes."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model.eval()
        config = model.config.get_text_config(decoder=True)
        self.vocab_size = int(config.vocab_size)
        stated = (getattr(config, name, None) for name in _CONTEXT)
        self.context = next((length for length in stated if isinstance(length, int)), None)
        table = getattr(config, _CONTEXT[0], None)
        self.longest = None if is_rotary(model) or not isinstance(table, int) else table

    @property
    def device(self) -> torch.device:
        return cast(torch.device, self.model.device)

    def to(self, device: str | torch.device) -> TransformersModel:
        self.model.to(device)
        return self

    @torch.no_grad()
    def logits(self, ids: Tensor) -> Tensor:
        found: Tensor = self.model(input_ids=ids, use_cache=False).logits
        return found


def tokens_per_second(model: RunningModel, windows: Windows) -> float:
    """Speed of a forward over full windows on this machine, the best of three after a warm-up."""
    ids = torch.from_numpy(windows.ids[next(batches(windows))]).to(model.device)
    times = []
    for _ in range(4):
        started = time.perf_counter()
        float(model.logits(ids)[0, 0, 0])
        times.append(time.perf_counter() - started)
    return ids.numel() / min(times[1:])


class RunnableCheckpoint:
    """A checkpoint by path or Hub id, through its family where we know it, by transformers alone otherwise.

    It has a tokenizer, the tokens around a document, and a model that is loaded when it is first asked for.
    Raises a ConverterError for whatever is wrong with it, ids of the tokenizer without a row included.
    """

    def __init__(self, path: str | Path, device: str = "cpu") -> None:
        self.name, self._device = str(path), device
        local = local_path(path)
        try:
            self._source: SourceModel | None = SourceModel.open(local)
        except UnsupportedError as error:
            self._source, plain = None, _load_unknown(local, error)
            self.model = TransformersModel(plain).to(device)
            self.tokenizer, special = load_tokenizer(local), _special(plain)
            rows = self.model.vocab_size
        else:
            self.tokenizer, special = self._source.tokenizer, self._source.token_ids()
            rows = self._source.spec.vocab_size
        self._opening, self._ends = opening_of(special), ends_of(special)
        self.vocabulary = Vocabulary(self.name, rows, self.tokenizer)
        self.vocabulary.check()

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know of how the files were read."""
        return tuple(self._source.notes) if self._source is not None else ()

    def tokens(self, size: int | None = None, tokenizer: PreTrainedTokenizerFast | None = None) -> ModelTokens:
        """The tokens that it reads a text in, those below `size`; with another tokenizer where it has none."""
        size = size or self.vocabulary.rows
        opening = self._opening if self._opening is not None and 0 <= self._opening < size else None
        ends = tuple(token for token in self._ends if 0 <= token < size)
        return ModelTokens(self.tokenizer or tokenizer, size, opening, ends)

    @cached_property
    def model(self) -> RunningModel:
        """The model, on its device."""
        assert self._source is not None
        return load(self._source).to(self._device)


def _special(model: PreTrainedModel) -> dict[str, Any]:
    """The special tokens of a model of transformers, as its two configs name them."""
    ids = {}
    for key in TOKEN_IDS:
        stated = (getattr(config, key, None) for config in (model.config, model.generation_config))
        ids[key] = next((token for token in stated if token is not None), None)
    return ids


def load(source: SourceModel) -> RunningModel:
    """A checkpoint by transformers' own class, or by the reference forward where transformers has none."""
    if source.family.model_class is None and source.family.stand_in is None:
        source.check_contents()
        return ReferenceModel(source.spec, lambda ref: source.read_block(ref, torch.float32))
    return TransformersModel(load_transformers(source))


def load_transformers(source: SourceModel) -> PreTrainedModel:
    """A checkpoint as transformers' own class in fp32, by clean names and strictly: nothing stays random.

    transformers itself would silently leave weights random whose names carry a wrapper such as
    `module.` or `_orig_mod.`. A family that it has no class for runs as its stand-in; without one it is an error.
    """
    quiet_transformers()
    source.check_contents()  # transformers would take whole numbers for weights
    if source.family.model_class is None and source.family.stand_in is None:
        raise UnsupportedError(
            f"transformers has no class that runs a {source.family.name}",
            where=source.where,
            fix="Convert it to Hugging Face's format first: `converter recipes list` shows how",
        )
    if source.family.stand_in is None:
        family, config, state = _as_stored(source)
    else:
        family, config, state = _as_stand_in(source, source.family.stand_in)
    config.tie_word_embeddings = source.spec.tied_head
    try:
        model: PreTrainedModel = _class_of(family)(config).float()
    except Exception as error:  # a class checks some of its fields here only
        raise CheckpointError("transformers refuses this config", where=source.where, why=str(error)) from error
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
    rope = source.spec.rope
    if rope is not None and source.declared_layout is not None and rope.layout is not source.declared_layout:
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
    model, info = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, output_loading_info=True, local_files_only=True, trust_remote_code=False
    )
    faults = {kind: info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") if info.get(kind)}
    if faults:
        raise CheckpointError("transformers does not find its tensors in the files", where=str(path), why=str(faults))
    loaded: PreTrainedModel = model.eval()
    return loaded


def load_written(path: Path) -> RunningModel:
    """A result as its readers load it: by transformers alone, or by our own reader where transformers has none."""
    if (path / "config.json").exists():
        return TransformersModel(load_plain(path))
    return load(SourceModel.open(path))


def _load_unknown(path: Path, error: UnsupportedError) -> PreTrainedModel:
    """A checkpoint of a family that we do not know; raises what our own reader said where transformers fails too."""
    try:
        return load_plain(path)
    except ConverterError:
        raise
    except Exception:
        raise error from None


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


def quiet_transformers() -> None:
    """No progress bars and no advice from transformers between our own lines."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
