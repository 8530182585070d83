"""What can end a training command, and the exit code that says which kind it was.

| boundary | class | exit code | remedy |
|---|---|---|---|
| input -> command: a batch, folder, model or address is unusable | BadInput | 2 | give another; nothing was written |
| step: nothing to learn, or numbers not finite | NothingLearned | 3 | look at the rewards and the batch |
| push: the engine does not serve the checkpoint | PushFailed | 3 | look at the engine |
| gap: trainer and engine give a token other logprobs | Disagreement | 3 | look at precision, weights and sampling |
| loop: a command of polar-toolkit failed | CommandFailed | 3 | look at its log, and start the loop again |

The command line prints the message as one sentence and exits; this module knows nothing of it.
"""

from __future__ import annotations


class TrainError(Exception):
    """Base of all errors that end a command with a sentence instead of a traceback."""

    exit_code: int = 1
    """What the process exits with."""


class BadInput(TrainError):
    """A file, folder or address cannot be used as given; nothing was written."""

    exit_code = 2


class NothingLearned(TrainError):
    """The step would not change the model, or would ruin it; no checkpoint was written."""

    exit_code = 3


class PushFailed(TrainError):
    """The engine refused the checkpoint, or a probe shows that it does not serve it."""

    exit_code = 3


class Disagreement(TrainError):
    """The logprobs of the trainer and those of the engine differ by more than the limit."""

    exit_code = 3


class CommandFailed(TrainError):
    """A command that a loop started ended with an error; what it had done stays."""

    exit_code = 3
