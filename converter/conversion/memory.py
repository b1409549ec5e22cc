"""How much memory a conversion takes at most, known before it starts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from converter.conversion.plan import Plan
from converter.conversion.streams import IN_MEMORY
from converter.conversion.walk import GLANCE, calibrated_prefixes
from converter.measure.verify import LOGITS

_FP32 = 4


@dataclass(frozen=True)
class Memory:
    """Bytes at most: text that is shorter than the recipe's budget takes less."""

    #: Of a block, before and after an op.
    weights: int
    #: Of activation streams, a state for each token of the text and each prefix of the ops.
    streams: int
    #: Of streams that are too large for memory and lie in temporary files.
    stream_files: int
    #: Of both models and a batch of their logits; where so much is not free, verification goes block by block.
    verification: int

    @property
    def peak(self) -> int:
        """Bytes of memory at the worst moment, files left out."""
        return max(self.weights + self.streams, self.verification)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def expected_memory(plan: Plan) -> Memory:
    """What a conversion with real text and with verification takes."""
    tokens, recipe = plan.source.spec.hidden_size * _FP32, plan.recipe
    budgets = {"calibration": recipe.calibration.tokens, "glance": min(GLANCE, recipe.calibration.tokens)}
    sizes = [recipe.verify.tokens * tokens] * (1 + len(plan.changing))
    for kind, prefixes in calibrated_prefixes(plan).items():
        sizes += [budgets[kind] * tokens] * len(prefixes)
    streams = sum(size for size in sizes if size <= IN_MEMORY)
    models = plan.source.parameters + plan.parameters
    return Memory(plan.weight_bytes, streams, sum(sizes) - streams, _FP32 * (models + 2 * LOGITS))
