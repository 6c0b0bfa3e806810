"""What a worker has reported of its unfinished samples."""

from collections import defaultdict

from echo2d.core.protocol.control_messages import LeaseProgress
from echo2d.core.protocol.trajectory import unpack_logprobs, unpack_tokens


class ReportedSamples:
    """What progress messages report of each (lease, sample), joined; one entry per token."""

    def __init__(self, messages: list[LeaseProgress]) -> None:
        self.tokens: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        self.logprobs: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
        self.versions: defaultdict[tuple[int, int], list[int]] = defaultdict(list)  # of each token
        for message in messages:
            for delta in message.samples:
                key = (message.lease, delta.sample)
                self.tokens[key] += unpack_tokens(delta.tokens).tolist()
                self.logprobs[key] += unpack_logprobs(delta.logprobs).tolist()
                self.versions[key] += [
                    span.version for span in delta.spans for _ in range(span.start, span.end)
                ]
