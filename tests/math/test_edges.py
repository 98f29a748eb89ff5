"""Edge cases that tests/math/test_array.py does not have: enormous numbers, inf and NaN, banned ids."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from helpers.array import arguments_of, assert_right, leaves_of, of_function, run
from helpers.device import DEVICE, gspo_fused_loss, linear_log_probs, run_policy
from helpers.features import DTYPES, Case, make
from helpers.marks import by_dtype, triton_is_slow
from tolerance import RELATIVE_RMS, check
from torch import Tensor

from gspo_kernels import Objective
from gspo_kernels.objective import KL_ESTIMATORS
from gspo_kernels.reference import kl_to_reference, surrogate

pytestmark = pytest.mark.usefixtures("device")

NAN, INF = math.nan, math.inf


# Bitwise equality of tensors, of dicts and of outputs, with NaN equal to NaN.
assert_same = partial(torch.testing.assert_close, rtol=0, atol=0, equal_nan=True)


def assert_all_zero(*tensors: Tensor | None) -> None:
    for x in tensors:
        assert x is not None and (x == 0).all()  # NaN is not 0


@pytest.mark.parametrize("budget", [0.0, 0.3])
def test_gradients_of_masked_log_probs_and_entropies_have_exactly_zero_influence(budget: float, backend: str) -> None:
    case = make(f"backend={backend} tiles=many gradient_budget={budget} entropy={budget == 0}")
    runs = []
    for garbage in (0.0, NAN, INF):
        leaves = leaves_of(case)
        out = linear_log_probs(**of_function(linear_log_probs, arguments_of(case, leaves)))
        upstream = torch.where(case.mask, torch.linspace(-1, 2, case.mask.numel()).view_as(case.mask), garbage)
        outputs = [x for x in (out.log_probs, out.entropy) if x is not None]
        if out.entropy is not None:
            sums = out.entropy.sum(), out.entropy.sum() + 0 * out.log_probs.sum()
            alone, both = (torch.autograd.grad(x, list(leaves.values()), retain_graph=True) for x in sums)
            assert alone[0].any() and all(map(torch.equal, alone, both))
        gradients = torch.autograd.grad(outputs, list(leaves.values()), [upstream] * len(outputs))
        assert_all_zero(gradients[0][~case.mask])
        runs.append(gradients)
    assert all(map(torch.equal, runs[0], runs[1])) and all(map(torch.equal, runs[0], runs[2]))


# -- huge logits, banned columns


def of_integer_logits(size: float, temperature: float, settings: str) -> Case:
    """Return a batch whose logits are integers of at most about 4 `size`. All operands are integers."""
    case = make(f"old_log_probs=None entropy_coef=0.02 bias=argument temperature=per_token {settings}", 8)
    rng = torch.Generator().manual_seed(8)
    tokens, leaves = dict(case.tokens), dict(case.leaves)
    tokens["hidden"] = torch.randint(-2, 3, tokens["hidden"].shape, generator=rng).to(tokens["hidden"])
    tokens["temperature"] = torch.full_like(tokens["temperature"], temperature)
    # Half of the columns have similar logits, so that not all distributions are peaked.
    leaves["weight"] = torch.randint(-1, 2, leaves["weight"].shape, generator=rng).to(leaves["weight"])
    leaves["weight"][::2] *= round(size / 8)
    leaves["bias"] = torch.zeros_like(leaves["bias"])
    return replace(case, tokens=tokens, leaves=leaves)


@by_dtype
@pytest.mark.parametrize("temperature", [2.0**-7, 1.0, 2.0**7])
@pytest.mark.parametrize("size", [8, 1e2, 8e3])  # fp16 represents 8,000 exactly
def test_huge_logits_and_extreme_temperatures_equal_float64(
    size: float, temperature: float, dtype: str, backend: str
) -> None:
    if temperature >= 1 or size == 8:
        assert_right(of_integer_logits(size, temperature, f"tiles=many dtype={dtype} backend={backend}"))


@by_dtype
@pytest.mark.parametrize("entropy_coef", [0.0, 0.02])
def test_banned_columns_equal_float64(entropy_coef: float, dtype: str, backend: str) -> None:
    """Columns with a logit of -inf: a tile, and single columns before and after that tile."""
    banned = [0, 3, *range(29, 58), 70, 148]
    settings = "tiles=many bias=argument old_log_probs=None entropy=True"
    case = make(f"{settings} entropy_coef={entropy_coef} dtype={dtype} backend={backend}", 9)
    allowed = torch.tensor(sorted(set(range(case.vocab)) - set(banned)))
    ids = case.tokens["target_ids"]
    case.tokens["target_ids"] = torch.where(case.mask, allowed[ids % len(allowed)], ids)
    case.leaves["bias"][banned] = -INF
    assert_right(case)
    gradients = run(case).gradients
    assert_all_zero(gradients["weight"][banned], gradients["bias"][banned])


# -- enormous ratios and logits


@pytest.mark.parametrize("ratio", ["sequence", "sequence-token", "token"])
@pytest.mark.parametrize("ceiling", [{}, {"dual_clip": 3.0}, {"delta": 2.0}])
@pytest.mark.parametrize("advantage", [1.5, -1.5])
@pytest.mark.parametrize("log_ratio", [-200.0, -80.0, 80.0, 200.0])
def test_enormous_ratios_match_float64(
    ratio: str, ceiling: dict[str, Any], advantage: float, log_ratio: float, backend: str
) -> None:
    objective = Objective(ratio=ratio, **ceiling)
    lp = torch.full((1, 4), min(log_ratio, 0.0))
    options: dict[str, Any] = {"old_log_probs": lp - log_ratio, "objective": objective, "backend": backend}
    out, gradient = run_policy(lp, torch.tensor([advantage]), **options)

    def loss_and_gradient(u: Tensor) -> list[Tensor]:
        u.requires_grad_()
        loss = surrogate(u, torch.full_like(u, advantage), objective).mean()
        loss.backward()
        return [loss.detach().float(), u.grad.float()]

    true_loss, true_grad = loss_and_gradient(torch.full((1, 4), log_ratio, dtype=torch.float64))
    # A GPU's exp multiplies by log2(e) first. The product is rounded, and exp makes the error |u| times larger.
    rounded = torch.full((1, 4), log_ratio * (1 + torch.finfo(torch.float32).eps / 2), dtype=torch.float64)
    plain_loss, plain_grad = loss_and_gradient(rounded) if DEVICE.type != "cpu" else (true_loss, true_grad)
    assert not out.loss.isnan() and not gradient.isnan().any()
    check("loss", out.loss, plain_loss, true_loss, torch.float32)
    check("d_log_probs", gradient, plain_grad, true_grad, torch.float32)
    clipped = (advantage > 0) == (log_ratio > 0) or bool(ceiling and log_ratio > 0)
    assert out.metrics["clip_fraction"] == clipped
    if clipped:
        assert_all_zero(gradient)


@pytest.mark.parametrize("ratio", ["sequence", "sequence-token", "token"])
def test_a_token_weight_of_zero_silences_an_infinite_ratio(ratio: str, backend: str) -> None:
    """Off-policy masks (TRL, verl) have weight 0 where ratios are enormous."""
    options: dict[str, Any] = {"objective": Objective(ratio=ratio), "backend": backend}
    options["old_log_probs"] = torch.tensor([[-200.0], [1e-4]]).expand(2, 3)
    options["token_weights"] = torch.tensor([[0.0], [1.0]])
    out, gradient = run_policy(torch.zeros(2, 3), torch.tensor([-1.0, -1.0]), **options)
    assert out.loss.isfinite()
    assert_all_zero(gradient[0])
    assert (gradient[1] != 0).all()


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_a_kl_term_where_log_probs_equal_those_of_the_reference(estimator: str, backend: str) -> None:
    lp, ref = torch.tensor([[-1.0, -2.0, -3.0]]), torch.tensor([[-1.0, -2.5, -3.0]])
    objective = Objective(kl_coef=0.1, kl_estimator=estimator)
    _, gradient = run_policy(lp, torch.zeros(1), ref_log_probs=ref, objective=objective, backend=backend)
    leaf = lp.double().requires_grad_()
    kl = kl_to_reference(leaf, ref.double(), leaf - leaf.detach(), estimator)
    (truth,) = torch.autograd.grad(0.1 * kl.mean(), leaf)
    check("d_log_probs", gradient, truth.float(), truth, torch.float32)


def test_a_banned_target_has_log_prob_minus_infinity_and_a_finite_gradient(backend: str) -> None:
    hidden, weight = torch.ones(1, 4, requires_grad=True), torch.ones(5, 4, requires_grad=True)
    bias = torch.tensor([0.0, -INF, 0.0, -INF, 0.0])
    out = linear_log_probs(hidden, weight, torch.tensor([1]), bias=bias, entropy=True, backend=backend)
    assert out.log_probs.item() == -INF and out.entropy is not None
    check("entropy", out.entropy, torch.tensor([math.log(3)]), torch.tensor([math.log(3)]).double(), torch.float32)
    (out.log_probs + out.entropy).sum().backward()
    assert hidden.grad.isfinite().all() and weight.grad.isfinite().all()
    assert_all_zero(weight.grad[3])


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16", "fp16"])
def test_gradients_of_peaked_rows_keep_their_relative_precision(dtype: str, backend: str) -> None:
    """The gradient of the target's logit is 1 - p. Here it is 1e-12 to 1e-9, although p rounds to 1 in fp32."""
    peaks = torch.arange(24, 32, dtype=torch.float64)
    vocab, rows, upstream = 33, len(peaks), 2.0**30  # a large upstream gradient, because 1e-12 underflows in fp16
    targets = torch.arange(rows) * 4
    row = torch.arange(rows)
    logits = torch.zeros(rows, vocab, dtype=torch.float64)
    logits[row, targets] = peaks
    # Hidden states are unit vectors, so d_weight[target, row] depends on that row only.
    hidden = torch.eye(rows, dtype=DTYPES[dtype])
    weight = logits.t().to(DTYPES[dtype]).requires_grad_()

    def relative(log_probs: Tensor) -> tuple[Tensor, Tensor]:
        (grad,) = torch.autograd.grad(log_probs.sum() * upstream, weight)
        return grad[targets, row].double() / (one_minus_p * upstream), log_probs.detach().double() / log_p

    one_minus_p = 1 / (1 + peaks.exp() / (vocab - 1))
    log_p = torch.log1p(-one_minus_p)
    assert 1e-9 > one_minus_p.min() > 1e-13 and one_minus_p.max() < 2e-9
    ours = relative(linear_log_probs(hidden, weight, targets, backend=backend).log_probs)
    same = relative(torch.log_softmax(hidden @ weight.t(), 1)[row, targets])
    exact = torch.ones(rows, dtype=torch.float64)
    wide = torch.float64 if dtype == "fp64" else torch.float32
    # Plain PyTorch loses 1 - p completely, and in fp16 the upstream gradient overflows. So plain PyTorch's error allows
    # anything, and the limit on the relative RMS error decides.
    check("d_weight / (1 - p)", ours[0], same[0].nan_to_num(0, 0, 0), exact, DTYPES[dtype])
    check("log_probs / truth", ours[1], same[1].nan_to_num(0, 0, 0), exact, wide)


