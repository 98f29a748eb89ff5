"""All settings of the public functions as a table, the combinations that are not allowed, and random batches of a row.

A row has one value of every factor. `build` makes its batch, and `helpers.array.assert_right` compares the results with
float64. tests/math/test_array.py covers pairs and triples of values, tests/attack.py draws rows at random.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from helpers.device import DEVICE
from helpers.pair_cover import Ban
from tolerance import PLAIN_ORDERS
from torch import Tensor, nn
from torch.nn.functional import linear

from gspo_kernels import KeptSets, Objective
from gspo_kernels.backends.triton.tuning import ARCHITECTURES, SAME_AS
from gspo_kernels.objective import AGGREGATIONS, DIVERGENCES, KL_ESTIMATORS, RATIOS, SURROGATES
from gspo_kernels.reference import mask_of_sets, projection_log_probs
from gspo_kernels.sampler_mismatch import RolloutCorrection
from gspo_kernels.validation import ROUNDING

Tensors = dict[str, Tensor]
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TEMPERATURES: dict[str, Any] = {"1": 1.0, "number": 0.7, "tensor": torch.tensor(0.7)}
WINDOWS = {"narrow": (3e-4, 4e-4), "wide": (0.2, 0.28), "open": (0.9, math.inf)}
SMALL_SCALE = 2.0**-6  # with a large head: gradients of logits underflow in fp16, gradients of operands do not
CEILINGS = {  # outside of the log-ratios of `_log_ratios`
    "dual_clip": {"narrow": 1.0005, "wide": 1.35, "open": 1.9},
    "delta": {"narrow": 1.00045, "wide": 1.32},
}
CEILINGS_OF = {  # field -> the field whose number in CEILINGS it gets
    "dual_clip": {"dual_clip": "dual_clip"},
    "delta": {"delta": "delta"},
    "dual_clip above delta": {"dual_clip": "dual_clip", "delta": "delta"},
    "delta above dual_clip": {"dual_clip": "delta", "delta": "dual_clip"},
}
CORRECTIONS: dict[str, Any] = {
    "truncate": RolloutCorrection("token", "truncate", 0.8, 1.2),
    "mask": RolloutCorrection("sequence", "mask", 0.7, 1.4),
    "two": (RolloutCorrection("geometric", "gate", 0.9, 1.1), RolloutCorrection("token", high=math.inf)),
    "three": (
        RolloutCorrection("token", "gate", 0.6, 1.6),
        RolloutCorrection("sequence", "mask", 0.5, 2.0),
        RolloutCorrection("geometric", "truncate", 0.95, 1.05),
    ),
}
# The first value is the default. A value that is listed several times is drawn more often.
FACTORS: dict[str, Sequence[Any]] = {
    "entry": ("fused", "chained"),
    "dtype": ("fp32", "fp64", "bf16", "fp16"),
    "layout": ("padded", "packed"),
    "strides": ("contiguous", "hidden", "head", "tokens"),
    "mask": ("bool", "integer", "by target"),
    "tokens": ("ragged", "holes", "masked sequences", "none", "empty sequences", "no sequences"),
    "ones": (None, None, "lengths", "batch", "vocabulary", "width", "all"),
    "tiles": ("one", "many", "one", "many", "parts"),  # parts: many tiles in many chunks of rows and slabs of columns
    # half: operands in half precision, as on tensor cores. native: bf16 operands, as on CPUs with bf16 instructions.
    "products": ("wide", "wide", "half", "native"),
    "policy": ("medium", "flat", "peaked", "ties"),
    "head": ("weight", "linear", "lora", "two loras"),
    "bias": (None, "argument", "module"),
    "logit_scale": (1.0, 0.6, -0.8, SMALL_SCALE, -SMALL_SCALE),
    "logit_softcap": (None, 5.0),
    "temperature": ("1", "number", "tensor", "per token"),
    "vocab_size": ("all", "padded"),
    "head_precision": (None, None, "fp32", "bf16x3"),
    "autocast": (None, None, "bf16", "fp16"),
    "frozen": ("nothing", "weight", "hidden", "everything"),
    "advantages": ("per sequence", "column", "per token", "all zero"),
    "old_log_probs": ("given", "given", None),
    "ratio": RATIOS,
    "surrogate": SURROGATES,
    "window": tuple(WINDOWS),
    "ceiling": (None, None, *CEILINGS_OF),
    "aggregation": AGGREGATIONS,
    "kl": (None, "metric", "term"),
    "kl_estimator": ("k3", *(x for x in KL_ESTIMATORS if x != "k3")),
    "kl_aggregation": (None, *AGGREGATIONS),
    "kl_ratio_factor": (False, True),
    "kl_log_probs": (False, True),
    "entropy": (False, True),
    "entropy_coef": (0.0, 0.02, -0.02),
    "token_weights": (None, "column", "per token"),
    "rollout_correction": (None, *CORRECTIONS),
    "weights_of_surrogates": ("default", "other"),
    "normalizer": (None, "number", "tensor"),
    "kl_normalizer": (None, "number", "tensor"),
    "gradient_budget": (0.0, 1e-3, 0.3),
    "cache_mib": (0, "some rows", "all rows"),
    "kept_sets": (None, "offsets", "empty is all", "padded", "single"),
    "extra_ids": (0, 1, 3),
    "top_k": (0, 1, 3, "all"),
    "compile": (*[False] * 9, True),
    "backend": ("torch",),
    "architecture": (None,),  # whose block shapes the kernels use
}
# With interpreted kernels
OF_TRITON: dict[str, Sequence[Any]] = {
    "backend": ("triton",),
    "compile": (False,),
    "products": ("wide",),
    "top_k": (0,),
    "architecture": (None, *(x for x in ARCHITECTURES if x not in SAME_AS and DEVICE.type == "cpu")),
}
# For vocabularies and sequences that are sharded over ranks. `helpers.sharded_runs` reads these values.
OF_RANKS: dict[str, Sequence[Any]] = {
    "backend": ("torch", "torch", "torch", "triton"),
    "vocab_size": ("all", "padded", "empty rank"),
    "tp": (1, 2, 4),
    "cp": (1, 2, 4),
    "reduce_hidden": ("all", "none"),
    "owner": ("contiguous", "zigzag", "random", "empty rank"),  # of tokens
}
TRIPLES_OF = ("gradient_budget", "cache_mib", "kept_sets", "head", "logit_softcap", "temperature")
# Parameters of public functions and fields of `Objective` that have another name than their factor.
PARAMETERS: dict[str, tuple[str, ...]] = {
    "entry": ("hidden", "target_ids", "log_probs"),
    "layout": ("cu_seqlens",),
    "head": ("lm_head",),
    "ceiling": ("dual_clip", "delta"),
    "window": ("clip_low", "clip_high"),
    "aggregation": ("length_norm",),
    "kl": ("ref_log_probs", "kl_coef"),
    "rollout_correction": ("rollout_log_probs", "objective"),
    "top_k": ("k",),
    "weights_of_surrogates": (
        *(f"sapo_temperature_{side}" for side in ("pos", "neg")),
        *(f"vespo_{name}_{side}" for name in ("k", "lambda") for side in ("pos", "neg")),
    ),
}  # fmt: skip  # a table
SHARDED = ("tp_group", "cp_group", "reduce_hidden")  # factors of OF_RANKS

BANS = [
    Ban(("ratio", "surrogate"), lambda r, s: s == "gmpo" and r != "sequence", "a geometric mean over the sequence",
        "ratio must be 'sequence' with surrogate='gmpo'"),
    Ban(("ratio", "surrogate"), lambda r, s: s in DIVERGENCES and r != "token", "DPPO compares tokens",
        "ratio must be 'token' with surrogate='dppo"),
    Ban(("ratio", "surrogate"), lambda r, s: s == "vespo" and r != "sequence-product", "VESPO's weight is of a product",
        "ratio must be 'sequence-product' with surrogate='vespo'"),
    Ban(("ratio", "surrogate"), lambda r, s: r == "sequence-product" and s in ("clip", "none", "sapo"), "no gradient",
        "surrogate must be with ratio='sequence-product', one of"),
    Ban(("surrogate", "rollout_correction"), lambda s, c: s == "vespo" and c is not None,
        "VESPO's ratio is to the sampler", "rollout_correction must be None with surrogate='vespo'"),
    Ban(("surrogate", "ceiling"), lambda s, c: c == "dual_clip" and s not in ("clip", *DIVERGENCES), "no such bound",
        "dual_clip must be None with surrogate="),
    Ban(("surrogate", "ceiling"), lambda s, c: "delta" in CEILINGS_OF.get(c, ()) and s != "clip", "no such bound",
        "(dual_clip|delta) must be None with surrogate="),
    Ban(("window", "ceiling"), lambda w, c: "delta" in CEILINGS_OF.get(c, ()) and w == "open",
        "no number exceeds 1 + clip_high", "delta must be a number > 1 . clip_high"),
    Ban(("ratio", "kl_ratio_factor"), lambda r, f: f and r == "sequence-product", "the product has no gradient",
        "kl_ratio_factor must be False with ratio='sequence-product'"),
    Ban(("kl_estimator", "kl_ratio_factor"), lambda k, f: f and k == "unbiased", "it has a ratio factor",
        "kl_ratio_factor must be False with kl_estimator='unbiased'"),
    Ban(("kl_log_probs", "kl_ratio_factor"), lambda x, f: x and f, "which ratio is unclear",
        "kl_log_probs must be None"),
    Ban(("kl_log_probs", "kl_estimator"), lambda x, k: x and k == "unbiased", "which ratio is unclear",
        "kl_log_probs must be None"),
    Ban(("kl_log_probs", "kl"), lambda x, kl: x and kl is None, "no term to replace", "kl_log_probs must be None"),
    Ban(("entry", "kl_log_probs"), lambda e, x: e == "fused" and x, "it computes one kind of log-probs",
        "unexpected keyword argument 'kl_log_probs'"),
    Ban(("entry", "extra_ids"), lambda e, k: e == "fused" and k > 0, "a loss has no terms at other ids",
        "unexpected keyword argument 'extra_ids'"),
    Ban(("kept_sets", "extra_ids"), lambda s, k: s is not None and k > 0, "extra ids are over the vocabulary",
        "extra_ids must be None with kept_sets"),
    Ban(("kl", "kl_normalizer"), lambda kl, x: kl != "term" and x is not None, "nothing to divide",
        "kl_normalizer must be None"),
    Ban(("old_log_probs", "rollout_correction"), lambda o, c: o is None and c is not None, "nothing to compare",
        "old_log_probs must be given"),
    Ban(("layout", "advantages"), lambda x, a: x == "packed" and a == "column", "a column is of a padded batch",
        "advantages must be"),
    Ban(("layout", "token_weights"), lambda x, w: x == "packed" and w == "column", "a column is of a padded batch",
        "token_weights must be"),
    Ban(("entropy_coef", "gradient_budget"), lambda c, b: c != 0 and b > 0, "the mass does not bound its gradient",
        "gradient_budget must be 0"),
    Ban(("head", "bias"), lambda h, b: h == "weight" and b == "module", "a weight has no bias"),
    Ban(("policy", "logit_scale"), lambda p, s: p == "peaked" and s < 0, "the targets would be the least likely ids"),
    Ban(("dtype", "policy"), lambda d, p: d == "fp64" and p == "peaked", "formulas in float64 lose digits of 1 - p"),
    Ban(("dtype", "policy"), lambda d, p: d == "fp16" and p == "peaked", "gradients of 1e-9 underflow"),
    Ban(("autocast", "policy"), lambda a, p: a == "fp16" and p == "peaked", "gradients of 1e-9 underflow"),
    Ban(("ones", "extra_ids"), lambda o, k: o in ("vocabulary", "all") and k > 0, "gradients are 0 up to rounding"),
    Ban(("ones", "policy"), lambda o, p: o is not None and p == "peaked", "no log-prob is larger than its rounding"),
    Ban(("policy", "kept_sets"), lambda p, s: p == "flat" and s == "single", "all log-probs are 0 with any policy"),
    Ban(("backend", "compile"), lambda b, c: b == "triton" and c, "operators hide the backend from the compiler"),
]  # fmt: skip  # a table
BANS_OF_RANKS = [
    Ban(("tp", "cp"), lambda tp, cp: tp * cp > 4, "at most four processes"),
    Ban(("cp", "rollout_correction"), lambda cp, c: cp > 1 and c is not None, "its levels need whole sequences",
        "rollout_correction must be None with a cp_group"),
    Ban(("tp", "cp", "compile"), lambda tp, cp, c: c and tp * cp > 2, "compilation takes seconds on each rank"),
    Ban(("layout", "owner"), lambda x, o: x == "padded" and o == "random", "a rank has columns of a padded batch"),
]  # fmt: skip  # a table


def row_of(settings: str) -> dict[str, Any]:
    """Parse "dtype=fp16 cache_mib=all_rows": the values that are not defaults, with _ for spaces."""
    factors = FACTORS | OF_RANKS | {"architecture": OF_TRITON["architecture"]}
    row = {name: values[0] for name, values in factors.items()}
    for setting in settings.split():
        name, _, text = setting.partition("=")
        values = {str(value).replace(" ", "_"): value for value in (*factors[name], *("torch", "triton"))}
        row[name] = values[text]
    return row


def text_of(row: Mapping[str, Any]) -> str:
    default = FACTORS | OF_RANKS
    changed = {name: value for name, value in row.items() if value != default[name][0]}
    return " ".join(f"{name}={str(value).replace(' ', '_')}" for name, value in changed.items())


@contextmanager
def repeatable(row: Mapping[str, Any], seed: int) -> Iterator[None]:
    """Add the command that repeats a row to its error."""
    try:
        yield
    except Exception as error:
        repeat = f"python -m tests.attack --seed {seed} --row '{text_of(row)}'"
        raise AssertionError(f"to repeat: {repeat}\n{type(error).__name__}: {error}") from error


@dataclass
class Case:
    """A batch of a row. Tensors are padded, [B, T, ...]; `arguments` lays them out."""

    row: dict[str, Any]
    tokens: dict[str, Any]  # per token or per sequence, and `inside` [B, T] bool, False at padding
    leaves: dict[str, Tensor]  # of the head: weight, bias, and A and B of adapters
    objective: Objective
    normalizers: dict[str, Any]
    vocab: int  # columns that are not padding
    scaling: tuple[float, ...]  # of the adapters

    @property
    def mask(self) -> Tensor:
        return self.tokens["mask"]

    def take(self, sequences: list[int], tokens: int | None = None) -> Case:
        """Return some of the sequences as a batch, or their first `tokens` tokens."""
        shape = self.mask.shape

        def cut(x: Any) -> Any:
            if isinstance(x, KeptSets):
                return x.select(torch.arange(self.mask.numel()).view(shape)[sequences, :tokens].reshape(-1))
            return x[sequences, :tokens] if x.shape[:2] == shape else x[sequences]

        return replace(self, tokens={name: cut(x) for name, x in self.tokens.items()})

    def lay_out(self, name: str) -> Any:
        """Return a tensor in the row's layout, None if the row has none."""
        x, inside = self.tokens.get(name), self.tokens["inside"]
        packed = self.row["layout"] == "packed" and x is not None
        if isinstance(x, KeptSets):
            return x.select(inside) if packed else x
        x = x[inside] if packed and x.shape[:2] == inside.shape else x
        return restrided(x) if x is not None and self.row["strides"] == "tokens" else x


