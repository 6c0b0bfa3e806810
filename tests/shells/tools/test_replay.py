"""A coordinator that runs again from its ledger: a sound ledger is described, a damaged one never passes."""

import json
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from echo2d.core.base.codec import pack
from echo2d.core.base.ids import (
    Digest,
    Epoch,
    PeerId,
    Version,
)
from echo2d.core.coordinator.events import EpochOpened, RunFactsKept
from echo2d.core.protocol.trajectory import AuthoredSpan, TrajectoryRecord
from echo2d.errors import OperatorFault
from echo2d.store.ledger import Ledger
from tests.support.coordinator_world import Kept, train
from tests.support.ledger_rows import change_rows
from tools.replay import main

CONFIG = """
[run]
run_dir = "r"
snapshot_root = "s"
[policy]
staleness_max = 2
trajectories_per_step = 4
group_size = 2
[sampling]
vocab_size = 32
[task]
kind = "sort_digits"
"""


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ledger of a run that was killed: step 1 checkpointed, 2-4 committed, a learner back at 3, 5 frozen."""
    world = Kept()
    world.connect("seed", kind="seed")
    world.connect("a")
    train(world, 4, prefetch=True)
    assert world.checkpoint(1).status == 200
    world.ask_batch(5)
    world.work()
    assert world.open_session(3).status == 200
    path = tmp_path_factory.mktemp("run") / "ledger.sqlite"
    with Ledger.open(path) as ledger:
        ledger.append([*world.records, RunFactsKept((("policy.group_size", "2"),))])
    return path


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def damaged(sound: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A copy in which something was changed."""

    def change(statements: str) -> Path:
        path = tmp_path / "ledger.sqlite"
        shutil.copyfile(sound, path)
        change_rows(path, statements)
        return path

    return change


