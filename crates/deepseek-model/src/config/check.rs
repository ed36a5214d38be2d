//! Rules that tie several keys together. A rule whose keys are bad themselves is passed over.

use super::{EngramConfig, Violation, fields::MAX_COUNT, raw::Raw};

/// Group sizes, in channels, of the simulated rounding of cached values: 32 for window KV and index
/// keys, 16 for compressed KV.
const MXFP_GROUP: usize = 32;

/// Notes every broken rule but those of the schedule.
pub(super) fn check(raw: &Raw, violations: &mut Vec<Violation>) {
    widths(raw, violations);
    tokens(raw, violations);
    if let (Some(topk), Some(c)) = (raw.index_topk, &raw.candidates) {
        // A row with fewer candidates than index_topk is one the public implementations disagree on.
        let fewest = c
            .top_blocks
            .saturating_sub(1)
            .saturating_mul(c.block_size)
            .saturating_add(1);
        if fewest < topk {
            violations.push(Violation::new(
                "candidate_topk_blocks",
                format!(
                    "blocks that hold index_topk ({topk}) entries even if the newest has one: \
                     (blocks - 1) * candidate_block_size ({}) + 1",
                    c.block_size
                ),
                format!("{} blocks, so {fewest}", c.top_blocks),
            ));
        }
    }
    if let Some(engram) = &raw.engram {
        engram_rules(engram, raw, violations);
    }
}

fn widths(raw: &Raw, violations: &mut Vec<Violation>) {
    let mut multiple = |field, value: Option<usize>, unit: Option<usize>, why| {
        if let (Some(value), Some(unit)) = (value, unit)
            && !value.is_multiple_of(unit)
        {
            let expected = format!("a multiple of {unit} ({why})");
            violations.push(Violation::new(field, expected, value));
        }
    };
    multiple(
        "num_attention_heads",
        raw.num_heads,
        raw.o_groups,
        "o_groups",
    );
    // 32 is a multiple of the compressed KV's group of 16, too.
    multiple(
        "head_dim",
        raw.head_dim,
        Some(MXFP_GROUP),
        "a rounding group",
    );
    multiple(
        "index_head_dim",
        raw.index_dim,
        Some(MXFP_GROUP),
        "a rounding group",
    );
    multiple(
        "qk_rope_head_dim",
        raw.rope_dim,
        Some(2),
        "channels rotate in pairs",
    );

    at_most(
        violations,
        "qk_rope_head_dim",
        raw.rope_dim,
        "head_dim",
        raw.head_dim,
    );
    at_most(
        violations,
        "qk_rope_head_dim",
        raw.rope_dim,
        "index_head_dim",
        raw.index_dim,
    );
    at_most(
        violations,
        "num_experts_per_tok",
        raw.experts_per_token,
        "n_routed_experts",
        raw.num_experts,
    );
    let positions = ("max_position_embeddings", raw.max_positions);
    at_most(
        violations,
        "sliding_window",
        raw.sliding_window,
        positions.0,
        positions.1,
    );
    // The largest stands for all: one violation, however long the list.
    let ratio = raw.compress_ratios.as_ref().and_then(|r| r.iter().max());
    at_most(
        violations,
        "compress_ratios",
        ratio.copied(),
        positions.0,
        positions.1,
    );
}

fn tokens(raw: &Raw, violations: &mut Vec<Violation>) {
    let bos = raw.bos_token_id.map(|id| ("bos_token_id", id));
    let eos = raw.eos_token_ids.iter().map(|&id| ("eos_token_id", id));
    let pad = raw
        .engram
        .as_ref()
        .map(|engram| ("engram_pad_token_id", engram.pad_token_id));
    for (field, id) in bos.into_iter().chain(eos).chain(pad) {
        if let Some(vocab) = raw.vocab_size.filter(|&vocab| id as usize >= vocab) {
            violations.push(Violation::new(
                field,
                format!("an id below vocab_size ({vocab})"),
                id,
            ));
        }
    }
}

fn engram_rules(engram: &EngramConfig, raw: &Raw, violations: &mut Vec<Violation>) {
    let (ids, rows) = (&engram.layers, &engram.table_rows);
    if let Some(layers) = raw.num_layers {
        if ids.len() > layers {
            violations.push(overlong("engram_layer_ids", layers, ids.len()));
            return;
        }
        for &id in ids.iter().filter(|&&id| id >= layers) {
            violations.push(below_layers("engram_layer_ids", layers, id));
        }
    }
    violations.extend(descending("engram_layer_ids", ids));
    if rows.len() != ids.len() {
        violations.push(Violation::new(
            "engram_num_embeddings",
            format!("one number per engram_layer_ids entry ({})", ids.len()),
            format!("{} numbers", rows.len()),
        ));
    }
    if let Some(at) = rows.iter().position(|&rows| rows == 0) {
        let field = format!("engram_num_embeddings[{at}]");
        violations.push(Violation::new(&field, "a number above 0", 0));
    }
    if engram.max_ngram < 2 {
        violations.push(Violation::new(
            "engram_max_ngram_size",
            "2 or above",
            engram.max_ngram,
        ));
    } else if engram.columns() > MAX_COUNT {
        violations.push(Violation::new(
            "engram_n_heads",
            format!(
                "at most {MAX_COUNT} hash columns, (engram_max_ngram_size ({}) - 1) * heads",
                engram.max_ngram
            ),
            format!("{} heads, so {}", engram.heads, engram.columns()),
        ));
    }
}

/// More ids than there are layers.
pub(super) fn overlong(field: &str, layers: usize, found: usize) -> Violation {
    let expected = format!("at most num_hidden_layers ({layers}) ids");
    Violation::new(field, expected, format!("{found} ids"))
}

/// Ids of which one is not above the one before it.
pub(super) fn descending(field: &str, ids: &[usize]) -> Option<Violation> {
    let at = (1..ids.len()).find(|&at| ids[at] <= ids[at - 1])?;
    let found = format!("{} after {}", ids[at], ids[at - 1]);
    Some(Violation::new(field, "ascending ids", found))
}

/// A layer id that names no layer.
pub(super) fn below_layers(field: &str, layers: usize, id: usize) -> Violation {
    Violation::new(field, format!("ids below num_hidden_layers ({layers})"), id)
}

fn at_most(
    violations: &mut Vec<Violation>,
    field: &str,
    value: Option<usize>,
    bound: &str,
    max: Option<usize>,
) {
    if let (Some(value), Some(max)) = (value, max)
        && value > max
    {
        violations.push(Violation::new(
            field,
            format!("at most {bound} ({max})"),
            value,
        ));
    }
}
