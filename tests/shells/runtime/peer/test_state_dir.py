"""A worker's state directory under systemd: a link to a place where the service's own user may write."""

from pathlib import Path

from echo2d.core.base.ids import PublishSeq, RunId
from echo2d.runtime.peer.state_dir import StateDir


def test_the_state_directory_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "private").mkdir()
    link = tmp_path / "box-1"
    link.symlink_to("private")
    run = RunId("00" * 8)
    state_dir = StateDir(link)
    key = state_dir.key()
    state_dir.keep_publish_seq(run, PublishSeq(7))
    state_dir.frames()
    state_dir.slots()
    state_dir.close()
    again = StateDir(tmp_path / "private")
    assert again.publish_seq(run) == 7
    assert again.key().private_bytes_raw() == key.private_bytes_raw()
    again.close()
