"""Compute log-probs at the output layer of a Megatron Core GPTModel, without making logits.

    out = model_log_probs(model, target_ids, input_ids=ids, position_ids=positions, attention_mask=None)
    loss = policy_loss(out.log_probs, advantages, mask=mask, old_log_probs=old).loss

`model_log_probs` works with Megatron Core 0.16.1, where it replaces the output layer's forward for the call, and with
releases whose GPTModel takes an `output_processor` (0.18 and later). Code that calls such a model itself passes
`output_processor` and a `Targets`:

    out = model(ids, positions, None, output_processor=output_processor, output_processor_context=Targets(target_ids))

For trainers on Megatron Core, see `slime`, `skyrl` and `nemo_rl` in `integrations.trainers`, and
`integrations.verl.megatron`.

The output layer is sharded over the tensor-parallel group. Its weight, its group, and how the gradient of the hidden
states is reduced are read from the layer. Hidden states are [S, B, H]; with sequence parallelism, each rank has
S / TP of the S positions. Results are [B, S], like Megatron's labels.
"""

from gspo_kernels.extras import needs

with needs(__name__, "megatron", "megatron", "megatron.core"):  # other packages are in the namespace megatron, too
    from .output_layer import Targets, local_cu_seqlens, model_log_probs, output_processor

__all__ = ["Targets", "local_cu_seqlens", "model_log_probs", "output_processor"]
