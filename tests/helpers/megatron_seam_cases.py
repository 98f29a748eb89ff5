"""More cases of test_megatron.py: the heads of trainers on Megatron Core, compared with the logits of one process."""

from __future__ import annotations

import importlib.util
import sys
from functools import partial
from importlib.metadata import distribution
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from helpers import megatron_cases
from helpers.megatron_cases import assert_close, case, gradients, of_logits, refused, weighted
from helpers.megatron_models import PADDED, VOCAB, B, S, batch, make
from megatron.core import parallel_state
from tolerance import MODEL_GRADIENT_RELATIVE, SHARDED_GRADIENT_RELATIVE
from torch import Tensor

from gspo_kernels.integrations.trainers import nemo_rl, skyrl, slime

H, ROWS = 16, PADDED // 2  # rows of the head on each of two ranks


def main(rank: int, folder: Path) -> None:
    """Run the cases of this module and those of `megatron_cases`."""
    megatron_cases.main(rank, folder)


def operands(width: int = S) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states [width, B, H], a complete head [PADDED, H] and ids [B, width], the same on every rank."""
    rng = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(*shape, H, generator=rng).double() for shape in ((width, B), (PADDED,)))
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(VOCAB, (B, width), generator=rng)


def shard_of(weight: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """Return this rank's rows of a head, and their first id and the id after them."""
    first = parallel_state.get_tensor_model_parallel_rank() * ROWS
    return weight.detach()[first : first + ROWS].clone().requires_grad_(), (first, first + ROWS)


def summed(x: Tensor | None, group: Any) -> Tensor:
    """Return the sum over the ranks of a group."""
    assert x is not None
    total = x.clone()
    dist.all_reduce(total, group=group)
    return total


def assert_equal(**pairs: tuple[Tensor, Tensor | None]) -> None:
    """Assert that each first tensor equals the second, the truth."""
    truths = {name: truth.detach() for name, (_, truth) in pairs.items() if truth is not None}
    assert_close({name: x.detach() for name, (x, _) in pairs.items()}, truths, SHARDED_GRADIENT_RELATIVE)


@case("NeMo RL's hidden states", tensor_model_parallel_size=2)
def _nemo_rl() -> None:
    hidden, weight, ids = operands()
    shard, bounds = shard_of(weight)
    rank = parallel_state.get_tensor_model_parallel_rank()
    group = parallel_state.get_tensor_model_parallel_group()
    own = hidden.detach().chunk(2)[rank].clone().requires_grad_()
    before = ids.clone()
    out = nemo_rl.log_probs(own, shard, None, ids, *bounds, group, cp_group=None, chunk_size=2, vocab_size=VOCAB)
    everything = torch.ones(B, S - 1, dtype=torch.bool)
    weighted(out, None, everything).backward()
    logits = (hidden @ weight.t()).transpose(0, 1)[:, :-1]
    truth, _ = of_logits(logits, ids[:, 1:], 1.0, VOCAB)
    weighted(truth, None, everything).backward()
    assert hidden.grad is not None and weight.grad is not None and own.grad is not None and shard.grad is not None
    assert_equal(log_probs=(out, truth), hidden=(own.grad, hidden.grad.chunk(2)[rank]))
    assert_equal(weight=(shard.grad, weight.grad[slice(*bounds)]))
    assert torch.equal(ids, before)
    assert not nemo_rl.log_probs(own, shard, None, ids, *bounds, group, inference_only=True).requires_grad
    wrong = partial(nemo_rl.log_probs, own, shard, None, ids, bounds[0] + 1, bounds[1], group)
    refused(f"vocab_start_index must be {bounds[0]}", ValueError, wrong)
    two = partial(nemo_rl.log_probs, own, shard, None, ids, *bounds, group, cp_group=group)
    refused("cp_group must be None or a group of one rank", ValueError, two)


def skyrls_own() -> Any:
    """Return SkyRL's module with its log-probs, without importing its package, which needs all of SkyRL."""
    place = distribution("skyrl").locate_file("skyrl/backends/skyrl_train/distributed/megatron/model_utils.py")
    spec: Any = importlib.util.spec_from_file_location("skyrl_model_utils", str(place))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@case("SkyRL's packed sequences", tensor_model_parallel_size=2, context_parallel_size=2)
