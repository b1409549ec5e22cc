"""The losses of healing: the chunked head is the full one, sums add up however a step is split, padding is nothing."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from converter.healing.batches import Batches
from converter.healing.head import Head, HeadLosses, Told, head_losses
from converter.losses import IGNORE, Loss, Top
from converter.losses.cross_entropy import CrossEntropy, liger_kernel, liger_sum
from converter.losses.hidden_states import hidden_state_loss
from converter.losses.kl import KL
from converter.text.corpus import Corpus
from converter.text.documents import Document

TOKENS, WIDTH, TEACHER_WIDTH, VOCAB = 23, 8, 12, 61
MIXED = (KL(0.7), CrossEntropy(0.4))


def mixed(direction: Any = "forward", temperature: float = 1.0) -> tuple[Loss, ...]:
    return KL(0.7, temperature, direction), CrossEntropy(0.4)


class Problem:
    """Random states, heads with biases, targets of which some are missing, and answers of which some are."""

    def __init__(self, dtype: torch.dtype = torch.float64, tokens: int = TOKENS, biases: bool = True) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

        self.states = random(tokens, WIDTH).requires_grad_()
        self.head = Head(random(VOCAB, WIDTH).requires_grad_(), random(VOCAB).requires_grad_() if biases else None)
        self.teacher = random(tokens, TEACHER_WIDTH)
        self.teacher_head = Head(random(VOCAB, TEACHER_WIDTH), random(VOCAB) if biases else None)
        self.targets = torch.randint(VOCAB, (tokens,), generator=generator)
        self.targets[[3, tokens - 1]] = IGNORE
        self.answered = torch.rand(tokens, generator=generator) > 0.3

    @property
    def learning(self) -> list[Tensor]:
        return [tensor for tensor in (self.states, *self.head) if tensor is not None]

    def chunked(self, losses: tuple[Loss, ...] = MIXED, rows: slice = slice(None), **options: Any) -> HeadLosses:
        return head_losses(
            self.states[rows],
            self.head,
            self.targets[rows],
            losses=losses,
            told=Told(self.teacher[rows], self.teacher_head, answered=self.answered[rows]),
            **options,
        )

    def full(self, losses: tuple[Loss, ...] = MIXED) -> HeadLosses:
        """The same with all logits at once, by autograd."""
        given = {loss.name: loss for loss in losses}
        divergence = given["kl"]
        assert isinstance(divergence, KL)
        logits = F.linear(self.states, *self.head)
        ce = F.cross_entropy(logits, self.targets, ignore_index=IGNORE, reduction="sum")
        t = divergence.temperature
        log_q = (logits / t).log_softmax(-1)
        log_p = (F.linear(self.teacher, *self.teacher_head) / t).log_softmax(-1)
        a, b = (log_p, log_q) if divergence.direction == "forward" else (log_q, log_p)
        kl = (a.exp() * (a - b)).sum(-1)[self.answered & (self.targets != IGNORE)].sum() * t * t
        return _sums(losses, kl, ce)


def _sums(losses: tuple[Loss, ...], kl: Tensor, ce: Tensor) -> HeadLosses:
    return HeadLosses(losses[0].weight * kl + losses[1].weight * ce, {"kl": kl, "ce": ce})


def flat(found: HeadLosses) -> list[Tensor]:
    return [found.total, *found.values.values()]


def gradients(losses: HeadLosses, *learning: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(losses.total / 19, learning))  # a step's loss is divided once


def assert_close(found: Any, wanted: Any, tolerance: float) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert (a - b).abs().max() <= tolerance * b.abs().max()


@pytest.mark.parametrize("chunk", [7, None])
@pytest.mark.parametrize("k", [1, 5, None])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_the_likeliest_tokens_and_the_rest_as_one_more_outcome(direction, temperature, k, chunk):
    both = mixed(direction, temperature)
    problem = Problem(torch.float64)
    log_p = (F.linear(problem.teacher, *problem.teacher_head) / temperature).log_softmax(-1)
    log_q = (F.linear(problem.states, *problem.head) / temperature).log_softmax(-1)
    top = Top(*reversed(log_p.topk(k or log_p.shape[-1], dim=-1)))
    found = head_losses(
        *(problem.states, problem.head, problem.targets),
        **{"losses": both, "told": Told(top=top, answered=problem.answered), "chunk_tokens": chunk},
    )
    wanted = problem.full(both)
    if k is not None:
        kept = torch.zeros_like(log_p, dtype=torch.bool).scatter(-1, top.ids, True)
        p, q = (
            torch.cat([each.gather(-1, top.ids), each.masked_fill(kept, -math.inf).logsumexp(-1, keepdim=True)], dim=-1)
            for each in (log_p, log_q)
        )
        a, b = (p, q) if direction == "forward" else (q, p)
        counted = problem.answered & (problem.targets != IGNORE)
        kl = (a.exp() * (a - b)).sum(-1)[counted].sum() * temperature**2
        assert kl < wanted.values["kl"]
        wanted = _sums(both, kl, wanted.values["ce"])
    assert_close(flat(found), flat(wanted), 1e-6)  # what is left of a probability of 1 is taken to be 1e-9
    assert_close(gradients(found, *problem.learning), gradients(wanted, *problem.learning), 1e-6)


@pytest.mark.parametrize("chunk", [1, 7, TOKENS, None])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_chunks_are_the_full_form(direction, temperature, chunk):
    """H6, with biases in both heads and a wider teacher."""
    both = mixed(direction, temperature)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        problem = Problem(dtype)
        found, wanted = problem.chunked(both, chunk_tokens=chunk), problem.full(both)
        assert_close(flat(found), flat(wanted), tolerance)
        assert_close(gradients(found, *problem.learning), gradients(wanted, *problem.learning), tolerance)


@pytest.mark.parametrize("both", [(KL(1.0), CrossEntropy(0.0)), (KL(0.0), CrossEntropy(1.0))])
def test_a_loss_of_no_weight_is_told_and_not_learnt_from(both):
    problem = Problem(biases=False)
    found, wanted = problem.chunked(both), problem.full(both)
    assert_close(flat(found), flat(wanted), 1e-12)
    assert_close(gradients(found, *problem.learning), gradients(wanted, *problem.learning), 1e-12)
    assert min(found.values.values()) > 1.0


def test_without_a_teacher_there_is_cross_entropy_alone():
    problem = Problem()
    found = head_losses(problem.states, problem.head, problem.targets, losses=(CrossEntropy(0.4),))
    assert found.values.keys() == {"ce"}
    assert_close([found.values["ce"]], [problem.full().values["ce"]], 1e-12)
    assert_close([found.total], [0.4 * found.values["ce"]], 1e-12)


def test_only_what_learns_gets_a_gradient():
    problem = Problem()
    problem.head.weight.requires_grad_(False)
    problem.chunked().total.backward()
    assert problem.head.weight.grad is None
    assert_close([problem.states.grad, problem.head.bias.grad], gradients_of_full(problem), 1e-12)
    with torch.no_grad():
        assert not problem.chunked().total.requires_grad


def gradients_of_full(problem: Problem) -> list[Tensor]:
    return list(torch.autograd.grad(problem.full().total, (problem.states, problem.head.bias)))


def test_a_second_backward_is_an_error_and_no_wrong_gradient():
    losses = Problem().chunked()
    losses.total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="differentiated once"):
        losses.total.backward()


def test_nothing_but_padding_is_a_loss_of_nothing():
    """H6: no NaN, not even where the states hold some."""
    problem = Problem()
    problem.targets[:] = IGNORE
    with torch.no_grad():
        problem.states[5] = torch.nan
    losses = problem.chunked()
    losses.total.backward()
    assert flat(losses) == [0, 0, 0]
    assert all(not tensor.grad.any() for tensor in problem.learning)


def test_logits_far_from_zero_lose_nothing():
    """A trained GPT-2's logits are around -100: sums of p z in fp32 would be off by 1e-5."""
    problem = Problem(torch.float32)
    plain = problem.chunked()
    for head in (problem.head, problem.teacher_head):
        head.bias.data -= 100.0
    assert_close(flat(problem.chunked()), flat(plain), 1e-5)
    problem.teacher, problem.teacher_head = problem.states.detach(), Head(*(part.detach() for part in problem.head))
    assert problem.chunked().values["kl"] == 0


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_autocast_rounds_the_products_and_nothing_else(direction):
    """Matrix products in bf16; sums, and the gradients of fp32 master weights, in fp32."""
    both = mixed(direction)
    problem = Problem(torch.float32)
    wanted = problem.full(both)
    with torch.autocast("cpu", torch.bfloat16):
        found = problem.chunked(both, chunk_tokens=5)
    assert {part.dtype for part in flat(found)} == {torch.float32}
    assert_close(flat(found), flat(wanted), 0.02)
    given = gradients(found, *problem.learning)
    assert_close(given, gradients(wanted, *problem.learning), 0.02)
    assert {each.dtype for each in given} == {torch.float32}


