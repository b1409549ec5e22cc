"""Constants that draw an activation with SwiGLU units: f(z) = sum_k silu(a_k z + s_k) (c_k + e_k z).

Every set equals its activation at both infinities: sum a e = 0, sum (a c + s e) = 1, sum s c = 0, a > 0. The
GELU sets are made by `benchmarks/fit_swiglu.py`, which explains their shape and prints these lines; the error
beside a set is its largest one (on |z| <= 8; it is smaller beyond). The constants that alone become a bias,
the c of units with e = 0, fit bfloat16 exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

from converter.spec import Activation


@dataclass(frozen=True)
class SwigluUnit:
    """silu(a z + s) (c + e z)."""

    a: float
    s: float
    c: float
    e: float


#: (activation, units a neuron): the units.
FITS: dict[tuple[Activation, int], tuple[SwigluUnit, ...]] = {
    # error 1.65e-2 (rms 8.9e-3 for z of N(-0.5, 1.5)); benchmarks/fit_swiglu.py, density
    (Activation.GELU_ERF, 1): (SwigluUnit(a=1.7414965986394557, s=0.0, c=0.57421875, e=0.0),),
    # error 7.12e-3 (rms 3.5e-3); benchmarks/fit_swiglu.py, density
    (Activation.GELU_ERF, 2): (
        SwigluUnit(a=2.115702479338843, s=0.0, c=0.9453125, e=0.0),
        SwigluUnit(a=2.7675675675675677, s=0.0, c=-0.361328125, e=0.0),
    ),
    # error 2.81e-4 (rms 2.0e-4); benchmarks/fit_swiglu.py, minimax
    (Activation.GELU_ERF, 3): (
        SwigluUnit(a=1.923207, s=2.897233, c=-0.000108, e=0.031885),
        SwigluUnit(a=1.923207, s=-2.897233, c=-0.000108, e=-0.031885),
        SwigluUnit(a=1.6186718547388526, s=0.0, c=0.50390625, e=0.0),
    ),
    # error 1.69e-2 (rms 9.0e-3); benchmarks/fit_swiglu.py, density
    (Activation.GELU_TANH, 1): (SwigluUnit(a=1.7414965986394557, s=0.0, c=0.57421875, e=0.0),),
    # error 7.57e-3 (rms 3.6e-3); benchmarks/fit_swiglu.py, density
    (Activation.GELU_TANH, 2): (
        SwigluUnit(a=2.115702479338843, s=0.0, c=0.9453125, e=0.0),
        SwigluUnit(a=2.7675675675675677, s=0.0, c=-0.361328125, e=0.0),
    ),
    # error 3.08e-4 (rms 1.9e-4); benchmarks/fit_swiglu.py, minimax
    (Activation.GELU_TANH, 3): (
        SwigluUnit(a=1.895655, s=2.832844, c=-0.000121, e=0.033318),
        SwigluUnit(a=1.895655, s=-2.832844, c=-0.000121, e=-0.033318),
        SwigluUnit(a=1.6107943803554727, s=0.0, c=0.50390625, e=0.0),
    ),
    # exact: z sigmoid(1.702 z) = silu(1.702 z) / 1.702
    (Activation.QUICK_GELU, 1): (SwigluUnit(a=1.702, s=0.0, c=1 / 1.702, e=0.0),),
    # exact
    (Activation.SILU, 1): (SwigluUnit(a=1.0, s=0.0, c=1.0, e=0.0),),
    # error 4.4e-3 = -min(silu) / 64, at 64 z = -1.278; powers of two scale without rounding
    (Activation.RELU, 1): (SwigluUnit(a=64.0, s=0.0, c=1 / 64, e=0.0),),
}

#: Activations whose fit is the activation itself.
EXACT: frozenset[Activation] = frozenset({Activation.QUICK_GELU, Activation.SILU})
