"""Decides which version one worker prepares, loads into its engines and serves.

Roots and reports of slots and engines come in; orders to apply, to refit and to drop go out.

    root accepted --(planned, arrived, or its snapshot is in the spare slot)--> applying, one form
    applying      --(SnapshotReady)--> in a slot
    applying      --(ApplyRejected)--> rejected: send ApplyFailed; a new plan tries the form again
    in a slot     --(a root named its digest, and it is the newest such)--> refit
    refit         --(EngineRefitted)--> served
    refit         --(EngineRefitFailed)--> refit again after a backoff; if its slot is damaged, the
                                           form is applied again first
    any state     --(revoked)--> neither served nor applied

The newest publish wins. The order is by publish_seq, because a newer epoch may publish an older
version again. A snapshot is served only after a signed root that this process has seen named its
digest. There are two slots. Applying overwrites the one that is not current, so its snapshot is
lost, and no refit may be reading it (I3).

Beside the served version the engines may hold older ones (`HeldVersions`): adapters that they served before and that
stay loaded. Leases name them. A version that an engine has dropped is not loaded again, unless it is published again.

Not here: leases, frames, and the verification of signatures and bytes.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from echo2d.core.base.bounded_dict import keep_newest
from echo2d.core.base.ids import Epoch, FormId, PublishSeq, RunId, Version, version_label
from echo2d.core.protocol.control_messages import (
    ApplyFailed,
    HeldVersions,
    RefitDone,
    RefitFailed,
    VersionKey,
    VersionVerified,
)
from echo2d.core.weights.signed_index import Root
from echo2d.core.worker.events import (
    ApplyForm,
    ApplyRejected,
    CancelApply,
    DropForm,
    EngineRefitFailed,
    EngineRefitted,
    IndexRoot,
    KeepPublishSeq,
    RefitEngines,
    SendControl,
    SnapshotReady,
    Standing,
    VersionAction,
    WorkerNote,
)
from echo2d.core.worker.slot_snapshots import SNAPSHOT_SLOTS, SlotSnapshots

# A worker keeps at most this many forms: the one that spreads, the one that waits, and the two forms before them, for
# peers that still fetch those.
WORKER_FORMS_MAX = 4
# At most this many versions keep their label, because tokens of them may still come from an engine; with adapters, of
# S + 1 versions.
LABELS_MAX = 80
# Engines hold at most this many versions, whatever the coordinator says: each takes room on the device.
WORKER_HELD_MAX = 32
# At most this many refused forms are remembered. The coordinator sends one form at a time, so this is
# more than enough.
REFUSED_MAX = 64
# After this many failed refits to one version, any other version in a slot is preferred.
REFIT_TRIES_MAX = 3
# The backoff after a failed refit gives an engine time to recover. It doubles each time, up to a
# limit, because there may be no other version to serve.
REFIT_RETRY_S = 5.0
REFIT_RETRY_S_MAX = 160.0


@dataclass(slots=True)
class _Form:
    """One form whose root was accepted."""

    root: Root
    # Whether a slot held a version of the same number when the form's first root came.
    stood: bool = False
    arrived: bool = False
    rejected: bool = False

    @property
    def seq(self) -> PublishSeq:
        return self.root.facts.publish_seq

    @property
    def key(self) -> VersionKey | None:
        """The version and its digest; None until the form's last root, which has totals, came."""
        totals = self.root.totals
        return None if totals is None else VersionKey(self.root.facts.version, totals.snapshot)


Doing = Literal["receiving", "applying", "loading"]


@dataclass(frozen=True, slots=True)
class UnderWay:
    """A version on its way to the engines, and the present step."""

    what: Doing
    version: Version
    form: FormId | None  # None while engines load it