def test_half_precision_states_get_a_half_precision_gradient():
    problem = Problem(torch.float32)
    states = problem.states.detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        head_losses(states, problem.head, problem.targets, losses=(CrossEntropy(1.0),)).total.backward()
    assert states.grad.dtype == torch.bfloat16
    assert problem.head.weight.grad.dtype == torch.float32


class _Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that anything makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, (tuple, list)) else (result,):
            self.elements = max(self.elements, each.numel() if isinstance(each, Tensor) else 0)
        return result


def test_no_more_logits_live_than_those_of_a_chunk():
    problem = Problem(tokens=400)
    with _Largest() as chunked:
        problem.chunked(chunk_tokens=16).total.backward()
    with _Largest() as full:
        problem.full().total.backward()
    assert full.elements == 400 * VOCAB
    assert chunked.elements == 400 * TEACHER_WIDTH  # less than nine chunks, and no logits


def test_liger_s_mean_becomes_a_sum():
    """The arithmetic around the kernel, which itself needs a GPU."""
    problem = Problem()

    def fused(weight: Tensor, states: Tensor, targets: Tensor, bias: Tensor | None) -> Tensor:
        return F.cross_entropy(F.linear(states, weight, bias), targets, ignore_index=IGNORE)

    found = liger_sum(fused, problem.states, *problem.head, problem.targets)
    assert_close([found], [problem.full().values["ce"]], 1e-12)


