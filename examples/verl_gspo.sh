#!/usr/bin/env bash
# Train with GSPO in verl 0.9.1: Qwen2.5-0.5B-Instruct on GSM8K, on the GPUs of one node.
#
#     pip install . in verl's environment, or pip install '.[verl]'
#     python examples/verl_data.py --output data/gsm8k
#     examples/verl_gspo.sh                                                 # one GPU
#     GPUS=8 MODEL=Qwen/Qwen2.5-7B-Instruct examples/verl_gspo.sh           # eight GPUs, another model
#     examples/verl_gspo.sh trainer.total_training_steps=10 trainer.logger=[console,wandb]   # any setting of verl
#
# A rollout has 256 prompts with 8 answers each. Four updates train on 64 prompts each, as in GSPO's paper.
set -euo pipefail
MODEL=${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}  # name on the hub, or folder
DATA=${DATA:-data/gsm8k}                    # folder of train.parquet and test.parquet
GPUS=${GPUS:-1}

export VERL_ENGINE_VENDOR=gspo  # our log-probs in verl's FSDP engine; set it on every node
loss=(
    actor_rollout_ref.model.external_lib=gspo_kernels.integrations.verl
    actor_rollout_ref.actor.policy_loss.loss_mode=gspo_kernels
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean  # equal weight for every answer
    actor_rollout_ref.actor.clip_ratio_low=3e-4
    actor_rollout_ref.actor.clip_ratio_high=4e-4
    actor_rollout_ref.actor.use_kl_loss=false
    algorithm.adv_estimator=grpo
    algorithm.use_kl_in_reward=false
)
data=(
    data.train_files="$DATA/train.parquet"
    data.val_files="$DATA/test.parquet"
    data.train_batch_size=256
    data.max_prompt_length=512
    data.max_response_length=1024
    data.filter_overlong_prompts=true
)
actor=(
    actor_rollout_ref.model.path="$MODEL"
    actor_rollout_ref.model.use_remove_padding=true  # needs flash-attn
    actor_rollout_ref.model.enable_gradient_checkpointing=true
    actor_rollout_ref.actor.strategy=fsdp2
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.ppo_mini_batch_size=64
    actor_rollout_ref.actor.use_dynamic_bsz=true
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384
)
rollout=(
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.n=8
    actor_rollout_ref.rollout.tensor_model_parallel_size=1
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5
    actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=16384
)
trainer=(
    trainer.logger=[console]
    trainer.project_name=gspo
    trainer.experiment_name=gsm8k
    trainer.default_local_dir=runs/verl_gspo
    trainer.nnodes=1
    trainer.n_gpus_per_node="$GPUS"
    trainer.total_epochs=15
    trainer.save_freq=20
    trainer.test_freq=5
)
exec python -m verl.trainer.main_ppo \
    "${loss[@]}" "${data[@]}" "${actor[@]}" "${rollout[@]}" "${trainer[@]}" "$@"
