"""The pure parts of the SGLang engine: the dialects of its versions, the author of a token, limits, logs, servers."""

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest

from echo2d.config.worker import WorkerConfig
from echo2d.engines.server.admission import SampleAdmission, ServerLoad, next_limit
from echo2d.engines.server.continuation import Continuation, Foreign, ReportedToken, StreamChunk
from echo2d.engines.server.launch import ServerLaunch
from echo2d.engines.server.process import ServerProcess
from echo2d.engines.server.process_guard import Log
from echo2d.engines.sglang.compat import dialect_of
from echo2d.engines.sglang.engine import SglangEngine, SglangLaunch
from echo2d.engines.sglang.generate import read_chunk
from echo2d.engines.vllm.engine import VllmLaunch
from echo2d.errors import EngineFault, OperatorFault
from echo2d.runtime.worker.engine_refit import make_engines
from tests.support.engine_harness import FakeHarness
from tests.support.polling import HANG_S, poll

# --- dialect ---

PATHS = {
    "/generate",
    "/model_info",
    "/update_weights_from_disk",
    "/pause_generation",
    "/continue_generation",
}


@pytest.mark.parametrize(
    ("version", "flushes_safely", "tried"),
    [
        ("0.5.19", False, True),
        ("0.5.20", False, True),
        ("0.5.21", False, True),
        ("0.5.21.post2", False, True),
        ("0.5.22", True, True),
        ("0.5.23", True, True),
        ("0.5.23+cpu", True, True),
        ("0.5.24", True, False),
        ("0.6.0rc1", True, False),
        ("1.0.0", True, False),
    ],
)
@pytest.mark.parametrize("paths", [PATHS | {"/health"}, None])
def test_each_version_of_sglang_has_its_dialect(
    version: str, flushes_safely: bool, tried: bool, paths: set[str] | None
) -> None:
    dialect = dialect_of(version, paths)
    assert (dialect.flushes_safely, dialect.tried) == (flushes_safely, tried)


@pytest.mark.parametrize("version", ["0.5.18", "0.4.10", "0.5", "", "main"])
def test_a_server_too_old_to_name_the_version_of_a_token_is_refused(version: str) -> None:
    with pytest.raises(EngineFault, match=r"0\.5\.19"):
        dialect_of(version, PATHS)


@pytest.mark.parametrize("path", sorted(PATHS))
def test_a_server_without_a_needed_path_is_refused(path: str) -> None:
    with pytest.raises(EngineFault, match=path):
        dialect_of("0.5.23", PATHS - {path})


# --- piece ---


def chunk(
    *tokens: int,
    end: int,
    finish: Any = None,
    spans: list[tuple[str, int, int]] | None = None,
    logprobs: Any = None,
) -> StreamChunk:
    return read_chunk(body(*tokens, end=end, finish=finish, spans=spans, logprobs=logprobs), {})


def body(
    *tokens: int,
    end: int,
    finish: Any = None,
    spans: list[tuple[str, int, int]] | None = None,
    logprobs: Any = None,
) -> dict[str, Any]:
    entries = [[-token / 8, token, None] for token in tokens] if logprobs is None else logprobs
    meta: dict[str, Any] = {
        "completion_tokens": end,
        "finish_reason": finish,
        "output_token_logprobs": entries,
    }
    if spans is not None:
        meta["weight_versions"] = [
            {"version": name, "start": first, "end": last} for name, first, last in spans
        ]
    return {"output_ids": list(tokens), "meta_info": meta}


def tokens(label: str, *written: int) -> list[ReportedToken]:
    return [ReportedToken(each, -each / 8, label) for each in written]


LENGTH, ABORT = {"type": "length", "length": 4}, {"type": "abort", "message": "Aborted"}


def test_certain_tokens_are_given_at_once() -> None:
    piece = Continuation("1-a")
    assert piece.take(chunk(5, 6, end=2), certain=True) == tokens("1-a", 5, 6)
    assert piece.take(chunk(7, end=3), certain=True) == tokens("1-a", 7)
    assert piece.take(
        chunk(8, end=4, finish=LENGTH, spans=[("1-a", 0, 4)]), certain=True
    ) == tokens("1-a", 8)
    assert piece.finish == "length"
    piece.check()


