//! The rows of a replay layer on the CPU: those of [`replay_core`], written to tensors.

use candle_core::Tensor;
use replay_core::{Request, RowIdx, StepPlan, pad_rebuilt_slots};

use super::write::{read, write};
use crate::replay_rows::{Among, PadArguments, ReplayArguments};
use crate::{Error, PAD_ROW, Result};

/// The slot that writes nothing, in every width.
const PAD_SLOT: i64 = -1;

pub(crate) fn replay_rows(checked: &ReplayArguments<'_>) -> Result<()> {
    let op = checked.arguments.op();
    let tensors: Vec<&Tensor> = checked.arguments.list().iter().map(|a| a.tensor).collect();
    let requests = requests(op, &tensors[..5])?;
    let query = &checked.query;
    let mut plan = StepPlan::new();
    query.planner.plan_step(query.mode, &requests, &mut plan)?;
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
    let batch_rows: Vec<u32> = running.indices().map(RowIdx::get).collect();
    let mut rows = batch_rows.clone();
    if query.among == Among::Entering {
        layer.gather_into(&mut rows);
    }
    let batch_slots = read(tensors[5])?;
    // A row of the batch that the slots do not reach writes nothing.
    let slot = |row: &u32| batch_slots.get(*row as usize).copied().unwrap_or(PAD_SLOT);
    let starts = running.query_start_loc();
    let last_row = |r: usize| match running.n_rows_of(r).get() {
        0 => PAD_ROW,
        _ => starts[r + 1] - 1,
    };

    let pad_row = i64::from(PAD_ROW);
    let of = |list: &[u32]| list.iter().copied().map(i64::from).collect::<Vec<_>>();
    let positions = running.positions().map(|x| i64::from(x.get())).collect();
    let last_rows: Vec<u32> = (0..requests.len()).map(last_row).collect();
    let requests = checked.max_requests;
    write(tensors[6], &padded(of(&rows), max_rows, pad_row))?;
    write(tensors[7], &padded(positions, max_rows, 0))?;
    write(
        tensors[8],
        &padded(batch_rows.iter().map(slot).collect(), max_rows, PAD_SLOT),
    )?;
    write(tensors[9], &padded(of(starts), requests + 1, n_rows as i64))?;
    write(tensors[10], &padded(of(layer.kv_start), requests, 0))?;
    write(tensors[11], &padded(of(&last_rows), requests, pad_row))
}

pub(crate) fn pad_slots(checked: &PadArguments<'_>) -> Result<()> {
    let tensors: Vec<&Tensor> = checked.arguments.list().iter().map(|a| a.tensor).collect();
    let requests = requests(checked.arguments.op(), &tensors[..5])?;
    let n_rows = requests
        .iter()
        .map(|request| request.query_len as usize)
        .sum();
    let padded = tensors[5..].iter().map(|list| {
        let mut slots = read(list)?;
        // Rows past the last request's are padding of the batch.
        let len = slots.len();
        pad_rebuilt_slots(&requests, checked.window, &mut slots[..len.min(n_rows)])?;
        Ok(slots)
    });
    let padded = padded.collect::<Result<Vec<_>>>()?;
    tensors[5..]
        .iter()
        .zip(padded)
        .try_for_each(|(list, slots)| write(list, &slots))
}

/// The requests that a step's tensors describe.
fn requests(op: &'static str, fields: &[&Tensor]) -> Result<Vec<Request>> {
    let list = |field: usize| fields[field].to_vec1::<u32>();
    let (starts, seq_lens, prompt_lens, replay_starts) = (list(0)?, list(1)?, list(2)?, list(3)?);
    let keeps_rows = fields[4].to_vec1::<u8>()?;
    (0..seq_lens.len())
        .map(|r| {
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
        })
        .collect()
}
