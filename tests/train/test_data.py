"""Reading batch Parquet: what enters, and the sentence for each thing that does not."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from polar_train.data import BatchSummary, read_batches, read_summary, read_tokenizer, stream
from polar_train.errors import BadInput


def test_a_row_keeps_its_tokens_as_int32_buffers(write, draw):
    """Token ids and positions arrive as numpy int32, in the order of the file."""
    first, second = draw(30, 12)
    (row,) = read_batches(write([first, second]))
    assert row.input_ids_T.dtype == row.position_ids_T.dtype == row.lengths.dtype == np.int32
    assert np.array_equal(row.input_ids_T, np.concatenate([first.ids, second.ids]))
    assert row.lengths.tolist() == [30, 12]
    assert row.trajectory_ids == ("t0", "t1")


def test_versions_are_those_of_trained_tokens(write, draw):
    """The empty version of tokens off the mask is not a version."""
    (row,) = read_batches(write(draw(30)))
    assert row.versions == {"v1"}


def test_each_token_has_its_version(tmp_path, as_batch, draw):
    """As an index into the names of the row."""
    table = as_batch(draw(30))
    changed = _changed(table.to_pylist()[0], "versions", -1, "v2")
    pq.write_table(pa.Table.from_pylist([changed], schema=table.schema), tmp_path / "a.parquet")
    (row,) = read_batches(tmp_path)
    assert row.versions_T.dtype == np.int32
    assert [row.version_names[code] for code in row.versions_T] == changed["versions"]
    assert row.versions == {"v1", "v2"}


def test_a_session_without_a_group_is_one_by_itself(tmp_path, as_batch, draw):
    """With its own name."""
    table = as_batch(draw(9, 8))
    row = _changed(table.to_pylist()[0], "group_ids", 1, None)
    pq.write_table(pa.Table.from_pylist([row], schema=table.schema), tmp_path / "a.parquet")
    (read,) = read_batches(tmp_path)
    assert (read.session_ids, read.group_ids) == (("s-t0", "s-t1"), ("g", "s-t1"))


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path, as_batch, draw):
    """Rows of several files and row groups come in order, each with its own cells."""
    table = as_batch(*[[one] for one in draw(9, 8, 7, 6)])
    pq.write_table(table.slice(0, 3), tmp_path / "a.parquet", row_group_size=1)
    pq.write_table(table.slice(3), tmp_path / "b.parquet")
    assert [len(row.input_ids_T) for row in read_batches(tmp_path)] == [9, 8, 7, 6]


def test_large_lists_of_large_strings_are_the_same_contract(tmp_path, as_batch, draw):
    """A writer that uses Arrow's 64-bit offsets writes the same batch."""
    table = as_batch(draw(20))
    versions = table.column("versions").cast(pa.large_list(pa.large_string()))
    pq.write_table(table.set_column(table.column_names.index("versions"), "versions", versions), tmp_path / "a.parquet")
    assert read_batches(tmp_path)[0].versions == {"v1"}


def _changed(row: dict, name: str, index: int, value) -> dict:
    cell = list(row[name])
    cell[index] = value
    return {**row, name: cell}