class WorkerVersions:
    """The versions of one worker; see the module docstring.

    `standing`: the snapshots in the slots, oldest first; the last one is current. `engines`: False
    for a relay peer, which applies and serves nothing. Methods return what to do.
    """

    def __init__(
        self,
        run_id: RunId,
        *,
        engines: bool,
        publish_seq: PublishSeq,
        standing: Iterable[Standing],
    ) -> None:
        self._run_id = run_id
        self._engines = engines
        self._publish_seq = publish_seq
        self._forms: dict[FormId, _Form] = {}
        self._snapshots = SlotSnapshots(standing)
        self._revoked: dict[VersionKey, Epoch] = {}
        self._refused: dict[FormId, None] = {}
        self._delta_seq = PublishSeq(-1)  # the newest publish of which a delta was announced
        # The forms with a plan. They are not in `_forms`, because a plan may come before its form's first
        # root.
        self._planned: dict[FormId, None] = {}
        # Stays set until ApplyForm is answered, even if the form is no longer wanted.
        self._applying: FormId | None = None
        self._cancelling = False
        self._refitting: VersionKey | None = None
        self._refit_path = ""  # the slot directory that the refit reads
        self._failures: dict[VersionKey, int] = {}
        self._retry_at = 0.0
        self._labels: dict[str, VersionKey] = {}
        self._served_seq = PublishSeq(-1)  # the newest publish that was served
        self.staleness_max = 0  # as the last welcome said
        self._to_hold = HeldVersions(1, ())  # the last one that came
        self.serving: VersionKey | None = None
        # What the engines hold beside the served version.
        self._beside: tuple[VersionKey, ...] = ()

    @property
    def labels(self) -> Mapping[str, VersionKey]:
        """Maps the labels that engines report to versions. Revoked versions are left out."""
        return self._labels

    @property
    def held(self) -> tuple[VersionKey, ...]:
        """The versions that all engines hold, the served one first; none while nothing is served."""
        return () if self.serving is None else (self.serving, *self._beside)

    @property
    def refitting(self) -> bool:
        """Whether a refit was ordered and has not ended."""
        return self._refitting is not None

    @property
    def awaits(self) -> bool:
        """Whether a newer version than the served one is on its way and has not failed so far.

        False while nothing is served.
        """
        served = (
            max(self._served_seq, self._snapshots.published.get(self.serving, -1))
            if self.serving is not None
            else -1
        )
        return self.serving is not None and any(
            form.seq > served
            and not form.rejected
            and (
                form.key is None
                or not (form.key == self.serving or form.key in self._revoked | self._failures)
            )
            for form in self._forms.values()
        )

    @property
    def under_way(self) -> UnderWay | None:
        """The work on the newest version that is not served yet."""
        form = self._applying
        if form is None and not self._engines:
            form = next(reversed([each for each in self._planned if each in self._forms]), None)
        known = None if form is None else self._forms.get(form)
        if form is not None and known is not None and (self._engines or not known.arrived):
            what: Doing = "applying" if known.arrived else "receiving"
            return UnderWay(what, known.root.facts.version, form)
        if self._refitting is not None:
            return UnderWay("loading", self._refitting.version, None)
        return None

    def refuses(self, form: FormId) -> bool:
        """Whether the last root of this form was refused; then its frames are not wanted either."""
        return form in self._refused

    def stands_mostly(self, form: FormId) -> bool:
        """Whether the slots should be searched for chunks of this form before they are fetched.

        True for a full form if a delta of the same publish came before, or if a slot held a version
        of the same number: then most chunks are probably here.
        """
        known = self._forms.get(form)
        if known is None or known.root.facts.kind != "full":
            return False
        return known.stood or known.seq == self._delta_seq

    def holding(self) -> tuple[VersionKey, ...]:
        """The unrevoked versions in the slots, the current one last; empty if that one is revoked."""
        return (
            ()
            if self._snapshots.current in self._revoked
            else tuple(key for key in self._snapshots if key not in self._revoked)
        )

    def hold(self, told: HeldVersions) -> None:
        """From the next refit on the engines hold these versions, as far as they hold them now."""
        self._to_hold = told

    # --- events; each method returns what to do ---

    def announced(self, root: Root, *, now: float) -> list[VersionAction]:
        """A root was verified. A new form is refused if its publish is older than the newest one seen."""
        refusal = self._refusal(root)
        if refusal:
            self._planned.pop(root.form, None)
            self._forms.pop(root.form, None)
            self._refused[root.form] = None
            keep_newest(self._refused, REFUSED_MAX)
            return [
                WorkerNote(f"root refused: {refusal}"),
                DropForm(root.form),
                *self.choose(now=now),
            ]
        self._refused.pop(root.form, None)
        actions: list[VersionAction] = [IndexRoot(root)]
        if root.facts.publish_seq > self._publish_seq:
            self._publish_seq = root.facts.publish_seq
            actions.append(KeepPublishSeq(self._publish_seq))
        if root.facts.kind != "full":
            self._delta_seq = max(self._delta_seq, root.facts.publish_seq)
        stood = any(key.version == root.facts.version for key in self._snapshots)
        form = self._forms.setdefault(root.form, _Form(root, stood))
        # Roots of one form grow, and may arrive out of order: keep the longest.
        if (root.segment_count, root.totals is not None) > (
            form.root.segment_count,
            form.root.totals is not None,
        ):
            form.root = root
        if form.key is not None:
            actions += self._named(root.form, form, form.key)
        return [*actions, *self._forget_old(), *self.choose(now=now)]

    def planned(self, form: FormId, *, now: float) -> list[VersionAction]:
        """This peer has a place in a plan for the form; a rejected form is tried again."""
        self._planned.pop(form, None)
        self._planned[form] = None
        keep_newest(self._planned, WORKER_FORMS_MAX)
        if form in self._forms:
            self._forms[form].rejected = False
        return self.choose(now=now)

    def arrived(self, form: FormId, *, now: float) -> list[VersionAction]:
        """All frames of the form are on disk."""
        known = self._forms.get(form)
        if known is None:
            return []
        known.arrived = True
        actions: list[VersionAction] = []
        if not self._engines and known.key is not None:
            actions.append(_verified(form, known.key))
        return [*actions, *self.choose(now=now)]

    def ready(self, event: SnapshotReady, *, now: float) -> list[VersionAction]:
        """The form's snapshot is in its slot, verified, and this slot is current."""
        key = VersionKey(event.version, event.digest)
        self._snapshots.put(key, event.path)
        self._apply_ended(event.form)
        form = self._forms.get(event.form)
        if form is not None:
            self._publish(key, form.seq)
        return [_verified(event.form, key), *self.choose(now=now)]

    def rejected(self, event: ApplyRejected, *, now: float) -> list[VersionAction]:
        """The form cannot become a snapshot here; its frames stay for other peers."""
        self._apply_ended(event.form)
        if event.form in self._forms:
            self._forms[event.form].rejected = True
        failed = ApplyFailed(event.form, event.reason, event.lacks_base)
        return [SendControl(failed), *self.choose(now=now)]

    def apply_cancelled(self, form: FormId, *, now: float) -> list[VersionAction]:
        self._apply_ended(form)
        return self.choose(now=now)

    def lost(self, form: FormId, reason: str, *, now: float) -> list[VersionAction]:
        """The disk cannot keep the form's frames: tell the coordinator and give the form up."""
        return [SendControl(ApplyFailed(form, reason)), *self.forgotten(form, now=now)]

    def forgotten(self, form: FormId, *, now: float) -> list[VersionAction]:
        """The form is no longer needed here."""
        dropped = self._forget(form) if form in self._forms else []
        return [*dropped, *self.choose(now=now)]

    def refitted(
        self, event: EngineRefitted, *, held_s: float = 0.0, now: float
    ) -> list[VersionAction]:
        """All engines were refitted.

        If the memory check failed, the refit counts as failed: the engines hold the weights of no version
        at all (I3). `held_s`: seconds for which the engines generated nothing while they waited for this
        version.
        """
        key = VersionKey(event.version, event.digest)
        if event.memory_ok is False:
            reason = "the engines' memory is not the snapshot"
            return self.refit_failed(
                EngineRefitFailed(event.version, event.digest, reason, None), now=now
            )
        self._refitting = None
        self._failures.pop(key, None)
        # The version may have been revoked while the engines loaded it.
        if key in self._revoked:
            self.serving = None
            return self.choose(now=now)
        self._learn_label(key)
        self.serving, self._beside = key, self._still_held(event.held, key)
        self._served_seq = max(
            self._served_seq, self._snapshots.published.get(key, self._served_seq)
        )
        done = RefitDone(
            event.version,
            event.digest,
            event.pause_s,
            event.memory_ok,
            held_s,
            event.recomputed_tokens,
            event.recompute_s,
            self.held,
            event.held_max,
        )
        return [SendControl(done), *self.choose(now=now)]

    def refit_failed(self, event: EngineRefitFailed, *, now: float) -> list[VersionAction]:
        """A refit failed: try again after a backoff; if its slot is damaged, first apply the form again."""
        key = VersionKey(event.version, event.digest)
        self._refitting = None
        # The same version may be in the other slot by now; that copy is not damaged.
        if event.damaged and self._snapshots.path(key) == self._refit_path:
            self._snapshots.lose(key)
        failures = self._failures | {key: self._failures.get(key, 0) + 1}
        self._failures = {
            each: count for each, count in failures.items() if each in self._snapshots
        }
        self._retry_at = now + min(
            REFIT_RETRY_S_MAX, REFIT_RETRY_S * 2.0 ** min(failures[key] - 1, 10)
        )
        # The engines may still serve the version from before. Any other version that they name was
        # never confirmed: its weights may be those that failed the memory check (I3).
        kept = None if event.label is None else self._labels.get(event.label)
        self._beside = self._still_held(event.held, kept)
        self.serving = kept if kept == self.serving else None
        failed = RefitFailed(event.version, event.digest, self.serving, event.reason, self.held)
        return [SendControl(failed), *self.choose(now=now)]

    def engine_lost(self, reason: str, *, now: float) -> list[VersionAction]:
        """An engine was lost: act as if the last refit had failed, so that it is done again.

        During a refit nothing is done, because the refit reports its own end.
        """
        if self.serving is None or self._refitting is not None:
            return []
        key = self.serving
        return self.refit_failed(EngineRefitFailed(key.version, key.digest, reason, None), now=now)

    def revoked(
        self, epoch: Epoch, keys: Collection[VersionKey], *, now: float
    ) -> list[VersionAction]:
        """The publishes of these versions in epochs below `epoch` were revoked."""
        actions: list[VersionAction] = []
        for key in keys:
            self._revoked[key] = epoch
            self._snapshots.revoke(key)
            self._labels = {label: named for label, named in self._labels.items() if named != key}
            self._beside = tuple(each for each in self._beside if each != key)
            if self.serving == key:
                self.serving = None
                actions.append(SendControl(RefitFailed(key.version, key.digest, None, "revoked")))
        for form, each in list(self._forms.items()):
            if each.key in keys and each.root.facts.epoch < epoch:
                actions += self._forget(form)
        # At most 4,096 revoked keys are remembered, which is more than an epoch ever revokes.
        keep_newest(self._revoked, 4096)
        return [*actions, *self.choose(now=now)]

    def choose(self, *, now: float) -> list[VersionAction]:
        """Choose the next version to refit to and the next form to apply, if any."""
        # The refit comes first: `_next_apply` must know whether one reads the spare slot.
        refit = self._next_refit(now)
        return [*refit, *self._next_apply()]

    def wake_at(self) -> float | None:
        """When a failed refit is due again, in monotonic seconds; None: no refit waits."""
        target = self._target()
        waits = target is not None and target != self.serving and self._refitting is None
        return self._retry_at if waits and self._engines else None

    # --- inside ---

    def _refusal(self, root: Root) -> str:
        """Why the root is refused; empty if it is accepted."""
        facts = root.facts
        if facts.run_id != self._run_id:
            return f"it belongs to run {facts.run_id}"
        if root.form not in self._forms and facts.publish_seq < self._publish_seq:
            return f"publish {facts.publish_seq} is older than {self._publish_seq}"
        key = None if root.totals is None else VersionKey(facts.version, root.totals.snapshot)
        if key is not None and self._revoked.get(key, Epoch(0)) > facts.epoch:
            return f"version {facts.version} of epoch {facts.epoch} is revoked"
        return ""

    def _named(self, form: FormId, known: _Form, key: VersionKey) -> list[VersionAction]:
        """An accepted root names the whole snapshot.

        If the snapshot is in the current slot already, it is verified without applying anything.
        """
        # `_refusal` accepted this root, so its epoch is new enough to restore a revoked version.
        self._revoked.pop(key, None)
        if not self._engines:
            return [_verified(form, key)] if known.arrived else []
        # A snapshot in the spare slot must be made current first, because the next delta is applied
        # to the current slot.
        if key != self._snapshots.current:
            return []
        self._publish(key, known.seq)
        return [_verified(form, key)]

    def _publish(self, key: VersionKey, seq: PublishSeq) -> None:
        if key not in self._revoked:
            self._snapshots.publish(key, seq)

    def _target(self) -> VersionKey | None:
        """The newest published version in a slot.

        A version with REFIT_TRIES_MAX failed refits is chosen only if there is no other.
        """

        published = self._snapshots.published

        def rank(key: VersionKey) -> tuple[bool, PublishSeq]:
            return self._failures.get(key, 0) < REFIT_TRIES_MAX, published[key]

        return max(published, key=rank, default=None)

    def _next_refit(self, now: float) -> list[VersionAction]:
        target = self._target()
        path = self._snapshots.path(target)
        if (
            not self._engines
            or self._refitting is not None
            or target is None
            or path is None
            or target == self.serving
            or (self._failures.get(target, 0) and now < self._retry_at)
        ):
            return []
        self._refitting, self._refit_path = target, path
        self._learn_label(target)
        most = max(1, min(self._to_hold.most, WORKER_HELD_MAX))
        kept = [each for each in self._to_hold.versions if each in self.held and each != target]
        labels = tuple(version_label(*each) for each in kept[: most - 1])
        return [RefitEngines(target.version, target.digest, path, self.staleness_max, labels, most)]

    def _still_held(
        self, labels: Collection[str], newest: VersionKey | None
    ) -> tuple[VersionKey, ...]:
        """The versions with these labels that were held before, except `newest`.

        Others that an engine names were never confirmed: their weights may be those that failed the memory check (I3).
        """
        named = {self._labels.get(label) for label in labels}
        return tuple(key for key in self.held if key in named and key != newest)

    def _learn_label(self, key: VersionKey) -> None:
        label = version_label(key.version, key.digest)
        self._labels.pop(label, None)
        self._labels[label] = key
        # Held versions keep their labels, however old they are.
        keep_newest(self._labels, LABELS_MAX, [version_label(*each) for each in self.held])

    def _next_apply(self) -> list[VersionAction]:
        """Apply the most wanted form, once nothing else is applied and no refit reads the slot."""
        form = self._wanted_form() if self._engines else None
        if self._applying is not None:
            applying = self._forms.get(self._applying)
            # A form that is being applied is applied to its end if all its frames have arrived; otherwise it gives way
            # to the wanted form.
            ends_soon = applying is not None and (
                applying.arrived or form in (None, self._applying)
            )
            if ends_soon or self._cancelling:
                return []
            self._cancelling = True
            return [CancelApply(self._applying)]
        if form is None or self._refit_reads_spare():
            return []
        key = self._forms[form].key
        stands = key.digest if key in self._snapshots and key is not None else None
        self._applying = form
        # Applying writes into the spare slot, so its snapshot can no longer be served.
        self._snapshots.lose_spare()
        return [ApplyForm(form, stands)]

    def _wanted_form(self) -> FormId | None:
        """The newest form to apply; None: there is none.

        It is planned, has arrived or is in the spare slot; it is newer than every published snapshot in a
        slot; and it is neither rejected nor revoked.
        """
        published = self._snapshots.published
        newest = max(published.values(), default=-1)
        wanted = [
            (each.seq, each.arrived, form)
            for form, each in self._forms.items()
            if (form in self._planned or each.arrived or each.key in self._snapshots)
            and not each.rejected
            if each.seq > newest
            and (each.key is None or each.key != self._snapshots.current)
            and each.key not in self._revoked
        ]
        return max(wanted)[2] if wanted else None

    def _refit_reads_spare(self) -> bool:
        """Whether a refit reads the slot that applying would overwrite."""
        # Both slots may hold the same version, so the paths are compared and not the keys.
        current = self._snapshots.path(self._snapshots.current)
        return self._refitting is not None and self._refit_path != current

    def _apply_ended(self, form: FormId) -> None:
        if self._applying == form:
            self._applying, self._cancelling = None, False

    def _forget_old(self) -> list[VersionAction]:
        """Evict the oldest forms above WORKER_FORMS_MAX, but never the one that is being applied."""
        actions: list[VersionAction] = []
        while len(self._forms) > WORKER_FORMS_MAX:
            others = [form for form in self._forms if form != self._applying]
            actions += self._forget(min(others, key=lambda form: self._forms[form].seq))
        return actions

    def _forget(self, form: FormId) -> list[VersionAction]:
        """Drop the form and its frames; if it is being applied, `_next_apply` cancels that."""
        del self._forms[form]
        self._planned.pop(form, None)
        return [DropForm(form)]

    def check(self) -> None:
        assert len(self._forms) <= WORKER_FORMS_MAX
        self._snapshots.check()
        assert len(self._labels) <= LABELS_MAX
        assert len(self._failures) <= 2 * SNAPSHOT_SLOTS
        assert len(self._planned) <= WORKER_FORMS_MAX
        assert len(self._refused) <= REFUSED_MAX
        assert not self._refused.keys() & self._forms.keys()
        assert self._applying is None or (
            len(self._snapshots) <= 1 and not self._refit_reads_spare()
        )
        assert self._applying in self._forms or self._applying is None or self._cancelling
        assert not self._snapshots.published.keys() & self._revoked.keys()
        assert not set(self._labels.values()) & self._revoked.keys()
        assert {*self.held} <= {*self._labels.values()}
        assert len(self.held) == len({*self.held})
        assert self._engines or (self._applying, self._refitting, self.serving) == (
            None,
            None,
            None,
        )
        assert all(form.seq <= self._publish_seq for form in self._forms.values())


def _verified(form: FormId, key: VersionKey) -> SendControl:
    return SendControl(VersionVerified(form, key.version, key.digest))
