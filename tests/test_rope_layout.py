"""RoPE layouts (cases R1, R2, R4, R5, R6): scores in fp64 after a swap, and what the wrong way does to them.

The rotation here is written with complex numbers, apart from the reference model's.
"""

from __future__ import annotations

import pytest
import torch

from converter.errors import CheckpointError
from converter.layout import head_order, other_layout, row_order, swap_rows
from converter.spec import RopeLayout

INTERLEAVED, HALF_SPLIT = RopeLayout.INTERLEAVED, RopeLayout.HALF_SPLIT
T, D = 64, 48


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def pairs(layout: RopeLayout, rotary: int) -> list[tuple[int, int]]:
    half = rotary // 2
    return [(2 * i, 2 * i + 1) if layout is INTERLEAVED else (i, i + half) for i in range(half)]


def rotated(x: torch.Tensor, layout: RopeLayout, rotary: int, denominator: int | None = None) -> torch.Tensor:
    """(H, T, d) -> each pair as a complex number, turned by its angle; the rest as it is."""
    result = x.clone()
    for i, (a, b) in enumerate(pairs(layout, rotary)):
        angle = torch.arange(x.shape[1], dtype=torch.float64) * 10000.0 ** (-2 * i / (denominator or rotary))
        turned = torch.complex(x[..., a], x[..., b]) * torch.polar(torch.ones_like(angle), angle)
        result[..., a], result[..., b] = turned.real, turned.imag
    return result


class Attention:
    """q and k of one layer with everything that follows their rows."""

    def __init__(self, heads: int, kv_heads: int, d: int, rotary: int | None = None, *, norms: str = "") -> None:
        self.counts = {"q": heads, "k": kv_heads}
        self.d, self.rotary = d, rotary or d
        self.x = randn(T, D, seed=9)
        self.tensors = {}
        for seed, part in enumerate(("q", "k")):
            rows = self.counts[part] * d
            self.tensors[f"{part}.weight"] = 0.25 * randn(rows, D, seed=seed)
            self.tensors[f"{part}.bias"] = randn(rows, seed=seed + 10)
            if norms:
                self.tensors[f"{part}.norm"] = 1 + 0.3 * randn(d if norms == "head" else rows, seed=seed + 20)
        self.norms = norms

    def swapped(self, to: RopeLayout, **wrong: int | None) -> dict[str, torch.Tensor]:
        """All of it in layout `to`; `wrong` names other head counts, or None for what is to be forgotten."""
        result = dict(self.tensors)
        for name, tensor in self.tensors.items():
            part, kind = name.split(".")
            shared = kind == "norm" and self.norms == "head"
            count = wrong.get(name, wrong.get(part, 1 if shared else self.counts[part]))
            if count is not None:
                head_dim = tensor.shape[0] // count
                rotary = self.rotary if head_dim == self.d else head_dim
                result[name] = swap_rows(tensor, count, head_dim, rotary, to, name=name)
        return result

    def scores(self, tensors: dict[str, torch.Tensor], layout: RopeLayout, **how: int) -> torch.Tensor:
        rotary = how.get("rotary", self.rotary)
        heads = {}
        for part in ("q", "k"):
            y = self.x @ tensors[f"{part}.weight"].T + tensors[f"{part}.bias"]
            if self.norms == "full":
                y = y / y.pow(2).mean(-1, keepdim=True).sqrt() * tensors[f"{part}.norm"]
            y = y.view(T, self.counts[part], self.d).transpose(0, 1)
            if self.norms == "head":
                y = y / y.pow(2).mean(-1, keepdim=True).sqrt() * tensors[f"{part}.norm"]
            heads[part] = rotated(y, layout, rotary, how.get("denominator"))
        k = heads["k"].repeat_interleave(self.counts["q"] // self.counts["k"], dim=0)
        return heads["q"] @ k.transpose(1, 2)


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return error(a, b) / float(b.abs().max())


GQA = [(8, 2, 16), (6, 2, 16), (32, 4, 16), (9, 3, 16), (8, 8, 32)]


class TestR1Layout:
    @pytest.mark.parametrize("source", [INTERLEAVED, HALF_SPLIT])
    def test_scores_are_equal_after_the_swap_and_wrong_without_it_or_the_other_way_round(self, source):
        attention = Attention(8, 2, 16)
        truth = attention.scores(attention.tensors, source)
        to = other_layout(source)
        assert relative(attention.scores(attention.swapped(to), to), truth) <= 1e-12
        assert error(attention.scores(attention.tensors, to), truth) > 1
        assert error(attention.scores(attention.swapped(source), to), truth) > 1

    def test_there_and_back_is_every_bit(self):
        attention = Attention(6, 2, 24, 16, norms="head")
        for name, tensor in attention.swapped(HALF_SPLIT).items():
            part, kind = name.split(".")
            count = 1 if kind == "norm" else attention.counts[part]
            assert torch.equal(swap_rows(tensor, count, 24, 16, INTERLEAVED), attention.tensors[name])

    def test_the_order_of_a_head_of_eight(self):
        assert head_order(8, 8, HALF_SPLIT) == [0, 2, 4, 6, 1, 3, 5, 7]
        assert head_order(8, 8, INTERLEAVED) == [0, 4, 1, 5, 2, 6, 3, 7]
        assert head_order(8, 4, HALF_SPLIT) == [0, 2, 1, 3, 4, 5, 6, 7]
        assert row_order(2, 4, 4, HALF_SPLIT).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.uint8])
    def test_any_dtype_moves_bit_by_bit(self, dtype):
        raw = torch.arange(16 * 6, dtype=torch.uint8).reshape(16, 6)
        tensor = raw.view(dtype) if dtype.itemsize == 1 else raw.to(dtype)
        moved = swap_rows(tensor, 2, 8, 8, HALF_SPLIT)
        order = row_order(2, 8, 8, HALF_SPLIT)
        assert moved.dtype == dtype
        assert torch.equal(moved.view(torch.uint8), tensor.view(torch.uint8)[order])

    def test_another_axis(self):
        tensor = randn(3, 16)
        assert torch.equal(swap_rows(tensor, 2, 8, 8, HALF_SPLIT, axis=1), swap_rows(tensor.T, 2, 8, 8, HALF_SPLIT).T)


