"""Rows without a token go: the logits of all tokens stay, and what is dropped is told."""

from __future__ import annotations

from pathlib import Path

import models
import pytest
import torch

from converter.blocks import EMBEDDINGS, HEAD
from converter.errors import UnsupportedError
from converter.families.opened import SourceModel
from converter.ops.trim_vocabulary import TrimVocabulary


@pytest.mark.parametrize("tied", [True, False])
def test_the_logits_of_all_tokens_stay(tied: bool, tmp_path: Path) -> None:
    source = SourceModel.open(models.save(models.gpt2(tie_word_embeddings=tied), tmp_path))
    ids = models.random_ids().clamp(max=49)
    wanted = models.Converted(source).logits(ids)
    trimmed = models.Converted(source).after(TrimVocabulary(50))
    assert torch.equal(trimmed.logits(ids), wanted[..., :50])
    assert trimmed.spec.vocab_size == 50
    dropped = [*trimmed.notes[EMBEDDINGS].dropped, *trimmed.notes[HEAD].dropped]
    assert [each.name for each in dropped] == [
        "embeddings.embed.weight, rows 50 to 60",
        "head.head.weight, rows 50 to 60",
    ]
    rows = source.read_block(EMBEDDINGS, torch.float64)["embed.weight"][50:]
    assert dropped[0].norm == pytest.approx(float(rows.norm()))


def test_it_is_lossy_where_it_does_something(tmp_path: Path) -> None:
    spec = SourceModel.open(models.save(models.llama(), tmp_path)).spec
    assert [(TrimVocabulary(n).needed(spec), TrimVocabulary(n).exact(spec)) for n in (0, 60, 61)] == [
        (False, True),
        (True, False),
        (False, True),
    ]
    with pytest.raises(UnsupportedError, match="there are 61 rows, not 62"):
        TrimVocabulary(62).change(spec)
