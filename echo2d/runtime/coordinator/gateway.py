"""The gateway's state in the coordinator process: open calls, the tokenizer, and call records.

    HTTP handler --CallAsked--> mailbox --> core
         ^                                    | ChoiceGrew, CallRefused
         +------------ queue of the call <----+

The queue of a call is bounded in bytes: a caller that does not read loses its call, and never
delays the loop. Not here: HTTP (`net/gateway`), or slots and versions (`core/work/calls`).
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from itertools import count
from pathlib import Path
from typing import Any

from aiohttp import web
from blake3 import blake3

from echo2d.config.coordinator import GatewayTable
from echo2d.core.cluster.events import VersionPublished
from echo2d.core.coordinator.events import CoordinatorEvent, CoordinatorRecord
from echo2d.core.rules.run import RunRules
from echo2d.core.work.calls.events import (
    CallAction,
    CallAsked,
    CallGone,
    CallId,
    CallRefused,
    ChoiceGrew,
    ChoiceStopped,
)
from echo2d.errors import Fault, OperatorFault, StoreFault, path_fault
from echo2d.net.gateway.episodes import ticket_of
from echo2d.net.gateway.errors import CallRefusal, Unread
from echo2d.net.http.json_fields import secret_of
from echo2d.net.security.auth import Caller
from echo2d.runtime.coordinator.agent_episodes import Tickets
from echo2d.runtime.run_dir.version_files import VersionFiles
from echo2d.store.json_log import JsonLog
from echo2d.texts.files import TEXT_FILES
from echo2d.texts.model_texts import ModelTexts

# Tokenizer files of one version; a tokenizer of 250,000 tokens takes 20 MB.
TEXT_BYTES_MAX = 64 << 20
TEMPLATE_BYTES_MAX = 1 << 20
# The most unread output of one call: 25 s of 32 choices, or what gathers in a minute behind one unread piece.
UNREAD_BYTES_MAX = 512 << 10

log = logging.getLogger("echo2d.gateway")


class _Call:
    """One open call. unread: a timeout, made to expire when the caller is too far behind."""

    def __init__(
        self,
        number: CallId,
        emit: Callable[[CoordinatorEvent], Awaitable[None]],
        unread: asyncio.Timeout,
    ) -> None:
        self.number = number
        self._emit = emit
        self._unread = unread
        self._unread_bytes = 0
        self._queue: asyncio.Queue[CallAction] = asyncio.Queue()

    def put(self, action: CallAction) -> None:
        # The call is ending already: its timeout has been triggered.
        if self._unread_bytes > UNREAD_BYTES_MAX:
            return
        self._unread_bytes += _size(action)
        self._queue.put_nowait(action)
        if self._unread_bytes > UNREAD_BYTES_MAX:
            self._unread.reschedule(0.0)

    async def next(self) -> ChoiceGrew | CallRefused:
        action = await self._queue.get()
        self._unread_bytes -= _size(action)
        return action

    async def stop(self, choice: int) -> None:
        await self._emit(ChoiceStopped(self.number, choice))


def _size(action: CallAction) -> int:
    # 256 bytes are counted for every event of a call, besides its tokens.
    return 256 + (
        len(action.tokens) + len(action.logprobs) if isinstance(action, ChoiceGrew) else 0
    )


class NewestTexts:
    """The newest published version, with its tokenizer and chat template.

    newest: as recovered at the start. template: replaces the version's own. day: as in `ModelTexts`.
    """

    def __init__(
        self, files: VersionFiles, newest: VersionPublished | None, template: str | None, day: str
    ) -> None:
        self._files, self.version = files, newest
        self._template, self._day = template, day
        # The texts, with the digest of the files from which they were made.
        self._texts: tuple[bytes, ModelTexts] | None = None
        # The path of the version for which `_texts` was checked.
        self._texts_of: str | None = None
        self._reading = asyncio.Lock()

    async def texts(self) -> ModelTexts:
        """CallRefusal: no version is published, or its tokenizer cannot be read."""
        version = self.version
        if version is None:
            raise CallRefusal(HTTPStatus.SERVICE_UNAVAILABLE, "late", "no version is published yet")
        async with self._reading:
            if self._texts is None or self._texts_of != version.path:
                try:
                    self._texts = await asyncio.to_thread(self._read, version)
                    self._texts_of = version.path
                except Fault as fault:
                    log.warning("cannot read the tokenizer version=%d: %s", version.version, fault)
                    detail = "the tokenizer of the newest version cannot be read"
                    raise CallRefusal(HTTPStatus.SERVICE_UNAVAILABLE, "late", detail) from fault
            return self._texts[1]

    def _read(self, of: VersionPublished) -> tuple[bytes, ModelTexts]:
        """The texts of a version, with the digest of their files. Blocking.

        They are made again only if the files changed, because that takes a second.
        """
        files = self._files.read(of.path, of.digest, TEXT_FILES, bytes_max=TEXT_BYTES_MAX)
        digest = blake3(repr(sorted(files.items())).encode()).digest()
        if self._texts is not None and self._texts[0] == digest:
            return self._texts
        return digest, ModelTexts(files, self._template, day=self._day)


class Gateway:
    """The backend of the gateway's HTTP endpoints.

    newest: its texts make prompts. caller: finds the holder of a secret. emit: puts an event into the core's mailbox.
    office: knows the tickets of agents outside.
    """

    def __init__(
        self,
        table: GatewayTable,
        rules: RunRules,
        newest: NewestTexts,
        *,
        call_log: JsonLog | None,
        caller: Callable[[str], Caller],
        emit: Callable[[CoordinatorEvent], Awaitable[None]],
        office: Tickets,
    ) -> None:
        self.office = office
        self.model, self.max_new_tokens = table.model, table.max_new_tokens
        self.vocab_size, self.stop_token_ids = rules.vocab_size, rules.stop_token_ids
        self._newest = newest
        self._caller = caller
        self._emit = emit
        self._calls: dict[CallId, _Call] = {}
        self._ids = count()
        self._closed = False
        self._log = call_log
        # Records that wait for the disk: of half as many calls as may be open. Further records are lost.
        self._records: asyncio.Queue[Mapping[str, Any]] = asyncio.Queue(256)

    # --- the loop's side

    def take(self, action: CallAction) -> None:
        """Hand an action of the core to its call; it is dropped if the call has ended."""
        call = self._calls.get(action.call)
        if call is not None:
            call.put(action)

    def durable(self, record: CoordinatorRecord) -> None:
        """Take a record that is in the ledger now."""
        if isinstance(record, VersionPublished):
            self._newest.version = record

    def close(self) -> None:
        """Tell all callers, present and future, to come back later."""
        self._closed = True
        for call in self._calls.values():
            call.put(_stopping(call.number))

    async def keep_records(self) -> None:
        """Write call records until cancelled, and then those that still wait."""
        while self._log is not None:
            records: list[Mapping[str, Any]] = []
            try:
                records.append(await self._records.get())
            finally:
                records += [self._records.get_nowait() for _ in range(self._records.qsize())]
                await self._write(records)

    # --- the endpoints' side

    def caller(self, request: web.Request) -> Caller:
        """The caller, by its secret or by the ticket of the episode that it plays.

        Denied, CallRefusal: the secret or the ticket is not valid.
        """
        if (ticket := ticket_of(request)) is None:
            return self._caller(secret_of(request))
        _, episode = self.office.find(ticket)
        group, sample = episode.at
        return Caller(f"episode {group}.{sample}", "agent")

    @asynccontextmanager
    async def open(self, make: Callable[[CallId], CallAsked]) -> AsyncIterator[_Call]:
        """Open a call for the time of the block. Unread: the caller does not read its output."""
        number, slow = CallId(next(self._ids)), False
        try:
            async with asyncio.timeout(None) as unread:
                call = self._calls[number] = _Call(number, self._emit, unread)
                if self._closed:
                    call.put(_stopping(number))
                await self._emit(make(number))
                yield call
        except (TimeoutError, Unread) as error:
            slow = True
            log.info("call ended call=%d: its caller does not read the output", number)
            raise Unread("the caller does not read") from error
        finally:
            del self._calls[number]
            await self._emit(CallGone(number, "slow" if slow else "gone"))

    async def texts(self) -> ModelTexts:
        return await self._newest.texts()

    def newest(self) -> dict[str, Any] | None:
        version = self._newest.version
        if version is None:
            return None
        return {"version": version.version, "digest": version.digest.hex()}

    def record(self, entry: dict[str, Any]) -> None:
        """Queue a call record for the disk; never waits."""
        if self._log is None:
            return
        try:
            self._records.put_nowait(entry)
        except asyncio.QueueFull:
            log.warning("a call record is lost: the disk is too slow")

    # --- inside

    async def _write(self, records: list[Mapping[str, Any]]) -> None:
        assert self._log is not None
        try:
            await asyncio.to_thread(self._log.append, records)
        except StoreFault as fault:
            log.warning("%d call records are lost: %s", len(records), fault)


def _stopping(call: CallId) -> CallRefused:
    return CallRefused(call, "stopping", "the coordinator is stopping", None)


def read_template(path: Path | None) -> str | None:
    """The operator's chat template, which replaces that of the snapshots. Blocking.

    OperatorFault: it cannot be read, is too large, or is not text.
    """
    if path is None:
        return None
    try:
        data = path.read_bytes()
        if len(data) > TEMPLATE_BYTES_MAX:
            raise OperatorFault(
                f"gateway.chat_template: expected at most {TEMPLATE_BYTES_MAX} bytes; "
                f"{path} has {len(data)}"
            )
        return data.decode()
    except OSError as error:
        raise path_fault(f"gateway.chat_template: cannot read {path}", error) from error
    except UnicodeDecodeError as error:
        raise OperatorFault(f"gateway.chat_template: expected UTF-8 text in {path}") from error
