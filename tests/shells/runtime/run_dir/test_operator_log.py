"""Token commands and orders about workers are in the log, with the person who gave them."""

import getpass
from pathlib import Path

from echo2d.runtime.run_dir.operator_log import OPERATORS_LOG, OperatorNews, note_order
from echo2d.runtime.run_dir.run_directory import RunDirectory
from echo2d.runtime.run_dir.tokens import create_token, extend_token, revoke_token
from echo2d.store.json_log import read_json_log


def test_each_token_command_is_recorded_and_logged_once(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    note_order(run.path, "token revoke", "of-long-ago")
    news = OperatorNews(run.path)
    assert news.take() == []
    facts = {"role": "worker", "url": "http://h:1", "max_workers": 1, "expires": "1h"}
    create_token(run.path, "gpu", out=tmp_path / "gpu.token", **facts)  # type: ignore[arg-type]
    extend_token(run.path, "gpu", "2d")
    assert [(each["order"], each["token"], each["by"]) for each in news.take()] == [
        ("token create (worker)", "gpu", getpass.getuser()),
        ("token change --expires 2d", "gpu", getpass.getuser()),
    ]
    assert news.take() == []
    revoke_token(run.path, "gpu")
    assert [each["order"] for each in news.take()] == ["token revoke"]
    assert len(list(read_json_log(run.path, OPERATORS_LOG))) == 4
    assert "secret" not in (run.path / f"{OPERATORS_LOG}.jsonl").read_text()
