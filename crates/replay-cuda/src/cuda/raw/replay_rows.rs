//! Launches that work out the rows of a replay layer.

use candle_core::{DType, Tensor};
use replay_core::{ReplayPolicy, RowCount};

use super::args::{MAX_LISTS, PadArgs, ReplayArgs, Rule};
use super::launch::{Grid, Kernel, launch};
use crate::replay_rows::{Among, LayerQuery, PadArguments, ReplayArguments};
use crate::{Error, Operand, Result};

/// Threads of a block; `BLOCK` of the kernels.
const BLOCK: u32 = 256;

/// A length that stands for all rows; `NONE` of the kernels.
const ALL_ROWS: u32 = u32::MAX;

impl Rule {
    fn of(query: &LayerQuery<'_>) -> Self {
        let planner = query.planner;
        let tail = |layer| planner.tail_rows(layer).map_or(ALL_ROWS, RowCount::get);
        Self {
            policy: match planner.config().policy {
                ReplayPolicy::Off => 0,
                ReplayPolicy::StepTail => 1,
                ReplayPolicy::PromptTail => 2,
                ReplayPolicy::Exact => 3,
            },
            trims: u32::from(query.trims()),
            is_cut: u32::from(query.layer == 0),
            running: tail(query.layer),
            entering: query.layer.checked_sub(1).map_or(ALL_ROWS, tail),
            relative: u32::from(query.among == Among::Entering),
            sampled: planner.config().sampled_rows.get(),
            pad: 0,
        }
    }
}

/// Works out the rows of a layer.
pub(crate) fn replay_rows(checked: &ReplayArguments<'_>) -> Result<()> {
    let op = checked.arguments.op();
    let count = |n: usize, name| {
        u32::try_from(n).map_err(|_| Error::TooLarge {
            op,
            operand: Operand::Field(name),
        })
    };
    let n_requests = count(checked.n_requests, "seq_lens")?;
    let out_requests = count(checked.max_requests, "kv_start")?;
    let n_batch_rows = count(checked.n_batch_rows, "slots of the batch")?;
    let max_rows = count(checked.max_rows, "rows")?;
    let list = checked.arguments.list();
    let (positions, slots) = (log2_bytes(list[7].tensor), log2_bytes(list[8].tensor));
    // SAFETY:
    // - Kernel: `replay_rows` takes a `ReplayArgs`, in blocks of `BLOCK` threads with two u32 of
    //   shared memory for each request and one more; there is a thread for every row and offset.
    // - Extents: the twelve addresses are those of contiguous lists whose lengths `replay_rows_into`
    //   has compared with these counts, of u32 and u8 where the kernel says so, and of 4 or 8 bytes
    //   as told for positions and slots. Values that index are checked by the kernel.
    // - Writes: it writes the last six, which are marked as written.
    unsafe {
        launch(Kernel::REPLAY_ROWS, &checked.arguments, |addresses| {
            let mut lists = [0; 12];
            lists.copy_from_slice(addresses);
            let args = ReplayArgs {
                lists,
                n_requests,
                out_requests,
                n_batch_rows,
                max_rows,
                position_log2: positions,
                slot_log2: slots,
                rule: Rule::of(&checked.query),
            };
            let threads = max_rows.max(out_requests.saturating_add(1));
            let shared_bytes = 2 * (n_requests + 1) * size_of::<u32>() as u32;
            Ok(vec![(
                args,
                Grid {
                    blocks: threads.div_ceil(BLOCK),
                    threads: BLOCK,
                    shared_bytes,
                },
            )])
        })
    }
}

/// Pads slots, up to [`MAX_LISTS`] lists in one launch.
pub(crate) fn pad_slots(checked: &PadArguments<'_>) -> Result<()> {
    let op = checked.arguments.op();
    let too_large = |_| Error::TooLarge {
        op,
        operand: Operand::Output(0),
    };
    let n_rows = u32::try_from(checked.n_rows).map_err(too_large)?;
    let n_requests = u32::try_from(checked.n_requests).map_err(too_large)?;
    let slots = &checked.arguments.list()[5..];
    if n_requests == 0 {
        return Ok(());
    }
    // SAFETY:
    // - Kernel: `pad_rebuilt_slots` takes a `PadArgs` and blocks of any size; every row has a thread.
    // - Extents: the lists are contiguous, of `n_rows` entries of 4 or 8 bytes as told; the lengths
    //   and offsets are contiguous u32, one for each request and one more offset, of which there is
    //   one at least.
    // - Writes: it writes the lists, which are marked as written.
    unsafe {
        launch(Kernel::PAD_SLOTS, &checked.arguments, |addresses| {
            let addresses = (&addresses[..5], &addresses[5..]);
            let chunks = addresses.1.chunks(MAX_LISTS).zip(slots.chunks(MAX_LISTS));
            let launches = chunks.map(|(lists, slots)| {
                let mut args = PadArgs {
                    query_start_loc: addresses.0[0],
                    seq_lens: addresses.0[1],
                    replay_starts: addresses.0[3],
                    n_lists: lists.len() as u32,
                    n_requests,
                    n_rows,
                    window: checked.window.get(),
                    ..PadArgs::default()
                };
                args.lists[..lists.len()].copy_from_slice(lists);
                for (log2, argument) in args.log2_bytes.iter_mut().zip(slots) {
                    *log2 = log2_bytes(argument.tensor);
                }
                let blocks = n_rows.div_ceil(BLOCK);
                (
                    args,
                    Grid {
                        blocks,
                        threads: BLOCK,
                        shared_bytes: 0,
                    },
                )
            });
            Ok(launches.collect())
        })
    }
}

/// Of a list of u32, i32 or i64.
fn log2_bytes(list: &Tensor) -> u32 {
    match list.dtype() {
        DType::I64 => 3,
        _ => 2,
    }
}
