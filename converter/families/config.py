"""Reading a `config.json` strictly: every field is read, or ignored with a reason, or refused.

A field that the family does not know is noted if transformers' own class does not read it, and refused otherwise.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from converter.errors import CheckpointError, UnsupportedError, did_you_mean, printable
from converter.families.foreign import fields_read, owners

if TYPE_CHECKING:
    from converter.spec import ModelSpec

T = TypeVar("T")

#: Fields that transformers writes into the config of any family and that do not change the forward.
_COMMON = {
    "architectures": "the class that wrote the file; the family is known from model_type",
    "_name_or_path": "where the file came from",
    "name_or_path": "where the file came from",
    "transformers_version": "the version that wrote the file",
    "_attn_implementation_autoset": "a choice of kernel",
    "attn_implementation": "a choice of kernel",
    "use_cache": "generation speed, not the function",
    "initializer_range": "training starts only",
    "gradient_checkpointing": "training memory only",
    "task_specific_params": "defaults of pipelines",
    "problem_type": "classification heads only",
    "id2label": "classification heads only",
    "label2id": "classification heads only",
    "num_labels": "classification heads only",
    "finetuning_task": "classification heads only",
    "output_attentions": "what a forward returns, not the function",
    "output_hidden_states": "what a forward returns, not the function",
    "return_dict": "what a forward returns, not the function",
    "use_return_dict": "what a forward returns, not the function",
    "torchscript": "how the model is traced",
    "chunk_size_feed_forward": "memory, not the function",
    "tokenizer_class": "the tokenizer's own files say it",
    "prefix": "a pipeline default",
    "remove_invalid_values": "generation only",
    "output_past": "what a forward returned in transformers 2, not the function",
    "_num_labels": "classification heads only",
}

#: Generation settings that old transformers kept in config.json; generation_config.json rules.
# fmt: off
_GENERATION = (
    "do_sample", "max_length", "min_length", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty",
    "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "num_beams", "num_beam_groups",
    "num_return_sequences", "diversity_penalty", "early_stopping", "bad_words_ids", "begin_suppress_tokens",
    "suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty",
    "output_scores", "return_dict_in_generate", "sep_token_id", "decoder_start_token_id",
)
# fmt: on

#: What makes a model something else than a decoder-only language model, unless it has this value.
_MUST_BE = {
    "is_encoder_decoder": False,
    "is_decoder": (False, True),
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
    "pruned_heads": ({}, None),
    "tie_encoder_decoder": False,
    "quantization_config": None,
    "tf_legacy_loss": False,
    "use_bfloat16": False,
}

#: Sizes, thetas and factors are below this. It keeps what is computed with them finite.
_HUGE = 1 << 62

_RIGHT_VALUE = "Write the value that the model was trained with"

#: Fields that name special tokens: an id, a list of ids, or null.
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")

#: What transformers' shared code reads of any config, and values that leave the function as it is.
_INERT: dict[str, tuple[Any, ...]] = {"is_causal": (True,), "layer_types": (None,)}

#: Fields of training that no family needs to know by name.
_TRAINING = re.compile(r".*(dropout|_pdrop|layerdrop)(_prob|_rate)?|init(ializer)?_\w+")

#: Names under which other families state a fact of a spec.
_FACTS = {
    "head_dim": "head_dim",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_attention_heads": "num_heads",
    "num_hidden_layers": "num_layers",
    "num_key_value_heads": "num_kv_heads",
    "max_position_embeddings": "context",
}

#: Model types that a message names at most.
_NAMED = 3

_TYPES: dict[type, tuple[type, ...]] = {int: (int,), float: (float, int), bool: (bool,), str: (str,)}
_TYPES |= {dict: (dict,), list: (list,)}


class ConfigReader:
    """Hands out the fields of a config and keeps account of each.

    `accounts` maps a field to what became of it: "read" or the reason why it is ignored. `notes` are what a user
    should know. `aliases` are other names of fields, as transformers' `attribute_map` has them. `model_class` is
    transformers' class that runs the family: what it does not read cannot change the function.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        where: str,
        *,
        aliases: Mapping[str, str] | None = None,
        model_class: str | None = None,
    ) -> None:
        self.where, self._model_class = where, model_class
        self.accounts: dict[str, str] = {}
        self.notes: list[str] = []
        self.config = self._under_own_names(config, aliases or {})
        self.ignore(_COMMON)
        self.ignore(dict.fromkeys(_GENERATION, "generation settings live in generation_config.json"))
        for key, allowed in _MUST_BE.items():
            values = allowed if isinstance(allowed, tuple) else (allowed,)
            if key in config and config[key] not in values:
                raise UnsupportedError(
                    f"config field '{key}' is {config[key]!r}",
                    where=where,
                    why="only full-precision, decoder-only language models can be converted",
                    fix="Convert an unquantised, decoder-only checkpoint",
                )
            if key in config:
                self.accounts[key] = "read"

    def _under_own_names(self, config: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
        """The config with every alias under the family's own name."""
        own = dict(config)
        for alias, key in aliases.items():
            if alias not in own:
                continue
            value = own.pop(alias)
            if own.setdefault(key, value) != value:
                raise CheckpointError(
                    f"config field '{key}' is {own[key]!r} and '{alias}' is {value!r}",
                    where=self.where,
                    why="they are two names of one fact, and readers differ in which they take",
                    fix="Keep the one that the model was trained with",
                )
            self.accounts[alias] = f"another name of {key}"
        return own

    def note(self, text: str) -> None:
        """Something that a user should know and that does not stop a conversion."""
        self.notes.append(printable(text))

    def read(self, key: str, kind: type[T], default: T | None = None) -> T:
        """The value of a field, of this type; the default if it is absent or null.

        An absent field without a default is an error.
        """
        self.accounts[key] = "read"
        value = self.config.get(key)
        if value is None:
            if default is None:
                raise CheckpointError(
                    f"config field '{key}' is missing",
                    where=self.where,
                    why="no default fits every model of the family",
                    fix=_RIGHT_VALUE,
                )
            return default
        return self.checked(key, value, kind)

    def optional(self, key: str, kind: type[T]) -> T | None:
        """As `read`, but absent and null are None."""
        self.accounts[key] = "read"
        return None if self.config.get(key) is None else self.read(key, kind)

    def checked(self, what: str, value: Any, kind: type[T]) -> T:
        """A value that must be of this type; a number must be finite and above 0 too."""
        fits: bool = isinstance(value, _TYPES[kind]) and (kind is bool or not isinstance(value, bool))
        if not fits:
            problem = f"{value!r}, not of type {kind.__name__}"
        elif kind in (int, float) and value >= _HUGE:
            problem = f"{value:.3e}, and no model has such a number" if isinstance(value, float) else "far too large"
        elif kind is int and value < 1:
            problem = f"{value}, and must be at least 1"
        elif kind is float and not (value > 0 and math.isfinite(value)):
            problem = f"{value}, and must be above 0"
        else:
            return kind(value)  # type: ignore[call-arg]
        raise CheckpointError(f"config field '{what}' is {problem}", where=self.where, fix=_RIGHT_VALUE)

    def one_of(self, key: str, meanings: Mapping[str, T], default: str) -> T:
        """What the value of a field means."""
        value = self.read(key, str, default)
        if value not in meanings:
            raise UnsupportedError(
                f"config field '{key}' is '{value}', which no conversion knows",
                where=self.where,
                fix=did_you_mean(value, meanings),
            )
        return meanings[value]

    def divide(self, whole: int, parts: int, whole_name: str, parts_name: str) -> int:
        """whole / parts; a remainder is an error."""
        if whole % parts:
            raise CheckpointError(
                f"{whole_name} = {whole} is not a multiple of {parts_name} = {parts}",
                where=self.where,
                fix=_RIGHT_VALUE,
            )
        return whole // parts

    def ignore(self, reasons: Mapping[str, str]) -> None:
        """Account for fields that do not change the function, with the reason."""
        self.accounts.update({key: reason for key, reason in reasons.items() if key in self.config})

    def finish(self, spec: ModelSpec | None = None) -> dict[str, str]:
        """The accounts; an error for a field that the family does not know and that may change the function.

        A field that transformers' class of the family does not read cannot: it is noted. `spec` is what the config
        was read as.
        """
        for key in ("model_type", "dtype", "torch_dtype", "unk_token_id", *TOKEN_IDS):
            if key in self.config:
                self.accounts[key] = "read"
        self._check_token_ids()
        self._check_dtypes()
        code = self._own_code()
        unknown = [key for key in self.config if key not in self.accounts and not self._is_inert(key, spec)]
        if not unknown:
            return self.accounts
        reads = fields_read(self._model_class) if self._model_class is not None else None
        refused = [key for key in unknown if reads is None or key in reads or code is not None]
        if refused:
            key, more = refused[0], f" (also unknown: {', '.join(refused[1:])})" if refused[1:] else ""
            reason = (
                "a field that is not understood may change what the model computes"
                if reads is None
                else f"transformers' {self._model_class} reads it, and no conversion knows what it does"
                if key in reads
                else f"auto_map names code of the checkpoint's own ({code}), which may read it; that code is never run"
            )
            raise UnsupportedError(
                f"config field '{key}' = {self.config[key]!r} is unknown to this family{_of_others(key)}",
                where=self.where,
                why=reason + more,
                fix=self._advice(key, custom_code=code is not None and (reads is None or key not in reads)),
            )
        self._note_unread(unknown)
        return self.accounts

    def _own_code(self) -> str | None:
        """The model class that `auto_map` names as code in the checkpoint's folder."""
        if "auto_map" not in self.config:
            return None
        names = self.config["auto_map"]
        models = {key: name for key, name in names.items() if "Model" in str(key)} if isinstance(names, dict) else {}
        self.accounts["auto_map"] = "code of the checkpoint's own is never run"
        code = next(iter(models.values()), None)
        if code is not None and self._model_class is not None:
            self.note(
                f"auto_map names code of the checkpoint's own ({code}), which is never run: the weights are read as "
                f"transformers' {self._model_class} computes with them"
            )
        return None if code is None else str(code)

    def _is_inert(self, key: str, spec: ModelSpec | None) -> bool:
        """Whether a field that the family does not know has a value that changes nothing, whoever reads it."""
        value = self.config[key]
        if _TRAINING.fullmatch(key):
            self.accounts[key] = "training only"
        elif value in _INERT.get(key, (None,)) or (key == "layer_types" and _all_full(value)):
            self.accounts[key] = "its value changes nothing"
        elif key in _FACTS and spec is not None and value == getattr(spec, _FACTS[key]):
            self.accounts[key] = "what the other fields say too"
        elif key == "sliding_window" and spec is not None and type(value) is int and value >= spec.context:
            self.accounts[key] = "as wide as the context, or wider"
        return key in self.accounts

    def _advice(self, key: str, *, custom_code: bool) -> str:
        if custom_code:
            return "If the plain class of the family computes the same, delete auto_map from the config"
        return did_you_mean(key, self.accounts) + " If it changes nothing, delete it from the config"

    def _note_unread(self, unknown: list[str]) -> None:
        """Fields that transformers ignores: a word on each that looks like another one or is another model's."""
        unread = f"transformers' {self._model_class} does not read"
        plain = []
        for key in unknown:
            self.accounts[key] = f"{unread} it, so it cannot change the function"
            others, near = _of_others(key), difflib.get_close_matches(key, self._unstated(), n=1, cutoff=0.8)
            if others:
                self.note(
                    f"config field '{key}' = {self.config[key]!r} is one that {unread}{others}: check the model_type"
                )
            elif near:
                self.note(f"config field '{key}' = {self.config[key]!r} is one that {unread}: is '{near[0]}' meant?")
            else:
                plain.append(f"'{key}' = {self.config[key]!r}")
        if plain:
            fields = "config fields" if plain[1:] else "config field"
            self.note(f"{fields} {', '.join(plain)}: {unread} {'them' if plain[1:] else 'it'}, so nothing changes")

    def _unstated(self) -> list[str]:
        """The fields that the family reads and the config does not state."""
        return [key for key, account in self.accounts.items() if account == "read" and key not in self.config]

    def _check_token_ids(self) -> None:
        for key in TOKEN_IDS:
            value = self.config.get(key)
            for token in value if isinstance(value, list) else [value]:
                if token is not None and (not isinstance(token, int) or isinstance(token, bool)):
                    raise CheckpointError(
                        f"config field '{key}' is {value!r}, not a token id",
                        where=self.where,
                        fix="Write the number of a token, a list of numbers, or null",
                    )

    def _check_dtypes(self) -> None:
        new, old = (_dtype_name(self.config.get(key)) for key in ("dtype", "torch_dtype"))
        if new and old and new != old:
            raise CheckpointError(
                f"config says dtype '{new}' and torch_dtype '{old}'",
                where=self.where,
                why="they are two names of one fact",
                fix="Keep the one that the weights are stored in",
            )


def _all_full(layer_types: object) -> bool:
    """Whether `layer_types` gives every layer full attention."""
    return isinstance(layer_types, list) and all(kind == "full_attention" for kind in layer_types)


def _of_others(field: str) -> str:
    """Which model types of transformers have this field, in words; empty if none does."""
    found = owners(field)
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return f", a field of {', '.join(found[:_NAMED])}{more}" if found else ""


def _dtype_name(value: object) -> str | None:
    return None if value is None else str(value).removeprefix("torch.")
