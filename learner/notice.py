"""Ask whether the cloud will take this machine away soon, and stop the learner if so.

    learner.notice = "aws"              EC2's interruption notice: 2 minutes
                     "gcp"              Compute Engine's preemption: 30 s
                     "azure"            Azure's scheduled events, of the type Preempt: 30 s or more
                     "file:PATH"        a file that another program writes; its first line is the reason
                     "module:function"  returns a line once a notice has come, "" before

A thread asks every NOTICE_POLL_S. A failure is logged once, and the thread asks again: it never stops
the learner.
"""

import json
import logging
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path

from echo2d.client import OperatorFault
from echo2d.own_modules import load_own

# A notice comes at least 30 s before the end, and the clouds advise to ask every 5 s or more often.
NOTICE_POLL_S = 2.0
# The address is on the machine's own host, which answers within milliseconds or not at all.
_ANSWER_S_MAX = 2.0
# A reason is cut to this length.
_REASON_CHARS_MAX = 200
_FILE = "file:"

AskForNotice = Callable[[], str]

log = logging.getLogger("echo2d.learner")


@dataclass(frozen=True, slots=True)
class MetadataService:
    """The address at which a cloud announces that it will take a machine away."""

    base: str
    path: str
    reason: Callable[[str], str]  # an answer -> the reason in it, "" for none
    headers: Mapping[str, str] = field(default_factory=dict)
    # If a token is needed: the path and the headers of the PUT that asks for it, and the name of the header
    # in which the token is then sent.
    token: tuple[str, Mapping[str, str], str] | None = None

    def ask(self, base: str) -> str:
        """The reason of a notice, "" if none has come. OSError, ValueError: no answer, or a malformed one."""
        headers = dict(self.headers)
        if self.token is not None:
            path, asking, shown = self.token
            headers[shown] = _answer(base + path, asking, method="PUT")
        try:
            return self.reason(_answer(base + self.path, headers))
        except urllib.error.HTTPError as error:
            if error.code == HTTPStatus.NOT_FOUND:
                return ""
            raise


def _of_aws(answer: str) -> str:
    event = json.loads(answer)
    return f"the instance will {event['action']} at {event['time']}"


def _of_gcp(answer: str) -> str:
    return "the instance is preempted" if answer.strip() == "TRUE" else ""


def _of_azure(answer: str) -> str:
    events = [each for each in json.loads(answer)["Events"] if each["EventType"] == "Preempt"]
    return f"the machine is preempted not before {events[0]['NotBefore']}" if events else ""


CLOUDS = {
    "aws": MetadataService(
        "http://169.254.169.254",
        "/latest/meta-data/spot/instance-action",
        _of_aws,
        token=(
            "/latest/api/token",
            {"X-aws-ec2-metadata-token-ttl-seconds": "60"},
            "X-aws-ec2-metadata-token",
        ),
    ),
    "gcp": MetadataService(
        "http://metadata.google.internal",
        "/computeMetadata/v1/instance/preempted",
        _of_gcp,
        {"Metadata-Flavor": "Google"},
    ),
    "azure": MetadataService(
        "http://169.254.169.254",
        "/metadata/scheduledevents?api-version=2020-07-01",
        _of_azure,
        {"Metadata": "true"},
    ),
}


def asker(source: str, *, base: str | None = None) -> AskForNotice:
    """A function that asks the source of learner.notice. base: an address instead of the cloud's own.

    OperatorFault: the source is none of those in the module's docstring.
    """
    if source in CLOUDS:
        cloud = CLOUDS[source]
        return lambda: cloud.ask(base or cloud.base)
    if source.startswith(_FILE) and source != _FILE:
        path = Path(source.removeprefix(_FILE))
        return lambda: _of_file(path)
    module, _, name = source.partition(":")
    if not (module and name):
        raise OperatorFault(
            f'learner.notice: expected "", {", ".join(map(repr, CLOUDS))}, "file:PATH" or '
            f'"module:function"; found {source!r}'
        )
    try:
        hook = load_own(source)
    except (ImportError, AttributeError, OperatorFault) as error:
        raise OperatorFault(f"learner.notice: cannot load {source!r}: {error}") from error
    return lambda: _of_hook(hook)


class NoticeWatch:
    """Asks in a daemon thread until a notice comes, and then calls `told` with its reason, once."""

    def __init__(self, ask: AskForNotice, told: Callable[[str], object]) -> None:
        self._ask, self._told = ask, told
        self._left = threading.Event()
        self._failed = False
        self._thread = threading.Thread(target=self._run, name="notice", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop asking. Does not wait for a question that is under way."""
        self._left.set()

    def _run(self) -> None:
        while not (reason := self._reason()):
            if self._left.wait(NOTICE_POLL_S):
                return
        if not self._left.is_set():
            log.warning("this machine will be taken away: %s", reason)
            self._told(reason)

    def _reason(self) -> str:
        try:
            return self._ask()
        except Exception as error:  # noqa: BLE001 - a hook may raise anything, and must not end the watch
            if not self._failed:
                log.warning("cannot ask for a notice: %s: %s", type(error).__name__, error)
            self._failed = True
            return ""


def _of_file(path: Path) -> str:
    if not path.exists():
        return ""
    lines = path.read_text(errors="replace").splitlines()
    return _line(lines[0] if lines else "") or f"{path} exists"


def _of_hook(hook: Callable[[], object]) -> str:
    found = hook()
    if not isinstance(found, str):
        raise TypeError(f"expected a line of text from the hook; found {found!r}")
    return _line(found)


def _line(text: str) -> str:
    return " ".join(text.split())[:_REASON_CHARS_MAX]


def _answer(url: str, headers: Mapping[str, str], *, method: str = "GET") -> str:
    """The text of an answer, asked without a proxy: the address is on this machine's host."""
    request = urllib.request.Request(url, headers=dict(headers), method=method)  # noqa: S310 - http alone
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=_ANSWER_S_MAX) as answer:
        # At most 1 MiB: a notice has a few hundred bytes, a list of scheduled events some thousand.
        text: str = answer.read(1 << 20).decode()
    return text
