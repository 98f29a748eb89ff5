"""Cases of test_megatron.py: log-probs and gradients of tiny GPTModels, compared with Megatron's logits and loss."""

from __future__ import annotations

import datetime
import json
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from helpers.megatron_models import PADDED, VOCAB, B, S, batch, make, run_without_gpu
from helpers.pages import MEGATRON_LINES
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from tolerance import SHARDED_GRADIENT_RELATIVE
from torch import Tensor, nn

from gspo_kernels import policy_loss
from gspo_kernels.integrations import megatron
from gspo_kernels.integrations.megatron import Targets, output_layer, output_processor

WORLD, DEADLINE = 4, 300.0  # seconds
TIMEOUT = datetime.timedelta(seconds=DEADLINE)
CASES: dict[str, tuple[dict[str, int], Callable[[], None]]] = {}  # sizes of Megatron's groups, and the case
model_log_probs: Any = megatron.model_log_probs  # LogProbOutput on the last stage, a Tensor on others


def case(name: str, **sizes: int) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Add a case that runs with these sizes of Megatron's groups."""

    def add(run: Callable[[], None]) -> Callable[[], None]:
        assert name not in CASES, name
        CASES[name] = sizes, run
        return run

    return add


def main(rank: int, folder: Path) -> None:
    """Run all cases, and write the errors of this rank, by name of the case."""
    run_without_gpu()
    dist.init_process_group("gloo", timeout=TIMEOUT)
    errors, current = {}, {}
    # Cases with equal sizes share their groups, because threads of gloo's groups live as long as the process.
    for name, (sizes, run) in sorted(CASES.items(), key=lambda item: str(item[1][0])):
        if sizes != current:
            parallel_state.destroy_model_parallel()
            parallel_state.initialize_model_parallel(**sizes)
            current = sizes
        try:
            run()
        except Exception:
            errors[name] = traceback.format_exc()
    (folder / f"rank-{rank}.json").write_text(json.dumps({"errors": errors, "cases": list(CASES)}))


def weighted(log_probs: Tensor, entropy: Tensor | None, mask: Tensor) -> Tensor:
    """Return a scalar whose gradients differ from token to token."""
    weights = torch.linspace(-1, 2, log_probs.numel(), dtype=torch.float64).view(log_probs.shape)
    terms = log_probs * weights if entropy is None else log_probs * weights + entropy * weights.flip(0)
    return torch.where(mask, terms, 0).sum()


def gradients(model: Any) -> dict[str, Tensor]:
    """Return the gradients of all parameters, and remove them."""
    out = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return out


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor], limit: float) -> None:
    assert ours.keys() == theirs.keys() and ours
    for name, truth in theirs.items():
        assert truth.norm() > 0 or name.endswith("linear_qkv.bias"), name
        error = (ours[name] - truth).norm() / truth.norm().clamp(min=1e-6)
        assert error <= limit, f"{name}: relative error {error:.1e}"


