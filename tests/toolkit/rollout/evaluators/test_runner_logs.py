"""Logs of test runners, as outcomes."""

from __future__ import annotations

from polar_toolkit.rollout.evaluators.runner_logs import outcomes

PYTEST = """\
============================= test session starts ==============================
tests/test_a.py .F.E                                                     [100%]
==================================== PASSES ====================================
PASSED tests/test_a.py::test_forged
=========================== short test summary info ============================
PASSED tests/test_a.py::test_one
PASSED tests/test_a.py::test_words[a b]
PASSED tests/test_a.py::test_words[a c]
FAILED tests/test_a.py::test_two - AssertionError: PASSED tests/test_a.py::test_two
PASSED tests/test_a.py::test_torn_down
ERROR tests/test_a.py::test_torn_down - OSError
XFAIL tests/test_a.py::test_known - reason
SKIPPED [1] tests/test_a.py:9: not here
==== 1 failed, 4 passed, 1 skipped, 1 xfailed, 1 error in 0.12s ====
"""
DJANGO = """\
test_one (forms_tests.tests.FormsTest) ... ok
test_two (forms_tests.tests.FormsTest)
It says what it does. ... FAIL
test_three (forms_tests.tests.FormsTest) ... skipped 'no database'

----------------------------------------------------------------------
Ran 3 tests in 0.004s

FAILED (failures=1)
"""
SYMPY = """\
sympy/core/tests/test_basic.py[3]
test_structure ok
test_equality F
test_known f                                                        [FAIL]

= tests finished: 1 passed, 1 failed, 1 expected to fail, in 0.21 seconds =
"""


def test_pytests_summary_is_read() -> None:
    """Passed, failed, and passed with an error when it was torn down; a skipped test is no passed one."""
    found = outcomes("pytest", PYTEST)
    assert found["tests/test_a.py::test_one"]
    assert found["tests/test_a.py::test_known"]
    assert not found["tests/test_a.py::test_two"]
    assert not found["tests/test_a.py::test_torn_down"]
    assert not any("test_a.py:9" in name for name in found)


def test_only_the_summary_counts() -> None:
    """What a test printed stands before it."""
    assert "tests/test_a.py::test_forged" not in outcomes("pytest", PYTEST)


def test_names_that_were_cut_at_a_blank_are_found() -> None:
    """As SWE-bench's lists have them: they stand for all of the cases that begin so."""
    found = outcomes("pytest", PYTEST)
    assert found["tests/test_a.py::test_words[a b]"]
    assert found["tests/test_a.py::test_words[a"]
    one_failed = PYTEST.replace("PASSED tests/test_a.py::test_words[a c]", "FAILED tests/test_a.py::test_words[a c]")
    assert not outcomes("pytest", one_failed)["tests/test_a.py::test_words[a"]


def test_a_log_without_an_end_says_nothing() -> None:
    """In each format: a process that was ended early has passed nothing."""
    for form, log, end in (
        ("pytest", PYTEST, "==== 1 failed"),
        ("unittest", DJANGO, "Ran 3"),
        ("sympy", SYMPY, "= te"),
    ):
        assert outcomes(form, log)
        assert outcomes(form, log[: log.rindex(end)]) == {}


def test_colours_are_overlooked() -> None:
    """Some repositories ask for them in their configuration."""
    coloured = PYTEST.replace("PASSED tests", "\x1b[32mPASSED\x1b[0m tests")
    assert outcomes("pytest", coloured)["tests/test_a.py::test_one"]


def test_djangos_runner_is_read() -> None:
    """With a docstring on a line of its own."""
    assert outcomes("unittest", DJANGO) == {
        "test_one (forms_tests.tests.FormsTest)": True,
        "test_two (forms_tests.tests.FormsTest)": False,
        "test_three (forms_tests.tests.FormsTest)": False,
    }


def test_sympys_runner_is_read() -> None:
    """An expected failure is as expected."""
    assert outcomes("sympy", SYMPY) == {"test_structure": True, "test_equality": False, "test_known": True}
