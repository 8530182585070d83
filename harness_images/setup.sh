#!/bin/sh
# What every harness's image starts with, run by its Dockerfile as root: a few programs, the extra certificates of the
# build (extra-ca/, may be empty), and the user `agent` (uid 1000), as who the harness runs. Arguments: more packages.
set -eu
cd "$(dirname "$0")"

if command -v apt-get >/dev/null; then
    missing=""
    for package in ca-certificates curl git "$@"; do
        dpkg -s "$package" >/dev/null 2>&1 || missing="$missing $package"
    done
    if [ -n "$missing" ]; then
        apt-get update -qq
        # shellcheck disable=SC2086  # one word for each package
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing
        rm -rf /var/lib/apt/lists/*
    fi
fi

find extra-ca -name '*.crt' -exec cp {} /usr/local/share/ca-certificates/ \;
update-ca-certificates
if command -v npm >/dev/null; then npm config set --global cafile /etc/ssl/certs/ca-certificates.crt; fi

# Some bases have a user of that number already: the official Node image calls it node.
other="$(getent passwd 1000 | cut -d: -f1)"
[ -z "$other" ] || userdel --remove "$other" 2>/dev/null || true
useradd --uid 1000 --user-group --create-home --home-dir /home/agent --shell /bin/sh agent
