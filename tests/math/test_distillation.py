"""Teachers: divergences at k ids, advantages, the top k ids of a local teacher, and their sum with a policy loss."""

from __future__ import annotations

import itertools
import math
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from faults.costs import counted
from helpers.array import arguments_of, leaves_of, of_function
from helpers.counters import StepCounts
from helpers.features import Case, make
from helpers.tile_choices import small_tiles
from hypothesis import given
from hypothesis import strategies as st
from tolerance import (
    EXPECTED_GRADIENT_ABSOLUTE,
    EXPECTED_GRADIENT_RELATIVE,
    FLOAT64_RELATIVE,
    KEPT_VALUE_ABSOLUTE,
    KEPT_VALUE_RELATIVE,
    SHARDED_GRADIENT_RELATIVE,
)
from torch import Tensor

from gspo_kernels import Objective, linear_log_probs, metrics, policy_loss, validation
from gspo_kernels.backends import torch as torch_backend
from gspo_kernels.distillation import KINDS, TAILS, linear_top_k, teacher_advantages, topk_divergence
from gspo_kernels.reference import gspo_reference_loss, kl_to_reference

FORMS = [(kind, tail) for kind in KINDS for tail in TAILS if kind != "generalized" or tail == "drop"]
V, BETA = 9, 0.3


# -- divergences


def formula(p: Tensor, q: Tensor, kind: str, tail: str, rest_p: Tensor, rest_q: Tensor) -> Tensor:
    """The divergence at ids with probabilities p and q, [k] -> []. All other ids have rest_p and rest_q together."""
    if tail == "bucket":
        p, q = torch.cat([p, rest_p[None]]), torch.cat([q, rest_q[None]])
    elif tail == "renormalize":
        p, q = p / p.sum(), q / q.sum()
    m = BETA * q + (1 - BETA) * p
    terms = {
        "forward": q * (q / p).log(),
        "reverse": p * (p / q).log(),
        "generalized": p * (p / q).log() - p + q,
        "jensen-shannon": BETA * q * (q / m).log() + (1 - BETA) * p * (p / m).log(),
    }
    return terms[kind].sum()


@given(st.integers(0, 10_000), st.sampled_from(FORMS), st.floats(0.1, 3), st.sampled_from(["ids", "-inf"]))
def test_divergences_equal_their_formulas(seed: int, form: tuple[str, str], spread: float, absent: str) -> None:
    kind, tail = form
    rng = torch.Generator().manual_seed(seed)
    z = (spread * torch.randn(2, 3, V, generator=rng, dtype=torch.float64)).requires_grad_()
    full_q = (spread * torch.randn(2, 3, V, generator=rng, dtype=torch.float64)).log_softmax(-1)
    ids = torch.rand(2, 3, V, generator=rng).argsort(-1)[..., :5]
    here = torch.rand(2, 3, 5, generator=rng) < 0.8
    here[..., :2] = True
    mask = torch.rand(2, 3, generator=rng) < 0.8
    student, teacher = (x.log_softmax(-1).gather(-1, ids) for x in (z, full_q))
    expected, rest = torch.zeros(2, 3, dtype=torch.float64), torch.ones(2, 3, dtype=torch.float64)
    limited = torch.zeros(2, 3, dtype=torch.bool)  # the tail's weight in the gradient
    for i, j in mask.nonzero().tolist():
        at = ids[i, j, here[i, j]]
        others = torch.ones(V, dtype=torch.bool).index_fill_(0, at, False)
        p, q = z[i, j].softmax(0), full_q[i, j].exp()
        expected[i, j] = formula(p[at], q[at], kind, tail, p[others].sum(), q[others].sum())
        rest[i, j] = p[others].sum().detach()
        limited[i, j] = form == ("forward", "bucket") and q[others].sum() > 32 * rest[i, j]
    options: dict[str, Any] = dict(kind=kind, tail=tail, beta=BETA, mask=mask)
    read = here & mask[..., None]
    if absent == "ids":
        options["ids"] = torch.where(here, ids, -1)
        student, teacher = (torch.where(read, x, torch.nan) for x in (student, teacher))
    else:  # where masked, and what linear_log_probs returns for absent ids
        student, teacher = torch.where(read, student, 0), torch.where(read, teacher, -torch.inf)
    ours = topk_divergence(student, teacher, **options)
    assert ((ours - expected).abs() <= FLOAT64_RELATIVE / rest).all()
    ones = torch.ones_like(ours)
    ours_grad, grad = (torch.autograd.grad(x, z, ones, retain_graph=True)[0] for x in (ours, expected + 0 * z.sum(-1)))
    assert ((ours_grad - grad).abs() <= FLOAT64_RELATIVE / rest[..., None])[~limited].all()
    if tail == "bucket" or (kind, tail) in (("generalized", "drop"), ("jensen-shannon", "drop")):
        assert (ours > -FLOAT64_RELATIVE).all()
    single = topk_divergence(student.float(), teacher.float(), **options)
    assert single.dtype == torch.float32
    assert ((single - expected).abs() <= KEPT_VALUE_ABSOLUTE / rest + KEPT_VALUE_RELATIVE * expected.abs()).all()


