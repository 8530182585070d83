#!/bin/sh
# Prints the path of a Python of one of the given versions, the first that is found: on PATH, else among pyenv's.
# Usage: find_python.sh 3.13 3.14 3.12
for version in "$@"; do
    # A pyenv shim is on PATH even where its version is switched off: only a Python that starts counts.
    for python in "$(command -v "python$version")" "$HOME/.pyenv/versions/$version".*/bin/python \
        "${PYENV_ROOT:-/nonexistent}/versions/$version".*/bin/python; do
        [ -n "$python" ] && [ -x "$python" ] || continue
        "$python" -c 'import sys, venv, ensurepip; print(sys.executable)' 2>/dev/null && exit 0
    done
done
echo "no Python $(echo "$*" | sed 's/ / or /g') found, on PATH or in pyenv. Install one (pyenv install $1), then try again." >&2
exit 1
