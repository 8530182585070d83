"""The repository keeps its own rules: sizes, names, places, addresses. Each test is one line of the style page."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = {"polar_mitm": "mitm", "toolkit/polar_toolkit": "toolkit", "train/polar_train": "train"}
TESTED_ELSEWHERE = {
    "polar_mitm/errors.py": "a table of names; each dialect's tests hold its shapes and statuses",
    "polar_toolkit/errors.py": "a table of names; test_cli.py holds the exit codes",
}
"""Modules without a test file of their own, each with the place that tests it."""

CEILING, LONG, LONG_SHARE = 80, 50, 0.20
# Spelled in pieces so that this file holds none of them.
MACHINE_PATHS = ["/wo" + "rk/", "/ro" + "ot/", "/tmp/" + "w/"]
REGISTRIES = [r"py" + r"pi\.org", r"npm" + r"js\.(org|com)", r"python" + "hosted"]
FORBIDDEN = re.compile("|".join(MACHINE_PATHS + REGISTRIES))


def test_every_module_has_a_test_file_of_its_name() -> None:
    """tests/ mirrors the source by folder and name; an exception names the test that stands in."""
    missing = [
        f"{_name(module)} -> {test.relative_to(ROOT)}"
        for module, test in _mirrors()
        if not test.exists() and _name(module) not in TESTED_ELSEWHERE
    ]
    assert not missing, f"modules without a test file: {missing}"


def test_exceptions_from_the_mirror_are_still_needed() -> None:
    """An entry of TESTED_ELSEWHERE names a module that exists and has no test file."""
    mirrors = {_name(module): test for module, test in _mirrors()}
    stale = [name for name in TESTED_ELSEWHERE if name not in mirrors or mirrors[name].exists()]
    assert not stale, f"remove from TESTED_ELSEWHERE: {stale}"


def test_functions_are_short() -> None:
    """No function has more than 80 lines, and at most 20 % of function lines stand in functions of more than 50."""
    sizes = {f"{path.relative_to(ROOT)}:{name}": size for path in _sources() for name, size in _functions(path)}
    total, long = sum(sizes.values()), sum(size for size in sizes.values() if size > LONG)
    print(f"\n{len(sizes)} functions, {total} lines, {long / total:.1%} of them in functions of more than {LONG}")
    assert not {name: size for name, size in sizes.items() if size > CEILING}
    assert long / total <= LONG_SHARE


def test_modules_are_of_readable_length() -> None:
    """No module of the packages has more than 400 lines."""
    long = {str(path.relative_to(ROOT)): lines for path in _sources() if (lines := len(_text(path).splitlines())) > 400}
    assert not long, f"cut at a seam: {long}"


def test_no_file_names_a_machine_or_a_registry() -> None:
    """Tracked and new files hold no path of one machine and no address of a package registry."""
    found = [
        f"{name}:{number}: {match.group()}"
        for name in _files()
        for number, line in enumerate(_text(ROOT / name).splitlines(), 1)
        if (match := FORBIDDEN.search(line))
    ]
    assert not found, "\n".join(found)


def test_every_example_is_run_by_a_test() -> None:
    """Each program in examples/ is named by a test."""
    tests = "".join(_text(path) for path in (ROOT / "tests").rglob("*.py"))
    unnamed = [path.name for path in (ROOT / "examples").rglob("*.py") if path.name not in tests]
    assert not unnamed, f"examples that no test names: {unnamed}"


def test_the_addon_folder_holds_one_file() -> None:
    """mitmproxy puts the script's folder first on sys.path, so a second file there could shadow a library."""
    assert [path.name for path in (ROOT / "addons").iterdir() if path.name != "__pycache__"] == ["polar.py"]


def _mirrors() -> Iterator[tuple[Path, Path]]:
    for package, folder in PACKAGES.items():
        for module in sorted((ROOT / package).rglob("*.py")):
            inside = module.relative_to(ROOT / package)
            if module.name in ("__init__.py", "__main__.py"):
                continue
            yield module, ROOT / "tests" / folder / inside.parent / f"test_{module.name}"


def _name(module: Path) -> str:
    package = next(ROOT / package for package in PACKAGES if module.is_relative_to(ROOT / package))
    return str(module.relative_to(package.parent))


def _sources() -> list[Path]:
    folders = [*PACKAGES, "addons", "examples", "benchmarks", "scripts"]
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def _functions(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(_text(path))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def _files() -> list[str]:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")
