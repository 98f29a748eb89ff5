"""Bad inputs raise a ValueError or TypeError that names the argument, what was expected and what came.

`KINDS` lists bad inputs. Each bad input is passed to every public function that takes the changed arguments. Neither
failed nor successful calls write to the caller's tensors.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
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
LONGEST_MESSAGE = 320  # characters


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


MISSING = object()


@dataclass(frozen=True)
class Kind:
    """A bad input and the error that it must raise.

    `change` replaces good arguments. The value MISSING removes an argument.
    """

    change: dict[str, Any]
    error: type[Exception]
    name: str
    expected: str
    got: str
    packed: bool = False
    functions: tuple[str, ...] = ()  # empty: all functions that have the arguments in `change`
    autocast: bool = False

    def inputs(self, function: Callable[..., Any]) -> dict[str, Any]:
        inputs = {**good_inputs(self.packed), **self.change}
        return accepted(function, {k: v for k, v in inputs.items() if v is not MISSING})

    def applies_to(self, function: Callable[..., Any]) -> bool:
        if self.functions:
            return function.__name__ in self.functions
        return set(self.change) <= set(inspect.signature(function).parameters)


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


def sharded_away(module: nn.Linear) -> nn.Linear:
    module.weight = nn.Parameter(torch.ones(0))
    return module


META = torch.device("meta")
FUSED, POLICY, WITH_HEAD = ("gspo_fused_loss",), ("policy_loss",), ("gspo_fused_loss", "linear_log_probs")
T_, V_ = TypeError, ValueError

KINDS: dict[str, Kind] = {
    # -- hidden states
    "hidden-list": Kind({"hidden": [[1.0]]}, T_, "hidden", "tensor [B, T, H] or [N, H]", "list"),
    "hidden-none": Kind({"hidden": None}, T_, "hidden", "tensor", "None"),
    "hidden-1d": Kind({"hidden": torch.ones(H)}, V_, "hidden", "[B, T, H] or [N, H]", "[4]"),
    "hidden-integers": Kind({"hidden": torch.ones(B, T, H, dtype=torch.int64)}, T_, "hidden", "float32", "int64"),
    "hidden-no-width": Kind({"hidden": torch.ones(B, T, 0)}, V_, "", "", "[2, 3, 0]"),
    "hidden-width": Kind({"hidden": torch.ones(B, T, H + 1)}, V_, "lm_head", "H = 5", "[7, 4]"),
    # -- target ids
    "ids-shape": Kind({"target_ids": ids()[:, :2]}, V_, "target_ids", "[2, 3] like hidden", "[2, 2]"),
    "ids-int32": Kind({"target_ids": ids().int()}, T_, "target_ids", "int64", "int32"),
    "ids-device": Kind({"target_ids": ids().to(META)}, V_, "target_ids", "on cpu", "meta"),
    "ids-too-large": Kind({"target_ids": ids(V, V + 3)}, V_, "target_ids", "between 0 and 6", "[7, 10]"),
    "ids-negative": Kind({"target_ids": ids(-1)}, V_, "target_ids", "between 0 and 6", "[-1]"),
    "ids-in-padded-vocabulary": Kind(
        {"target_ids": ids(5), "vocab_size": 5}, V_, "target_ids", "between 0 and 4", "[5]"
    ),
    # -- mask
    "mask-shape": Kind({"mask": torch.ones(B, 1)}, V_, "mask", "[2, 3]", "[2, 1]"),
    "mask-dtype": Kind({"mask": torch.ones(B, T, dtype=torch.complex64)}, T_, "mask", "bool", "complex64"),
    "mask-device": Kind({"mask": torch.ones(B, T, device=META)}, V_, "mask", "on cpu", "meta"),
    "mask-two": Kind({"mask": tokens(2, torch.int64)}, V_, "mask", "0 or 1", "2"),
    # -- head
    "head-none": Kind({"lm_head": None}, T_, "lm_head", "[V, H] with H = 4", "None"),
    "head-list-under-autocast": Kind(
        {"lm_head": [[0.0] * H] * V}, T_, "lm_head", "[V, H] with H = 4", "list", autocast=True
    ),
    "head-transposed": Kind({"lm_head": torch.ones(H, V)}, V_, "lm_head", "[V, H] with H = 4", "[4, 7]"),
    "head-1d": Kind({"lm_head": torch.ones(H)}, V_, "lm_head", "[V, H] with H = 4", "[4]"),
    "head-integers": Kind({"lm_head": torch.ones(V, H, dtype=torch.int8)}, T_, "lm_head", "float32", "int8"),
    "head-device": Kind({"lm_head": torch.ones(V, H, device=META)}, V_, "lm_head", "on cpu", "meta"),
    "head-mixed-dtypes": Kind(
        {"lm_head": torch.ones(V, H, dtype=torch.bfloat16)}, T_, "lm_head", "float32", "bfloat16"
    ),
    "head-float32-body-half": Kind(
        {"hidden": torch.ones(B, T, H, dtype=torch.float16)}, T_, "lm_head", "pass hidden.float()", "float32"
    ),
    "head-float64-under-autocast": Kind(
        {"lm_head": torch.ones(V, H, dtype=torch.float64)}, T_, "lm_head", "dtype", "float64", autocast=True
    ),
    "head-sharded-away": Kind({"lm_head": torch.ones(0)}, V_, "lm_head", "unsharded weight", "empty tensor [0]"),
    "head-module-sharded-away": Kind(
        {"lm_head": linear(sharded_away)},
        V_,
        "lm_head",
        "unsharded weight",
        "empty tensor [0]",
    ),
    "head-module-sharded-away-with-hooks": Kind(  # ZeRO-3 puts hooks on every module
        {"lm_head": linear(lambda m: sharded_away(m).register_forward_pre_hook(lambda *_: None))},
        V_,
        "lm_head",
        "unsharded weight",
        "empty tensor [0]",
    ),
    "head-embedding": Kind({"lm_head": nn.Embedding(V, H)}, T_, "lm_head", "nn.Linear", "Embedding"),
    "head-subclass-with-another-forward": Kind(
        {"lm_head": DoublingLinear(H, V)}, T_, "lm_head", "nn.Linear", "DoublingLinear"
    ),
    "head-with-replaced-forward": Kind({"lm_head": linear(replace_forward)}, T_, "lm_head", "nn.Linear", "forward"),
    "head-with-forward-hook": Kind({"lm_head": linear(add_hook)}, T_, "lm_head", "nn.Linear", "hook"),
    "head-with-pre-hook": Kind(
        {"lm_head": linear(lambda m: m.register_forward_pre_hook(lambda *_: None))}, T_, "lm_head", "nn.Linear", "hook"
    ),
    "head-with-backward-hook": Kind(
        {"lm_head": linear(lambda m: m.register_full_backward_hook(lambda *_: None))},
        T_,
        "lm_head",
        "nn.Linear",
        "hook",
    ),
    # -- bias
    "bias-shape": Kind({"bias": torch.ones(H)}, V_, "bias", "[V] = [7]", "[4]"),
    "bias-dtype": Kind({"bias": torch.ones(V, dtype=torch.float64)}, T_, "bias", "float32", "float64"),
    "bias-device": Kind({"bias": torch.ones(V, device=META)}, V_, "bias", "on cpu", "meta"),
    "bias-twice": Kind({"lm_head": linear(bias=True), "bias": torch.ones(V)}, V_, "bias", "lm_head has a bias", "[7]"),
    # -- options of the head
    "scale-zero": Kind({"logit_scale": 0.0}, V_, "logit_scale", "other than 0", "0.0"),
    "scale-nan": Kind({"logit_scale": NAN}, V_, "logit_scale", "finite", "nan"),
    "scale-inf": Kind({"logit_scale": INF}, V_, "logit_scale", "finite", "inf"),
    "scale-beyond-float32": Kind({"logit_scale": 1e300}, V_, "logit_scale", "finite", "1e+300"),
    "scale-huge-int": Kind({"logit_scale": 10**400}, V_, "logit_scale", "finite", "type int"),
    "scale-text": Kind({"logit_scale": "1"}, T_, "logit_scale", "number", "'1'"),
    "scale-large-tensor": Kind({"logit_scale": torch.ones(60, 60)}, T_, "logit_scale", "number", "ensor"),
    "softcap-zero": Kind({"logit_softcap": 0}, V_, "logit_softcap", "> 0", "0"),
    "softcap-subnormal": Kind({"logit_softcap": 1e-45}, V_, "logit_softcap", "within float32", "e-45"),
    "vocabulary-zero": Kind({"vocab_size": 0}, V_, "vocab_size", "between 1 and the 7 rows", "0"),
    "vocabulary-too-large": Kind({"vocab_size": V + 1}, V_, "vocab_size", "between 1 and the 7 rows", "8"),
    "vocabulary-float": Kind({"vocab_size": 7.0}, T_, "vocab_size", "int", "7.0"),
    "vocabulary-bool": Kind({"vocab_size": True}, T_, "vocab_size", "int", "True"),
    "temperature-zero": Kind({"temperature": 0}, V_, "temperature", "> 0", "0"),
    "temperature-text": Kind({"temperature": "1.0"}, T_, "temperature", "number", "'1.0'"),
    "temperature-per-sequence": Kind({"temperature": torch.ones(B)}, V_, "temperature", "[2, 3]", "[2]"),
    "temperature-integers": Kind({"temperature": torch.tensor(1)}, T_, "temperature", "float32", "int64"),
    "temperature-trained": Kind(
        {"temperature": torch.ones((), requires_grad=True)}, V_, "temperature", "without gradient", "requires_grad=True"
    ),
    "temperature-device": Kind({"temperature": torch.ones((), device=META)}, V_, "temperature", "on cpu", "meta"),
    "temperature-tensor-zero": Kind({"temperature": torch.zeros(())}, V_, "temperature", "> 0 where mask is true", "0"),
    "entropy-none": Kind({"entropy": None}, T_, "entropy", "True or False", "None", functions=WITH_HEAD),
    # -- advantages
    "advantages-integers": Kind({"advantages": torch.ones(B, dtype=torch.int64)}, T_, "advantages", "float32", "int64"),
    "advantages-shape": Kind({"advantages": torch.ones(T)}, V_, "advantages", "[B] = [2]", "[3]"),
    "advantages-packed-shape": Kind(
        {"advantages": torch.ones(S + 1)}, V_, "advantages", "[S] = [2] or [N] = [5]", "[3]", packed=True
    ),
    "advantages-device": Kind({"advantages": torch.ones(B, device=META)}, V_, "advantages", "on cpu", "meta"),
    "advantages-nan": Kind(
        {"advantages": torch.tensor([NAN, 1])}, V_, "advantages", "finite where mask is true", "nan"
    ),
    # -- sequences
    "offsets-decreasing": Kind(
        {"cu_seqlens": torch.tensor([0, 4, 2, N])}, V_, "cu_seqlens", "non-decreasing", "[0, 4, 2, 5]", packed=True
    ),
    "offsets-not-from-zero": Kind(
        {"cu_seqlens": torch.tensor([1, 2, N])}, V_, "cu_seqlens", "starting at 0", "[1, 2, 5]", packed=True
    ),
    "offsets-too-short": Kind(
        {"cu_seqlens": torch.tensor([0, 2, N - 1])}, V_, "cu_seqlens", "ending at N = 5", "[0, 2, 4]", packed=True
    ),
    "offsets-too-long": Kind(
        {"cu_seqlens": torch.tensor([0, 2, N + 1])}, V_, "cu_seqlens", "ending at N = 5", "[0, 2, 6]", packed=True
    ),
    "offsets-of-no-sequence": Kind(
        {"cu_seqlens": torch.tensor([0])}, V_, "cu_seqlens", "ending at N = 5", "a tensor [1]", packed=True
    ),
    "offsets-empty": Kind(
        {"cu_seqlens": torch.tensor([], dtype=torch.int32)}, V_, "cu_seqlens", "[S + 1]", "a tensor [0]", packed=True
    ),
    "offsets-floats": Kind(
        {"cu_seqlens": torch.tensor([0.0, 2, N])}, T_, "cu_seqlens", "int32 or int64", "float32", packed=True
    ),
    "offsets-2d": Kind({"cu_seqlens": torch.tensor([[0, 2, N]])}, V_, "cu_seqlens", "[S + 1]", "[1, 3]", packed=True),
    "offsets-device": Kind(
        {"cu_seqlens": torch.zeros(3, dtype=torch.int32, device=META)}, V_, "cu_seqlens", "on cpu", "meta", packed=True
    ),
    "offsets-missing": Kind(
        {"cu_seqlens": MISSING}, V_, "cu_seqlens", "packed input", "None", packed=True, functions=FUSED
    ),
    "offsets-missing-for-log-probs": Kind(
        {"cu_seqlens": MISSING}, V_, "log_probs", "[N] with cu_seqlens", "[5]", packed=True, functions=POLICY
    ),
    "offsets-for-padded": Kind(
        {"cu_seqlens": torch.tensor([0, T, 2 * T])},
        V_,
        "cu_seqlens",
        "None for padded input",
        "tensor",
        functions=FUSED,
    ),
    "offsets-for-padded-log-probs": Kind(
        {"cu_seqlens": torch.tensor([0, T, 2 * T])}, V_, "log_probs", "[N] with cu_seqlens", "[2, 3]", functions=POLICY
    ),
    "offsets-for-one-padded-row": Kind(
        {"hidden": torch.ones(1, N, H), "target_ids": ids(1)[:1, :1].repeat(1, N), "mask": None},
        V_,
        "cu_seqlens",
        "pass hidden[0], target_ids[0]",
        "[1, 5, H]",
        packed=True,
        functions=FUSED,
    ),
    "offsets-for-one-padded-row-of-log-probs": Kind(
        {"log_probs": -torch.ones(1, N)}, V_, "log_probs", "pass log_probs[0]", "[1, 5]", packed=True, functions=POLICY
    ),
    # -- log-probs
    "log-probs-half": Kind({"log_probs": tokens(-1, torch.float16)}, T_, "log_probs", "linear_log_probs", "float16"),
    "log-probs-list": Kind({"log_probs": [[0.0]]}, T_, "log_probs", "tensor [B, T]", "list"),
    "log-probs-3d": Kind({"log_probs": torch.ones(B, T, V)}, V_, "log_probs", "[B, T]", "[2, 3, 7]"),
    "old-bfloat16": Kind(
        {"old_log_probs": tokens(-1, torch.bfloat16)}, T_, "old_log_probs", "float32 or float64", "bfloat16"
    ),
    "old-shape": Kind({"old_log_probs": torch.ones(B, T + 1)}, V_, "old_log_probs", "[2, 3], one per token", "[2, 4]"),
    "old-device": Kind({"old_log_probs": torch.ones(B, T, device=META)}, V_, "old_log_probs", "on cpu", "meta"),
    "ref-bfloat16": Kind({"ref_log_probs": tokens(-1, torch.bfloat16)}, T_, "ref_log_probs", "float32", "bfloat16"),
    "ref-missing": Kind({"objective": Objective(kl_coef=0.1)}, V_, "ref_log_probs", "objective.kl_coef > 0", "None"),
    "rollout-missing": Kind(
        {"objective": CORRECTED, "old_log_probs": tokens(-1)}, V_, "rollout_log_probs", "given", "None"
    ),
    "rollout-without-old": Kind(
        {"objective": CORRECTED, "rollout_log_probs": tokens(-1), "old_log_probs": None},
        V_,
        "old_log_probs",
        "given",
        "None",
    ),
    "rollout-nan": Kind(
        {"objective": CORRECTED, "old_log_probs": tokens(-1), "rollout_log_probs": tokens(NAN)},
        V_,
        "rollout_log_probs",
        "torch.where(rollout_log_probs.isnan(), old_log_probs, rollout_log_probs)",
        "nan",
    ),
    "rollout-unread": Kind(
        {"rollout_log_probs": tokens(-1)}, V_, "rollout_log_probs", "objective.rollout_correction is None", "tensor"
    ),
    "weights-per-sequence": Kind({"token_weights": torch.ones(B)}, V_, "token_weights", "[2, 3] or [B, 1]", "[2]"),
    "weights-packed-shape": Kind({"token_weights": torch.ones(S)}, V_, "token_weights", "[5]", "[2]", packed=True),
    "weights-integers": Kind({"token_weights": ids()}, T_, "token_weights", "float32", "int64"),
    "weights-negative": Kind({"token_weights": tokens(-0.5)}, V_, "token_weights", ">= 0 where mask", "-0.5"),
    "weights-inf": Kind({"token_weights": tokens(INF)}, V_, "token_weights", ">= 0 where mask", "inf"),
    "weights-device": Kind({"token_weights": torch.ones(B, T, device=META)}, V_, "token_weights", "on cpu", "meta"),
    # -- the loss
    "entropy-missing": Kind(
        {"objective": Objective(entropy_coef=0.1)},
        V_,
        "entropy",
        "objective.entropy_coef is not 0",
        "None",
        functions=POLICY,
    ),
    "entropy-bfloat16": Kind(
        {"entropy": tokens(1, torch.bfloat16)}, T_, "entropy", "float32 or float64", "bfloat16", functions=POLICY
    ),
    "entropy-shape": Kind({"entropy": torch.ones(B)}, V_, "entropy", "like log_probs", "[2]", functions=POLICY),
    "objective-dict": Kind({"objective": {"clip_low": 0.1}}, T_, "objective", "Objective", "dict"),
    "normalizer-zero": Kind({"normalizer": 0}, V_, "normalizer", "> 0", "0"),
    "normalizer-nan": Kind({"normalizer": NAN}, V_, "normalizer", "finite", "nan"),
    "normalizer-subnormal": Kind({"normalizer": 1e-50}, V_, "normalizer", "> 0", "1e-50"),
    "normalizer-tensor-zero": Kind({"normalizer": torch.tensor(0.0)}, V_, "normalizer", "> 0", "0.0"),
    "normalizer-tensor-zero-int": Kind({"normalizer": torch.tensor(0)}, V_, "normalizer", "> 0", "0"),
    "normalizer-tensor-inf": Kind({"normalizer": torch.tensor(math.inf)}, V_, "normalizer", "finite", "inf"),
    "normalizer-tensor-zero-fp16": Kind({"normalizer": torch.tensor(0.0).half()}, V_, "normalizer", "> 0", "0.0"),
    "kl-normalizer-tensor-zero": Kind({"kl_normalizer": torch.tensor(0)}, V_, "kl_normalizer", "> 0", "0"),
    "normalizer-1d": Kind({"normalizer": torch.ones(1)}, V_, "normalizer", "no dimension", "[1]"),
    "normalizer-bool-tensor": Kind({"normalizer": torch.tensor(True)}, T_, "normalizer", "float32", "bool"),
    "normalizer-device": Kind({"normalizer": torch.ones((), device=META)}, V_, "normalizer", "on cpu", "meta"),
    "kl-normalizer-without-kl": Kind(
        {"kl_normalizer": 2.0}, V_, "kl_normalizer", "None, because objective.kl_coef is 0", "2.0"
    ),
    "old-log-probs-positive": Kind({"old_log_probs": tokens(0.3)}, V_, "old_log_probs", "<= 0 where mask", "0.3"),
    "ref-log-probs-positive": Kind({"ref_log_probs": tokens(2.0)}, V_, "ref_log_probs", "<= 0 where mask", "2.0"),
    "log-probs-positive": Kind({"log_probs": tokens(0.3)}, V_, "log_probs", "<= 0 where mask", "0.3"),
    "rollout-log-probs-positive": Kind(
        {"rollout_log_probs": tokens(1.5), "objective": CORRECTED}, V_, "rollout_log_probs", "<= 0 where mask", "1.5"
    ),
    "entropy-negative": Kind({"entropy": tokens(-0.3)}, V_, "entropy", ">= 0 where mask", "-0.3", functions=POLICY),
    "budget": Kind({"gradient_budget": 1.0}, V_, "gradient_budget", "below 1", "1.0"),
    "budget-negative": Kind({"gradient_budget": -1e-3}, V_, "gradient_budget", "0 (exact)", "-0.001"),
    "budget-bonus": Kind(
        {"gradient_budget": 1e-3, "objective": Objective(entropy_coef=0.1)},
        V_,
        "gradient_budget",
        "0 with an entropy bonus",
        "0.001",
    ),
    "backend-unknown": Kind({"backend": "cuda"}, V_, "backend", "'auto', 'torch', 'triton'", "'cuda'"),
}


def cases() -> list[Any]:
    """Return every kind with every function that it applies to."""
    parameters = []
    for kind_id, kind in KINDS.items():
        for name, function in FUNCTIONS.items():
            if kind.applies_to(function):
                parameters.append(pytest.param(kind, function, id=f"{kind_id}-{name}"))
    return parameters


def fingerprint(*inputs: Any) -> list[Any]:
    """Return the bytes of all tensors and arrays in `inputs`, and the version counters of the tensors."""
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
            values.append(copy.deepcopy(x.tolist() if isinstance(x, np.ndarray) else repr(x)))
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


@pytest.mark.parametrize(("kind", "function"), cases())
def test_a_bad_input_is_named_and_nothing_is_written(kind: Kind, function: Callable[..., Any]) -> None:
    inputs = kind.inputs(function)
    before = fingerprint(inputs)
    context = torch.autocast("cpu", torch.bfloat16) if kind.autocast else contextlib.nullcontext()
    with context:
        assert_rejected(kind.error, function.__name__, kind.name, kind.expected, kind.got, partial(function, **inputs))
    assert fingerprint(inputs) == before


OBJECTIVES: dict[str, tuple[dict[str, Any], type[Exception], str, str, str]] = {
    "ratio": ({"ratio": "sentence"}, V_, "ratio", "'sequence', 'sequence-token', 'token'", "'sentence'"),
    "surrogate": ({"surrogate": "clamp"}, V_, "surrogate", "'clip'", "'clamp'"),
    "aggregation": ({"aggregation": "mean"}, V_, "aggregation", "'token-mean'", "'mean'"),
    "kl-estimator": ({"kl_estimator": "k4"}, V_, "kl_estimator", "'k1', 'k2', 'k3'", "'k4'"),
    "kl-aggregation": ({"kl_aggregation": "sum"}, V_, "kl_aggregation", "'token-mean'", "'sum'"),
    "kl-ratio-factor": ({"kl_ratio_factor": 1}, T_, "kl_ratio_factor", "True or False", "1"),
    "clip-low-one": ({"clip_low": 1.0}, V_, "clip_low", "< 1", "1.0"),
    "clip-low-nan": ({"clip_low": NAN}, V_, "clip_low", "< 1", "nan"),
    "clip-low-text": ({"clip_low": "3e-4"}, T_, "clip_low", "number", "'3e-4'"),
    "clip-low-bool": ({"clip_low": False}, T_, "clip_low", "number", "False"),
    "clip-high-negative": ({"clip_high": -1e-9}, V_, "clip_high", ">= 0", "-1e-09"),
    "dual-clip-one": ({"dual_clip": 1.0}, V_, "dual_clip", "> 1", "1.0"),
    "delta-inside-window": ({"clip_high": 0.2, "delta": 1.2}, V_, "delta", "1 + clip_high", "1.2"),
    "kl-coef-negative": ({"kl_coef": -0.1}, V_, "kl_coef", ">= 0", "-0.1"),
    "length-norm-missing": ({"aggregation": "seq-mean-token-sum-norm"}, V_, "length_norm", "number", "None"),
    "length-norm-missing-for-kl": ({"kl_aggregation": "seq-mean-token-sum-norm"}, V_, "length_norm", "number", "None"),
    "rollout-correction": ({"rollout_correction": "tis"}, T_, "rollout_correction", "RolloutCorrection", "'tis'"),
    "no-rollout-correction": ({"rollout_correction": ()}, T_, "rollout_correction", "at least one", "()"),
    "rollout-correction-list": (
        {"rollout_correction": (RolloutCorrection(), None)},
        T_,
        "rollout_correction",
        "a tuple of",
        "None)",
    ),
    "cispo-clip-low": ({"surrogate": "cispo", "clip_low": 1.1}, V_, "clip_low", "<= 1", "1.1"),
    "gmpo-clip-low": ({"surrogate": "gmpo", "clip_low": -0.1}, V_, "clip_low", ">= 0", "-0.1"),
    "gmpo-ratio": ({"surrogate": "gmpo", "ratio": "token"}, V_, "ratio", "'sequence' with surrogate='gmpo'", "'token'"),
    "dppo-clip-low": ({"surrogate": "dppo_tv", "ratio": "token", "clip_low": -0.1}, V_, "clip_low", ">= 0", "-0.1"),
    "dppo-ratio": ({"surrogate": "dppo_kl"}, V_, "ratio", "'token' with surrogate='dppo_kl'", "'sequence'"),
    "dppo-delta": ({"surrogate": "dppo_tv", "ratio": "token", "delta": 3.0}, V_, "delta", "'dppo_tv'", "3.0"),
    "sapo-temperature": ({"sapo_temperature_neg": 0}, V_, "sapo_temperature_neg", ">= 1e-30", "0"),
    "clip-high-beyond-float32": ({"clip_high": 1e39}, V_, "clip_high", "within float32", "1e+39"),
    "clip-high-fraction": ({"clip_high": Fraction(10**400)}, V_, "clip_high", "within float32", "type Fraction"),
    "dual-clip-huge-int": ({"dual_clip": 10**400}, V_, "dual_clip", "> 1", "type int"),
    "sapo-temperature-tiny": ({"sapo_temperature_pos": 1e-31}, V_, "sapo_temperature_pos", "1e-30", "1e-31"),
    "dual-clip-unread": ({"surrogate": "cispo", "dual_clip": 3.0}, V_, "dual_clip", "surrogate='cispo'", "3.0"),
    "delta-unread": ({"surrogate": "none", "delta": 3.0}, V_, "delta", "surrogate='none'", "3.0"),
    "two-ratios": ({"kl_estimator": "unbiased", "kl_ratio_factor": True}, V_, "kl_ratio_factor", "False", "True"),
}


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_a_bad_objective_is_named(kind: str) -> None:
    fields, error, name, expected, got = OBJECTIVES[kind]
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


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "many", "256 MiB"])
def test_a_bad_workspace_limit_is_named(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GSPO_WORKSPACE_MIB", text)
    inputs = accepted(linear_log_probs, good_inputs())
    before = fingerprint(inputs)
    with pytest.raises(ValueError, match="GSPO_WORKSPACE_MIB must be an integer number of MiB from 1 to") as caught:
        linear_log_probs(**inputs, backend="torch")
    assert repr(text) in str(caught.value)
    assert fingerprint(inputs) == before


@pytest.fixture
def device_mesh(tmp_path: Path) -> Iterator[Any]:
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available() or distributed.is_initialized():
        pytest.skip("needs torch.distributed, not yet initialized in this process")
    from torch.distributed.device_mesh import init_device_mesh

    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.mark.parametrize("function", [gspo_fused_loss, linear_log_probs])
@pytest.mark.parametrize("as_module", [False, True])
def test_a_head_that_is_not_sharded_by_vocabulary_is_rejected(
    device_mesh: Any, as_module: bool, function: Callable[..., Any]
) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    weight = distribute_tensor(torch.ones(V, H), device_mesh, [Shard(1)])
    head = weight
    if as_module:
        head = linear(lambda m: setattr(m, "weight", nn.Parameter(weight)))
        head.register_forward_pre_hook(lambda *_: None)  # as FSDP does
    call = partial(function, **accepted(function, {**good_inputs(), "lm_head": head}))
    assert_rejected(TypeError, function.__name__, "lm_head", "Shard(0)", "DTensor", call)


def test_groups_that_are_none_are_named(device_mesh: Any) -> None:
    inputs = accepted(linear_log_probs, good_inputs())
    call = partial(linear_log_probs, **inputs, tp_group="tp")
    assert_rejected(TypeError, "linear_log_probs", "tp_group", "ProcessGroup", "str", call)
    loss = accepted(gspo_fused_loss, good_inputs())
    call = partial(gspo_fused_loss, **loss, cp_group="cp")
    assert_rejected(TypeError, "gspo_fused_loss", "cp_group", "ProcessGroup", "str", call)
    call = partial(linear_log_probs, **inputs, tp_group=device_mesh, reduce_hidden="sum")
    assert_rejected(ValueError, "linear_log_probs", "reduce_hidden", "'all', 'none'", "'sum'", call)


def test_a_group_without_distributed_is_rejected() -> None:
    call = partial(linear_log_probs, **accepted(linear_log_probs, good_inputs()), tp_group=object())
    assert_rejected(ValueError, "linear_log_probs", "tp_group", "not initialized", "object", call)


def test_sharded_hidden_states_are_rejected(device_mesh: Any) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    inputs = good_inputs()
    inputs["hidden"] = distribute_tensor(inputs["hidden"], device_mesh, [Shard(0)])
    call = partial(linear_log_probs, **accepted(linear_log_probs, inputs))
    assert_rejected(TypeError, "linear_log_probs", "hidden", "plain tensor", "DTensor", call)


def peft_head(prepare: Callable[[Any], Any] = lambda head: None, kind: str = "LoraConfig", **config: Any) -> Any:
    """Return a head in PEFT's layer for a configuration of class `kind`, after `prepare` has changed it."""
    peft = pytest.importorskip("peft")
    model = nn.ModuleDict({"lm_head": linear()})
    peft.inject_adapter_in_model(getattr(peft, kind)(target_modules=["lm_head"], **config), model)
    prepare(model["lm_head"])
    return model["lm_head"]


