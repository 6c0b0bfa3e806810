"""A ledger whose file was damaged: one line says so, or the damage does not matter."""

import logging
import random
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from echo2d.core.base.ids import PeerId
from echo2d.core.broadcast.events import RatesMeasured
from echo2d.core.coordinator.events import Recovered, TotalsKept
from echo2d.core.topology.uplink_rates import PeerRate
from echo2d.errors import OperatorFault
from echo2d.store.ledger import Ledger
from tests.support.coordinator_world import Kept, train

LEDGER, WAL, TURN = "ledger.sqlite", "ledger.sqlite-wal", "ledger.sqlite.turn"


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that was killed: half of its ledger is in the write-ahead log."""
    world = Kept()
    world.connect("seed", kind="seed")
    world.connect("a")
    train(world, 4, prefetch=True)
    assert world.checkpoint(1).status == 200
    world.ask_batch(5)
    world.work()
    here, there = tmp_path_factory.mktemp("alive"), tmp_path_factory.mktemp("killed")
    with Ledger.open(here / LEDGER) as ledger:
        rates = RatesMeasured((PeerRate(PeerId("a"), 1e6, held_up=False),))
        for place, record in enumerate([*world.records, rates]):
            ledger.append([record])
            if place == len(world.records) // 2:
                ledger.backfill()
        for name in (LEDGER, WAL, TURN):
            shutil.copyfile(here / name, there / name)
    return there


@pytest.fixture
def run(killed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(killed, tmp_path / "run"))


def recovered(run: Path) -> Recovered:
    with Ledger.open(run / LEDGER) as ledger:
        return ledger.recover()


def refusal(run: Path) -> str:
    with pytest.raises(OperatorFault) as caught:
        recovered(run)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "rng_seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 13))]
)
def test_no_flipped_bit_is_read_as_another_value(
    killed: Path, tmp_path: Path, rng_seed: int
) -> None:
    """100 each, in the database and in its log."""
    sound = repr(recovered(Path(shutil.copytree(killed, tmp_path / "sound"))))
    chance, refused = random.Random(rng_seed), 0
    for place in range(100):
        run = Path(shutil.copytree(killed, tmp_path / str(place)))
        file = run / chance.choice([LEDGER, WAL])
        content = bytearray(file.read_bytes())
        bit = chance.randrange(8 * len(content))
        content[bit // 8] ^= 1 << bit % 8
        file.write_bytes(content)
        try:
            found = repr(recovered(run))
        except OperatorFault:
            refused += 1
        else:
            names = ("rates", "earned")
            forgotten = [without(name, sound) for name in names]
            assert found in (sound, *forgotten), (rng_seed, file.name, bit)
        shutil.rmtree(run)
    assert refused > 20


def without(table: str, found: str) -> str:
    """A run of one worker, of which the only row of this table is forgotten."""
    begin = found.index(f"{table}=(")
    return f"{found[:begin]}{table}=()" + found[found.index(",), ", begin) + 2 :]


def spoil(run: Path, statement: str) -> None:
    with closing(sqlite3.connect(run / LEDGER)) as database:
        database.execute(statement)
        database.commit()


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        (
            "UPDATE samples SET reward = 0.5 WHERE group_id = 8",
            "row group_id=8 sample=0 of samples",
        ),
        (
            "UPDATE counters SET value = value + 1 WHERE name = 'checkpoint'",
            "which steps are trained",
        ),
        (
            "UPDATE versions SET path = 'other' WHERE publish_seq = 2",
            "row publish_seq=2 of versions",
        ),
        ("CREATE INDEX more ON counters (value)", ""),
        ("DROP TRIGGER forget_attachment", "its schema is not what was written"),
    ],
)
def test_a_damaged_row_is_named_with_what_it_means(run: Path, statement: str, words: str) -> None:
    spoil(run, statement)
    if words:
        assert words in refusal(run)
    else:
        recovered(run)


def test_a_damaged_row_of_a_measurement_is_dropped(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert recovered(run).rates
    spoil(run, "UPDATE rates SET bytes_per_s = 2e6")
    with caplog.at_level(logging.WARNING):
        assert recovered(run).rates == ()
    assert "row peer='a' of rates" in caplog.text
    assert recovered(run).rates == ()


def cut_log(run: Path) -> None:
    log = run / WAL
    log.write_bytes(log.read_bytes()[:10_000])


def lose_log(run: Path) -> None:
    (run / WAL).unlink()


@pytest.mark.parametrize("lose", [cut_log, lose_log])
def test_lost_transactions_are_counted(run: Path, lose: object) -> None:
    lose(run)  # type: ignore[operator]
    assert "has lost its newest " in refusal(run)
    (run / TURN).unlink()
    recovered(run)


def test_an_old_copy_of_a_ledger_is_recognised(run: Path, tmp_path: Path) -> None:
    old = Path(shutil.copytree(run, tmp_path / "old"))
    with Ledger.open(run / LEDGER) as ledger:
        ledger.append([TotalsKept(1000, 0)])
    for name in (LEDGER, WAL):
        (run / name).unlink(missing_ok=True)
        shutil.copyfile(old / name, run / name)
    assert "has lost its newest 1 transactions: it is an older copy" in refusal(run)


@pytest.mark.parametrize("content", [b"", b"00000000000000999999 00000000\n", b"x" * 100])
def test_a_damaged_count_of_transactions_is_treated_as_missing(run: Path, content: bytes) -> None:
    (run / TURN).write_bytes(content)
    recovered(run)
