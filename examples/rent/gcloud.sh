#!/usr/bin/env bash
# Boxes on Google Compute Engine spot. Not run: check it before you trust it (docs/guide/renting.md).
# The image has echo2d in /opt/echo2d. IMAGE, ZONE, TYPE: yours.
set -euo pipefail
IMAGE=${IMAGE:-echo2d-box}
ZONE=${ZONE:-europe-west4-a}
TYPE=${TYPE:-g2-standard-4}

case $1 in
start)
    script=$(mktemp)
    trap 'rm -f "$script"' EXIT
    cat > "$script" <<'SCRIPT'
#!/bin/bash
umask 077
mkdir -p /var/lib/echo2d
said() { curl -sf -H Metadata-Flavor:Google "http://metadata.google.internal/computeMetadata/v1/instance/$1"; }
said attributes/echo2d-token > /var/lib/echo2d/box.token
/opt/echo2d/bin/echo2d join "$(said attributes/echo2d-url)" --token-file /var/lib/echo2d/box.token \
    --state-dir /var/lib/echo2d/state --name "$(said name)"
SCRIPT
    gcloud compute instances create "$ECHO2D_LABEL" --zone "$ZONE" --machine-type "$TYPE" --image "$IMAGE" \
        --provisioning-model=SPOT --max-run-duration="${ECHO2D_LIFE_S}s" --instance-termination-action=DELETE \
        --metadata="echo2d-url=$ECHO2D_COORDINATOR_URL" \
        --metadata-from-file="startup-script=$script,echo2d-token=$ECHO2D_TOKEN_FILE" --quiet > /dev/null
    ;;
stop)
    found=$(gcloud compute instances list --zones "$ZONE" --filter="name=$ECHO2D_LABEL" --format='value(name)')
    [ -z "$found" ] || gcloud compute instances delete "$ECHO2D_LABEL" --zone "$ZONE" --quiet
    ;;
list)
    gcloud compute instances list --zones "$ZONE" --filter="name~^$ECHO2D_LABEL_PREFIX" --format='value(name,id)' |
        awk 'NF == 2 { printf "{\"label\": \"%s\", \"id\": \"%s\"}\n", $1, $2 }'
    ;;
esac
