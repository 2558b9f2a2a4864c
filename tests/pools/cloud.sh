#!/bin/sh
# A command line as clouds have them, for the tests of the provider `command`; also called as az, aws and gcloud, whose
# words and answers are those of their documents. Machines are directories of $CLOUD, and run for real.
set -eu

fail() { echo "ERROR: $1" >&2 && exit "${2:-1}"; }
machine() { # NAME REQUEST SCRIPT
    [ ! -e "$CLOUD/full" ] || fail 'QuotaExceeded: no cores are left in this region'
    [ ! -d "$CLOUD/$1" ] || fail "the machine $1 already exists"
    mkdir -p "$CLOUD/$1/state"
    echo "$2" >"$CLOUD/$1/request"
    cp "$3" "$CLOUD/$1/script" && : >"$CLOUD/$1/log"
    case $(head -n 1 "$3") in
    '#cloud-config') ;; # a cloud would give it to cloud-init
    *)
        AGENTD_STATE_DIR="$CLOUD/$1/state" setsid sh -s -- --user <"$3" >"$CLOUD/$1/log" 2>&1 &
        echo $! >"$CLOUD/$1/pid"
        ;;
    esac
}
remove() {
    [ -d "$CLOUD/$1" ] || fail "The resource $1 was not found"
    if [ -e "$CLOUD/$1/pid" ]; then
        pid=$(cat "$CLOUD/$1/pid")
        kill -TERM "-$pid" 2>/dev/null || :
        tries=100
        while kill -0 "-$pid" 2>/dev/null && [ "$tries" -gt 0 ]; do sleep 0.1 && tries=$((tries - 1)); done
    fi
    rm -rf "${CLOUD:?}/$1"
}
each() { for at in "$CLOUD"/*/; do [ ! -d "$at" ] || echo "$(basename "$at") $(cat "$at/request")"; done; }
# json FORMAT: a line of JSON for each machine, of its name and request.
json() {
    between='['
    [ -n "$(each)" ] || printf '['
    each | while read -r name request; do printf "%s$1" "$between" "$name" "$request" && between=,; done
    echo ']'
}
option() { # NAME WORDS...: what follows the option
    wanted=$1 && shift
    while [ $# -gt 1 ]; do
        [ "$1" != "$wanted" ] || { printf '%s' "$2" && return; }
        shift
    done
    fail "the option $wanted is missing" 2
}

case $(basename "$0") in
cloud.sh)
    case $1 in
    make) machine "$2" "$3" "$4" && echo "made it" && echo "$2" ;;
    lines) each | while read -r name request; do printf '%s\t%s\t-\trunning\n' "$name" "$request"; done ;;
    remove) remove "$2" ;;
    esac
    ;;
az)
    case "$1 $2" in
    'vm create')
        file=$(option --custom-data "$@") tags=$(option --tags "$@")
        grep -q '^#cloud-config' "$file" || fail 'custom data is no cloud-config'
        machine "$(option --name "$@")" "${tags#agentd-request=}" "$file"
        echo "{\"id\": \"/subscriptions/1/$(option --name "$@")\", \"powerState\": \"VM running\"}"
        ;;
    'vm list') [ "$(option --query "$@")" ] && json '{"id": "%s", "request": "%s", "state": "VM running"}' ;;
    'vm delete') remove "$(option --name "$@")" ;;
    *) fail "az does not know $1 $2" 2 ;;
    esac
    ;;
aws)
    case "$1 $2" in
    'ec2 run-instances')
        file=$(option --user-data "$@")
        name=i-$(option --client-token "$@")
        [ -d "$CLOUD/$name" ] || machine "$name" "$(option --client-token "$@")" "${file#file://}"
        echo "{\"Instances\": [{\"InstanceId\": \"$name\", \"State\": {\"Name\": \"pending\"}}]}"
        ;;
    'ec2 describe-instances') [ "$(option --query "$@")" ] && json '{"id": "%s", "request": "%s", "state": "running"}' ;;
    'ec2 terminate-instances') remove "$(option --instance-ids "$@")" ;;
    *) fail "aws does not know $1 $2" 2 ;;
    esac
    ;;
gcloud)
    case "$2 $3" in
    'instances create')
        file=$(option --metadata-from-file "$@") labels=$(option --labels "$@")
        machine "$4" "${labels##*agentd-request=}" "${file#user-data=}"
        echo '[]'
        ;;
    'instances list') json '{"name": "%s", "labels": {"agentd-request": "%s"}, "status": "RUNNING"}' ;;
    'instances delete') remove "$4" ;;
    *) fail "gcloud does not know $2 $3" 2 ;;
    esac
    ;;
esac
