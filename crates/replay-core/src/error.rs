//! Why a batch cannot be planned.

/// A batch that contradicts itself or its graph. The batch is at fault, so planning the same one
/// again gives the same answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// More rows in the step than tokens in the sequence after it.
    #[error("request {request}: {query_len} rows in the step, but only {seq_len} tokens after it")]
    QueryExceedsSequence {
        /// Index in the batch.
        request: usize,
        /// Rows in the step.
        query_len: u32,
        /// Tokens of the sequence after the step.
        seq_len: u32,
    },
    /// The caller takes for prefill what the lengths say is decode, or the other way round.
    #[error(
        "request {request}: marked as {}, but starts at position {start} of a prompt of \
         {prompt_len} tokens",
        if *prefilling { "prefill" } else { "decode" }
    )]
    PhaseMismatch {
        /// Index in the batch.
        request: usize,
        /// Position of the step's first row.
        start: u32,
        /// Tokens of the prompt.
        prompt_len: u32,
        /// What the caller said.
        prefilling: bool,
    },
    /// Rows below the first position for which the request holds window KV.
    #[error(
        "request {request}: starts at position {start}, below its replay start {replay_start}, \
         where its window KV begins"
    )]
    StartsBelowReplay {
        /// Index in the batch.
        request: usize,
        /// Position of the step's first row.
        start: u32,
        /// First position with window KV.
        replay_start: u32,
    },
    /// Row indices of the batch do not fit `u32`.
    #[error("request {request}: with it the batch has more than {} rows", u32::MAX)]
    TooManyRows {
        /// Index in the batch of the request that went over.
        request: usize,
    },
    /// The graph that the step is to run in was captured for fewer rows.
    #[error("the batch has {n_rows} rows, the graph chosen for it only {padded_rows}")]
    GraphTooSmall {
        /// Rows of the batch.
        n_rows: u32,
        /// Padded rows of the graph.
        padded_rows: u32,
    },
    /// The lists of the plan would be longer than any step's on a device: absurd lengths, or a window
    /// or a number of sampled rows that keeps too many rows in too many layers.
    #[error(
        "expected a plan of at most {} rows, offsets and bounds over all layers, got {numbers} or more",
        crate::StepPlan::MAX_NUMBERS
    )]
    TooLarge {
        /// Numbers in the lists when planning stopped.
        numbers: usize,
    },
    /// There is no memory for the lists of the plan.
    #[error("no memory for the {numbers} rows, offsets and bounds of a plan")]
    NoMemory {
        /// Numbers in the lists when planning stopped.
        numbers: usize,
    },
}