def _skyrl_packed() -> None:
    """SkyRL's function of packed sequences, with our log-probs inside and with its own."""
    hidden, weight, ids = operands(12)
    shard, bounds = shard_of(weight)
    tp = parallel_state.get_tensor_model_parallel_group()
    cp = parallel_state.get_context_parallel_group()
    module = skyrls_own()
    offsets = torch.tensor([0, 8, 12])
    found = []
    part = hidden.detach()[:, :1].chunk(2)[dist.get_rank(cp)].transpose(0, 1).float()  # [1, 6, H]
    for apply in (skyrl.fused_log_probs, module._fused_lm_head_logprob_apply):
        own = part.clone().requires_grad_()
        rows = shard.detach().float().requires_grad_()
        with mock.patch.object(module, "_fused_lm_head_logprob_apply", apply):
            out = module.from_parallel_hidden_to_logprobs_packed_sequences(
                own, rows, ids[:1], offsets, 8, *bounds, tp, cp_group=cp, chunk_size=3, temperature=0.7
            )
        weighted(out, None, out != 0).backward()
        found.append({"log_probs": out.detach(), "hidden": own.grad, "weight": rows.grad})
    assert_close(found[0], found[1], MODEL_GRADIENT_RELATIVE[torch.float32])


for _padding in (0, 3):

    @case(
        f"SkyRL's hidden states, cp 2, {_padding} positions of padding",
        tensor_model_parallel_size=2,
        context_parallel_size=2,
    )
    def _skyrl(padding: int = _padding) -> None:
        hidden, weight, ids = operands()
        ids = ids[:, : S - padding]
        shard, bounds = shard_of(weight)
        tp = parallel_state.get_tensor_model_parallel_group()
        cp = parallel_state.get_context_parallel_group()
        rank = dist.get_rank(cp)
        mine = [torch.tensor([0, 1, 6, 7]), torch.tensor([2, 3, 4, 5])][rank]  # S = 8 in four parts
        own = hidden.detach().transpose(0, 1)[:, mine].clone().requires_grad_()
        options: dict[str, Any] = {"cp_group": cp, "temperature": 0.7, "fused_backend": "triton", "vocab_size": VOCAB}
        out = skyrl.log_probs(own, shard, ids, *bounds, tp, **options)
        everything = torch.ones(B, S - padding - 1, dtype=torch.bool)
        weighted(out, None, everything).backward()  # on both ranks of cp, so all gradients are twice the truth
        logits = (hidden @ weight.t()).transpose(0, 1)[:, : S - padding - 1]
        truth, _ = of_logits(logits, ids[:, 1:], 0.7, VOCAB)
        (2 * weighted(truth, None, everything)).backward()
        assert hidden.grad is not None and weight.grad is not None
        assert_equal(log_probs=(out, truth), weight=(summed(shard.grad, cp), weight.grad[slice(*bounds)]))
        assert_equal(hidden=(summed(own.grad, tp), hidden.grad.transpose(0, 1)[:, mine]))
        wrong = partial(skyrl.log_probs, own[:, :3], shard, ids, *bounds, tp, cp_group=cp)
        refused("hidden must be [B, S / CP, H], S / CP even", ValueError, wrong)
        alone = skyrl.log_probs(hidden.transpose(0, 1), shard, ids, *bounds, tp, inference_only=True)
        assert alone.shape == (B, S - padding - 1) and not alone.requires_grad


# slime: slime/backends/megatron_utils/{model,loss,actor}.py.

SLIME = "slime.backends.megatron_utils"
SLIME_ARGS = SimpleNamespace(
    rollout_temperature=0.7,
    rollout_top_p=0.9,
    entropy_coef=0.1,
    allgather_cp=False,
    enable_mtp_training=False,
    custom_megatron_init_path="a.b",
)


def responses(
    logits: Tensor,
    *,
    args: Any,
    unconcat_tokens: list[Tensor],
    total_lengths: list[int],
    response_lengths: list[int],
    apply_temperature: bool,
) -> Any:
    """Yield the rows and ids of the response tokens of each sample, as slime does without context parallelism."""
    assert not apply_temperature
    end = 0
    for tokens, total, response in zip(unconcat_tokens, total_lengths, response_lengths, strict=True):
        end += total
        yield logits[0, end - response - 1 : end - 1], tokens[-response:]


def fakes_of_slime(provide: Any) -> dict[str, Any]:
    """Return modules with slime's functions that `slime.head` uses or replaces. `provide` builds a model."""
    modules: dict[str, Any] = {f"{SLIME}.{name}": ModuleType(name) for name in ("model", "loss", "actor", "cp_utils")}
    modules[f"{SLIME}.cp_utils"].slice_log_prob_with_cp = lambda x, total, response: x
    modules[f"{SLIME}.model"].get_model_provider_func = lambda args, role: provide
    modules[f"{SLIME}.loss"].get_responses = responses
    for name in ("loss", "actor"):
        modules[f"{SLIME}.{name}"].get_log_probs_and_entropy = responses  # to be replaced
    return modules


