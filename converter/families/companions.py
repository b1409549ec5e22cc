"""What stands beside the weights of a result: config.json, generation_config.json and the tokenizer.

Each file inherits from its own: a generation config that ends at several tokens still does, whatever config.json says.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from converter.families.config import TOKEN_IDS
from converter.families.opened import SourceModel
from converter.files.json_text import write_json
from converter.files.tokenizer import load_tokenizer, same_ids, write_tokenizer


def write_companions(source: SourceModel, folder: Path) -> None:
    """The generation config and the tokenizer, into a folder.

    Raises what `load_tokenizer` and `same_ids` raise.
    """
    write_json(folder / "generation_config.json", generation_config(source))
    if write_tokenizer(source.checkpoint.path, folder):
        before, after = source.tokenizer, load_tokenizer(folder)
        assert before is not None
        assert after is not None
        same_ids(before, after)


def with_ids(source: SourceModel, architecture: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """config.json, from what it says of the model itself, for weights in `dtype`."""
    stored = {"dtype": dtype, "torch_dtype": dtype, "use_cache": True}
    return {**architecture, **config_ids(source), **stored}


def config_ids(source: SourceModel) -> dict[str, Any]:
    """bos, eos and pad for config.json.

    A pad that is also a token of the text is left out: LLaMA and OPT take it for their embedding's `padding_idx`, whose
    row then gets no gradient in any training. Generation has it from generation_config.json.
    """
    ids = source.token_ids()
    return ids | ({"pad_token_id": None} if pad_in_text(source) else {})


def generation_config(source: SourceModel) -> dict[str, Any]:
    """The source's generation config, without ids that have no embedding; config.json fills in what it does not say."""
    inherited = source.checkpoint.generation_config or {}
    kept = {key: value for key, value in inherited.items() if not key.startswith(("_", "transformers_version"))}
    own = {key: source.embedded(kept[key]) for key in TOKEN_IDS if key in kept}
    return kept | source.token_ids() | {key: value for key, value in own.items() if value is not None}


def pad_in_text(source: SourceModel) -> bool:
    """Whether the token for padding is also one of the text: bos, eos or unk, or no special token at all."""
    pad, tokenizer = source.token_ids()["pad_token_id"], source.tokenizer
    if not isinstance(pad, int):
        return False
    if pad in _ends(source) or tokenizer is None:
        return pad in _ends(source)
    marks = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id)
    return pad in marks or pad not in (*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder)


def pad_remark(source: SourceModel) -> str | None:
    """What a user should know about a pad token that is bos or eos."""
    pad = source.token_ids()["pad_token_id"]
    if pad is None or pad not in _ends(source):
        return None
    return (
        f"pad_token_id {pad} is a token of the text too: a result has it in generation_config.json alone, for in "
        "config.json it would keep that row of the embeddings from learning"
    )


def _ends(source: SourceModel) -> set[object]:
    """Every bos and eos that the configs name."""
    found: set[object] = set()
    for ids in (source.token_ids(), source.checkpoint.generation_config or {}):
        for key in ("bos_token_id", "eos_token_id"):
            value = ids.get(key)
            found |= set(value) if isinstance(value, list) else {value}
    return found - {None}
