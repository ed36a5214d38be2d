//! The keys of `config.json`, each checked on its own.
//!
//! Sizes, the schedule and every number of a formula must be there: a forgotten key must not turn
//! into the value of some other model. Only what can be *off* may be absent, and is off then:
//! `rope_scaling` (`rope.rs`), candidate blocks (`candidate_*`), n-gram tables (`engram_*`), stop tokens.
//! Keys that name a variant of the model (`variant.rs`, `neutral.rs`) may be absent, too, and ask for
//! nothing else than what is computed. Other keys are not looked at.

use serde_json::Value;

use super::{
    CandidateConfig, EngramConfig, ExpertDtype, Scoring, Violation, Yarn,
    fields::{Fields, token_id},
    parts::Parts,
    quantisation,
    rope::Rope,
    variant,
};
use crate::ops::MAX_STREAMS;

/// Largest number of layers.
const MAX_LAYERS: usize = 1024;
/// Longest n-gram.
const MAX_NGRAM: usize = 64;

/// What the file says; `None` where a violation was noted.
pub(super) struct Raw {
    pub(super) vocab_size: Option<usize>,
    pub(super) hidden_size: Option<usize>,
    pub(super) num_layers: Option<usize>,
    pub(super) num_heads: Option<usize>,
    pub(super) head_dim: Option<usize>,
    pub(super) rope_dim: Option<usize>,
    pub(super) q_lora_rank: Option<usize>,
    pub(super) o_groups: Option<usize>,
    pub(super) o_lora_rank: Option<usize>,
    pub(super) moe_intermediate_size: Option<usize>,
    pub(super) num_experts: Option<usize>,
    pub(super) experts_per_token: Option<usize>,
    pub(super) scoring: Option<Scoring>,
    pub(super) norm_topk_prob: Option<bool>,
    pub(super) routed_scaling_factor: Option<f64>,
    pub(super) swiglu_limit: Option<f64>,
    pub(super) rms_norm_eps: Option<f64>,
    pub(super) sliding_window: Option<usize>,
    pub(super) hc_mult: Option<usize>,
    pub(super) hc_sinkhorn_iters: Option<usize>,
    pub(super) hc_eps: Option<f64>,
    pub(super) index_heads: Option<usize>,
    pub(super) index_dim: Option<usize>,
    pub(super) index_topk: Option<usize>,
    pub(super) rope_theta: Option<f64>,
    pub(super) compress_rope_theta: Option<f64>,
    pub(super) max_positions: Option<usize>,
    pub(super) compress_ratios: Option<Vec<usize>>,
    pub(super) kv_sources: Option<Vec<usize>>,
    pub(super) index_sources: Option<Vec<usize>>,
    /// `None` also if off.
    pub(super) candidates: Option<CandidateConfig>,
    /// `None` also if off.
    pub(super) yarn: Option<Yarn>,
    /// `None` also if off.
    pub(super) engram: Option<EngramConfig>,
    /// `None` also if absent.
    pub(super) bos_token_id: Option<u32>,
    /// Empty if absent.
    pub(super) eos_token_ids: Vec<u32>,
    /// `None` also if absent.
    pub(super) expert_dtype: Option<ExpertDtype>,
}