def test_a_cumulative_stream_gives_the_same_tokens() -> None:
    piece = Continuation("1-a")
    assert piece.take(chunk(5, 6, end=2), certain=True) == tokens("1-a", 5, 6)
    assert piece.take(chunk(5, 6, 7, end=3), certain=True) == tokens("1-a", 7)


def test_uncertain_tokens_wait_until_the_server_names_their_version() -> None:
    piece = Continuation("1-a")
    assert piece.take(chunk(5, end=1), certain=True) == tokens("1-a", 5)
    assert piece.take(chunk(6, 7, end=3), certain=False) == []
    assert piece.take(chunk(8, end=4), certain=True) == [], (
        "what comes after something uncertain waits too"
    )
    last = chunk(9, end=5, finish=LENGTH, spans=[("1-a", 0, 2), ("2-b", 2, 5)])
    assert piece.take(last, certain=False) == [*tokens("1-a", 6), *tokens("2-b", 7, 8, 9)]
    piece.check()


def test_an_abort_in_the_queue_repeats_the_last_token() -> None:
    piece = Continuation("1-a")
    piece.take(chunk(5, 6, end=2), certain=True)
    again = chunk(
        6,
        end=2,
        finish=ABORT,
        spans=[("1-a", 0, 2)],
        logprobs=[[-5 / 8, 5, None], [-6 / 8, 6, None]],
    )
    assert piece.take(again, certain=False) == []
    assert piece.finish == "abort"


@pytest.mark.parametrize("again", [True, False])
def test_tokens_that_are_cut_without_their_experts_are_written_again(again: bool) -> None:
    piece = Continuation("1-a", whole=True, again=again)
    assert piece.take(chunk(5, 6, end=2), certain=True) == [], "they wait for their experts"
    last = chunk(7, end=3, finish=ABORT, spans=[("1-a", 0, 3)])
    assert piece.take(last, certain=True) == ([] if again else tokens("1-a", 5, 6, 7))
    piece.check()
    ended = Continuation("1-a", whole=True, again=again)
    whole = chunk(5, end=1, finish=LENGTH, spans=[("1-a", 0, 1)])
    assert ended.take(whole, certain=True) == tokens("1-a", 5), "the answer is complete"


def test_an_abort_may_come_together_with_earlier_tokens() -> None:
    """Two chunks in one, the second of which repeats a token: it does not add up, and is left out."""
    piece = Continuation("1-a")
    piece.take(chunk(5, end=1), certain=True)
    entries = [[-6 / 8, 6, None], [-5 / 8, 5, None], [-6 / 8, 6, None]]
    both = chunk(6, 6, end=2, finish=ABORT, spans=[("1-a", 0, 2)], logprobs=entries)
    assert piece.take(both, certain=False) == []


def test_an_abort_that_names_no_version_drops_held_tokens() -> None:
    piece = Continuation("1-a")
    piece.take(chunk(5, end=1), certain=False)
    assert piece.take(chunk(end=1, finish=ABORT), certain=False) == []
    piece.check()


def test_an_abort_before_the_first_token_gives_no_token() -> None:
    piece = Continuation("1-a")
    assert piece.take(chunk(end=0, finish=ABORT, spans=[("2-b", 0, 0)]), certain=False) == []


BAD = {
    "no output": {"text": "x"},
    "no object": [1],
    "an error": {"error": {"message": "out of memory"}},
    "a gap": body(7, end=9),
    "no logprobs": body(5, end=1, logprobs=[]),
    "other tokens": body(5, end=1, logprobs=[[-1.0, 6, None]]),
    "an endless logprob": body(5, end=1, logprobs=[[float("-inf"), 5, None]]),
    "no logprob": body(5, end=1, logprobs=[[None, 5, None]]),
    "no versions": body(5, end=1, finish=LENGTH),
    "versions with a gap": body(5, end=1, finish=LENGTH, spans=[("1-a", 1, 1)]),
    "refused": body(end=0, finish={"type": "abort", "message": "too long", "status_code": 400}),
    "another end": body(end=0, finish={"type": "eaten"}),
}


@pytest.mark.parametrize("body", BAD.values(), ids=BAD.keys())
def test_an_answer_that_is_no_output_is_a_fault(body: Any) -> None:
    with pytest.raises(EngineFault):
        Continuation("1-a").take(read_chunk(body, {}), certain=True)


