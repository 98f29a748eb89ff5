"""Register a rollout "cpu" in verl, so that `main_ppo` runs without a GPU: a Ray actor with a plain sampling loop.

verl imports this module in every process (VERL_USE_EXTERNAL_MODULES). The token that an answer gets depends on its
prompt, its number among the prompt's answers, and the weights only, so two runs with the same weights sample alike.
"""

from __future__ import annotations

import hashlib
from typing import Any

import helpers.verl_cpu  # noqa: F401 - registers the platform "cpu"
import ray
import torch
import transformers
from verl.workers.rollout import base
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

LONGEST = 12  # tokens of an answer
_init_process_group = torch.distributed.init_process_group


def _with_gloo(backend: str | None = None, *arguments: Any, **options: Any) -> Any:
    """verl asks for "cpu:gloo,cpu:gloo" on this platform, which torch refuses."""
    return _init_process_group("gloo" if "gloo" in str(backend) else backend, *arguments, **options)


torch.distributed.init_process_group = _with_gloo


class Sampler:
    """The Ray actor that holds the model."""

    def __init__(self, path: str) -> None:
        torch.set_num_threads(1)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.answers: dict[tuple[int, ...], int] = {}  # how many answers each prompt has got
        self.steps = 0

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **options: Any
    ) -> Any:
        temperature = sampling_params.get("temperature", 1.0)
        key = tuple(prompt_ids)
        self.answers[key] = self.answers.get(key, 0) + 1
        seed = hashlib.sha256(repr((key, self.answers[key])).encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(seed[:4], "big"))
        ids = list(prompt_ids)
        log_probs = []
        with torch.no_grad():
            for _ in range(LONGEST):
                logits = self.model(torch.tensor([ids])).logits[0, -1].double() / temperature
                # Gumbel-max sampling. The two runs' weights differ by rounding. This changes a token only if the two
                # largest values almost tie, which is much rarer than a draw that falls on a boundary of the CDF.
                exponential = torch.empty_like(logits).exponential_(generator=generator)
                token = int((logits - exponential.log()).argmax())
                ids.append(token)
                log_probs.append(logits.log_softmax(-1)[token].item())
                if token == self.model.generation_config.eos_token_id:
                    break
        new = ids[len(prompt_ids) :]
        return TokenOutput(
            token_ids=new, log_probs=log_probs, stop_reason="completed", extra_fields={"global_steps": self.steps}
        )

    async def update(self, weights: dict[str, torch.Tensor], steps: int) -> None:
        self.model.load_state_dict(weights)
        self.steps = steps

    async def nothing(self, *arguments: Any, **options: Any) -> None: ...

    wake_up = sleep = abort_all_requests = resume_generation = nothing
    clear_kv_cache = release_kv_cache = resume_kv_cache = nothing


class Replica(RolloutReplica):
    async def launch_servers(self) -> None:
        name = f"sampler_{self.replica_rank}"
        options: dict[str, Any] = dict(name=name, num_cpus=0, max_concurrency=100)
        self._server_handle = ray.remote(Sampler).options(**options).remote(self.model_config.path)
        self._server_address = name
        self.servers = [self._server_handle]


class Rollout(base.BaseRollout):
    """The side of the trainer's workers, which sends weights to the sampler."""

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...

    async def update_weights(self, weights: Any, global_steps: int | None = None, **options: Any) -> None:
        whole = {name: (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().clone() for name, x in weights}
        await ray.get_actor("sampler_0").update.remote(whole, global_steps)


base._ROLLOUT_REGISTRY["cpu", "async"] = f"{__name__}.Rollout"
RolloutReplicaRegistry.register("cpu", lambda: Replica)