class TestR2GroupedQuery:
    @pytest.mark.parametrize(("heads", "kv_heads", "d"), GQA)
    def test_q_goes_by_its_heads_and_k_by_its_own(self, heads, kv_heads, d):
        attention = Attention(heads, kv_heads, d)
        truth = attention.scores(attention.tensors, INTERLEAVED)
        assert relative(attention.scores(attention.swapped(HALF_SPLIT), HALF_SPLIT), truth) <= 1e-12

    @pytest.mark.parametrize(("heads", "kv_heads", "d"), [(8, 2, 16), (6, 2, 24), (32, 4, 16), (9, 3, 18)])
    def test_k_by_the_query_heads_or_by_their_ratio_is_wrong(self, heads, kv_heads, d):
        attention = Attention(heads, kv_heads, d)
        truth = attention.scores(attention.tensors, INTERLEAVED)
        for count in {heads, heads // kv_heads} - {kv_heads}:
            if (kv_heads * d) % count == 0 and (kv_heads * d // count) % 2 == 0:
                assert error(attention.scores(attention.swapped(HALF_SPLIT, k=count), HALF_SPLIT), truth) > 1

    @pytest.mark.parametrize(("heads", "kv_heads"), [(64, 8), (16, 4), (4, 2)])
    def test_other_ratios(self, heads, kv_heads):
        attention = Attention(heads, kv_heads, 16)
        truth = attention.scores(attention.tensors, HALF_SPLIT)
        assert relative(attention.scores(attention.swapped(INTERLEAVED), INTERLEAVED), truth) <= 1e-12

    def test_rows_that_do_not_fit_are_an_error_that_names_tensor_shape_and_expected_rows(self):
        with pytest.raises(CheckpointError) as caught:
            swap_rows(randn(100, 8), 8, 16, 16, HALF_SPLIT, name="layers.3.k.weight")
        for part in ("layers.3.k.weight", "[100, 8]", "128"):
            assert part in str(caught.value)
        with pytest.raises(CheckpointError):
            swap_rows(randn(256, 8), 8, 16, 16, HALF_SPLIT)


class TestR4Biases:
    @pytest.mark.parametrize("forgotten", ["q.bias", "k.bias"])
    def test_forgotten_biases_are_wrong(self, forgotten):
        attention = Attention(8, 2, 16)
        truth = attention.scores(attention.tensors, INTERLEAVED)
        wrong = attention.swapped(HALF_SPLIT, **{forgotten: None})
        assert error(attention.scores(wrong, HALF_SPLIT), truth) > 1


class TestR5PartialRotary:
    @pytest.mark.parametrize("source", [INTERLEAVED, HALF_SPLIT])
    def test_only_the_rotary_rows_move(self, source):
        attention, to = Attention(4, 4, 16, 8), other_layout(source)
        truth = attention.scores(attention.tensors, source)
        moved = attention.swapped(to)
        assert relative(attention.scores(moved, to), truth) <= 1e-12
        rest = moved["q.weight"].view(4, 16, D)[:, 8:]
        assert torch.equal(rest, attention.tensors["q.weight"].view(4, 16, D)[:, 8:])

    def test_the_whole_head_or_the_wrong_denominator_is_wrong(self):
        attention = Attention(4, 4, 16, 8)
        truth = attention.scores(attention.tensors, INTERLEAVED)
        right = attention.swapped(HALF_SPLIT)
        assert error(attention.scores(right, HALF_SPLIT, denominator=16), truth) > 1
        attention.rotary = 16
        whole = attention.swapped(HALF_SPLIT)
        attention.rotary = 8
        assert error(attention.scores(whole, HALF_SPLIT), truth) > 1

    @pytest.mark.parametrize("rotary", [0, 7, 18])
    def test_an_impossible_width_is_an_error(self, rotary):
        with pytest.raises(ValueError, match="rotary width"):
            head_order(16, rotary, HALF_SPLIT)


class TestR6Norms:
    @pytest.mark.parametrize("norms", ["head", "full"])
    @pytest.mark.parametrize("source", [INTERLEAVED, HALF_SPLIT])
    def test_norms_follow_the_rows_and_are_wrong_when_forgotten(self, norms, source):
        attention, to = Attention(8, 2, 16, norms=norms), other_layout(source)
        truth = attention.scores(attention.tensors, source)
        assert relative(attention.scores(attention.swapped(to), to), truth) <= 1e-12
        forgotten = attention.swapped(to, **{"q.norm": None, "k.norm": None})
        assert error(attention.scores(forgotten, to), truth) > 1
