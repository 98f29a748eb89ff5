"""Bad inputs raise a ValueError or TypeError that names the argument, what was expected and what came.

`KINDS` lists bad inputs. Each bad input is passed to every public function that takes the changed arguments. Neither
failed nor successful calls write to the caller's tensors.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from helpers.marks import slow
from helpers.samples import make_sample
from torch import Tensor, nn

from gspo_kernels import Objective, gspo_fused_loss, linear_log_probs, policy_loss, validation
from gspo_kernels.sampler_mismatch import RolloutCorrection

B, T, H, V = 2, 3, 4, 7  # padded
N, S = 5, 2  # packed
NAN, INF = float("nan"), float("inf")
CORRECTED = Objective(rollout_correction=RolloutCorrection())
FUNCTIONS: dict[str, Callable[..., Any]] = {f.__name__: f for f in (gspo_fused_loss, linear_log_probs, policy_loss)}
LONGEST_MESSAGE = 380  # characters; the longest message lists the fields of Objective


def good_inputs(packed: bool = False) -> dict[str, Any]:
    """Return arguments of the three public functions that pass every check."""
    rng = torch.Generator().manual_seed(0)
    shape, sequences = ((N,), S) if packed else ((B, T), B)
    log_probs = -torch.rand(shape, generator=rng)
    inputs = {
        "hidden": torch.randn(*shape, H, generator=rng),
        "lm_head": torch.randn(V, H, generator=rng),
        "target_ids": torch.randint(0, V, shape, generator=rng),
        "advantages": torch.tensor([1.0, -1.0])[:sequences],
        "mask": torch.ones(shape, dtype=torch.bool),
        "log_probs": log_probs,
        "old_log_probs": log_probs - 1e-4,
    }
    if packed:
        inputs["cu_seqlens"] = torch.tensor([0, 2, N], dtype=torch.int32)
    return inputs


def accepted(function: Callable[..., Any], inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of `inputs` that are arguments of the function."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in inputs.items() if name in names}


def ids(*values: int) -> Tensor:
    """Return target ids [B, T] that end with `values`. All other ids are 1."""
    return torch.tensor([1] * (B * T - len(values)) + list(values)).view(B, T)


def tokens(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((B, T), value, dtype=dtype)


class DoublingLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def linear(prepare: Callable[[Any], Any] = lambda module: None, bias: bool = False) -> nn.Linear:
    module = nn.Linear(H, V, bias=bias)
    prepare(module)
    return module


def replace_forward(module: nn.Linear) -> None:
    module.forward = lambda input: input  # as accelerate's hooks do


def add_hook(module: nn.Module) -> None:
    module.register_forward_hook(lambda *_: None)


def add_pre_hook(module: nn.Module) -> None:
    module.register_forward_pre_hook(lambda *_: None)


def sharded_away(module: nn.Linear) -> nn.Linear:
    module.weight = nn.Parameter(torch.ones(0))
    return module


META = torch.device("meta")
FUSED, POLICY = ("gspo_fused_loss",), ("policy_loss",)
T_, V_ = TypeError, ValueError
MISSING = object()


def kind(
    error: type[Exception],
    expected: str,
    got: str,
    *,
    name: str | None = None,
    packed: bool = False,
    functions: tuple[str, ...] = (),
    autocast: bool = False,
    **change: Any,
) -> list[Any]:
    """Make a case for every one of `functions`, by default for all functions that have the changed arguments.

    Args:
        error: what the bad input must raise. The message names `name`, by default the first changed argument.
        change: arguments that replace those of `good_inputs`. MISSING removes one.
    """
    name = next(iter(change)) if name is None else name
    inputs = {k: v for k, v in {**good_inputs(packed), **change}.items() if v is not MISSING}
    parameters = {f: inspect.signature(f).parameters for f in FUNCTIONS.values()}
    return [
        pytest.param(f, accepted(f, inputs), autocast, error, name, expected, got, id=f"{name}-{got}-{f.__name__}")
        for f in parameters
        if (f.__name__ in functions if functions else change.keys() <= parameters[f].keys())
    ]


TENSORS: dict[str, Any] = {
    "target_ids": ids(), "lm_head": torch.ones(V, H), "bias": torch.ones(V), "temperature": torch.ones(()),
    "advantages": torch.ones(B), "old_log_probs": tokens(-1), "token_weights": tokens(1), "normalizer": torch.ones(()),
}  # fmt: skip  # a table
REAL = ("lm_head", "temperature", "advantages", "token_weights")
BONUS = Objective(entropy_coef=0.1)
KINDS: list[list[Any]] = [
    *(kind(V_, "on cpu", "meta", **{name: x.to(META)}) for name, x in TENSORS.items()),
    *(kind(T_, "float32", "int64", **{name: TENSORS[name].long()}) for name in REAL),
    # -- hidden states
    kind(T_, "tensor [B, T, H] or [N, H]", "list", hidden=[[1.0]]),
    kind(T_, "float32", "int64", hidden=torch.ones(B, T, H, dtype=torch.int64)),
    kind(V_, "", "[2, 3, 0]", name="", hidden=torch.ones(B, T, 0)),
    kind(V_, "H = 5", "[7, 4]", name="lm_head", hidden=torch.ones(B, T, H + 1)),
    # -- target ids and mask
    kind(V_, "[2, 3] like hidden", "[2, 2]", target_ids=ids()[:, :2]),
    kind(T_, "int64", "int32", target_ids=ids().int()),
    kind(V_, "between 0 and 6", "[7, 10]", target_ids=ids(V, V + 3)),
    kind(V_, "between 0 and 4", "[5]", target_ids=ids(5), vocab_size=5),
    kind(V_, "[2, 3]", "[2, 1]", mask=torch.ones(B, 1)),
    kind(V_, "0 or 1", "2", mask=tokens(2, torch.int64)),
    # -- head
    kind(T_, "[V, H] with H = 4", "list", autocast=True, lm_head=[[0.0] * H] * V),
    kind(V_, "[V, H] with H = 4", "[4, 7]", lm_head=torch.ones(H, V)),
    kind(T_, "float32", "bfloat16", lm_head=torch.ones(V, H, dtype=torch.bfloat16)),
    kind(T_, "float32", "bfloat16", name="lm_head", lm_head=torch.ones(V, H).bfloat16(), head_precision="fp32"),
    kind(T_, "head_precision='fp32'", "float32", name="lm_head", hidden=torch.ones(B, T, H, dtype=torch.float16)),
    kind(V_, "one of 'fp32', 'bf16x3'", "'tf32'", head_precision="tf32"),
    kind(T_, "dtype", "float64", autocast=True, lm_head=torch.ones(V, H, dtype=torch.float64)),
    kind(V_, "unsharded weight", "empty tensor [0]", lm_head=torch.ones(0)),
    # ZeRO-3 puts hooks on every module.
    kind(V_, "unsharded weight", "empty tensor [0]", lm_head=linear(lambda m: add_pre_hook(sharded_away(m)))),
    kind(T_, "nn.Linear", "Embedding", lm_head=nn.Embedding(V, H)),
    kind(T_, "nn.Linear", "forward", lm_head=linear(replace_forward)),
    kind(T_, "nn.Linear", "hook", lm_head=linear(add_hook)),
    kind(T_, "nn.Linear", "hook", lm_head=linear(add_pre_hook)),
    kind(T_, "nn.Linear", "hook", lm_head=linear(lambda m: m.register_full_backward_hook(lambda *_: None))),
    # -- bias and options of the head
    kind(V_, "[V] = [7]", "[4]", bias=torch.ones(H)),
    kind(T_, "float32", "float64", bias=torch.ones(V, dtype=torch.float64)),
    kind(V_, "lm_head has a bias", "[7]", name="bias", lm_head=linear(bias=True), bias=torch.ones(V)),
    kind(V_, "other than 0", "0.0", logit_scale=0.0),
    kind(V_, "finite", "type int", logit_scale=10**400),
    kind(V_, "between 1 and the 7 rows", "8", vocab_size=V + 1),
    kind(V_, "> 0", "0", temperature=0),
    kind(V_, "[2, 3]", "[2]", temperature=torch.ones(B)),
    kind(V_, "without gradient", "requires_grad=True", temperature=torch.ones((), requires_grad=True)),
    kind(V_, "> 0 where mask is true", "0", temperature=torch.zeros(())),
    # -- advantages
    kind(V_, "[B] = [2]", "[3]", advantages=torch.ones(T)),
    kind(V_, "[S] = [2] or [N] = [5]", "[3]", packed=True, advantages=torch.ones(S + 1)),
    kind(V_, "finite where mask is true", "nan", advantages=torch.tensor([NAN, 1])),
    # -- sequences
    kind(V_, "non-decreasing", "[0, 4, 2, 5]", packed=True, cu_seqlens=torch.tensor([0, 4, 2, N])),
    kind(V_, "ending at N = 5", "[0, 2, 4]", packed=True, cu_seqlens=torch.tensor([0, 2, N - 1])),
    kind(V_, "ending at N = 5", "a tensor [1]", packed=True, cu_seqlens=torch.tensor([0])),
    kind(T_, "int32 or int64", "float32", packed=True, cu_seqlens=torch.tensor([0.0, 2, N])),
    kind(V_, "on cpu", "meta", packed=True, cu_seqlens=torch.zeros(3, dtype=torch.int32, device=META)),
    kind(V_, "packed input", "None", packed=True, functions=FUSED, cu_seqlens=MISSING),
    kind(V_, "[N] with cu_seqlens", "[5]", name="log_probs", packed=True, functions=POLICY, cu_seqlens=MISSING),
    kind(V_, "None for padded input", "tensor", functions=FUSED, cu_seqlens=torch.tensor([0, T, 2 * T])),
    kind(V_, "[N] with cu_seqlens", "[2, 3]", name="log_probs", functions=POLICY, cu_seqlens=torch.tensor([0, T, 6])),
    kind(
        *(V_, "pass hidden[0], target_ids[0]", "[1, 5, H]"), name="cu_seqlens", packed=True, functions=FUSED,
        hidden=torch.ones(1, N, H), target_ids=ids(1)[:1, :1].repeat(1, N), mask=None,
    ),
    kind(V_, "pass log_probs[0]", "[1, 5]", packed=True, functions=POLICY, log_probs=-torch.ones(1, N)),
    # -- log-probs
    kind(T_, "linear_log_probs", "float16", log_probs=tokens(-1, torch.float16)),
    kind(T_, "tensor [B, T]", "list", log_probs=[[0.0]]),
    kind(T_, "float32 or float64", "bfloat16", old_log_probs=tokens(-1, torch.bfloat16)),
    kind(V_, "objective.kl_coef > 0", "None", name="ref_log_probs", objective=Objective(kl_coef=0.1)),
    kind(V_, "given", "None", name="rollout_log_probs", objective=CORRECTED, old_log_probs=tokens(-1)),
    kind(V_, "given", "None", old_log_probs=None, objective=CORRECTED, rollout_log_probs=tokens(-1)),
    kind(
        *(V_, "torch.where(rollout_log_probs.isnan(), old_log_probs, rollout_log_probs)", "nan"),
        rollout_log_probs=tokens(NAN), objective=CORRECTED, old_log_probs=tokens(-1),
    ),
    kind(V_, "objective.rollout_correction is None", "tensor", rollout_log_probs=tokens(-1)),
    kind(V_, "[2, 3] or [B, 1]", "[2]", token_weights=torch.ones(B)),
    kind(V_, "[5]", "[2]", packed=True, token_weights=torch.ones(S)),
    kind(V_, ">= 0 where mask", "-0.5", token_weights=tokens(-0.5)),
    # -- the loss
    kind(V_, "objective.entropy_coef is not 0", "None", name="entropy", functions=POLICY, objective=BONUS),
    kind(T_, "float32 or float64", "bfloat16", functions=POLICY, entropy=tokens(1, torch.bfloat16)),
    kind(T_, "Objective", "dict", objective={"clip_low": 0.1}),
    kind(V_, "> 0", "0.0", normalizer=torch.tensor(0.0)),
    kind(V_, "None, because objective.kl_coef is 0", "2.0", kl_normalizer=2.0),
    kind(V_, "<= 0 where mask", "0.3", old_log_probs=tokens(0.3)),
    kind(V_, "<= 0 where mask", "0.3", log_probs=tokens(0.3)),
    kind(V_, "<= 0 where mask", "1.5", rollout_log_probs=tokens(1.5), objective=CORRECTED),
    kind(V_, ">= 0 where mask", "-0.3", functions=POLICY, entropy=tokens(-0.3)),
    kind(V_, "below 1", "1.0", gradient_budget=1.0),
    kind(V_, "0 with an entropy bonus", "0.001", gradient_budget=1e-3, objective=BONUS),
    kind(V_, "a number of MiB from 0", "-1", cache_mib=-1),
    kind(T_, "a number of MiB from 0", "'64'", cache_mib="64"),
    kind(V_, "'auto', 'torch', 'triton'", "'cuda'", backend="cuda"),
]  # fmt: skip  # a case a line


def fingerprint(*inputs: Any) -> list[Any]:
    """Return the bytes and version counters of all tensors in `inputs`, and the text of all other values."""
    values: list[Any] = []
    for x in inputs:
        if isinstance(x, dict):
            values += fingerprint(*x.values())
        elif isinstance(x, nn.Module):
            values += fingerprint(*x.parameters(), *x.buffers())
        elif isinstance(x, Tensor):
            data = None if x.device.type == "meta" else x.detach().contiguous().reshape(-1).view(torch.uint8).tolist()
            values.append((x._version, x.requires_grad, data))
        else:
            values.append(repr(x))
    return values


def assert_rejected(
    error: type[Exception], place: str, name: str, expected: str, got: str, call: Callable[[], Any]
) -> None:
    """Assert that `call` raises `error` with the message "<place>: <name> must be <expected>, got <got>".

    `expected` and `got` need only occur in their parts of the message.
    """
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    message = str(caught.value)
    assert caught.type is error, f"{caught.type.__name__} instead of {error.__name__}: {message}"
    pattern = rf"{re.escape(place)}: {re.escape(name) or '.+'} must be (?P<expected>.+), got (?P<got>.+)"
    parts = re.fullmatch(pattern, message)
    assert parts, f"not of the form '<function>: <argument> must be <expected>, got <got>': {message}"
    assert expected in parts["expected"], f"{expected!r} is not in the part before 'got': {message}"
    assert got in parts["got"], f"{got!r} is not in the part after 'got': {message}"
    assert len(message) <= LONGEST_MESSAGE, f"{len(message)} characters: {message}"


@pytest.mark.parametrize("function, inputs, autocast, error, name, expected, got", list(itertools.chain(*KINDS)))
def test_a_bad_input_is_named_and_nothing_is_written(
    function: Callable[..., Any], inputs: dict[str, Any], autocast: bool, error: type[Exception], name: str,
    expected: str, got: str,
) -> None:  # fmt: skip  # lines by subject
    before = fingerprint(inputs)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert_rejected(error, function.__name__, name, expected, got, partial(function, **inputs))
    assert fingerprint(inputs) == before


VESPO: dict[str, Any] = {"surrogate": "vespo", "ratio": "sequence-product"}
OBJECTIVES: list[tuple[type[Exception], str, str, str, dict[str, Any]]] = [
    (V_, "ratio", "'sequence', 'sequence-token', 'token'", "'sentence'", {"ratio": "sentence"}),
    (T_, "kl_ratio_factor", "True or False", "1", {"kl_ratio_factor": 1}),
    (V_, "clip_low", "< 1", "1.0", {"clip_low": 1.0}),
    (V_, "dual_clip", "> 1", "1.0", {"dual_clip": 1.0}),
    (V_, "length_norm", "number", "None", {"aggregation": "seq-mean-token-sum-norm"}),
    (T_, "rollout_correction", "RolloutCorrection", "'tis'", {"rollout_correction": "tis"}),
    (V_, "clip_low", "<= 1", "1.1", {"surrogate": "cispo", "clip_low": 1.1}),
    (V_, "clip_low", ">= 0", "-0.1", {"surrogate": "gmpo", "clip_low": -0.1}),
    (V_, "ratio", "'sequence' with surrogate='gmpo'", "'token'", {"surrogate": "gmpo", "ratio": "token"}),
    (V_, "ratio", "'token' with surrogate='dppo_kl'", "'sequence'", {"surrogate": "dppo_kl"}),
    (V_, "sapo_temperature_neg", ">= 1e-30", "0", {"sapo_temperature_neg": 0}),
    (V_, "ratio", "'sequence-product' with surrogate='vespo'", "'sequence'", {"surrogate": "vespo"}),
    (V_, "vespo_lambda_neg", ">= 1e-4", "1e-05", {"vespo_lambda_neg": 1e-5}),
    (V_, "vespo_k_pos", "exp(80)", "50.0", {**VESPO, "vespo_k_pos": 50, "vespo_lambda_pos": 1}),
    (V_, "rollout_correction", "old_log_probs", "Roll", {**VESPO, "rollout_correction": RolloutCorrection()}),
    (V_, "surrogate", "'vespo', 'topr'", "'clip'", {"ratio": "sequence-product"}),
    (V_, "kl_ratio_factor", "unbiased", "True", {**VESPO, "surrogate": "topr", "kl_ratio_factor": True}),
    (V_, "dual_clip", "surrogate='cispo'", "3.0", {"surrogate": "cispo", "dual_clip": 3.0}),
    (V_, "kl_ratio_factor", "False", "True", {"kl_estimator": "unbiased", "kl_ratio_factor": True}),
]


@pytest.mark.parametrize("error, name, expected, got, fields", OBJECTIVES)
def test_a_bad_objective_is_named(
    error: type[Exception], name: str, expected: str, got: str, fields: dict[str, Any]
) -> None:
    assert_rejected(error, "Objective", name, expected, got, lambda: Objective(**fields))


def test_an_unknown_preset_and_an_unknown_field_are_named() -> None:
    place = "Objective.preset"
    assert_rejected(ValueError, place, "name", "'gspo', 'gspo-token'", "'gpso'", lambda: Objective.preset("gpso"))
    assert_rejected(
        ValueError, place, "field", "'clip_low'", "'cliplow'", lambda: Objective.preset("gspo", cliplow=0.1)
    )
    assert_rejected(ValueError, "Objective", "length_norm", "number", "None", lambda: Objective.preset("dr_grpo"))


@pytest.mark.parametrize("function", [gspo_fused_loss, policy_loss])
def test_a_field_of_the_objective_as_an_argument_is_named(function: Callable[..., Any]) -> None:
    call = partial(function, **accepted(function, good_inputs()), clip_low=1e-3)
    assert_rejected(TypeError, function.__name__, "clip_low", "objective=Objective(clip_low=...)", "0.001", call)
    with pytest.raises(TypeError, match="unexpected keyword argument 'cliplow'"):
        function(**accepted(function, good_inputs()), cliplow=1e-3)


@pytest.mark.parametrize(
    ("variable", "least", "text"),
    [
        ("GSPO_WORKSPACE_MIB", 1, "0"),
        ("GSPO_CACHE_MIB", 0, "many"),
    ],
)
def test_a_bad_memory_limit_is_named(variable: str, least: int, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(ValueError, match=f"{variable} must be an integer number of MiB from {least} to") as caught:
        linear_log_probs(**accepted(linear_log_probs, good_inputs()), backend="torch")
    assert repr(text) in str(caught.value)


def test_a_group_without_distributed_is_rejected() -> None:
    call = partial(linear_log_probs, **accepted(linear_log_probs, good_inputs()), tp_group=object())
    assert_rejected(ValueError, "linear_log_probs", "tp_group", "not initialized", "object", call)


def peft_head(prepare: Callable[[Any], Any] = lambda head: None, kind: str = "LoraConfig", **config: Any) -> Any:
    """Return a head in PEFT's layer for a configuration of class `kind`, after `prepare` has changed it."""
    peft = pytest.importorskip("peft")
    model = nn.ModuleDict({"lm_head": linear()})
    peft.inject_adapter_in_model(getattr(peft, kind)(target_modules=["lm_head"], **config), model)
    prepare(model["lm_head"])
    return model["lm_head"]


