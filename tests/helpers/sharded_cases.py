"""Cases of tests/distributed: functions that every rank of a group runs, and that compare with one process.

A case communicates the same number of times on all ranks whether or not its comparisons fail: `Checks` collects failed
comparisons, and the rank reports them at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from helpers.oracle import HEADS, OBJECTIVES, assert_equals_oracle
from helpers.samples import Sample, make_sample, run_fused
from helpers.sharded_runs import Groups, contiguous, run_sharded, shard_rows, size_of, zigzag
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tolerance import SHARDED_GRADIENT_RELATIVE
from torch import Tensor

from gspo_kernels import Objective, linear_log_probs
from gspo_kernels.distillation import linear_top_k


class Case(NamedTuple):
    ranks: int  # ranks 0 to ranks - 1 run it
    run: Callable[[Context], None]


CASES: dict[str, Case] = {}


class Context(NamedTuple):
    """What a rank knows about its place."""

    rank: int
    groups: dict[str, Any]

    def group(self, ranks: int) -> Any:
        """Return the group of ranks 0 to ranks - 1."""
        return self.groups[str(ranks)]

    def square(self) -> Groups:
        """Return the groups of a 2 x 2 mesh: TP over adjacent ranks, CP over the others."""
        return Groups(tp=self.groups[f"row {self.rank // 2}"], cp=self.groups[f"column {self.rank % 2}"])


def case(name: str, ranks: int) -> Callable[[Callable[[Context], None]], Callable[[Context], None]]:
    def add(run: Callable[[Context], None]) -> Callable[[Context], None]:
        assert name not in CASES, name
        CASES[name] = Case(ranks, run)
        return run

    return add


def relative(x: Tensor, truth: Tensor) -> float:
    return ((x - truth).double().norm() / truth.double().norm().clamp(min=1e-30)).item()


def assert_equals_one_process(
    sample: Sample, backend: str, run: Callable[..., Any], own: dict[str, Any] | None = None, **options: Any
) -> None:
    """Assert that loss, metrics and gradients of a float64 sample equal those of one process.

    `own` holds options of this process that replace those of one process.
    """
    (out, grads), (one, one_grads) = (
        run(sample, backend, **options | (own or {})),
        run_fused(sample, backend, **options),
    )
    assert relative(out.loss, one.loss) <= SHARDED_GRADIENT_RELATIVE or (out.loss - one.loss).abs() <= 1e-12
    assert out.metrics.keys() == one.metrics.keys()
    for name, value in one.metrics.items():
        torch.testing.assert_close(out.metrics[name], value, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
    for name in ("log_probs", "log_ratio", "entropy"):
        ours, theirs = getattr(out, name), getattr(one, name)
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert relative(ours, theirs) <= SHARDED_GRADIENT_RELATIVE or ours.abs().max() <= 1e-9, name
    for name, grad in one_grads.items():
        assert relative(grads[name], grad) <= SHARDED_GRADIENT_RELATIVE, f"d_{name}"


def assert_within_tolerance(context: Context, sample: Sample, backend: str, run: Callable[..., Any]) -> None:
    """Assert on rank 0 that an fp32 sample is within the tolerance of the oracle."""
    if context.rank == 0:
        assert_equals_oracle(sample, torch.float32, backend, run)
    else:
        run(sample, backend, entropy=True)


# -- a sharded vocabulary


def _tp(context: Context, ranks: int) -> Callable[..., Any]:
    groups = Groups(tp=context.group(ranks))
    return lambda sample, backend, **options: run_sharded(sample, backend, groups, **options)


for _ranks in (2, 3, 4, 8):
    for _backend in ("torch", "triton"):
        for _head, _options in HEADS.items():
            if _ranks > 2 and _head not in ("plain", "all"):
                continue

            @case(f"tp {_ranks} {_backend} {_head}", _ranks)
            def _tp_head(
                context: Context, ranks: int = _ranks, backend: str = _backend, options: dict[str, Any] = _options
            ) -> None:
                padded = "padded_vocab" in options
                vocab = 37 if padded else 48
                run = _tp(context, ranks)
                assert_equals_one_process(make_sample(5, dtype=torch.float64, vocab=vocab, **options), backend, run)
                assert_within_tolerance(context, make_sample(5, vocab=vocab, **options), backend, run)


for _ranks in (2, 8):
    for _backend in ("torch", "triton"):

        @case(f"tp {_ranks} {_backend} kept sets", _ranks)
        def _tp_kept(context: Context, ranks: int = _ranks, backend: str = _backend) -> None:
            options: dict[str, Any] = dict(kept="vocabulary", objective=Objective(entropy_coef=0.1), **HEADS["all"])
            sample = make_sample(5, dtype=torch.float64, vocab=37, **options)
            assert_equals_one_process(sample, backend, _tp(context, ranks), entropy=True)

        @case(f"tp {_ranks} {_backend} extra ids", _ranks)
        def _tp_extra(context: Context, ranks: int = _ranks, backend: str = _backend) -> None:
            sample = make_sample(5, vocab=48, dtype=torch.float64)
            ids = torch.arange(3).expand(*sample.target_ids.shape, 3) * 11 + sample.target_ids[..., None] % 24
            results = []
            for group in (None, context.group(ranks)):
                hidden = sample.leaves["hidden"].detach().clone().requires_grad_()
                weight = shard_rows(sample.leaves["weight"], group).detach().clone().requires_grad_()
                options = dict(mask=sample.options["mask"], extra_ids=ids, tp_group=group, backend=backend)
                extra = linear_log_probs(hidden, weight, sample.target_ids, **options).extra_log_probs
                assert extra is not None
                d_hidden, d_weight = torch.autograd.grad(extra.square().sum(), (hidden, weight))
                results.append((extra, d_hidden, d_weight))
            own = shard_rows(results[0][2], context.group(ranks))
            for ours, one in zip(results[1], (*results[0][:2], own), strict=True):
                assert relative(ours, one) <= SHARDED_GRADIENT_RELATIVE

    @case(f"tp {_ranks} top k", _ranks)
    def _tp_top_k(context: Context, ranks: int = _ranks) -> None:
        sample = make_sample(5, vocab=48, bias=True, dtype=torch.float64)
        weight, bias, results = sample.leaves["weight"].detach(), sample.leaves["bias"].detach(), []
        weight[9] = weight[40]  # equal logits on the first rank and on a later one
        bias[9] = bias[40]
        for group in (None, context.group(ranks)):
            own = [shard_rows(x, group) for x in (weight, bias)]
            options: dict[str, Any] = dict(bias=own[1], mask=sample.options["mask"], tp_group=group)
            # With 8 ranks, the last rank has only padding.
            results.append(linear_top_k(sample.leaves["hidden"], own[0], 20, vocab_size=41, **options))
        assert torch.equal(results[1].ids, results[0].ids)
        torch.testing.assert_close(results[1].log_probs, results[0].log_probs)


# -- sharded sequences


def _cp(context: Context, ranks: int, owner: Callable[..., Tensor], **fixed: Any) -> Callable[..., Any]:
    groups = Groups(cp=context.group(ranks))

    def run(sample: Sample, backend: str, **options: Any) -> Any:
        return run_sharded(sample, backend, groups, owner(sample.target_ids.shape, ranks), **fixed, **options)

    return run


for _packed in (False, True):

    @case(f"cp 2 kept sets, packed {_packed}", 2)
    def _cp_kept(context: Context, packed: bool = _packed) -> None:
        sample = make_sample(3, dtype=torch.float64, kept="error", objective=Objective(kl_coef=0.1))
        assert_equals_one_process(sample, "torch", _cp(context, 2, zigzag, packed=packed), entropy=True)


for _name, _fields in OBJECTIVES.items():
    for _backend in ("torch", "triton"):
        if _backend == "triton" and _name not in ("gspo", "everything"):
            continue

        @case(f"cp 2 {_backend} {_name}", 2)
        def _cp_objective(context: Context, backend: str = _backend, fields: dict[str, Any] = _fields) -> None:
            objective = Objective(**fields)
            kinds: tuple[dict[str, Any], ...] = ({}, {"per_token_advantages": True, "token_weights": True})
            for more in kinds:
                sample = make_sample(3, dtype=torch.float64, objective=objective, **more)
                assert_equals_one_process(sample, backend, _cp(context, 2, zigzag, packed=bool(more)), entropy=True)
            sample = make_sample(11, objective=objective)
            assert_within_tolerance(context, sample, backend, _cp(context, 2, contiguous))


for _ranks in (3, 4, 8):
    for _layout in (contiguous, zigzag):

        @case(f"cp {_ranks} {_layout.__name__}", _ranks)
        def _cp_layout(context: Context, ranks: int = _ranks, layout: Any = _layout) -> None:
            for packed in (False, True):
                sample = make_sample(4, dtype=torch.float64, objective=Objective(kl_coef=0.1, ratio="sequence-token"))
                assert_equals_one_process(sample, "torch", _cp(context, ranks, layout, packed=packed))


@case("tp x cp", 4)
def _tp_cp(context: Context) -> None:
    def run(sample: Sample, backend: str, **options: Any) -> Any:
        return run_sharded(sample, backend, context.square(), zigzag(sample.target_ids.shape, 2), **options)

    for backend in ("torch", "triton"):
        for head in ("plain", "all"):
            options = HEADS[head]
            vocab = 37 if "padded_vocab" in options else 48
            sample = make_sample(6, dtype=torch.float64, vocab=vocab, **options)
            assert_equals_one_process(sample, backend, run)
            assert_within_tolerance(context, make_sample(6, vocab=vocab, **options), backend, run)


# -- drawn shardings


def _examples() -> list[dict[str, Any]]:
    """Return examples drawn by Hypothesis, the same on every rank."""
    examples: list[dict[str, Any]] = []
    batches = st.fixed_dictionaries(
        {
            "mesh": st.sampled_from(["tp", "cp", "square"]),
            "lengths": st.lists(st.integers(1, 12), min_size=1, max_size=7),
            "rows_per_rank": st.integers(3, 20),
            "padding": st.floats(0, 0.7),  # share of the vocabulary
            "objective": st.sampled_from(list(OBJECTIVES)),
            "head": st.sampled_from([name for name in HEADS if "padded_vocab" not in HEADS[name]]),
            "per_token": st.booleans(),
            "entropy": st.booleans(),
            "seed": st.integers(0, 2**16),
        }
    )

    @settings(max_examples=20, derandomize=True, database=None, phases=[Phase.generate], deadline=None)
    @given(example=batches)
    def draw(example: dict[str, Any]) -> None:
        examples.append(example)

    draw()
    return examples


@case("drawn shardings", 4)
def _drawn(context: Context) -> None:
    for x in _examples():
        groups = {
            "tp": Groups(tp=context.group(4)),
            "cp": Groups(cp=context.group(4)),
            "square": context.square(),
        }[x["mesh"]]
        columns = x["rows_per_rank"] * size_of(groups.tp) + 12 * (groups.tp is None)
        vocab = max(int(columns * (1 - x["padding"])), 2)
        sample = make_sample(
            x["seed"],
            dtype=torch.float64,
            lengths=tuple(x["lengths"]),
            vocab=vocab,
            padded_vocab=columns - vocab,
            objective=Objective(**OBJECTIVES[x["objective"]]),
            per_token_advantages=x["per_token"],
            token_weights=x["per_token"],
            **HEADS[x["head"]],
        )
        shape = sample.target_ids.shape
        owner = torch.randint(size_of(groups.cp), shape, generator=torch.Generator().manual_seed(x["seed"]))

        def run(sample: Sample, backend: str, groups: Groups = groups, owner: Tensor = owner, **options: Any) -> Any:
            options |= {} if groups.cp is None else {"packed": True}
            return run_sharded(sample, backend, groups, owner, **options)

        try:
            assert_equals_one_process(sample, "torch", run, entropy=x["entropy"])
        except AssertionError as error:
            raise AssertionError(f"{x}: {error}") from error
