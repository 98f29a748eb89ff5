"""Tiny GPTModels of Megatron Core on CPUs.

Changes that let Megatron run without a GPU: `torch.cuda.current_device` returns the CPU, `Tensor.cuda` returns the
tensor, and the random-number tracker does nothing (there is no dropout). PyTorch's LayerNorm replaces Megatron's, which
refuses sequence parallelism. With context parallelism, each token attends only to itself, because Megatron's attention
for CPUs refuses to run.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

PADDED, VOCAB = 48, 45  # columns of the head, and those that are not padding
B, S = 2, 8


def run_without_gpu() -> None:
    """Let Megatron run in this process."""
    setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))  # noqa: B010
    setattr(Tensor, "cuda", lambda self, *_, **__: self)  # noqa: B010
    initialize_rng_tracker(inference_rng_tracker=True)


class Norm(nn.LayerNorm):
    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps)


class SelfOnly(nn.Module):
    """Attention in which each token attends only to itself."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        return value.flatten(-2)


def make(tied: bool = False, sequence_parallel: bool = False, attends: bool = True, kind: Any = GPTModel) -> Any:
    """Return this rank's stage of a float64 model with one layer."""
    torch.manual_seed(0)
    tp = parallel_state.get_tensor_model_parallel_world_size()
    pp = parallel_state.get_pipeline_model_parallel_world_size()
    cp = parallel_state.get_context_parallel_world_size()
    config = TransformerConfig(
        num_layers=pp,
        hidden_size=16,
        num_attention_heads=2,
        use_cpu_initialization=True,
        params_dtype=torch.float64,
        pipeline_dtype=torch.float64,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
        sequence_parallel=sequence_parallel,
        init_method_std=0.5,  # logits that differ
    )
    layer = get_gpt_layer_local_spec()
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    if not attends:
        layer.submodules.self_attention.submodules.core_attention = SelfOnly
    model = kind(
        config,
        TransformerBlockSubmodules(layer_specs=[layer], layer_norm=Norm),
        PADDED,
        64,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=tied,
        position_embedding_type="learned_absolute",
    )
    return model.double()


def batch() -> tuple[dict[str, Any], Tensor, Tensor]:
    """Return the inputs of a model, target ids and a mask."""
    rng = torch.Generator().manual_seed(1)
    ids, targets = torch.randint(VOCAB, (2, B, S), generator=rng)
    future = torch.ones(S, S, dtype=torch.bool).triu(1)[None, None]
    inputs = {"input_ids": ids, "position_ids": torch.arange(S).expand(B, S), "attention_mask": future}
    return inputs, targets, torch.rand(B, S, generator=rng) < 0.7
