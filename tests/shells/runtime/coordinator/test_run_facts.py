"""A run that is restarted with another model, task or group size."""

from dataclasses import replace

import pytest

from echo2d.config.coordinator import CoordinatorConfig
from echo2d.core.status.schema import NamedTask
from echo2d.errors import OperatorFault
from echo2d.runtime.coordinator.run_facts import MODEL, go_on
from tests.support.scripted_core import config, run_dir, script, serving

__all__ = ["config", "run_dir", "script"]

FACTS = {
    "run.key": "1c0ffee1",
    MODEL: "architectures LlamaForCausalLM, vocab_size 32",
    "run.base_model": "/models/llama",
    "tasks": "parity (rows)",
    "policy.group_size": "8",
    "policy.trajectories_per_step": "256",
    "policy.staleness_max": "2",
}


def test_a_new_run_records_its_facts() -> None:
    (kept,), odd = go_on({}, FACTS)
    assert dict(kept.facts) == FACTS
    assert odd == []
    assert go_on(FACTS, FACTS) == ([], [])


@pytest.mark.parametrize(
    "key", ["run.key", MODEL, "policy.group_size", "policy.trajectories_per_step"]
)
def test_a_change_that_would_not_fit_the_run_is_refused_with_advice(key: str) -> None:
    words = f"{key}: this run began with {FACTS[key]}; found other. Put the old value back, or begin a new run"
    with pytest.raises(OperatorFault, match=words):
        go_on(FACTS, {**FACTS, key: "other"})


def test_a_change_that_may_be_a_mistake_is_reported() -> None:
    (kept,), odd = go_on(FACTS, {**FACTS, "tasks": "digits (rows)", "policy.staleness_max": "4"})
    assert odd == ["tasks changed since the last start, from parity (rows) to digits (rows)"]
    assert dict(kept.facts)["policy.staleness_max"] == "4"


def test_a_fact_that_an_older_build_did_not_record_counts_as_unchanged() -> None:
    older = {key: value for key, value in FACTS.items() if key != MODEL}
    (kept,), odd = go_on(older, FACTS)
    assert odd == []
    assert dict(kept.facts) == FACTS


async def test_a_coordinator_refuses_another_size_of_groups(
    config: CoordinatorConfig, script: object
) -> None:
    from tests.support.scripted_core import Script

    assert isinstance(script, Script)
    async with serving(config, script.make) as opened:
        run = opened.coordinator.look().process
        assert run is not None
        assert run.run.tasks == (NamedTask("sort_digits", "sort_digits"),)
        assert run.run.name == config.run.run_dir.name
    policy = replace(config.policy, group_size=config.policy.group_size * 2)
    with pytest.raises(OperatorFault, match=r"policy\.group_size: this run began with"):
        async with serving(replace(config, policy=policy), Script().make):
            pass
