"""Write the states of models after their optimizer steps, beside training.

    optimizer step --a copy of the state--> a thread writes it durably --> reported to the coordinator

A learner that loads such a state goes on as if it had run the steps itself. A model is at most one state behind: its
next one waits until the last one is written. A state that cannot be written is not reported, and the next step tries
again with its own.
"""

import logging
import time
from collections.abc import Callable, Collection
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from echo2d.client import StoreFault
from echo2d.logs import say

# States in memory, of different models: one is being written, the others wait.
STATES_WAITING_MAX = 4

log = logging.getLogger("echo2d.learner")


@dataclass(frozen=True, slots=True)
class _State:
    """The state of a model after its operation `number`, an optimizer step."""

    model: str
    number: int
    directory: Path


class SlotStates:
    """See the module docstring. The interpreter does not exit before all are written."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "states")
        self._writing: dict[str, Future[_State | None]] = {}
        # The last state of each model that is on disk and was not reported.
        self._written: dict[str, _State] = {}

    def write(
        self,
        model: str,
        number: int,
        directory: Path,
        copy: Callable[[], Callable[[Path], int]],
    ) -> None:
        """Have the state written, as soon as there is room for its copy. number: of the optimizer step.

        copy: copies it, and returns what writes the copy into a directory and returns the bytes there.
        """
        state = _State(model, number, directory)
        self.wait_for(model)
        while len(self._writing) >= STATES_WAITING_MAX:
            self._wait()
        try:
            write = copy()
        except (MemoryError, RuntimeError) as error:
            # RuntimeError: so torch says that memory is short. The step itself has succeeded.
            _warn(state, error)
            return
        self._writing[model] = self._pool.submit(_write, state, write)

    def written(self) -> tuple[tuple[str, int], ...]:
        """The last step of each model whose state is on disk, as (model, number), without those that were forgotten."""
        self._collect()
        # The coordinator may have had some deleted.
        self._written = {
            model: state for model, state in self._written.items() if state.directory.is_dir()
        }
        return tuple((model, state.number) for model, state in self._written.items())

    def forget(self, reported: Collection[tuple[str, int]]) -> None:
        """Do not name these again."""
        for model, number in reported:
            state = self._written.get(model)
            if state is not None and state.number == number:
                del self._written[model]

    def wait_for(self, model: str) -> None:
        """Wait until no state of this model is being written."""
        while model in self._writing:
            self._wait()

    def settle(self) -> None:
        """Wait until all are written."""
        while self._writing:
            self._wait()

    def _wait(self) -> None:
        wait(self._writing.values(), return_when=FIRST_COMPLETED)
        self._collect()

    def _collect(self) -> None:
        for model, writing in list(self._writing.items()):
            if writing.done():
                del self._writing[model]
                if (state := writing.result()) is not None:
                    self._written[model] = state


def _write(state: _State, write: Callable[[Path], int]) -> _State | None:
    """None: it could not be written."""
    began_at = time.monotonic()
    try:
        size = write(state.directory)
    except StoreFault as fault:
        _warn(state, fault)
        return None
    said = {"model": state.model, "number": state.number, "bytes": size}
    say(log, logging.DEBUG, "wrote", **said, seconds=f"{time.monotonic() - began_at:.1f}")
    return state


def _warn(state: _State, fault: Exception) -> None:
    line = " ".join(str(fault).split()) or type(fault).__name__
    log.warning(
        "the state of %s after operation %d is not saved: %s", state.model, state.number, line
    )
