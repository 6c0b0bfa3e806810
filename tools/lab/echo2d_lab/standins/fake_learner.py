"""A learner without a model: takes a batch, "trains", commits, publishes the next version, reports a checkpoint."""

import threading
from concurrent.futures import CancelledError
from pathlib import Path

import numpy as np

from echo2d.client import Batch, Coordinator
from echo2d.errors import Fault
from echo2d_lab.standins.snapshots import write_model

WEIGHTS = 1 << 14  # weights of each version, 64 KiB; only their arrival matters


class FakeLearner:
    """Runs in a thread of its own. steps: committed so far. fault: why it ended before it was stopped.

    t_train_s: it sleeps this long in each train step. resume_step: the last step that an earlier
    learner has checkpointed. A learner of another kind overrides `snapshot` and `took`.
    """

    def __init__(
        self,
        url: str,
        token_file: Path,
        snapshot_root: Path,
        *,
        t_train_s: float = 0.0,
        resume_step: int = 0,
    ) -> None:
        self.steps = resume_step
        self._t_train_s = t_train_s
        self.fault: Fault | None = None
        self._client = Coordinator(url, token_file=token_file)
        self._root = snapshot_root
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scripted-learner", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._client.close()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._train()
        except CancelledError:
            pass  # it was stopped during a call
        except Fault as fault:
            self.fault = fault

    def _train(self) -> None:
        self._client.open_session(self.steps)
        self._publish(self.steps)
        while not self._stopped.is_set():
            batch = self._client.take_batch(self.steps + 1)
            if self._stopped.wait(self._t_train_s):
                return
            self._client.commit(batch, t_train_s=self._t_train_s)
            self.took(batch)
            self.steps += 1
            self._publish(self.steps)
            self._client.checkpoint(self.steps)

    def _publish(self, version: int) -> None:
        self._client.publish(version, self.snapshot(self._root / f"v{version}", version))

    def snapshot(self, folder: Path, version: int) -> Path:
        """Write this version's model into a new folder."""
        weights = np.full(WEIGHTS, version, dtype="<f4")
        return write_model(folder, [weights.data])

    def took(self, batch: Batch) -> None:
        """Called after each commit."""
