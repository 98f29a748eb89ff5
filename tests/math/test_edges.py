"""Edge cases: empty batches, sizes of one, zero gradients, enormous numbers, inf and NaN, and strided inputs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from helpers.device import DEVICE, gspo_fused_loss, linear_log_probs, policy_loss
from helpers.marks import by_dtype, triton_is_slow
from helpers.oracle import DTYPES, OBJECTIVES, assert_equals_oracle
from helpers.samples import Sample, call_fused, make_sample, new_leaves, run_fused, run_policy
from tolerance import RELATIVE_RMS, check
from torch import Tensor

from gspo_kernels import Objective
from gspo_kernels.backends.torch import tiles as torch_tiles
from gspo_kernels.reference import surrogate

pytestmark = pytest.mark.usefixtures("device")

NAN, INF = math.nan, math.inf
by_objective = pytest.mark.parametrize(
    "name", ["gspo", "gspo-token", "grpo", "token-mean", "seq-sum-norm", "everything"]
)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the torch backend tiles of 8 rows and 7 columns."""
    monkeypatch.setattr(torch_tiles, "tile_shape", lambda *_: (8, 7))


# Bitwise equality of tensors, of dicts and of outputs, with NaN equal to NaN.
assert_same = partial(torch.testing.assert_close, rtol=0, atol=0, equal_nan=True)


def assert_all_zero(*tensors: Tensor | None) -> None:
    for x in tensors:
        assert x is not None and (x == 0).all()  # NaN is not 0


# -- batches without tokens


@by_objective
@pytest.mark.parametrize(
    ("shape", "offsets"), [((0, 3), None), ((2, 0), None), ((0, 0), None), ((0,), [0]), ((0,), [0, 0, 0, 0])]
)
def test_a_batch_without_tokens_gives_zero(
    name: str, shape: tuple[int, ...], offsets: list[int] | None, backend: str
) -> None:
    objective = Objective(**OBJECTIVES[name])
    sequences = shape[0] if offsets is None else len(offsets) - 1
    empty, advantages = torch.zeros(shape), torch.ones(sequences)
    options: dict[str, Any] = {
        "old_log_probs": empty,
        "ref_log_probs": empty,
        "token_weights": empty,
        "cu_seqlens": None if offsets is None else torch.tensor(offsets, dtype=torch.int32),
        "objective": objective,
        "backend": backend,
    }
    hidden, weight = torch.ones(*shape, 4, requires_grad=True), torch.ones(5, 4, requires_grad=True)
    out = gspo_fused_loss(hidden, weight, empty.long(), advantages, entropy=True, **options)
    out.loss.backward()
    assert_all_zero(out.loss, hidden.grad, weight.grad)
    assert out.log_probs.shape == shape and out.entropy is not None and out.entropy.shape == shape
    assert out.log_ratio.shape == (shape if objective.ratio == "token" else (sequences,))
    assert all(value.isfinite() for value in out.metrics.values())

    log_probs = torch.zeros(shape, requires_grad=True)
    loss = policy_loss(log_probs, advantages, entropy=empty, **options).loss
    loss.backward()
    assert_all_zero(loss, log_probs.grad)


@by_objective
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("normalizer", [None, torch.zeros(()), torch.tensor(0)])
@triton_is_slow
def test_a_fully_masked_batch_gives_zero(name: str, packed: bool, normalizer: Tensor | None, backend: str) -> None:
    sample = make_sample(2, packed=packed, objective=Objective(**OBJECTIVES[name]), token_weights=True)
    sample = sample.with_options(mask=torch.zeros_like(sample.options["mask"]), normalizer=normalizer)
    sample.leaves["hidden"].data.fill_(NAN)
    out, grads = run_fused(sample, backend, entropy=True)
    assert_all_zero(out.loss, out.log_probs, out.entropy, out.log_ratio, *grads.values())
    assert all(value.isfinite() for value in out.metrics.values())


@pytest.mark.parametrize("budget", [0.0, 0.3])
def test_gradients_of_masked_log_probs_and_entropies_have_exactly_zero_influence(budget: float, backend: str) -> None:
    sample = make_sample(2, vocab=601)
    mask = sample.options["mask"]
    runs = []
    for garbage in (0.0, NAN, INF):
        leaves = [x.detach().requires_grad_() for x in sample.leaves.values()]
        out = linear_log_probs(
            *leaves, sample.target_ids, mask=mask, entropy=budget == 0, gradient_budget=budget, backend=backend
        )
        upstream = torch.where(mask, torch.linspace(-1, 2, mask.numel()).view_as(mask), garbage)
        outputs = [out.log_probs] if out.entropy is None else [out.log_probs, out.entropy]
        torch.autograd.backward(outputs, [upstream] * len(outputs))
        assert_all_zero(leaves[0].grad[~mask])
        runs.append([x.grad for x in leaves])
    assert all(map(torch.equal, runs[0], runs[1])) and all(map(torch.equal, runs[0], runs[2]))


