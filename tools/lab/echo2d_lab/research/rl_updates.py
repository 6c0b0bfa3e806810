"""Makes consecutive policy versions by real AdamW steps, with which deltas are measured.

    python -m echo2d_lab.research.rl_updates OUT --lr 1e-6

    OUT/base-60m-0   the base of every run: a bf16 Qwen3 model of that size, of that seed
    OUT/1e-6/v1 ...  the versions of a run at that learning rate, as a learner would publish them

The base is trained on a synthetic language until its weights look like those of a trained model. Then come GRPO steps
as in `learner`: the policy's own samples, advantages normalised in their group, float32 master weights that begin as
the bf16 ones, AdamW with a constant rate, gradients clipped to 1. It runs on the CPU, and gives the same versions on
the same machine with the same number of threads. Existing versions are not made again.
"""

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

PRETRAIN_LR, PRETRAIN_WARMUP, PRETRAIN_ROWS = 1e-3, 20, 32
PROMPTS, GROUP_SIZE = 4, 8  # prompts of a step, and samples of each
PROMPT_TOKENS, OUTPUT_TOKENS = 8, 24
SUCCESSORS = 16  # tokens that may follow a token, with Zipf probabilities
BETAS = (0.9, 0.999)


class Size(NamedTuple):
    """The size of a model."""

    hidden: int
    layers: int
    vocabulary: int


SIZES = {
    "0.5m": Size(128, 2, 1024),
    "4m": Size(256, 4, 4096),
    "14m": Size(384, 6, 8192),
    "60m": Size(640, 10, 16384),
}


class Language:
    """Sequences in which each token has a few successors, some much likelier than others. Token 0 is padding."""

    def __init__(self, vocabulary: int, rng_seed: int) -> None:
        self._chance = torch.Generator().manual_seed(rng_seed)
        self._common = 1 / torch.arange(1, vocabulary)
        draws = torch.multinomial(
            self._common, vocabulary * SUCCESSORS, replacement=True, generator=self._chance
        )
        self._successors = 1 + draws.view(vocabulary, SUCCESSORS)

    def rows(self, count: int, length: int) -> torch.Tensor:
        tokens = 1 + torch.multinomial(
            self._common, count, replacement=True, generator=self._chance
        )
        rows = [tokens]
        while len(rows) < length:
            ways = torch.multinomial(
                self._common[:SUCCESSORS], count, replacement=True, generator=self._chance
            )
            tokens = self._successors[tokens, ways]
            rows.append(tokens)
        return torch.stack(rows, dim=1)


def new_model(size: Size) -> Any:
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=size.vocabulary,
            hidden_size=size.hidden,
            intermediate_size=3 * size.hidden,
            num_hidden_layers=size.layers,
            num_attention_heads=size.hidden // 64,
            num_key_value_heads=size.hidden // 128,
            head_dim=64,
            tie_word_embeddings=True,
            max_position_embeddings=128,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def pretrained(size: Size, language: Language, steps: int) -> Any:
    model = new_model(size)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=PRETRAIN_LR, betas=(0.9, 0.95), weight_decay=0.01
    )
    for step in range(1, steps + 1):
        rows = language.rows(PRETRAIN_ROWS, PROMPT_TOKENS + OUTPUT_TOKENS)
        logits = model(input_ids=rows, use_cache=False).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.param_groups[0]["lr"] = PRETRAIN_LR * min(1.0, step / PRETRAIN_WARMUP)
        update(model, optimizer, loss)
        if step % 10 == 0 or step == steps:
            print(f"base: step {step}/{steps}  loss {loss.item():.3f}", flush=True)
    return model


