"""The constants of `converter.ops.swiglu_fits` against the activations as torch computes them."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from converter.ops.swiglu_fits import EXACT, FITS
from converter.spec import Activation

LARGEST_ERRORS = {
    (Activation.GELU_ERF, 1): 1.66e-2,
    (Activation.GELU_ERF, 2): 7.2e-3,
    (Activation.GELU_ERF, 3): 2.9e-4,
    (Activation.GELU_TANH, 1): 1.70e-2,
    (Activation.GELU_TANH, 2): 7.6e-3,
    (Activation.GELU_TANH, 3): 3.1e-4,
    (Activation.QUICK_GELU, 1): 1e-14,
    (Activation.SILU, 1): 1e-14,
    (Activation.RELU, 1): 4.36e-3,
}

TORCH = {
    Activation.GELU_ERF: lambda z: F.gelu(z),
    Activation.GELU_TANH: lambda z: F.gelu(z, approximate="tanh"),
    Activation.QUICK_GELU: lambda z: z * torch.sigmoid(1.702 * z),
    Activation.SILU: F.silu,
    Activation.RELU: F.relu,
}

every_fit = pytest.mark.parametrize("key", list(FITS), ids=lambda key: f"{key[0].value}-{key[1]}")


def drawn(key: tuple[Activation, int], z: Tensor) -> Tensor:
    return sum((F.silu(unit.a * z + unit.s) * (unit.c + unit.e * z) for unit in FITS[key]), torch.zeros_like(z))


def error(key: tuple[Activation, int], z: Tensor) -> Tensor:
    return (drawn(key, z) - TORCH[key[0]](z)).abs()


def test_every_activation_has_a_fit_and_every_fit_a_stated_error() -> None:
    assert {activation for activation, _ in FITS} == set(Activation)
    assert set(FITS) == set(LARGEST_ERRORS)


@every_fit
def test_number_of_units(key: tuple[Activation, int]) -> None:
    assert len(FITS[key]) == key[1]


@every_fit
def test_largest_error_is_the_stated_one(key: tuple[Activation, int]) -> None:
    z = torch.linspace(-8, 8, 16001, dtype=torch.float64)
    largest = error(key, z).max().item()
    assert largest <= LARGEST_ERRORS[key]
    if key[0] not in EXACT:
        assert largest >= 0.9 * LARGEST_ERRORS[key]


@every_fit
def test_exact_far_from_zero(key: tuple[Activation, int]) -> None:
    z = torch.tensor([-200.0, -50.0, 50.0, 200.0], dtype=torch.float64)
    assert error(key, z).max() < 1e-6


@every_fit
def test_asymptote_conditions(key: tuple[Activation, int]) -> None:
    units = FITS[key]
    assert all(unit.a > 0 for unit in units)
    assert math.fsum(unit.a * unit.e for unit in units) == 0
    assert math.fsum(unit.a * unit.c + unit.s * unit.e for unit in units) == pytest.approx(1, abs=1e-14)
    assert math.fsum(unit.s * unit.c for unit in units) == 0


@every_fit
def test_units_do_not_cancel(key: tuple[Activation, int]) -> None:
    # In 16 bits each unit is rounded on its own, so none may be much larger than what they sum to.
    z = torch.linspace(-8, 8, 1601, dtype=torch.float64)
    for unit in FITS[key]:
        assert (F.silu(unit.a * z + unit.s) * (unit.c + unit.e * z)).abs().max() <= 16.1


@pytest.mark.parametrize("activation", [Activation.GELU_ERF, Activation.GELU_TANH])
def test_biases_made_of_one_constant_survive_bfloat16(activation: Activation) -> None:
    constants = [unit.c for num_units in (1, 2, 3) for unit in FITS[activation, num_units] if unit.e == 0]
    assert len(constants) == 4
    assert torch.tensor(constants, dtype=torch.bfloat16).double().tolist() == constants
