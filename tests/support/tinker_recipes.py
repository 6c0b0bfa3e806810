"""The cookbook's recipes, unmodified and offline, in the environment of `make nightly-tinker`.

A recipe asks the hub for a tokenizer and for rows by name. It is started in a folder that has folders of these names,
which transformers and datasets prefer to the hub.
"""

import json
import os
import random
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.engine_harness import save_random_model, tiny_config
from tests.support.odd_tokenizers import Folder
from tests.support.paths import REPO, TINKER_ENVIRONMENT

# The cookbook chooses the form of a conversation by the model's name: for this one "User: ...", which needs no special
# tokens.
BASE_MODEL = "Qwen/Qwen3-8B-Base"
# The first question of rl_numerics_check takes 1,200 tokens.
CONTEXT_TOKENS = 4096
# rl_basic and sl_basic take 128 rows at once.
TRAIN_ROWS, TEST_ROWS = 160, 8


@dataclass(frozen=True, slots=True)
class RecipeRun:
    """What a recipe left."""

    output: str
    metrics: list[dict[str, Any]]  # the rows of its metrics.jsonl
    log_path: Path  # also has checkpoints.jsonl


def recipe_model(directory: Path) -> Path:
    """A small Qwen3 of random weights, with a tokenizer as Qwen3 has it."""
    Folder("qwen3", random.Random(0)).write(directory)
    config = tiny_config(
        vocab_size=512, max_position_embeddings=CONTEXT_TOKENS, initializer_range=0.05
    )
    save_random_model(directory, config, rng_seed=1)
    return directory


def sums(rng: random.Random, rows: int) -> Iterator[tuple[int, int, int]]:
    """Two numbers, and a wrong sum."""
    for _ in range(rows):
        one, other = rng.randint(1, 9), rng.randint(1, 9)
        yield one, other, one + other + rng.randint(1, 5)


def conversation(one: int, other: int, _wrong: int) -> dict[str, Any]:
    question = {"role": "user", "content": f"What is {one} plus {other}?"}
    return {"messages": [question, {"role": "assistant", "content": f"{one + other}"}]}


def school_task(one: int, other: int, _wrong: int) -> dict[str, Any]:
    question = f"Ann has {one} apples and buys {other} more. How many does she have?"
    return {"question": question, "answer": f"{one} + {other} = {one + other}\n#### {one + other}"}


def comparison(one: int, other: int, wrong: int) -> dict[str, Any]:
    start = f"\n\nHuman: What is {one} plus {other}?\n\nAssistant: "
    return {"chosen": f"{start}{one + other}", "rejected": f"{start}{wrong}"}


def question(one: int, other: int, _wrong: int) -> dict[str, Any]:
    return {"question": f"What is {one} plus {other}?"}


def line(one: int, other: int, wrong: int) -> dict[str, Any]:
    """A line of a document. rl_numerics_check asks how often a word stands in it."""
    return {"text": f"Between {one} and {wrong} many came before {other} , and most left later .\n"}


# The rows of each repository of the hub, and the name of its configuration.
ROWS = {
    "Salesforce/wikitext": ("wikitext-103-raw-v1", line),
    "zwhe99/DeepMath-103K": ("default", question),
    "HuggingFaceH4/no_robots": ("default", conversation),
    "openai/gsm8k": ("main", school_task),
    "Anthropic/hh-rlhf": ("default", comparison),
}


def make_shadow(folder: Path, model: Path, train_rows: int = TRAIN_ROWS) -> Path:
    """A folder to start recipes in: the tokenizer of the model under BASE_MODEL, and rows of our own."""
    tokenizer = folder / BASE_MODEL
    tokenizer.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / name, tokenizer)
    for repository, (config, row) in ROWS.items():
        directory, rng = folder / repository, random.Random(0)
        directory.mkdir(parents=True)
        files = ""
        for split, count in (("train", train_rows), ("test", TEST_ROWS)):
            lines = [json.dumps(row(*each)) for each in sums(rng, count)]
            (directory / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
            files += f"  - split: {split}\n    path: {split}.jsonl\n"
        head = f"configs:\n- config_name: {config}\n  data_files:\n{files}"
        (directory / "README.md").write_text(f"---\n{head}---\n")
    return folder


class Recipe:
    """A recipe that runs, in a folder of `make_shadow`."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        base_url: str,
        key: str,
        folder: Path,
        lora_seed: int | None = None,
    ) -> None:
        """Start it.

        module: below `tinker_cookbook.recipes`, such as "sl_loop".
        arguments: the recipe's own, as `name=value`; `model_name` and `log_path` are given besides.
        key: it begins with "tml-".
        lora_seed: of the models that it makes (`tinker_seeded`); None: the recipe names none, so each run has another.
        """
        number = len(list(folder.glob("output-*")))
        self.log_path = folder / f"log-{module}-{number}"
        self._output = folder / f"output-{module}-{number}"
        seeded = [str(REPO / "tests/support/tinker_seeded.py"), str(lora_seed)]
        self._command = [
            str(TINKER_ENVIRONMENT / "venv" / "bin" / "python"),
            *(["-m"] if lora_seed is None else seeded),
            f"tinker_cookbook.recipes.{module}",
            f"model_name={BASE_MODEL}",
            f"log_path={self.log_path}",
            f"base_url={base_url}",
            *arguments,
        ]
        environment = {
            "PATH": os.defpath,
            "HOME": str(folder),  # the caches of the libraries, too
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "TINKER_API_KEY": key,
        }
        with self._output.open("wb") as sink:
            self._process = subprocess.Popen(
                self._command,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
            )

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def rows(self) -> list[dict[str, Any]]:
        """The rows of its metrics.jsonl so far."""
        path = self.log_path / "metrics.jsonl"
        whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
        return [json.loads(line) for line in whole.splitlines()]

    def wait(self, timeout_s: float) -> RecipeRun:
        """Wait for its end, which must be a good one."""
        try:
            code = self._process.wait(timeout_s)
        finally:
            self.kill()
        output = self._output.read_text(errors="replace")
        assert code == 0, f"{' '.join(self._command)}:\n{output[-4000:]}"
        return RecipeRun(output, self.rows(), self.log_path)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def run_recipe(
    module: str, arguments: Sequence[str], base_url: str, key: str, folder: Path, timeout_s: float
) -> RecipeRun:
    """Run a recipe to its end; the arguments are those of `Recipe`."""
    return Recipe(module, arguments, base_url, key, folder).wait(timeout_s)
