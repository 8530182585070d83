"""Plain records of other systems: names, types, and why a record is bad."""

import datetime
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from polar_toolkit.errors import Refusal, UnreadableFile
from polar_toolkit.records import NAMES, BadRecord, parse, read

GOOD = {"prompt_ids": [1, 2], "output_ids": [3, 4], "logprobs": [-0.5, -0.25]}


@pytest.mark.parametrize("field", ["prompt_ids", "output_ids", "logprobs"])
def test_each_name_of_a_required_field_is_read(field):
    """What one system calls completion_ids another calls response_ids."""
    for name in NAMES[field]:
        record = parse({key: value for key, value in GOOD.items() if key != field} | {name: GOOD[field]})
        assert (record.prompt_ids.tolist(), record.output_ids.tolist()) == ([1, 2], [3, 4])
        assert record.logprobs.tolist() == [-0.5, -0.25]


def test_ids_are_int32_and_logprobs_float32():
    """Whatever they were."""
    record = parse(GOOD | {"prompt_ids": np.array([1, 2], np.int64)})
    assert (record.prompt_ids.dtype, record.output_ids.dtype) == (np.int32, np.int32)
    assert record.logprobs.dtype == np.float32


def test_what_a_record_says_beside_its_tokens_is_read():
    """Session, group, kind, reward, version and temperature, under the names of several systems."""
    record = parse(
        GOOD
        | {"rollout_id": 7, "uid": "task-1", "kind": "subagent", "reward_score": 1, "weight_version": 3}
        | {"temperature": 0.7, "choice": 2, "trace_id": "t9", "turn_index": 4}
    )
    assert (record.session_id, record.group_id, record.kind, record.reward) == ("7", "task-1", "subagent", 1.0)
    assert (record.version, record.temperature, record.choice) == ("3", 0.7, 2)
    assert (record.call_id, record.order) == ("t9", 4)


@pytest.mark.parametrize(
    ("value", "order"),
    [
        (5, 5),
        (1.5, 1_500_000_000),
        ("1970-01-01T00:00:02+00:00", 2_000_000_000),
        ("1970-01-01T00:00:02", 2_000_000_000),
        (datetime.datetime(1970, 1, 1, 0, 0, 2, tzinfo=datetime.UTC), 2_000_000_000),
    ],
)
def test_an_order_is_a_position_or_a_time(value, order):
    """Seconds, dates and ISO 8601 text become ns."""
    assert parse(GOOD | {"created_at": value}).order == order


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"prompt_ids": None}, "no prompt_ids: none of prompt_ids, prompt_token_ids"),
        ({"output_ids": None}, "no output_ids"),
        ({"logprobs": None}, "no logprobs"),
        ({"prompt_ids": "12"}, "prompt_ids is str, not a list of numbers"),
        ({"prompt_ids": [[1], [2, 3]]}, "prompt_ids is no flat list of numbers"),
        ({"prompt_ids": [[1], [2]]}, "prompt_ids is no flat list of numbers"),
        ({"prompt_ids": [1, None]}, "prompt_ids is no flat list of numbers"),
        ({"prompt_ids": [1, "2"]}, "prompt_ids is no flat list of numbers"),
        ({"prompt_ids": [True]}, "prompt_ids is no flat list of numbers"),
        ({"prompt_ids": [1.0]}, "prompt_ids holds float64, not integers"),
        ({"prompt_ids": [-1]}, "prompt_ids holds an id outside 0"),
        ({"output_ids": [1, 2**31]}, "output_ids holds an id outside 0"),
        ({"output_ids": [1, 2**70]}, "output_ids is no flat list of numbers"),
        ({"prompt_ids": []}, "the prompt is empty"),
        ({"logprobs": [-0.5]}, "1 logprobs for 2 sampled tokens"),
        ({"logprobs": [-0.5, float("nan")]}, "logprobs holds a value above 0 or none that is finite"),
        ({"logprobs": [-0.5, float("-inf")]}, "logprobs holds a value above 0"),
        ({"logprobs": [-0.5, 0.1]}, "logprobs holds a value above 0"),
        ({"response_mask": [1, 0]}, "response_mask leaves out output tokens"),
        ({"loss_mask": [0, 0, 0, 1]}, "loss_mask leaves out output tokens"),
        ({"temperature": 0}, "temperature is 0, not a finite number above 0"),
        ({"temperature": "warm"}, "temperature is 'warm'"),
        ({"reward": float("nan")}, "reward is nan, not a finite number"),
        ({"session_id": [1]}, "session_id is [1], not a name"),
        ({"session_id": ""}, "session_id is '', not a name"),
        ({"choice": -1}, "choice is -1, not a whole number"),
        ({"order": "soon"}, "order is 'soon', neither a number nor"),
        ({"order": float("inf")}, "order is inf, neither a number nor"),
    ],
)
def test_a_bad_record_is_named_with_the_field_and_the_value(change, reason):
    """Nothing is repaired or guessed."""
    with pytest.raises(BadRecord) as error:
        parse(GOOD | change)
    assert str(error.value).startswith(reason)