@pytest.mark.parametrize(("kind", "tail"), FORMS)
def test_what_a_tail_does_to_a_student_that_equals_its_teacher(kind: str, tail: str) -> None:
    z = torch.linspace(1, 0, V, dtype=torch.float64).requires_grad_()
    log_p = z.log_softmax(-1)
    (d_z,) = torch.autograd.grad(topk_divergence(log_p[None, :4], log_p[None, :4], kind=kind, tail=tail).sum(), z)
    mass = log_p[:4].exp().sum()
    # Descent moves probability out of the ids for "reverse", and into the ids for "forward".
    sign = {("reverse", "drop"): -1, ("forward", "drop"): 1}.get((kind, tail), 0)
    torch.testing.assert_close(d_z[4:], sign * mass * log_p[4:].exp(), rtol=FLOAT64_RELATIVE, atol=FLOAT64_RELATIVE)
    assert d_z[:4].abs().max() <= (1 if sign else FLOAT64_RELATIVE)


@pytest.mark.parametrize(("kind", "tail"), FORMS)
def test_extreme_probabilities_have_the_formulas_value_and_finite_gradients(kind: str, tail: str) -> None:
    inf = math.inf
    rows = {  # student, teacher
        "probability 1": ([0.0, -inf], [0.0, -inf]),
        "rounded above 1": ([1e-7, -20.0], [1e-7, -20.0]),
        "teacher without a tail": ([-1.0, -2.0], [math.log(0.75), math.log(0.25)]),
        "student without a tail": ([math.log(0.75), math.log(0.25)], [-1.0, -2.0]),
        "teacher 0": ([-1.0, -2.0], [-0.5, -inf]),
        "student 0": ([-0.5, -inf], [-1.0, -2.0]),
        "nothing present": ([math.nan, 0.0], [-1.0, math.nan]),
    }
    ids = torch.arange(2).expand(len(rows), 2).clone()
    ids[-1] = -1
    student, teacher = (torch.tensor([pair[i] for pair in rows.values()]) for i in (0, 1))
    student.requires_grad_()
    out = topk_divergence(student, teacher, kind=kind, tail=tail, ids=ids)
    (gradient,) = torch.autograd.grad(out.sum(), student)
    infinite = {"forward": "student 0", "reverse": "teacher 0", "generalized": "teacher 0"}.get(kind)
    for name, value, d in zip(rows, out.tolist(), gradient, strict=True):
        assert (value == inf) == (name == infinite), name
        assert name == infinite or d.isfinite().all(), name
    assert out[-1] == 0 and gradient[-1].abs().max() == 0
    if (kind, tail) == ("forward", "bucket"):  # the tail is lost in rounding, but has a gradient: 32 p - q
        expected = 32 * student[3].exp() - teacher[3].exp()
        torch.testing.assert_close(gradient[3], expected.detach(), rtol=KEPT_VALUE_RELATIVE, atol=0)


