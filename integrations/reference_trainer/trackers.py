"""Write metrics to TensorBoard and Weights & Biases, if `report_to` names them."""

from __future__ import annotations

import os
from typing import Any

from gspo_kernels.extras import needs

from .config import TrainConfig


class Trackers:
    """The trackers of a run. W&B has one run per seed, in a group with the name of the run."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._board: Any = None
        self._run: Any = None
        if "tensorboard" in config.report_to:
            with needs("report_to=tensorboard", "trackers", "tensorboard"):
                from torch.utils.tensorboard.writer import SummaryWriter
            self._writer = SummaryWriter
        if "wandb" in config.report_to:
            with needs("report_to=wandb", "trackers", "wandb"):
                import wandb
            self._wandb = wandb

    def write(self, seed: int, row: dict[str, Any]) -> None:
        """Write the metrics of one step of one seed."""
        config = self._config
        step = row["step"]
        numbers = {name: x for name, x in row.items() if isinstance(x, int | float) and name != "step"}
        if "tensorboard" in config.report_to:
            self._board = self._board or self._writer(str(config.folder / "tensorboard"))
            for name, x in numbers.items():
                self._board.add_scalar(f"seed{seed}/{name}", x, step)
        if "wandb" in config.report_to:
            name = f"{config.name}-seed{seed}"
            if self._run is None or self._run.name != name:
                self._finish_run()
                options: dict[str, Any] = {"group": config.name, "name": name, "dir": str(config.folder)}
                project = os.environ.get("WANDB_PROJECT") or "gspo"  # W&B reads its other variables itself
                self._run = self._wandb.init(project=project, config=config.to_dict(), **options)
            self._run.log(numbers, step=step)

    def _finish_run(self) -> None:
        if self._run is not None:
            self._run.finish()

    def close(self) -> None:
        """Flush and close all trackers."""
        self._finish_run()
        if self._board is not None:
            self._board.close()
