#!/usr/bin/env bash
# Boxes on Vast.ai. Not run: check it before you trust it (docs/guide/renting.md). IMAGE has echo2d; SEARCH is what to rent.
# Nothing there ends a box by itself: after its life it stops working, and is billed until `stop` has destroyed it. If no
# coordinator comes back to do that, the budget does not hold.
set -euo pipefail
IMAGE=${IMAGE:-example/echo2d-box:latest}
SEARCH=${SEARCH:-gpu_name=RTX_4090 num_gpus=1 rentable=true dph<0.5}

lines() { # label and id of every box
    vastai show instances --raw | python3 -c '
import json, sys
for box in json.load(sys.stdin):
    if box.get("label"):
        print(json.dumps({"label": box["label"], "id": str(box["id"])}))'
}

case $1 in
start)
    script=$(mktemp)
    trap 'rm -f "$script"' EXIT
    cat > "$script" <<SCRIPT
umask 077
mkdir -p /var/lib/echo2d
echo $(base64 -w0 "$ECHO2D_TOKEN_FILE") | base64 -d > /var/lib/echo2d/box.token
timeout $ECHO2D_LIFE_S echo2d join "$ECHO2D_COORDINATOR_URL" --token-file /var/lib/echo2d/box.token \
    --state-dir /var/lib/echo2d/state --name "$ECHO2D_LABEL"
SCRIPT
    offer=$(vastai search offers "$SEARCH" -o dph --raw | python3 -c 'import json, sys; print(json.load(sys.stdin)[0]["id"])')
    vastai create instance "$offer" --image "$IMAGE" --disk 64 --label "$ECHO2D_LABEL" --onstart "$script" --ssh > /dev/null
    ;;
stop)
    lines | python3 -c '
import json, os, sys
for box in map(json.loads, sys.stdin):
    if box["label"] == os.environ["ECHO2D_LABEL"]:
        print(box["id"])' | while read -r id; do echo y | vastai destroy instance "$id"; done
    ;;
list)
    lines
    ;;
esac
