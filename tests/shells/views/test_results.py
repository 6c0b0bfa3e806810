"""The closing lines of `echo2d run`."""

import json
from pathlib import Path

from echo2d.views.results import closing_lines


def score(version: int, mean: float | None) -> dict[str, object]:
    return {"eval": {"greedy": {"version": version, "mean": mean, "se": 0.01, "rows": 50}}}


def test_the_closing_lines_name_steps_scores_and_the_model(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    rows = [{"step": 1, **score(0, None)}, {"step": 1, **score(0, 0.25)}, {"step": 1, "loss": 0.1}]
    rows += [{"step": 2, "loss": 0.1}, {"step": 2, **score(2, 0.75)}, {"step": 2, **score(2, None)}]
    metrics.write_text("\n".join(map(json.dumps, rows)) + '\n{"step": 3, "lo')
    steps, scores, model = closing_lines(metrics, Path("run/coordinator"), 10)
    assert steps == "2 of 10 train steps are made; the same command continues the run"
    assert "greedy: mean reward 0.250 at version 0, 0.750 at version 2 " in scores
    assert model == "the model: echo2d keep export --run-dir run/coordinator --last trained"
    assert next(iter(closing_lines(metrics, Path(), 2))) == "2 of 2 train steps are made"
    assert list(closing_lines(tmp_path / "none", Path(), 10)) == []
