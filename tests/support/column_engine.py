"""An engine that writes columns. Each value names its token, so a test can check it anywhere."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from echo2d.core.protocol.columns import Column, Columns
from echo2d.engines.base import GenerateRequest, SampleOutput
from echo2d.engines.fake import FakeEngine


def experts_of(tokens: Sequence[int] | NDArray[np.int32]) -> NDArray[np.uint16]:
    """[tokens, 2 layers, 3 experts]."""
    first = np.asarray(tokens, dtype="<u2").reshape(-1, 1, 1)
    return first + np.arange(6, dtype="<u2").reshape(2, 3)


def columns_of(tokens: Sequence[int]) -> Columns:
    numbers = np.asarray(tokens)
    return (
        Column("experts", "u16", (2, 3), experts_of(tokens).tobytes()),
        Column("half", "f16", (), (numbers / 2).astype("<f2").tobytes()),
    )


class ColumnEngine(FakeEngine):
    async def generate(self, request: GenerateRequest) -> AsyncIterator[SampleOutput]:
        async for delta in super().generate(request):
            yield replace(delta, columns=columns_of(delta.tokens))
