import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from echo2d.config.coordinator import CoordinatorConfig, print_config
from echo2d.config.tables import read_table
from echo2d.config.worker import WorkerConfig
from echo2d.errors import OperatorFault

MINIMAL: dict[str, Any] = {
    "run": {"run_dir": "run", "snapshot_root": "out"},
    "sampling": {"vocab_size": 20},
    "task": {"kind": "sort_digits"},
}


def with_key(table: str, name: str, value: Any) -> dict[str, Any]:
    return {**MINIMAL, table: {**MINIMAL.get(table, {}), name: value}}


def test_a_minimal_config_has_its_defaults_and_paths() -> None:
    config = CoordinatorConfig.read(MINIMAL)
    assert config.run.run_dir == Path("run")
    assert config.coordinator.host == "127.0.0.1"
    assert config.policy.publish_every == "auto"
    assert config.tasks[0].options == {}


def test_a_key_above_all_tables_says_where_it_belongs() -> None:
    with pytest.raises(OperatorFault, match=r"run_dir comes before any table; put it below"):
        CoordinatorConfig.read({**MINIMAL, "run_dir": "run"})


def test_the_seed_listens_beside_the_coordinator_unless_the_config_says_otherwise() -> None:
    def link(**serve: Any) -> tuple[str, int | None]:
        found = CoordinatorConfig.read({**MINIMAL, "coordinator": serve}).link
        return found.host, found.port

    assert link() == ("127.0.0.1", 7701)
    assert link(host="10.77.0.1") == ("10.77.0.1", 7701)
    assert link(host="10.77.0.1", port=9000) == ("10.77.0.1", 9001)
    assert link(port=0) == ("127.0.0.1", 0)
    given = {"host": "10.0.0.9", "port": 5}
    config = CoordinatorConfig.read({**MINIMAL, "link": given, "coordinator": {"host": "10.0.0.1"}})
    assert (config.link.host, config.link.port) == ("10.0.0.9", 5)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_workers_on_other_hosts_get_no_loopback_address_of_the_seed(host: str) -> None:
    tables = {"coordinator": {"host": "10.77.0.1"}, "link": {"host": host}}
    with pytest.raises(OperatorFault, match=r"^link.host: .* or leave link.host out"):
        CoordinatorConfig.read({**MINIMAL, **tables})
    CoordinatorConfig.read({**MINIMAL, **tables, "coordinator": {"host": "127.0.0.1"}})


def test_other_programs_tables_are_ignored() -> None:
    assert CoordinatorConfig.read(
        {**MINIMAL, "learner": {"lr": 1}, "worker": {"x": 1}}
    ) == CoordinatorConfig.read(MINIMAL)


@pytest.mark.parametrize(
    ("table", "name", "value", "words"),
    [
        (
            "policy",
            "staleness_maximum",
            2,
            ["policy.staleness_maximum", "unknown key", "staleness_max"],
        ),
        ("policy", "staleness_max", "two", ["policy.staleness_max", "an integer", "'two'"]),
        ("policy", "staleness_max", True, ["policy.staleness_max", "True"]),
        ("policy", "staleness_max", -1, ["at least 0", "-1"]),
        ("policy", "publish_every", "often", ["policy.publish_every", '"auto"', "'often'"]),
        ("policy", "publish_every", 0, ["policy.publish_every", "0"]),
        ("policy", "publish_every", 5, ["policy.publish_every", "1 to 4", "5"]),
        ("policy", "group_size", 7, ["policy.group_size", "divisor", "7"]),
        ("policy", "order", "newest", ["policy.order", '"oldest" or "priority"', "'newest'"]),
        ("task", "sampler", "hard", ["task.sampler", '"informative" or "pairs"', "'hard'"]),
        ("task", "explore", -0.1, ["task.explore", "at least 0", "-0.1"]),
        ("policy", "over_stale", "keep", ["policy.over_stale", '"drop" or "mask"', "'keep'"]),
        ("sampling", "temperature", 0.0, ["sampling.temperature", "at least 0.001", "[[eval]]"]),
        ("sampling", "temperature", float("nan"), ["sampling.temperature", "nan"]),
        ("sampling", "vocab_size", 0, ["sampling.vocab_size", "run.base_model"]),
        ("coordinator", "port", 70000, ["coordinator.port", "at most 65535", "70000"]),
        ("coordinator", "tls", True, ["coordinator.tls", '"auto" or "on" or "off"', "True"]),
        ("task", "options", 3, ["task.options", "a table", "3"]),
        ("link", "peer_networks", "10.0.0.0/8", ["link.peer_networks", "[text, ...]"]),
        ("link", "peer_networks", ("10.0.0.1/8",), ["link.peer_networks", "10.0.0.1/8"]),
        ("link", "uplink_limit", "500kbit", ["link.uplink_limit", "1mbit", "'500kbit'"]),
        ("link", "uplink_limit", "fast", ["link.uplink_limit", "100mbit", "'fast'"]),
        ("link", "usd_per_gb_up", -1.0, ["link.usd_per_gb_up", "0"]),
        ("run", "run_dir", 3, ["run.run_dir", "a path", "3"]),
        ("polcy", "x", 1, ["[polcy]", "unknown table", "policy"]),
    ],
)
def test_wrong_keys_are_named(table: str, name: str, value: Any, words: list[str]) -> None:
    with pytest.raises(OperatorFault) as caught:
        CoordinatorConfig.read(with_key(table, name, value))
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("table", "name", "value"),
    [
        ("task", "sampler", "pairs"),
        ("task", "sampler", "informative"),
        ("policy", "order", "priority"),
    ],
)
def test_a_setting_that_compares_answers_needs_groups_of_two(
    table: str, name: str, value: str
) -> None:
    document = with_key(table, name, value)
    document["policy"] = {**document.get("policy", {}), "group_size": 2}
    CoordinatorConfig.read(document)
    document["policy"] = {**document["policy"], "group_size": 1}
    expected = (
        f"{table}.{name}: {value} compares the answers of a group; expected policy.group_size of at "
        "least 2; found 1"
    )
    with pytest.raises(OperatorFault, match=expected):
        CoordinatorConfig.read(document)


