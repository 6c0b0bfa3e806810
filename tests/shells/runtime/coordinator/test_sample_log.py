"""The sample log: which groups it shows, as text, and that it delays nothing."""

import asyncio
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from echo2d.core.base.ids import Digest, GroupId, LeaseId, PeerId, Version
from echo2d.core.coordinator.events import CoordinatorRecord
from echo2d.core.protocol.trajectory import (
    AuthoredSpan,
    GroupRecord,
    RewardPart,
    Source,
    StoredGroup,
    TrajectoryRecord,
    pack_logprobs,
    pack_tokens,
)
from echo2d.core.work.events import (
    BatchFrozen,
    GroupDropped,
    PromptTaken,
    SampleKept,
    SampleLeftOut,
    SampleReturned,
    SampleRewarded,
)
from echo2d.runtime.coordinator.sample_log import SAMPLE_LOG, open_sample_log
from echo2d.store.json_log import read_json_log
from tests.support.polling import HANG_S
from tests.support.texts import bytes_tokenizer, write_text_model

ONE, TWO, THREE = GroupId(1), GroupId(2), GroupId(3)
WORKER, DIGEST = PeerId("w"), Digest(bytes(32))


def ids(text: str) -> bytes:
    return pack_tokens(bytes_tokenizer().encode(text).ids)


def kept(group: GroupId, sample: int, text: str) -> SampleKept:
    tokens = ids(text)
    count = len(tokens) // 4
    span = AuthoredSpan(0, count, Version(4), DIGEST, WORKER)
    record = TrajectoryRecord(
        sample, tokens, pack_logprobs([-0.5] * count), (span,), "stop", source=Source("sums", "r")
    )
    return SampleKept(group, LeaseId(1), 0, record)


def read(run_dir: Path) -> list[dict[str, Any]]:
    return list(read_json_log(run_dir, SAMPLE_LOG))


async def logged(
    run_dir: Path, *records: CoordinatorRecord, model: Path | None, lines: int,
    groups: tuple[StoredGroup, ...] = (),
) -> list[dict[str, Any]]:  # fmt: skip
    log = await asyncio.to_thread(open_sample_log, run_dir, 1 << 20, groups, model)
    for record in records:
        log.tell(record)
    keeping = asyncio.ensure_future(log.keep())
    async with asyncio.timeout(HANG_S):
        while len(found := await asyncio.to_thread(read, run_dir)) < lines:
            pass
    keeping.cancel()
    with suppress(asyncio.CancelledError):
        await keeping
    return found


async def test_a_trained_group_is_shown_as_text(tmp_path: Path) -> None:
    model = write_text_model(tmp_path / "model")
    (line,) = await logged(
        tmp_path,
        PromptTaken(ONE, 7, ids("1 + 1"), Source("sums", "r")),
        kept(ONE, 0, "two"),
        kept(ONE, 1, "2"),
        kept(ONE, 2, "late"),
        kept(ONE, 3, "lie"),
        SampleRewarded(ONE, 1, 1.0, (RewardPart("form", 0.5),)),
        SampleRewarded(ONE, 0, 0.0),
        SampleLeftOut(ONE, 2),
        SampleReturned(ONE, 3),
        BatchFrozen(5, DIGEST, (ONE,), 0),
        model=model,
        lines=1,
    )
    assert (line["step"], line["dropped"], line["task"], line["prompt"]) == (
        5,
        None,
        "sums",
        "1 + 1",
    )
    assert [(each["answer"], each["reward"], each["parts"]) for each in line["samples"]] == [
        ("two", 0.0, {}),
        ("2", 1.0, {"form": 0.5}),
    ]
    assert line["samples"][0]["versions"] == [4, 4]
    path = tmp_path / "samples.jsonl"
    assert path.stat().st_mode & 0o777 == 0o600


async def test_filtered_groups_are_shown_but_groups_dropped_otherwise_are_not(
    tmp_path: Path,
) -> None:
    taken = [PromptTaken(group, 7, pack_tokens([1, 2])) for group in (ONE, TWO, THREE)]
    lines = await logged(
        tmp_path,
        *taken,
        kept(ONE, 0, "x"),
        GroupDropped(TWO, "stale"),
        GroupDropped(ONE, "filtered: all rewards are the same"),
        BatchFrozen(2, DIGEST, (THREE,), 0),
        BatchFrozen(2, DIGEST, (THREE,), 1),
        model=None,
        lines=2,
    )
    assert [(line["group"], line["step"], line["dropped"]) for line in lines] == [
        (1, None, "filtered"),
        (3, 2, None),
    ]
    assert lines[0]["prompt"] == [1, 2], "without a tokenizer a line has token ids"


async def test_groups_from_before_a_restart_are_shown(tmp_path: Path) -> None:
    before = kept(ONE, 0, "ab").trajectory
    stored = StoredGroup(GroupRecord(ONE, ids("q"), (before,)), 7, Source("sums", "r"))
    (line,) = await logged(
        tmp_path,
        SampleRewarded(ONE, 0, 1.0),
        BatchFrozen(5, DIGEST, (ONE,), 0),
        groups=(stored,),
        model=write_text_model(tmp_path / "model"),
        lines=1,
    )
    assert (line["prompt"], line["samples"][0]["reward"]) == ("q", 1.0)
    assert json.dumps(line)


async def test_samples_are_shown_as_token_ids_if_no_tokenizer_can_be_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A run whose tasks are in tokens starts with such a model, too."""
    model = write_text_model(tmp_path / "model")
    (model / "tokenizer_config.json").write_text(
        '{"auto_map": {"AutoTokenizer": ["its.Own", null]}}'
    )
    log = await asyncio.to_thread(open_sample_log, tmp_path, 1 << 20, (), model)
    assert log._texts is None
    assert "samples are shown as token ids: the snapshot's tokenizer: auto_map" in caplog.text
