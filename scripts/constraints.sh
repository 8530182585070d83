#!/bin/sh
# Prints constraints.txt: the exact versions installed in .venv, without addresses and without the project itself.
cat <<'TEXT'
# Exact versions for `make setup` and CI. To renew: install what is wanted into .venv (for all of it,
# `.venv/bin/uv pip install --upgrade -e '.[dev]'`), run the tests, then `make constraints`.
TEXT
.venv/bin/uv pip freeze -q --python .venv/bin/python --exclude-editable | sed 's/+cpu$//' | grep -v '^pip=='
