"""The torch.library operators and their autograd.

Each public function calls one differentiable operator. Their backwards call two more:

    linear_log_probs            hidden states, head -> log-probs, entropies     (backward: head_backward)
    policy_loss                 log-probs -> loss                               (backward: scale)
    fused_loss                  hidden states, head -> loss                     (backward: head_backward)

Gradients are computed by formulas, not by autograd. The backward operators have no derivative, so double backward
raises an error. LoRA's product h A^T is another operator, in `adapter.py`.
"""
