//! The rows of a replay layer as device tensors, from lengths that are device tensors.

use candle_core::{DType, Device, Tensor};
use replay_core::{GraphMode, Planner, Window};

use crate::operands::{Argument, Arguments, expect_dims, expect_dtype};
use crate::rows::unsupported;
use crate::{Error, Operand, Result, cpu, cuda};

const OP: &str = "replay-rows";
const PAD_OP: &str = "pad-rebuilt-slots";

/// The most requests of a step that the kernels take.
pub const MAX_REQUESTS: usize = 4096;

/// The requests of a step, packed one after the other in the batch.
///
/// The step that [`replay_core::Request`] describes, as tensors on one device. A request is
/// prefilling when its first row lies inside its prompt. A captured graph pads the requests: those past
/// the step's own have no row and zero for all lengths.
#[derive(Clone, Copy, Debug)]
pub struct StepBatch<'a> {
    /// u32 `[n_requests + 1]`: where each request's rows begin in the batch, and where the last end.
    /// Rows of the batch before the first offset and past the last are nobody's: none of them runs.
    pub query_start_loc: &'a Tensor,
    /// u32 `[n_requests]`: length of each sequence after the step.
    pub seq_lens: &'a Tensor,
    /// u32 `[n_requests]`: length of each prompt.
    pub prompt_lens: &'a Tensor,
    /// u32 `[n_requests]`: the first position for which each holds window KV.
    pub replay_starts: &'a Tensor,
    /// u8 `[n_requests]`: not 0 where every row's output is read, so that none is dropped.
    pub keeps_rows: &'a Tensor,
}

impl<'a> StepBatch<'a> {
    /// Requests of the step, padding among them.
    pub fn n_requests(&self) -> usize {
        self.seq_lens.elem_count()
    }

    fn arguments(&self, op: &'static str) -> Result<Vec<Argument<'a>>> {
        let n = self.n_requests();
        let fields = [
            ("query_start_loc", self.query_start_loc, DType::U32, n + 1),
            ("seq_lens", self.seq_lens, DType::U32, n),
            ("prompt_lens", self.prompt_lens, DType::U32, n),
            ("replay_starts", self.replay_starts, DType::U32, n),
            ("keeps_rows", self.keeps_rows, DType::U8, n),
        ];
        fields
            .into_iter()
            .map(|(name, tensor, dtype, len)| {
                let name = Operand::Field(name);
                expect_dtype(op, name, tensor, &[dtype])?;
                expect_dims(op, name, tensor, &[len])?;
                Ok(Argument {
                    tensor,
                    name,
                    written: false,
                })
            })
            .collect()
    }
}

/// Which rows are asked for.
#[derive(Clone, Copy, Debug)]
pub struct LayerQuery<'a> {
    /// The rule.
    pub planner: &'a Planner,
    /// The graph mode of the step.
    pub mode: GraphMode,
    /// The replay layer, counted from the cut.
    pub layer: u32,
    /// What rows are counted among.
    pub among: Among,
}

impl LayerQuery<'_> {
    /// Whether the step may drop rows at all.
    pub(crate) fn trims(&self) -> bool {
        self.mode == GraphMode::None || self.planner.graph_breaks(self.mode)
    }
}

/// What the rows of a layer are counted among.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Among {
    /// The rows of the batch: to gather from the batch's tensors, and to scatter back to them.
    #[default]
    Batch,
    /// The rows that enter the layer: to gather from the tensors of the layer before.
    Entering,
}

/// The rows that run in a replay layer, as tensors on one device.
///
/// Made once, for the largest batch, and filled step by step: the addresses stay.
#[derive(Clone, Debug)]
pub struct ReplayRows {
    /// u32 `[max_rows]`: the rows, ascending, then [`PAD_ROW`](crate::PAD_ROW).
    pub rows: Tensor,
    /// u32, i32 or i64 `[max_rows]`: the position of each row in its sequence, then 0. An i32 holds
    /// positions below 2^31.
    pub positions: Tensor,
    /// u32, i32 or i64 `[max_rows]`: the slot of each row, then the slot that writes nothing (all
    /// bits set).
    pub slots: Tensor,
    /// u32 `[max_requests + 1]`: where each request's rows begin among these, from 0, and where the
    /// last end; then that end again.
    pub query_start_loc: Tensor,
    /// u32 `[max_requests]`: the first position whose window KV each request's rows may read, then 0.
    pub kv_start: Tensor,
    /// u32 `[max_requests]`: where the last row of each request is among these, or
    /// [`PAD_ROW`](crate::PAD_ROW) for a request without one: gathered with this list, outputs are
    /// down to the rows that are sampled and nothing is scattered.
    pub last_rows: Tensor,
}

