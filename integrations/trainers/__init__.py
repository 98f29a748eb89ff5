"""Functions that replace functions of other trainers. Each trainer has a module; import that module.

    prime_rl   head, loss                            slime      head, loss
    skyrl      loss, fused_log_probs, log_probs      ms_swift   loss, log_probs
    openrlhf   PolicyLoss                            nemo_rl    log_probs

Each module begins with the lines that install its functions. docs/trainers/others.md has complete lines, and the
versions of the trainers that these functions were written for. No trainer is imported. `slime.head` and `nemo_rl` need
megatron-core.

Every `loss` and `PolicyLoss` is `policy_loss` with the signature of the trainer's loss. The argument `objective`
defaults to the settings of GSPO's paper. To change `objective`, use `functools.partial`, or `partialmethod` in a class.
If one of the trainer's own settings contradicts `objective`, a ValueError names the setting and its value. For all but
prime-rl, Objective.aggregation must be "seq-mean-token-mean", which gives every answer the same weight. prime-rl's
`loss` accepts every aggregation; its docstring says how prime-rl divides the loss.
"""
