"""The process that runs a task: started, limited and killed by `tasks/pool.py`, its only parent.

One socket; both ways a header and msgpack; requests are answered one by one, in order, with their numbers:

    ["start", task, options, limits, uid]           ->  ["ok", [name, stop_token_ids]]      first, once
    ["prompt", index]                               ->  ["ok", [tokens, secret, tags]]
    ["reward", tokens, secret, tags, output]        ->  ["ok", reward]

or ["error", reason], or ["broken", reason]: an error after which this process should be killed.

    parent --SIGTERM, or its death--> guard --SIGKILL--> task process and whatever it started

The process that was started stays behind as the guard: it runs none of the task's code, adopts what the task process
leaves, and ends only when all of that is gone. Whatever a task starts, in whatever session, ends with it.

The task's module is imported before the process gives up its user id, because only then it surely can read the
installation; everything else of the task (construction, prompts, rewards) runs afterwards.

What this module imports is the start-up time of a task process, so it imports little.
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
HEADER = struct.Struct(">II")  # length of the body, number of the request that it is or answers
NUMBER_MAX = (1 << 32) - 1

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
CLONE_NEWIPC = 0x08000000
CLONE_NEWNET = 0x40000000
SWEEP_S = 0.01  # between two looks for processes that were started meanwhile

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
    """Returns in the process that is to run the task; the other one ends it when told to, and ends after it."""
    wakes = {signal.SIGTERM, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, wakes)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    parent, task = os.getppid(), os.fork()
    if task == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, wakes)
        os.setsid()
        return
    link.close()
    while os.getppid() == parent and signal.sigwait(wakes) == signal.SIGCHLD and not _ended(task):
        pass
    while _kill_children():
        signal.sigtimedwait({signal.SIGCHLD}, SWEEP_S)
    os._exit(0)


def _ended(child: int) -> bool:
    """Also when it was another child that ended."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _kill_children() -> bool:
    """Kill and reap all children that there are now; whether there were any."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid():
                os.kill(int(stat.parent.name), signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
        return True
    return False


class TaskServer:
    """Answers requests with the task that the first one names. No exception of the task leaves it."""

    def __init__(self) -> None:
        self._task: Task
        self._cpu_s_max = resource.RLIM_INFINITY

    def answer(self, request: list[Any]) -> TaskReply:
        process = os.getpid()
        self._allow_cpu()
        try:
            reply = ("ok", self._perform(request))
        except BaseException as error:  # noqa: BLE001 - SystemExit too is an error of this request only
            reply = ("error", f"{type(error).__name__}: {error}"[:REASON_CHARS_MAX])
        if os.getpid() != process:
            os._exit(0)  # a copy that the task forked came back here; only the original answers
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
        """`cpu_s_max` from now on; used up, SIGXCPU ends this process."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        soft = self._cpu_s_max
        if soft != resource.RLIM_INFINITY:
            soft += math.ceil(used.ru_utime + used.ru_stime)
        resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))


def confine(limits: Mapping[str, int], uid: int | None) -> None:
    """Limit this process and what it starts, change to `uid` if given, gain nothing ever again, die with the guard."""
    os.umask(0o077)
    if not limits["network"]:
        _libc().unshare(CLONE_NEWNET | CLONE_NEWIPC)  # only root may; others keep the network
    for what, limit in (
        (resource.RLIMIT_AS, limits["memory_bytes_max"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes_max"]),
        (resource.RLIMIT_NOFILE, limits["files_max"]),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (limit, limit))
    if (
        uid is not None
    ):  # the kernel counts processes per user: without a user of its own, the operator's would count
        resource.setrlimit(
            resource.RLIMIT_NPROC, (limits["processes_max"], limits["processes_max"])
        )
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    _prctl(PR_SET_DUMPABLE, 0)  # no other process of this user looks into it
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # after setuid, which clears it
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # a detached grandchild becomes a child, so it is seen


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    _libc().prctl(option, value, 0, 0, 0)


def pack(message: object) -> bytes:
    """The body of one message. ValueError: over MESSAGE_BYTES_MAX; TypeError: not made of plain values."""
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
    make: Callable[..., Task] = load(TASKS.get(task, task))
    return make


def _has_children() -> bool:
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
