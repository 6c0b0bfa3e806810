#!/usr/bin/env bash
# verifiers in environments of their own in .cache/envs, one for each version that is tested; kept between runs.
# Its last line names their interpreters, apart by ":".
set -euo pipefail
cd "$(dirname "$0")/../.."
here=tools/envs all=.cache/envs
python=${PYTHON:-python3}
found=()
while read -r version; do
    env=$all/verifiers-$version
    wanted=$(cat "$here/requirements.txt" "$here/setup.sh" | sha256sum)
    if [[ ! -x $env/bin/python || $(cat "$env/ready" 2>/dev/null) != "$wanted" ]]; then
        rm -rf "$env"
        "$python" -m venv "$env"
        "$env/bin/pip" install --quiet --disable-pip-version-check "verifiers==$version" -r "$here/requirements.txt"
        echo "$wanted" >"$env/ready"
    fi
    found+=("$PWD/$env/bin/python")
done <"$here/versions.txt"
(IFS=:; echo "${found[*]}")