def test_a_group_of_one_answer_learns_only_from_a_teacher_or_from_advantages_of_your_own() -> None:
    policy = {"trajectories_per_step": 4, "group_size": 1}
    for learner in ({"objective": "distill"}, {"advantages": "own:advantages"}):
        CoordinatorConfig.read({**MINIMAL, "policy": policy, "learner": learner})
    with pytest.raises(OperatorFault, match=r"policy\.group_size: grpo compares the answers of a"):
        CoordinatorConfig.read({**MINIMAL, "policy": policy, "learner": {"objective": "grpo"}})


def test_a_missing_key_is_named() -> None:
    with pytest.raises(OperatorFault, match=r"task\.kind: expected text; found nothing"):
        CoordinatorConfig.read({})
    with pytest.raises(OperatorFault, match=r"\[\[task\]\]: expected at most 64 tables"):
        CoordinatorConfig.read({**MINIMAL, "task": 3})


def test_settings_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        '[run]\nrun_dir = "a"\nsnapshot_root = "b"\n[task]\nkind = "t"\n[sampling]\nvocab_size = 9\n'
    )
    config = CoordinatorConfig.load(
        file, ["coordinator.port=0", "run.run_dir = elsewhere", "task.options.n=3"]
    )
    assert (config.coordinator.port, config.run.run_dir) == (0, tmp_path / "elsewhere")
    assert config.tasks[0].options == {"n": 3}
    for setting in ("port=0", "coordinator.port", "run.run_dir.deeper=1"):
        with pytest.raises(OperatorFault, match=r"--set: expected TABLE\.KEY=VALUE"):
            CoordinatorConfig.load(file, [setting])


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(OperatorFault, match=r"cannot read .*none\.toml"):
        CoordinatorConfig.load(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("= 3")
    with pytest.raises(OperatorFault, match=r"bad\.toml is not TOML"):
        CoordinatorConfig.load(tmp_path / "bad.toml")


def test_a_worker_reads_its_table_and_its_flags(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        '[run]\nrun_dir = "a"\n[worker]\nurl = "http://h:1"\ntoken_file = "t"\nslots = 4\n'
    )
    config = WorkerConfig.load(file, {"state_dir": "s", "slots": 8}, ["threads=2", "slots=1"])
    assert (config.url, config.token_file) == ("http://h:1", tmp_path / "t")
    assert (config.slots, config.threads) == (8, 2)
    with pytest.raises(OperatorFault, match=r"worker\.token_file"):
        WorkerConfig.load(None, {})


WORKER = {"url": "http://h:1", "token_file": "t", "state_dir": "s"}


def test_a_worker_reads_its_uplink_limit_and_the_address_to_dial() -> None:
    plain = read_table(WorkerConfig, WORKER)
    assert (plain.uplink_bytes_per_s_max, plain.announced) == (None, None)
    limited = read_table(
        WorkerConfig, {**WORKER, "uplink_limit": "50mbit", "advertise": "203.0.113.9:7701"}
    )
    assert (limited.uplink_bytes_per_s_max, limited.announced) == (6_250_000, ("203.0.113.9", 7701))
    assert read_table(WorkerConfig, {**WORKER, "advertise": ":7701"}).announced == ("0.0.0.0", 7701)
    assert read_table(WorkerConfig, {**WORKER, "advertise": "[fd00::5]:7701"}).announced == (
        "fd00::5",
        7701,
    )


def test_working_hours_become_minutes_of_the_day() -> None:
    assert read_table(WorkerConfig, WORKER).windows == ()
    read = read_table(WorkerConfig, {**WORKER, "hours": "22:00-07:00, 12:30-13:00"})
    assert read.windows == ((1320, 420), (750, 780))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        *(
            ({"hours": said}, f"windows such as 22:00-07:00, separated by commas; found {last!r}")
            for said, last in (
                ("24:00-07:00", "24:00-07:00"),
                ("7:00-08:00", "7:00-08:00"),
                ("09:00-17:00,", ""),
                ("09:00-17:00, 08:00-08:00", "08:00-08:00"),
            )
        ),
        ({"uplink_limit": "50"}, "a rate such as 100mbit; found '50'"),
        ({"uplink_limit": "500kbit"}, "at least 1mbit, or receive_only; found '500kbit'"),
        (
            {"receive_only": True, "relay_only": True},
            "relay_only and receive_only cannot be combined",
        ),
        ({"engine": "sglang", "quantization": "int8"}, "put --quantization in"),
        ({"engine_args": "--tp 2"}, "worker.engine_args: only the sglang and vllm engines read it"),
        ({"engine": "sglang", "device": "cpu"}, "worker.device: only the torch engine reads it"),
        ({"quantization": "int4"}, "worker.quantization"),
        *(
            (
                {"engine": "sglang", "engine_url": said},
                "expected 1 URLs, http://HOST:PORT, of hosts",
            )
            for said in (
                *(
                    "127.0.0.1:2",
                    "http://",
                    "http://box:0",
                    "http://box:x",
                    "http://[::1",
                    "ftp://box",
                ),
                *(
                    "http://0.0.0.0:8000",
                    "https://[::]:8000",
                    "http://a:1,http://b:1",
                    "unix:/run/s",
                ),
                *("http://127.0.0.1\\.box:1", "http://box:1?", "http://box:1#x"),
            )
        ),
        ({"engine": "vllm", "engine_url": "unix:run/s"}, "http://HOST:PORT or unix:PATH, of hosts"),
        ({"engine": "vllm", "engine_url": "http://me:secret@box:1"}, "cannot have a user and a"),
        ({"trust_network": True}, "worker.trust_network: only the sglang and vllm engines read it"),
        *(
            ({"advertise": said}, "expected HOST:PORT with an IP address in numbers")
            for said in ("203.0.113.9", "box:7701", ":", ":0", ":70000", "x", "fd00::5:7701x")
        ),
    ],
)
def test_impossible_settings_of_an_owner_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(OperatorFault, match=re.escape(words)):
        read_table(WorkerConfig, {**WORKER, **change})