@pytest.mark.parametrize(("dtype", "largest"), [(torch.float32, 12.0), (torch.float64, 20.0)])
def test_a_confident_student_keeps_the_digits_of_its_tail(dtype: torch.dtype, largest: float) -> None:
    z = torch.tensor([[largest, 1.0, 0.5, -0.3]], dtype=torch.float64)
    log_p = z.log_softmax(-1)  # of 12: 2.8e-5 outside of the first id, 4.4e-6 outside of all three; of 20: 1.5e-9
    log_q = torch.tensor([[-0.1, -3.0, -4.0]], dtype=torch.float64)
    q = log_q[0].exp()
    truth = formula(log_p[0, :3].exp(), q, "forward", "bucket", log_p[0, 3].exp(), 1 - q.sum())
    ours = topk_divergence(log_p[:, :3].to(dtype), log_q.to(dtype), kind="forward", tail="bucket")
    torch.testing.assert_close(ours[0].double(), truth, rtol=KEPT_VALUE_RELATIVE, atol=0)


def test_weights_choose_and_mix_teachers() -> None:
    rng = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(2, 3, 2, V, generator=rng).log_softmax(-1)[..., :4] for _ in range(2))
    student.requires_grad_()
    options: dict[str, Any] = dict(kind="reverse", tail="bucket")
    each = topk_divergence(student, teacher, **options)  # [2, 3, 2]
    mean = topk_divergence(student, teacher, teacher_weights=torch.full((2,), 0.5), **options)
    torch.testing.assert_close(mean, each.mean(-1))
    chosen = torch.eye(2)[torch.tensor([1, 0])]  # a teacher for each answer
    only = torch.where(chosen[:, None, :, None] == 1, teacher, torch.nan)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    picked = topk_divergence(student, only, teacher_weights=chosen, mask=mask, **options)
    torch.testing.assert_close(picked, torch.stack([each[0, :, 1], each[1, :, 0]]) * mask)
    assert torch.autograd.grad(picked.sum(), student)[0].isfinite().all()


# -- one log-prob per token


