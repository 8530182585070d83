"""Shell scripts for the git repository of a workspace: forget what came later, tell what changed, put it in again.

Invariant: after `cut_history` nothing of the repository leads to a commit that the base does not reach; `difference`
and `apply` obey neither configuration, attributes, hooks nor index that a harness left behind. The scripts run inside a
sandbox, in the workspace; nothing here runs them. Repositories within the repository (submodules) are left alone.
"""

from __future__ import annotations

import re
import shlex

from polar_toolkit.errors import Refusal

_COMMIT = re.compile(r"[0-9a-f]{7,64}")
PLAIN_GIT = """\
set -eu
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
HOME=/nonexistent
GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null GIT_ATTR_NOSYSTEM=1 GIT_NO_REPLACE_OBJECTS=1 GIT_TERMINAL_PROMPT=0
GIT_CONFIG_COUNT=4 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0='*'
GIT_CONFIG_KEY_1=core.hooksPath GIT_CONFIG_VALUE_1=/dev/null GIT_CONFIG_KEY_2=core.fsmonitor GIT_CONFIG_VALUE_2=false
GIT_CONFIG_KEY_3=core.logAllRefUpdates GIT_CONFIG_VALUE_3=false
export PATH HOME GIT_CONFIG_NOSYSTEM GIT_CONFIG_GLOBAL GIT_ATTR_NOSYSTEM GIT_NO_REPLACE_OBJECTS GIT_TERMINAL_PROMPT
export GIT_CONFIG_COUNT GIT_CONFIG_KEY_0 GIT_CONFIG_VALUE_0 GIT_CONFIG_KEY_1 GIT_CONFIG_VALUE_1
export GIT_CONFIG_KEY_2 GIT_CONFIG_VALUE_2 GIT_CONFIG_KEY_3 GIT_CONFIG_VALUE_3
"""
"""How a script begins that runs git and nothing else: by the system's programs, as nobody configured it."""
_CUT = """\
[ -d .git ] || { echo "$PWD/.git is no folder: the workspace has to be a repository of its own" >&2; exit 3; }
base=$(git rev-parse --verify --quiet "$wanted^{commit}") || { echo "$PWD has no commit $wanted" >&2; exit 3; }
rm -f .git/index.lock .git/HEAD.lock
git reset --quiet --hard "$base"
for name in $(ls -A .git); do
    case $name in
        HEAD|config|description|index|info|modules|objects|packed-refs|refs|shallow) ;;
        *) rm -rf ".git/$name" ;;
    esac
done
printf '%s\\n' "$base" > .git/HEAD
git for-each-ref --format='delete %(refname)' | git update-ref --no-deref --stdin
for name in $(git config --local --name-only --get-regexp '^(remote|branch)\\..*' | sed 's/\\.[^.]*$//' | sort -u); do
    git config --local --remove-section "$name" 2>/dev/null || true
done
rm -rf .git/index .git/index.lock .git/info/grafts .git/info/refs .git/objects/info/commit-graph*
rm -f .git/objects/pack/*.keep .git/objects/pack/*.promisor .git/objects/pack/multi-pack-index*
git update-ref refs/heads/main "$base"
git symbolic-ref HEAD refs/heads/main
git read-tree "$base"
git update-index -q --refresh || true
git repack -a -d --quiet --window=0
rm -f .git/objects/info/alternates .git/objects/info/http-alternates
git prune --expire=now
[ "$(git rev-parse HEAD)" = "$base" ]
"""
_DIFFERENCE = """\
own=$(mktemp -d /tmp/difference.XXXXXX)
trap 'rm -rf "$own"' EXIT
objects=$PWD/.git/objects
GIT_DIR=$own/git GIT_WORK_TREE=$PWD
export GIT_DIR GIT_WORK_TREE
case $wanted in ????????????????????????????????????????????????????????????????) form=sha256 ;; *) form=sha1 ;; esac
git init --quiet --template= --object-format=$form
mkdir -p "$GIT_DIR/info" "$GIT_DIR/objects/info"
printf '%s\\n' "$objects" > "$GIT_DIR/objects/info/alternates"
printf '* !filter !diff !ident !working-tree-encoding\\n' > "$GIT_DIR/info/attributes"
git read-tree "$wanted"
git show "$wanted:.gitignore" > "$own/ignored" 2>/dev/null || true
printf '\\n__pycache__/\\n*.pyc\\n' >> "$own/ignored"
git add --update .
git ls-files -z --others --exclude-from="$own/ignored" > "$own/new"
git update-index -z --add --stdin < "$own/new" >&2
git diff --cached --binary --full-index --no-ext-diff --no-textconv --no-renames --no-color --src-prefix=a/ \
    --dst-prefix=b/ "$wanted"
"""
_APPLY = """\
[ -s "$patch" ] || exit 0
git reset --quiet
git apply --cached --whitespace=nowarn "$patch"
git diff --cached --name-only --no-renames -z HEAD > .git/carried
git diff --cached --name-only --no-renames --diff-filter=D -z HEAD | xargs -0 -r rm -f --
git diff --cached --name-only --no-renames --diff-filter=d -z HEAD | git checkout-index --quiet --force -z --stdin
git reset --quiet
"""


def cut_history(base_commit: str) -> str:
    """A script that sets the repository back to a commit and removes all that the commit does not reach.

    Branches, tags, notes, stashes, remotes, reflogs, hooks, worktrees, borrowed and unreachable objects go; files that
    git does not know stay. It needs the room of a second copy of the history. Raises Refusal for what is no hash.
    """
    return f"{PLAIN_GIT}wanted={_hash(base_commit)}\n{_CUT}"


def difference(base_commit: str) -> str:
    """A script that prints the whole difference of the work to a commit as a patch: new and binary files, too.

    What the base's own .gitignore names is left out, and compiled Python. Raises Refusal for what is no hash.
    """
    return f"{PLAIN_GIT}wanted={_hash(base_commit)}\n{_DIFFERENCE}"


def apply(patch_path: str) -> str:
    """A script that applies such a patch to a repository that is at the commit; files in its way are replaced.

    .git/carried then holds the names of the files that the patch changed, each ended by a NUL.
    """
    return f"{PLAIN_GIT}patch={shlex.quote(patch_path)}\n{_APPLY}"


def _hash(commit: str) -> str:
    if not _COMMIT.fullmatch(commit):
        raise Refusal(f"base_commit is {commit!r}: give the hash of a commit, 7 to 64 hexadecimal digits")
    return commit
