//! The rows of a replay layer on the CPU: those of [`replay_core`], written to tensors.

use candle_core::{DType, Tensor};
use replay_core::{Position, Request, StepPlan};

use super::write::{read, write};
use crate::replay_rows::{Among, PadArguments, ReplayArguments};
use crate::{Error, Operand, PAD_ROW, Result};

/// The slot that writes nothing, in every width.
const PAD_SLOT: i64 = -1;

pub(crate) fn replay_rows(checked: &ReplayArguments<'_>) -> Result<()> {
    let op = checked.arguments.op();
    let tensors: Vec<&Tensor> = checked.arguments.list().iter().map(|a| a.tensor).collect();
    let batch = Batch::of(op, &tensors[..5])?;
    batch.expect_slots(op, checked.arguments.list()[5].name, checked.n_batch_rows)?;
    let query = &checked.query;
    let mut plan = StepPlan::new();
    query
        .planner
        .plan_step(query.mode, &batch.requests, &mut plan)
        .map_err(|error| Error::Plan { op, error })?;
    let layer = plan.layer(query.layer);
    let running = layer.running;
    let (n_rows, max_rows) = (running.n_rows().as_usize(), checked.max_rows);
    if n_rows > max_rows {
        return Err(Error::TooManyRows {
            op,
            n_rows,
            max_rows,
        });
    }

    let padded = |entries: Vec<i64>, len: usize, pad: i64| {
        let mut entries = entries;
        entries.resize(len, pad);
        entries
    };
    let batch_rows: Vec<u32> = running
        .indices()
        .map(|row| batch.first + row.get())
        .collect();
    let mut rows = batch_rows.clone();
    if query.among == Among::Entering {
        layer.gather_into(&mut rows);
    }
    let batch_slots = read(tensors[5])?;
    let slot = |row: &u32| batch_slots[*row as usize];
    let starts = running.query_start_loc();
    let last_row = |r: usize| match running.n_rows_of(r).get() {
        0 => PAD_ROW,
        _ => starts[r + 1] - 1,
    };

    let pad_row = i64::from(PAD_ROW);
    let of = |list: &[u32]| list.iter().copied().map(i64::from).collect::<Vec<_>>();
    let positions: Vec<u32> = running.positions().map(Position::get).collect();
    if tensors[7].dtype() == DType::I32 {
        expect_i32(op, &batch_rows, &positions)?;
    }
    let last_rows: Vec<u32> = (0..batch.requests.len()).map(last_row).collect();
    let requests = checked.max_requests;
    write(tensors[6], &padded(of(&rows), max_rows, pad_row))?;
    write(tensors[7], &padded(of(&positions), max_rows, 0))?;
    write(
        tensors[8],
        &padded(batch_rows.iter().map(slot).collect(), max_rows, PAD_SLOT),
    )?;
    write(tensors[9], &padded(of(starts), requests + 1, n_rows as i64))?;
    write(tensors[10], &padded(of(layer.kv_start), requests, 0))?;
    write(tensors[11], &padded(of(&last_rows), requests, pad_row))
}

pub(crate) fn pad_slots(checked: &PadArguments<'_>) -> Result<()> {
    let op = checked.arguments.op();
    let tensors: Vec<&Tensor> = checked.arguments.list().iter().map(|a| a.tensor).collect();
    let batch = Batch::of(op, &tensors[..5])?;
    let lists = &checked.arguments.list()[5..];
    for list in lists {
        batch.expect_slots(op, list.name, checked.n_rows)?;
    }
    for list in lists {
        let mut slots = read(list.tensor)?;
        // Rows before the first request and past the last are padding of the batch.
        let mut begin = batch.first as usize;
        for request in &batch.requests {
            let rebuilt = request.rebuilt_rows(checked.window) as usize;
            // Where no request has a row, offsets may lie anywhere, also past the slots.
            if rebuilt > 0 {
                slots[begin..begin + rebuilt].fill(PAD_SLOT);
            }
            begin += request.query_len as usize;
        }
        write(list.tensor, &slots)?;
    }
    Ok(())
}

/// The requests that a step's tensors describe.
struct Batch {
    /// The row of the batch where the first request's rows begin.
    first: u32,
    requests: Vec<Request>,
}

impl Batch {
    fn of(op: &'static str, fields: &[&Tensor]) -> Result<Self> {
        let list = |field: usize| fields[field].to_vec1::<u32>();
        let (starts, seq_lens, prompt_lens, replay_starts) =
            (list(0)?, list(1)?, list(2)?, list(3)?);
        let keeps_rows = fields[4].to_vec1::<u8>()?;
        let requests = (0..seq_lens.len()).map(|r| {
            let query_len = starts[r + 1]
                .checked_sub(starts[r])
                .ok_or(Error::OffsetsDescend { op, request: r })?;
            let (seq_len, prompt_len) = (seq_lens[r], prompt_lens[r]);
            Ok(Request {
                query_len,
                seq_len,
                prompt_len,
                replay_start: replay_starts[r],
                prefilling: seq_len.saturating_sub(query_len) < prompt_len,
                keeps_rows: keeps_rows[r] != 0,
            })
        });
        Ok(Self {
            first: starts[0],
            requests: requests.collect::<Result<_>>()?,
        })
    }

    /// Refuses slots that do not reach the last request's last row. Requests without a row need none.
    fn expect_slots(&self, op: &'static str, operand: Operand, slots: usize) -> Result<()> {
        let lens = self.requests.iter().map(|r| r.query_len as usize);
        let n_rows = self.first as usize + lens.sum::<usize>();
        if n_rows <= slots || self.requests.iter().all(|r| r.query_len == 0) {
            return Ok(());
        }
        Err(Error::TooFewSlots {
            op,
            operand,
            slots,
            n_rows,
        })
    }
}

/// Refuses positions that would be negative as i32.
fn expect_i32(op: &'static str, rows: &[u32], positions: &[u32]) -> Result<()> {
    let mut places = rows.iter().zip(positions);
    match places.find(|(_, position)| i32::try_from(**position).is_err()) {
        None => Ok(()),
        Some((&row, &position)) => Err(Error::PositionTooLarge {
            op,
            row,
            position,
            dtype: DType::I32,
        }),
    }
}
