"""Every key of the status is there from the first moment on, with a value that JSON can hold."""

import json

from tests.support.coordinator_world import World

KEYS = {
    "epoch", "open_step", "committed_step", "checkpoint_step", "staleness_max", "publish_every",
    "trajectories_per_step", "group_size", "dissemination_bound", "newest_version", "groups", "broadcast", "workers",
    "relays", "seed_alive", "versions_published", "staleness", "trajectories", "tokens_accepted", "handed_over",
    "groups_dropped", "version_bytes", "catch_ups", "gateway", "answer_tokens",
    "results_refused", "rewards", "t_train_s", "t_verify_s", "t_bcast_s", "refit_pause_s", "still_s", "seed_copies",
    "wire_bytes", "full_bytes", "faults", "fault_counts", "attention", "heartbeat_s",
    "provision", "bubble_ratio", "learner_train_s", "learner_wait_s", "seed_uplink",
}  # fmt: skip
WORKER_KEYS = {
    "id", "name", "kind", "state", "alive", "silent_s", "uplink", "leases", "leases_end_s", "slots", "running",
    "leased", "serving", "lag", "accepted",
    "refit_pause_s", "memory_ok", "quarantined", "reachable",
    "active", "leaving", "mu", "mu_sd", "usd_per_h", "usd_per_gb_down", "usd_per_gb_up", "availability", "rho",
}  # fmt: skip


def test_keys() -> None:
    world = World()
    status = world.state.status()
    assert status.keys() == KEYS
    assert status["broadcast"] is None
    world.connect("a")
    world.open_session()
    world.publish(0)
    status = json.loads(json.dumps(world.state.status(), allow_nan=False))
    assert status.keys() == KEYS
    assert status["workers"][0].keys() == WORKER_KEYS
    assert status["broadcast"]["whole"] is False
