"""What a client can ask about the tokens of a prompt, and what it is told. Pure data, with its limits, which are also
those of the most likely tokens of samples.

The model says nothing of the first token. So a matrix [t - 1, ...] has a row for each token from the second one on.

Suffixes of names: t = tokens of the prompt, k = columns, c = the cells that the client has sent, row by row.
Not here: their bytes (`wire`), the model (the learner).
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# The most likely tokens of one token of a prompt or sample, and the alternatives to one of a prompt.
PROMPT_COLUMNS_MAX = 1024
# An answer has at most this many bytes. The 20 most likely tokens at each of 131,072 positions take 20 MiB.
PROMPT_ANSWER_BYTES_MAX = 24 << 20
# In an empty cell of the most likely tokens, beside token 0.
NO_LOGPROB = -99999.0


@dataclass(frozen=True, slots=True)
class PromptTargets:
    """A matrix of tokens in the client's layout. Row i has tokens that may come in place of the token i + 1."""

    shape: tuple[int, int]
    tokens_c: NDArray[np.int64]  # -1: the client wants nothing here
    # Where the cells of each row begin, and the column of each cell. None: all cells were sent.
    row_starts: NDArray[np.int64] | None = None
    columns_c: NDArray[np.int64] | None = None

    @property
    def rows_c(self) -> NDArray[np.int64]:
        rows, width = self.shape
        counts = width if self.row_starts is None else np.diff(self.row_starts)
        return np.repeat(np.arange(rows), counts)

    def fault(self, tokens: int, vocabulary: int) -> str:
        """Why these cannot be the targets of a prompt of this many tokens; empty: they can."""
        if self.shape[0] != tokens - 1:
            return f"expected {tokens - 1} rows, one less than the prompt has tokens; found {self.shape[0]}"
        cells, starts = len(self.tokens_c), self.row_starts
        if starts is None:
            fits = cells == self.shape[0] * self.shape[1]
        else:
            columns_c = np.zeros(0) if self.columns_c is None else self.columns_c
            fits = (
                len(starts) == tokens
                and (starts[0], starts[-1], len(columns_c)) == (0, cells, cells)
                and not (np.diff(starts) < 0).any()
                and not ((columns_c < 0) | (columns_c >= self.shape[1])).any()
            )
        if not fits:
            return f"expected the cells of a matrix {list(self.shape)}; found {cells} others"
        if not ((self.tokens_c >= -1) & (self.tokens_c < vocabulary)).all():
            return f"expected tokens from 0 to {vocabulary - 1}, or -1"
        return "" if (self.tokens_c >= 0).any() else "expected at least one token"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptCall:
    """What a client wants to know of a prompt."""

    tokens_t: NDArray[np.int64]
    logprobs: bool = False  # of its own tokens
    last: int = 0  # logprobs and top tokens are those of this many last tokens
    top_tokens: int = 0  # the most likely tokens in place of each token
    targets: PromptTargets | None = None
    alternatives: int = 0  # tokens that are drawn in place of each token
    temperature: float = 1.0  # of the alternatives
    rng_seed: int | None = None

    @property
    def asks(self) -> bool:
        """Whether the client wants to know anything."""
        return self.logprobs or self.targets is not None or self.top_tokens + self.alternatives > 0

    @property
    def answer_bytes(self) -> int:
        """The most bytes that the numbers of an answer take."""
        each = 4 * self.logprobs + 8 * self.top_tokens + 12 * self.alternatives
        given = self.targets
        cells = 0 if given is None else 4 * len(given.tokens_c)
        if given is not None and given.columns_c is not None:
            cells += 8 * (len(self.tokens_t) + len(given.columns_c))
        return len(self.tokens_t) * each + cells

    def fault(self, vocabulary: int) -> str:
        """Why this cannot be answered; empty: it can."""
        tokens, top_max = len(self.tokens_t), min(PROMPT_COLUMNS_MAX, vocabulary)
        ranges = {
            "topk_prompt_logprobs": (self.top_tokens, 0, top_max),
            "prompt_alt_tokens_k": (self.alternatives, 0, PROMPT_COLUMNS_MAX),
            # A prompt of one token has no logprobs.
            "prompt_logprobs_last_n": (self.last, min(1, tokens - 1), tokens - 1),
        }
        for name, (found, least, most) in ranges.items():
            if not least <= found <= most:
                return f"{name}: expected {least} to {most}; found {found}"
        if self.targets is not None and (fault := self.targets.fault(tokens, vocabulary)):
            return f"target_prompt_logprobs: {fault}"
        if (found := self.answer_bytes) > PROMPT_ANSWER_BYTES_MAX:
            return f"prompt: expected at most {PROMPT_ANSWER_BYTES_MAX} bytes of logprobs; found {found}"
        return ""


class MostLikely(NamedTuple):
    """The most likely tokens at each of n positions, the most likely one first, and their logprobs in nats."""

    tokens_nk: NDArray[np.int32]
    logprobs_nk: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class PromptScores:
    """The answer to a PromptCall, to be filled. Logprobs are those at temperature 1, in nats."""

    logprobs_t: NDArray[np.float32]  # NaN: there is none
    top_tokens_tk: NDArray[np.int32]  # of each token the most likely one first
    top_logprobs_tk: NDArray[np.float32]
    targets_c: NDArray[np.float32]  # 0 where the client wants nothing
    alternatives_tk: NDArray[np.int64]  # [t - 1, k]
    alternative_logprobs_tk: NDArray[np.float32]  # [t - 1, k]

    @classmethod
    def empty(cls, call: PromptCall) -> "PromptScores":
        tokens, top = len(call.tokens_t), (len(call.tokens_t), call.top_tokens)
        others = max(0, tokens - 1), call.alternatives
        return cls(
            np.full(tokens, np.nan, np.float32),
            np.zeros(top, np.int32),
            np.full(top, NO_LOGPROB, np.float32),
            np.zeros(0 if call.targets is None else len(call.targets.tokens_c), np.float32),
            np.zeros(others, np.int64),
            np.zeros(others, np.float32),
        )