# -- sizes of one, targets at the ends of tiles, huge logits, banned columns


def of_size_one(**options: Any) -> Callable[[torch.dtype], list[Sample]]:
    forms = list(itertools.product((False, True), ("grpo", "everything")))
    return lambda dtype: [
        make_sample(4, dtype=dtype, packed=packed, objective=Objective(**OBJECTIVES[name]), **options)
        for packed, name in forms
    ]


def ends_of_tiles(dtype: torch.dtype) -> list[Sample]:
    """Targets at both ends of the vocabulary and of every tile."""
    samples = []
    for vocab in (35, 36, 38):
        starts = range(0, vocab, 7)
        ends = torch.tensor([*starts, *(min(s + 6, vocab - 1) for s in starts)])
        sample = make_sample(5, dtype=dtype, vocab=vocab, on_policy=True)
        mask = sample.options["mask"]
        targets = sample.target_ids.masked_scatter(mask, ends.repeat(mask.numel()))
        assert {0, vocab - 1} <= set(targets[mask].tolist())
        samples.append(replace(sample, target_ids=targets))
    return samples


def integer_logits_sample(size: float, dtype: torch.dtype, temperature: Any = 1.0) -> Sample:
    """Return a sample whose logits are integers of at most about `size`. All operands are integers."""
    sample = make_sample(8, on_policy=True, dtype=torch.float32, hidden_size=4, objective=Objective(entropy_coef=0.05))
    rng = torch.Generator().manual_seed(8)
    hidden = torch.randint(-2, 3, sample.leaves["hidden"].shape, generator=rng).to(dtype)
    # Half of the columns have similar logits, so that not all distributions are peaked.
    weight = torch.randint(-1, 2, (37, 4), generator=rng).to(dtype)
    weight[::2] *= round(size / 8)
    leaves = {"hidden": hidden, "weight": weight, "bias": torch.zeros(37, dtype=dtype)}
    leaves = {k: v.requires_grad_() for k, v in leaves.items()}
    return replace(sample, leaves=leaves).with_options(temperature=temperature)


def huge_logits(dtype: torch.dtype) -> list[Sample]:
    sizes = (8, 1e2, 8e3 if dtype == torch.float16 else 1e4)  # fp16 represents 8,000 exactly
    return [integer_logits_sample(size, dtype) for size in sizes]


def extreme_temperatures(dtype: torch.dtype) -> list[Sample]:
    numbers = (2.0**-7, 2.0**7)
    temperatures = [*numbers, *(torch.full((12, 12), number) for number in numbers)]
    return [integer_logits_sample(8, dtype, temperature=x) for x in temperatures]


BANNED = [0, 3, *range(14, 21), 25, 40, 48]  # all columns of one tile, and single columns before and after that tile


def banned_columns(dtype: torch.dtype) -> list[Sample]:
    allowed = torch.tensor(sorted(set(range(49)) - set(BANNED)))
    samples = []
    for objective in (Objective(), Objective(entropy_coef=0.02)):
        sample = make_sample(9, dtype=dtype, vocab=49, bias=True, on_policy=True, objective=objective)
        sample.leaves["bias"].data[BANNED] = -INF
        targets = torch.where(sample.options["mask"], allowed[sample.target_ids % len(allowed)], -100)
        samples.append(replace(sample, target_ids=targets))
    return samples


EDGES: dict[str, Callable[[torch.dtype], list[Sample]]] = {
    "length 1": of_size_one(lengths=(1,) * 12),
    "vocabulary 1": of_size_one(vocab=1),
    "width 1": of_size_one(hidden_size=1),
    "batch 1": of_size_one(lengths=(9,)),
    "all 1": of_size_one(lengths=(1, 1), vocab=1, hidden_size=1),
    "ends of tiles": ends_of_tiles,
    "huge logits": huge_logits,
    "extreme temperatures": extreme_temperatures,
    "banned columns": banned_columns,
}


@by_dtype
@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.usefixtures("small_tiles")
def test_an_edge_equals_the_oracle(edge: str, dtype: str, backend: str) -> None:
    for sample in EDGES[edge](DTYPES[dtype]):
        assert_equals_oracle(sample, DTYPES[dtype], backend)
        if edge == "banned columns":
            _, grads = run_fused(sample, backend)
            assert_all_zero(grads["weight"][BANNED], grads["bias"][BANNED])


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


