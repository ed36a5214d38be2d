//! How many values the tensors of a step have for each row: the one place that says so, for a CPU and
//! a GPU alike.

use crate::Config;

/// Values of a row, by what they are.
#[derive(Debug, Clone, Copy)]
pub(super) struct Widths {
    pub(super) hidden: u64,
    /// Of all residual streams.
    pub(super) streams: u64,
    /// Of window KV or an entry.
    pub(super) head: u64,
    /// Of the queries of all heads, and of what they are projected from.
    pub(super) queries: u64,
    pub(super) latent: u64,
    /// Of an expert, between its matrices.
    pub(super) expert: u64,
    /// Experts that a row chooses.
    pub(super) choices: u64,
    /// Looked up in all n-gram tables, for the whole step.
    pub(super) engram: u64,
    /// Entries and blocks that a row chooses.
    pub(super) chosen: u64,
    pub(super) blocks: u64,
    pub(super) vocab: u64,
}

impl Widths {
    pub(super) fn of(config: &Config) -> Self {
        let engram = config.engram.as_ref().map_or(0, |engram| {
            engram.layers.len() * engram.columns() * engram.head_dim
        });
        let blocks = config.candidates.map_or(0, |c| c.top_blocks);
        Self {
            hidden: config.hidden_size as u64,
            streams: config.hc_mult as u64 * config.hidden_size as u64,
            head: config.head_dim as u64,
            queries: config.num_heads as u64 * config.head_dim as u64,
            latent: config.q_lora_rank as u64,
            expert: config.moe_intermediate_size as u64,
            choices: config.experts_per_token.min(config.num_experts) as u64,
            engram: engram as u64,
            chosen: listed(config.index_topk),
            blocks: listed(blocks),
            vocab: config.vocab_size as u64,
        }
    }

    /// Bytes of a row's residual streams, with what comes to the cut beside them: the mixing of the
    /// streams, and lists of chosen entries and blocks. Activations take `act` bytes a value.
    pub(super) fn state_bytes(&self, config: &Config, act: u64) -> u64 {
        let lists = (self.chosen + self.blocks) * size_of::<u32>() as u64;
        self.streams * act + config.hc_mult as u64 * size_of::<f32>() as u64 + lists
    }
}

/// What a list of u32 can hold: the two widths that no other bound of a configuration holds.
fn listed(width: usize) -> u64 {
    (width as u64).min(u64::from(u32::MAX))
}
