"""Make the metrics row and the log line of a train step. Not here: where rows are written
(`tracking`).
"""

import dataclasses
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from echo2d.client import Batch, Evaluation, Group, Trajectory
from echo2d.learner.batch.checks import CUT_OFF, staleness_histogram
from echo2d.learner.metrics.report import StepReport
from echo2d.learner.metrics.staleness import answers_by_staleness


def row_of(
    batch: Batch,
    report: StepReport,
    *,
    published: int,
    t_train_s: float,
    wait_s: float,
    seconds: dict[str, float],
    grad_clip: float,
) -> dict[str, Any]:
    """The row for metrics.jsonl.

    published: the newest version whose publish has begun. seconds: time since the row before, by
    activity.
    """
    rewards = [trajectory.reward for group in batch.groups for trajectory in group.trajectories]
    return {
        "step": batch.step,
        "epoch": batch.epoch,
        "batch": batch.digest,
        "reward_mean": sum(rewards) / len(rewards),
        **_lengths([trajectory for group in batch.groups for trajectory in group.trajectories]),
        "tasks": _by_task(batch),
        "staleness": staleness_histogram(batch),
        "loss": report.loss,
        "grad_norm": report.grad_norm,
        "grad_norm_clipped": min(report.grad_norm, grad_clip),
        **_speed(report, t_train_s),
        **({"router": dataclasses.asdict(report.router)} if report.router else {}),
        **dataclasses.asdict(report.means),
        "by_staleness": _by_staleness(batch, report),
        "t_train_s": t_train_s,
        "wait_s": wait_s,
        "bubble": wait_s / (t_train_s + wait_s),
        "published": published,
        "seconds": seconds,
    }


def _speed(report: StepReport, t_train_s: float) -> dict[str, float]:
    """The learning rate, trained tokens per second, memory, and MFU if the device's peak is known."""
    effort = report.effort
    found = {
        "lr": effort.lr,
        "tokens_per_s": report.means.tokens / t_train_s,
        "memory_gib": effort.memory_gib,
        "tflops": effort.operations / t_train_s / 1e12,
    }
    return found if (mfu := effort.mfu(t_train_s)) is None else {**found, "mfu": mfu}


def facts_of(
    row: dict[str, Any], batch: Batch, *, steps: int, eta_s: float
) -> dict[str, str | int]:
    """The facts of the log line. The coordinator's line with the same digest names the groups.

    steps: number of the run's last train step. eta_s: seconds until then.
    """
    references = {name: row[name] for name in ("kl_base", "kl_teacher") if row[name] is not None}
    return {
        "step": batch.step,
        "of": steps,
        "epoch": batch.epoch,
        "digest": batch.digest[:12],
        "reward": f"{row['reward_mean']:.3f}",
        "loss": f"{row['loss']:.4f}",
        "entropy_nats": f"{row['entropy']:.3f}",
        "kl_rollout_nats": f"{row['kl']:.4f}",
        **{f"{name}_nats": f"{value:.4f}" for name, value in references.items()},
        "grad_norm": f"{row['grad_norm']:.3g}",
        "answer_tokens": f"{row['answer_tokens']:.1f}",
        "t_train_s": f"{row['t_train_s']:.3f}",
        "wait_s": f"{row['wait_s']:.3f}",
        "tokens_per_s": round(row["tokens_per_s"]),
        "eta": str(timedelta(seconds=round(eta_s))).replace(" ", ""),
    }


def evaluation_line(found: Evaluation) -> str:
    """The log line of an evaluation."""
    mean = "-" if found.mean is None else f"{found.mean:.4f}"
    error = "-" if found.se is None else f"{found.se:.4f}"
    return (
        f"name={found.name} version={found.version} mean={mean} se={error} "
        f"rows={found.rows}/{found.of} samples={found.samples} seconds={found.seconds:.1f}"
    )


def _lengths(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Written and given tokens of an answer, its turns, and the share of answers that were cut off."""
    lengths = [int(trajectory.written.sum()) for trajectory in trajectories]
    given = sum(len(trajectory.tokens) for trajectory in trajectories) - sum(lengths)
    cut = sum(trajectory.finish in CUT_OFF for trajectory in trajectories)
    return {
        "answer_tokens": sum(lengths) / len(lengths),
        "answer_tokens_max": max(lengths),
        "given_tokens": given / len(lengths),
        "turns": _mean([trajectory.turns for trajectory in trajectories]),
        "cut_off": cut / len(lengths),
    }


def _by_task(batch: Batch) -> dict[str, dict[str, Any]]:
    """For each task: groups, mean reward, means of the reward's parts, lengths, and mean rewards by prompt tag."""
    tasks: dict[str, list[Group]] = {}
    for group in batch.groups:
        tasks.setdefault(group.trajectories[0].task, []).append(group)
    return {name: _task_row(groups) for name, groups in sorted(tasks.items())}


def _task_row(groups: Sequence[Group]) -> dict[str, Any]:
    answers = [trajectory for group in groups for trajectory in group.trajectories]
    parts: dict[str, list[float]] = {}
    tags: dict[str, list[float]] = {}
    for group in groups:
        for answer in group.trajectories:
            for name, value in answer.reward_parts.items():
                parts.setdefault(name, []).append(value)
            # Rewards are shown by a prompt's first 8 tags.
            for tag in [f"{name}={value}" for name, value in group.tags.items()][:8]:
                tags.setdefault(tag, []).append(answer.reward)
    return {
        "groups": len(groups),
        "reward_mean": _mean([answer.reward for answer in answers]),
        **_lengths(answers),
        "parts": {name: _mean(values) for name, values in sorted(parts.items())},
        "reward_by_tag": {name: _mean(values) for name, values in sorted(tags.items())},
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _by_staleness(batch: Batch, report: StepReport) -> dict[int, dict[str, float]]:
    """Merge token and answer metrics: tokens by their own staleness, answers by that of their
    oldest token.
    """
    tokens = {key: dataclasses.asdict(means) for key, means in report.staleness.items()}
    answers = answers_by_staleness(batch)
    return {
        key: {**tokens.get(key, {}), **answers.get(key, {})}
        for key in sorted(tokens.keys() | answers)
    }