@pytest.mark.gpu
def test_a_gpu_gives_what_a_cpu_gives_with_liger_s_kernels_too():
    problem = Problem(torch.float32)
    only = (KL(0.0), CrossEntropy(1.0))
    wanted = [problem.full(), problem.full(only)]
    expected = [gradients(losses, *problem.learning) for losses in wanted]
    for name in ("states", "teacher", "targets", "answered"):
        setattr(problem, name, getattr(problem, name).detach().cuda().requires_grad_(name == "states"))
    problem.head = Head(*(part.detach().cuda().requires_grad_() for part in problem.head))
    problem.teacher_head = Head(*(part.cuda() for part in problem.teacher_head))
    assert liger_kernel() is not None
    alone = head_losses(problem.states, problem.head, problem.targets, losses=only[1:])
    for found, losses, gradient in zip((problem.chunked(chunk_tokens=7), alone), wanted, expected, strict=True):
        assert_close([found.total.cpu()], [losses.total], 1e-5)
        assert_close([each.cpu() for each in gradients(found, *problem.learning)], gradient, 1e-4)


# --- a whole step ---------------------------------------------------------------------------------------------


def sequences(rows: int, seed: int = 0) -> Any:
    """Packed sequences of random documents, the last one padded."""
    rng = np.random.default_rng(seed)
    documents = [rng.integers(0, VOCAB, size) for size in (9, 3, 17, 30, 1, 8, 21, 40, 5)]
    return Batches(Corpus.of([Document("", ids) for ids in documents]), 16, rows, seed).step(0)