FAULTS = {
    "a nan logprob": ("old_logprobs", -1, float("nan"), "old_logprobs of .* is nan at token 29"),
    "a positive logprob": ("old_logprobs", -1, 0.5, "old_logprobs of .* is 0.5 at token 29"),
    "an infinite advantage": ("advantages", -1, float("inf"), "advantages of .* is inf"),
    "a temperature of zero": ("temperature", -1, 0.0, "temperature of .* is 0.0"),
    "a negative weight": ("loss_weight", -1, -1.0, "loss_weight of .* is -1.0"),
    "a weight off the mask": ("loss_weight", 0, 0.5, r"loss_weight of .* is 0.5 at token 0 \(loss_mask 0\)"),
    "a mask of two": ("loss_mask", -1, 2, "loss_mask of .* other than 0 and 1"),
    "a first token that is trained": ("loss_mask", 0, 1, "first token of a trajectory"),
    "positions that do not restart": ("position_ids", 3, 7, "position_ids of .* must restart at 0"),
    "a negative id": ("input_ids", 2, -5, "input_ids of .* holds -5"),
    "a length that is not the row's": ("lengths", 0, 29, "lengths of .* must be positive and add up to 30"),
    "a null": ("advantages", 4, None, "advantages.* holds nulls"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_cell_is_named_with_its_value(tmp_path, as_batch, draw, fault):
    """Each breach of the contract is one sentence that names file, row, column and value."""
    name, index, value, sentence = FAULTS[fault]
    table = as_batch(draw(30))
    broken = pa.Table.from_pylist([_changed(table.to_pylist()[0], name, index, value)], schema=table.schema)
    pq.write_table(broken, tmp_path / "broken.parquet")
    with pytest.raises(BadInput, match=sentence):
        read_batches(tmp_path)


def test_columns_of_unequal_length_are_refused(tmp_path, as_batch, draw):
    """Every per-token column has one entry a token."""
    table = as_batch(draw(30))
    row = table.to_pylist()[0]
    broken = pa.Table.from_pylist([{**row, "advantages": row["advantages"][:-1]}], schema=table.schema)
    pq.write_table(broken, tmp_path / "broken.parquet")
    with pytest.raises(BadInput, match=r"advantages of .* row 0 has 29 entries, input_ids has 30"):
        read_batches(tmp_path)


def test_a_missing_column_is_named(tmp_path, as_batch, draw):
    """A Parquet file of something else says which column it lacks."""
    pq.write_table(as_batch(draw(30)).drop_columns(["loss_weight"]), tmp_path / "foreign.parquet")
    with pytest.raises(BadInput, match=r"foreign.parquet' has no column 'loss_weight'"):
        read_batches(tmp_path)


def test_a_column_of_another_type_is_named_with_both_types(tmp_path, as_batch, draw):
    """Ids as int64 are another contract."""
    table = as_batch(draw(30))
    wide = table.column("input_ids").cast(pa.list_(pa.int64()))
    pq.write_table(table.set_column(0, "input_ids", wide), tmp_path / "wide.parquet")
    with pytest.raises(BadInput, match=r"'input_ids' of .* is list<.*int64>, expected list<int32>"):
        read_batches(tmp_path)


def test_a_part_of_a_batch_is_refused(tmp_path, as_batch, draw):
    """Weights are normalised over the whole batch, so half of it is seen by their sum."""
    table = as_batch(*[[one] for one in draw(30, 30)])
    pq.write_table(table.slice(0, 1), tmp_path / "half.parquet")
    with pytest.raises(BadInput, match=r"adds up to 0.5\d*, not 1"):
        read_batches(tmp_path)


def test_a_truncated_file_is_refused(write, draw):
    """A file cut short is one sentence that names it."""
    folder = write(draw(30))
    file = folder / "00000.parquet"
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(BadInput, match=r"00000.parquet' is not a readable Parquet file"):
        read_batches(folder)


def test_a_folder_without_batches_says_where_they_come_from(tmp_path):
    """The remedy is in the sentence."""
    with pytest.raises(BadInput, match="polar-toolkit merge"):
        read_batches(tmp_path)


def test_a_batch_without_rows_is_refused(tmp_path, as_batch):
    """No rows is not an empty step."""
    pq.write_table(as_batch(), tmp_path / "empty.parquet")
    with pytest.raises(BadInput, match="holds no rows"):
        read_batches(tmp_path)


def stated(table: pa.Table, weight_sum: float) -> pa.Table:
    """A table as a file of one batch, which says what its weights add up to."""
    return table.replace_schema_metadata({"loss_weight_sum": repr(weight_sum)})


def test_the_weights_of_a_batch_may_add_up_to_what_its_file_states(tmp_path, as_batch, draw):
    """Constant weighting does not add up to 1; half of such a batch is refused all the same."""
    table = as_batch(*[[one] for one in draw(30, 30)])
    pq.write_table(stated(table.slice(0, 1), 0.5), tmp_path / "whole.parquet")
    assert len(read_batches(tmp_path / "whole.parquet")) == 1
    pq.write_table(stated(table.slice(0, 1), 1.0), tmp_path / "half.parquet")
    with pytest.raises(BadInput, match="pass the whole batch"):
        read_batches(tmp_path / "half.parquet")


def test_a_folder_of_several_batches_is_refused(tmp_path, as_batch, draw):
    """Each is a step of its own; the sentence names one."""
    for name in ("a", "b"):
        pq.write_table(stated(as_batch(draw(30)), 1.0), tmp_path / f"{name}.parquet")
    with pytest.raises(BadInput, match=r"holds 2 batches, one a file: give one of them, 'a.parquet'"):
        read_batches(tmp_path)


def test_rows_come_one_after_the_other(tmp_path, as_batch, draw):
    """Of a file with a row group for each row, the first is there before the second is read."""
    pq.write_table(as_batch(*[[one] for one in draw(30, 30)]), tmp_path / "whole.parquet", row_group_size=1)
    path = tmp_path / "whole.parquet"
    data = bytearray(path.read_bytes())
    at = pq.read_metadata(path).row_group(1).column(1).data_page_offset
    data[at : at + 40] = bytes(40)
    path.write_bytes(data)
    rows = stream(path)
    assert len(next(rows).input_ids_T) == 30
    with pytest.raises(BadInput, match="not a readable Parquet file"):
        next(rows)


STATED = '{"sessions": 8, "groups": 2, "dead_groups": 1, "reward_mean": 0.25, "tokenizer": "257-ab"}'


def test_what_a_batch_was_made_of_is_what_its_writer_said(tmp_path, as_batch, draw):
    """Sessions without a trained token are not in the rows, and count all the same."""
    table = as_batch(draw(30)).replace_schema_metadata({"polar_batch": STATED})
    pq.write_table(table, tmp_path / "a.parquet")
    assert read_summary(tmp_path / "a.parquet") == BatchSummary(8, 2, 1, 0.25, "257-ab")
    assert read_tokenizer(tmp_path / "a.parquet") == "257-ab"


def test_a_batch_of_another_writer_is_counted(write, draw):
    """A group without any advantage is dead; rewards and tokenizer stay unknown."""
    alive, dead = draw(30, 12)
    dead.advantage = 0.0
    assert read_summary(write([alive, dead])) == BatchSummary(2, 1, 0, None, None)
    assert read_summary(write([dead])) == BatchSummary(1, 1, 1, None, None)
    assert read_tokenizer(write([dead])) is None


@pytest.mark.parametrize("text", ["{", "[]", '{"sessions": 1}'])
def test_metadata_that_cannot_be_read_are_refused(tmp_path, as_batch, draw, text):
    """With their key and what to do."""
    pq.write_table(as_batch(draw(30)).replace_schema_metadata({"polar_batch": text}), tmp_path / "a.parquet")
    with pytest.raises(BadInput, match=r"metadata 'polar_batch' of .*a.parquet' is .*: make the batch again"):
        read_summary(tmp_path / "a.parquet")