@pytest.mark.parametrize("on_policy", [False, True])
@pytest.mark.parametrize("ratio", ["sequence", "token"])
@pytest.mark.parametrize("bad", [NAN, INF])
@triton_is_slow
def test_a_nan_hidden_state_reaches_only_dependent_outputs(
    on_policy: bool, ratio: str, bad: float, backend: str
) -> None:
    sample = make_sample(11, objective=Objective(ratio=ratio), on_policy=on_policy)
    expected, expected_grads = run_fused(sample, backend, entropy=True)
    mask = sample.options["mask"]
    row, column = 2, int(mask[2].nonzero()[-1])
    assert sample.advantages[row] != 0
    here, in_row = torch.zeros_like(mask), torch.arange(len(mask)) == row
    here[row, column] = True
    hidden = sample.leaves["hidden"].detach().clone()
    hidden[here] = bad
    out, grads = run_fused(replace(sample, leaves={**sample.leaves, "hidden": hidden}), backend, entropy=True)
    assert torch.equal(out.log_probs.isnan(), here) and torch.equal(out.entropy.isnan(), here)
    assert_same(out.log_probs[~here], expected.log_probs[~here])
    assert torch.equal(out.log_ratio.isnan(), here if ratio == "token" else in_row)
    assert out.loss.isnan()
    assert_same(grads["hidden"][~in_row], expected_grads["hidden"][~in_row])
    assert grads["hidden"][here].isnan().all()
    assert grads["weight"].isnan().any()


@by_objective
@pytest.mark.parametrize("upstream", [0.0, NAN, INF, -INF])
@triton_is_slow
def test_a_zero_or_non_finite_upstream_gradient_leaves_rows_without_gradient_at_zero(
    name: str, upstream: float, backend: str
) -> None:
    sample = make_sample(12, bias=True, objective=Objective(**OBJECTIVES[name]))
    _, expected = run_fused(sample, backend)
    has_gradient = (expected["hidden"] != 0).any(-1) & (upstream != 0)
    leaves = new_leaves(sample)
    call_fused(sample, leaves, backend).loss.backward(torch.tensor(upstream))
    assert_all_zero(leaves["hidden"].grad[~has_gradient])
    if upstream == 0:
        assert_all_zero(leaves["weight"].grad, leaves["bias"].grad)
    else:
        assert not leaves["hidden"].grad[has_gradient].isfinite().any()
        assert not leaves["weight"].grad.isfinite().all()


# -- forms of an input, and which operands require a gradient


def restrided(restride: Callable[[Tensor], Tensor]) -> Callable[[Sample], Sample]:
    """Change the memory layout of every tensor [B, T]. Advantages are expanded to this shape."""

    def change(sample: Sample) -> Sample:
        shape = sample.target_ids.shape

        def move(x: Any) -> Any:
            return restride(x.to(DEVICE)) if isinstance(x, Tensor) and x.shape == shape else x

        advantages = move(sample.advantages[:, None].expand(shape))
        options = {name: move(x) for name, x in sample.options.items()}
        assert not options["mask"].is_contiguous()
        return replace(sample, target_ids=move(sample.target_ids), advantages=advantages, options=options)

    return change


def masked_by(dtype: torch.dtype) -> Callable[[Sample], Sample]:
    return lambda sample: sample.with_options(mask=sample.options["mask"].to(dtype))


def ids_of_minus_100(sample: Sample) -> Sample:
    ids = torch.where(sample.options["mask"], sample.target_ids, -100)
    return replace(sample, target_ids=ids).with_options(mask=None)


FORMS: dict[str, Callable[[Sample], Sample]] = {
    "column-major": restrided(lambda x: x.t().contiguous().t()),
    "every second": restrided(lambda x: x.repeat_interleave(2, 1)[:, ::2]),
    "advantages [B, 1]": lambda x: replace(x, advantages=x.advantages[:, None]),
    "advantages [B, T]": lambda x: replace(x, advantages=x.advantages[:, None].expand_as(x.target_ids)),
    "ids of -100": ids_of_minus_100,
    "int64 mask": masked_by(torch.int64),
    "uint8 mask": masked_by(torch.uint8),
    "bf16 mask": masked_by(torch.bfloat16),
}


@pytest.mark.parametrize("form", FORMS)
def test_no_form_of_an_input_changes_a_bit(form: str, backend: str) -> None:
    sample = make_sample(13, objective=Objective(kl_coef=0.1), token_weights=True, temperature="per-token")
    expected = run_fused(sample, backend, entropy=True)
    assert_same(run_fused(FORMS[form](sample), backend, entropy=True), expected)


def test_token_weights_are_per_token_even_if_there_are_as_many_sequences(backend: str) -> None:
    """There are two tokens and two sequences, one of them empty. Advantages are per sequence, weights per token."""
    options: dict[str, Any] = {"cu_seqlens": torch.tensor([0, 0, 2]), "token_weights": torch.tensor([3.0, 0.0])}
    options |= {"objective": Objective(ratio="sequence-token"), "backend": backend}
    _, gradient = run_policy(torch.zeros(2), torch.tensor([5.0, 1.0]), **options)
    assert gradient.tolist() == [-1.5, 0.0]