@pytest.mark.parametrize(("vocab", "scale", "std"), [(300, 2.0**-14, 0.25), (5, 2.0**18, 1.0)])
def test_fp16_gradients_of_an_entropy_bonus_fit_whatever_the_logit_scale(
    vocab: int, scale: float, std: float, backend: str
) -> None:
    """Advantages are 0, so that the entropy's gradient alone decides the power of two that lifts d_logits."""
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 9, 16, generator=rng).half()
    weight = (torch.randn(vocab, 16, generator=rng) * std / scale).half()
    targets = torch.randint(0, vocab, (1, 9), generator=rng)
    objective = Objective(entropy_coef=1.0)

    def d_hidden(dtype: torch.dtype, name: str) -> Tensor:
        x = hidden.to(dtype).requires_grad_()
        options: dict[str, Any] = dict(objective=objective, logit_scale=scale, backend=name)
        out = gspo_fused_loss(x, weight.to(dtype), targets, torch.zeros(1), **options)
        return torch.autograd.grad(out.loss, x)[0].double()

    truth = d_hidden(torch.float64, "torch")
    assert (d_hidden(torch.float16, backend) - truth).norm() <= RELATIVE_RMS[torch.float16] * truth.norm()


# -- NaN and inf at unmasked tokens, and in upstream gradients


