"""Notices that a machine will be taken away, from clouds, files and hooks."""

import json
import logging
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from echo2d.client import OperatorFault
from echo2d.learner import notice
from echo2d.learner.__main__ import main
from echo2d.learner.config import LearnerConfig
from echo2d.learner.notice import CLOUDS, NoticeWatch, asker
from tests.support.learner import rows_of, write_config
from tests.support.polling import HANG_S
from tests.support.scripted_coordinator import ScriptedCoordinator

TIME = "2026-03-04T05:06:07Z"
EVENT = {"EventId": "1", "ResourceType": "VirtualMachine", "NotBefore": TIME}


class Metadata:
    """Imitates the metadata services of the clouds at once. gone: a notice has come."""

    def __init__(self) -> None:
        self.gone = False
        self.status = 200
        self.asked: list[tuple[str, str]] = []
        metadata = self

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                self.answer()

            def do_GET(self) -> None:
                self.answer()

            def answer(self) -> None:
                metadata.asked.append((self.command, self.path))
                code, text = metadata.answer_to(self.command, self.path, self.headers.get)
                self.send_response(code)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: object) -> None:
                """Write no log."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.base = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def answer_to(
        self, method: str, path: str, header: Callable[[str], str | None]
    ) -> tuple[int, str]:
        if self.status != 200:
            return self.status, "no"
        if (method, path) == ("PUT", "/latest/api/token"):
            return (200, "secret") if header("X-aws-ec2-metadata-token-ttl-seconds") else (400, "")
        if path == "/latest/meta-data/spot/instance-action":
            if header("X-aws-ec2-metadata-token") != "secret":
                return 401, ""
            return (
                (200, json.dumps({"action": "terminate", "time": TIME})) if self.gone else (404, "")
            )
        if path == "/computeMetadata/v1/instance/preempted":
            flavor = header("Metadata-Flavor") == "Google"
            return (200, "TRUE" if self.gone else "FALSE") if flavor else (403, "")
        if path == "/metadata/scheduledevents?api-version=2020-07-01":
            events = [{**EVENT, "EventType": "Freeze"}]
            events += [{**EVENT, "EventType": "Preempt"}] * self.gone
            return (
                (200, json.dumps({"Events": events})) if header("Metadata") == "true" else (400, "")
            )
        return 404, ""

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> Iterator[Metadata]:
    # A proxy of this name does not exist, so it must not be used.
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setattr(notice, "NOTICE_POLL_S", 0.01)
    found = Metadata()
    yield found
    found.close()


@pytest.mark.parametrize(
    ("cloud", "reason"),
    [
        ("aws", f"the instance will terminate at {TIME}"),
        ("gcp", "the instance is preempted"),
        ("azure", f"the machine is preempted not before {TIME}"),
    ],
)
def test_a_cloud_gives_notice(metadata: Metadata, cloud: str, reason: str) -> None:
    ask = asker(cloud, base=metadata.base)
    assert ask() == ask() == ""
    metadata.gone = True
    assert ask() == reason


@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_metadata_service_that_fails_is_logged_once_and_asked_again(
    metadata: Metadata, cloud: str, caplog: pytest.LogCaptureFixture
) -> None:
    metadata.status = 500
    reasons: list[str] = []
    asked_often, heard = threading.Event(), threading.Event()
    ask = asker(cloud, base=metadata.base)

    def count() -> str:
        if len(metadata.asked) > 5:
            asked_often.set()
        return ask()

    def told(reason: str) -> None:
        reasons.append(reason)
        heard.set()

    watch = NoticeWatch(count, told)
    watch.start()
    assert asked_often.wait(HANG_S)
    metadata.gone, metadata.status = True, 200
    assert heard.wait(HANG_S)
    watch._thread.join()
    assert len(reasons) == 1
    lines = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert lines[0].startswith("cannot ask for a notice: HTTPError: HTTP Error 500")
    assert lines[1:] == [f"this machine will be taken away: {reasons[0]}"]


def test_a_watch_that_is_stopped_asks_no_more(metadata: Metadata) -> None:
    watch = NoticeWatch(asker("gcp", base=metadata.base), lambda reason: pytest.fail(reason))
    watch.start()
    watch.stop()
    watch._thread.join(HANG_S)
    assert not watch._thread.is_alive()


def test_a_file_gives_notice_by_its_first_line(tmp_path: Path) -> None:
    path = tmp_path / "notice"
    ask = asker(f"file:{path}")
    assert ask() == ""
    path.touch()
    assert ask() == f"{path} exists"
    path.write_text("maintenance  at noon\nsecond line\n")
    assert ask() == "maintenance at noon"


@pytest.mark.usefixtures("metadata")
def test_a_hook_gives_notice_and_may_fail(caplog: pytest.LogCaptureFixture) -> None:
    answers: list[object] = [OSError("no answer"), None, "", "the lease ends"]
    heard = threading.Event()

    def hook() -> object:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(notice, "hook_of_a_test", hook, raising=False)
        ask = asker("echo2d.learner.notice:hook_of_a_test")
    NoticeWatch(ask, lambda reason: heard.set()).start()
    assert heard.wait(HANG_S)
    assert [each.getMessage() for each in caplog.records if "cannot" in each.getMessage()] == [
        "cannot ask for a notice: OSError: no answer"
    ]


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("ec2", "learner.notice: expected \"\", 'aws', 'gcp', 'azure', \"file:PATH\" or"),
        ("file:", "learner.notice: expected"),
        ("nothing_of_this_name:hook", "learner.notice: cannot load 'nothing_of_this_name:hook'"),
        ("json:hook", "learner.notice: cannot load 'json:hook'"),
    ],
)
def test_an_unknown_source_of_notices_is_refused(source: str, line: str) -> None:
    with pytest.raises(OperatorFault) as refused:
        asker(source)
    assert str(refused.value).startswith(line)


def test_a_notice_stops_the_learner_as_a_signal_does(
    config: LearnerConfig,
    served: ScriptedCoordinator,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The notice comes after the second commit. The next steps wait until the learner has seen it."""
    monkeypatch.setattr(notice, "NOTICE_POLL_S", 0.01)
    path = write_config(
        tmp_path / "run.toml",
        config,
        steps=10_000,
        notice=f"file:{tmp_path / 'notice'}",
    )
    served.on_commit = lambda step: (tmp_path / "notice").touch() if step == 2 else None
    assert main(["--config", str(path)]) == 0
    last = rows_of(config)[-1]["step"]
    assert 2 <= last < 10_000
    newest = max(path.name for path in (config.out_dir / "checkpoints").iterdir())
    assert newest == f"step-{last:08d}-epoch-1"
