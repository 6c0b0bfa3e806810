#!/usr/bin/env bash
# Boxes on AWS EC2 spot. Not run: check it before you trust it (docs/guide/renting.md).
# The image has echo2d in /opt/echo2d. IMAGE, SUBNET, TYPE: yours.
set -euo pipefail
IMAGE=${IMAGE:-ami-00000000000000000}
SUBNET=${SUBNET:-subnet-00000000}
TYPE=${TYPE:-g6.xlarge}

case $1 in
start)
    data=$(mktemp)
    trap 'rm -f "$data"' EXIT
    cat > "$data" <<USERDATA
#!/bin/bash
shutdown -h +$((ECHO2D_LIFE_S / 60))
umask 077
mkdir -p /var/lib/echo2d
base64 -d > /var/lib/echo2d/box.token <<TOKEN
$(base64 "$ECHO2D_TOKEN_FILE")
TOKEN
/opt/echo2d/bin/echo2d join "$ECHO2D_COORDINATOR_URL" --token-file /var/lib/echo2d/box.token \
    --state-dir /var/lib/echo2d/state --name "$ECHO2D_LABEL"
USERDATA
    aws ec2 run-instances --image-id "$IMAGE" --instance-type "$TYPE" --subnet-id "$SUBNET" --count 1 \
        --client-token "$ECHO2D_LABEL" --instance-market-options MarketType=spot \
        --instance-initiated-shutdown-behavior terminate --user-data "file://$data" \
        --tag-specifications "ResourceType=instance,Tags=[{Key=Name,Value=$ECHO2D_LABEL}]" > /dev/null
    ;;
stop)
    ids=$(aws ec2 describe-instances --filters "Name=tag:Name,Values=$ECHO2D_LABEL" \
        "Name=instance-state-name,Values=pending,running,stopping,stopped" \
        --query 'Reservations[].Instances[].InstanceId' --output text)
    # shellcheck disable=SC2086
    [ -z "$ids" ] || aws ec2 terminate-instances --instance-ids $ids > /dev/null
    ;;
list)
    aws ec2 describe-instances --filters "Name=tag:Name,Values=$ECHO2D_LABEL_PREFIX*" \
        "Name=instance-state-name,Values=pending,running,shutting-down,stopping,stopped" \
        --query "Reservations[].Instances[].[Tags[?Key=='Name']|[0].Value, InstanceId]" --output text |
        awk 'NF == 2 { printf "{\"label\": \"%s\", \"id\": \"%s\"}\n", $1, $2 }'
    ;;
esac
