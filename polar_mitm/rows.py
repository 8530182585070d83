"""The calls table: one row per (call, choice), its Arrow schema declared once, with the meaning of each column.

Invariant: a column never changes its meaning; a new schema gets a new `SCHEMA_VERSION` and readers keep reading the
old ones. docs/dataset.md is generated from this module.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

SCHEMA_VERSION = 3

_SPANS = pa.list_(pa.struct([("start", pa.int32()), ("end", pa.int32()), ("version", pa.string())]))

COLUMNS: tuple[tuple[str, pa.DataType, str], ...] = (
    ("schema_version", pa.int32(), "version of this schema"),
    ("run_id", pa.string(), "the run folder's id, made once"),
    (
        "writer",
        pa.string(),
        "the journal that wrote the row, named by its start; calls are ordered by (writer, sequence)",
    ),
    ("sequence", pa.int64(), "position of the call's begin record in its journal"),
    ("call_id", pa.string(), "20 characters; every id in the answer carries it"),
    ("choice", pa.int32(), "index of the choice; 0 unless the request asked for n > 1"),
    ("session_id", pa.string(), "one harness run"),
    ("group_id", pa.string(), "samples of one task, as registered with the session; null if none"),
    (
        "thread_id",
        pa.string(),
        "thread inside the session: the harness's own id, else the parent's thread, else, for the first call of a "
        "sub-agent, its call_id; null for the main line of a harness that names none",
    ),
    ("kind", pa.string(), "agent, subagent, compaction, auxiliary or foreign"),
    (
        "kind_evidence",
        pa.string(),
        "what the kind was told by: fingerprint, header, request, tree, prompt, shape or default (see kinds.py)",
    ),
    ("status", pa.string(), "completed, aborted (cut short), failed, lost (no finish record) or refused"),
    ("error_kind", pa.string(), "errors.py name; null unless failed or refused"),
    ("error", pa.string(), "message of the error; null if none"),
    ("dialect", pa.string(), "protocol of the request; null when it could not be told"),
    ("host", pa.string(), "the provider the harness believed it talked to"),
    ("path", pa.string(), "path of the request, without the query"),
    ("user_agent", pa.string(), "as the harness sent it"),
    ("model", pa.string(), "model name that the harness asked for"),
    ("stream", pa.bool_(), "whether a streamed answer was asked for"),
    ("parent_call_id", pa.string(), "the call whose prompt and output this prompt extends exactly; null for a root"),
    ("parent_choice", pa.int32(), "its choice"),
    ("parent_evidence", pa.string(), "pointer (an echoed id, checked against the history) or history (hash alone)"),
    (
        "root_reason",
        pa.string(),
        "first, subagent (the first of one), compaction (a summary stands for the history), edited_history, "
        "tools_changed, bridge_refused, template_rewrites (polar_history_thinking=template: the template writes the "
        "history anew) or unknown_history; null with a parent",
    ),
    ("prompt_len", pa.int32(), "tokens of the whole prompt"),
    ("prompt_shared", pa.int32(), "leading prompt tokens that are the parent's prompt + output, not stored again"),
    ("prompt_suffix", pa.list_(pa.int32()), "the prompt's tokens after prompt_shared"),
    ("prompt_hash", pa.binary(16), "blake2b-16 of the whole prompt as little-endian int32"),
    ("output_ids", pa.list_(pa.int32()), "sampled token ids, the stop token included"),
    (
        "kept_len",
        pa.int32(),
        "leading output tokens that the answer stands for when a stop string ended it; those after it are recorded, "
        "not trained, and no later prompt holds them; null: all",
    ),
    ("logprobs", pa.list_(pa.float32()), "log-probability of each sampled token under the applied temperature"),
    ("versions", _SPANS, "which weight version sampled output_ids[start:end]"),
    ("temperature", pa.float32(), "applied temperature; logprobs are of logits / temperature"),
    ("sampling_asked", pa.string(), "JSON: what the harness asked for"),
    ("sampling_applied", pa.string(), "JSON: what the engine was told"),
    ("trainable", pa.bool_(), "whether a trainer can recompute the distribution each token came from"),
    (
        "untrainable_reason",
        pa.string(),
        "grammar, greedy, truncated, penalty, mixed_kv, foreign, aborted, lost or failed; null if trainable",
    ),
    ("finish", pa.string(), "stop, length or tool_calls, as told to the harness; null if unfinished"),
    (
        "reply_faults",
        pa.list_(pa.string()),
        "why calls that the model wrote stand in the reply's text, one for each: malformed_tool_call, "
        "truncated_tool_call or unknown_tool (none that was offered)",
    ),
    ("engine_finish", pa.string(), "JSON: the engine's finish_reason, raw"),
    ("cached_tokens", pa.int32(), "prompt tokens that the engine had in its prefix cache"),
    ("client_delivered", pa.bool_(), "whether the whole answer was written to the client"),
    ("repeats", pa.int32(), "how many repeats of the request were given this sample instead of one of their own"),
    (
        "rerender_shared",
        pa.int32(),
        "leading prompt tokens that a plain re-render of the harness's history shares; null for a root, and where it "
        "was not rendered: the first 8 calls of a session are, and all of up to 1,024 tokens, of later ones a share of "
        "1,024 / prompt_len",
    ),
    (
        "drift",
        pa.string(),
        "JSON: where and how a plain re-render leaves the prompt that was sent (class: reasoning, white_space, "
        "arguments, retokenized, template or other; at, sampled, rendered); null where it does not, or was not "
        "rendered",
    ),
    (
        "root_window",
        pa.string(),
        "JSON: where and how a root with a history leaves the nearest earlier call (class: reminder, edited, removed, "
        "tools, compaction or other; at, call, was, now; restored: replies whose reasoning, which the harness left "
        "out, was put back); null with a parent, where there is no such call, and where the call was not completed",
    ),
    (
        "history_key",
        pa.binary(16),
        "chained hash of the canonical history up to and including the reply; null "
        "when a stop string cut the reply inside a token: no call continues it",
    ),
    ("tools_key", pa.binary(16), "hash of the offered tools"),
    ("messages", pa.string(), "JSON: canonical messages after the parent's history and reply (all, for a root)"),
    ("tools", pa.string(), "JSON: offered tools; null when they are the parent's"),
    ("reply", pa.string(), "JSON: canonical parts of the reply"),
    ("request", pa.string(), "JSON: request body, what it shares with the parent's removed (see journal.shrink)"),
    ("answer", pa.string(), "JSON: plain form of the answer"),
    ("fidelity", pa.list_(pa.string()), "request fields that were read and ignored"),
    ("began_ns", pa.int64(), "unix time in ns when the request arrived"),
    ("first_token_ns", pa.int64(), "unix time in ns of the first sampled token; null if none"),
    ("ended_ns", pa.int64(), "unix time in ns when the row was made"),
)

SCHEMA = pa.schema([pa.field(name, kind) for name, kind, _ in COLUMNS])


def token_hash(ids: NDArray[np.int32]) -> bytes:
    """blake2b-16 of token ids as little-endian int32."""
    return blake2b(np.ascontiguousarray(ids, dtype="<i4").tobytes(), digest_size=16).digest()


def full_prompts(table: pa.Table) -> dict[tuple[str, int], NDArray[np.int32]]:
    """The whole prompt of every (call, choice), int32 [T], rebuilt from parents without recursion.

    A call whose parent is missing from the table has no entry.
    """
    links = table.select(["call_id", "choice", "parent_call_id", "parent_choice", "prompt_shared"]).to_pylist()
    suffixes, outputs = (_buffers(table, name) for name in ("prompt_suffix", "output_ids"))
    index = {(row["call_id"], row["choice"]): i for i, row in enumerate(links)}
    prompts: dict[tuple[str, int], NDArray[np.int32]] = {}
    todo = set(index)  # each call is looked at once, also when its root is missing
    for start in index:
        chain = [start]
        while chain[-1] in todo and links[index[chain[-1]]]["parent_call_id"]:
            parent = links[index[chain[-1]]]
            chain.append((parent["parent_call_id"], parent["parent_choice"]))
        for key in reversed(chain):
            if key not in todo:
                continue
            todo.remove(key)
            row, suffix = links[index[key]], suffixes[index[key]]
            parent_key = (row["parent_call_id"], row["parent_choice"])
            if row["parent_call_id"] is None:
                prompts[key] = suffix
            elif parent_key in prompts:
                known = np.concatenate([prompts[parent_key], outputs[index[parent_key]]])
                prompts[key] = np.concatenate([known[: row["prompt_shared"]], suffix])
    return prompts


def _buffers(table: pa.Table, name: str) -> list[NDArray[np.int32]]:
    """The lists of an int32 list column as numpy views."""
    column = table.column(name).combine_chunks()
    values, offsets = column.values.to_numpy(), column.offsets.to_numpy()
    return [values[offsets[i] : offsets[i + 1]] for i in range(len(column))]
