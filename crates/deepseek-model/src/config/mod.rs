//! The decoder's configuration: `config.json`, checked, with the per-layer schedule resolved.

mod beside;
mod check;
mod error;
mod families;
mod fields;
pub(crate) mod file;
mod flat_rope;
pub(crate) mod json;
mod load;
mod neutral;
mod other_names;
mod parts;
mod per_layer;
mod quantisation;
mod raw;
mod rope;
mod schedule;
mod sound;
mod variant;

pub use error::{ConfigError, Violation};
pub(crate) use error::{Violations, quoted, unreadable};
pub use file::FileError;

/// How router logits become scores (`scoring_func`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scoring {
    /// `sqrt(softplus(x))`, the released function.
    SqrtSoftplus,
    /// `1 / (1 + exp(-x))`.
    Sigmoid,
    /// Softmax over all experts.
    Softmax,
}

/// How the matrices of routed experts are stored (`quantization_config.expert_dtype`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpertDtype {
    /// Packed E2M1 with scales, as released.
    Fp4,
    /// E4M3 with scales.
    Fp8,
    /// Plain values.
    Bf16,
}

impl ExpertDtype {
    const ALL: [Self; 3] = [Self::Fp4, Self::Fp8, Self::Bf16];

    /// Its name in a file.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Fp4 => "fp4",
            Self::Fp8 => "fp8",
            Self::Bf16 => "bf16",
        }
    }
}

/// `YaRN` parameters (`rope_scaling`), used by layers with compressed KV only.
#[derive(Debug, Clone, PartialEq)]
pub struct Yarn {
    /// Factor by which low frequencies are slowed.
    pub factor: f64,
    /// Turns at or above which a channel keeps its frequency.
    pub beta_fast: f64,
    /// Turns at or below which a channel is slowed wholly.
    pub beta_slow: f64,
    /// Context length, in tokens, the frequencies were trained for.
    pub original_max_position: usize,
}

/// Hashed n-gram lookup parameters (`engram_*`).
#[derive(Debug, Clone, PartialEq)]
pub struct EngramConfig {
    /// Layers that own a table, ascending.
    pub layers: Vec<usize>,
    /// Rows of each of those tables.
    pub table_rows: Vec<usize>,
    /// Longest n-gram, in tokens.
    pub max_ngram: usize,
    /// Hash heads per n-gram size.
    pub heads: usize,
    /// Columns of a table.
    pub head_dim: usize,
    /// Where the search for primes starts.
    pub vocab_size: usize,
    /// Token id that stands for the places before the text.
    pub pad_token_id: u32,
    /// Number of distinct compressed token ids.
    pub compressed_vocab_size: usize,
}

impl EngramConfig {
    /// Table rows looked up per token: one per n-gram size (2 to `max_ngram`) and head.
    pub fn columns(&self) -> usize {
        self.max_ngram.saturating_sub(1).saturating_mul(self.heads)
    }
}

/// Two-level selection (`candidate_*`): an index source that keeps blocks of entries for later ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CandidateConfig {
    /// The index source that chooses the blocks.
    pub source: usize,
    /// Blocks kept per query row.
    pub top_blocks: usize,
    /// Entries per block, aligned to entry 0.
    pub block_size: usize,
}

/// What one layer does, resolved from the id lists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerSchedule {
    /// Tokens per compressed entry; 0: window attention only.
    pub ratio: usize,
    /// The layer whose compressed KV and index keys this one reads (itself if a source).
    pub kv_source: Option<usize>,
    /// The layer whose choice of entries this one reads (itself if a source).
    pub index_source: Option<usize>,
    /// Position in [`EngramConfig::layers`] if the layer owns a table.
    pub engram: Option<usize>,
}

/// The decoder's configuration. Every rule is checked by [`Config::load`], and again by whatever takes
/// a configuration, since a field may be changed.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// Rows of the embedding and of the head.
    pub vocab_size: usize,
    /// `h`, width of a stream.
    pub hidden_size: usize,
    /// `H`, query heads.
    pub num_heads: usize,
    /// `D`, channels of a head and of a KV row.
    pub head_dim: usize,
    /// Rotated channels, the last of a head.
    pub rope_dim: usize,
    /// Width of the query latent.
    pub q_lora_rank: usize,
    /// Groups of the output projection.
    pub o_groups: usize,
    /// Width of one group's latent.
    pub o_lora_rank: usize,
    /// `m`, width of an expert.
    pub moe_intermediate_size: usize,
    /// `E`, routed experts.
    pub num_experts: usize,
    /// Experts chosen per row.
    pub experts_per_token: usize,
    /// Router score function.
    pub scoring: Scoring,
    /// Whether the chosen scores are divided by their sum.
    pub norm_topk_prob: bool,
    /// Factor on the chosen scores.
    pub routed_scaling_factor: f64,
    /// Clamp of the expert's gate and up values; 0: none.
    pub swiglu_limit: f64,
    /// Epsilon of every RMS norm.
    pub rms_norm_eps: f64,
    /// `W`, rows of the sliding window.
    pub sliding_window: usize,
    /// `n`, residual streams: 1 to 8.
    pub hc_mult: usize,
    /// Sinkhorn iterations of the stream mixing.
    pub hc_sinkhorn_iters: usize,
    /// Epsilon of the stream mixing.
    pub hc_eps: f64,
    /// Index query heads.
    pub index_heads: usize,
    /// Channels of an index head and of an index key.
    pub index_dim: usize,
    /// Compressed entries chosen per row.
    pub index_topk: usize,
    /// Two-level selection, if any.
    pub candidates: Option<CandidateConfig>,
    /// `RoPE` base of window-only layers.
    pub rope_theta: f64,
    /// `RoPE` base of layers with compressed KV.
    pub compress_rope_theta: f64,
    /// `YaRN` of layers with compressed KV.
    pub yarn: Option<Yarn>,
    /// Positions the model may use.
    pub max_positions: usize,
    /// Beginning-of-text id.
    pub bos_token_id: Option<u32>,
    /// Ids that end a generation.
    pub eos_token_ids: Vec<u32>,
    /// Hashed n-gram lookup, if any layer has it.
    pub engram: Option<EngramConfig>,
    /// How the file says that routed experts are stored; `None` if it does not. Tensors are read as they are
    /// stored, so that this only tells weights from those of another file.
    pub expert_dtype: Option<ExpertDtype>,
    /// One entry per layer.
    pub layers: Vec<LayerSchedule>,
}