def of_logits(logits: Tensor, targets: Tensor, temperature: float, columns: int) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies of complete logits [B, S, V]."""
    log_p = (logits[..., :columns] / temperature).log_softmax(-1)
    return log_p.gather(-1, targets[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)


for _tied in (False, True):
    for _sequence_parallel in (False, True):

        @case(f"tp 2{', sp' * _sequence_parallel}{', tied' * _tied}", tensor_model_parallel_size=2)
        def _tp(tied: bool = _tied, sequence_parallel: bool = _sequence_parallel) -> None:
            model = make(tied, sequence_parallel)
            inputs, targets, mask = batch()
            per_token = torch.linspace(0.5, 1.5, B * S).view(B, S).double()
            for columns, temperature in ((PADDED, 0.7), (VOCAB, per_token)):
                options: dict[str, Any] = {"vocab_size": columns, "temperature": temperature, "entropy": True}
                out = model_log_probs(model, targets, mask=mask, **options, **inputs)
                weighted(out.log_probs, out.entropy, mask).backward()
                ours = gradients(model)
                logits = model(**inputs, runtime_gather_output=True)
                divisor = torch.as_tensor(temperature, dtype=torch.float64).expand(B, S)[..., None]
                log_probs, entropy = of_logits(logits / divisor, targets, 1.0, columns)
                weighted(log_probs, entropy, mask).backward()
                assert_close(ours, gradients(model), SHARDED_GRADIENT_RELATIVE)
                pair = {"log_probs": out.log_probs[mask], "entropy": out.entropy[mask]}
                truth = {"log_probs": log_probs[mask], "entropy": entropy[mask]}
                assert_close(pair, truth, SHARDED_GRADIENT_RELATIVE)


@case("tp 2 x cp 2, packed", tensor_model_parallel_size=2, context_parallel_size=2)
def _cp() -> None:
    """GSPO's loss of packed sequences in Megatron's zigzag order, with padding, equals that of complete sequences."""
    group = parallel_state.get_context_parallel_group()
    padded = torch.tensor([0, 8, 12, 24])
    lengths = (7, 4, 9)
    advantages = torch.tensor([1.0, -0.5, 2.0]).double()
    rng = torch.Generator().manual_seed(2)
    ids, targets = torch.randint(VOCAB, (2, 1, 24), generator=rng)
    positions = torch.cat([torch.arange(n) for n in padded.diff().tolist()])[None]
    mask = torch.cat([torch.arange(n) < m for n, m in zip(padded.diff().tolist(), lengths, strict=True)])[None]
    true = torch.tensor([0, 7, 11, 20], dtype=torch.int32)
    packed = PackedSeqParams("thd", true, true, padded.int(), padded.int(), 12, 12)
    without_padding = PackedSeqParams("thd", padded.int(), padded.int())
    assert torch.equal(megatron.local_cu_seqlens(without_padding, group), megatron.local_cu_seqlens(packed, group))
    parts = []
    for start, end in zip(padded[:-1].tolist(), padded[1:].tolist(), strict=True):
        chunks = torch.arange(start, end).chunk(4)
        parts += [chunks[group.rank()], chunks[3 - group.rank()]]
    own = torch.cat(parts)
    constant = {"attention_mask": None, "packed_seq_params": packed}
    lines: dict[str, Any] = {}
    exec(MEGATRON_LINES, lines)
    for sequence_parallel in (False, True):
        model = make(sequence_parallel=sequence_parallel, attends=False)
        inputs = {"input_ids": ids, "position_ids": positions}
        log_probs = of_logits(model(**inputs, **constant, runtime_gather_output=True), targets, 1.0, VOCAB)[0]
        old = log_probs.detach() + 1e-4 * torch.arange(24).cos()
        one = policy_loss(log_probs[0], advantages, mask=mask[0], cu_seqlens=padded.int(), old_log_probs=old[0])
        one.loss.backward()
        theirs = gradients(model)
        tokens = {**inputs, "labels": targets, "loss_mask": mask, "old_log_probs": old}
        with mock.patch.object(torch, "zeros", partial(_on_cpu, torch.zeros)):  # the schedule asks for device="cuda"
            (log,) = get_forward_backward_func()(
                forward_step_func=lines["forward_step"],
                data_iterator=iter(
                    [{**{k: x[:, own] for k, x in tokens.items()}, **constant, "advantages": advantages}]
                ),
                model=model,
                num_microbatches=1,
                seq_length=12,
                micro_batch_size=1,
            )
        ours = gradients(model)
        for grad in ours.values():
            dist.all_reduce(grad, group=group)
            grad /= group.size()  # as DistributedDataParallel
        assert_close(ours, theirs, SHARDED_GRADIENT_RELATIVE)
        assert_close(log, {"loss": one.loss.detach()}, SHARDED_GRADIENT_RELATIVE)


def _on_cpu(make: Callable[..., Tensor], *sizes: Any, device: Any = None, **options: Any) -> Tensor:
    return make(*sizes, **options)


for _tied in (False, True):

    @case(f"tp 2 x pp 2{', tied' * _tied}", tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    def _pp(tied: bool = _tied) -> None:
        model = make(tied)
        inputs, targets, mask = batch()
        last = parallel_state.is_pipeline_last_stage()
        found = []
        for ours in (True, False):

            def call(ours: bool = ours) -> Any:
                if ours:
                    return model_log_probs(model, targets, mask=mask, **inputs)
                return model(**inputs, runtime_gather_output=True)

            if last:
                received: Any = torch.empty(S, B, 16, dtype=torch.float64)
                dist.recv(received, parallel_state.get_pipeline_model_parallel_prev_rank())
                model.set_input_tensor(received.requires_grad_())
                out = call()
                log_probs = out.log_probs if ours else of_logits(out, targets, 1.0, PADDED)[0]
                weighted(log_probs, None, mask).backward()
                dist.send(received.grad, parallel_state.get_pipeline_model_parallel_prev_rank())
            else:
                hidden = call()
                assert isinstance(hidden, Tensor) and hidden.shape == (S, B, 16)
                dist.send(hidden.detach(), parallel_state.get_pipeline_model_parallel_next_rank())
                d_hidden = torch.empty_like(hidden)
                dist.recv(d_hidden, parallel_state.get_pipeline_model_parallel_next_rank())
                hidden.backward(d_hidden)
            found.append(gradients(model))
        assert_close(found[0], found[1], SHARDED_GRADIENT_RELATIVE)
        assert ("output_layer.weight" in found[0]) == last


class WithProcessor(GPTModel):
    """A GPTModel with the argument `output_processor`, called with the names in the source of Megatron Core 0.20."""

    def forward(self, *args: Any, output_processor: Any = None, output_processor_context: Any = None, **inputs: Any):
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        hidden: list[Tensor] = []
        handle = self.decoder.register_forward_hook(lambda module, arguments, out: hidden.append(out))
        out = super().forward(*args, **inputs)
        handle.remove()
        if output_processor is None:
            return out
        names = ("labels", "loss_mask", "decoder_input", "inference_context", "packed_seq_params", "scale_logits")
        return output_processor(
            hidden_states=hidden[0],
            output_layer=self.output_layer,
            output_weight=weight,
            context=output_processor_context,
            config=self.config,
            runtime_gather_output=None,
            **{**dict.fromkeys(names), **inputs},
        )


for _sequence_parallel in (False, True):

    @case(f"output_processor{', sp' * _sequence_parallel}", tensor_model_parallel_size=2)
    def _processor(sequence_parallel: bool = _sequence_parallel) -> None:
        inputs, targets, mask = batch()
        found = []
        for kind in (WithProcessor, GPTModel):
            model = make(True, sequence_parallel, kind=kind)
            out = model_log_probs(model, targets, mask=mask, entropy=True, **inputs)
            weighted(out.log_probs, out.entropy, mask).backward()
            found.append({"log_probs": out.log_probs.detach(), **gradients(model)})
        for name, x in found[0].items():
            assert torch.equal(x, found[1][name]), name
        context = Targets(targets, mask)
        out = make(kind=WithProcessor)(**inputs, output_processor=output_processor, output_processor_context=context)
        assert out.log_probs.shape == (B, S) and out.entropy is None
        options: dict[str, Any] = {"gradient_budget": 1e-3, "cache_mib": 2.0, "backend": "torch"}
        wrapped = Wrapper(Wrapper(model))  # as DistributedDataParallel around Float16Module
        assert options.items() <= passed_to_head(lambda: model_log_probs(wrapped, targets, **options, **inputs)).items()
        scaled = make(kind=WithProcessor)
        scaled.config.use_mup, scaled.config.mup_output_mult = True, 0.5  # of Megatron Core 0.18
        assert passed_to_head(lambda: model_log_probs(scaled, targets, **inputs))["logit_scale"] == 0.5


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **inputs: Any) -> Any:
        return self.module(*args, **inputs)


def passed_to_head(run: Callable[[], Any]) -> dict[str, Any]:
    """Call `run`, and return the keyword arguments with which it calls `linear_log_probs`."""
    with mock.patch.object(output_layer, "linear_log_probs", wraps=output_layer.linear_log_probs) as called:
        run()
    return dict(called.call_args.kwargs)


def refused(text: str, error: type[Exception], run: Callable[[], Any]) -> None:
    try:
        run()
    except error as raised:
        assert text in str(raised), raised
    else:
        raise AssertionError(f"no {error.__name__}: {text}")


@case("refused", tensor_model_parallel_size=2)
def _refused() -> None:
    model = make()
    inputs, targets, _ = batch()
    refused("labels must be absent", ValueError, lambda: model_log_probs(model, targets, labels=targets, **inputs))
    refused("model must be a GPTModel", TypeError, lambda: model_log_probs(nn.Linear(2, 2), targets, **inputs))
    refused("target_ids must be [B, S] = [2, 8]", ValueError, lambda: model_log_probs(model, targets[:, 1:], **inputs))
    assert "forward" not in vars(model.output_layer)  # restored after an error
    model.output_layer.forward = model.output_layer.forward
    refused("a layer with the forward of its class", TypeError, lambda: model_log_probs(model, targets, **inputs))
    del model.output_layer.forward
    model.config.mtp_num_layers = 1
    refused("mtp_num_layers must be None", ValueError, lambda: model_log_probs(model, targets, **inputs))
    call = partial(output_processor, hidden_states=torch.zeros(S, B, 16).double(), context=Targets(targets))
    model.output_layer.gradient_accumulation_fusion = True
    refused("gradient_accumulation_fusion must be False", ValueError, lambda: call(output_layer=model.output_layer))
    model.config.defer_embedding_wgrad_compute = True
    refused("defer_embedding_wgrad_compute must be", ValueError, lambda: call(output_layer=model.output_layer))
    layer = model.output_layer
    layer.__class__ = type("Capped", (type(layer),), {"forward": lambda self, *_, **__: None})
    refused("output_layer must be a ColumnParallelLinear", TypeError, lambda: call(output_layer=layer))