def update(model: Any, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> float:
    """Make one step. Returns the norm of the gradient before it was clipped."""
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(norm)


def versions(model: Any, language: Language, lr: float, steps: int) -> Iterator[Any]:
    """The model after each GRPO step. The reward is the number of even tokens in a sample."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=BETAS, weight_decay=0.0)
    for step in range(1, steps + 1):
        prompts = language.rows(PROMPTS, PROMPT_TOKENS).repeat_interleave(GROUP_SIZE, dim=0)
        with torch.inference_mode():
            sampled = model.generate(
                prompts, do_sample=True, top_k=0, max_new_tokens=OUTPUT_TOKENS, pad_token_id=0
            )
        rows = sampled.clone()
        outputs = rows[:, PROMPT_TOKENS:]
        rewards = (outputs % 2 == 0).float().mean(dim=1).view(PROMPTS, GROUP_SIZE)
        spread = rewards.std(dim=1, keepdim=True) + 1e-4
        advantages = ((rewards - rewards.mean(dim=1, keepdim=True)) / spread).flatten()
        logits = model(input_ids=rows, use_cache=False).logits[:, PROMPT_TOKENS - 1 : -1]
        surprise = cross_entropy(logits.flatten(0, 1), outputs.flatten(), reduction="none").view_as(
            outputs
        )
        norm = update(model, optimizer, (advantages[:, None] * surprise).mean())
        print(
            f"lr {lr:g}: step {step}/{steps}  reward {rewards.mean():.3f}  gradient {norm:.2f}",
            flush=True,
        )
        yield model


def save(model: Any, directory: Path) -> None:
    """Save the model as bf16, in one atomic step; the model itself stays unchanged."""
    spare = directory.with_name(directory.name + ".new")
    shutil.rmtree(spare, ignore_errors=True)
    rounded = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    del rounded["lm_head.weight"]  # it is the same as the embedding, and would be written twice
    model.save_pretrained(spare, state_dict=rounded)
    config = json.loads((spare / "config.json").read_text())
    (spare / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}, indent=2) + "\n")
    words = {str(token): token for token in range(model.config.vocab_size)}
    tokenizer = {"version": "1.0", "model": {"type": "WordLevel", "vocab": words, "unk_token": "0"}}
    (spare / "tokenizer.json").write_text(json.dumps(tokenizer))
    spare.rename(directory)


def load(directory: Path) -> Any:
    """Load the model, to compute in float32."""
    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, local_files_only=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path, help="a folder; made if it is not there")
    parser.add_argument("--lr", nargs="+", default=["1e-6"], help="learning rates; a run for each")
    parser.add_argument(
        "--steps", type=int, default=12, help="of each run; in the first ones twice as much changes"
    )
    parser.add_argument(
        "--keep", type=int, help="the last versions of each run that are kept; all if left out"
    )
    parser.add_argument("--size", choices=SIZES, default="60m", help="parameters, about")
    parser.add_argument("--pretrain", type=int, default=100, help="steps that make the base")
    parser.add_argument("--rng-seed", type=int, default=0, help="of weights, language and samples")
    parser.add_argument(
        "--threads", type=int, default=1, help="of torch; another number rounds otherwise"
    )
    chosen = parser.parse_args()
    disable_progress_bar()
    torch.set_num_threads(chosen.threads)
    torch.manual_seed(chosen.rng_seed)
    size, base = SIZES[chosen.size], chosen.out / f"base-{chosen.size}-{chosen.rng_seed}"
    chosen.out.mkdir(parents=True, exist_ok=True)
    if not base.exists():
        save(pretrained(size, Language(size.vocabulary, chosen.rng_seed), chosen.pretrain), base)
    for lr in chosen.lr:
        folder = chosen.out / lr
        if (folder / f"v{chosen.steps}").exists():
            continue
        folder.mkdir(exist_ok=True)
        torch.manual_seed(chosen.rng_seed)
        run = versions(
            load(base), Language(size.vocabulary, chosen.rng_seed), float(lr), chosen.steps
        )
        for step, model in enumerate(run, 1):
            if chosen.keep is None or step > chosen.steps - chosen.keep:
                save(model, folder / f"v{step}")


if __name__ == "__main__":
    main()