@given(
    st.integers(0, 10_000),
    st.sampled_from(["token", "sequence"]),
    st.sampled_from([None, 0.7]),
    st.sampled_from([None, "M", "B, M", "B, T, M"]),
    st.sampled_from([None, "B", "B, 1", "B, T"]),
    st.sampled_from(["padded", "packed"]),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_advantages_of_teachers_equal_their_formula(
    seed: int, level: str, bound: float | None, weights: str | None, task: str | None, layout: str, dtype: torch.dtype
) -> None:
    """With `level="sequence"`, the task has one advantage per sequence. A packed batch cannot take them as [B, 1]."""
    rng = torch.Generator().manual_seed(seed)
    mask = torch.rand(3, 4, generator=rng) < 0.7
    p = -3 * torch.rand(3, 4, generator=rng, dtype=torch.float64)
    q = -3 * torch.rand(3, 4, 2, generator=rng, dtype=torch.float64)
    q[0, 1, 0] = -torch.inf if bound else -9.0
    w = torch.ones(3, 4, 2, dtype=torch.float64)
    w[..., 1] = 0
    shapes = {"M": (2,), "B, M": (3, 1, 2), "B, T, M": (3, 4, 2)}
    if weights:
        w = (torch.rand(shapes[weights], generator=rng) - 0.3).clamp(min=0).double().expand(3, 4, 2).clone()
    a = torch.randn(3, 4 if task == "B, T" and level == "token" else 1, generator=rng).double() * (task is not None)
    expected = torch.zeros(3, 4, dtype=torch.float64)
    for b, t, m in itertools.product(range(3), range(4), range(2)):
        gap = (q[b, t, m] - p[b, t]).item()
        gap = gap if bound is None else max(-bound, min(bound, gap))
        expected[b, t] += (0.1 * w[b, t, m] * gap if w[b, t, m] else 0.0) * mask[b, t]
    expected = (expected.sum(1) / mask.sum(1).clamp(min=1) + a[:, 0]) if level == "sequence" else (expected + a) * mask

    inside = torch.ones(3, 4, dtype=torch.bool)
    options: dict[str, Any] = dict(coef=0.1, level=level, bound=bound, mask=mask)
    if layout == "packed":  # the last sequence has its unmasked tokens only
        inside[2] = mask[2]
        options |= {"cu_seqlens": torch.cat([torch.zeros(1), inside.sum(1).cumsum(0)]).int(), "mask": mask[inside]}
    lay_out = lambda x: x[inside] if layout == "packed" else x  # noqa: E731
    if weights:
        of_answers = {"M": w[0, 0], "B, M": w[:, 0]} if layout == "padded" or weights == "M" else {}
        options["teacher_weights"] = of_answers.get(weights, lay_out(w)).to(dtype)
    if task:
        a = a if task == "B, 1" and layout == "padded" else a[:, 0] if a.shape[1] == 1 else lay_out(a)
        options["advantages"] = a.to(dtype)
    unused = torch.where(mask[..., None] & (w != 0), q, math.nan)
    teacher = lay_out(unused if weights else unused[..., 0]).to(dtype)
    log_probs = lay_out(torch.where(mask, p, math.nan)).to(dtype)
    ours = teacher_advantages(log_probs.requires_grad_(), teacher.requires_grad_(), **options)
    expected = lay_out(expected) if level == "token" else expected
    assert ours.dtype == dtype and not ours.requires_grad
    limit = FLOAT64_RELATIVE if dtype == torch.float64 else KEPT_VALUE_RELATIVE
    torch.testing.assert_close(ours.double(), expected, rtol=limit, atol=limit)


def test_expected_gradients_of_the_forms_with_one_log_prob_per_token() -> None:
    """Sum the gradient over every token that could be sampled, weighted by its probability."""
    rng = torch.Generator().manual_seed(1)
    z = torch.randn(V, generator=rng, dtype=torch.float64).requires_grad_()
    log_q = torch.randn(V, generator=rng, dtype=torch.float64).log_softmax(-1)
    log_p = z.log_softmax(-1)
    p = log_p.detach().exp()
    gradient = lambda loss: torch.autograd.grad(loss, z, retain_graph=True)[0]  # noqa: E731
    reverse, forward = gradient((log_p.exp() * (log_p - log_q)).sum()), gradient(-(log_q.exp() * log_p).sum())
    expected = lambda advantages: gradient(-(p * advantages.detach() * log_p).sum())  # noqa: E731
    k3 = (log_q - log_p).exp() - 1 + log_p - log_q
    at_ids = topk_divergence(log_p[None, :4], log_q[None, :4], kind="reverse", tail="bucket").expand(V)
    cases = {
        "teacher_advantages": (expected(teacher_advantages(log_p[None], log_q[None])[0]), reverse),
        "k3 as an advantage": (expected(-k3), reverse - forward),
        "a divergence as an advantage": (expected(-at_ids), 0 * reverse),
    }
    slopes = {"k1": 0 * reverse, "k2": reverse, "k1+": reverse, "k3+": reverse, "k3": forward}
    for estimator, truth in slopes.items():
        objective = Objective(kl_coef=1.0, kl_estimator=estimator, ratio="token", aggregation="token-mean")
        leaf = log_p.detach()[None].requires_grad_()
        out = policy_loss(leaf, torch.zeros(1), ref_log_probs=log_q[None], objective=objective, normalizer=1.0)
        (slope,) = torch.autograd.grad(out.loss, leaf)
        cases[estimator] = (gradient((p * slope[0] * log_p).sum()), truth)
    for name, (ours, truth) in cases.items():
        relative, absolute = EXPECTED_GRADIENT_RELATIVE, EXPECTED_GRADIENT_ABSOLUTE
        torch.testing.assert_close(ours, truth, rtol=relative, atol=absolute, msg=name)


def test_a_divergence_without_gradient_is_pointed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "_warned", set())
    log_p = torch.tensor([[[-1.0, -2.0]]])
    with pytest.warns(UserWarning, match="As an advantage, its expected gradient is 0"):
        topk_divergence(log_p, log_p, kind="forward", tail="drop")
    monkeypatch.setattr(validation, "_warned", set())
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        topk_divergence(log_p, log_p, kind="forward", tail="drop")  # a metric
    leaf = log_p.clone().requires_grad_()
    divergence = topk_divergence(leaf, log_p, kind="forward", tail="drop")
    with pytest.warns(UserWarning, match="policy_loss: advantages have a gradient"):
        policy_loss(leaf[..., 0], divergence)


# -- the top k ids


