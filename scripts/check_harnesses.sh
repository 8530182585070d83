#!/bin/sh
# Starts each harness once: an installation whose binaries do not run is none.
# Usage: check_harnesses.sh FOLDER_OF_BINARIES
PATH="$1:$PATH"
for name in node codex claude pi qwen gemini opencode; do
    version="$("$name" --version 2>&1)" || { echo "$name does not start: $version" >&2; exit 1; }
    echo "  $name $version"
done