def test_tokens_given_out_under_a_wrong_version_are_a_fault() -> None:
    piece = Continuation("1-a")
    piece.take(chunk(5, 6, end=2), certain=True)
    with pytest.raises(Foreign):
        piece.take(
            chunk(7, end=3, finish=LENGTH, spans=[("0-z", 0, 1), ("1-a", 1, 3)]), certain=True
        )


def test_a_stream_with_fewer_tokens_than_were_given_out_is_a_fault() -> None:
    piece = Continuation("1-a")
    piece.take(chunk(5, 6, end=2), certain=True)
    with pytest.raises(EngineFault):
        piece.take(chunk(end=2, finish=ABORT, spans=[("1-a", 0, 1)]), certain=True)


# --- room ---


@pytest.mark.parametrize(
    ("limit", "load", "after"),
    [
        (64, ServerLoad(0, 0, 0.0, 4096), 64),
        (64, ServerLoad(64, 0, 0.95, 4096), 64),  # full, and nobody waits
        (64, ServerLoad(60, 4, 0.97, 4096), 54),
        (64, ServerLoad(64, 9, 0.5, 48), 48),  # what it runs at once
        (40, ServerLoad(40, 0, 0.5, 4096), 42),
        (40, ServerLoad(40, 0, 0.85, 4096), 40),
        (1, ServerLoad(1, 5, 0.99, 4096), 1),
        (1, ServerLoad(0, 0, 0.0, 0), 1),
    ],
)
def test_the_limit_of_requests_follows_the_load_of_the_server(
    limit: int, load: ServerLoad, after: int
) -> None:
    assert next_limit(limit, 64, load) == after


def test_waiting_requests_enter_in_order() -> None:
    room, entered = SampleAdmission(2), list[str]()
    callers = {name: (lambda name=name: entered.append(name)) for name in "abcde"}
    for name in "abcde":
        room.enter(callers[name])
    assert (entered, room.waiting) == (["a", "b"], 3)
    room.give_up(callers["c"])
    room.leave()
    assert entered == ["a", "b", "d"]
    room.look(ServerLoad(2, 1, 0.99, 64))
    room.leave()
    assert entered == ["a", "b", "d"], "the limit is one now"
    room.check()
    room.look(ServerLoad(1, 0, 0.1, 64))
    assert entered == ["a", "b", "d", "e"]
    room.check()


# --- process ---


def test_each_engine_has_its_gpus(tmp_path: Path) -> None:
    base = SglangLaunch(Path("python"), ["--tp", "2"], tmp_path, {})
    one, two = base.each(2)
    assert (one.arguments[-2:], two.arguments[-2:]) == (
        ["--base-gpu-id", "0"],
        ["--base-gpu-id", "2"],
    )
    assert one.folder != two.folder
    assert base.each(1)[0].arguments == ["--tp", "2"]
    assert SglangLaunch(Path("python"), ["--device", "cpu"], tmp_path, {}).each(2)[1].arguments == [
        "--device",
        "cpu",
    ]


@pytest.mark.parametrize(
    "flag",
    ["--port", "--api-key=x", "--trust-remote-code", "--model-path", "--weight_version", "--host"],
)
def test_flags_that_the_worker_sets_itself_are_refused(flag: str) -> None:
    refusal = SglangLaunch.refusal(["--tp", "2", flag])
    assert flag.partition("=")[0].replace("_", "-") in refusal


@pytest.mark.parametrize(
    ("kind", "flags", "name", "whole"),
    [
        (SglangLaunch, "--hos 0.0.0.0", "hos", "host"),
        (SglangLaunch, "--kv-cache-dt fp8_e4m3", "kv-cache-dt", "kv-cache-dtype"),
        (SglangLaunch, "--tensor-parallel=2", "tensor-parallel", "tensor-parallel-size"),
        (VllmLaunch, "--ud x", "ud", "uds"),
        (VllmLaunch, "--quantization_conf.linear x", "quantization-conf", "quantization-config"),
        (VllmLaunch, "--quant fp8", "quant", "quantization"),
    ],
)
def test_the_beginning_of_a_flag_that_echo2d_sets_or_reads_is_refused(
    kind: type[ServerLaunch], flags: str, name: str, whole: str
) -> None:
    assert f"--{name}: a server may take it for --{whole};" in kind.refusal(flags.split())


