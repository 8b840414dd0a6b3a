from __future__ import annotations

import pytest
import torch

from kernels.step_inputs import decode_inputs, remember, write_table

IMPLEMENTATIONS = ["reference", "triton"]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("count", [1, 7, 130, 0])
def test_each_row_by_hand(implementation, page_size, count, library_for, device_for):
    library_for(implementation)
    device = device_for(implementation)
    torch.manual_seed(count + page_size)
    table = torch.randint(0, 2**30, (200, 12), dtype=torch.int32, device=device)
    last = torch.randint(0, 150000, (201,), device=device)
    rows = torch.randperm(200, device=device)[:count].int()
    starts = torch.randint(0, 12 * page_size, (count,), dtype=torch.int32, device=device)
    out = torch.full((3, count + 1), -1, device=device)
    decode_inputs(
        rows, starts, table, last, page_size, *out[:, :count], implementation=implementation
    )
    for i, (row, start) in enumerate(zip(rows.tolist(), starts.tolist(), strict=True)):
        page = int(table[row, start // page_size])
        assert out[:, i].tolist() == [last[row], start, page * page_size + start % page_size]
    assert (out[:, count] == -1).all()  # nothing behind the end


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("count", [1, 16, 300, 0])
def test_named_entries_change_and_no_other(implementation, count, library_for, device_for):
    library_for(implementation)
    device = device_for(implementation)
    torch.manual_seed(count)
    table = torch.randint(0, 99, (40, 11), dtype=torch.int32, device=device)
    last = torch.randint(0, 99, (440,), device=device)
    wanted_table, wanted_last = table.clone(), last.clone()
    where = torch.randperm(440, device=device)[:count].int()
    values = torch.randint(100, 2**31 - 1, (count,), dtype=torch.int32, device=device)
    for place, value in zip(where.tolist(), values.tolist(), strict=True):
        wanted_table[place // 11, place % 11] = value
        wanted_last[place] = value + 2**33
    write_table(table, where, values, implementation=implementation)
    remember(last, where, values.long() + 2**33, implementation=implementation)
    assert torch.equal(table, wanted_table)
    assert torch.equal(last, wanted_last)


def test_refusals():
    rows, table = torch.zeros(2, dtype=torch.int32), torch.zeros((3, 4), dtype=torch.int32)
    last, out = torch.zeros(3, dtype=torch.int64), torch.zeros((3, 2), dtype=torch.int64)
    decode_inputs(rows, rows, table, last, 16, *out)

    with pytest.raises(ValueError, match="starts must be torch.int32"):
        decode_inputs(rows, rows.long(), table, last, 16, *out)
    with pytest.raises(ValueError, match="an entry for each of the table's 3 rows"):
        decode_inputs(rows, rows, table, last[:2], 16, *out)
    with pytest.raises(ValueError, match="page_size must be at least 1"):
        decode_inputs(rows, rows, table, last, 0, *out)
    with pytest.raises(ValueError, match="slots must have shape"):
        decode_inputs(rows, rows, table, last, 16, out[0], out[1], out[2, :1])
    with pytest.raises(ValueError, match="where must be torch.int32"):
        write_table(table, rows.long(), rows)
    with pytest.raises(ValueError, match="tokens must have shape"):
        remember(last, rows, last)
    with pytest.raises(ValueError, match="implementation must be one of"):
        remember(last, rows, last[:2], implementation="cuda")