@pytest.mark.parametrize(
    ("keys", "urls"),
    [
        ({"engine": "sglang"}, ()),
        (
            {
                "engine": "vllm",
                "engines": 2,
                "engine_url": "unix:/run/a@b, https://[2001:db8::1]:8000/v",
            },
            ("unix:/run/a@b", "https://[2001:db8::1]:8000/v"),
        ),
        ({"engine": "sglang", "relay_only": True, "engine_url": "unused"}, ()),
        ({"engine": "fake", "engine_url": "as it likes"}, ()),
    ],
)
def test_a_server_of_ones_own_has_a_url_or_a_socket(
    keys: dict[str, Any], urls: tuple[str, ...]
) -> None:
    assert read_table(WorkerConfig, {**WORKER, **keys}).engine_urls == urls


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({}, ""),
        ({"quantization": "int8"}, "int8"),
        ({"engine": "sglang", "engine_args": "--tp 2"}, ""),
        ({"engine": "sglang", "engine_args": "--tp 2 --quantization fp8"}, "fp8"),
        ({"engine": "sglang", "engine_args": "--quantization=w8a8_int8 --tp 2"}, "w8a8_int8"),
        ({"engine": "vllm", "engine_args": "-q 'FP8'"}, "fp8"),
        ({"engine": "vllm", "engine_args": "--quantization fp8 --quantization mxfp8"}, "mxfp8"),
        ({"engine": "vllm", "engine_args": "--kv_cache_dtype fp8_e5m2 -q fp8"}, "fp8+kv_fp8_e5m2"),
        ({"engine": "vllm", "engine_args": "--kv-cache-dtype=bfloat16"}, ""),
        ({"engine": "vllm", "engine_args": "-q fp8 --quantization-config {}"}, "fp8+config"),
        ({"engine": "vllm", "engine_args": "-qfp8 --quantization-config.linear x"}, "fp8+config"),
        ({"engine": "sglang", "engine_args": "--quantization none"}, ""),
    ],
)
def test_a_worker_says_how_its_weights_are_quantized(keys: dict[str, Any], said: str) -> None:
    assert read_table(WorkerConfig, {**WORKER, **keys}).quantized_as == said
    assert not CoordinatorConfig.read(MINIMAL).policy.quantized_workers, "a run refuses them"


