"""Whether two checkpoints speak of the same tokens, and how many ids they share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from converter.errors import UnsupportedError
from converter.families.opened import SourceModel
from converter.files.tokenizer import first_difference, ids_without_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The rows of a checkpoint's embeddings, and the tokenizer that gives ids for them, if there is one."""

    name: str
    rows: int
    tokenizer: PreTrainedTokenizerFast | None

    @classmethod
    def of(cls, source: SourceModel) -> Vocabulary:
        """That of an opened checkpoint."""
        return cls(str(source.checkpoint.opened), source.spec.vocab_size, source.tokenizer)

    @property
    def tokens(self) -> int | None:
        """How many ids the tokenizer knows."""
        return None if self.tokenizer is None else max(self.tokenizer.get_vocab().values()) + 1

    def check(self) -> None:
        """Raise CheckpointError where the tokenizer has ids without a row."""
        if self.tokens is not None and self.tokens > self.rows:
            raise ids_without_rows(self.name, self.tokens, self.rows)


def common_ids(a: Vocabulary, b: Vocabulary) -> int:
    """How many ids, from 0 on, two models share: all, or those that have a token where one of them has padding rows.

    Raises UnsupportedError, naming both, where the tokenizers differ or the rows of one that the other lacks have
    tokens, or where no tokenizer says what they are; CheckpointError where a tokenizer has ids without a row.
    """
    a.check()
    b.check()
    if a.tokenizer is not None and b.tokenizer is not None:
        difference = first_difference(a.tokenizer, b.tokenizer, (a.name, b.name))
        if difference is not None:
            raise UnsupportedError(
                f"the tokenizers of {a.name} and {b.name} differ {difference}",
                why="predictions can be compared over the same tokens only",
                fix="Name two checkpoints that share a tokenizer",
            )
    small, large = sorted((a, b), key=lambda each: each.rows)
    common = small.rows
    if large.rows == common:
        return common
    rows = f"{small.name} and {large.name} have vocabularies of {small.rows} and {large.rows} tokens"
    known = [each.tokens for each in (a, b) if each.tokens is not None]
    if not known:
        raise UnsupportedError(
            rows,
            why="neither has a tokenizer, so nothing says whether what only one of them has is padding",
            fix="Put the tokenizer's files beside the weights of either",
        )
    if max(known) > common:
        raise UnsupportedError(
            rows,
            why=f"the tokenizer has {max(known)} tokens, so what only one of them has is no padding",
            fix="Name two checkpoints of one vocabulary",
        )
    return common
