"""Runs a coordinator again from its ledger, to show its state, contradictions in it, and the story of one group.

    python -m tools.replay RUN_DIR [--config run.toml] [--group 123 | --at STEP] [--json]

The ledger is copied, never written, and may be in use. Exit code 0: there is no contradiction; 1: there are
contradictions, which are listed; 2: this is no ledger, one of its rows is damaged, or it has no answer to the question.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from echo2d.core.base.ids import LeaseId, lease_name
from echo2d.core.coordinator.events import Recovered
from echo2d.errors import IntegrityFault, OperatorFault, StoreFault
from tools.replay_core import (
    Evidence,
    Revival,
    Rules,
    audit,
    batches,
    group_story,
    guessed_rules,
    read_ledger,
    revive,
    rules_of,
    waiting_groups,
)

BATCHES_SHOWN = 12


def _cursors(recovered: Recovered) -> str:
    if len(recovered.tasks) <= 1:
        return f"prompt {sum(each.next_cursor for each in recovered.tasks)}"
    return ", ".join(f"prompt {each.next_cursor} of {each.task}" for each in recovered.tasks)


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    try:
        return _replay(options)
    except (OperatorFault, StoreFault) as fault:
        print(f"replay: {fault}", file=sys.stderr)
        return 2 if isinstance(fault, OperatorFault) else 1


def _replay(options: argparse.Namespace) -> int:
    evidence = read_ledger(options.ledger)
    if options.group is not None:
        story = group_story(evidence, options.group)
        print(json.dumps(story) if options.json else "\n".join(_story_lines(story)))
        return 0
    rules = (
        guessed_rules(evidence.recovered) if options.config is None else rules_of(options.config)
    )
    faults, revival = audit(evidence, rules), None
    try:
        revival = revive(evidence, rules, at_step=options.at)
    except IntegrityFault as fault:
        faults.append(str(fault))
    if options.json:
        print(json.dumps(_facts(evidence, rules, revival, faults)))
    else:
        print(
            "\n".join(
                [*_lines(evidence, rules), *_revival_lines(revival, options.at), *_verdict(faults)]
            )
        )
    return 1 if faults else 0


def _facts(
    evidence: Evidence, rules: Rules, revival: Revival | None, faults: list[str]
) -> dict[str, Any]:
    recovered = evidence.recovered
    turn = None
    if revival is not None:
        turn = {
            "dropped": revival.dropped,
            "scored_again": revival.scored_again,
            "prompts_asked": revival.prompts_asked,
        }
    return {
        "epoch": recovered.epoch,
        "resume_step": recovered.resume_step,
        "checkpoint": recovered.checkpoint,
        "publish_seq": recovered.publish_seq,
        "versions": [[each.version, each.digest.hex()] for each in recovered.published],
        "versions_revoked": evidence.revoked,
        "next_group": recovered.next_group,
        "next_cursors": {each.task: each.next_cursor for each in recovered.tasks},
        "groups": len(recovered.groups),
        "groups_in_no_batch": waiting_groups(evidence, rules),
        "batches": batches(evidence),
        "rules_known": rules.known,
        "first_turn": turn,
        "status": None if revival is None else revival.status,
        "faults": faults,
    }


def _lines(evidence: Evidence, rules: Rules) -> list[str]:
    recovered, the = evidence.recovered, rules.rules
    shape = f"{the.trajectories_per_step} trajectories a step in groups of {the.group_size}"
    held = sum(group in evidence.stored for batch in recovered.frozen for group in batch.groups)
    waiting = "".join(
        f", {count} {state}" for state, count in sorted(waiting_groups(evidence, rules).items())
    )
    newest = "none"
    if recovered.published:
        last = recovered.published[-1]
        newest = f"newest {last.version}, {last.digest.hex()[:12]}, publish_seq {last.publish_seq}"
    return [
        f"ledger    {evidence.path}, {evidence.file_bytes:,} bytes",
        f"rules     {shape}, S {the.staleness_max}"
        if rules.known
        else f"rules     guessed: {shape}; --config has the real ones",
        f"epoch     {recovered.epoch}, begun after step {recovered.resume_step}; checkpoint {recovered.checkpoint}",
        f"versions  {newest}; {len(recovered.published)} published, {evidence.revoked} revoked",
        f"groups    {len(recovered.groups)} stored: {held} in batches{waiting}",
        f"next      {_cursors(recovered)}, group {recovered.next_group}",
        *_batch_lines(evidence),
    ]


def _batch_lines(evidence: Evidence) -> list[str]:
    found = batches(evidence)
    shown = f", the newest {BATCHES_SHOWN}" if len(found) > BATCHES_SHOWN else ""
    lines = [f"batches   {len(found)} kept{shown}"]
    for batch in found[-BATCHES_SHOWN:]:
        epochs = ", ".join(map(str, batch["committed_in_epochs"]))
        state = f"committed in epoch {epochs}" if epochs else "frozen"
        if batch["missing"]:
            state = f"open again, {batch['missing']} groups to be replaced"
        lines.append(
            f"  step {batch['step']:<6} {batch['digest'][:12]}  {len(batch['groups'])} groups, {state}"
        )
    return lines


def _revival_lines(revival: Revival | None, at: int | None) -> list[str]:
    if revival is None:
        return []
    status, groups = revival.status, revival.status["groups"]
    drops = (
        ", ".join(f"{count} groups ({reason})" for reason, count in revival.dropped.items())
        or "no group"
    )
    when = "after a start" if at is None else f"after a learner's session at step {at}"
    return [
        f"{when}: epoch {status['epoch']}, step {status['committed_step']} committed",
        f"  batch {status['open_step']} to fill; {groups['buffered']} groups buffered, {groups['in_flight']} in flight",
        f"  it has dropped {drops}",
        f"  it scores {revival.scored_again} trajectories again, and draws {revival.prompts_asked} prompts",
    ]


def _verdict(faults: list[str]) -> list[str]:
    if not faults:
        return ["all of it fits together"]
    return [f"what does not fit together ({len(faults)}):", *(f"  {fault}" for fault in faults)]


def _story_lines(story: dict[str, Any]) -> list[str]:
    lines = [f"group {story['group']}: prompt {story['cursor']}, {story['prompt_tokens']} tokens"]
    for grant in story["granted"]:
        name = f"lease {lease_name(LeaseId(grant['lease']))} attempt {grant['attempt']}"
        lines.append(
            f"  {name} granted to {grant['worker']} on version {grant['version']}, samples {grant['samples']}"
        )
    for each in story["trajectories"]:
        versions = ", ".join(map(str, each["versions"]))
        made = f"lease {lease_name(LeaseId(each['lease']))} attempt {each['attempt']} by {each['worker']}"
        reward = "not scored yet" if each["reward"] is None else f"reward {each['reward']:g}"
        lines.append(
            f"  sample {each['sample']}: {made}: {each['tokens']} tokens of version {versions}, {reward}"
        )
    batch = story["batch"]
    if batch is None:
        return [*lines, "  in no batch yet"]
    epochs = ", ".join(map(str, batch["committed_in_epochs"]))
    committed = f"committed in epoch {epochs}" if epochs else "not committed yet"
    return [*lines, f"  in batch {batch['step']} ({batch['digest'][:12]}), {committed}"]


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="replay", description="Run a coordinator again from its ledger."
    )
    parser.add_argument("ledger", type=Path, help="run directory, or its ledger.sqlite")
    parser.add_argument(
        "--config", type=Path, help="the run's TOML, for its S and group size; guessed if left out"
    )
    question = parser.add_mutually_exclusive_group()
    question.add_argument(
        "--group", type=int, help="the story of this group, from lease to train step"
    )
    question.add_argument(
        "--at", type=int, help="as a learner would find it that opens a session at this step"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
