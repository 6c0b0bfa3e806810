# --- from here on the script is the same for every box

say() { echo "echo2d box: $*"; }
fail() {
  say "$*" >&2
  exit 1
}

[ "$(id -u)" = 0 ] || fail "run this as root"
token_file=/etc/echo2d/$name.token
home=/opt/echo2d
install -d -m 0755 /etc/echo2d
(umask 077 && printf '%s\n' "$token" >"$token_file")

fits() {
  command -v "$1" >/dev/null &&
    "$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

found_python() {
  local each
  for each in python3 python3.14 python3.13 python3.12 python3.11; do
    if fits "$each"; then
      echo "$each"
      return
    fi
  done
  return 1
}

no_python() {
  local found
  found=$(python3 --version 2>/dev/null) || fail "expected Python 3.11 or newer; found no python3"
  python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "expected Python 3.11 or newer; found $found"
  fail "$found is here but cannot make a venv: install python3-venv"
}

install_python() {
  command -v apt-get >/dev/null || no_python
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  apt-get install -qq -y --no-install-recommends ca-certificates python3 python3-venv >/dev/null
  # Ubuntu 22.04 has an older python3, and 3.11 beside it.
  found_python >/dev/null ||
    apt-get install -qq -y --no-install-recommends python3.11 python3.11-venv >/dev/null
}

# The coordinator gives its own wheel to a box with a worker's token. Prints the wheel's path and its digest.
fetch_wheel() {
  "$home/bin/python" - "$token_file" "$url" "$home" <<'PYTHON'
import hashlib, http.client, json, pathlib, re, ssl, sys, time
from urllib.parse import urlsplit

token, at = json.loads(pathlib.Path(sys.argv[1]).read_text()), urlsplit(sys.argv[2])


def asked():
    link = http.client.HTTPConnection(at.hostname, at.port, timeout=60)
    link.connect()
    if at.scheme == "https":
        # The run's authority certifies names of members, not of hosts.
        trusted = ssl.create_default_context(cadata=token["authority"])
        link.sock = trusted.wrap_socket(link.sock, server_hostname="coordinator")
    link.request("GET", "/v1/wheel", headers={"Authorization": f"Bearer {token['secret']}"})
    answer = link.getresponse()
    return answer, answer.read()


try:
    answer, data = asked()
    # Many boxes of one token take turns.
    for _ in range(40):
        if answer.status != 503:
            break
        time.sleep(15)
        answer, data = asked()
except (OSError, http.client.HTTPException) as error:
    sys.exit(f"echo2d box: no answer from {sys.argv[2]}: {error}")
if answer.status != 200:
    sys.exit(f"echo2d box: the coordinator gives no wheel: {data[:4096].decode()}")
name = re.search(r'filename="([\w.+-]+\.whl)"', answer.headers["Content-Disposition"])[1]
path = pathlib.Path(sys.argv[3], name)
path.write_bytes(data)
print(path, hashlib.sha256(data).hexdigest())
PYTHON
}

# /tmp may be memory, and torch with its libraries takes gigabytes while it is unpacked.
pip_install() {
  TMPDIR=${TMPDIR:-/var/tmp} "$1/bin/pip" install --quiet --disable-pip-version-check "${@:2}"
}

# Installs only what is missing or has changed, so the same script also brings a later build to a box.
install_echo2d() {
  local python source wanted wheel before=""
  if [ -e "$home/installed" ]; then
    before=$(cat "$home/installed")
  else
    found_python >/dev/null || install_python
    python=$(found_python) || no_python
    "$python" -m venv "$home"
  fi
  if [ -n "$from" ]; then
    source="echo2d$extra @ $from" wanted="$source $server"
  elif wheel=$(fetch_wheel); then
    source="${wheel% *}$extra" wanted="$wheel$extra $server"
  elif [ -n "$before" ]; then
    say "cannot fetch the wheel from $url: what is installed stays"
    return
  else
    fail "cannot fetch the wheel from $url"
  fi
  [ "$wanted" != "$before" ] || return 0
  say "installing into $home"
  pip_install "$home" "$source"
  # If the new build has the same version as the installed one, pip keeps the installed one.
  [ ! -e "$home/installed" ] ||
    pip_install "$home" --force-reinstall --no-deps "$source"
  if [ -n "$server" ]; then
    [ -e "$servers_home/bin/python" ] || "$(found_python)" -m venv "$servers_home"
    pip_install "$servers_home" "$server"
  fi
  printf '%s\n' "$wanted" >"$home/installed"
}

install_echo2d
