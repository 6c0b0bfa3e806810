"""The example of docs/guide/environments.md, unchanged, played in a process."""

import random
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from echo2d.core.protocol.trajectory import pack_tokens, unpack_tokens
from echo2d.tasks.episodes import EpisodeEnd, Episodes, EpisodeTurn, StepCall
from echo2d.tasks.pool import Score, TaskPool, TextSettings
from tests.support.paths import REPO
from tests.support.turn_texts import END, MAKE, read, write_turn_model, written

PAGE = (REPO / "docs" / "guide" / "environments.md").read_text()
CALL = '<tool_call>{{"name": "look_up", "arguments": {{"item": "{}"}}}}</tool_call>'


@pytest.fixture
def directory() -> Iterator[Path]:
    """Where a task process of another user may read, which `tmp_path` is not."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


async def test_the_example_of_the_page_plays_unchanged(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (code,) = [program for program in programs if "class Warehouse" in program]
    (directory / "warehouse_of_the_page.py").write_text(code)
    monkeypatch.syspath_prepend(directory)
    model = write_turn_model(directory / "model")
    model.chmod(0o755)
    texts = TextSettings(str(model), turns=MAKE)
    async with TaskPool("warehouse_of_the_page:Warehouse", texts=texts) as pool:
        episodes = Episodes(pool)
        turn: object = await episodes.reset(1, row=5, seed=6)
        assert isinstance(turn, EpisodeTurn)
        so_far = unpack_tokens(turn.given).tolist()
        items = re.findall(r"item-\d+", read(so_far).partition("<user>")[2])
        assert turn.row == "+".join(item.removeprefix("item-") for item in items)
        found = []
        for turns, item in enumerate(items):
            answer = written(CALL.format(item))
            turn = await episodes.step(
                StepCall(1, turns, turn.state, pack_tokens(so_far), pack_tokens(answer))
            )
            assert isinstance(turn, EpisodeTurn), turn
            given = unpack_tokens(turn.given).tolist()
            so_far += [*answer, *given]
            found.append(int(read(given).removeprefix("<tool>").partition(END)[0]))
        rng = random.Random(6)
        stock = [rng.randrange(100) for _ in range(20)]
        assert found == [stock[int(item.removeprefix("item-"))] for item in items]
        answer = written(f"Together {sum(found)}")
        end = await episodes.step(
            StepCall(1, 2, turn.state, pack_tokens(so_far), pack_tokens(answer))
        )
    assert end == EpisodeEnd(Score(1.0, {"turns": 3.0}))