def saved_with_hook(of_the_wrapper: bool) -> Any:
    peft = pytest.importorskip("peft")
    model = nn.ModuleDict({"lm_head": linear(), "body": nn.Linear(H, H)})
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["body"], modules_to_save=["lm_head"]))
    wrapper = model.base_model.model["lm_head"]
    add_hook(wrapper if of_the_wrapper else wrapper.modules_to_save["default"])
    return wrapper


def merge_and_disable(head: Any) -> None:
    head.merge()
    head.enable_adapters(False)


def add_dora(head: Any) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["lm_head"], use_dora=True)
    peft.inject_adapter_in_model(config, nn.ModuleDict({"lm_head": head}), adapter_name="another")
    head.set_adapter(["default", "another"])


def quantize(head: Any) -> None:
    """Make the base layer a Linear whose forward does not multiply by its weight, like bitsandbytes' Linear4bit."""
    head.base_layer.__class__ = DoublingLinear


ADAPTERS: dict[str, tuple[Callable[[], Any], type[Exception], str, str]] = {
    "dora": (lambda: peft_head(use_dora=True), V_, "plain LoRA", "Dora"),
    "dora-beside-plain-lora": (lambda: peft_head(add_dora), V_, "plain LoRA", "Dora"),
    "lora-bias": (lambda: peft_head(lora_bias=True), V_, "no LoRA bias", "LoRA bias"),
    "merged-and-disabled": (lambda: peft_head(merge_and_disable), V_, "unmerged before", "still merged"),
    "ia3": (lambda: peft_head(kind="IA3Config", feedforward_modules=[]), T_, "LoRA", "ia3"),
    "adalora": (lambda: peft_head(kind="AdaLoraConfig", total_step=10), T_, "LoRA", "SVDLinear"),
    "hook-on-the-wrapper": (lambda: peft_head(add_hook), T_, "nn.Linear", "hook"),
    "hook-on-lora-a": (lambda: peft_head(lambda head: add_hook(head.lora_A["default"])), T_, "nn.Linear", "hook"),
    "hook-on-dropout": (
        lambda: peft_head(lambda head: add_hook(head.lora_dropout["default"]), lora_dropout=0.1),
        T_,
        "nn.Linear",
        "hook",
    ),
    "hook-on-modules-to-save": (lambda: saved_with_hook(True), T_, "nn.Linear", "hook"),
    "hook-on-the-saved-module": (lambda: saved_with_hook(False), T_, "nn.Linear", "hook"),
    "base-with-replaced-forward": (
        lambda: peft_head(lambda head: replace_forward(head.base_layer)),
        T_,
        "nn.Linear",
        "forward",
    ),
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


def test_hidden_states_of_the_wrong_width_for_an_adapter_are_named() -> None:
    inputs = {**good_inputs(), "hidden": torch.ones(B, T, H + 1), "lm_head": peft_head()}
    call = partial(linear_log_probs, **accepted(linear_log_probs, inputs))
    assert_rejected(ValueError, "linear_log_probs", "lm_head", "H = 5", "[7, 4]", call)


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


@pytest.mark.parametrize("text", ["yes", "2", "true"])
def test_gspo_check_must_be_zero_or_one(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GSPO_CHECK", text)
    with pytest.raises(ValueError, match=rf"GSPO_CHECK must be 0 or 1, got '{text}'"):
        policy_loss(torch.zeros(1, 2), torch.ones(1))
