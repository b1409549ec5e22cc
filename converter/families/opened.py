"""A checkpoint read through its family: the spec, the accounts, and the blocks.

Every tensor is used by a mapping, dropped with a reason, or an error; every config field is read,
ignored with a reason, noted, or an error. Opening reads headers only and imports no torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converter.blocks import BlockRef, Dropped, block_shapes, blocks
from converter.errors import (
    CheckpointError,
    ConverterError,
    OnFault,
    UnsupportedError,
    did_you_mean,
    raise_fault,
    reporting,
)
from converter.families import Family, find_family
from converter.families.config import TOKEN_IDS, ConfigReader
from converter.families.shapes import why_other_shapes
from converter.files.checkpoint import Checkpoint
from converter.files.hub import local_path
from converter.files.record import RECORD, read_record
from converter.files.tokenizer import ids_without_rows, load_tokenizer, vocabulary_size
from converter.spec import ModelSpec, RopeLayout

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

    from converter.blocks import Block


#: What weights may be stored in.
_FLOATS = ("float64", "float32", "bfloat16", "float16")


#: The head in DialoGPT's own files.
_DIALOGPT_HEAD = "lm_head.decoder.weight"
_VALUE_HEAD = "a value head of reinforcement learning (TRL), which changes no logit"


def opening_of(token_ids: Mapping[str, Any]) -> int | None:
    """The token that opens a document, among the special tokens of a model."""
    bos, eos = token_ids["bos_token_id"], token_ids["eos_token_id"]
    opening = eos if bos is None else bos
    first = next(iter(opening), None) if isinstance(opening, (list, tuple)) else opening
    return first if isinstance(first, int) else None


def ends_of(token_ids: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens that end a document, the one to say first, among the special tokens of a model."""
    eos = token_ids["eos_token_id"]
    return tuple(token for token in (eos if isinstance(eos, (list, tuple)) else [eos]) if isinstance(token, int))