def restrided(x: Tensor) -> Tensor:
    """Return the same values with other numbers between them in memory."""
    return torch.stack([x, ~x if x.dtype == torch.bool else 9 - x], -1)[..., 0]


def build(row: Mapping[str, Any], seed: int) -> Case:
    """Make a random batch. Its old log-probs put sequences, or tokens, below, inside and above the clip window."""
    row, rng = dict(row), torch.Generator().manual_seed(seed)
    dtype = DTYPES[row["dtype"]]

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float64)

    def rand(*shape: int) -> Tensor:
        return torch.rand(shape, generator=rng, dtype=torch.float64)

    ones = row["ones"]
    order = torch.randperm(7, generator=rng)
    lengths = torch.tensor([11, 1, 5, 0 if row["tokens"] == "masked sequences" else 7, 3, 9, 2])[order]
    lengths *= 6 if row["tiles"] == "parts" else 1
    sequences, longest = 7, int(lengths.max())
    if ones in ("lengths", "all"):
        lengths, longest = torch.ones_like(lengths), 1
    inside = torch.arange(longest) < lengths[:, None]
    mask = inside.clone()
    if row["tokens"] != "ragged":
        mask &= rand(*mask.shape) > 0.25
    if row["tokens"] == "masked sequences":
        mask[lengths.argmax()] = False
    if row["tokens"] in ("none", "empty sequences", "no sequences"):
        mask[:] = False
    vocab, width = {"one": (41, 17), "many": (149, 33), "parts": (331, 72)}[row["tiles"]]
    vocab = 1 if ones in ("vocabulary", "all") else vocab
    width = 1 if ones in ("width", "all") else width
    tp = row.get("tp", 1)
    vocab += -vocab % tp if row["vocab_size"] == "all" else 0  # all ranks have as many rows of the head
    columns = {"all": vocab, "padded": vocab + 5, "empty rank": -(-vocab // max(tp - 1, 1)) * tp}[row["vocab_size"]]
    padding = columns + -columns % tp - vocab
    wide = torch.float32 if row["head_precision"] and dtype.itemsize == 2 else dtype  # of the head

    # The head, and hidden states that give the policy.
    weight = randn(vocab + padding, width) * ({"flat": 0.05}.get(row["policy"], 3.0) / width**0.5)
    hidden = randn(sequences, longest, width)
    ids = torch.randint(0, vocab, mask.shape, generator=rng)
    ends = torch.tensor([0, 28, 29, 63, 64, 127, 128, vocab - 1]).clamp(max=vocab - 1)  # of tiles of both backends
    ids[:, ::2] = torch.where(ids[:, ::2] % 2 == 0, ends[ids[:, ::2] // 2 % len(ends)], ids[:, ::2])
    if row["policy"] == "ties":
        weight[1:vocab:2] = weight[0 : vocab - 1 : 2]
    sure = (rand(*mask.shape) < 0.7) & (row["policy"] == "peaked")
    likely = min(7, vocab - 1)
    if row["policy"] == "peaked":  # most targets have a probability of 1 - 1e-9 without scale, soft-cap and adapters
        weight[:, 0] = 0
        weight[likely, 0] = 5.0 if row["temperature"] in ("1", "per token") else 3.5  # a temperature of 0.7
        ids[sure] = likely
        hidden[sure] = 0.01 * hidden[sure]
        hidden[..., 0] = torch.where(sure, 5.0, hidden[..., 0])
    weight[vocab:] = 100
    lift = 1 / SMALL_SCALE if abs(row["logit_scale"]) == SMALL_SCALE else 1.0
    weight *= lift
    leaves = {"weight": weight.to(wide)}
    if row["bias"]:
        leaves["bias"] = (lift * randn(vocab + padding)).to(wide)
    adapters = {"lora": 1, "two loras": 2}.get(row["head"], 0)
    for i in range(adapters):
        leaves[f"A{i}"] = (randn(3 + i, width) / width**0.5).to(wide)
        leaves[f"B{i}"] = (lift / 2 * randn(vocab + padding, 3 + i)).to(wide)
    if row["strides"] == "head":
        leaves = {name: x.t().contiguous().t() if x.ndim == 2 else restrided(x) for name, x in leaves.items()}
    hidden[~mask] = math.nan

    tokens: dict[str, Any] = {"inside": inside, "mask": mask, "hidden": hidden.to(dtype), "target_ids": ids}
    if row["temperature"] == "per token":
        temperature = torch.where(sure, 1.0, 0.5 + rand(*mask.shape))
        tokens["temperature"] = torch.where(mask, temperature, math.nan).float()
    if row["kept_sets"]:
        tokens["kept_sets"] = _sets(row["kept_sets"], ids, mask, vocab, rng)
    if row["extra_ids"]:
        extra = torch.randint(-3, vocab, (*mask.shape, row["extra_ids"]), generator=rng)
        extra[:, ::3, 0] = ids[:, ::3]  # the target may be among them, and an id may occur twice
        extra[:, ::2, -1] = extra[:, ::2, 0]
        tokens["extra_ids"] = torch.where(mask[..., None], extra, 10**9)
        tokens["extra_factors"] = torch.where(mask[..., None], randn(*extra.shape) / mask.numel(), 0)
    garbage = torch.tensor([-100, vocab + padding + 7, -(2**40)])[torch.randint(3, mask.shape, generator=rng)]
    tokens["target_ids"] = torch.where(mask, ids, -100 if row["mask"] == "by target" else garbage)

    sign = torch.tensor([1.0, -1, 1, -1, 1, -1, 0], dtype=torch.float64)[torch.randperm(7, generator=rng)]
    advantages = sign * (0.5 + rand(sequences)) * (row["advantages"] != "all zero")
    if row["advantages"] == "per token":
        flip = torch.where(rand(*mask.shape) < 0.3, -1.0, 1.0) * (rand(*mask.shape) > 0.1)
        advantages = torch.where(mask, advantages[:, None] * flip * (0.5 + rand(*mask.shape)), math.nan)
    tokens["advantages"] = (advantages[:, None] if row["advantages"] == "column" else advantages).float()
    if row["token_weights"] == "column":
        tokens["token_weights"] = rand(sequences, 1).float()
    if row["token_weights"] == "per token":
        weights = (0.5 + rand(*mask.shape)) * (rand(*mask.shape) > 0.2)
        tokens["token_weights"] = torch.where(mask, weights, math.nan).float()

    case = Case(row, tokens, leaves, _objective(row), {}, vocab, tuple(2.0 / (3 + i) for i in range(adapters)))
    number = {"number": float, "tensor": torch.tensor}
    for name, divisor in (("normalizer", 17.0), ("kl_normalizer", 31.0)):
        if row[name]:
            without_tokens = row[name] == "tensor" and not mask.any()  # a number of tokens or of sequences may be 0
            case.normalizers[name] = number[row[name]](0.0 if without_tokens else divisor)
    lp = log_probs_of(case)

    def log_probs(x: Tensor) -> Tensor:
        junk = torch.tensor([math.nan, -math.inf, 1e30], dtype=x.dtype)[torch.randint(3, mask.shape, generator=rng)]
        x = torch.where(mask, x.clamp(max=ROUNDING), junk)
        return x if dtype == torch.float64 else x.float()

    old = lp - _log_ratios(case, lp, lengths, randn, rand)
    if row["old_log_probs"]:
        tokens["old_log_probs"] = log_probs(old)
    if row["rollout_correction"]:
        tokens["rollout_log_probs"] = log_probs(old - 0.2 * randn(*mask.shape))
    if row["kl"]:
        of_term = log_probs_of(case, full=True) if row["kl_log_probs"] else lp
        tokens["ref_log_probs"] = log_probs(of_term + 0.3 * randn(*mask.shape))
    if row["tokens"] == "empty sequences":
        return case.take(list(range(7)), tokens=0)
    if row["tokens"] == "no sequences":
        return case.take([])
    return case.take([3]) if ones in ("batch", "all") else case


def _objective(row: Mapping[str, Any]) -> Objective:
    low, high = WINDOWS[row["window"]]
    changes: dict[str, Any] = {}
    for name, number in CEILINGS_OF.get(row["ceiling"], {}).items():
        changes[name] = CEILINGS[number].get(row["window"], 9.0)
    if row["weights_of_surrogates"] == "other":
        changes |= {"sapo_temperature_pos": 2.0, "sapo_temperature_neg": 0.7, "vespo_k_pos": 0.0}
        changes |= {"vespo_lambda_pos": 0.5, "vespo_k_neg": 1.0, "vespo_lambda_neg": 0.5}
    names = ("ratio", "surrogate", "aggregation", "kl_estimator", "kl_aggregation", "kl_ratio_factor", "entropy_coef")
    return Objective(
        **{name: row[name] for name in names},
        clip_low=1.0 if row["surrogate"] == "cispo" and row["window"] == "open" else low,
        clip_high=high,
        length_norm=13,
        kl_coef=0.1 if row["kl"] == "term" else 0.0,
        rollout_correction=CORRECTIONS.get(row["rollout_correction"]),
        **changes,
    )


def divergence(surrogate: str, lp: Tensor, log_ratio: Tensor) -> Tensor:
    """Compute DPPO's divergence between the old and the new probability of the sampled token."""
    p, q = lp.clamp(max=0).exp(), (lp - log_ratio).clamp(max=0).exp()
    if surrogate == "dppo_kl":
        return torch.xlogy(q, q / p) + torch.xlogy(1 - q, (1 - q) / (1 - p))
    return (p - q).abs()


def _log_ratios(case: Case, lp: Tensor, lengths: Tensor, randn: Any, rand: Any) -> Tensor:
    """Return token log-ratios [B, T], on both sides of the bounds of the window."""
    o, mask = case.objective, case.mask
    if o.surrogate in DIVERGENCES:  # about half of the divergences are between the two bounds
        u = randn(64, *mask.shape) * 10 ** (0.2 - 4 * rand(64, *mask.shape))
        d = divergence(o.surrogate, lp, u)
        margin = (o.clip_high - o.clip_low) / 5
        fits = (d > o.clip_low + margin) & (d < o.clip_high - margin)
        chosen = u.gather(0, fits.double().argmax(0)[None])[0]
        return torch.where(fits.any(0) & (rand(*mask.shape) < 0.5), chosen, 1.5 * randn(*mask.shape))
    low = -math.log1p(-min(o.clip_low, 0.9))
    high = math.log1p(min(o.clip_high, 0.5))
    by_token = o.ratio == "token" or o.surrogate == "gmpo"
    shape = mask.shape if by_token else (len(mask), 1)
    sides = torch.tensor([-2.0, -1.08, -0.85, 0.1, 0.85, 1.08, 2.0], dtype=torch.float64)
    order = (7 * rand(*shape)).long() if by_token else rand(*shape).argsort(0)
    side = sides[order] + 0.02 * (rand(*shape) - 0.5)
    u = torch.where(side < 0, low, high) * side
    if by_token:
        return u
    noise = torch.where(mask, 0.02 * randn(*mask.shape), 0)
    noise = noise - noise.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    if o.ratio == "sequence-product":
        u = torch.where(side < 0.5, -0.1, 0.1) / max(mask.shape[1] / 11, 1)
        u[lengths.argmax()] *= 21 if o.surrogate == "vespo" else 3  # beyond its bounds
    return u + noise


def _random_sets(target_ids: Tensor, mask: Tensor, vocab: int, empty: str, rng: torch.Generator) -> KeptSets:
    """Return random sets in random order. A quarter has one id, masked tokens have bad ids, and some sets are empty."""
    share = torch.rand(mask.shape, generator=rng)[..., None]
    kept = torch.rand(*mask.shape, vocab, generator=rng) < torch.where(share < 0.25, 0, share * min(41 / vocab, 1))
    kept |= (target_ids[..., None] == torch.arange(vocab)) & mask[..., None]
    if empty == "vocabulary":
        kept &= torch.rand(mask.shape, generator=rng)[..., None] < 0.8
    sets = KeptSets.from_mask(kept, empty=empty)
    token = torch.repeat_interleave(torch.arange(mask.numel()), sets.sizes)
    order = (token + torch.rand(len(token), generator=rng)).argsort()
    ids = torch.where(mask.reshape(-1)[token], sets.ids[order], -7)
    return sets._replace(ids=ids.int())


def _sets(kind: str, ids: Tensor, mask: Tensor, vocab: int, rng: torch.Generator) -> KeptSets:
    if kind == "single":
        return KeptSets(torch.where(mask, ids, 0).reshape(-1), torch.arange(mask.numel() + 1))
    sets = _random_sets(ids, mask, vocab, "vocabulary" if kind == "empty is all" else "error", rng)
    if kind != "padded":
        return sets
    fill = torch.full((*mask.shape, vocab), -1)
    place = torch.arange(len(sets.ids)) - sets.offsets[:-1].repeat_interleave(sets.sizes)
    fill.view(-1, vocab)[torch.arange(mask.numel()).repeat_interleave(sets.sizes), place] = sets.ids.long()
    return KeptSets.from_padded(fill.masked_fill(~mask[..., None], -1), fill=-1)


def make(settings: str = "", seed: int = 0) -> Case:
    """Make the batch of `row_of(settings)`."""
    return build(row_of(settings), seed)


def module_of(case: Case, leaves: Mapping[str, Tensor]) -> Any:
    """Return the head: its weight, or a module whose parameters are the leaves."""
    if case.row["head"] == "weight":
        return leaves["weight"]
    rows, width = leaves["weight"].shape
    linear = nn.Linear(1, 1, bias=case.row["bias"] == "module")
    linear.in_features, linear.out_features, linear.weight = width, rows, leaves["weight"]  # pyright: ignore
    if case.row["bias"] == "module":
        linear.bias = leaves["bias"]  # pyright: ignore[reportAttributeAccessIssue]
    if case.row["head"] == "linear":
        return linear
    import peft

    model = nn.ModuleDict({"lm_head": linear})
    trained = {name: x.requires_grad for name, x in leaves.items()}
    for i, scaling in enumerate(case.scaling):
        config = peft.LoraConfig(r=3 + i, lora_alpha=round(scaling * (3 + i)), target_modules=["lm_head"])
        peft.inject_adapter_in_model(config, model, adapter_name=f"adapter{i}")
    head: Any = model["lm_head"]
    head.set_adapter([f"adapter{i}" for i in range(len(case.scaling))])
    for i in range(len(case.scaling)):
        head.lora_A[f"adapter{i}"].weight = leaves[f"A{i}"]
        head.lora_B[f"adapter{i}"].weight = leaves[f"B{i}"]
    for name, x in leaves.items():  # PEFT freezes the base
        x.requires_grad_(trained[name])
    return head


# -- the head by formulas, over the n unmasked tokens


def rounded(case: Case, x: Tensor, original: Tensor) -> Tensor:
    """Round an operand as autocast does, without rounding its gradient."""
    if not case.row["autocast"] or case.row["head_precision"] or original.dtype == torch.float64:
        return x
    return x + (original.to(DTYPES[case.row["autocast"]]).to(x.dtype) - x).detach()


def logits_of(case: Case, projection: Tensor) -> dict[str, Any]:
    """Return the arguments of `projection_log_probs` for the unmasked tokens."""
    row, dtype = case.row, projection.dtype
    temperature = TEMPERATURES.get(row["temperature"])
    if temperature is None:
        temperature = case.tokens["temperature"][case.mask].to(dtype)
    options = {"logit_scale": row["logit_scale"], "logit_softcap": row["logit_softcap"], "vocab_size": case.vocab}
    return {"projection": projection, "temperature": temperature, **options}


def project(case: Case, leaves: Tensors, order: int = 0) -> Tensor:
    """Compute h W^T + bias with the adapters' terms, [n, V]. `order` permutes the terms of each logit.

    From the fifth order on, it also moves each logit as other sums would (`moved`).
    """
    original = case.tokens["hidden"][case.mask]
    h = leaves["hidden"]
    base, weight = rounded(case, h, original), rounded(case, leaves["weight"], case.leaves["weight"])
    terms = torch.arange(h.shape[1])
    if order:
        terms = torch.randperm(h.shape[1], generator=torch.Generator().manual_seed(order))
    bias = rounded(case, leaves["bias"], case.leaves["bias"]) if "bias" in leaves else None
    out = linear(base[:, terms], weight[:, terms], bias)
    for i, scaling in enumerate(case.scaling):
        out = out + scaling * linear(linear(h[:, terms], leaves[f"A{i}"][:, terms]), leaves[f"B{i}"])
    return moved(out, order)


def moved(x: Tensor, order: int) -> Tensor:
    """Move numbers by up to four units in the last place, from the fifth order on."""
    if order < PLAIN_ORDERS[torch.float32]:
        return x
    noise = 2 * torch.rand(x.shape, generator=torch.Generator().manual_seed(order)) - 1
    return x * (1 + 4 * torch.finfo(x.dtype).eps * noise)


def leaves_in(case: Case, dtype: torch.dtype) -> Tensors:
    originals = {"hidden": case.tokens["hidden"][case.mask], **case.leaves}
    return {name: x.detach().to(dtype).requires_grad_() for name, x in originals.items()}


def log_probs_of(case: Case, full: bool = False) -> Tensor:
    """Compute log-probs [B, T] in float64, 0 where masked. `full`: over the vocabulary, also with kept sets."""
    ids, kept = case.tokens["target_ids"][case.mask], None if full else kept_of(case)
    projection = project(case, leaves_in(case, torch.float64)).detach()
    lp, _ = projection_log_probs(target_ids=ids, kept=kept, **logits_of(case, projection))
    return torch.zeros(case.mask.shape, dtype=torch.float64).masked_scatter(case.mask, lp)


def kept_of(case: Case) -> Tensor | None:
    sets = case.tokens.get("kept_sets")
    return None if sets is None else mask_of_sets(sets, case.vocab)[case.mask.reshape(-1)]
