"""A plugin of ms-swift: compute each micro-batch's loss and gradient with the documented plugin and with ms-swift.

It is loaded after `gspo_plugin.py`, and appends a JSON line per micro-batch to $PAIR_OUTPUT. Training follows ours.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from gspo_plugin import GSPOTrainer  # pyright: ignore[reportMissingImports] - written by the test
from swift.rlhf_trainers import GRPOTrainer  # pyright: ignore[reportMissingImports]
from swift.trainers import TrainerFactory  # pyright: ignore[reportMissingImports]


class Pair(GRPOTrainer):
    ours = True  # False while ms-swift's own loss is computed

    def _compute_loss_and_metrics(self, model: Any, model_inputs: Any, grpo_batch: Any) -> Any:
        # A random model rarely ends an answer. If ms-swift masked all truncated ones, no gradient would be left.
        grpo_batch.truncated_mask = torch.arange(len(grpo_batch.completion_mask)) == 1
        compute = {
            "ours": lambda: GSPOTrainer._compute_loss_and_metrics.__get__(self, Pair)(model, model_inputs, grpo_batch),
            "theirs": lambda: super(Pair, self)._compute_loss_and_metrics(model, model_inputs, grpo_batch),
        }
        parameters = [p for p in model.parameters() if p.requires_grad]
        record: dict[str, Any] = {"tokens": int(grpo_batch.completion_mask.sum())}
        gradients = {}
        for name, losses in compute.items():
            self.ours = name == "ours"
            loss, metrics = losses()
            found = torch.autograd.grad(loss, parameters, allow_unused=True)
            gradients[name] = torch.cat([x.flatten().double() for x in found if x is not None])
            record[name] = {"loss": loss.item(), "clipping": metrics["clipping"]}
        self.ours = True
        norm = gradients["theirs"].norm()
        record["gradient"] = [norm.item(), (gradients["ours"] - gradients["theirs"]).norm().item()]
        path = Path(f"{os.environ['PAIR_OUTPUT']}-{self.accelerator.process_index}")
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        return compute["ours"]()

    def _get_logps_via_local_forward(self, *arguments: Any, **options: Any) -> Any:
        method = (GSPOTrainer if self.ours else GRPOTrainer)._get_logps_via_local_forward
        return method(self, *arguments, **options)


TrainerFactory.TRAINER_MAPPING["grpo"] = f"{__name__}.Pair"
