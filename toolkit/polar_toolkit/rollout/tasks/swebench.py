"""Rows of SWE-bench (all of it, Lite, Verified), of SWE-Gym and of what is derived from them, as tasks.

Invariant: the harness gets the problem statement and the repository at its base commit, and nothing of the tests or of
the solution: `patch`, `test_patch`, the tests' names and the hints never come into its sandbox nor into the metadata.
Where a row names no image, and no command for its tests, they are told by the schemes that stand here.
"""

from __future__ import annotations

import json
import re
from typing import Any

from polar_toolkit.rollout.task import Check, Environment, Task
from polar_toolkit.rollout.tasks.fields import Fields, made_id, plain

WORKDIR = "/testbed"
"""Where the images of SWE-bench and SWE-Gym hold the repository."""
PATH = (
    "/opt/miniconda3/envs/testbed/bin:/opt/miniconda3/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
)
"""With the environment in which these images hold the repository's dependencies."""
REPOSITORIES = (
    "astropy/astropy", "django/django", "matplotlib/matplotlib", "mwaskom/seaborn", "pallets/flask", "psf/requests",
    "pydata/xarray", "pylint-dev/pylint", "pytest-dev/pytest", "scikit-learn/scikit-learn", "sphinx-doc/sphinx",
    "sympy/sympy",
)  # fmt: skip
"""The repositories of SWE-bench; SWE-Gym has none of them, and is told by that."""
_RUNNERS = {
    "django/django": ("./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1", "unittest"),
    "sympy/sympy": ("bin/test -C --verbose", "sympy"),
}
_PYTEST = ("python -m pytest -rA --tb=no -p no:cacheprovider", "pytest")
_TEST_FILE = re.compile(r"^diff --git a/.* b/(.*\.py)$", re.MULTILINE)
_SECRET = ("patch", "hints_text", "version", "environment_setup_commit", "created_at", "prompt", "all_hints_text")


def is_one(fields: Fields) -> bool:
    """Whether a row is one of these."""
    return fields.has("FAIL_TO_PASS") or fields.has("fail_to_pass")


def task(fields: Fields) -> Task:
    """The task of a row. Raises Refusal."""
    instance, repo = fields.text("instance_id"), fields.text("repo", default="")
    image = fields.text("docker_image", "image_name", "image", "instance_image", default="") or image_of(instance, repo)
    test_patch = fields.text("test_patch")
    command, form = _RUNNERS.get(repo, _PYTEST)
    options: dict[str, Any] = {  # Any: JSON
        "fail_to_pass": _tests(fields, "FAIL_TO_PASS"),
        "pass_to_pass": _tests(fields, "PASS_TO_PASS"),
        "test_patch": test_patch,
        "test_command": fields.text("test_cmd", "test_command", default=f"{command} {_directives(repo, test_patch)}"),
        "log_format": form,
    }
    environment = Environment(
        image=image,
        workdir=fields.text("workdir", default=WORKDIR),
        variables={"PATH": PATH},
        base_commit=fields.text("base_commit"),
    )
    statement = fields.text("problem_statement").strip()
    for name in _SECRET:
        fields.take(name)
    return Task(
        task_id=made_id(instance),
        instruction=statement,
        check=Check("swebench", options, carry="patch"),
        environment=environment,
        metadata={"format": "swebench", "instance_id": instance, "repo": repo, "ignored": sorted(plain(fields.rest()))},
    )


def image_of(instance_id: str, repo: str) -> str:
    """The image that was published for an instance: SWE-bench's own scheme, or SWE-Gym's for all other repositories."""
    if repo in REPOSITORIES:
        return f"swebench/sweb.eval.x86_64.{instance_id.replace('__', '_1776_')}:latest".lower()
    return f"xingyaoww/sweb.eval.x86_64.{instance_id.replace('__', '_s_')}:latest".lower()


def _tests(fields: Fields, name: str) -> list[str]:
    """A list of names, or the JSON of one, under the name in capitals or in small letters."""
    found = fields.take(name)
    found = fields.take(name.lower()) if found is None else found
    try:
        tests: Any = json.loads(found) if isinstance(found, str) else found  # Any: JSON
    except ValueError:
        tests = None
    if not isinstance(tests, list) or not all(isinstance(test, str) for test in tests):
        fields.refuse(name, found, "write a list of tests' names, or the JSON of one")
    return tests


def _directives(repo: str, test_patch: str) -> str:
    """What the runner is told to run: the test files of the patch; Django wants modules."""
    files = list(dict.fromkeys(_TEST_FILE.findall(test_patch)))
    if repo == "django/django":
        return " ".join(file.removeprefix("tests/").removesuffix(".py").replace("/", ".") for file in files)
    return " ".join(files)
