"""A script that makes a fresh machine a worker: it installs echo2d, keeps the token and joins.

    onstart      joins in the foreground, for a container without systemd (Vast, RunPod)
    systemd      installs and starts the service echo2d-join@_NAME
    cloud-init   the same, as user data

The script holds the token's secret.
"""

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Literal

from echo2d.errors import OperatorFault
from echo2d.net.security.auth import TokenFile, read_token_file
from echo2d.net.security.urls import CoordinatorUrls

BoxStart = Literal["systemd", "onstart", "cloud-init"]

# What pip installs for an engine whose servers have an environment of their own, /opt/ENGINE.
SERVERS = {"sglang": "sglang>=0.5.19", "vllm": "vllm>=0.32.0"}
END_OF_FILE = "END_OF_FILE_OF_ECHO2D"
# The token's name becomes the name of a unit's instance and of files on the box.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True, slots=True)
class BoxJob:
    """The settings of a box."""

    url: str
    token: TokenFile
    # Options of `echo2d join`, besides URL, token file and state directory.
    options: tuple[str, ...]
    # None: the box is a relay.
    engine: str | None
    # What pip installs. None: the coordinator's own wheel.
    source: str | None


def token_of_box(path: Path) -> TokenFile:
    """The worker's token in the file. OperatorFault: the file has none."""
    token = read_token_file(path)
    if token.role != "worker":
        raise OperatorFault(f"--token-file: expected a worker's token; {path} is of a {token.role}")
    return token


def box_script(job: BoxJob, start: BoxStart) -> str:
    """The text of the script. OperatorFault: the job has a value that a script cannot hold."""
    if _NAME.fullmatch(job.token.name) is None:
        raise OperatorFault(
            f"the token's name becomes a file's name: expected letters, digits, '_', '.' and '-'; "
            f"found {job.token.name!r}"
        )
    # A line break would end a comment of the script, or a line of a unit.
    for each in (job.source or "", *job.options):
        if not each.isprintable():
            raise OperatorFault(
                f"expected --install-from and options of printable characters; found {each!r}"
            )
    job = replace(job, url=CoordinatorUrls(job.url).url)
    script = "\n".join(
        [
            _head(job),
            _file("runtime/box/box.sh"),
            _onstart(job) if start == "onstart" else _service(job),
        ]
    )
    return script if start != "cloud-init" else _user_data(script)


def _head(job: BoxJob) -> str:
    engine = job.engine or ""
    server = SERVERS.get(engine, "") if _python_of(engine) in job.options else ""
    return f"""#!/usr/bin/env bash
# Makes this machine a worker of the echo2d run at {job.url}. Made by `echo2d join --print-script`.
# It contains the secret of the token {job.token.name}: keep it like the token file.
set -euo pipefail
url={shlex.quote(job.url)}
name={shlex.quote(job.token.name)}
from={shlex.quote(job.source or "")}
extra={shlex.quote("[torch]" if engine == "torch" else "")}
server={shlex.quote(server)}
servers_home={f"/opt/{engine}" if server else ""}
token={shlex.quote(json.dumps(asdict(job.token)))}
"""


def _onstart(job: BoxJob) -> str:
    return f"""options=({shlex.join(job.options)})
say "joining $url"
while :; do
  code=0
  "$home/bin/echo2d" join "$url" --token-file "$token_file" --state-dir "/var/lib/echo2d-join/$name" \\
    "${{options[@]}}" || code=$?
  # 0: told to end. 2: it would be refused again.
  case $code in 0 | 2) exit "$code" ;; esac
  say "it ended with $code and starts again in 15 s"
  sleep 15
done
"""


def _service(job: BoxJob) -> str:
    unit, steps = (
        _file(f"share/systemd/{name}") for name in ("echo2d-join@.service", "restart-steps.conf")
    )
    options = " ".join(_systemd_quoted(each) for each in job.options)
    return f"""[ -d /run/systemd/system ] || fail "systemd does not run here; use echo2d join --print-script onstart"
cat >/etc/systemd/system/echo2d-join@.service <<'{END_OF_FILE}'
{unit}{END_OF_FILE}
drop_ins=/etc/systemd/system/echo2d-join@$name.service.d
install -d -m 0755 "$drop_ins"
cat >"$drop_ins/options.conf" <<'{END_OF_FILE}'
[Service]
ExecStart=
ExecStart=/opt/echo2d/bin/echo2d join {_systemd_quoted(job.url)} --token-file ${{CREDENTIALS_DIRECTORY}}/token \\
    --state-dir ${{STATE_DIRECTORY}} {options}
{END_OF_FILE}
if [ "$(systemctl --version | sed -n 's/^systemd \\([0-9]*\\).*/\\1/p')" -ge 254 ]; then
  cat >"$drop_ins/restart-steps.conf" <<'{END_OF_FILE}'
{steps}{END_OF_FILE}
fi
# A service whose groups are missing does not start; udev makes them, and a container may have none.
for group in video render; do
  getent group "$group" >/dev/null || groupadd --system "$group"
done
systemctl daemon-reload
systemctl enable "echo2d-join@$name"
systemctl restart "echo2d-join@$name"
say "the service echo2d-join@$name is started"
"""


def _systemd_quoted(word: str) -> str:
    """The word in quotes, with systemd's specifiers and variables escaped."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped.replace("%", "%%").replace("$", "$$")}"'


def _user_data(script: str) -> str:
    """cloud-init's user data as JSON, which is valid YAML and needs no indentation of the script's lines."""
    path = "/root/echo2d-box.sh"
    parts = {
        "write_files": [{"path": path, "permissions": "0700", "content": script}],
        "runcmd": [["bash", path]],
    }
    return f"#cloud-config\n{json.dumps(parts, indent=1)}\n"


def _file(name: str) -> str:
    return resources.files("echo2d").joinpath(name).read_text(encoding="utf-8")


def join_options(engine: str, options: Sequence[str]) -> tuple[str, ...]:
    """The options, and those that the engine needs on a fresh box."""
    if engine not in SERVERS or any(
        each.partition("=")[0] in ("--engine-python", "--engine-url") for each in options
    ):
        return tuple(options)
    return (*options, "--engine-python", _python_of(engine))


def _python_of(engine: str) -> str:
    return f"/opt/{engine}/bin/python"
