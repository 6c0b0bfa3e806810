"""Plants one bug after the other in a copy of the tree, and runs the tests that must find it: `make nightly-mutants`.

A mutant is a text in one file with its replacement, and the tests of which at least one must then fail. It breaks an
invariant or a gate of the design (docs/design/invariants.md). If a mutant survives, or its text is not exactly once in
the file, the exit code is 1.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).parents[1]
COPIED = ("echo2d", "learner", "tests", "tools", "pyproject.toml", "README.md")
TIMEOUT_S = 300.0
FAULTS = "tests/shells/sim/test_faults.py"


@dataclass(frozen=True, slots=True)
class Mutant:
    """rule: the invariant or gate that it breaks. old, new: the patch. tests: files, or parts of them, of which one
    must fail.
    """

    rule: str
    name: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]

    def planted(self, source: str) -> str:
        """The file with the bug in it. ValueError: the file does not have the text exactly once."""
        if source.count(self.old) != 1:
            raise ValueError(f"{self.path} does not have {self.old!r} exactly once")
        return source.replace(self.old, self.new)


MUTANTS = (
    Mutant(
        "I1, gate 1",
        "a worker one version too old may start a group",
        "echo2d/core/work/training/staleness.py",
        "max(0, step - 1 - self._bound)",
        "max(0, step - 2 - self._bound)",
        ("tests/unit/core/work/training/test_staleness.py",),
    ),
    Mutant(
        "I1, gate 2",
        "groups stay buffered that no batch can take",
        "echo2d/core/work/training/staleness.py",
        "if counts < oldest)",
        "if counts < oldest - 1)",
        ("tests/unit/core/work/training/test_staleness.py",),
    ),
    Mutant(
        "I1, gate 3",
        "a token of a version that the step is to make enters its batch",
        "echo2d/core/work/training/staleness.py",
        " and newest <= step - 1",
        "",
        ("tests/unit/core/work/training/test_staleness.py",),
    ),
    Mutant(
        "I1, gate 4",
        "the learner trains on a token that is one step too old",
        "learner/batch/checks.py",
        "span.version <= self.staleness_max",
        "span.version <= self.staleness_max + 1",
        ("tests/shells/learner/batch/test_checks.py",),
    ),
    Mutant(
        "I1, revocation",
        "output of revoked versions stays in the buffer",
        "echo2d/core/work/training/staleness.py",
        "out = self._take_out(g.record.group for g in self._buffer.values() if void(g.record))",
        "out: list[StoredGroup] = []",
        (FAULTS,),
    ),
    Mutant(
        "I2 at the worker",
        "spans name the newest version loaded, not what the engine reported",
        "echo2d/core/worker/leases.py",
        "VersionSpan(s.start, s.end, labels[s.label].version, labels[s.label].digest)",
        "VersionSpan(s.start, s.end, *[(k.version, k.digest) for k in labels.values()][-1])",
        (FAULTS,),
    ),
    Mutant(
        "I2 at the coordinator",
        "a span may name a version that this worker never served",
        "echo2d/core/work/training/partials.py",
        "version in peer.engine.acknowledged and ",
        "",
        ("tests/unit/core/work/training/test_judge.py",),
    ),
    Mutant(
        "I2, handed over",
        "spans of a second worker count from its own first token",
        "echo2d/core/protocol/trajectory.py",
        "start = span.start + shift",
        "start = span.start",
        (FAULTS,),
    ),
    Mutant(
        "I1, handed over",
        "a worker continues output of a revoked version",
        "echo2d/core/work/training/partials.py",
        "if self._versions.live(span.key) is None:\n                return False",
        "pass",
        ("tests/unit/core/work/training/test_partials.py",),
    ),
    Mutant(
        "I1, handed over",
        "a worker on an older version continues output of a newer one",
        "echo2d/core/work/training/group_work.py",
        "versions_grow = max(oldest, waiting.partial.version_last)",
        "versions_grow = oldest",
        ("tests/unit/core/work/training/test_partials.py",),
    ),
    Mutant(
        "I3",
        "the next version is written into the slot that an engine loads from",
        "echo2d/core/worker/versions.py",
        "return self._refitting is not None and self._refit_path != current",
        "return False",
        (FAULTS,),
    ),
    Mutant(
        "I3, flip",
        "for a moment no version is current",
        "echo2d/store/slots/current_slot.py",
        "        replace_file(path, json.dumps(facts).encode(), durable=False)",
        "        path.write_bytes(b'')\n"
        "        replace_file(path, json.dumps(facts).encode(), durable=False)",
        ("tests/shells/store/test_under_fire.py",),
    ),
    Mutant(
        "I3, rot",
        "a frame from the disk is passed on unchecked",
        "echo2d/store/frames.py",
        "span.frame for span in spans if not _intact(data, span, spans[0].offset_in_segment)",
        "span.frame for span in spans[:0]",
        ("tests/shells/runtime/peer/test_held_frames.py",),
    ),
    Mutant(
        "I3, slots",
        "an engine loads a slot unread",
        "echo2d/runtime/worker/engine_refit.py",
        "        await asyncio.to_thread(self._slots.require_intact, snapshot, order.digest)\n",
        "",
        ("tests/shells/runtime/worker/test_damaged_slots.py",),
    ),
    Mutant(
        "I3, roots",
        "a segment table is believed without a check",
        "echo2d/core/weights/verifier.py",
        "digest_of(data) == self._signed.get(segment),",
        "segment in self._signed,",
        ("tests/unit/core/weights/test_verifier.py",),
    ),
    Mutant(
        "I3, deltas",
        "a damaged base is taken for damaged frames",
        "echo2d/core/weights/form.py",
        "(base is None or base_sum(base) != record.base)",
        "base is None",
        ("tests/unit/core/weights/test_form.py",),
    ),
    Mutant(
        "I3, deltas",
        "changes reach past the end of a chunk",
        "echo2d/core/weights/delta_words.py",
        "require(done <= words,",
        "require(done <= words + 1,",
        ("tests/unit/core/weights/test_delta_words.py",),
    ),
    Mutant(
        "I3, deltas",
        "the changes of a class reach past the end of a chunk",
        "echo2d/core/weights/delta_split.py",
        "require(bool(np.all(nexts == ends)),",
        "require(bool(np.any(nexts == ends)),",
        ("tests/unit/core/weights/test_delta_split.py",),
    ),
    Mutant(
        "I3, slots",
        "an engine goes on computing with the files of its first version",
        "echo2d/engines/torch_engine/policy.py",
        "            _leave_files(model)\n",
        "            pass\n",
        (
            "tests/shells/engines/test_torch_engine.py::test_an_engine_serves_on_when_its_loaded_files_change",
        ),
    ),
    Mutant(
        "I8, bombs",
        "a frame is decompressed to whatever length it declares",
        "echo2d/core/base/zstd.py",
        'require(declared_length(frame) == length, "a zstd frame declares',
        'require(declared_length(frame) >= 0, "a zstd frame declares',
        ("tests/unit/core/base/test_zstd.py",),
    ),
    Mutant(
        "I4, durable",
        "a commit is acknowledged but not written",
        "echo2d/core/coordinator/learner_api.py",
        "            Persist(committed),\n",
        "",
        (FAULTS,),
    ),
    Mutant(
        "I4, once",
        "a frozen group stays in the buffer for the next batch",
        "echo2d/core/work/training/staleness.py",
        "stored = self._buffer.pop(group)",
        "stored = self._buffer[group]",
        (FAULTS,),
    ),
    Mutant(
        "I4, replay",
        "a restart forgets the frozen batches",
        "echo2d/core/work/training/staleness.py",
        "for frozen in recovered.frozen:",
        "for frozen in recovered.frozen[:0]:",
        (FAULTS,),
    ),
    Mutant(
        "I4, leases",
        "a restart forgets which leases were granted",
        "echo2d/core/work/training/recovery.py",
        "for attempt in recovered.given:",
        "for attempt in recovered.given[:0]:",
        ("tests/unit/core/work/training/test_recovery.py",),
    ),
    Mutant(
        "I4, fencing",
        "an older learner goes on",
        "echo2d/core/coordinator/learner_api.py",
        "if epoch != self.epoch or not epoch:",
        "if not epoch:",
        (FAULTS,),
    ),
    Mutant(
        "I5",
        "a group is complete before its last result",
        "echo2d/core/work/training/judge.py",
        "return self.complete(group) if group.is_whole and not group.unscored() else []",
        "return self.complete(group) if not group.unscored() else []",
        (FAULTS,),
    ),
    Mutant(
        "I5, rewards",
        "a reward that failed counts as zero",
        "echo2d/core/work/training/judge.py",
        "if event.reward is None or not math.isfinite(event.reward):",
        "if event.reward is not None and not math.isfinite(event.reward):",
        (FAULTS,),
    ),
    Mutant(
        "I5, pairs",
        "all samples are trained on, though twice as many are drawn",
        "echo2d/core/work/training/judge.py",
        "most_contrasting(rewards, self._rules.group_size)",
        "most_contrasting(rewards, self._rules.drawn(group.task))",
        (f"{FAULTS}::test_the_run_survives_pairs_informative_rows_and_priorities",),
    ),
    Mutant(
        "I5, patience",
        "a group is trained without samples that have just begun",
        "echo2d/core/work/training/patience.py",
        "group.begun + self._factor * (now - group.begun)",
        "group.begun + (now - group.begun)",
        ("tests/unit/core/work/training/test_patience.py",),
    ),
    Mutant(
        "I4, turns",
        "a restart asks an environment for a turn that it has answered",
        "echo2d/core/work/training/open_episodes.py",
        "        if answered is None:\n",
        "        if answered is None or kept.turn > 1:\n",
        ("tests/unit/core/work/training/test_open_episodes.py",),
    ),
    Mutant(
        "I4, turns",
        "a restart forgets the state of an environment",
        "echo2d/core/work/training/open_episodes.py",
        "Episode(kept.turn - 1, before, turn.state_before, now)",
        "Episode(kept.turn - 1, before, None, now)",
        (FAULTS,),
    ),
    Mutant(
        "I2, turns",
        "the seed of a sample counts tokens that its environment gave",
        "echo2d/core/work/training/group_work.py",
        "earlier = base.written - written",
        "earlier = start",
        ("tests/unit/core/work/training/test_open_episodes.py",),
    ),
    Mutant(
        "I2, audited turns",
        "an auditor's place in a seed counts tokens that an environment gave",
        "echo2d/core/audit/audits.py",
        "record.written_before(span.start)",
        "span.start",
        ("tests/unit/core/audit/test_audited_episodes.py",),
    ),
    Mutant(
        "I4, turns given back",
        "a late answer continues turns of an episode that has begun again",
        "echo2d/core/work/training/group_table.py",
        "base.first(base.turn_start) != (NOTHING if episode is None else episode.partial)",
        "base.turn_start != (0 if episode is None else episode.partial.length)",
        ("tests/unit/core/audit/test_audited_episodes.py",),
    ),
    Mutant(
        "I5, turns",
        "a group is complete while a sample waits for its environment",
        "echo2d/core/work/training/group_table.py",
        "return not (self.waiting or self.running or self.parked)",
        "return not (self.waiting or self.running)",
        ("tests/unit/core/work/training/test_open_episodes.py",),
    ),
    Mutant(
        "pairs, contrast",
        "only the highest rewards are kept",
        "echo2d/core/work/training/contrast.py",
        "key=lambda sample: (rewards[sample], sample))",
        "key=lambda sample: (-rewards[sample], sample))",
        ("tests/unit/property/work/training/test_contrast.py",),
    ),
    Mutant(
        "priority, age",
        "priority gives away the places of groups in flight",
        "echo2d/core/work/training/staleness.py",
        "for each in steps) - in_flight",
        "for each in steps)",
        ("tests/unit/core/work/training/test_staleness.py",),
    ),
    Mutant(
        "sampler, restart",
        "a restart forgets which rows differ",
        "echo2d/core/work/training/sampler.py",
        "            if self._keeps(row):\n",
        "            if row.equal:\n",
        ("tests/unit/core/work/training/test_sampler.py",),
    ),
    Mutant(
        "I6, silence",
        "the leases of a silent worker never end",
        "echo2d/core/work/leases.py",
        "if now >= lease.ends_at]",
        "if now >= lease.stuck_at + 1e9]",
        (FAULTS,),
    ),
    Mutant(
        "I6, deliveries",
        "a worker's leases depend only on its offered slots, not on what it delivers",
        "echo2d/core/work/deliveries.py",
        "work.allowed = math.ceil(min(SLOTS_MAX, most))",
        "work.allowed = SLOTS_MAX",
        ("tests/unit/core/work/test_deliveries.py",),
    ),
    Mutant(
        "quarantine, misreports",
        "a stream of impossible results leads to nothing",
        "echo2d/core/cluster/membership.py",
        'if not peer.service.misreports and peer.kind != "seed":',
        'if peer.kind == "seed":',
        ("tests/unit/core/work/training/test_judge.py",),
    ),
    Mutant(
        "access, damage",
        "a damaged row of the access table is read as it is",
        "echo2d/store/row_sums.py",
        'return pages == "ok" and kept == [(self._of(database),)]',
        'return pages == "ok"',
        ("tests/shells/runtime/run_dir/test_access_table.py",),
    ),
    Mutant(
        "I4, ledger",
        "a damaged row of the ledger is read as it is",
        "echo2d/store/row_sums.py",
        "if row_sum(table, *row) != kept:",
        "if kept is None:",
        ("tests/shells/store/test_ledger_damage.py",),
    ),
    Mutant(
        "I4, lost transactions",
        "a ledger without its newest transactions is used",
        "echo2d/store/ledger.py",
        "        if self._turn_file is not None and missing > 0:",
        "        if self._turn_file is not None and missing > 1 << 40:",
        ("tests/shells/store/test_ledger_damage.py",),
    ),
    Mutant(
        "I6, forgotten",
        "a lease continues though its worker has come back without it",
        "echo2d/core/work/scheduler.py",
        'actions += self._lose(lease, "forgotten", "the worker forgot it", now)',
        "self.leases.renew(lease, tokens=False, now=now)",
        ("tests/unit/core/work/test_kind.py",),
    ),
    Mutant(
        "I6, blame",
        "a worker that fails leases gets the next one at once",
        "echo2d/core/work/scheduler.py",
        "            worker.service.rest(now, at_least_s=lease.idle_s(now))\n",
        "            pass\n",
        ("tests/unit/core/work/training/test_groups.py",),
    ),
    Mutant(
        "I7, any kind",
        "a worker reports on leases of another one",
        "echo2d/core/work/leases.py",
        "return lease if lease is not None and lease.worker == peer.peer else None",
        "return lease",
        ("tests/unit/core/work/calls/test_calls.py", "tests/unit/core/work/test_kind.py"),
    ),
    Mutant(
        "I3, base",
        "a delta is made from a version that hardly any worker has",
        "echo2d/core/broadcast/catch_up_policy.py",
        "for peer in workers) >= len(workers):",
        "for peer in workers) >= 0:",
        ("tests/unit/core/broadcast/test_catch_up_policy.py",),
    ),
    Mutant(
        "I6, publish",
        "a version waits for the slowest worker",
        "echo2d/core/broadcast/spread_end.py",
        "return bool(transmission.verified) and now >= self.latest(transmission)",
        "return False",
        ("tests/unit/core/broadcast/test_spread_end.py",),
    ),
    Mutant(
        "I6, restart",
        "a plan with a smaller number is taken for an old one",
        "echo2d/core/relay/relay.py",
        "if state.plan == edges.plan and edges.generation <= state.generation:",
        "if state.plan is not None and (edges.plan, edges.generation) <= (state.plan, state.generation):",
        ("tests/unit/core/relay/test_relay.py",),
    ),
    Mutant(
        "credits, slow link",
        "a link that takes nothing holds up all others",
        "echo2d/core/relay/outlet.py",
        "            self._slow[link] = self._busy.pop(link)",
        "            self._slow[link] = now",
        ("tests/unit/core/relay/test_outlet.py",),
    ),
    Mutant(
        "credits, grow",
        "a relay with a queue still gets more",
        "echo2d/core/relay/credit.py",
        "if waiting == 0 and self._used_up:",
        "if self._used_up:",
        ("tests/unit/core/relay/test_credit.py",),
    ),
    Mutant(
        "credits, shrink",
        "a standing queue at a relay is never reduced",
        "echo2d/core/relay/credit.py",
        "self.frames - (self._least > WAITING)",
        "self.frames",
        ("tests/unit/core/relay/test_credit.py",),
    ),
    Mutant(
        "credits, claim",
        "a relay may claim to have passed on frames that it never got",
        "echo2d/core/relay/stripes.py",
        "if sequence + waiting > self.cursor or min(sequence, waiting) < 0:",
        "if min(sequence, waiting) < 0:",
        ("tests/unit/core/relay/test_passed_on.py",),
    ),
    Mutant(
        "credits, spare",
        "the seed sends more copies than its price allows",
        "echo2d/core/relay/stripes.py",
        "has_share = stripe.bound_bytes <= stripe.spare * self.transfer.known_bytes",
        "has_share = True",
        ("tests/unit/core/relay/test_stripes.py",),
    ),
    Mutant(
        "sealing, order",
        "a unit of a link opens again when it is repeated",
        "echo2d/net/security/sealing.py",
        "        self._units += 1\n        return",
        "        return",
        ("tests/shells/net/security/test_sealing.py",),
    ),
    Mutant(
        "uplink, line loss",
        "loss on the line is taken for a full queue",
        "echo2d/core/topology/uplink_pace.py",
        "if lost and long_trips:",
        "if lost:",
        ("tests/unit/core/topology/test_uplink_pace.py",),
    ),
    Mutant(
        "I7, leases",
        "a result counts whichever worker sends it",
        "echo2d/core/work/training/group_table.py",
        "return group if given.worker == peer and sample in given.samples else None",
        "return group if sample in given.samples else None",
        (FAULTS,),
    ),
    Mutant(
        "I7, credentials",
        "a revoked peer keeps its session",
        "echo2d/core/cluster/membership.py",
        "        self.left(peer)\n        return refused",
        "        return refused",
        (FAULTS,),
    ),
    Mutant(
        "I7, roots",
        "any signature will do",
        "echo2d/net/security/auth.py",
        "if not verifies(run_key, signature, _root_text(root)):",
        "if not signature:",
        ("tests/shells/net/security/test_auth.py",),
    ),
    Mutant(
        "I8",
        "a worker takes leases without end",
        "echo2d/core/worker/leases.py",
        "max(WORKER_LEASES_MAX, 2 * self._slots):\n            return",
        "1000 * WORKER_LEASES_MAX:\n            return",
        ("tests/unit/core/worker/test_leases.py",),
    ),
    Mutant(
        "renting, budget",
        "a box may live twice as long as there is money for",
        "echo2d/core/renting/budget.py",
        "paid_s = left_usd / max(room, offer.usd_per_h) * HOUR_S",
        "paid_s = 2 * left_usd / max(room, offer.usd_per_h) * HOUR_S",
        ("tests/unit/core/renting/test_budget.py",),
    ),
    Mutant(
        "renting, lists",
        "a list that has never shown a box is believed",
        "echo2d/core/renting/boxes.py",
        "unproven = box.rental.label, box.made and not box.rental.seen",
        "unproven = box.rental.label, False",
        ("tests/unit/core/renting/test_boxes.py",),
    ),
    Mutant(
        "renting, drain",
        "a box is stopped while its worker holds leases",
        "echo2d/core/renting/boxes.py",
        "if box.holds and now < box.stop_by:",
        "if box.holds and now < -box.stop_by:",
        ("tests/unit/core/renting/test_boxes.py",),
    ),
    Mutant(
        "capacity, windup",
        "a raise that ended no bubble is kept",
        "echo2d/core/capacity/target_raise.py",
        "if before - waited < FELL_MIN * to_end:",
        "if False:",
        ("tests/unit/core/capacity/test_target_raise.py",),
    ),
    Mutant(
        "capacity, price",
        "workers are activated that cost more than the waiting they end",
        "echo2d/core/capacity/pools.py",
        "return (self._learner + usd_per_h) * self.step_s(mu) / 3600.0",
        "return self.step_s(mu) / 3600.0",
        ("tests/unit/core/capacity/test_pools.py",),
    ),
    Mutant(
        "stragglers, chance",
        "an answer moves to a worker that looks faster by chance",
        "echo2d/core/work/training/stragglers.py",
        "math.exp(mean + (each - mean) * real / (real + off))",
        "math.exp(each)",
        ("tests/unit/core/work/training/test_stragglers.py",),
    ),
    Mutant(
        "stragglers, credit",
        "a worker that ends an answer is credited with another worker's tokens of it",
        "echo2d/core/capacity/measurements.py",
        "work.accepted += share",
        "work.accepted += 1.0",
        ("tests/unit/core/work/training/test_stragglers.py",),
    ),
    Mutant(
        "renting, need",
        "reports of workers can cause any number of boxes to be rented",
        "echo2d/core/capacity/demand.py",
        "return min(self.pools.best.mu - here, most - sum(one.mu for one in staying))",
        "return max(self.pools.best.mu - here, most + sum(one.mu for one in staying))",
        ("tests/unit/core/capacity/test_demand.py",),
    ),
    Mutant(
        "load, deadlines",
        "a known deadline outlives an event that brings an earlier one",
        "echo2d/core/coordinator/state.py",
        "        self._knows_wake_at = False\n        return [",
        "        return [",
        ("tests/unit/core/coordinator/test_activation_loop.py",),
    ),
    Mutant(
        "load, status",
        "a slow status is made again for each request",
        "echo2d/net/http/costly_answer.py",
        "if took_s < self._cheap_s else",
        "if took_s > self._cheap_s else",
        ("tests/shells/net/http/test_costly_answer.py",),
    ),
    Mutant(
        "columns",
        "columns of output that another worker continues are shifted by the given tokens",
        "echo2d/core/protocol/trajectory.py",
        "before = self.columns if self.spans else blank_columns(columns, self.length)",
        "before = self.columns or columns",
        ("tests/unit/core/protocol/test_columns.py",),
    ),
    Mutant(
        "columns",
        "a column that one of the workers did not write is taken as whole",
        "echo2d/core/protocol/columns.py",
        "if len(alike) == len(parts) and size",
        "if size",
        ("tests/unit/core/protocol/test_columns.py",),
    ),
    Mutant(
        "columns",
        "a run takes columns that it does not name",
        "echo2d/core/work/results.py",
        "columns = message.columns and wanted_columns(message.columns, rules.columns)",
        "columns = message.columns",
        ("tests/unit/core/work/training/test_partials.py",),
    ),
    Mutant(
        "attachments",
        "the attachment of a prompt that is used again goes with its group",
        "echo2d/store/ledger_rows.py",
        "(_DRAWN_AGAIN, (record.group,))",
        "(keep, (record.group,))",
        ("tests/shells/store/test_ledger.py",),
    ),
)


def caught_by(mutant: Mutant, tree: Path) -> str | None:
    """The first test that fails with the bug in the tree; None: the bug survives."""
    path = tree / mutant.path
    source = path.read_text(encoding="utf-8")
    path.write_text(mutant.planted(source), encoding="utf-8")
    # A planted bug may make a test wait for ever. Nothing else runs meanwhile, so a test that takes 60 s counts as one.
    options = ["-x", "-q", "-m", "not soak", "--timeout=60", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *mutant.tests]
    try:
        done = subprocess.run(
            command, cwd=tree, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return "a test that no longer ends"
    finally:
        path.write_text(source, encoding="utf-8")
    failed = [
        line.split()[1] for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))
    ]
    return failed[0] if failed else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "words", nargs="*", help="only mutants whose rule or name contains one of these"
    )
    words = parser.parse_args().words
    chosen = [
        each
        for each in MUTANTS
        if not words or any(word in f"{each.rule} {each.name}" for word in words)
    ]
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in COPIED:
            if (REPO / name).is_dir():
                shutil.copytree(REPO / name, tree / name, symlinks=True)
            else:
                shutil.copy2(REPO / name, tree / name)
        # The copy is not installed, so the link makes Python import the copy's learner.
        (tree / "echo2d" / "learner").symlink_to(tree / "learner")
        for mutant in chosen:
            started = time.monotonic()
            test = caught_by(mutant, tree)
            survivors += test is None
            print(
                f"{mutant.rule:22} {mutant.name}: {test or 'SURVIVES'} ({time.monotonic() - started:.0f} s)",
                flush=True,
            )
    print(f"{len(chosen) - survivors} of {len(chosen)} caught")
    return 1 if survivors or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
