"""Decide what becomes of an apply in place that a kill has cut off, and of one that is to be undone.

A delta may be written over its base, in the current slot. What undoes it is kept beside the slot
(`undo_log.py`) until the version is served:

    base --begin--> changing --commit--> new, unsettled --clear--> new
     ^                 |                      |
     +-- end, restart -+------ roll back -----+

The undo log names the base, and current.json tells what is true of it: if it still says what it said
when the apply began, the apply is undone. Blocking functions.
"""

import json
import logging
from functools import partial
from pathlib import Path

from echo2d.errors import IntegrityFault
from echo2d.store.budget import DiskBudget
from echo2d.store.disk import read_file, store_faults
from echo2d.store.slots.current_slot import CURRENT, SLOTS, CurrentSlot
from echo2d.store.slots.proofs import SlotProofs
from echo2d.store.slots.undo_log import UndoLog

log = logging.getLogger("echo2d.store")


class AppliesInPlace:
    """The undo logs of both slots. Raises OSError, for the caller to translate."""

    def __init__(self, root: Path, budget: DiskBudget, proofs: SlotProofs) -> None:
        self._root, self._budget, self._proofs = root, budget, proofs
        # Whether an undo log may be on disk.
        self.undoable = True
        for slot in SLOTS:
            budget.note(f"undo {slot}", self._log(slot).size())

    def begin(self, base: CurrentSlot) -> UndoLog:
        """Begin to keep what restores this slot."""
        self.undoable = True
        undo = self._log(base.slot)
        undo.begin(base)
        return undo

    def clear(self, slot: str) -> None:
        """Forget what would undo an apply in this slot."""
        if self.undoable:
            self._log(slot).clear()

    def base_of(self, current: CurrentSlot) -> CurrentSlot | None:
        """The version that was overwritten in this slot. None: nothing can be undone."""
        undo = self._log(current.slot)
        if not self.undoable or not undo.exists:
            return None
        try:
            return undo.base()
        except (ValueError, KeyError, TypeError, IntegrityFault) as error:
            log.warning("cannot be undone path=%s error=%s", current.directory, error)
            return None

    def mend(self) -> None:
        """Undo an apply that was begun and neither committed nor undone.

        If current.json names this slot's next version, that one is complete; if it names the other
        slot, nothing is to be undone any more. StoreFault: the disk refuses.
        """
        if not self.undoable:
            return
        path, left = self._root / CURRENT, False
        with store_faults("undoing an apply in", self._root):
            says = read_file(path) if path.exists() else b""
            for slot in SLOTS:
                undo = self._log(slot)
                try:
                    base = undo.base() if undo.exists else None
                    if base is not None and base.encode() == says:
                        log.info("undoing an apply slot=%s", slot)
                        self._proofs.forget(self._root / slot / "model")
                        undo.undo(base)
                    elif base is not None and json.loads(says)["slot"] == slot:
                        left = True
                    else:
                        undo.clear()
                except (ValueError, KeyError, TypeError, IntegrityFault) as error:
                    # `SlotStore.require_intact` finds out what is in the slot.
                    log.warning("cannot be undone slot=%s error=%s", slot, error)
                    undo.clear()
        self.undoable = left

    def _log(self, slot: str) -> UndoLog:
        return UndoLog(self._root / slot, partial(self._budget.claim, f"undo {slot}"))
