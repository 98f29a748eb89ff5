"""Cases of tests/distributed with DTensor weights: plain, in `parallelize_module`, and under FSDP2 over a 2-D mesh."""

from __future__ import annotations

import re
from typing import Any

import torch
from helpers.array import arguments_of, leaves_of
from helpers.features import make
from helpers.pages import CP_LINES, FSDP_TP_LINES, HUGGINGFACE_LINES
from helpers.sharded_cases import Context, case, relative
from helpers.sharded_features import raises, rows
from helpers.sharded_runs import contiguous, shard_rows
from helpers.tiny_model import SHAPE
from tolerance import SHARDED_GRADIENT_RELATIVE
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from gspo_kernels import gspo_fused_loss, linear_log_probs
from gspo_kernels.integrations.huggingface import fuse_head


@case("dtensor head", 2)
def _dtensor(context: Context) -> None:
    mesh = DeviceMesh.from_group(context.group(2), "cpu", mesh_dim_names=("tp",))
    hidden, weight, ids = rows(64, torch.float64)
    bias = torch.linspace(-1, 1, 64, dtype=torch.float64)

    def run(h: Tensor, w: Any, b: Any, **options: Any) -> tuple[Any, ...]:
        leaves = [x.clone().detach().requires_grad_() for x in (h, w, b)]
        linear_log_probs(leaves[0], leaves[1], ids, bias=leaves[2], **options).log_probs.square().sum().backward()
        return tuple(x.grad for x in leaves)

    one = run(hidden, weight, bias)
    sharded = [distribute_tensor(x, mesh, [Shard(0)]) for x in (weight, bias)]
    d_hidden, *of_vocabulary = run(hidden, *sharded)
    assert relative(d_hidden, one[0]) <= SHARDED_GRADIENT_RELATIVE
    for ours, theirs in zip(of_vocabulary, one[1:], strict=True):
        assert isinstance(ours, DTensor) and ours.placements == (Shard(0),)
        assert relative(ours.full_tensor(), theirs) <= SHARDED_GRADIENT_RELATIVE
    # Replicated hidden states get a DTensor gradient of partial sums.
    replicated = distribute_tensor(hidden, mesh, [Replicate()])
    d_hidden, *_ = run(replicated, *sharded, tp_group=mesh)
    assert relative(d_hidden.full_tensor(), one[0]) <= SHARDED_GRADIENT_RELATIVE
    with raises("lm_head", "Shard(0)", "Shard(dim=1)"):
        run(hidden, distribute_tensor(weight, mesh, [Shard(1)]), bias)
    with raises("hidden", "replicated"):
        run(distribute_tensor(hidden, mesh, [Shard(0)]), *sharded)
    with raises("hidden", "plain tensor"):
        run(replicated, weight, bias)


for _vocab in (5, 2):

    @case(f"dtensor head with {_vocab} rows on 4 ranks", 4)
    def _no_rows(context: Context, vocab: int = _vocab) -> None:
        """The last ranks hold no rows: 2, 2, 1, 0, or 1, 1, 0, 0."""
        mesh = DeviceMesh.from_group(context.group(4), "cpu", mesh_dim_names=("tp",))
        hidden, weight, ids = rows(vocab, torch.float64)
        bias = torch.linspace(-1, 1, vocab, dtype=torch.float64)

        def run(lm_head: Any, bias: Any, **options: Any) -> tuple[Any, ...]:
            h = hidden.clone().requires_grad_()
            out = linear_log_probs(h, lm_head, ids, bias=bias, entropy=True, **options)
            (out.log_probs.square().sum() + out.entropy.sum()).backward()  # pyright: ignore[reportOptionalMemberAccess]
            return out.log_probs.detach(), out.entropy, h.grad

        for backend in ("torch", "triton"):
            one = [x.clone().requires_grad_() for x in (weight, bias)]
            leaves: list[Any] = [distribute_tensor(x, mesh, [Shard(0)]).requires_grad_() for x in (weight, bias)]
            assert (leaves[0].to_local().shape[0] == 0) == (context.rank >= {5: 3, 2: 2}[vocab])
            for ours, theirs in zip(run(*leaves, backend=backend), run(*one, backend=backend), strict=True):
                assert relative(ours, theirs) <= SHARDED_GRADIENT_RELATIVE
            for ours, theirs in zip(leaves, one, strict=True):
                assert isinstance(ours.grad, DTensor) and ours.grad.placements == (Shard(0),)
                assert ours.grad.to_local().shape == ours.to_local().shape and theirs.grad is not None
                assert relative(ours.grad.full_tensor(), theirs.grad) <= SHARDED_GRADIENT_RELATIVE
        head = nn.Linear(weight.shape[1], vocab, dtype=torch.float64)
        head.weight = nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)]))
        head.bias = nn.Parameter(distribute_tensor(bias, mesh, [Shard(0)]))
        d_hidden = run(head, None, cache_mib=1.0)[2]
        assert relative(d_hidden, run(weight, bias)[2]) <= SHARDED_GRADIENT_RELATIVE
        with raises("lm_head", "empty tensor [0, 8]"):  # a plain tensor is never padded
            linear_log_probs(hidden, weight[:0], ids)


