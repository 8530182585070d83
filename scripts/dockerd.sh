#!/bin/sh
# A Docker engine by hand, where no service may be started: it leaves the host's network alone and keeps all of its
# files in one folder. Containers without a network are all that it can make, and all that the tests need.
#
#     eval "$(scripts/dockerd.sh start [FOLDER])"    # exports DOCKER_HOST
#     scripts/dockerd.sh stop [FOLDER]               # and removes the folder
set -eu

folder=${2:-${TMPDIR:-/tmp}/polar-dockerd}
socket=$folder/docker.sock
pidfile=$folder/dockerd.pid

# Whether the engine runs, be it well or not.
alive() {
    [ -s "$pidfile" ] && kill -0 "$(cat "$pidfile")" 2>/dev/null
}

# Whether it answers: asked over its socket, for a client of the machine may be missing.
answers() {
    curl -s -m 2 --unix-socket "$socket" http://docker/_ping 2>/dev/null | grep -q OK
}

start() {
    command -v dockerd >/dev/null || { echo "dockerd is missing: apt-get install docker.io iptables" >&2; exit 1; }
    if ! alive; then
        mkdir -p "$folder" && chmod 700 "$folder"
        setsid dockerd --host "unix://$socket" --data-root "$folder/data" --exec-root "$folder/exec" --pidfile "$pidfile" \
            --iptables=false --ip6tables=false --ip-forward=false --bridge=none >"$folder/log" 2>&1 </dev/null &
    fi
    tries=300
    until answers; do
        tries=$((tries - 1))
        [ $tries -gt 0 ] || { echo "dockerd does not answer within 30 s:" >&2; tail -5 "$folder/log" >&2; exit 1; }
        sleep 0.1
    done
    echo "export DOCKER_HOST=unix://$socket"
}

stop() {
    # An engine that was killed left containers running: a new one ends them as it starts.
    alive || [ ! -d "$folder/exec" ] || start >/dev/null
    if alive; then
        pid=$(cat "$pidfile")
        kill "$pid"
        tries=300
        while kill -0 "$pid" 2>/dev/null; do
            tries=$((tries - 1))
            [ $tries -gt 0 ] || kill -9 "$pid"
            sleep 0.1
        done
    fi
    # A killed engine's shims outlive it, without the containers that they were for.
    pgrep -f "containerd-shim.* -address $folder/" | xargs -r kill -9
    # Namespaces and layers of containers that were running when it ended stay mounted.
    awk -v below="$folder/" 'index($5, below) == 1 { print $5 }' /proc/self/mountinfo | sort -r | xargs -r umount -l
    rm -rf "$folder"
}

case ${1:-} in
    start | stop) "$1" ;;
    *) echo "usage: scripts/dockerd.sh start|stop [FOLDER]" >&2; exit 2 ;;
esac