def facts(
    path: Path, capsys: pytest.CaptureFixture[str], *options: str, code: int = 0
) -> dict[str, Any]:
    assert main([str(path), "--json", *options]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_sound_ledger_is_described_and_not_changed(
    sound: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = [(path.name, path.read_bytes()) for path in sorted(sound.parent.iterdir())]
    assert main([str(sound.parent), "--config", str(config)]) == 0
    text = capsys.readouterr().out
    assert "rules     4 trajectories a step in groups of 2, S 2" in text
    assert "epoch     2, begun after step 3; checkpoint 1" in text
    assert "versions  newest 3" in text
    assert "5 published" not in text, "version 4 is revoked"
    assert "committed in epoch 1, 2" in text, "the session at step 3 committed it again"
    assert "after a start: epoch 2, step 3 committed" in text
    assert text.endswith("all of it fits together\n")
    assert [(path.name, path.read_bytes()) for path in sorted(sound.parent.iterdir())] == before


def test_the_guessed_rules_equal_those_of_the_run(
    sound: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(sound)]) == 0
    assert "rules     guessed: 4 trajectories a step in groups of 2;" in capsys.readouterr().out


def test_a_group_that_leaves_a_sample_out_is_complete_without_it(
    sound: Path, damaged: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """The ledger keeps the rows of samples that it leaves out."""
    whole = facts(sound, capsys)["groups_in_no_batch"]
    some = (
        "INSERT INTO left_out SELECT group_id, max(sample), NULL FROM samples WHERE reward IS NOT NULL AND "
        "group_id NOT IN (SELECT value FROM batches, json_each(groups)) GROUP BY group_id HAVING count(*) = 2"
    )
    assert whole["complete"] > 0
    assert facts(damaged(some), capsys)["groups_in_no_batch"] == whole


def test_a_replay_shows_the_run_as_a_learner_would_find_it_at_a_step(
    sound: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = facts(sound, capsys, "--at", "2")
    assert (found["status"]["epoch"], found["status"]["committed_step"]) == (3, 2)
    assert found["status"]["newest_version"]["version"] == 2
    assert main([str(sound), "--at", "0"]) == 2
    assert (
        "no session can begin at step 0: batches up to step 1 are deleted"
        in capsys.readouterr().err
    )


def test_a_replay_tells_the_story_of_a_group(
    sound: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = facts(sound, capsys)["batches"][0]
    group = batch["groups"][0]
    story = facts(sound, capsys, "--group", str(group))
    assert story["batch"] == batch
    assert [(each["sample"], each["tokens"], each["reward"]) for each in story["trajectories"]] == [
        (0, 3, 0.0),
        (1, 3, 1.0),
    ]
    assert main([str(sound), "--group", str(group)]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"group {group}: prompt ")
    assert "attempt 0 by a: 3 tokens of version" in text
    assert f"in batch 2 ({batch['digest'][:12]}), committed in epoch 1" in text
    for unknown, words in (
        (0, "was dropped, or trained on in a step up to checkpoint 1"),
        (999, "was never admitted"),
    ):
        assert main([str(sound), "--group", str(unknown)]) == 2
        assert words in capsys.readouterr().err


DAMAGES = {
    "batch 3 was frozen as": "UPDATE samples SET reward = reward + 1 WHERE group_id = "
    "(SELECT json_extract(groups, '$[0]') FROM batches WHERE step = 3);",
    "has a trajectory without a reward": "UPDATE samples SET reward = NULL WHERE group_id = "
    "(SELECT json_extract(groups, '$[0]') FROM batches WHERE step = 2);",
    "is in the batches of steps 2 and 3": "UPDATE batches SET groups = (SELECT groups FROM batches WHERE step = 2) "
    "WHERE step = 3;",
    "was committed in epoch 1 as 0000": "UPDATE commits SET digest = zeroblob(32) WHERE step = 2;",
    "step 3 was never committed, a later one was": "DELETE FROM commits WHERE step = 3;",
    "of its batch the groups": "DELETE FROM groups WHERE group_id = "
    "(SELECT json_extract(groups, '$[1]') FROM batches WHERE step = 2);",
    "of samples has no groups": "UPDATE samples SET group_id = 77 WHERE rowid = (SELECT max(rowid) FROM samples);",
    "but its batch is gone": "DELETE FROM batches WHERE step = 2;",
    "which was never opened": "UPDATE commits SET epoch = 9 WHERE step = 4;",
    "the next group would be 1": "UPDATE counters SET value = 1 WHERE name = 'group';",
    "the next prompt would be 1": "UPDATE tasks SET next_cursor = 1;",
    "was never published": "DELETE FROM versions WHERE version = 2;",
    "is in the groups": "UPDATE samples SET (lease, attempt) = (SELECT lease, attempt FROM samples ORDER BY group_id "
    "LIMIT 1);",
    "steps old; S is 2": "UPDATE batches SET step = step + 10; UPDATE commits SET step = step + 10;",
    "which this step or a later one made": "DELETE FROM batches WHERE step = 1; "
    "UPDATE batches SET step = 1 WHERE step = 4; UPDATE counters SET value = 0 WHERE name = 'checkpoint';",
}


TORN = pack(
    TrajectoryRecord(
        0, b"x", b"x", (AuthoredSpan(0, 1, Version(0), Digest(bytes(32)), PeerId("w")),), "stop"
    )
)
VALUES = ("-1", "x'ff'", "9223372036854775807")


@pytest.mark.parametrize("words", DAMAGES)
def test_contradictions_are_listed(
    words: str, damaged: Callable[[str], Path], config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = damaged(DAMAGES[words])
    found = facts(path, capsys, "--config", str(config), code=1)
    assert any(words in fault for fault in found["faults"]), found["faults"]
    assert main([str(path), "--config", str(config)]) == 1
    assert "what does not fit together (" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (
            "UPDATE samples SET trajectory = x'ff' WHERE (group_id, sample) = (2, 1);",
            "group_id=2 sample=1 of samples",
        ),
        (f"UPDATE samples SET trajectory = x'{TORN.hex()}';", "expected a multiple of 4 bytes"),
        ("UPDATE batches SET groups = 'x' WHERE step = 4;", "row step=4 of batches is damaged"),
        (
            "UPDATE batches SET groups = 'x'; UPDATE counters SET value = 9;",
            "row step=1 of batches is damaged",
        ),
        (
            "UPDATE counters SET value = 'x' WHERE name = 'checkpoint';",
            "row name='checkpoint' of counters is damaged",
        ),
        (
            "INSERT INTO counters VALUES ('elsewhere', 3, NULL);",
            "row name='elsewhere' of counters is damaged",
        ),
        ("INSERT INTO rates VALUES ('p', 0.5, 1, NULL);", "row peer='p' of rates is damaged"),
        ("INSERT INTO rates VALUES ('p', 5.0, 2, NULL);", "row peer='p' of rates is damaged"),
        (f"UPDATE batches SET groups = '{'[' * 99_999}';", "recursion"),
    ],
)
def test_a_damaged_row_gives_one_line(
    damage: str, words: str, damaged: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = damaged(damage)
    assert main([str(path)]) == 2
    said = capsys.readouterr().err
    assert words in said
    with Ledger.open(path) as ledger, pytest.raises(OperatorFault) as caught:
        ledger.recover()
    assert said == f"replay: {caught.value}\n"


def test_a_damaged_row_costs_no_other_row(damaged: Callable[[str], Path]) -> None:
    """What it says is not believed before it is known to be sound: SQLite compares any number as less than text."""
    path = damaged("UPDATE counters SET value = 'x' WHERE name = 'checkpoint';")
    with Ledger.open(path) as ledger, pytest.raises(OperatorFault):
        ledger.recover()
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT count(*) FROM batches").fetchone() == (5,)


def test_no_value_in_any_column_gives_a_traceback(
    sound: Path, damaged: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """It is refused in one line, or it does not fit together, or it does not matter: never a traceback."""
    with closing(sqlite3.connect(sound)) as database:
        query = "SELECT m.name, c.name FROM sqlite_master m, pragma_table_info(m.name) c WHERE m.type = 'table'"
        columns = [
            (table, column)
            for table, column in database.execute(query).fetchall()
            if database.execute(f"SELECT count(*) FROM {table}").fetchone() != (0,)
        ]
    verdicts = Counter[int]()
    for (table, column), value in product(columns, VALUES):
        try:
            path = damaged(f"UPDATE OR IGNORE {table} SET {column} = {value};")
        except sqlite3.IntegrityError:  # SQLite itself refuses
            continue
        verdict = main([str(path)])
        verdicts[verdict] += 1
        said = capsys.readouterr()
        assert said.err.count("\n") == (verdict == 2), f"{table} {column} {value}: {said.err}"
    assert set(verdicts) == {0, 1, 2}
    assert verdicts[2] > verdicts.total() / 2


def test_a_file_that_is_no_ledger_gives_one_line(
    sound: Path, tmp_path: Path, damaged: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    text = tmp_path / "text"
    text.write_text("x" * 5000)
    for path, words in {
        tmp_path / "nothing": "is not a file",
        tmp_path / "empty": "is not a file",
        text: "file is not a database",
        damaged("PRAGMA user_version = 99;"): "has format 99",
    }.items():
        assert main([str(path)]) == 2
        said = capsys.readouterr().err
        assert words in said
        assert said.count("\n") == 1
        assert "echo2d-replay-" not in said, "the copy is nobody's business"


def test_no_overwritten_page_passes_as_sound_or_gives_a_traceback(
    sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wherever a page is overwritten, it is said, or it did not matter: never a traceback, never silence about rows."""
    whole = sound.read_bytes()
    verdicts = []
    for page in range(len(whole) // 4096):
        path = tmp_path / f"{page}.sqlite"
        path.write_bytes(whole[: page * 4096] + b"\xa5" * 4096 + whole[(page + 1) * 4096 :])
        verdicts.append(main([str(path)]))
        said = capsys.readouterr()
        assert verdicts[-1] == 0 or said.err or "does not fit" in said.out
    assert verdicts[0] == 2
    with closing(sqlite3.connect(sound)) as database:
        (free,) = database.execute("PRAGMA freelist_count").fetchone()
    assert verdicts.count(0) <= free, "a page without rows does not matter"


def test_a_replay_works_beside_a_running_coordinator(
    sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ledger.sqlite"
    shutil.copyfile(sound, path)
    with Ledger.open(path) as ledger:
        ledger.append([EpochOpened(Epoch(7), 3)])
        assert facts(path, capsys)["epoch"] == 7
        ledger.append([EpochOpened(Epoch(8), 3)])
