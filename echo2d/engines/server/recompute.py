"""Measures the cost of computing KV caches again after a refit, in tokens and in seconds. Pure.

    refit --> KV dropped (tokens) --> generation resumes --> a wave of requests is sent at once
                                                               --> the last one writes a token

A *wave* consists of all requests that were cut and that continue at the same time. The server prefills all of
them before it decodes any of them further. So the engine makes nothing new from the moment at which the first
request is sent until the last one writes its first token. Hence

    tokens/s  = tokens of the newest WAVES_MAX waves / seconds of these waves
    recompute_s of a refit = tokens that it dropped / tokens/s

A refit reports before its own wave is over, because its version is already served during the wave. So it
reports its own tokens at the speed of earlier waves. Before the first wave no speed is known. Tokens count as
if no request shared a prefix with another one, so a prefix cache in the server shows as a higher speed. One
decoding step is part of each wave.
"""

from collections import deque

WAVES_MAX = 8


class RecomputeMeter:
    """See the module docstring. `now` is in seconds; `request` is a request's id."""

    def __init__(self) -> None:
        self._dropped = 0
        self._waves: deque[tuple[int, float]] = deque(maxlen=WAVES_MAX)
        # The wave that is under way: tokens of each request that has written nothing yet.
        self._pending: dict[str, int] = {}
        self._tokens = 0
        self._began = 0.0

    def dropped(self, tokens: int) -> None:
        """The KV cache of this many tokens was dropped, and will be computed again."""
        self._dropped += tokens

    def take(self) -> tuple[int, float | None]:
        """Return the tokens dropped since the last call, and the seconds that they cost.

        None: no wave has shown yet how fast the server is.
        """
        tokens, self._dropped = self._dropped, 0
        return tokens, self.seconds(tokens)

    def seconds(self, tokens: int) -> float | None:
        """How long the server takes to compute this many tokens again; None: not known yet."""
        if not tokens:
            return 0.0
        computed = sum(each for each, _ in self._waves)
        return tokens * sum(seconds for _, seconds in self._waves) / computed if computed else None

    # --- the wave

    def interrupted(self) -> None:
        """Generation stops again, so the wave that is under way does not count."""
        self._pending.clear()
        self._tokens = 0

    def sent(self, request: str, tokens: int, *, now: float) -> None:
        """A request was sent whose prompt of this many tokens has to be computed again."""
        if not self._pending:
            self._began, self._tokens = now, 0
        self._pending[request] = tokens

    def wrote(self, request: str, *, now: float) -> None:
        """The request has written a token. Later tokens, and other requests, change nothing."""
        tokens = self._pending.pop(request, None)
        if tokens is not None:
            self._tokens += tokens
            self._ended(now)

    def gone(self, request: str, *, now: float) -> None:
        """The request ended. If it has written nothing, it does not count."""
        if self._pending.pop(request, None) is not None:
            self._ended(now)

    def _ended(self, now: float) -> None:
        if not self._pending and self._tokens and now > self._began:
            self._waves.append((self._tokens, now - self._began))

    def check(self) -> None:
        assert self._dropped >= 0
        assert all(tokens > 0 < seconds for tokens, seconds in self._waves)