for _tied in (False, True):
    for _sequence_parallel in (False, True):

        @case(f"slime's head{', sp' * _sequence_parallel}{', tied' * _tied}", tensor_model_parallel_size=2)
        def _slime(tied: bool = _tied, sequence_parallel: bool = _sequence_parallel) -> None:
            """Two samples of 5 and 3 tokens, packed, with responses of 3 tokens and 1 token."""
            inputs, _, _ = batch()
            one = {name: x[:1] for name, x in inputs.items()}
            ids = one["input_ids"][0]
            lengths = {"total_lengths": [5, 3], "response_lengths": [3, 1]}
            rows = torch.tensor([1, 2, 3, 6])  # each predicts the next token
            everything = torch.ones(1, 4, dtype=torch.bool)
            # Ids that top-p kept: none (the full vocabulary), the target and another, the target alone, and two others.
            first = torch.stack([ids[3], (ids[3] + 4) % VOCAB, ids[4]])
            second = (ids[7:] + torch.tensor([1, 5])) % VOCAB
            offsets = [torch.tensor([0, 0, 2, 3]), torch.tensor([0, 2])]
            fakes = fakes_of_slime(lambda **_: make(tied, sequence_parallel))
            with mock.patch.dict(sys.modules, fakes):
                slime.head(SLIME_ARGS, vocab_size=VOCAB)
                build = fakes[f"{SLIME}.model"].get_model_provider_func(SLIME_ARGS, "actor")
                model = build(pre_process=True, post_process=True)
                hidden = model(**one)
                assert hidden.shape == (1, S, H)
                inputs = {"unconcat_tokens": [ids[:5], ids[5:]], **lengths}
                ours_of = partial(fakes[f"{SLIME}.actor"].get_log_probs_and_entropy, hidden, **inputs)
                _, out = ours_of(args=SLIME_ARGS, with_entropy=True)
                assert [len(x) for x in out["log_probs"]] == lengths["response_lengths"]
                detached = ours_of(args=SimpleNamespace(**{**vars(SLIME_ARGS), "entropy_coef": 0.0}), with_entropy=True)
                assert not any(x.requires_grad for x in detached[1]["entropy"])
                assert list(ours_of(args=SLIME_ARGS)[1]) == ["log_probs"]
                truncated = dict(args=SLIME_ARGS, top_p_token_ids=[first, second], top_p_token_offsets=offsets)
                replayed = torch.cat(ours_of(**truncated)[1]["log_probs"]).detach()
                both = ours_of(**truncated, with_entropy=True)[1]
                assert torch.equal(torch.cat(both["log_probs"]), replayed)
                assert all(map(torch.equal, both["entropy"], out["entropy"]))
                assert all(x.requires_grad for x in both["entropy"])
                redistribute = fakes[f"{SLIME}.loss"]._allgather_cp_redistribute = mock.Mock()
                ours_of(args=SimpleNamespace(**{**vars(SLIME_ARGS), "allgather_cp": True}))
                redistribute.assert_called_once_with(mock.ANY, logits_local_len=S, **lengths)
                critic = fakes[f"{SLIME}.model"].get_model_provider_func(SLIME_ARGS, "critic")()
            log_probs, entropy = (torch.cat(out[name]) for name in ("log_probs", "entropy"))
            weighted(log_probs[None], entropy[None], everything).backward()
            ours = gradients(model)
            logits = critic(**one, runtime_gather_output=True)[:, rows]
            truth, true_entropy = of_logits(logits, ids[rows + 1][None], 0.7, VOCAB)
            weighted(truth, true_entropy, everything).backward()
            assert_close(ours, gradients(critic), SHARDED_GRADIENT_RELATIVE)
            assert_equal(log_probs=(log_probs, truth[0]), entropy=(entropy, true_entropy[0]))
            kept = torch.zeros(4, PADDED, dtype=torch.bool).scatter(1, ids[rows + 1][:, None], True)
            kept[0] = kept[1, first[:2]] = kept[3, second] = True
            of_kept = (logits / 0.7).masked_fill(~kept, -torch.inf)
            assert_equal(replayed=(replayed, of_logits(of_kept, ids[rows + 1][None], 1.0, VOCAB)[0][0]))


@case("slime's head refused", tensor_model_parallel_size=2)
def _slime_refused() -> None:
    fakes = fakes_of_slime(make)
    for name, value in (("rollout_top_p", 0.9), ("enable_mtp_training", True)):
        args = SimpleNamespace(**{**vars(SLIME_ARGS), "rollout_top_p": 1.0, name: value, "allgather_cp": True})
        refused(f"--{name.replace('_', '-')} must be", ValueError, partial(slime.head, args))
    with mock.patch.dict(sys.modules, fakes):
        with mock.patch.dict(sys.modules, {f"{SLIME}.server.logprob_utils": ModuleType("server")}):
            refused("in the log-prob server", ValueError, lambda: slime.head(SLIME_ARGS))
        slime.head(SLIME_ARGS)
        call = partial(fakes[f"{SLIME}.loss"].get_log_probs_and_entropy, torch.ones(1, S, H), args=SLIME_ARGS)
        inputs = {"unconcat_tokens": [], "total_lengths": [], "response_lengths": []}
        refused("a module output_layer", ValueError, lambda: call(**inputs))
