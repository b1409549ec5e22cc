"""Upgrade trained GPT-2-style checkpoints to LLaMA-style ones and keep what the models learnt.

    import converter

    converter.inspect("gpt2-folder").spec
    report = converter.convert("gpt2-folder", "llama-folder", text=["corpus.txt"])
    converter.heal("llama-folder", "healed", teacher="gpt2-folder", text=["corpus.txt"]).after.total.kl
    converter.verify("gpt2-folder", "healed", text=["other.txt"]).total.kl

torch and transformers are imported when a function that needs them is called first.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from converter.conversion.report import ConversionReport
    from converter.conversion.run import convert, plan_conversion
    from converter.errors import ConverterError
    from converter.families import Family, TargetFamily
    from converter.healing.report import HealReport
    from converter.healing.run import heal
    from converter.healing.upgrade import upgrade
    from converter.losses import Loss
    from converter.measure.check import Fault, check
    from converter.measure.evaluate import Evaluation, evaluate
    from converter.measure.inspect import Inspection, inspect
    from converter.measure.metrics import Comparison
    from converter.measure.verify import verify
    from converter.ops import Calibration, Op
    from converter.rope.swap import detect as detect_rope
    from converter.rope.swap import swap as swap_rope
    from converter.text.sources import TokenFile

__all__ = [
    "Calibration",
    "Comparison",
    "ConversionReport",
    "ConverterError",
    "Evaluation",
    "Family",
    "Fault",
    "HealReport",
    "Inspection",
    "Loss",
    "Op",
    "TargetFamily",
    "TokenFile",
    "check",
    "convert",
    "detect_rope",
    "evaluate",
    "heal",
    "inspect",
    "plan_conversion",
    "swap_rope",
    "upgrade",
    "verify",
]

#: Public name -> its module, and its name there where that is another.
_HOMES = {
    "Calibration": "ops",
    "Comparison": "measure.verify",
    "ConversionReport": "conversion.report",
    "ConverterError": "errors",
    "Evaluation": "measure.evaluate",
    "Family": "families",
    "Fault": "measure.check",
    "HealReport": "healing.report",
    "Inspection": "measure.inspect",
    "Loss": "losses",
    "Op": "ops",
    "TargetFamily": "families",
    "TokenFile": "text.sources",
    "check": "measure.check",
    "convert": "conversion.run",
    "detect_rope": "rope.swap:detect",
    "evaluate": "measure.evaluate",
    "heal": "healing.run",
    "inspect": "measure.inspect",
    "plan_conversion": "conversion.run",
    "swap_rope": "rope.swap:swap",
    "upgrade": "healing.upgrade",
    "verify": "measure.verify",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'converter' has no attribute '{name}'")
    module, _, own = _HOMES[name].partition(":")
    return getattr(importlib.import_module(f"converter.{module}"), own or name)