@pytest.mark.parametrize("kind", [SglangLaunch, VllmLaunch])
def test_whole_names_short_flags_and_other_flags_can_be_given(kind: type[ServerLaunch]) -> None:
    flags = "-tp 2 --pp 1 -dp=1 -n 1 -r 0 --quantization none --quantization-config.a b"
    assert kind.refusal([*flags.split(), "--max-num-seqs", "8", "--enforce-eager", "--"]) == ""
    assert kind.refusal(["--config", "file"]) == "--config is set by echo2d"


def test_of_load_formats_only_the_one_for_quantized_weights_can_be_chosen() -> None:
    assert SglangLaunch.refusal(["--quantization", "fp8", "--load-format", "flash_rl"]) == ""
    for kind in ([], ["--quantization", "none"]):
        refusal = SglangLaunch.refusal(["--load-format=flash_rl", *kind, "--tp", "2"])
        assert (
            refusal == "--load-format flash_rl quantizes to fp8; write --quantization fp8 beside it"
        )
    for other in (["--load-format", "dummy"], ["--load_format=auto"]):
        assert "expected flash_rl" in SglangLaunch.refusal(other)


def test_a_log_has_no_secrets_and_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echo2d.engines.server.process_guard.SERVER_LOG_BYTES_MAX", 100)
    path = tmp_path / "server.log"
    log = Log(path, ["hidden"])
    log.write(b"api_key='hid")
    log.write(b"den'\nnext line\n")
    assert path.read_bytes() == b"api_key='***'\nnext line\n"
    for _ in range(20):
        log.write(b"twenty bytes of text\n")
    assert path.stat().st_size <= 121
    assert path.with_suffix(".log.1").stat().st_size <= 121
    log.close()


