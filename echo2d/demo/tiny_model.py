"""Makes a tiny real model for the demo: Qwen3, 223 k parameters, pre-trained on `sort_digits`.

The model is trained by supervised steps on new prompts, until the right answer has probability >= `accuracy_stop` at
temperature 1. So GRPO still has something to improve. This takes a few seconds on one core. On one machine the same
recipe gives the same bytes.

Accuracies are measured without sampling, because each prompt has one right answer. The answer's probability is the
product of its tokens' probabilities. Greedy decoding gives the answer exactly if each of its tokens is the most likely
one. One teacher-forced pass measures both.
"""

import dataclasses
import hashlib
import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echo2d.tasks.base import Prompt
from echo2d.tasks.sort_digits import (
    EOS,
    HELD_OUT_PROMPTS,
    PAD,
    VOCABULARY,
    SortDigits,
    answer,
    write_tokenizer,
)

if TYPE_CHECKING:
    import torch

# Raise this number when a change of the code changes the model of a recipe. Cached models of older numbers are ignored.
_FORMAT = 1
BATCH_MAX = 512  # rows of one forward pass while measuring


@dataclass(frozen=True, slots=True)
class TinyRecipe:
    """Everything that determines the weights. rng_seed: the seed of the initial weights and the prompts."""

    rng_seed: int = 0
    digits_min: int = 8
    digits_max: int = 8
    accuracy_stop: float = 0.22
    steps_max: int = 500  # the demo's task needs 40 to 80
    batch: int = 128
    lr: float = 2e-3
    warmup_steps: int = 30
    hidden_size: int = 96
    layers: int = 2


def make_tiny_model(cache: Path, recipe: TinyRecipe | None = None) -> Path:
    """The directory of the recipe's model under `cache`, in Hugging Face's form. It is made now unless it exists.

    RuntimeError: `steps_max` steps did not reach `accuracy_stop`.
    """
    recipe = recipe or TinyRecipe()
    directory = cache / f"tiny-{_key(recipe)}"
    if directory.is_dir():
        return directory
    cache.mkdir(parents=True, exist_ok=True)
    spare = Path(tempfile.mkdtemp(prefix=".tiny-", dir=cache))
    try:
        _save(_pretrain(recipe), spare)
        spare.chmod(0o755)
        spare.rename(directory)
    except OSError:
        # Another process may have made the directory first.
        if not directory.is_dir():
            raise
    finally:
        shutil.rmtree(spare, ignore_errors=True)
    return directory


def held_out_prompts(recipe: TinyRecipe | None = None) -> list[Prompt]:
    """The fixed evaluation prompts of the recipe's task."""
    recipe = recipe or TinyRecipe()
    task = SortDigits(digits_min=recipe.digits_min, digits_max=recipe.digits_max, split="heldout")
    return [task.prompt(index) for index in range(HELD_OUT_PROMPTS)]


def greedy_accuracy(directory: Path, prompts: Sequence[Prompt]) -> float:
    """The share of prompts to which the model in `directory` gives the right answer, by greedy
    decoding in float32.
    """
    return accuracies(load_tiny_model(directory), prompts)[0]


def _key(recipe: TinyRecipe) -> str:
    described = json.dumps([_FORMAT, dataclasses.asdict(recipe)], sort_keys=True)
    return hashlib.blake2b(described.encode(), digest_size=8).hexdigest()


def load_tiny_model(directory: Path) -> Any:
    """Load the model in float32, to measure it."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, local_files_only=True
    )
    return model.eval()


def _save(model: Any, directory: Path) -> None:
    import torch
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model.to(torch.bfloat16).save_pretrained(directory)
    write_tokenizer(directory)


def _new_model(recipe: TinyRecipe) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=recipe.hidden_size,
        intermediate_size=256,
        num_hidden_layers=recipe.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
        max_position_embeddings=128,
        initializer_range=0.05,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def _pretrain(recipe: TinyRecipe) -> Any:
    import torch

    task = SortDigits(recipe.rng_seed, recipe.digits_min, recipe.digits_max)
    # The check for the stop uses 256 prompts. Their indices are far beyond those of training.
    checks = [task.prompt((1 << 40) + index) for index in range(256)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.rng_seed)
        model = _new_model(recipe)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.lr, betas=(0.9, 0.95), weight_decay=0.01
    )
    for step in range(1, recipe.steps_max + 1):
        first = (step - 1) * recipe.batch
        loss = _answer_logprobs(
            model, [task.prompt(first + index) for index in range(recipe.batch)]
        )[0]
        optimizer.param_groups[0]["lr"] = recipe.lr * min(1.0, step / recipe.warmup_steps)
        optimizer.zero_grad()
        torch.autograd.backward(-loss.sum() / loss.count_nonzero())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 2 == 0 and accuracies(model, checks)[1] >= recipe.accuracy_stop:
            return model
    raise RuntimeError(
        f"no accuracy of {recipe.accuracy_stop} in {recipe.steps_max} steps of {recipe}"
    )


def accuracies(model: Any, prompts: Sequence[Prompt]) -> tuple[float, float]:
    """The share of prompts answered right by greedy decoding, and the mean probability of a right
    answer.
    """
    import torch

    greedy = sampled = 0.0
    with torch.inference_mode():
        for first in range(0, len(prompts), BATCH_MAX):
            logprobs, best = _answer_logprobs(model, prompts[first : first + BATCH_MAX])
            greedy += float(best.all(dim=1).sum())
            sampled += float(logprobs.sum(dim=1).exp().sum())
    return greedy / len(prompts), sampled / len(prompts)


def _answer_logprobs(
    model: Any, prompts: Sequence[Prompt]
) -> tuple["torch.Tensor", "torch.Tensor"]:
    """Teacher-force the right answers. Returns log p of each token [b, t], 0 outside the answer, and whether the token
    is the most likely one [b, t].
    """
    import torch

    rows = [(*prompt.tokens, *answer(prompt.tokens)) for prompt in prompts]
    width = max(map(len, rows))
    tokens = torch.tensor([(*row, *(PAD,) * (width - len(row))) for row in rows])
    positions = torch.arange(1, width)
    starts = torch.tensor([[len(prompt.tokens)] for prompt in prompts])
    ends = torch.tensor([[len(row)] for row in rows])
    inside = (positions >= starts) & (positions < ends)
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1].float()
    targets = tokens[:, 1:]
    logprobs = torch.log_softmax(logits, dim=-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return logprobs.masked_fill(~inside, 0.0), (logits.argmax(-1) == targets) | ~inside