def test_an_operator_lists_the_networks_that_peers_may_announce() -> None:
    config = CoordinatorConfig.read(
        with_key("link", "peer_networks", ["10.8.0.0/16", "203.0.113.7", "fd00::/8"])
    )
    assert [str(network) for network in config.link.networks] == [
        "10.8.0.0/16",
        "203.0.113.7/32",
        "fd00::/8",
    ]


def test_prices_are_set_for_workers_by_name() -> None:
    rows = [{"workers": "spot-*", "usd_per_h": 0.3}, {"workers": "*", "trajectories_per_h": 60}]
    config = CoordinatorConfig.read({**MINIMAL, "price": rows})
    assert [(row.workers, row.usd_per_h, row.trajectories_per_h) for row in config.prices] == [
        ("spot-*", 0.3, 0.0),
        ("*", 0.0, 60),
    ]
    for wrong, words in (
        ({"workers": "*"}, "double brackets"),
        ([{"usd_per_h": 1.0}], "price.workers: expected text"),
    ):
        with pytest.raises(OperatorFault, match=words):
            CoordinatorConfig.read({**MINIMAL, "price": wrong})


def test_the_printed_config_is_toml_with_every_default() -> None:
    document = tomllib.loads(print_config())
    assert CoordinatorConfig.read({**document, **MINIMAL}) == CoordinatorConfig.read(MINIMAL)
    assert "# base_model =" in print_config()
    assert document["worker"]["slots"] == 16


TINKER: dict[str, Any] = {
    "run": {"run_dir": "run", "base_model": "models/qwen"},
    "tinker": {"models": {"Qwen/Qwen3": "models/qwen", "other/name": "./models/../models/qwen"}},
}


def test_a_run_for_clients_of_the_tinker_api_has_no_tasks(tmp_path: Path) -> None:
    config = CoordinatorConfig.read(TINKER, tmp_path)
    assert config.tasks == ()
    assert config.tinker is not None
    config.require("tinker")
    with pytest.raises(
        OperatorFault, match=r"this config has \[tinker\]: start it with `echo2d tinker`"
    ):
        config.require("coordinate")
    with pytest.raises(
        OperatorFault, match=r"has no \[tinker\]: start it with `echo2d coordinate`"
    ):
        CoordinatorConfig.read(MINIMAL).require("tinker")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"task": {"kind": "sort_digits"}}, r"^tinker: .* expected no \[\[task\]\]"),
        ({"eval": [{}]}, r"^tinker: .* no \[\[eval\]\]"),
        ({"run": {"run_dir": "run"}}, r"^run.base_model: expected the directory of the model"),
        ({"tinker": {}}, r"^tinker.models: expected a name, such as"),
        ({"tinker": {"models": {"a/b": 3}}}, r"^tinker.models: a/b: expected a directory; found 3"),
        ({"tinker": {"models": {"a/b": "x"}}}, r"^tinker.models: a/b: expected run.base_model"),
        ({"tinker": {"model": {}}}, r"^tinker.model: unknown key; did you mean models"),
        ({"tinker": 3}, r"^tinker: expected a table"),
    ],
)
def test_a_wrong_table_tinker_gives_one_line(
    changes: dict[str, Any], line: str, tmp_path: Path
) -> None:
    with pytest.raises(OperatorFault, match=line):
        CoordinatorConfig.read({**TINKER, **changes}, tmp_path)
