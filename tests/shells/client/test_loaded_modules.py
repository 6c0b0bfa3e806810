"""The client loads no module of the server."""

import subprocess
import sys

MODULES_MAX = 40
# The parts of a coordinator that are nearest to the client.
SERVERS = (
    "echo2d.net.api",
    "echo2d.net.control",
    "echo2d.net.gateway",
    "echo2d.core.coordinator",
    "echo2d.texts",
)


def test_the_client_loads_few_modules_and_no_server() -> None:
    program = "import sys, echo2d.client; print(*sys.modules)"
    shown = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    loaded = {name for name in shown.stdout.decode().split() if name.split(".")[0] == "echo2d"}
    assert "echo2d.client" in loaded
    assert sorted(name for name in loaded if name.startswith(SERVERS)) == []
    assert len(loaded) <= MODULES_MAX, sorted(loaded)