@pytest.mark.parametrize("old", ["given", "None"])
@pytest.mark.parametrize("ratio", ["sequence", "token"])
@pytest.mark.parametrize("bad", [NAN, INF])
@triton_is_slow
def test_a_nan_hidden_state_reaches_only_dependent_outputs(old: str, ratio: str, bad: float, backend: str) -> None:
    case = make(f"backend={backend} entropy=True ratio={ratio} old_log_probs={old}", 11)
    expected = run(case)
    row = int((case.mask.any(1) & (case.tokens["advantages"] != 0)).nonzero()[0])
    here, in_row = torch.zeros_like(case.mask), torch.arange(len(case.mask)) == row
    here[row, int(case.mask[row].nonzero()[-1])] = True
    case.tokens["hidden"][here] = bad
    ours = run(case)
    assert torch.equal(ours.outputs["log_probs"].isnan(), here) and torch.equal(ours.outputs["entropy"].isnan(), here)
    assert_same(ours.outputs["log_probs"][~here], expected.outputs["log_probs"][~here])
    assert torch.equal(ours.outputs["log_ratio"].isnan(), here if ratio == "token" else in_row)
    assert ours.outputs["loss"].isnan()
    assert_same(ours.gradients["hidden"][~in_row], expected.gradients["hidden"][~in_row])
    assert ours.gradients["hidden"][here].isnan().all()
    assert ours.gradients["weight"].isnan().any()