impl Raw {
    /// Reads the decoder's keys, and the few that may stand around its part from there.
    pub(super) fn read(parts: Parts<'_>, violations: &mut Vec<Violation>) -> Self {
        let mut noted = Vec::new();
        let text = parts.text;
        let eos = stop_tokens(&mut Fields::new(parts.holder("eos_token_id"), &mut noted));
        let bos = Fields::new(parts.holder("bos_token_id"), &mut noted).optional(
            "bos_token_id",
            "a token id",
            None,
            |v| token_id(v).map(Some),
        );

        let mut fields = Fields::new(text, &mut noted);
        let f = &mut fields;
        let rope = Rope::read(f, text);
        let raw = Self {
            vocab_size: f.width("vocab_size"),
            hidden_size: f.width("hidden_size"),
            num_layers: f.up_to("num_hidden_layers", MAX_LAYERS),
            num_heads: f.count("num_attention_heads"),
            head_dim: f.width("head_dim"),
            rope_dim: f.width("qk_rope_head_dim"),
            q_lora_rank: f.width("q_lora_rank"),
            o_groups: f.count("o_groups"),
            o_lora_rank: f.width("o_lora_rank"),
            moe_intermediate_size: f.width("moe_intermediate_size"),
            num_experts: f.count("n_routed_experts"),
            experts_per_token: f.count("num_experts_per_tok"),
            scoring: scoring(f),
            norm_topk_prob: f.required("norm_topk_prob", "true or false", Value::as_bool),
            routed_scaling_factor: f
                .number("routed_scaling_factor", "a number above 0", |x| x > 0.0),
            swiglu_limit: f.number("swiglu_limit", "a number, 0 or above", |x| x >= 0.0),
            rms_norm_eps: f.number("rms_norm_eps", "a number, 0 or above", |x| x >= 0.0),
            sliding_window: f.up_to("sliding_window", replay_core::Window::MAX as usize),
            hc_mult: f.up_to("hc_mult", MAX_STREAMS),
            hc_sinkhorn_iters: f.count("hc_sinkhorn_iters"),
            hc_eps: f.number("hc_eps", "a number, 0 or above", |x| x >= 0.0),
            index_heads: f.count("index_n_heads"),
            index_dim: f.width("index_head_dim"),
            index_topk: f.width("index_topk"),
            rope_theta: rope.theta,
            compress_rope_theta: rope.compress_theta,
            max_positions: f.width("max_position_embeddings"),
            compress_ratios: f.list("compress_ratios"),
            kv_sources: f.list("kv_source_layer_ids"),
            index_sources: f.list("index_source_layer_ids"),
            candidates: candidates(f),
            yarn: rope.yarn,
            engram: engram(f),
            bos_token_id: bos.flatten(),
            eos_token_ids: eos,
            expert_dtype: quantisation::expert_dtype(parts),
        };
        let read = fields.into_read();
        variant::check(parts, &read, violations);
        violations.extend(parts.named(noted));
        raw
    }
}

/// `eos_token_id`: one id or a list; absent: none.
pub(super) fn stop_tokens(f: &mut Fields<'_>) -> Vec<u32> {
    f.token_ids("eos_token_id").unwrap_or_default()
}

fn scoring(f: &mut Fields<'_>) -> Option<Scoring> {
    let expected = "\"sqrtsoftplus\", \"sigmoid\" or \"softmax\"";
    f.required("scoring_func", expected, |value| match value.as_str()? {
        "sqrtsoftplus" => Some(Scoring::SqrtSoftplus),
        "sigmoid" => Some(Scoring::Sigmoid),
        "softmax" => Some(Scoring::Softmax),
        _ => None,
    })
}

/// Absent or negative `candidate_source_layer_id`: no restriction of later choices.
fn candidates(f: &mut Fields<'_>) -> Option<CandidateConfig> {
    let source = f.optional(
        "candidate_source_layer_id",
        "a layer id, or one below 0 for none",
        -1,
        Value::as_i64,
    )?;
    let source = usize::try_from(source).ok()?;
    let (top_blocks, block_size) = (
        f.width("candidate_topk_blocks"),
        f.width("candidate_block_size"),
    );
    Some(CandidateConfig {
        source,
        top_blocks: top_blocks?,
        block_size: block_size?,
    })
}

/// Absent or empty `engram_layer_ids`: no tables, and the other keys are not looked at.
fn engram(f: &mut Fields<'_>) -> Option<EngramConfig> {
    if !f.has("engram_layer_ids") {
        return None;
    }
    let layers = f.list("engram_layer_ids")?;
    if layers.is_empty() {
        return None;
    }
    let table_rows = f.list("engram_num_embeddings");
    let max_ngram = f.up_to("engram_max_ngram_size", MAX_NGRAM);
    let heads = f.count("engram_n_heads");
    let head_dim = f.width("engram_head_dim");
    let vocab_size = f.width("engram_vocab_size");
    let pad_token_id = f.token_id("engram_pad_token_id");
    let compressed_vocab_size = f.width("engram_compressed_vocab_size");
    Some(EngramConfig {
        layers,
        table_rows: table_rows?,
        max_ngram: max_ngram?,
        heads: heads?,
        head_dim: head_dim?,
        vocab_size: vocab_size?,
        pad_token_id: pad_token_id?,
        compressed_vocab_size: compressed_vocab_size?,
    })
}