def test_a_mask_over_prompt_and_output_may_leave_out_the_prompt():
    """Only the part behind the prompt says what was sampled."""
    assert len(parse(GOOD | {"loss_mask": [0, 0, 1, 1]}).output_ids) == 2


def test_an_output_may_be_empty():
    """A call that sampled nothing is context."""
    assert len(parse({"prompt_ids": [1], "output_ids": [], "logprobs": []}).output_ids) == 0


def test_lines_that_are_no_records_come_with_their_number_and_the_reason(tmp_path):
    """Broken JSON, other JSON; empty lines are nothing."""
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(GOOD) + "\n\n{\n[1]\n")
    (one, good), (two, broken), (three, other) = read(path)
    assert (one, good) == (1, GOOD)
    assert (two, broken[:8]) == (3, "not JSON")
    assert (three, other) == (4, "not a JSON object but list")


def test_parquet_gives_what_jsonl_gives(tmp_path):
    """Also where a row has no value, or a list has a hole."""
    table = pa.table(
        {
            "prompt_token_ids": pa.array([[1, 2], [1, None], None], pa.list_(pa.int64())),
            "completion_ids": pa.array([[3], [3], [3]], pa.large_list(pa.int32())),
            "logprobs": pa.array([[-0.5], [-0.5], [-0.5]], pa.list_(pa.float64())),
            "rollout_id": pa.array([1, None, 2]),
            "messages": pa.array(["ignored"] * 3),
        }
    )
    pq.write_table(table, tmp_path / "r.parquet")
    (one, first), (two, second), (three, third) = read(tmp_path / "r.parquet")
    record = parse(first)
    assert (one, two, three) == (1, 2, 3)
    assert (record.prompt_ids.tolist(), record.output_ids.tolist(), record.session_id) == ([1, 2], [3], "1")
    with pytest.raises(BadRecord, match="outside 0"):
        parse(second)
    with pytest.raises(BadRecord, match="no prompt_ids"):
        parse(third)


def test_parquet_without_any_known_column_is_bad_row_by_row(tmp_path):
    """Each row says what it lacks."""
    pq.write_table(pa.table({"text": ["a", "b"]}), tmp_path / "r.parquet")
    assert [(number, dict(raw)) for number, raw in read(tmp_path / "r.parquet")] == [(1, {}), (2, {})]


def test_other_files_are_refused_with_what_to_give(tmp_path):
    """A missing file, another kind of file, broken Parquet."""
    with pytest.raises(Refusal, match=r"does not exist; give \.jsonl or \.parquet"):
        read(tmp_path / "none.jsonl")
    (tmp_path / "r.csv").touch()
    with pytest.raises(Refusal, match=r"neither \.jsonl nor \.parquet"):
        read(tmp_path / "r.csv")
    (tmp_path / "r.parquet").write_bytes(b"PAR1")
    with pytest.raises(UnreadableFile, match=r"r\.parquet cannot be read"):
        list(read(tmp_path / "r.parquet"))