def _model() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    shape: dict[str, Any] = {**SHAPE, "vocab_size": 52, "tie_word_embeddings": False}
    return Qwen3ForCausalLM(Qwen3Config(**shape)).double()


def _loss(model: Any) -> Tensor:
    ids = torch.randint(0, 50, (4, 7), generator=torch.Generator().manual_seed(1))
    advantages = torch.tensor([1.0, -1.0, 0.5, -2.0])

    def loss(hidden: Tensor, lm_head: Any, **options: Any) -> Any:
        return gspo_fused_loss(hidden[:, :-1], lm_head, ids[:, 1:], advantages, **options)

    return model(input_ids=ids, with_head=loss).result.loss


def _assert_gradients_equal(model: Any, one: Any) -> None:
    expected = dict(one.named_parameters())
    for name, p in model.named_parameters():
        grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        truth = expected[name].grad
        assert truth is not None
        assert relative(grad, truth) <= SHARDED_GRADIENT_RELATIVE, name


for _output in ("replicated", "sharded"):

    @case(f"parallelize_module {_output}", 2)
    def _colwise(context: Context, output: str = _output) -> None:
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

        mesh = DeviceMesh.from_group(context.group(2), "cpu", mesh_dim_names=("tp",))
        one = _model()
        fuse_head(one)
        _loss(one).backward()
        for fused_first in (True, False):
            model = _model()
            if fused_first:
                fuse_head(model)
            layout = Replicate() if output == "replicated" else Shard(-1)
            parallelize_module(model, mesh, {"lm_head": ColwiseParallel(output_layouts=layout)})
            fuse_head(model)
            _loss(model).backward()
            _assert_gradients_equal(model, one)
            assert model.lm_head._forward_hooks


# -- the lines of docs/concepts/sharding.md


@case("documented lines of FSDP2 x TP", 4)
def _documented_fsdp(context: Context) -> None:
    groups = context.square()
    mesh = DeviceMesh.from_group([groups.cp, groups.tp], "cpu", mesh=[[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    ids = torch.randint(0, 50, (4, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(6).expand(4, 6) >= 2
    batch = {"ids": ids, "mask": mask, "advantages": torch.tensor([1.0, -1.0, 0.5, -2.0])}
    one: dict[str, Any] = {"model": _model(), "attention_mask": None, "old": None, "sequences": 4, **batch}
    exec(HUGGINGFACE_LINES, one)
    exec("gspo(model, ids, attention_mask, mask, advantages, old, sequences).loss.backward()", one)
    half = slice(0, 2) if context.rank < 2 else slice(2, 4)
    own = {name: x[half] for name, x in batch.items()}
    without_tp = re.sub("^parallelize_module.*\n", "", FSDP_TP_LINES, flags=re.MULTILINE)
    assert without_tp != FSDP_TP_LINES
    for lines in (without_tp, FSDP_TP_LINES):
        scope: dict[str, Any] = one | own | {"model": _model(), "mesh": mesh}
        exec(lines, scope)
        _assert_gradients_equal(scope["model"], one["model"])
    weight = torch.zeros(52, 16).double()

    def log_probs(weight: Tensor, **options: Any) -> None:
        linear_log_probs(torch.zeros(1, 1, 16).double(), weight, torch.zeros(1, 1).long(), **options)

    with raises("lm_head"):  # outside the model's forward, the weight is sharded over both dimensions
        log_probs(scope["model"].lm_head.weight)
    with raises("tp_group", "a device mesh of one dimension", "2 dimensions"):
        log_probs(weight, tp_group=mesh)
    with raises("tp_group", "None or the group of the DTensor lm_head"):
        log_probs(distribute_tensor(weight, mesh["tp"], [Shard(0)]), tp_group=mesh["dp"])


@case("documented lines of CP", 4)
def _documented_cp(context: Context) -> None:
    groups = context.square()
    batch = make("dtype=fp64 tp=2", 6)
    mine = contiguous(batch.mask.shape, 2) == groups.cp.rank()
    one = leaves_of(batch)
    gspo_fused_loss(**arguments_of(batch, one)).loss.backward()
    leaves = {"hidden": one["hidden"][mine], "lm_head": shard_rows(one["weight"], groups.tp)}
    leaves = {name: x.detach().clone().requires_grad_() for name, x in leaves.items()}
    per_token = {name: batch.tokens[name][mine] for name in ("mask", "old_log_probs", "target_ids")}
    scope = {**leaves, **per_token, "advantages": batch.tokens["advantages"], "vocab_size": batch.vocab}
    scope |= {"cu_seqlens": torch.cat([torch.zeros(1, dtype=torch.int64), mine.sum(1).cumsum(0)])}
    exec(CP_LINES, scope | {"tp_group": groups.tp, "cp_group": groups.cp})
    d_hidden, d_weight = one["hidden"].grad, one["weight"].grad
    assert d_hidden is not None and d_weight is not None
    assert leaves["hidden"].grad is not None and leaves["lm_head"].grad is not None
    assert relative(leaves["hidden"].grad, d_hidden[mine]) <= SHARDED_GRADIENT_RELATIVE
    torch.distributed.all_reduce(leaves["lm_head"].grad, group=groups.cp)
    assert relative(leaves["lm_head"].grad, shard_rows(d_weight, groups.tp)) <= SHARDED_GRADIENT_RELATIVE