class SourceModel:
    """An opened checkpoint of a known family; what its config and its tensors contradict goes to `on_fault`."""

    def __init__(self, checkpoint: Checkpoint, on_fault: OnFault = raise_fault) -> None:
        self.checkpoint = checkpoint
        self.where = str(checkpoint.config_file)
        self._on_fault = on_fault
        self.family: Family = find_family(checkpoint.config, self.where)
        self._name_notes: list[str] = []
        self.names = self._bare_names()
        self.dropped: list[Dropped] = [Dropped(name, reason) for name, reason in checkpoint.left_out.items()]
        self.dropped += [Dropped(name, _VALUE_HEAD) for name in checkpoint.tensors if "v_head" in name.split(".")]
        config = ConfigReader(
            checkpoint.config, self.where, aliases=self.family.aliases, model_class=self.family.model_class
        )
        self._refuse_more_layers_than_tensors(config)
        self.spec: ModelSpec = self.family.read_spec(config, self._decide_tie(config))
        #: The RoPE layout that the family's files are in, unless a stamp of ours says otherwise.
        self.declared_layout = self.spec.rope.layout if self.spec.rope is not None else None
        try:
            config.finish(self.spec)
        except ConverterError as error:
            on_fault(error)
        self.config_accounts: dict[str, str] = config.accounts
        #: What a user should know of how config and files were read.
        self.notes: list[str] = [
            *checkpoint.remarks,
            *self._name_notes,
            *self._how_the_family_is_known(),
            *config.notes,
        ]
        self._account_for_token_ids()
        #: Bare tensor name -> the roles it holds, as "layers.0.q.weight".
        self.used: dict[str, list[str]] = {}
        self._account_for_tensors()
        #: The RoPE layout that our record of these very weights names.
        self.stamp: RopeLayout | None = None
        with reporting(on_fault, checkpoint.path):
            self._heed_record()

    def _refuse_more_layers_than_tensors(self, config: ConfigReader) -> None:
        """A number of layers that is a slip or damage: whatever is counted by layer would never end."""
        key, _ = self.family.fields.get("num_layers", ("", None))
        layers, tensors = config.config.get(key), len(self.checkpoint.tensors)
        if isinstance(layers, int) and layers > max(tensors, 1):
            raise CheckpointError(
                f"config field '{key}' is {layers}, and the checkpoint has {tensors} tensors in all",
                where=self.where,
                why="each layer has several",
                fix="Write the number of layers that the model has",
            )

    def _how_the_family_is_known(self) -> list[str]:
        if self.checkpoint.config.get("model_type") is not None:
            return []
        named = self.family.model_class
        return [f"the config has no model_type: it is taken for a {self.family.name}, as its architectures say {named}"]

    @classmethod
    def open(cls, path: str | Path) -> SourceModel:
        """Open a checkpoint, by path or Hub id; raises a ConverterError for whatever is wrong with it."""
        return cls(Checkpoint.open(local_path(path)))

    @property
    def dtype(self) -> str:
        """The dtype that most parameters are stored in."""
        sizes: Counter[str] = Counter()
        for name in self.used:
            if name in self.names:
                info = self.checkpoint.tensors[self.names[name]]
                sizes[info.dtype] += info.nbytes
        return sizes.most_common(1)[0][0] if sizes else "unknown"

    @property
    def parameters(self) -> int:
        """Trained parameters, a tied head counted once."""
        there = (self.checkpoint.tensors[self.names[name]] for name in self.used if name in self.names)
        return sum(math.prod(info.shape) for info in there)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast | None:
        """The tokenizer beside the weights, loaded when it is first asked for; None if there are no files of one."""
        return load_tokenizer(self.checkpoint.path)

    @property
    def opening(self) -> int | None:
        """The token that opens a document: bos, or eos (the first of several) in models without a bos, as GPT-2."""
        return opening_of(self.token_ids())

    @property
    def ends(self) -> tuple[int, ...]:
        """The tokens that end a document; an answer of the model stops at any of them."""
        return ends_of(self.token_ids())

    def token_ids(self) -> dict[str, Any]:
        """bos, eos and pad as the source means them: its config, its generation config, its class's defaults.

        An id without an embedding is none: a GPT-2 of a small vocabulary still names 50256, and a LLaMA
        that pads with such a token does not load.
        """
        generation = self.checkpoint.generation_config or {}
        ids = {}
        for key in TOKEN_IDS:
            default = generation.get(key, self.family.default_token_ids.get(key))
            ids[key] = self.embedded(self.checkpoint.config.get(key, default))
        return ids

    def embedded(self, value: object) -> int | list[int] | None:
        """An id, or those of a list, that have an embedding; None where none has."""
        tokens = value if isinstance(value, list) else [value]
        kept = [token for token in tokens if isinstance(token, int) and 0 <= token < self.spec.vocab_size]
        return (kept or None) if isinstance(value, list) else next(iter(kept), None)

    def _account_for_token_ids(self) -> None:
        for key, kept in self.token_ids().items():
            stated = self.checkpoint.config.get(key)
            if stated is not None and stated != kept:
                self.config_accounts[key] = f"{stated} has no embedding in a vocabulary of {self.spec.vocab_size}"

    def read_block(self, block: BlockRef, dtype: torch.dtype, device: torch.device | str = "cpu") -> Block:
        """The roles of a block, checked to be finite, in the working dtype."""
        from converter.blocks import Block

        roles: Block = Block()
        for mapping in self.family.mappings(self.spec, block):
            tensors = [self._read(name).to(device=device, dtype=dtype) for name in mapping.names]
            found = (tensor.to(device=device, dtype=dtype) for tensor in mapping.to_roles(*tensors))
            roles.update(zip(mapping.roles, found, strict=True))
        return roles

    def _read(self, bare: str) -> torch.Tensor:
        from converter.files.weights import count_non_finite

        self._check_dtype(bare)
        tensor = self.checkpoint.read(self.names[bare])
        nans, infinities = count_non_finite(tensor)
        if nans or infinities:
            raise CheckpointError(
                f"tensor '{self.names[bare]}' contains {'NaN' if nans else 'Inf'}",
                where=str(self.checkpoint.tensors[self.names[bare]].file),
                why="a model with such a weight computes nothing",
                fix="Take a checkpoint from before training diverged",
            )
        return tensor

    def _heed_record(self) -> None:
        """The layout that our record of these weights names becomes the spec's; folders of safetensors have one.

        A record of other weights is not heeded, and the weights are asked instead.
        """
        from converter.families.rotating import source_digests

        folder, rope = self.checkpoint.path, self.spec.rope
        suffixes = {file.suffix for file in self.checkpoint.files}
        plain = self.checkpoint.opened == folder and suffixes == {".safetensors"}
        record = read_record(folder) if plain and rope is not None else None
        if record is None or record.layout is None or not self.used.keys() <= self.names.keys():
            return
        assert rope is not None
        if record.speaks_of_rows(source_digests(self)):
            self.stamp = layout = record.layout
        else:
            layout = self._ask_weights(record.layout, rope.layout)
        self.spec = self.spec.replace(rope=dataclasses.replace(rope, layout=layout))

    def _ask_weights(self, stated: RopeLayout, declared: RopeLayout) -> RopeLayout:
        """The layout of rows of which the record does not speak."""
        from converter.rope.detect import detect_source  # above families: it is asked here alone

        found = detect_source(self)
        note = f"{RECORD} speaks of other weights than these, so its layout {stated.value} is not heeded"
        if found.layout in (layout.value for layout in RopeLayout):
            self.notes.append(f"{note}: by the weights the rows are {found.layout}")
            return RopeLayout(found.layout)
        self.notes.append(f"{note}: the rows are read as {declared.value}, as family '{self.family.name}' has them")
        return declared

    def check_contents(self, on_fault: OnFault = raise_fault) -> None:
        """Bring what else stops a conversion to `on_fault`, before a weight is read.

        That is weights of a dtype that is not read, buffers that carry something and would be dropped, and a
        tokenizer whose files are broken or that has ids without a row in the embeddings.
        """
        for bare in self.used:
            with reporting(on_fault, self.checkpoint.path):
                self._check_dtype(bare)
        for drop in self.family.drops:
            for bare, name in self.names.items():
                if drop.check is not None and drop.matches(bare):
                    info = self.checkpoint.tensors[name]
                    problem = drop.check(self.checkpoint, info, self.spec)
                    if problem:
                        what = f"tensor '{name}' is not a {drop.reason}"
                        on_fault(UnsupportedError(what, where=str(info.file), why=problem))
        with reporting(on_fault, self.checkpoint.path):
            tokens = vocabulary_size(self.checkpoint.path)
            if tokens is not None and tokens > self.spec.vocab_size:
                raise ids_without_rows(str(self.checkpoint.path), tokens, self.spec.vocab_size)

    def _check_dtype(self, bare: str) -> None:
        info = self.checkpoint.tensors[self.names[bare]]
        if info.dtype not in _FLOATS:
            raise CheckpointError(
                f"tensor '{info.name}' is of type {info.dtype}",
                where=str(info.file),
                tensor=info.name,
                why="weights have 16 bits or more of floating point; others mean a quantised or damaged checkpoint",
                fix="Convert the checkpoint that was not quantised",
            )

    def _bare_names(self) -> dict[str, str]:
        names: dict[str, str] = {}
        outer = self._outer_prefix()
        for name in self.checkpoint.tensors:
            bare = self.family.bare_name(name.removeprefix(outer))
            if bare == _DIALOGPT_HEAD:
                bare = self.family.head
            if bare in names:
                self._on_fault(
                    CheckpointError(
                        f"'{names[bare]}' and '{name}' are one and the same tensor",
                        where=str(self.checkpoint.path),
                        tensor=name,
                        why=f"the prefix '{self.family.prefix}' is optional, so which of the two is meant is not known",
                        fix="Keep one of them",
                    )
                )
            names[bare] = name
        return names

    def _outer_prefix(self) -> str:
        """What a trainer's class puts before all names of the model that it holds: "pretrained_model." or "model."."""
        family, tensors = self.family, self.checkpoint.tensors
        if any(family.bare_name(name) == family.embedding for name in tensors):
            return ""
        ends = [f".{family.prefix}{family.embedding}", f".{family.embedding}"]
        found = next((name.removesuffix(end) + "." for end in ends for name in tensors if name.endswith(end)), "")
        if found == family.prefix != "model.":  # written twice by a mistake, which is told by the names
            return ""
        if found:
            self._name_notes.append(f"the names begin with '{found}', which a trainer put before the model's own")
        return found

    def _decide_tie(self, config: ConfigReader) -> bool:
        """Ties are decided from the tensors: a trained head is never overwritten, a missing one never made up."""
        flag = config.read("tie_word_embeddings", bool, self.family.ties_by_default)
        embedding, head = self.family.embedding, self.family.head
        if head not in self.names:
            if not flag:
                raise CheckpointError(
                    f"the config says tie_word_embeddings = false, and there is no tensor '{head}'",
                    where=str(self.checkpoint.path),
                    why="the trained head is missing, and a made-up one would be random",
                    fix="Add the head, or set tie_word_embeddings to true if the model was trained with a tied one",
                )
            return True
        if embedding in self.names and self.checkpoint.same_tensor(self.names[embedding], self.names[head]):
            if flag:
                self.dropped.append(Dropped(self.names[head], "a copy of the embedding, to which the head is tied"))
            return flag
        return False

    def _account_for_tensors(self) -> None:
        expected: dict[str, tuple[int, ...]] = {}
        for block in blocks(self.spec):
            shapes = block_shapes(self.spec, block)
            for mapping in self.family.mappings(self.spec, block):
                for name, shape in zip(mapping.names, mapping.name_shapes(shapes), strict=True):
                    expected[name] = shape
                    self.used.setdefault(name, []).extend(f"{block}.{role}" for role in mapping.roles)
        self._refuse_missing(expected)
        dropped = {drop.name for drop in self.dropped}
        for bare, name in self.names.items():
            if bare in expected or name in dropped:
                continue
            reason = next((drop.reason for drop in self.family.drops if drop.matches(bare)), None)
            if reason is None:
                self._on_fault(
                    UnsupportedError(
                        f"tensor '{name}' {list(self.checkpoint.tensors[name].shape)} is unknown to family "
                        f"'{self.family.name}'",
                        where=str(self.checkpoint.tensors[name].file),
                        why="leaving out a weight that is not understood would change the model",
                        fix=did_you_mean(bare, expected),
                    )
                )
                continue
            self.dropped.append(Dropped(name, reason))

    def _refuse_missing(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        missing = [name for name in expected if name not in self.names]
        for name in missing:
            more = (
                f" (and {len(missing) - 1} more, up to '{missing[-1]}')" if missing[1:] and name == missing[0] else ""
            )
            self._on_fault(
                CheckpointError(
                    f"tensor '{name}' is missing{more}",
                    where=str(self.checkpoint.path),
                    tensor=name,
                    why=f"a {self.family.name} of this config has it",
                    fix=did_you_mean(name, self.names),
                )
            )
        found = {bare: self.checkpoint.tensors[name].shape for bare, name in self.names.items()}
        wrong = any(found.get(bare, shape) != shape for bare, shape in expected.items())
        why = why_other_shapes(self.family, self.spec, self.checkpoint.config, found) if wrong else None
        for bare, shape in expected.items():
            info = self.checkpoint.tensors[self.names[bare]] if bare in self.names else None
            if info is not None and info.shape != shape:
                what = f"tensor '{info.name}' has shape {list(info.shape)}, and the config means {list(shape)}"
                self._on_fault(CheckpointError(what, where=str(info.file), tensor=info.name, why=why))
