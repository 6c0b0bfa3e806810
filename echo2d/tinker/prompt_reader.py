"""What a client asks of a prompt, from the model's logits: a few tokens at a time, so that a long one fits.

Suffixes of names: n = the logits of a block, v = vocabulary, k = top tokens or alternatives, c = cells of the client's
targets. Row i of logits is for the token i + 1.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echo2d.tinker.prompts import PromptCall, PromptScores


class PromptReader:
    """Takes the logits of `rows_n`, in this order, and fills `scores`."""

    def __init__(self, call: PromptCall, device: torch.device) -> None:
        self.scores = PromptScores.empty(call)
        self._call, self._device = call, device
        rows = len(call.tokens_t) - 1
        # Logprobs and top tokens are those of rows from here on.
        self._first = rows - call.last if call.logprobs or call.top_tokens else rows
        wanted_t = np.arange(rows) >= self._first
        # The cells with a target, and their rows.
        self._cells_c = np.zeros(0, np.int64)
        self._rows_c = np.zeros(0, np.int64)
        if call.targets is not None:
            self._cells_c = np.flatnonzero(call.targets.tokens_c >= 0)
            self._rows_c = call.targets.rows_c[self._cells_c]
            wanted_t[self._rows_c] = True
        self.rows_n = np.flatnonzero(wanted_t | (call.alternatives > 0))
        self._read = 0
        self._random = torch.Generator(device)
        if call.rng_seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(call.rng_seed)

    def read(self, logits_nv: Tensor) -> None:
        """Take the next logits."""
        rows_n = self.rows_n[self._read : self._read + len(logits_nv)]
        self._read += len(rows_n)
        normalizer_n = logits_nv.logsumexp(1)
        self._read_top(rows_n, logits_nv, normalizer_n)
        self._read_targets(rows_n, logits_nv, normalizer_n)
        if self._call.alternatives:
            self._draw(rows_n, logits_nv, normalizer_n)

    def _read_top(self, rows_n: NDArray[np.int64], logits_nv: Tensor, normalizer_n: Tensor) -> None:
        """The logprobs of the prompt, and the most likely tokens."""
        call, scores = self._call, self.scores
        begin = int(np.searchsorted(rows_n, self._first))
        tokens_n = rows_n[begin:] + 1
        logits_nv, normalizer_n = logits_nv[begin:], normalizer_n[begin:]
        if call.logprobs:
            own_n = logits_nv.gather(1, self._here(call.tokens_t[tokens_n])[:, None])[:, 0]
            scores.logprobs_t[tokens_n] = (own_n - normalizer_n).cpu().numpy()
        if call.top_tokens:
            top_nk, found_nk = logits_nv.topk(call.top_tokens)
            scores.top_tokens_tk[tokens_n] = found_nk.cpu().numpy()
            scores.top_logprobs_tk[tokens_n] = (top_nk - normalizer_n[:, None]).cpu().numpy()

    def _read_targets(
        self, rows_n: NDArray[np.int64], logits_nv: Tensor, normalizer_n: Tensor
    ) -> None:
        if self._call.targets is None:
            return
        begin, end = np.searchsorted(self._rows_c, (rows_n[0], rows_n[-1] + 1))
        cells_c = self._cells_c[begin:end]
        places_c = self._here(np.searchsorted(rows_n, self._rows_c[begin:end]))
        tokens_c = self._here(self._call.targets.tokens_c[cells_c])
        found_c = logits_nv[places_c, tokens_c] - normalizer_n[places_c]
        self.scores.targets_c[cells_c] = found_c.cpu().numpy()

    def _draw(self, rows_n: NDArray[np.int64], logits_nv: Tensor, normalizer_n: Tensor) -> None:
        """Draw tokens, with replacement."""
        temperature, count = self._call.temperature, self._call.alternatives
        if temperature:
            # On a GPU a chance that is not a number would end the process.
            chances_nv = (logits_nv / temperature).softmax(1).nan_to_num(nan=1.0)
            found_nk = chances_nv.multinomial(count, replacement=True, generator=self._random)
        else:
            found_nk = logits_nv.argmax(1)[:, None].expand(-1, count)
        self.scores.alternatives_tk[rows_n] = found_nk.cpu().numpy()
        logprobs_nk = logits_nv.gather(1, found_nk) - normalizer_n[:, None]
        self.scores.alternative_logprobs_tk[rows_n] = logprobs_nk.cpu().numpy()

    def _here(self, values: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(values).to(self._device)
