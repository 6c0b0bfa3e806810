"""The task of the demo: sort the digits of the prompt.

    prompt "31415926>"  ->  answer "11234569<eos>"

The reward is 1.0 for exactly that answer, <eos> included, else 0.0. This module also holds the tiny
model's alphabet, as ids and as a Hugging Face tokenizer. There is no start token.

For given lengths, the held-out prompts are the same HELD_OUT_PROMPTS for every `rng_seed`. They are
all different and never appear in the training sequence.
"""

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from echo2d.errors import OperatorFault
from echo2d.tasks.base import Prompt, Split

VOCABULARY = ("<pad>", "<eos>", "=", *"0123456789", "+", ">", "<", "#")
PAD, EOS = 0, 1
ASK = VOCABULARY.index(">")

HELD_OUT_PROMPTS = 200
# Four digits make 10,000 prompts, of which the held-out ones are a small share.
DIGITS_FEWEST = 4
# With this many digits, prompt and answer are 102 tokens. The tiny model learns about 8 digits.
DIGITS_MOST = 50


class SortDigits:
    """Prompts of `digits_min` to `digits_max` random digits; the length is drawn per prompt."""

    name = "sort_digits"
    stop_token_ids: Sequence[int] = (EOS,)

    def __init__(
        self, rng_seed: int = 0, digits_min: int = 8, digits_max: int = 8, split: Split = "train"
    ) -> None:
        if not DIGITS_FEWEST <= digits_min <= digits_max <= DIGITS_MOST:
            raise OperatorFault(
                f"sort_digits: expected {DIGITS_FEWEST} <= digits_min <= digits_max <= {DIGITS_MOST}, "
                f"got {digits_min} and {digits_max}"
            )
        if split not in ("train", "heldout"):
            raise OperatorFault(f"sort_digits: expected split 'train' or 'heldout', got {split!r}")
        self._lengths = range(digits_min, digits_max + 1)
        self._rng_seed = rng_seed
        self._split = split
        self._held_out = self._draw_held_out()
        self._held_out_set = frozenset(self._held_out)

    def prompt(self, index: int) -> Prompt:
        """Return prompt number `index`; held-out prompts repeat after HELD_OUT_PROMPTS."""
        digits = (
            self._held_out[index % HELD_OUT_PROMPTS]
            if self._split == "heldout"
            else self._draw_train(index)
        )
        return Prompt(
            tokens=(*(VOCABULARY.index("0") + d for d in digits), ASK),
            tags={"digits": str(len(digits))},
        )

    def reward(self, prompt: Prompt, output: Sequence[int]) -> float:
        return float(tuple(output) == answer(prompt.tokens))

    def _draw_held_out(self) -> tuple[tuple[int, ...], ...]:
        draws = self._draws(
            random.Random(f"sort_digits heldout {self._lengths.start} {self._lengths.stop}")
        )
        # A dict as an ordered set: the order must be the same in every process.
        distinct: dict[tuple[int, ...], None] = {}
        while len(distinct) < HELD_OUT_PROMPTS:
            distinct.setdefault(next(draws))
        return tuple(distinct)

    def _draw_train(self, index: int) -> tuple[int, ...]:
        draws = self._draws(random.Random(f"sort_digits train {self._rng_seed} {index}"))
        return next(digits for digits in draws if digits not in self._held_out_set)

    def _draws(self, rng: random.Random) -> Iterator[tuple[int, ...]]:
        while True:
            yield tuple(rng.choices(range(10), k=rng.choice(self._lengths)))


def answer(prompt: Sequence[int]) -> tuple[int, ...]:
    """Return the only right output for the tokens of a prompt."""
    return (*sorted(token for token in prompt if token != ASK), EOS)


def write_tokenizer(directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json: one token per character of the alphabet."""
    # Imported here because the task itself starts faster without it.
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: index for index, token in enumerate(VOCABULARY)}
    # Characters outside the alphabet become this token.
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="#"))  # noqa: S106 - no password
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([VOCABULARY[PAD], VOCABULARY[EOS]])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": VOCABULARY[PAD],
        "eos_token": VOCABULARY[EOS],
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
