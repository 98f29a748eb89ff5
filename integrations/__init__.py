"""Adapters that put the losses into trainers. Import the submodule that you need.

huggingface         use the losses at the head of a transformers model (`fuse_head`)
trl, verl           run these two trainers with our log-probs
megatron            compute log-probs at the output layer of a Megatron Core GPTModel
trainers            losses and log-probs for prime-rl, slime, SkyRL, ms-swift, OpenRLHF and NeMo RL, one module each
tasks               prompts with rewards that a program can compute, for `gspo train` and `gspo compare`
reference_trainer   a complete training loop in plain PyTorch, run by `gspo train`

A trainer whose adapter needs several modules has a folder of its own.
"""
