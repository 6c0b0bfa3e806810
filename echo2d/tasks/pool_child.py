"""The process that runs a task. Its parent starts, limits and kills it (`process`, `pool`).

Both speak over one socket, with a header and msgpack. The child answers requests one by one, in
order, under their numbers:

    ["start", task, options, limits, uid]           ->  ["ok", [name, stop_token_ids]]      first, once
    ["prompt", index]                               ->  ["ok", [tokens, secret, tags]]
    ["reward", tokens, secret, tags, output]        ->  ["ok", reward]

or ["error", reason], or ["broken", reason]: an error after which this process should be killed.

    parent --SIGTERM, or its death--> guard --SIGKILL--> task process and all that it started

The started process forks and stays behind as the guard. It runs none of the task's code, adopts the
processes that the task process leaves, and ends when all of them are gone. So whatever a task
starts, in whatever session, ends with it.

The task's module is imported while the process still has the parent's user id, which can read the
installation. Construction, prompts and rewards run under the task's user id.

This module's imports are the start-up time of a task process, so it imports little.
"""

import contextlib
import ctypes
import math
import os
import resource
import signal
import socket
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgpack

from echo2d.registry import TASKS, load
from echo2d.tasks.base import Prompt, Task

MESSAGE_BYTES_MAX = 1 << 20  # a prompt and an answer of 100,000 tokens each fit
REASON_CHARS_MAX = 500  # enough for the text of an exception; it ends up in logs
# The length of the body, and the number of the request that the message is or answers.
HEADER = struct.Struct(">II")
NUMBER_MAX = (1 << 32) - 1

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
CLONE_NEWIPC = 0x08000000
CLONE_NEWNET = 0x40000000
# Processes may start others while the guard kills them. It looks again this often.
SWEEP_S = 0.01

TaskReply = tuple[str, Any]


def main(descriptor: int) -> None:
    """Serve the socket until the parent closes it."""
    link = socket.socket(fileno=descriptor)
    guard(link)
    server = TaskServer()
    try:
        while True:
            number, request = _receive(link)
            body = _packed(server.answer(request))
            link.sendall(HEADER.pack(len(body), number) + body)
    except EOFError:
        return


def guard(link: socket.socket) -> None:
    """Fork. The child returns and runs the task; the parent stays here as its guard and exits.

    The guard kills the child at SIGTERM or when its own parent dies.
    """
    # Blocked signals stay pending for `sigwait`, so none can be lost before it is called.
    wakes = {signal.SIGTERM, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, wakes)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    parent, task = os.getppid(), os.fork()
    if task == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, wakes)
        os.setsid()
        return
    # Only the child may hold the socket: its end must be the end of the file for the parent.
    link.close()
    while os.getppid() == parent and signal.sigwait(wakes) == signal.SIGCHLD and not _ended(task):
        pass
    while _kill_children():
        signal.sigtimedwait({signal.SIGCHLD}, SWEEP_S)
    os._exit(0)


def _ended(child: int) -> bool:
    """Return whether this child has ended. SIGCHLD may have told of an adopted one instead."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _kill_children() -> bool:
    """Kill and reap all present children; return whether any is left to reap."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name before the last ")" may hold blanks and brackets; the parent's id follows it.
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid():
                os.kill(int(stat.parent.name), signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
        return True
    return False


class TaskServer:
    """Answers requests with the task that the first one names. It lets no exception of it pass."""

    def __init__(self) -> None:
        self._task: Task
        self._cpu_s_max = resource.RLIM_INFINITY

    def answer(self, request: list[Any]) -> TaskReply:
        process = os.getpid()
        self._allow_cpu()
        try:
            reply = ("ok", self._perform(request))
        # SystemExit too is an error of this request only.
        except BaseException as error:  # noqa: BLE001
            reply = ("error", f"{type(error).__name__}: {error}"[:REASON_CHARS_MAX])
        # The task may have forked, and the copy came back here. Only the original answers.
        if os.getpid() != process:
            os._exit(0)
        return ("broken", "it left processes behind") if _has_children() else reply

    def _perform(self, request: list[Any]) -> Any:
        match request:
            case ["start", task, options, limits, uid]:
                self._cpu_s_max = limits["cpu_s_max"]
                make = _import(task)
                confine(limits, uid)
                self._task = make(**options)
                return self._task.name, [int(token) for token in self._task.stop_token_ids]
            case ["prompt", index]:
                prompt = self._task.prompt(index)
                return [int(token) for token in prompt.tokens], prompt.secret, prompt.tags
            case ["reward", tokens, secret, tags, output]:
                reward = float(self._task.reward(Prompt(tuple(tokens), secret, tags), output))
                if not math.isfinite(reward):
                    raise ValueError(f"the reward is {reward}")
                return reward
            case _:
                raise ValueError("an unknown request")

    def _allow_cpu(self) -> None:
        """Allow `cpu_s_max` more seconds of CPU time. After them SIGXCPU ends this process."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        soft = self._cpu_s_max
        if soft != resource.RLIM_INFINITY:
            soft += math.ceil(used.ru_utime + used.ru_stime)
        resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))


def confine(limits: Mapping[str, int], uid: int | None) -> None:
    """Limit this process and all that it starts, and change to user `uid` if given.

    From then on it cannot gain privileges, and it dies with the guard.
    """
    os.umask(0o077)
    if not limits["network"]:
        # Only root may do this. For another user the call fails, and the network stays.
        _libc().unshare(CLONE_NEWNET | CLONE_NEWIPC)
    for what, limit in (
        (resource.RLIMIT_AS, limits["memory_bytes_max"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes_max"]),
        (resource.RLIMIT_NOFILE, limits["files_max"]),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (limit, limit))
    # The kernel counts processes per user. Without a user of its own, the task would be limited by
    # the operator's processes.
    if uid is not None:
        resource.setrlimit(
            resource.RLIMIT_NPROC, (limits["processes_max"], limits["processes_max"])
        )
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    # No other process of this user may read its memory.
    _prctl(PR_SET_DUMPABLE, 0)
    # After setuid, which clears it.
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # A detached grandchild becomes a child, so `_has_children` sees it.
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    _libc().prctl(option, value, 0, 0, 0)


def pack(message: object) -> bytes:
    """Encode the body of one message.

    ValueError: it is longer than MESSAGE_BYTES_MAX. TypeError: it holds other than plain values.
    """
    body: bytes = msgpack.packb(message)
    if len(body) > MESSAGE_BYTES_MAX:
        raise ValueError(f"a message of {len(body)} bytes is over the limit of {MESSAGE_BYTES_MAX}")
    return body


def _packed(reply: TaskReply) -> bytes:
    try:
        return pack(reply)
    except (TypeError, ValueError, OverflowError) as error:
        return pack(("error", f"{type(error).__name__}: {error}"[:REASON_CHARS_MAX]))


def _import(task: str) -> Callable[..., Task]:
    # The registry knows echo2d's own tasks by a short name; any other is "module:Class".
    make: Callable[..., Task] = load(TASKS.get(task, task))
    return make


def _has_children() -> bool:
    """Reap at most one ended child; return whether there was any child, ended or not."""
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return False
    return True


def _receive(link: socket.socket) -> tuple[int, Any]:
    length, number = HEADER.unpack(_exactly(link, HEADER.size))
    return number, msgpack.unpackb(_exactly(link, length))


def _exactly(link: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = link.recv(count - len(parts))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)