impl ReplayRows {
    /// Buffers for up to `max_rows` rows of up to `max_requests` requests.
    ///
    /// # Errors
    /// If either is zero or more than u32 counts, a dtype is none of u32, i32 and i64, the host has no
    /// memory for them ([`Error::NoMemory`]), or the device's runs out.
    pub fn new(
        max_rows: usize,
        max_requests: usize,
        (positions, slots): (DType, DType),
        device: &Device,
    ) -> Result<Self> {
        if max_rows == 0 || max_requests == 0 {
            return Err(Error::NoRoom {
                op: OP,
                max_rows,
                max_requests,
            });
        }
        for (name, len) in [("rows", max_rows), ("kv_start", max_requests)] {
            // Below the largest, which is `PAD_ROW` and must be free.
            if u32::try_from(len).is_err() || len == u32::MAX as usize {
                let operand = Operand::Field(name);
                return Err(Error::TooLarge { op: OP, operand });
            }
        }
        let buffer = |len: usize, dtype: DType| {
            let row_bytes = dtype.size_in_bytes();
            // A host allocation that fails ends the program; a device says so itself.
            let bytes = len.saturating_mul(row_bytes);
            if device.is_cpu() && Vec::<u8>::new().try_reserve_exact(bytes).is_err() {
                return Err(Error::NoMemory {
                    op: OP,
                    rows: len,
                    row_bytes,
                });
            }
            Ok(Tensor::zeros(len, dtype, device)?)
        };
        let new = Self {
            rows: buffer(max_rows, DType::U32)?,
            positions: buffer(max_rows, positions)?,
            slots: buffer(max_rows, slots)?,
            query_start_loc: buffer(max_requests + 1, DType::U32)?,
            kv_start: buffer(max_requests, DType::U32)?,
            last_rows: buffer(max_requests, DType::U32)?,
        };
        new.arguments()?;
        Ok(new)
    }

    /// Rows that the buffers hold.
    pub fn max_rows(&self) -> usize {
        self.rows.elem_count()
    }

    /// Requests that the buffers hold.
    pub fn max_requests(&self) -> usize {
        self.kv_start.elem_count()
    }

    fn arguments(&self) -> Result<[Argument<'_>; 6]> {
        const WORDS: [DType; 3] = [DType::U32, DType::I32, DType::I64];
        let (rows, requests) = (self.max_rows(), self.max_requests());
        let u32_only = &WORDS[..1];
        let fields = [
            ("rows", &self.rows, u32_only, rows),
            ("positions", &self.positions, &WORDS, rows),
            ("slots", &self.slots, &WORDS, rows),
            (
                "query_start_loc",
                &self.query_start_loc,
                u32_only,
                requests + 1,
            ),
            ("kv_start", &self.kv_start, u32_only, requests),
            ("last_rows", &self.last_rows, u32_only, requests),
        ];
        for (name, tensor, dtypes, len) in fields {
            let name = Operand::Field(name);
            expect_dtype(OP, name, tensor, dtypes)?;
            expect_dims(OP, name, tensor, &[len])?;
        }
        Ok(fields.map(|(name, tensor, ..)| Argument {
            tensor,
            name: Operand::Field(name),
            written: true,
        }))
    }
}

/// Arguments of [`replay_rows_into`] that have been checked: the five tensors of the step in the
/// order of its fields, the slots of the batch, and the six outputs in theirs.
pub(crate) struct ReplayArguments<'a> {
    pub(crate) arguments: Arguments<'a>,
    pub(crate) query: LayerQuery<'a>,
    pub(crate) n_requests: usize,
    pub(crate) n_batch_rows: usize,
    pub(crate) max_rows: usize,
    pub(crate) max_requests: usize,
}

