"""Kind `harbor`: the tests/test.sh of a Harbor task, which writes /logs/verifier/reward.txt or reward.json.

Options: `env` (variables of the script), `reward_key` (which number of a reward.json is the reward). Invariant: without
a reward file there is no reward. The sandbox has no network: a script that installs its tools first cannot.
"""

from __future__ import annotations

from polar_toolkit.rollout.evaluators import Bench, EvaluatorError, Verdict, script
from polar_toolkit.rollout.task import LOGS, TESTS

_RUN = f"if [ -x {TESTS}/test.sh ]; then exec {TESTS}/test.sh; else exec bash {TESTS}/test.sh; fi"


class Harbor:
    """The kind."""

    kind = "harbor"
    options = frozenset({"env", "reward_key"})

    async def evaluate(self, bench: Bench) -> Verdict:
        """See Evaluator.evaluate."""
        options = bench.task.check.options
        await script.make_logs(bench)
        ended = await script.run_to_its_end(bench, ("sh", "-c", _RUN), "test", options.get("env", {}))
        verdict = script.reward_of(await script.take_logs(bench), options.get("reward_key", "reward"))
        if verdict is None:
            raise EvaluatorError(
                f"tests/test.sh ended with status {ended.status} and wrote neither reward.txt nor reward.json to "
                f"{LOGS}/verifier; see evaluation/test.out (there is no network while judging)"
            )
        return verdict


HARBOR = Harbor()
