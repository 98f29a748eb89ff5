"""Write GSM8K as parquet files in verl's format, for verl_gspo.sh.

python examples/verl_data.py --output data/gsm8k          # downloads openai/gsm8k (5 MB)
python examples/verl_data.py --output data/toy --toy      # no download: sums of two numbers in the same format
"""

import argparse
from pathlib import Path

from datasets import Dataset, load_dataset

parser = argparse.ArgumentParser()
parser.add_argument("--output", type=Path, default=Path("data/gsm8k"), help="folder of train.parquet and test.parquet")
parser.add_argument("--toy", action="store_true", help="generated problems, without a download")
options = parser.parse_args()

# verl's reward for the data source openai/gsm8k looks for the number after "####".
INSTRUCTION = ' Let\'s think step by step and output the final answer after "####".'


def toy(first, last):
    sums = [(a, b) for a in range(first, last) for b in range(8)]
    return Dataset.from_list(
        [{"question": f"{a}+{b}=", "answer": f"{a} + {b} = {a + b}\n#### {a + b}"} for a, b in sums]
    )


def in_verls_format(row, index, instruction):
    return {
        "data_source": "openai/gsm8k",  # chooses verl's reward function
        "prompt": [{"role": "user", "content": row["question"] + instruction}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": row["answer"].split("####")[1].strip().replace(",", "")},
        "extra_info": {"index": index},
    }


if options.toy:
    splits = {"train": toy(0, 8), "test": toy(8, 10)}
    instruction = ""
else:
    splits = {name: load_dataset("openai/gsm8k", "main", split=name) for name in ("train", "test")}
    instruction = INSTRUCTION
options.output.mkdir(parents=True, exist_ok=True)
for name, rows in splits.items():
    path = options.output / f"{name}.parquet"
    rows = rows.map(
        in_verls_format, with_indices=True, fn_kwargs={"instruction": instruction}, remove_columns=rows.column_names
    )
    rows.to_parquet(path)
    print(f"{len(rows)} problems in {path}")
