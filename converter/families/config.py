"""Reading a `config.json` strictly: every field is read, ignored with a reason, or an error."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

from converter.errors import CheckpointError, UnsupportedError, did_you_mean
from converter.spec import RopeLayout, RopeSpec

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

#: Fields that name special tokens: an id, a list of ids, or null.
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")

#: Kinds of RoPE that transformers computes, "default" being the plain one.
_ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")

_TYPES: dict[type, tuple[type, ...]] = {int: (int,), float: (float, int), bool: (bool,), str: (str,)}
_TYPES |= {dict: (dict,), list: (list,)}


class ConfigReader:
    """Hands out the fields of a config and keeps account of each.

    `accounts` maps a field to what became of it: "read" or the reason why it is ignored.
    """

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.config, self.where = config, where
        self.accounts: dict[str, str] = {}
        self.ignore({key: reason for key, reason in _COMMON.items() if key in config})
        self.ignore({key: "generation settings live in generation_config.json" for key in _GENERATION if key in config})
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

    def read(self, key: str, kind: type[T], default: T | None = None) -> T:
        """The value of a field, of this type; the default where it is absent or null.

        Without a default an absent field is an error.
        """
        self.accounts[key] = "read"
        value = self.config.get(key)
        if value is None:
            if default is None:
                raise CheckpointError(f"config field '{key}' is missing", where=self.where)
            return default
        return self._checked(key, value, kind)

    def optional(self, key: str, kind: type[T]) -> T | None:
        """As `read`, but absent and null are None."""
        self.accounts[key] = "read"
        return None if self.config.get(key) is None else self.read(key, kind)

    def _checked(self, what: str, value: Any, kind: type[T]) -> T:
        """A value that must be of this type; a number must be finite and above 0 too."""
        fits: bool = isinstance(value, _TYPES[kind]) and (kind is bool or not isinstance(value, bool))
        if not fits:
            raise CheckpointError(f"config field '{what}' is {value!r}, not of type {kind.__name__}", where=self.where)
        if kind is int and value < 1:
            raise CheckpointError(f"config field '{what}' is {value}, and must be at least 1", where=self.where)
        if kind is float and not (value > 0 and math.isfinite(value)):
            raise CheckpointError(f"config field '{what}' is {value}, and must be above 0", where=self.where)
        return kind(value)  # type: ignore[call-arg]

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
        """whole / parts, which must have no rest."""
        if whole % parts:
            raise CheckpointError(
                f"{whole_name} = {whole} is not a multiple of {parts_name} = {parts}", where=self.where
            )
        return whole // parts

    def ignore(self, reasons: Mapping[str, str]) -> None:
        """These fields do not change the function, and this is why."""
        self.accounts.update({key: reason for key, reason in reasons.items() if key in self.config})

    def finish(self) -> dict[str, str]:
        """The accounts; an error for a field that nobody has accounted for."""
        for key in ("model_type", "dtype", "torch_dtype", "unk_token_id", *TOKEN_IDS):
            if key in self.config:
                self.accounts[key] = "read"
        self._check_token_ids()
        self._check_dtypes()
        unknown = [key for key in self.config if key not in self.accounts]
        if unknown:
            raise UnsupportedError(
                f"config field '{unknown[0]}' = {self.config[unknown[0]]!r} is unknown to this family",
                where=self.where,
                why="a field that is not understood may change what the model computes"
                + (f" (also unknown: {', '.join(unknown[1:])})" if unknown[1:] else ""),
                fix=did_you_mean(unknown[0], self.accounts) + " If it changes nothing, delete it from the config",
            )
        return self.accounts

    def _check_token_ids(self) -> None:
        for key in TOKEN_IDS:
            value = self.config.get(key)
            for token in value if isinstance(value, list) else [value]:
                if token is not None and (not isinstance(token, int) or isinstance(token, bool)):
                    raise CheckpointError(f"config field '{key}' is {value!r}, not a token id", where=self.where)

    def _check_dtypes(self) -> None:
        new, old = (_dtype_name(self.config.get(key)) for key in ("dtype", "torch_dtype"))
        if new and old and new != old:
            raise CheckpointError(
                f"config says dtype '{new}' and torch_dtype '{old}'",
                where=self.where,
                why="they are two names of one fact",
                fix="Keep the one that the weights are stored in",
            )

    def rope(self, head_dim: int, layout: RopeLayout, default_theta: float = 10000.0) -> RopeSpec:
        """The rotary facts from either schema, old (`rope_theta`, `rope_scaling`) or new (`rope_parameters`).

        Raises CheckpointError where the two disagree, or where `rope_parameters` has no theta: readers
        would silently assume 10000.
        """
        theta = self.optional("rope_theta", float)
        scaling = self._rope_dict("rope_scaling")
        parameters = self._rope_dict("rope_parameters")
        if parameters is not None:
            inner = parameters.pop("rope_theta", None)
            inner = None if inner is None else self._checked("rope_parameters.rope_theta", inner, float)
            if inner is None and theta is None:
                raise CheckpointError(
                    f"rope_parameters has no rope_theta (None), and readers would assume {default_theta}",
                    where=self.where,
                    fix="Write the theta that the model was trained with into rope_parameters",
                )
            if inner is not None and theta is not None and inner != theta:
                raise CheckpointError(
                    f"rope_theta is {theta} and rope_parameters.rope_theta is {inner}",
                    where=self.where,
                    why="old readers would take the one and new readers the other",
                    fix="Keep the theta that the model was trained with in both",
                )
            theta = theta if inner is None else inner
            if scaling is not None and scaling != parameters:
                raise CheckpointError(
                    f"rope_scaling is {scaling} and rope_parameters is {parameters}",
                    where=self.where,
                    why="old readers would take the one and new readers the other",
                    fix="Keep the scaling that the model was trained with in both",
                )
            scaling = parameters
        if scaling is not None and scaling.get("rope_type") == "yarn":
            self._check_yarn(scaling)
        partial = self._partial_rotary_factor(scaling)
        scaling = self._scaling(scaling) if scaling else None
        rotary_dim = int(head_dim * partial)
        return RopeSpec(theta if theta is not None else default_theta, rotary_dim, layout, scaling)

    def _scaling(self, scaling: dict[str, Any]) -> dict[str, Any] | None:
        """A scaled kind of RoPE with its facts; None for the plain one, which has none."""
        kind = scaling.get("rope_type", "default")
        if kind not in _ROPE_TYPES:
            raise UnsupportedError(
                f"rope_type is '{kind}', which no conversion knows",
                where=self.where,
                fix=did_you_mean(str(kind), _ROPE_TYPES),
            )
        if kind != "default":
            return scaling
        facts = ", ".join(key for key in scaling if key != "rope_type")
        if facts:
            raise CheckpointError(
                f"the config scales RoPE ({facts}) and says no rope_type that does so",
                where=self.where,
                why="readers would take the plain RoPE and ignore the rest",
                fix="Write the rope_type that the model was trained with",
            )
        return None

    def _check_yarn(self, scaling: dict[str, Any]) -> None:
        """One spelling of the attention factor, and a context that is what factor and original context make."""
        other = scaling.pop("attn_factor", None)
        if other is not None and float(scaling.setdefault("attention_factor", other)) != float(other):
            raise CheckpointError(
                f"attn_factor is {other} and attention_factor is {scaling['attention_factor']}",
                where=self.where,
                why="they are two names of one fact",
                fix="Keep the one that the model was trained with",
            )
        factor, original = scaling.get("factor"), scaling.get("original_max_position_embeddings")
        context = self.config.get("max_position_embeddings")
        if factor is None or original is None or context is None or float(factor) * original != context:
            raise CheckpointError(
                f"YaRN has factor {factor} and original_max_position_embeddings {original}, and "
                f"max_position_embeddings is {context}",
                where=self.where,
                why="the context must be factor times the original one, or readers differ in the frequencies",
                fix="Write all three",
            )

    def _partial_rotary_factor(self, scaling: dict[str, Any] | None) -> float:
        outer = self.optional("partial_rotary_factor", float)
        inner = scaling.pop("partial_rotary_factor", None) if scaling else None
        if outer is not None and inner is not None and outer != float(inner):
            raise CheckpointError(
                f"partial_rotary_factor is {outer} and rope_parameters.partial_rotary_factor is {inner}",
                where=self.where,
                fix="Keep the one that the model was trained with in both",
            )
        return float(inner if outer is None and inner is not None else outer or 1.0)

    def _rope_dict(self, key: str) -> dict[str, Any] | None:
        value = self.optional(key, dict)
        if value is None:
            return None
        facts = dict(value)
        if "type" in facts:  # the spelling of transformers before 4.43
            facts.setdefault("rope_type", facts["type"])
            del facts["type"]
        return facts


def _dtype_name(value: object) -> str | None:
    return None if value is None else str(value).removeprefix("torch.")