SERVER = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)"])
print("up", flush=True)
time.sleep(99)
"""


def test_the_guard_ends_every_server_when_its_owner_is_gone(tmp_path: Path) -> None:
    told = {
        "argv": [sys.executable, "-c", SERVER],
        "environment": {},
        "log": str(tmp_path / "log"),
        "secrets": [],
    }
    told["keys"] = str(tmp_path / "keys-a.yaml")
    (tmp_path / "keys-a.yaml").touch()
    guard = subprocess.Popen(
        [sys.executable, "-m", "echo2d.engines.server.process_guard"], stdin=subprocess.PIPE
    )
    assert guard.stdin is not None
    guard.stdin.write(json.dumps(told).encode() + b"\n")
    guard.stdin.flush()
    while not (tmp_path / "log").exists() or "up" not in (tmp_path / "log").read_text():
        assert guard.poll() is None
    (server,) = map(int, Path(f"/proc/{guard.pid}/task/{guard.pid}/children").read_text().split())
    group = [
        pid
        for pid in (int(path.name) for path in Path("/proc").glob("[0-9]*"))
        if _group(pid) == server
    ]
    assert len(group) == 2
    guard.stdin.close()
    guard.wait(HANG_S)
    poll(lambda: all(_group(pid) != server for pid in group), timeout_s=HANG_S)


def _group(pid: int) -> int | None:
    """Of a process that has not ended."""
    try:
        state, _, group = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:3]
    except OSError:
        return None
    return None if state == "Z" else int(group)


# --- config ---

WHERE: dict[str, Any] = {
    "url": "http://127.0.0.1:1",
    "token_file": Path("t"),
    "state_dir": Path("s"),
    "engine": "sglang",
}
MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, "engine_python: expected --engine-python VENV/bin/python"),
    "both": ({"engine_python": Path("p"), "engine_url": "http://127.0.0.1:2"}, "engine_python"),
    "no SGLang": ({"engine_python": Path(sys.executable)}, "no sglang: .* -m pip install sglang"),
    "no program": ({"engine_python": Path(__file__)}, "engine_python: cannot start"),
    "no such python": ({"engine_python": Path("/nowhere")}, "does not exist"),
    "too few": ({"engine_url": "http://127.0.0.1:2", "engines": 2}, "expected 2"),
    "no URL": ({"engine_url": "127.0.0.1:2"}, "expected 1"),
    "a quote": ({"engine_python": Path(sys.executable), "engine_args": "'"}, "engine_args"),
    "ours": ({"engine_python": Path(sys.executable), "engine_args": "--port 1"}, "--port"),
    "a pace": (
        {"engine_python": Path(sys.executable), "tokens_per_s_max": 1.0},
        "tokens_per_s_max",
    ),
    "no keys": (
        {"engine_url": "http://127.0.0.1:2", "engine_key_file": Path("/nowhere")},
        "engine_key_file",
    ),
}


@pytest.mark.parametrize(("options", "words"), MISTAKES.values(), ids=MISTAKES.keys())
def test_impossible_options_are_the_operators_mistakes(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OperatorFault, match=words):
        make_engines(WorkerConfig(**{**WHERE, **options}))


@pytest.mark.may_block
async def test_a_server_that_does_not_answer_is_named_by_its_key(tmp_path: Path) -> None:
    (engine,) = make_engines(WorkerConfig(**{**WHERE, "engine_url": "http://127.0.0.1:1"}))
    await engine.start()
    with pytest.raises(EngineFault, match=r"worker\.engine_url: no server answers: .*:1"):
        await engine.refit(await asyncio.to_thread(FakeHarness(tmp_path).snapshot, 0), "0-a")
    await engine.close()


@pytest.mark.may_block
async def test_the_reason_why_a_server_cannot_start_is_reported(tmp_path: Path) -> None:
    from tests.support.engine_harness import FakeHarness

    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho the driver is missing\nexit 1\n")
    python.chmod(0o755)
    (engine,) = make_engines(
        WorkerConfig(**{**WHERE, "engine_python": python, "state_dir": tmp_path / "state"})
    )
    await engine.start()
    with pytest.raises(EngineFault, match="the driver is missing"):
        await engine.refit(await asyncio.to_thread(FakeHarness(tmp_path).snapshot, 0), "0-a")
    assert engine.label is None
    assert not list((tmp_path / "state").rglob("keys*"))
    await engine.close()


def sleeping_server(folder: Path) -> SglangLaunch:
    python = folder / "python"
    python.write_text("#!/bin/sh\nexec sleep 600\n")
    python.chmod(0o755)
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    return SglangLaunch(python, [], folder / "state", kept)


async def test_two_servers_of_one_folder_have_keys_of_their_own(tmp_path: Path) -> None:
    """One ends while the next one starts."""
    launch = await asyncio.to_thread(sleeping_server, tmp_path)
    first, second = ServerProcess(launch), ServerProcess(launch)
    await first.start(tmp_path, "0-a")
    await second.start(tmp_path, "1-b")
    await first.stop()
    [keys] = (tmp_path / "state").glob("keys*")
    assert second.api_key in await asyncio.to_thread(keys.read_text)
    await second.stop()
    assert not list((tmp_path / "state").glob("keys*"))


async def test_a_server_that_just_starts_ends_with_its_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.support.engine_harness import FakeHarness

    begun, go, write = asyncio.Event(), threading.Event(), ServerProcess._write_keys
    loop = asyncio.get_running_loop()

    def slow(process: ServerProcess) -> None:
        loop.call_soon_threadsafe(begun.set)
        assert go.wait(30)
        write(process)

    monkeypatch.setattr(ServerProcess, "_write_keys", slow)
    engine = SglangEngine(await asyncio.to_thread(sleeping_server, tmp_path))
    snapshot = await asyncio.to_thread(FakeHarness(tmp_path).snapshot, 0)
    await engine.start()
    async with asyncio.TaskGroup() as tasks:
        refit = tasks.create_task(fault_of(engine.refit(snapshot, "0-a")))
        await begun.wait()
        process = engine.process
        closing = tasks.create_task(engine.close())
        while engine.process is not None:  # noqa: ASYNC110 - closing has come to the process
            await asyncio.sleep(0)
        go.set()
        await closing
        assert process is not None
        assert process._guard is not None
        assert process._guard.returncode is not None
        assert await refit
    assert engine.label is None


async def fault_of(work: Awaitable[object]) -> str:
    try:
        await work
    except EngineFault as fault:
        return str(fault)
    return ""
