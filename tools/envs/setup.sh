#!/usr/bin/env bash
# Installs verifiers in environments in .cache/envs, one for each tested version, which are kept between runs. They also
# have the packages that echo2d needs, for `echo2d envs`. The last line of the output names their interpreters,
# separated by ":".
set -euo pipefail
cd "$(dirname "$0")/../.."
here=tools/envs all=.cache/envs
python=${PYTHON:-python3}
ours=$("$python" -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")')
found=()
while read -r version; do
    env=$all/verifiers-$version
    wanted=$(cat "$here/requirements.txt" "$here/setup.sh" - <<<"$ours" | sha256sum)
    if [[ ! -x $env/bin/python || $(cat "$env/ready" 2>/dev/null) != "$wanted" ]]; then
        rm -rf "$env"
        "$python" -m venv "$env"
        "$env/bin/pip" install --quiet --disable-pip-version-check "verifiers==$version" -r "$here/requirements.txt" -r /dev/stdin <<<"$ours"
        echo "$wanted" >"$env/ready"
    fi
    found+=("$PWD/$env/bin/python")
done <"$here/versions.txt"
# Classic environments of 0.3.1 work only with this version; their test puts it before the newer one on the path.
[[ -d $all/renderers-0.1.10 ]] || "${found[0]}" -m pip install --quiet --disable-pip-version-check --no-deps --target "$all/renderers-0.1.10" renderers==0.1.10
(IFS=:; echo "${found[*]}")
