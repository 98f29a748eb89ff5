"""Train a language model with GSPO and tools in TRL: look into a box, and answer with the letter in it.

TRL runs the tools: the public methods of an environment, which every answer has to itself. The tokens of their results
are masked in the loss. The script downloads nothing. Install: pip install -e '.[train,trl]'

    python examples/trl_tools.py   # a tiny random model; minutes on a CPU
"""

import argparse
import random

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from gspo_kernels.integrations.trl import GSPOConfig, GSPOTrainer

SYMBOLS = ["<pad>", "<eos>", "<unk>", "<user>", "<assistant>", "<tool>", "look()", *"abcd?"]
# A conversation: <user>?<assistant>look()<eos><tool>b<assistant>b<eos>
TEMPLATE = """\
{%- for message in messages %}<{{ message.role }}>{{ message.content }}
{%- for call in message.tool_calls or [] %}{{ call.function.name }}(
{%- for name, value in call.function.arguments.items() %}{{ name }}={{ value }}{% endfor %}){% endfor %}
{%- if message.role == 'assistant' %}<eos>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""
# Where the calls in an answer are. TRL has such a description for the chat templates of common models.
CALL = {"type": "function", "function": {"name": "look", "arguments": {}}}
RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<assistant>",
    "fields": {
        "tool_calls": {"open": "look()", "close": "<eos>", "repeats": True, "transform": CALL},
        "content": {"close": "<eos>"},
    },
}


class Box:
    """A box with one of four letters."""

    def reset(self, **row):
        """Prepare the next answer. TRL passes the columns of the dataset."""
        self.letter, self.looks = random.choice("abcd"), 0

    def look(self) -> str:
        """
        Look into the box.

        Returns:
            The letter in it.
        """
        self.looks += 1
        return self.letter


def right(completions, environments, **kwargs):
    """Reward one look with a quarter, and answering with the letter, and nothing else, with the rest."""
    rewards = []
    for (*_, last), box in zip(completions, environments):
        text = last["content"] if last["role"] == "assistant" else ""
        in_place = (text[:1] == box.letter) / max(1, len(text))
        rewards.append((1 + 3 * in_place) / 4 if box.looks == 1 else 0.0)
    return rewards


def tiny_policy():
    """Make a Qwen3 with random weights, and a tokenizer with SYMBOLS."""
    symbols = Tokenizer(models.WordLevel({symbol: i for i, symbol in enumerate(SYMBOLS)}, unk_token="<unk>"))
    symbols.pre_tokenizer = pre_tokenizers.Split(Regex(r"<\w+>|look\(\)|."), "isolated")
    symbols.decoder = decoders.Fuse()
    named = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=symbols, **named)
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, RESPONSE
    config = Qwen3Config(
        vocab_size=len(SYMBOLS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.05,  # the default of 0.02 is for wider models
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config), tokenizer


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()

    torch.manual_seed(0)
    random.seed(0)
    model, tokenizer = tiny_policy()
    gpu = torch.cuda.is_available()
    config = GSPOConfig(
        output_dir="runs/trl_tools",
        learning_rate=3e-3,
        per_device_train_batch_size=32,
        num_generations=16,
        max_completion_length=10,  # of all turns of an answer, with the results of tools
        max_tool_calling_iterations=1,
        max_steps=options.steps,
        logging_steps=max(1, options.steps // 10),
        bf16=gpu,
        use_cpu=not gpu,
    )
    trainer = GSPOTrainer(
        model=model,
        reward_funcs=right,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "?"}]}] * 64),
        processing_class=tokenizer,
        environment_factory=Box,
    )
    trainer.train()
    if trainer.is_world_process_zero():
        logs = [row for row in trainer.state.log_history if "reward" in row]
        for name in ("reward", "tools/call_frequency"):
            first, last = logs[0][name], logs[-1][name]
            print(f"mean {name}: {first:.2f} in the first tenth of the updates, {last:.2f} in the last")


if __name__ == "__main__":
    main()
