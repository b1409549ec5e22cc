"""The reference model behind the interface of transformers' classes, for families that transformers does not have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from converter import reference
from converter.blocks import EMBEDDINGS, HEAD, BlockRef
from converter.families.opened import SourceModel


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
