"""Kind `swebench`: the harness's patch, the task's test patch over it, and the tests that have to pass.

Options: `fail_to_pass` and `pass_to_pass` (names as the log says them), `test_patch`, `test_command` (a shell line),
`log_format` (pytest, unittest, sympy), `protect` (file names by which a repository tells its tests how to run).
Invariant: before the tests run, each file that the test patch touches and each protected file is as at the base
commit; reward is 1 only when all of both lists pass. The tests and the work share a process, as in the benchmark: code
that forges the log of its own tests is not found out.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

from polar_toolkit.rollout import repository
from polar_toolkit.rollout.evaluators import Bench, EvaluatorError, Verdict, runner_logs, script
from polar_toolkit.rollout.sandbox import LOG_BYTES
from polar_toolkit.rollout.task import TESTS

PROTECTED = (
    "conftest.py", "pytest.ini", ".pytest.ini", "tox.ini", "setup.cfg", "pyproject.toml", "sitecustomize.py",
    "usercustomize.py", "pytest.py", "_pytest", "*.dist-info", "*.egg-info", "*.egg-link", "*.pth",
)  # fmt: skip
"""Names of files and folders that steer a test run; in the harness's patch they count as steering, not as work."""
_PATCH = "test.patch"
_TOUCHED = re.compile(r"^diff --git a/(.*) b/(.*)$", re.MULTILINE)
_BROKEN_TASK = 3
_NOT_APPLIED = 4
_PLACE = """\
trial=$(mktemp -d)
GIT_INDEX_FILE=$trial/index git read-tree HEAD
GIT_INDEX_FILE=$trial/index git apply --cached --whitespace=nowarn --check "$patch" || exit 3
set_back() {
    rm -rf -- "$1"
    if git cat-file -e "HEAD:$1" 2>/dev/null; then git checkout --quiet HEAD -- "$1"; fi
}
steers() {
    local part glob parts
    IFS=/ read -r -a parts <<< "$1"
    for part in "${parts[@]}"; do
        for glob in "${protected[@]}"; do [[ $part == $glob ]] && return 0; done
    done
    return 1
}
if [ -e .git/carried ]; then
    while IFS= read -r -d '' file; do if steers "$file"; then set_back "$file"; fi; done < .git/carried
fi
for file in "${touched[@]}"; do set_back "$file"; done
git apply --whitespace=nowarn "$patch" || exit 4
"""


class Swebench:
    """The kind."""

    kind = "swebench"
    options = frozenset({"fail_to_pass", "pass_to_pass", "test_patch", "test_command", "log_format", "protect"})

    async def evaluate(self, bench: Bench) -> Verdict:
        """See Evaluator.evaluate."""
        options = bench.task.check.options
        if bench.task.check.carry != "patch":
            raise EvaluatorError("a check of kind swebench judges a patch: set carry to 'patch' and name a base_commit")
        wanted = {name: list(options.get(name, ())) for name in ("fail_to_pass", "pass_to_pass")}
        if not wanted["fail_to_pass"]:
            raise EvaluatorError("fail_to_pass is empty: name the tests that a solution makes pass")
        if note := await _place_tests(bench):
            return Verdict(0.0, {"f2p": 0.0, "p2p": 0.0}, note)
        ended = await script.run(bench, ("bash", "-c", str(options["test_command"])), "tests")
        log = script.text_of(bench.logs / "tests.out", 2 * LOG_BYTES)
        form = str(options.get("log_format", "pytest"))
        log += script.text_of(bench.logs / "tests.err", 2 * LOG_BYTES) if form == "unittest" else ""
        found = runner_logs.outcomes(form, log) if ended.by == "itself" else {}
        return _verdict(found, wanted["fail_to_pass"], wanted["pass_to_pass"], ended.by)


async def _place_tests(bench: Bench) -> str:
    """Put the task's tests over the work; why that did not go, or ""."""
    options = bench.task.check.options
    patch = str(options.get("test_patch", ""))
    if not patch:
        raise EvaluatorError("test_patch is empty: the tests that judge have to come from the task")
    folder = bench.logs / "tests-of-the-task"
    folder.mkdir()
    (folder / _PATCH).write_text(patch)
    await bench.sandbox.put(folder, TESTS)
    lines = _placing(patch, options.get("protect", PROTECTED))
    ended = await script.run_to_its_end(bench, ("bash", "-c", lines), "test-patch")
    if ended.status == _BROKEN_TASK:
        raise EvaluatorError("test_patch does not fit the base commit; see evaluation/test-patch.err")
    if ended.status == _NOT_APPLIED:
        return "the test patch could not be applied over the harness's work; see evaluation/test-patch.err"
    if ended.status:
        raise EvaluatorError(f"the tests could not be placed (status {ended.status}); see evaluation/test-patch.err")
    return ""


def _placing(patch: str, protect: Sequence[str]) -> str:
    files = sorted({name for pair in _TOUCHED.findall(patch) for name in pair})
    lists = {"protected": list(protect), "touched": files}
    words = "".join(f"{name}=({' '.join(map(shlex.quote, values))})\n" for name, values in lists.items())
    return f"{repository.PLAIN_GIT}patch={TESTS}/{_PATCH}\n{words}{_PLACE}"


def _verdict(found: Mapping[str, bool], f2p: Sequence[str], p2p: Sequence[str], ended_by: str) -> Verdict:
    failed = [test for test in (*f2p, *p2p) if not found.get(test, False)]
    parts = {"f2p": _share(found, f2p), "p2p": _share(found, p2p)}
    if not failed:
        return Verdict(1.0, parts)
    how = "" if ended_by == "itself" else f"the tests were ended by {ended_by}; "
    return Verdict(0.0, parts, f"{how}{len(failed)} of {len(f2p) + len(p2p)} tests did not pass, first {failed[0]!r}")


def _share(found: Mapping[str, bool], tests: Sequence[str]) -> float:
    return sum(found.get(test, False) for test in tests) / len(tests) if tests else 1.0


SWEBENCH = Swebench()
