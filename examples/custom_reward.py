"""Write reward functions, and use them in `gspo train` and in TRL.

`gspo train` takes the reward functions of TRL as they are: they get lists, of all completions and of each column of the
dataset that they ask for by name. It also takes functions of one completion, such as `brief_and_right`. TRL does not.
Install: pip install -e '.[train,trl]'

    gspo train reward=examples/custom_reward.py:brief_and_right                  # a tiny random model; a CPU is enough
    gspo train reward='examples/custom_reward.py:right, 0.2*examples/custom_reward.py:brief'   # a weighted sum
    gspo train model=FOLDER data=problems.jsonl reward=examples/custom_reward.py:brief_and_right
    python examples/custom_reward.py                                             # TRL with the tiny random model
"""

import argparse


def right(completions, answer, **columns):
    """Return the share of each answer's letters that are in their place."""
    return [share_in_place(text, expected) for text, expected in zip(completions, answer)]


def brief(completions, answer, **columns):
    """Return 1 for completions that are not longer than the answer, and less for longer ones."""
    # None: does not apply. It adds nothing to the sum, and does not count in the mean that is logged.
    return [brevity(text, expected) if text.strip() else None for text, expected in zip(completions, answer)]


def brief_and_right(completion: str, answer: str) -> float:
    """Return the product, so that neither a short wrong answer nor a long right one is enough."""
    return share_in_place(completion, answer) * brevity(completion, answer)


def share_in_place(completion: str, answer: str) -> float:
    return sum(a == b for a, b in zip(completion.strip(), answer)) / len(answer)


def brevity(completion: str, answer: str) -> float:
    return len(answer) / max(len(completion.strip()), len(answer))


def main():
    # Imported here, because `gspo train` imports this file for its reward functions alone.
    import torch
    from datasets import Dataset

    from gspo_kernels.integrations.reference_trainer.policy import demo_policy
    from gspo_kernels.integrations.trl import GSPOConfig, GSPOTrainer

    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()

    words = [a + b + c for a in "abcdef" for b in "abcdef" for c in "abcdef"]
    prompts = [{"prompt": f"sort {word}:", "answer": "".join(sorted(word))} for word in words]
    torch.manual_seed(0)
    tiny = demo_policy()
    gpu = torch.cuda.is_available()
    config = GSPOConfig(
        output_dir="runs/custom_reward",
        reward_weights=[1.0, 0.2],
        learning_rate=3e-3,
        per_device_train_batch_size=32,
        num_generations=8,
        max_completion_length=6,
        max_steps=options.steps,
        logging_steps=max(1, options.steps // 10),
        save_strategy="no",
        bf16=gpu,
        use_cpu=not gpu,
    )
    trainer = GSPOTrainer(
        model=tiny.model,
        reward_funcs=[right, brief],
        args=config,
        train_dataset=Dataset.from_list(prompts),
        processing_class=tiny.tokenizer,
    )
    trainer.train()
    for name in ("right", "brief"):
        key = f"rewards/{name}/mean"
        means = [row[key] for row in trainer.state.log_history if key in row]
        print(f"{name}: {means[0]:.2f} in the first tenth of the updates, {means[-1]:.2f} in the last")


if __name__ == "__main__":
    main()
