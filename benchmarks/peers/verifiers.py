"""verifiers' message graph: `prepare_turn(...).commit(response)` a call, then the tokens of each leaf's Branch."""

from __future__ import annotations

import importlib
from typing import Any

import pydantic

from benchmarks.peers.contestants import Json, Plain, row
from benchmarks.peers.installed import bare, take
from benchmarks.stage.grading import Row


class Verifiers(Plain):
    """All turns of a session are one trace. Messages and their token spans are made outside the timed step."""

    package = "verifiers"
    native = "messages, spans, Responses"
    note = (
        "graph module as installed, Branch from the installed file; branches share nodes, and a trainer that looks at "
        "node identity may mask what is counted under twice"
    )

    def __init__(self) -> None:
        bare("verifiers", "verifiers.v1")
        self._graph = importlib.import_module("verifiers.v1.graph")
        self._types = importlib.import_module("verifiers.v1.types")
        known = {name: getattr(pydantic, name) for name in ("BaseModel", "Field", "computed_field")}
        self._branch = take("verifiers", "verifiers/v1/trace.py", ["Branch"], known).Branch

    def convert(self, read: list[Json]) -> list[tuple[Any, Any]]:  # Any: verifiers' own messages and responses
        """The messages of each request, and its answer with tokens and spans."""
        return [(self._messages(one["messages"]), self._response(one, i)) for i, one in enumerate(read)]

    def merge(self, native: list[tuple[Any, Any]]) -> list[Any]:  # Any: see convert
        """The graph, then the lists of every branch."""
        trace = _Trace()
        for messages, response in native:
            self._graph.prepare_turn(trace, messages).commit(response)
        return [(b.token_ids, b.sampled_mask, b.logprobs) for b in self._branches(trace)]

    def rows(self, merged: list[Any]) -> list[Row]:  # Any: lists
        """A row a branch, with the branch's own mask."""
        return [row(*lists) for lists in merged]

    def _branches(self, trace: _Trace) -> list[Any]:  # Any: verifiers' Branch
        """What `Trace.branches` gives where nothing is compacted."""
        branches: list[Any] = []
        for index, leaf in enumerate(self._graph.leaves(trace)):
            path: list[Any] = []
            node: int | None = leaf
            while node is not None:
                path.append(trace.nodes[node])
                node = trace.nodes[node].parent
            branches.append(self._branch.model_construct(index=index, nodes=path[::-1]))
        return branches

    def _messages(self, messages: list[Json]) -> list[Any]:  # Any: verifiers' messages
        kinds = {
            "system": self._types.SystemMessage,
            "user": self._types.UserMessage,
            "assistant": self._types.AssistantMessage,
        }
        return [kinds[one["role"]](content=one["text"]) for one in messages]

    def _response(self, one: Json, number: int) -> Any:  # Any: verifiers' Response
        ends = [message["end"] for message in one["messages"]]
        tokens = self._types.TurnTokens(
            prompt_ids=one["prompt_ids"],
            completion_ids=one["output_ids"],
            completion_logprobs=one["logprobs"],
            message_spans=list(zip([0, *ends], ends, strict=False)),
        )
        said = self._types.AssistantMessage(content=one["said"])
        return self._types.Response(
            id=f"r{number}", created=0, model="m", message=said, finish_reason="stop", tokens=tokens
        )


class _Trace:
    """What the graph asks of a Trace, whose own module imports sandboxes and servers."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []  # Any: verifiers' MessageNode
        self.tools: list[Any] = []  # Any: verifiers' Tool
        self.mm_token_type_id_map: dict[int, int] = {}
        self._head_index: dict[Any, int] = {}  # Any: keys of verifiers' own

    def clear_preview(self, key: object) -> None:
        """Nobody watches."""
