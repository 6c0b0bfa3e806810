"""Holds the KV cache of running sequences as one batch; sequences enter and leave between tokens.

Rows are sequences, in the order of the caller's list. Columns are right-aligned: row r uses the
last `lengths[r]` columns, and attention masks out the padding before them.

    lengths 5, 3, 4      a a a a a
                         . . b b b
                         . c c c c

Between two calls the cache covers every token of every row, `logits` [rows, vocab] belongs to each
row's next token, and there are exactly max(lengths) columns.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import DynamicCache

from echo2d.engines.torch_engine.policy import InferencePolicy

# Padded tokens of one prefill pass. It bounds the activations: 200 MB at hidden size 4096.
PREFILL_TOKENS_MAX = 8192

Context = Sequence[int]


class DecodeBatch:
    """See the module docstring. `add` appends rows; only `keep` changes the index of a row."""

    def __init__(self, policy: InferencePolicy) -> None:
        self._policy = policy
        self._cache = DynamicCache()
        self._lengths: list[int] = []
        self._logits: Tensor | None = None

    def __len__(self) -> int:
        return len(self._lengths)

    @property
    def logits(self) -> Tensor:
        assert self._logits is not None
        return self._logits

    def add(self, contexts: Sequence[Context], repeats: Sequence[int]) -> None:
        """Append repeats[i] rows for contexts[i], whose KV cache is computed once."""
        start = 0
        for end in _chunk_ends([len(context) for context in contexts]):
            self._prefill(contexts[start:end], repeats[start:end])
            start = end

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but `rows` (ascending), and the columns that become padding in all rows."""
        if len(rows) == len(self):
            return
        if not rows:
            self._cache, self._lengths, self._logits = DynamicCache(), [], None
            return
        index = torch.tensor(rows, dtype=torch.int64, device=self._policy.device)
        self._cache.reorder_cache(index)
        self._logits = self.logits[index]
        columns = max(self._lengths)
        self._lengths = [self._lengths[row] for row in rows]
        self._trim(columns - max(self._lengths))

    def step(self, tokens: Sequence[int]) -> None:
        """Append one token to each row."""
        self._lengths = [length + 1 for length in self._lengths]
        self._logits = self._forward(self._cache, [[token] for token in tokens], self._lengths)

    def check(self) -> None:
        rows, columns = len(self._lengths), max(self._lengths, default=0)
        assert (self._logits is None) == (rows == 0) == (len(self._cache.layers) == 0)
        assert rows == 0 or self.logits.shape[0] == rows
        for layer in self._cache.layers:
            assert layer.keys.shape[0] == layer.values.shape[0] == rows
            assert layer.keys.shape[2] == layer.values.shape[2] == columns

    def _prefill(self, contexts: Sequence[Context], repeats: Sequence[int]) -> None:
        lengths = [len(context) for context in contexts]
        columns = max(lengths)
        cache = DynamicCache()
        padded = [[0] * (columns - len(context)) + list(context) for context in contexts]
        logits = self._forward(cache, padded, lengths)
        # The samples of one prompt share its prefill: its row is copied for each of them.
        rows = [row for row, count in enumerate(repeats) for _ in range(count)]
        if len(rows) != len(contexts):
            index = torch.tensor(rows, dtype=torch.int64, device=self._policy.device)
            cache.reorder_cache(index)
            logits = logits[index]
        self._join(cache, [lengths[row] for row in rows], logits)

    def _join(self, cache: DynamicCache, lengths: list[int], logits: Tensor) -> None:
        if not self._lengths:
            self._cache, self._lengths, self._logits = cache, lengths, logits
            return
        for mine, new in zip(self._cache.layers, cache.layers, strict=True):
            mine.keys, mine.values = _stack(mine.keys, new.keys), _stack(mine.values, new.values)
        self._lengths += lengths
        self._logits = torch.cat([self.logits, logits])

    def _trim(self, columns: int) -> None:
        if columns:
            for layer in self._cache.layers:
                layer.keys, layer.values = layer.keys[:, :, columns:], layer.values[:, :, columns:]

    def _forward(self, cache: DynamicCache, tokens: list[list[int]], lengths: list[int]) -> Tensor:
        device = self._policy.device
        ids = torch.tensor(tokens, dtype=torch.int64, device=device)
        return self._policy.next_logits(
            ids, torch.tensor(lengths, dtype=torch.int64, device=device), cache
        )


def _stack(upper: Tensor, lower: Tensor) -> Tensor:
    """Join two caches [rows, heads, columns, dim] by rows; pad the narrower one on the left."""
    columns = max(upper.shape[2], lower.shape[2])
    return torch.cat([_widen(upper, columns), _widen(lower, columns)])


def _widen(states: Tensor, columns: int) -> Tensor:
    missing = columns - states.shape[2]
    return torch.nn.functional.pad(states, (0, 0, missing, 0)) if missing else states


def _chunk_ends(lengths: Sequence[int]) -> Iterator[int]:
    """Yield the ends of consecutive chunks of rows.

    A chunk has at most PREFILL_TOKENS_MAX padded tokens, or is a single row that is longer.
    """
    start, widest = 0, 0
    for row, length in enumerate(lengths):
        widest = max(widest, length)
        if row > start and widest * (row + 1 - start) > PREFILL_TOKENS_MAX:
            yield row
            start, widest = row, length
    yield len(lengths)
