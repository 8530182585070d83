"""What test runners print, read as the outcome of each test. One function for each format.

Invariant: a log that has no end says of no test that it passed: code that ends its process early gains nothing. Only
the runner's own summary is read; what the tests printed stands before it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

_SUMMARY = re.compile(r"=* ?short test summary info ?=*")
_TOTALS = re.compile(r"(=+ )?(\d+ \w+(, )?)+ in [\d.]+ ?s.*")
_UNITTEST = re.compile(
    r"(?P<test>\S+ \([\w.]+\))(?:\n.*)? \.\.\. (?P<outcome>ok|FAIL|ERROR|skipped.*|expected failure)"
)
_UNITTEST_END = re.compile(r"^Ran \d+ tests? in [\d.]+s$", re.MULTILINE)
_SYMPY = re.compile(r"^(?P<test>test_\w+) (?P<outcome>\S+)", re.MULTILINE)
_SYMPY_END = re.compile(r"tests finished: .* in [\d.]+ seconds")
_COLOURS = re.compile(r"\x1b\[[\d;]*m")


def pytest(log: str) -> Mapping[str, bool]:
    """`pytest -rA`: the lines of the last short summary. A test of which more than one line tells passed in each."""
    lines = log.splitlines()
    begin = max((n for n, line in enumerate(lines) if _SUMMARY.fullmatch(line)), default=len(lines))
    end = max((n for n, line in enumerate(lines) if _TOTALS.fullmatch(line)), default=0)
    found: dict[str, bool] = {}
    for line in lines[begin + 1 : end]:
        outcome, _, test = line.partition(" ")
        if outcome in ("PASSED", "FAILED", "ERROR", "XFAIL", "XPASS"):
            name = test if outcome == "PASSED" else test.split(" - ")[0]
            found[name] = found.get(name, True) and outcome in ("PASSED", "XFAIL")
    return found


def unittest(log: str) -> Mapping[str, bool]:
    """unittest with verbosity 2, as Django's runtests.py prints it."""
    if not _UNITTEST_END.search(log):
        return {}
    return {match["test"]: match["outcome"] in ("ok", "expected failure") for match in _UNITTEST.finditer(log)}


def sympy(log: str) -> Mapping[str, bool]:
    """SymPy's bin/test --verbose."""
    if not _SYMPY_END.search(log):
        return {}
    return {match["test"]: match["outcome"] in ("ok", "f") for match in _SYMPY.finditer(log)}


FORMATS: Mapping[str, Callable[[str], Mapping[str, bool]]] = {"pytest": pytest, "unittest": unittest, "sympy": sympy}


def outcomes(form: str, log: str) -> Mapping[str, bool]:
    """The outcome of each test by its name, and by the name's beginning up to the first blank, as datasets cut it."""
    found = FORMATS[form](_COLOURS.sub("", log))
    cut: dict[str, bool] = {}
    for name, ok in found.items():
        cut[name.split(" ")[0]] = cut.get(name.split(" ")[0], True) and ok
    return {**cut, **found} if form == "pytest" else found
