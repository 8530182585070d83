"""A tiny random model learns on a CPU, in a minute or two: the Pi harness, rollouts and training side by side.

    python examples/learn_tiny.py /tmp/tiny --rounds 12

The model has 100,000 random parameters and a vocabulary of bytes. Pi asks it to say something, and prints what it said
once it ended its turn, which a random model seldom does. The reward is the share of small letters in that: what GRPO
has to find is to speak in letters and to come to an end. `--shuffled` gives every attempt a reward of chance instead:
then nothing is learned.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the judge, at the end, runs in the rollouts: they have no use for torch
    from polar_toolkit.rollout.evaluators import Bench

ENDS = ("<|im_start|>", "<|im_end|>")
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = ("word", "line", "name", "song", "joke", "greeting", "wish", "story")


def main() -> None:
    """Make what is needed in a new folder, run the loop there, and print how the reward went."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shuffled", action="store_true")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    if not (asked.folder / "model").is_dir():
        make_model(asked.folder / "model", asked.seed)
    write_tasks(asked.folder / "tasks.jsonl", "by_chance" if asked.shuffled else "letters")
    with engine(asked.folder) as url:
        (asked.folder / "loop.toml").write_text(LOOP.format(url=url, rounds=asked.rounds, seed=asked.seed))
        command = [sys.executable, "-c", "from polar_train.entry import main; main()"]
        ended = subprocess.run([*command, "loop", str(asked.folder / "loop.toml")], check=False)
    if ended.returncode:
        sys.exit(ended.returncode)
    for number, share in enumerate(letters_by_round(asked.folder / "out"), start=1):
        print(f"round {number}: {share:.3f} {'#' * round(60 * share)}")


LOOP = """
model = "model"
out = "out"
updates = {rounds}
seed = {seed}
threads = 1

[update]
lr = 0.015

[lag]
max = 1

[engines]
urls = ["{url}"]

[rollout]
tasks = "tasks.jsonl"
harness = "pi"
samples = 8
groups = 4
seed = {seed}
sampling = {{ max_new_tokens = 64 }}
pools = {{ run = 8 }}
"""


def make_model(folder: Path, seed: int) -> None:
    """A random two-layer Qwen3 whose tokens are bytes."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(list(ENDS))
    end = tokenizer.token_to_id(ENDS[1])
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(alphabet) + len(ENDS), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=16384,
        tie_word_embeddings=True, eos_token_id=end, pad_token_id=end,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=ENDS[1], chat_template=CHAT).save_pretrained(folder)


def write_tasks(file: Path, judge: str) -> None:
    """A task for each of WORDS."""
    check = {"kind": "callable", "callable": f"{Path(__file__).resolve()}:{judge}"}
    rows = [{"id": word, "instruction": f"Say a {word}.", "check": check} for word in WORDS]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@contextlib.contextmanager
def engine(folder: Path) -> Iterator[str]:
    """The URL of an embedded engine that serves the model."""
    command = [sys.executable, "-c", "from polar_train.entry import main; main()", "engine", str(folder / "model")]
    command += ["--embedded", "--port", "0", "--threads", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            ready = process.stdout.readline().split()
            if not ready:
                sys.exit("the engine did not start")
            yield ready[2]
        finally:
            process.terminate()


def letters_by_round(out: Path) -> list[float]:
    """The mean share of small letters in what was printed, whatever was rewarded."""
    import polars

    files = sorted((out / "rounds").glob("*/*/rollouts.parquet"))
    parts = [polars.read_parquet(file)["reward_parts"].to_list() for file in files]
    return [sum(json.loads(part).get("letters", 0.0) for part in each) / len(each) for each in parts]


def letters(bench: Bench) -> dict[str, float]:
    """The reward: the share of small letters among what is no white space; 0 when nothing was printed."""
    printed = "".join(bench.stdout.read_text(errors="replace").split())
    share = sum("a" <= letter <= "z" for letter in printed) / max(1, len(printed))
    return {"reward": share, "letters": share}


def by_chance(bench: Bench) -> dict[str, float]:
    """A reward that says nothing about what was printed."""
    return letters(bench) | {"reward": random.Random(os.urandom(8)).random()}


if __name__ == "__main__":
    main()