def merge_and_disable(head: Any) -> None:
    head.merge()
    head.enable_adapters(False)


def quantize(head: Any) -> None:
    """Make the base layer a Linear whose forward does not multiply by its weight, like bitsandbytes' Linear4bit."""
    head.base_layer.__class__ = DoublingLinear


ADAPTERS: dict[str, tuple[Callable[[], Any], type[Exception], str, str]] = {
    "dora": (lambda: peft_head(use_dora=True), V_, "plain LoRA", "Dora"),
    "lora-bias": (lambda: peft_head(lora_bias=True), V_, "no LoRA bias", "LoRA bias"),
    "merged-and-disabled": (lambda: peft_head(merge_and_disable), V_, "unmerged before", "still merged"),
    "ia3": (lambda: peft_head(kind="IA3Config", feedforward_modules=[]), T_, "LoRA", "ia3"),
    "hook-on-lora-a": (lambda: peft_head(lambda head: add_hook(head.lora_A["default"])), T_, "nn.Linear", "hook"),
    "quantized-base": (lambda: peft_head(quantize), T_, "nn.Linear", "DoublingLinear with a custom forward"),
}


@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_unsupported_adapter_is_named(kind: str) -> None:
    build, error, expected, got = ADAPTERS[kind]
    head = build()
    for function in (gspo_fused_loss, linear_log_probs):
        inputs = accepted(function, {**good_inputs(), "lm_head": head})
        before = fingerprint(inputs)
        assert_rejected(error, function.__name__, "lm_head", expected, got, partial(function, **inputs))
        assert fingerprint(inputs) == before