/// Works out which rows run in a replay layer, and all that belongs to them.
///
/// * `batch` - the requests of the step.
/// * `slots` - u32, i32 or i64 `[rows of the batch]`, or longer: where each row writes its window KV.
///   Of the dtype of `out.slots`.
/// * `out` - every byte is written.
///
/// All tensors are contiguous, on the CPU or all on one CUDA device, and no output shares memory with
/// another. On a CUDA device it is one launch that nothing waits for: nothing is uploaded or
/// allocated, and the call may be captured; the lengths may change from launch to launch, the number
/// of requests (padding included) may not.
///
/// # Errors
/// If the arguments do not fit each other, there are more requests than the outputs hold or than
/// [`MAX_REQUESTS`], or the layer does not exist.
///
/// On the CPU also for what the lists hold, which on a CUDA device nobody looks at and which is memory
/// safe there:
///
/// | what the lists hold | on a CUDA device |
/// |---|---|
/// | a step that contradicts itself | wrong rows, positions and bounds |
/// | more rows that run than the outputs hold | the first `max_rows` of them, and offsets up to there |
/// | fewer slots than rows of the batch, if a request has a row | the slot that writes nothing, for rows without one |
/// | a position from 2^31 on, when positions are i32 | its low 32 bits, a negative number |
pub fn replay_rows_into(
    query: LayerQuery<'_>,
    batch: &StepBatch<'_>,
    slots: &Tensor,
    out: &ReplayRows,
) -> Result<()> {
    let n_layers = query.planner.config().layers.count();
    if query.layer >= n_layers {
        return Err(Error::NoSuchLayer {
            op: OP,
            layer: query.layer,
            n_layers,
        });
    }
    let (n_requests, max_requests) = (batch.n_requests(), out.max_requests());
    let max = max_requests.min(MAX_REQUESTS);
    if n_requests > max {
        return Err(Error::TooManyRequests {
            op: OP,
            n_requests,
            max,
        });
    }
    let name = Operand::Field("slots of the batch");
    let n_batch_rows = slots.elem_count();
    expect_dtype(OP, name, slots, &[out.slots.dtype()])?;
    expect_dims(OP, name, slots, &[n_batch_rows])?;

    let mut list = batch.arguments(OP)?;
    list.push(Argument {
        tensor: slots,
        name,
        written: false,
    });
    list.extend(out.arguments()?);
    let arguments = Arguments::check(OP, list)?;
    let max_rows = out.max_rows();
    let checked = ReplayArguments {
        arguments,
        query,
        n_requests,
        n_batch_rows,
        max_rows,
        max_requests,
    };
    match checked.arguments.device() {
        Device::Cpu => cpu::replay_rows(&checked),
        Device::Cuda(_) => cuda::replay_rows(&checked),
        other @ Device::Metal(_) => Err(unsupported(OP, other)),
    }
}

/// Arguments of [`pad_rebuilt_slots_into`] that have been checked: the five tensors of the step in
/// the order of its fields, then the slots.
pub(crate) struct PadArguments<'a> {
    pub(crate) arguments: Arguments<'a>,
    pub(crate) window: Window,
    pub(crate) n_requests: usize,
    pub(crate) n_rows: usize,
}

/// Pads, in the slots of the cacheable groups (compressed KV, index keys), those of the rows that only
/// rebuild window KV after a prefix hit, so that cached entries stay as they are. All other slots are
/// left alone; those of the window group are not to be passed.
///
/// * `batch` - the requests of the step.
/// * `slots` - each u32, i32 or i64 `[rows of the batch]`, or longer, all of one length, contiguous,
///   sharing no memory. Rows before the first request's and past the last one's are left alone.
///
/// All are on the CPU or all on one CUDA device. There it is one launch for up to 16 lists that
/// nothing waits for, and the call may be captured.
///
/// # Errors
/// If the arguments do not fit each other. On the CPU also if the offsets of the requests descend, or
/// there are fewer slots than rows of the batch; a CUDA device then pads those there are. Where no
/// request has a row no slot is needed, wherever the offsets are.
pub fn pad_rebuilt_slots_into(
    batch: &StepBatch<'_>,
    window: Window,
    slots: &[&Tensor],
) -> Result<()> {
    let n_rows = slots.first().map_or(0, |slots| slots.elem_count());
    let mut list = batch.arguments(PAD_OP)?;
    for (i, tensor) in slots.iter().enumerate() {
        let name = Operand::Output(i);
        expect_dtype(PAD_OP, name, tensor, &[DType::U32, DType::I32, DType::I64])?;
        expect_dims(PAD_OP, name, tensor, &[n_rows])?;
        list.push(Argument {
            tensor,
            name,
            written: true,
        });
    }
    let arguments = Arguments::check(PAD_OP, list)?;
    let checked = PadArguments {
        arguments,
        window,
        n_requests: batch.n_requests(),
        n_rows,
    };
    match checked.arguments.device() {
        Device::Cpu => cpu::pad_slots(&checked),
        Device::Cuda(_) => cuda::pad_slots(&checked),
        other @ Device::Metal(_) => Err(unsupported(PAD_OP, other)),
    }
}
