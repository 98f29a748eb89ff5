"""Updates without the answers whose gradient is exactly 0.

Without KL and entropy bonus, an answer with advantage 0 has a gradient of exactly 0. `LiveBatch` selects the other
answers of a batch before verl splits it into micro-batches. The loss divides by the sizes of the complete batch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from verl.utils import tensordict_utils as tu  # pyright: ignore[reportMissingImports]
from verl.utils.device import get_device_id  # pyright: ignore[reportMissingImports]
from verl.utils.metric import Metric  # pyright: ignore[reportMissingImports]
from verl.workers.utils.losses import ppo_loss  # pyright: ignore[reportMissingImports]

from ..huggingface.rows import interaction_of_rows, live_tokens, rope_of_longest_row
from .config import LOSS_MODE, actor_config

# Policy losses in which tokens with advantage 0 have no gradient and never count as clipped. In verl's other losses,
# they count as clipped (cispo, dppo), have a gradient (dro), or change the gradients of other answers (geo_mean, cov).
_LOSS_MODES = ("gspo", LOSS_MODE, "vanilla", "sapo", "gpg")
_CLIP_FRACTIONS = ("actor/pg_clipfrac", "actor/pg_clipfrac_lower")


def inexact_setting(data: Any, loss_function: Any) -> str | None:
    """Name a setting of an update that makes its gradients or metrics depend on answers with advantage 0.

    The result must be the same on all ranks, because `LiveBatch` communicates.
    """
    config = actor_config(loss_function)
    if getattr(loss_function, "func", None) is not ppo_loss or config is None:
        return "a loss other than verl's ppo_loss"
    loss_mode = config.policy_loss.get("loss_mode", "vanilla")
    # verl's divisor in this mode is then the longest response of a micro-batch.
    is_per_micro_batch = config.loss_agg_mode == "seq-mean-token-sum-norm" and not config.loss_scale_factor
    group_size = tu.get_non_tensor_data(data, "force_group_size", 1)
    reasons = {
        f"policy_loss.loss_mode={loss_mode}": loss_mode not in _LOSS_MODES,
        "actor.use_kl_loss=True": config.use_kl_loss,
        f"actor.entropy_coeff={config.entropy_coeff:g}": config.entropy_coeff != 0,
        f"loss_agg_mode={config.loss_agg_mode} without loss_scale_factor": is_per_micro_batch,
        # The metric actor/entropy_loss is a sum over all answers.
        "actor.calculate_entropy=True": tu.get_non_tensor_data(data, "calculate_entropy", False),
        "return_model_output=True": tu.get_non_tensor_data(data, "return_model_output", False),
        "no global_batch_size": tu.get_non_tensor_data(data, "global_batch_size", None) is None,
        f"force_group_size={group_size}": group_size != 1,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def inexact_model(model: nn.Module) -> str | None:
    """Name a part of the model that makes the gradients of an answer depend on the other answers of its micro-batch."""
    return interaction_in_model(model) or rope_of_longest_row(model)


def interaction_in_model(model: nn.Module) -> str | None:
    """Name a part of the model in which answers interact, or a tower of images or audio."""
    if any(hasattr(getattr(model, "config", None), name) for name in ("vision_config", "audio_config")):
        return "a model of images or audio"  # without any, the weights of its tower have no gradient
    return interaction_of_rows(model)


def live_rows(data: Any) -> Tensor:
    """Find the answers with a token whose mask, advantage and weight are not 0. Returns bool [B]."""
    names = [name for name in ("advantages", "response_mask", "rollout_is_weights") if name in data]
    fields = data.select(*names).to_padded_tensor()
    live = live_tokens(fields["advantages"], fields["response_mask"])
    if "rollout_is_weights" in fields:
        live = live & fields["rollout_is_weights"].ne(0)
    return live.any(1)


class LiveBatch:
    """The answers of a batch that run in an update, and the loss that divides by the sizes of the complete batch.

    All ranks run the same number of answers, at least one, so that they have equally many micro-batches. A rank with
    fewer live answers adds its shortest other ones.
    """

    data: Any  # the batch, or a part of it
    share: float  # of the answers that run, on all ranks

    def __init__(self, data: Any, loss_function: Any, group: Any) -> None:
        """Choose the answers. All ranks of the data-parallel `group` must call this together."""
        live = live_rows(data)
        mask = data["loss_mask"]
        own_tokens = int(mask.sum())
        rows = torch.tensor([int(live.sum())], device=get_device_id())
        tokens = torch.tensor([own_tokens], device=get_device_id())
        dist.all_reduce(rows, dist.ReduceOp.MAX, group)
        dist.all_reduce(tokens, dist.ReduceOp.SUM, group)
        size = 1
        if not tu.get_non_tensor_data(data, "use_dynamic_bsz", True):
            size = tu.get_non_tensor_data(data, "micro_batch_size_per_gpu", 1)
        count = -(-max(int(rows), 1) // size) * size  # verl requires a multiple of the micro-batch
        lengths = data["input_ids"].offsets().diff()
        chosen = torch.where(live, -1, lengths.to(live.device)).argsort(stable=True)[:count].sort().values
        self.data = tu.index_select_tensor_dict(data, chosen) if count < len(data) else data
        self.share = len(self.data) / len(data)
        self._loss_function = loss_function
        self._batch_num_tokens = int(tokens)
        self._share_of_tokens = int(self.data["loss_mask"].sum()) / max(own_tokens, 1)

    def loss(self, model_output: Any, data: Any, dp_group: Any = None) -> tuple[Tensor, dict[str, Any]]:
        """Compute verl's loss of a micro-batch. Clip fractions are shares of all tokens, with those that did not run.

        The other metrics of the policy loss, such as actor/ppo_kl, are means over the answers that run.
        """
        tu.assign_non_tensor(data, batch_num_tokens=self._batch_num_tokens)  # verl counted the tokens of self.data
        loss, metrics = self._loss_function(model_output=model_output, data=data, dp_group=dp_group)
        for name in metrics.keys() & set(_CLIP_FRACTIONS):
            value = metrics[name].aggregate() * self._share_of_tokens
            metrics[name] = Metric(metrics[name].aggregation, value)
        return loss, metrics
