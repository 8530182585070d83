"""What a rollout looks like at this moment: where each attempt is, what came out so far, what waits for what.

Invariant: every attempt is in exactly one stage, and the counts of all groups add up to the attempts. It keeps counts,
never outcomes, so that its size depends on the task list alone. It decides nothing and prints nothing.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from polar_toolkit.rollout.outcome import Outcome, Status
from polar_toolkit.rollout.task import Attempt

if TYPE_CHECKING:
    from polar_toolkit.rollout.interceptor import Figures

WINDOW_S = 30.0
"""Over which tokens per second are counted."""
ROWS = 12
"""Groups that are shown one by one."""


class Stage(StrEnum):
    """Where an attempt is."""

    WAITING = "waiting"
    INIT = "init"
    READY = "ready"
    RUN = "run"
    POST = "post"
    DONE = "done"


_ACTIVE = (Stage.INIT, Stage.READY, Stage.RUN, Stage.POST)
_SHARES = (0.1, 0.2, 0.5, 0.9)
"""What of an attempt is done in each of them, roughly: for the estimate of the rest alone."""


@dataclass(slots=True)
class _Tally:
    """The attempts of one group, or of all."""

    stages: Counter[Stage] = field(default_factory=Counter[Stage])
    statuses: Counter[Status] = field(default_factory=Counter[Status])
    rewards: float = 0.0
    judged: int = 0

    @property
    def active(self) -> bool:
        return any(self.stages[stage] for stage in _ACTIVE)

    @property
    def finished(self) -> bool:
        return self.stages[Stage.DONE] == self.stages.total()

    @property
    def mean(self) -> str:
        return f"{self.rewards / self.judged:.2f}" if self.judged else "-"

    @property
    def otherwise(self) -> list[str]:
        """How many ended in which other way than completed, the most frequent first."""
        return [f"{count} {status}" for status, count in self.statuses.most_common() if status is not Status.COMPLETED]

    def move(self, before: Stage, after: Stage) -> None:
        self.stages[before] -= 1
        self.stages[after] += 1

    def add(self, outcome: Outcome) -> None:
        self.statuses[outcome.status] += 1
        if outcome.reward is not None:
            self.rewards += outcome.reward
            self.judged += 1


class Board:
    """The attempts of a rollout, each in its stage. `clock` gives seconds."""

    def __init__(self, attempts: Sequence[Attempt], clock: Callable[[], float] = time.monotonic) -> None:
        self.listener: Callable[[Outcome], None] | None = None
        """Called with each outcome, as it comes."""
        self._clock = clock
        self._began = clock()
        self._group_of = {attempt.attempt_id: attempt.group_id for attempt in attempts}
        self._stage_of = dict.fromkeys(self._group_of, Stage.WAITING)
        self._groups = {group: _Tally() for group in self._group_of.values()}
        self._all = _Tally()
        for group in self._group_of.values():
            self._groups[group].stages[Stage.WAITING] += 1
            self._all.stages[Stage.WAITING] += 1
        self._worked = 0
        self._held = ""
        self._figures: Figures | None = None
        self._sampled: deque[tuple[float, int]] = deque()

    def enter(self, attempt_id: str, stage: Stage) -> None:
        """An attempt is in a stage from now on. Another try enters `init` again."""
        for tally in self._tallies(attempt_id):
            tally.move(self._stage_of[attempt_id], stage)
        self._stage_of[attempt_id] = stage

    def end(self, outcome: Outcome) -> None:
        """An attempt is done; one that ended in an earlier start of the rollout counts, but not for the estimate."""
        self._worked += self._stage_of[outcome.attempt_id] in _ACTIVE
        self.enter(outcome.attempt_id, Stage.DONE)
        for tally in self._tallies(outcome.attempt_id):
            tally.add(outcome)
        if self.listener is not None:
            self.listener(outcome)

    def feed(self, figures: Figures) -> None:
        """What the interceptor counts at this moment."""
        now = self._clock()
        self._figures = figures
        self._sampled.append((now, figures.sampled))
        while len(self._sampled) > 2 and self._sampled[1][0] <= now - WINDOW_S:
            self._sampled.popleft()

    def hold(self, reason: str) -> None:
        """Why no new run is started; "" when runs are started."""
        self._held = reason

    def view(self, rows: int = ROWS) -> RenderableType:
        """A table of the groups, at most `rows` of them, and the state of all, in 80 columns."""
        shown = self._shown(rows)
        table = [self._table(shown)] if shown else []
        return Lines(*table, *self._rest(shown), *map(Text, self.lines()))

    def lines(self) -> tuple[str, ...]:
        """The state of all attempts: how far, how fast, and what waits for what."""
        return tuple(line for line in (self._progress(), self._ends(), self._traffic(), self._waits()) if line)

    def tokens_per_second(self) -> float:
        """Sampled tokens a second over the last WINDOW_S."""
        if len(self._sampled) < 2:
            return 0.0
        (began, before), (now, after) = self._sampled[0], self._sampled[-1]
        return max(0, after - before) / (now - began) if now > began else 0.0

    def _tallies(self, attempt_id: str) -> tuple[_Tally, _Tally]:
        return self._groups[self._group_of[attempt_id]], self._all

    def _shown(self, rows: int) -> list[str]:
        if len(self._groups) <= rows:
            return list(self._groups)
        return [name for name, tally in self._groups.items() if tally.active][:rows]

    def _table(self, shown: Sequence[str]) -> Table:
        table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", width=80)
        table.add_column("group", no_wrap=True, overflow="ellipsis", ratio=1, min_width=12)
        for stage in Stage:
            table.add_column(stage.value.removesuffix("ing"), justify="right", no_wrap=True)
        table.add_column("reward", justify="right", no_wrap=True)
        table.add_column("not completed", no_wrap=True, overflow="ellipsis", max_width=20)
        for name in shown:
            tally = self._groups[name]
            counts = (str(tally.stages[stage] or "·") for stage in Stage)
            ends = tally.otherwise
            others = "".join(ends[:1]) + (f" +{len(ends) - 1}" if len(ends) > 1 else "")
            table.add_row(name, *counts, tally.mean, others, style="dim" if tally.finished else "")
        return table

    def _rest(self, shown: Sequence[str]) -> Iterator[Text]:
        seen = set(shown)
        rest = [tally for name, tally in self._groups.items() if name not in seen]
        if rest:
            ended = sum(tally.finished for tally in rest)
            at_work = sum(tally.active for tally in rest)
            wait = len(rest) - ended - at_work
            more = f"and {len(rest)} more groups" if shown else f"{len(rest)} groups"
            yield Text(f"{more}: {at_work} at work, {wait} wait, {ended} done", style="dim")

    def _progress(self) -> str:
        done, total = self._all.stages[Stage.DONE], self._all.stages.total()
        elapsed = self._clock() - self._began
        words = [f"{done} of {total} attempts"]
        words += [f"reward {self._all.mean}"] if self._all.judged else []
        words.append(_span(elapsed))
        if self._worked and done < total:
            begun = sum(self._all.stages[stage] * share for stage, share in zip(_ACTIVE, _SHARES, strict=True))
            words.append(f"about {_span(elapsed * (total - done - begun) / (self._worked + begun))} to go")
        return ", ".join(words)

    def _ends(self) -> str:
        return f"not completed: {', '.join(self._all.otherwise)}" if self._all.otherwise else ""

    def _traffic(self) -> str:
        if self._figures is None:
            return ""
        calls = f"calls: {self._figures.calls:,} done, {self._figures.running} running"
        waiting = f" ({self._figures.waiting} wait)" if self._figures.waiting else ""
        return f"{self.tokens_per_second():,.0f} tokens/s, {self._figures.sampled:,} sampled; {calls}{waiting}"

    def _waits(self) -> str:
        init, ready, run, post = (self._all.stages[stage] for stage in _ACTIVE)
        words = [self._held and f"new runs wait: {self._held}"]
        if ready:
            words.append(f"{ready} prepared {_verb(ready)}{'' if self._held else ' for a run slot'}")
        elif init and not run:
            words.append(f"the engine waits for {init} to be prepared")
        elif post and not (init or run):
            words.append(f"{post} {_verb(post)} for a verdict")
        return "; ".join(filter(None, words))


def line_of(outcome: Outcome) -> str:
    """An outcome in one line."""
    reward = "no reward" if outcome.reward is None else f"reward {outcome.reward:g}"
    note = f": {outcome.note}" if outcome.note else ""
    numbers = f"{outcome.calls} calls, {outcome.sampled_tokens} tokens, {outcome.run_s:.0f} s"
    return f"{outcome.attempt_id} {outcome.status}, {reward}, {numbers}{note}"


def _verb(count: int) -> str:
    return "waits" if count == 1 else "wait"


def _span(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