@pytest.mark.parametrize("cuts", [(), (1,), (5,), (3, 6, 9)])
@pytest.mark.parametrize("world", [1, 2])
def test_a_step_is_the_same_however_it_is_split(cuts, world):
    """H3: sums over micro-batches and ranks, divided once by the targets of the whole step."""
    step = sequences(10)
    problem = Problem(tokens=step.targets.numel())
    problem.targets = step.targets.flatten()
    whole = gradients(problem.chunked(), *problem.learning)
    edges = sorted({0, 10, *cuts, *(10 * rank // world for rank in range(world))})
    parts = [slice(16 * first, 16 * end) for first, end in pairwise(edges)]
    split = [gradients(problem.chunked(rows=part), *problem.learning) for part in parts]
    assert_close([sum(each) for each in zip(*split, strict=True)], whole, 1e-12)


def test_a_mean_of_means_is_another_step():
    """The wrong way of H3: each micro-batch divided by its own targets, of which they have unlike numbers."""
    step = sequences(10)
    problem = Problem(tokens=step.targets.numel())
    problem.targets = step.targets.flatten()
    valid = [int((problem.targets[part] != IGNORE).sum()) for part in (slice(0, 16), slice(16, None))]
    wanted = torch.autograd.grad(problem.chunked().total / sum(valid), problem.head.weight)[0]
    means = [
        torch.autograd.grad(problem.chunked(rows=part).total / count, problem.head.weight)[0]
        for part, count in zip((slice(0, 16), slice(16, None)), valid, strict=True)
    ]
    wrong = (means[0] + means[1]) / 2
    assert (wrong - wanted).abs().max() > 0.05 * wanted.abs().max()


def test_labels_are_shifted_once():
    """H4: the text 0, 1, 2, ... and a model that is sure of the next token; its teacher is another such model."""
    step = Batches(Corpus.of([Document("", np.arange(20)), Document("", np.arange(30, 45))]), 16, 3, seed=0).step(0)
    sure = 50.0 * torch.eye(VOCAB, dtype=torch.float64).roll(1, 0)  # row v + 1 is what v's state points to
    states = torch.eye(VOCAB, dtype=torch.float64)[step.ids.flatten()]
    told = Told(2.0 * states, Head(sure / 2.0))
    losses = head_losses(states, Head(sure), step.targets.flatten(), losses=MIXED, told=told)
    assert max(flat(losses)) < 1e-12
    for wrong in (step.ids, step.targets.roll(-1, 1)):  # not shifted, and shifted twice
        found = head_losses(states, Head(sure), wrong.flatten(), losses=MIXED, told=told)
        assert found.values["ce"] > 49.0 * step.valid / 2


# --- hidden states --------------------------------------------------------------------------------------------


def test_hidden_states_are_compared_by_their_own_length():
    teacher = torch.tensor([[[3.0, 4.0], [30.0, 40.0], [1.0, 1.0]]])
    student = teacher + torch.tensor([[[0.5, 0.0], [0.0, 5.0], [torch.inf, 0.0]]])
    mask = torch.tensor([[True, True, False]])
    assert hidden_state_loss(student, teacher, mask) == pytest.approx(0.25 / 25 + 25 / 2500)
    student = student[:, :2].bfloat16().requires_grad_()
    loss = hidden_state_loss(student, teacher[:, :2].bfloat16())
    loss.backward()
    assert loss.dtype == torch.float32
    assert student.grad.abs().sum() > 0


def test_the_mean_of_a_layernorm_models_states_is_no_error():
    teacher = torch.randn(5, 8) + 3.0
    student = teacher - teacher.mean(-1, keepdim=True)
    assert hidden_state_loss(student, teacher, centred=True) < 1e-10
    assert hidden_state_loss(student, teacher) > 1.0
