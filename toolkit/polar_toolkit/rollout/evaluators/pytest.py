"""Kind `pytest`: the task's own tests, run by pytest over the work, and judged by pytest's report.

Options: `tests` (the ids that have to pass, else every test function that stands in the task's tests), `python` (the
interpreter that has pytest; `python3`), `plugins` (modules of plugins that the tests need). Invariant: pytest is told
by nothing of the workspace what to run or how: no configuration, no conftest.py, no plugin, no module before its own;
a report that is missing or lacks a test is reward 0. The code under test runs in pytest's process: what takes pytest
itself apart there is not found out.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

from polar_toolkit.rollout.evaluators import Bench, EvaluatorError, Verdict, script
from polar_toolkit.rollout.task import LOGS, TESTS

_REPORT = "junit.xml"
_LARGEST_REPORT = 64 << 20
_NOBODYS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "", "PYTEST_PLUGINS": "", "PYTHONHASHSEED": "0"}


class Pytest:
    """The kind."""

    kind = "pytest"
    options = frozenset({"tests", "python", "plugins"})

    async def evaluate(self, bench: Bench) -> Verdict:
        """See Evaluator.evaluate."""
        check = bench.task.check
        expected = list(check.options.get("tests", ())) or (declared(check.tests) if check.tests else [])
        if not expected:
            raise EvaluatorError("no test is expected: put tests/test_*.py into the task, or name them in `tests`")
        await script.make_logs(bench)
        ended = await script.run(bench, _arguments(bench), "pytest", _NOBODYS)
        path = (await script.take_logs(bench)) / _REPORT
        report = script.text_of(path, _LARGEST_REPORT)
        if not report:
            await _refuse_without_pytest(bench)
        passed = passing(expected, outcomes(report))
        complete = ended.by == "itself" and len(passed) == len(expected)
        parts = {"passed": float(len(passed)), "expected": float(len(expected))}
        note = "" if complete else _why(expected, passed, ended.by)
        return Verdict(float(complete), parts, note, {"junit": path} if report else {})


async def _refuse_without_pytest(bench: Bench) -> None:
    """No report is the work's fault, unless no tests could be run at all. Nothing of the workspace is imported."""
    ended = await script.run(bench, (_python(bench), "-I", "-c", "import pytest"), "import-pytest")
    if ended.status:
        raise EvaluatorError(f"{_python(bench)!r} has no pytest: name an interpreter that has in the option python")


def _python(bench: Bench) -> str:
    return str(bench.task.check.options.get("python", "python3"))


def _arguments(bench: Bench) -> tuple[str, ...]:
    options = bench.task.check.options
    return (
        _python(bench), "-I", "-B", "-m", "pytest", TESTS, "-c", "/dev/null",
        "--rootdir", TESTS, "--confcutdir", TESTS, "--import-mode", "importlib", "-p", "no:cacheprovider",
        *(word for plugin in options.get("plugins", ()) for word in ("-p", str(plugin))),
        "-o", f"pythonpath={bench.task.environment.workdir}", "-o", "junit_family=xunit1",
        f"--junit-xml={LOGS}/verifier/{_REPORT}",
    )  # fmt: skip


def declared(folder: Path) -> list[str]:
    """The ids of the test functions that stand in a folder's test files, without parameters."""
    files = sorted({*folder.rglob("test_*.py"), *folder.rglob("*_test.py")})
    return [f"{file.relative_to(folder)}::{name}" for file in files for name in _functions(ast.parse(file.read_text()))]


def _functions(tree: ast.Module | ast.ClassDef) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
            yield node.name
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            yield from (f"{node.name}::{name}" for name in _functions(node))


def outcomes(report: str) -> Mapping[str, bool]:
    """Whether each test of a junit report passed, by its id. Empty for what is no report."""
    try:
        cases = list(ElementTree.fromstring(report).iter("testcase"))
    except ElementTree.ParseError:  # cut short, or not there: nothing is known to have passed
        return {}
    found: dict[str, bool] = {}
    for case in cases:
        test = _id(case)
        found[test] = found.get(test, True) and not any(child.tag in _NOT_PASSED for child in case)
    return found


_NOT_PASSED = ("failure", "error", "skipped")


def _id(case: ElementTree.Element) -> str:
    file, name = case.get("file", ""), case.get("name", "")
    module = file.removesuffix(".py").replace("/", ".")
    classes = case.get("classname", "").removeprefix(module).strip(".")
    return "::".join([file, *(classes.split(".") if classes else []), name])


def passing(expected: Sequence[str], found: Mapping[str, bool]) -> list[str]:
    """The expected tests that passed; an id without parameters stands for all of its cases, and wants one at least."""
    return [test for test in expected if (seen := [ok for name, ok in found.items() if _is(name, test)]) and all(seen)]


def _is(name: str, test: str) -> bool:
    return name == test or name.split("[")[0] == test


def _why(expected: Sequence[str], passed: Sequence[str], ended_by: str) -> str:
    first = next((test for test in expected if test not in passed), "")
    how = "" if ended_by == "itself" else f"the tests were ended by {ended_by}; "
    return f"{how}{len(expected) - len(passed)} of {len(expected)} tests did not pass, first {first!r}"


PYTEST = Pytest()