CALLS: dict[str, dict[str, Any]] = {
    "padded": {"token_weights": True, "bias": True, "temperature": "per-token", "padded_vocab": 3},
    "packed": {"packed": True, "per_token_advantages": True, "logit_softcap": 5.0, "logit_scale": 0.5},
    "bf16": {"dtype": torch.bfloat16, "bias": True},
    "fp64": {"dtype": torch.float64, "temperature": 0.7},
    "on-policy": {"on_policy": True},
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("autocast", [False, slow(True)])
def test_a_successful_call_and_its_backward_write_to_no_input(name: str, autocast: bool, backend: str) -> None:
    objective = Objective(kl_coef=0.1, kl_ratio_factor=True, entropy_coef=0.01)
    sample = make_sample(1, objective=objective, **CALLS[name])
    inputs: dict[str, Any] = {
        "hidden": sample.leaves["hidden"],
        "lm_head": sample.leaves["weight"],
        "bias": sample.leaves.get("bias"),
        "target_ids": sample.target_ids,
        "advantages": sample.advantages,
        "objective": objective,
        "normalizer": torch.tensor(9.0),
        "backend": backend,
        **sample.options,
    }
    before = fingerprint(inputs)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = gspo_fused_loss(**inputs)
        lp = linear_log_probs(**accepted(linear_log_probs, inputs), entropy=True)
        terms = {"log_probs": lp.log_probs, "entropy": lp.entropy}
        terms_before = fingerprint(terms)
        chained = policy_loss(**accepted(policy_loss, inputs), **terms)
        upstream = torch.tensor(0.5, dtype=out.loss.dtype)
        out.loss.backward(upstream)
        chained.loss.backward(upstream)
    assert upstream == 0.5
    assert fingerprint(inputs) == before
    assert fingerprint(terms) == terms_before


def test_rounded_and_masked_log_probs_and_entropies_are_accepted() -> None:
    """In bf16, the difference of a logit and a log-sum-exp near 128 is off by at most ROUNDING."""
    logits = torch.tensor([[120.3, 110.0], [127.7, 127.4], [64.3, 60.0], [127.7, 10.0]], dtype=torch.bfloat16)
    rounded = logits[:, 0] - torch.logsumexp(logits.double(), 1).bfloat16()
    steps = torch.arange(64, 128, 0.05).double()
    assert (steps.bfloat16().double() - steps).abs().max() <= validation.ROUNDING
    log_probs = torch.full((B, T), validation.ROUNDING)
    log_probs[0] = rounded[:T].float()
    log_probs[1, 1] = 1e6
    mask = log_probs < 1e6
    inputs: dict[str, Any] = {
        name: log_probs for name in ("log_probs", "old_log_probs", "ref_log_probs", "rollout_log_probs")
    }
    out = policy_loss(**inputs, entropy=-log_probs, advantages=torch.ones(B), mask=mask, objective=CORRECTED)
    assert out.loss.isfinite() and out.metrics["invalid"] == 0


def test_sparse_and_lazy_heads_are_named() -> None:
    inputs = accepted(linear_log_probs, good_inputs())
    sparse = partial(linear_log_probs, **{**inputs, "lm_head": inputs["lm_head"].to_sparse()})
    assert_rejected(TypeError, "linear_log_probs", "lm_head", "dense", "sparse", sparse)
    lazy = partial(linear_log_probs, **{**inputs, "lm_head": nn.LazyLinear(V)})
    assert_rejected(ValueError, "linear_log_probs", "lm_head", "initialized", "lazy", lazy)


def test_numpy_numbers_are_accepted() -> None:
    numbers: dict[str, Any] = {"clip_low": np.float32(0.25), "clip_high": np.float64(0.25), "kl_coef": np.int64(0)}
    objective = Objective(**numbers)
    assert objective == Objective(clip_low=0.25, clip_high=0.25)
    assert all(type(x) is float for x in (objective.clip_low, objective.clip_high, objective.kl_coef))
    inputs = accepted(gspo_fused_loss, good_inputs())
    plain = gspo_fused_loss(**inputs, normalizer=4, vocab_size=V, temperature=0.5)
    numbers = {"normalizer": np.int64(4), "vocab_size": np.int64(V), "temperature": np.float32(0.5)}
    same = gspo_fused_loss(**inputs, **numbers, objective=Objective())
    assert torch.equal(plain.loss, same.loss)


def test_meta_tensors_pass_through() -> None:
    inputs = {k: v.to("meta") for k, v in accepted(linear_log_probs, good_inputs()).items()}
    assert linear_log_probs(**inputs).log_probs.shape == (B, T)


def test_gspo_check_must_be_zero_or_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GSPO_CHECK", "yes")
    with pytest.raises(ValueError, match="GSPO_CHECK must be 0 or 1, got 'yes'"):
        policy_loss(torch.zeros(1, 2), torch.ones(1))


@pytest.mark.parametrize("function", [gspo_fused_loss, linear_log_probs])
@pytest.mark.parametrize("name", ["hidden", "lm_head", "bias", "target_ids", "mask", "old_log_probs", "temperature"])
def test_tensors_of_inference_mode_are_named(name: str, function: Callable[..., Any]) -> None:
    """Autograd cannot save them. Those that need not be saved are accepted, and so are all without a gradient."""
    inputs = accepted(function, {**good_inputs(), "bias": torch.ones(V), "temperature": tokens(1.5)})
    if name not in inputs:
        return
    with torch.inference_mode():
        inputs[name] = inputs[name].clone()
    with torch.no_grad():
        function(**inputs)
    inputs["lm_head" if name == "hidden" else "hidden"].requires_grad_()
    if name in ("old_log_probs", "temperature"):
        out = function(**inputs)
        (out.loss if function is gspo_fused_loss else out.log_probs.sum()).backward()
    else:
        expected = rf"{function.__name__}: {name} must be a tensor made outside of torch.inference_mode\(\)"
        with pytest.raises(ValueError, match=expected):
            function(**inputs)