@pytest.mark.parametrize("settings", ["", "ratio=token", "window=wide kl=term entropy_coef=0.02"])
@pytest.mark.parametrize("upstream", [0.0, NAN, INF, -INF])
@triton_is_slow
def test_a_zero_or_non_finite_upstream_gradient_leaves_rows_without_gradient_at_zero(
    settings: str, upstream: float, backend: str
) -> None:
    case = make(f"backend={backend} bias=argument {settings}", 12)
    has_gradient = (run(case).gradients["hidden"] != 0).any(-1) & (upstream != 0)
    leaves = leaves_of(case)
    gspo_fused_loss(**arguments_of(case, leaves)).loss.backward(torch.tensor(upstream))
    d_hidden, d_weight, d_bias = (x.grad for x in leaves.values())
    assert_all_zero(d_hidden[~has_gradient])
    if upstream == 0:
        assert_all_zero(d_weight, d_bias)
    else:
        assert not d_hidden[has_gradient].isfinite().any()
        assert not d_weight.isfinite().all()


def test_token_weights_are_per_token_even_if_there_are_as_many_sequences(backend: str) -> None:
    """There are two tokens and two sequences, one of them empty. Advantages are per sequence, weights per token."""
    options: dict[str, Any] = {"cu_seqlens": torch.tensor([0, 0, 2]), "token_weights": torch.tensor([3.0, 0.0])}
    options |= {"objective": Objective(ratio="sequence-token"), "backend": backend}
    _, gradient = run_policy(torch.zeros(2), torch.tensor([5.0, 1.0]), **options)
    assert gradient.tolist() == [-1.5, 0.0]