def test_equal_logits_are_in_the_order_of_ids_and_confident_log_probs_keep_their_digits() -> None:
    hidden = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    weight = torch.tensor([[0.0, 18.0], [0.0, 1.0], [1.0, 2.0], [1.0, 1.0], [1.0, 2.0], [0.0, -200.0]])
    with small_tiles(2, 2):
        top = linear_top_k(hidden, weight, 6)
        only = linear_top_k(hidden, weight[:5], 2, bias=torch.tensor([-torch.inf] * 4 + [0.0]))
    assert top.ids.tolist() == [[2, 3, 4, 0, 1, 5], [0, 2, 4, 1, 3, 5]]
    assert linear_top_k(torch.ones(1, 1), torch.ones(100, 1), 40).ids.tolist() == [[*range(40)]]
    others = (weight[1:, 1].double() - 18).exp().sum()
    torch.testing.assert_close(top.log_probs[1, 0].double(), -others.log1p(), rtol=KEPT_VALUE_RELATIVE, atol=0)
    assert only.ids.tolist() == [[4, -1]] * 2 and only.log_probs.tolist() == [[0.0, -torch.inf]] * 2


# -- next to a policy loss


def losses(case: Case, leaves: dict[str, Tensor], ids: Tensor | None, log_q: Tensor) -> Tensor:
    """GSPO-token, KL over the vocabulary and a teacher at `ids`; without a teacher if `ids` is None."""
    arguments = arguments_of(case, leaves)
    of_head = of_function(linear_log_probs, arguments)
    over_vocabulary: dict[str, Any] = of_head | {"kept_sets": None, "extra_ids": ids}
    full = linear_log_probs(**over_vocabulary)
    log_probs, kl = full.log_probs, None
    if arguments["kept_sets"] is not None:
        log_probs, kl = linear_log_probs(**of_head).log_probs, log_probs
    loss = policy_loss(log_probs, **of_function(policy_loss, arguments) | {"entropy": None, "kl_log_probs": kl}).loss
    if full.extra_log_probs is None:
        return loss
    divergence = topk_divergence(full.extra_log_probs, log_q, kind="forward", tail="bucket", mask=case.mask)
    return loss + 0.3 * divergence.sum() / case.mask.sum()


@pytest.mark.parametrize("kept", ["None", "offsets"])
def test_a_teacher_takes_no_further_pass_and_gradients_equal_float64(kept: str) -> None:
    # The KL gives every row a gradient, with and without a teacher.
    settings = "dtype=fp64 ratio=sequence-token kl=term kl_aggregation=token-mean advantages=per_token"
    case = make(f"{settings} kept_sets={kept}", 4)
    hidden, mask = case.tokens["hidden"], case.mask
    teacher = linear_top_k(hidden.flip(-1), case.leaves["weight"], 8, mask=mask)
    results = []
    for ids in (None, teacher.ids):
        leaves = leaves_of(case)
        with counted(StepCounts(), torch_backend) as counts:
            loss = losses(case, leaves, ids, teacher.log_probs)
            gradients = torch.autograd.grad(loss, list(leaves.values()))
        results.append((counts.multiply_adds, metrics.last_backward()["passes"].item()))
    assert results[0] == results[1] and results[0][0] > 0 and results[0][1] == 4

    truth = leaves_of(case)
    arguments = arguments_of(case, truth)
    names = ("target_ids", "advantages", "mask", "old_log_probs", "kept_sets")
    policy = gspo_reference_loss(
        truth["hidden"], truth["weight"], **{name: arguments[name] for name in names},
        objective=replace(case.objective, kl_coef=0.0),
    ).loss  # fmt: skip  # lines by subject
    full = (truth["hidden"][mask] @ truth["weight"].t()).log_softmax(-1)
    at_target = full.gather(-1, case.tokens["target_ids"][mask][:, None])[:, 0]
    kl = kl_to_reference(at_target, case.tokens["ref_log_probs"][mask].double(), at_target, "k3").mean()
    p, q = full.gather(-1, teacher.ids[mask]).exp(), teacher.log_probs[mask].exp()
    rest = [1 - x.sum(1) for x in (p, q)]
    rows = [formula(p[i], q[i], "forward", "bucket", rest[0][i], rest[1][i]) for i in range(len(p))]
    expected = policy + 0.1 * kl + 0.3 * torch.stack(rows).mean()
    torch.testing.assert_close(loss, expected, rtol=FLOAT64_RELATIVE, atol=FLOAT64_RELATIVE)
    for ours, true in zip(gradients, torch.autograd.grad(expected, list(truth.values())), strict=True):
        assert (ours - true).norm() <= SHARDED_GRADIENT_RELATIVE * true.norm()
