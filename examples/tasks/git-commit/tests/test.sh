# Succeeds when HEAD is a first commit with exactly this file, author and message.
set -e
export GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null
git() { command git -c safe.directory='*' -c core.fsmonitor=false -c log.showSignature=false "$@"; }
test "$(git rev-list --count HEAD)" = 1
test "$(git log -1 --format='%an <%ae> %s')" = "Ada <ada@example.com> Add the recipe"
test "$(git ls-tree -r --name-only HEAD)" = recipe.txt
test "$(git cat-file blob HEAD:recipe.txt)" = "Flour, water, salt."
