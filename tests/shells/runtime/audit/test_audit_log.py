"""`echo2d worker audit`: its reports, and its pardons."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from echo2d.cli import main
from echo2d.core.audit.events import AuditTold
from echo2d.core.base.ids import GroupId, PeerId
from echo2d.core.protocol.evidence import Evidence
from echo2d.errors import OperatorFault
from echo2d.runtime.audit.audit_log import (
    audit_record,
    open_audit_log,
    pardon,
    read_audit_log,
    read_reports,
)
from echo2d.runtime.run_dir.access_table import AccessTable
from echo2d.runtime.run_dir.run_directory import RunDirectory

LIAR, HONEST = PeerId("ab" * 16), PeerId("cd" * 16)


def told(worker: PeerId, name: str, *reasons: str, verdict: str = "") -> AuditTold:
    found = Evidence(10, 0.5, 1.0, 4.0, -1.0, 2.0, (2, 1, 1))
    return AuditTold(worker, name, GroupId(7), 1, (3,), found, reasons, verdict)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    run = RunDirectory(tmp_path / "run")
    AccessTable(run).convict(LIAR, "5 of 5 audited: seed", now_s=1.8e9)
    lines = [told(LIAR, "liar", "seed"), told(HONEST, "[b]box"), told(HONEST, "[b]box")]
    open_audit_log(run.path).append([audit_record(each, 1.8e9) for each in lines])
    return run.path


def test_a_report_joins_the_log_with_the_convictions(run_dir: Path) -> None:
    first, second = read_reports(run_dir, None)
    assert (first.worker, first.convicted, first.flagged) == (LIAR, "5 of 5 audited: seed", 1)
    assert (second.worker, second.convicted, second.audited) == (HONEST, "", 2)
    assert read_reports(run_dir, "liar") == read_reports(run_dir, LIAR[:6]) == [first]
    with pytest.raises(OperatorFault, match="knows no worker 'nobody'"):
        read_reports(run_dir, "nobody")


def test_a_line_that_a_crash_truncated_is_skipped(run_dir: Path) -> None:
    with (run_dir / "audit.jsonl").open("ab") as file:
        file.write(b'{"at": 1.')
    assert len(list(read_audit_log(run_dir))) == 3


def test_show_prints_evidence_and_json(run_dir: Path) -> None:
    runner = CliRunner()
    everybody = runner.invoke(main, ["worker", "audit", "--run-dir", str(run_dir)])
    assert everybody.exit_code == 0, everybody.output
    assert "5 of 5 audited: seed" in everybody.output
    assert "[b]box" in everybody.output  # shown as text, not as markup
    one = runner.invoke(main, ["worker", "audit", "liar", "--run-dir", str(run_dir)])
    assert "convicted" in one.output
    assert "last flagged answers" in one.output
    as_json = runner.invoke(main, ["worker", "audit", "--run-dir", str(run_dir), "--json"])
    assert [each["worker"] for each in json.loads(as_json.output)["workers"]] == [LIAR, HONEST]


def test_a_run_without_audited_answers_says_so(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    AccessTable(run)
    shown = CliRunner().invoke(main, ["worker", "audit", "--run-dir", str(run.path)])
    assert "nothing was audited yet" in shown.output


def test_a_pardon_of_an_unconvicted_worker_is_refused(run_dir: Path) -> None:
    with pytest.raises(OperatorFault, match="one convicted worker; there are abab"):
        pardon(run_dir, HONEST)
    with pytest.raises(OperatorFault, match=r"\(liar\)"):
        pardon(run_dir, LIAR[:3])
    assert pardon(run_dir, LIAR[:8]) == LIAR
    table = AccessTable(RunDirectory(run_dir))
    assert table.convicted() == {}
    table.convict(LIAR, "again", now_s=1.0)
    assert pardon(run_dir, "liar") == LIAR
    refused = CliRunner().invoke(
        main, ["worker", "audit", LIAR, "--pardon", "--run-dir", str(run_dir)]
    )
    assert (refused.exit_code, refused.output.count("\n")) == (2, 1)
    everybody = CliRunner().invoke(main, ["worker", "audit", "--pardon", "--run-dir", str(run_dir)])
    assert (everybody.exit_code, everybody.output.count("\n")) == (2, 1)
