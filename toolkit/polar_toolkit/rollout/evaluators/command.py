"""Kind `command`: a shell command in the workspace. Exit status 0 is reward 1, any other 0.

Options: `command` (else `sh /tests/test.sh`); `reward_file`: true when the command says its reward in a file, as
Harbor's scripts do. Invariant: a command that did not end is the evaluator's failure. A command that runs the work in
its own process lets the work choose the exit status: run it as a process of its own, and compare what it printed.
"""

from __future__ import annotations

from polar_toolkit.rollout.evaluators import Bench, EvaluatorError, Verdict, script
from polar_toolkit.rollout.task import LOGS, TESTS

DEFAULT = f"sh {TESTS}/test.sh"


class Command:
    """The kind."""

    kind = "command"
    options = frozenset({"command", "reward_file"})

    async def evaluate(self, bench: Bench) -> Verdict:
        """See Evaluator.evaluate."""
        options = bench.task.check.options
        in_file = bool(options.get("reward_file"))
        if in_file:
            await script.make_logs(bench)
        ended = await script.run_to_its_end(bench, ("sh", "-c", options.get("command", DEFAULT)), "command")
        if not in_file:
            return Verdict(float(ended.status == 0), note="" if ended.status == 0 else f"exit status {ended.status}")
        verdict = script.reward_of(await script.take_logs(bench))
        if verdict is None:
            raise EvaluatorError(
                f"the command ended with status {ended.status} and wrote neither reward.txt nor reward.json to "
                f"{LOGS}/verifier; see evaluation/command.err"
            )
        return verdict


COMMAND = Command()
