"""Llama 3's scaling of the rotary frequencies, found again from the factors that llama.cpp stores in its place.

A GGUF holds one divisor for each frequency, and not the rule that gave them. The rule (`apply_scaling` of Llama 3.1's
reference code): wavelengths under original/high stay, those over original/low are divided by `factor`, and between
them the inverse divisor goes from 1/factor to 1 with s = (original/wavelength - low) / (high - low). Scaling original,
low and high by one number changes nothing, so low is taken as 1, as in every release; two divisors give the rest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

#: Largest relative error of the divisors under the rule that is found; they are stored in fp32.
_TOLERANCE = 1e-5


def scaling_of(divisors: Sequence[float], theta: float) -> dict[str, Any] | None:
    """The `rope_parameters` that give these divisors of the frequencies theta^(-2i/r), i < r/2; None if all are 1.

    Raises ValueError with the reason where neither linear scaling nor Llama 3's gives them.
    """
    found = np.array(divisors, np.float64)
    if not (np.isfinite(found).all() and (found > 0).all()):
        raise ValueError("some are not positive numbers")
    factor = float(found.max())
    if np.allclose(found, factor, rtol=_TOLERANCE, atol=0):
        return None if abs(factor - 1) <= _TOLERANCE else {"rope_type": "linear", "factor": round(factor, 4)}
    between = (found > 1 + _TOLERANCE) & (found < factor * (1 - _TOLERANCE))
    if between.sum() < 2:
        raise ValueError(f"{between.sum()} of them lie between 1 and {factor:g}, and two are needed to know the rule")
    smooth = (1 / found[between] - 1 / factor) / (1 - 1 / factor)
    slope, least = np.polyfit(1 / _wavelengths(theta, len(found))[between], smooth, 1)
    if not (slope > 0 > least):
        raise ValueError("they do not rise with the wavelength")
    scaling = {
        "rope_type": "llama3",
        "factor": round(factor, 4),
        "low_freq_factor": 1.0,
        "high_freq_factor": round(float(1 - 1 / least), 4),
        "original_max_position_embeddings": round(float(-slope / least)),
    }
    if not np.allclose(llama3_divisors(scaling, theta, len(found)), found, rtol=_TOLERANCE, atol=0):
        raise ValueError("Llama 3's rule does not give them, whatever its constants")
    return scaling


def llama3_divisors(scaling: dict[str, Any], theta: float, count: int) -> Array:
    """What each of `count` frequencies is divided by."""
    factor, low, high = (scaling[key] for key in ("factor", "low_freq_factor", "high_freq_factor"))
    turns = scaling["original_max_position_embeddings"] / _wavelengths(theta, count)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    divisors: Array = 1 / ((1 - smooth) / factor + smooth)
    return divisors


def _wavelengths(theta: float, count: int) -> Array:
    wavelengths: Array = 2 * math.pi * theta ** (np.arange(count) / count)
    return wavelengths
