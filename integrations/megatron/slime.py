"""slime's log-probs and entropies from hidden states instead of logits: `slime_head`.

slime's model returns logits of all tokens, and slime's `get_log_probs_and_entropy` reads the response tokens from them.
`slime_head` changes both ends: the actor's output layer returns its input, the hidden states, and our function computes
log-probs and entropies of the response tokens from them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from gspo_kernels import linear_log_probs
from gspo_kernels.validation import Checks, Unquoted

from .output_layer import check_layer, gathered, layer_options

_PACKAGE = "slime.backends.megatron_utils"


def slime_head(args: Any, **options: Any) -> None:
    """Make slime's actor compute log-probs without logits. Pass this function as --custom-megatron-init-path.

    slime calls this function in every worker before it builds the model. Policy, reference and teacher log-probs use
    it; critics do not change. Your own code that reads logits, such as a custom loss, gets hidden states [1, T, H].
    Temperature, packing, tensor parallelism, sequence parallelism and both layouts of context parallelism are as in
    slime. As in slime, entropies have a gradient only if --entropy-coef is not 0.

    Args:
        args: slime's arguments.
        options: gradient_budget, cache_mib, vocab_size and backend of `linear_log_probs`. Without vocab_size,
            the softmax includes Megatron's padding of the vocabulary, as in slime.

    Raises:
        ValueError: --rollout-top-p is not 1, --enable-mtp-training is set, or this is slime's log-prob server.
            When slime calls the model, output layers that `model_log_probs` refuses raise the same errors.
    """
    check = Checks("slime_head")
    if args.rollout_top_p != 1.0:
        check.fail("--rollout-top-p", "1.0, because log-probs of truncated sampling need logits", args.rollout_top_p)
    if args.enable_mtp_training:
        check.fail("--enable-mtp-training", "False, because losses of multi-token prediction need logits", True)
    if f"{_PACKAGE}.server.logprob_utils" in sys.modules:
        path = args.custom_megatron_init_path
        check.fail("--custom-megatron-init-path", "another function in the log-prob server, which reads logits", path)
    head = _Head(options)
    slime_model: Any = sys.modules[f"{_PACKAGE}.model"]
    slime_model.get_model_provider_func = head.wrap(slime_model.get_model_provider_func)
    original = sys.modules[f"{_PACKAGE}.loss"].get_log_probs_and_entropy
    module: Any
    for name, module in list(sys.modules.items()):  # slime's actor imports the function by name
        if name.startswith("slime") and vars(module).get("get_log_probs_and_entropy") is original:
            module.get_log_probs_and_entropy = head.log_probs_and_entropy


class _Head:
    """The output layer that ran last in this process, and slime's functions that use it."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.layer: Any = None
        self.weight: Any = None  # of tied embeddings, or the layer's own

    def wrap(self, provider_func: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap slime's `get_model_provider_func`, so that actors return hidden states."""

        @wraps(provider_func)
        def with_head(args: Any, role: str = "actor") -> Any:
            provider = provider_func(args, role)
            if role != "actor":
                return provider

            @wraps(provider)
            def provide(*args: Any, **kwargs: Any) -> Any:
                model = provider(*args, **kwargs)
                self._replace(model)
                return model

            return provide

        return with_head

    def _replace(self, model: nn.Module) -> None:
        """Make the model's output layer return the hidden states of all tokens. Other pipeline stages have no layer."""
        for name, layer in model.named_modules():
            if name.rpartition(".")[2] == "output_layer":
                layer.forward = self._forward_of(layer)

    def _forward_of(self, layer: Any) -> Callable[..., Any]:
        def forward(hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None) -> Any:
            self.layer = layer
            self.weight = layer.weight if weight is None else weight
            check_layer(layer, self.weight)
            return gathered(hidden, layer.tp_group) if layer.sequence_parallel else hidden, None

        return forward

    def log_probs_and_entropy(
        self,
        logits: Tensor,
        *,
        args: Any,
        unconcat_tokens: list[Tensor],
        total_lengths: list[int],
        response_lengths: list[int],
        with_entropy: bool = False,
        non_loss_data: bool = True,
    ) -> tuple[Tensor, dict[str, list[Tensor]]]:
        """Compute log-probs and entropies of the response tokens, as slime's `get_log_probs_and_entropy`.

        Args:
            logits: the hidden states, [1, T, H], where slime passes the output of the model.
            unconcat_tokens, total_lengths, response_lengths: of each sample of the packed micro-batch.
            non_loss_data: not used.

        Returns:
            An empty tensor, and lists with one tensor [R] per sample: of all response tokens or, under context
            parallelism, of this rank's.
        """
        if self.layer is None:
            got = Unquoted("one without it, or of another process")
            Checks("slime_head").fail("model", "a GPTModel with a module output_layer, which ran before", got)
        slime_loss = sys.modules[f"{_PACKAGE}.loss"]
        lengths = {"total_lengths": total_lengths, "response_lengths": response_lengths}
        rows, ids = zip(
            *slime_loss.get_responses(
                logits, args=args, unconcat_tokens=unconcat_tokens, apply_temperature=False, **lengths
            ),
            strict=True,
        )
        out = linear_log_probs(
            torch.cat(rows).to(self.weight.dtype),  # Float16Module converted them to fp32
            self.weight,
            torch.cat(ids),
            temperature=args.rollout_temperature,
            entropy=with_entropy,
            **layer_options(self.layer),
            **self.options,
        )
        counts = [len(x) for x in ids]
        results = {"log_probs": list(out.log_probs.split(counts))}
        if out.entropy is not None:
            entropy = out.entropy if args.entropy_coef != 0 else out.entropy.detach()
            results["entropy"] = list(entropy.split(counts))
        if args.allgather_cp:
            slime_loss._allgather_cp_redistribute(results, logits_local_len=logits.shape[1], **lengths)
        return logits.new_empty(0), results
