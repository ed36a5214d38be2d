//! The rules of a file for a configuration in hand: its fields are public, so it need not be the one
//! that was read.

use serde_json::{Map, Number, Value};

use super::{
    Config, ConfigError, EngramConfig, Scoring, Violation, check, parts::Parts, quantisation,
    raw::Raw, schedule,
};

impl Config {
    /// Whether a file could say what this configuration says. It is written as one and judged by the
    /// rules of [`Config::load`], so that no rule holds for files alone; then the schedule must be what
    /// its sources imply.
    ///
    /// # Errors
    /// The first broken rule, by the key of the file, or the first layer that does something else.
    pub(crate) fn check_bounds(&self) -> Result<(), ConfigError> {
        let (file, mut violations) = (self.as_file(), Vec::new());
        let raw = Raw::read(Parts::flat(&file), &mut violations);
        check::check(&raw, &mut violations);
        let implied = schedule::resolve(&raw, &mut violations);
        let empty = self.engram.as_ref().filter(|e| e.layers.is_empty());
        // A file says the same by leaving the key out; a configuration has one spelling.
        violations.extend(
            empty.map(|_| {
                Violation::new("engram_layer_ids", "at least one layer, or no engram", "[]")
            }),
        );
        let of_layers = || Some(self.unlike(&implied?));
        let first = violations.into_iter().next();
        match first.or_else(|| of_layers().flatten()) {
            Some(violation) => Err(ConfigError::Changed(violation)),
            None => Ok(()),
        }
    }

    /// The first layer whose schedule is not the implied one.
    fn unlike(&self, implied: &[super::LayerSchedule]) -> Option<Violation> {
        let show = |id: Option<usize>| id.map_or("none".to_owned(), |id| id.to_string());
        let layers = self.layers.iter().zip(implied).enumerate();
        layers.into_iter().find_map(|(index, (layer, implied))| {
            let of_sources = "by the layers that are sources";
            let of_tables = "by engram.layers";
            let (kv, choice) = (layer.kv_source, layer.index_source);
            let fields = [
                ("kv_source", kv, implied.kv_source, of_sources),
                ("index_source", choice, implied.index_source, of_sources),
                ("engram", layer.engram, implied.engram, of_tables),
            ];
            let (name, found, expected, why) = fields.into_iter().find(|(_, a, b, _)| a != b)?;
            let field = format!("layers[{index}].{name}");
            let expected = format!("{}, {why}", show(expected));
            Some(Violation::new(&field, expected, show(found)))
        })
    }

    /// The keys of a file that says the same.
    fn as_file(&self) -> Map<String, Value> {
        // Every field by name, so that none is forgotten here.
        let Self {
            vocab_size,
            hidden_size,
            num_heads,
            head_dim,
            rope_dim,
            q_lora_rank,
            o_groups,
            o_lora_rank,
            moe_intermediate_size,
            num_experts,
            experts_per_token,
            scoring,
            norm_topk_prob,
            routed_scaling_factor,
            swiglu_limit,
            rms_norm_eps,
            sliding_window,
            hc_mult,
            hc_sinkhorn_iters,
            hc_eps,
            index_heads,
            index_dim,
            index_topk,
            candidates,
            rope_theta,
            compress_rope_theta,
            yarn,
            max_positions,
            bos_token_id,
            eos_token_ids,
            engram,
            expert_dtype,
            layers,
        } = self;
        let sources = |of: fn(&super::LayerSchedule) -> Option<usize>| -> Value {
            let ids = 0..layers.len();
            ids.filter(|&id| of(&layers[id]) == Some(id)).collect()
        };
        let scoring = match scoring {
            Scoring::SqrtSoftplus => "sqrtsoftplus",
            Scoring::Sigmoid => "sigmoid",
            Scoring::Softmax => "softmax",
        };
        // The largest stands for all: together with those of generation_config.json there may be more
        // than one file may list.
        let eos = eos_token_ids.iter().max().copied();
        let mut keys = vec![
            ("vocab_size", Value::from(*vocab_size)),
            ("hidden_size", (*hidden_size).into()),
            ("num_hidden_layers", layers.len().into()),
            ("num_attention_heads", (*num_heads).into()),
            ("head_dim", (*head_dim).into()),
            ("qk_rope_head_dim", (*rope_dim).into()),
            ("q_lora_rank", (*q_lora_rank).into()),
            ("o_groups", (*o_groups).into()),
            ("o_lora_rank", (*o_lora_rank).into()),
            ("moe_intermediate_size", (*moe_intermediate_size).into()),
            ("n_routed_experts", (*num_experts).into()),
            ("num_experts_per_tok", (*experts_per_token).into()),
            ("scoring_func", scoring.into()),
            ("norm_topk_prob", (*norm_topk_prob).into()),
            ("routed_scaling_factor", number(*routed_scaling_factor)),
            ("swiglu_limit", number(*swiglu_limit)),
            ("rms_norm_eps", number(*rms_norm_eps)),
            ("sliding_window", (*sliding_window).into()),
            ("hc_mult", (*hc_mult).into()),
            ("hc_sinkhorn_iters", (*hc_sinkhorn_iters).into()),
            ("hc_eps", number(*hc_eps)),
            ("index_n_heads", (*index_heads).into()),
            ("index_head_dim", (*index_dim).into()),
            ("index_topk", (*index_topk).into()),
            ("rope_theta", number(*rope_theta)),
            ("compress_rope_theta", number(*compress_rope_theta)),
            ("max_position_embeddings", (*max_positions).into()),
            ("bos_token_id", (*bos_token_id).into()),
            ("eos_token_id", eos.into()),
            ("compress_ratios", layers.iter().map(|l| l.ratio).collect()),
            ("kv_source_layer_ids", sources(|layer| layer.kv_source)),
            (
                "index_source_layer_ids",
                sources(|layer| layer.index_source),
            ),
        ];
        if let Some(candidates) = candidates {
            keys.extend([
                ("candidate_source_layer_id", candidates.source.into()),
                ("candidate_topk_blocks", candidates.top_blocks.into()),
                ("candidate_block_size", candidates.block_size.into()),
            ]);
        }
        if let Some(yarn) = yarn {
            let keys_of_yarn = [
                ("type", "yarn".into()),
                ("factor", number(yarn.factor)),
                ("beta_fast", number(yarn.beta_fast)),
                ("beta_slow", number(yarn.beta_slow)),
                (
                    "original_max_position_embeddings",
                    yarn.original_max_position.into(),
                ),
            ];
            keys.push(("rope_scaling", Value::Object(object(keys_of_yarn))));
        }
        if let Some(engram) = engram {
            keys.extend(engram_keys(engram));
        }
        keys.extend(expert_dtype.map(|dtype| (quantisation::EXPERT_DTYPE, dtype.name().into())));
        object(keys)
    }
}

fn engram_keys(engram: &EngramConfig) -> [(&'static str, Value); 8] {
    [
        ("engram_layer_ids", engram.layers.clone().into()),
        ("engram_num_embeddings", engram.table_rows.clone().into()),
        ("engram_max_ngram_size", engram.max_ngram.into()),
        ("engram_n_heads", engram.heads.into()),
        ("engram_head_dim", engram.head_dim.into()),
        ("engram_vocab_size", engram.vocab_size.into()),
        ("engram_pad_token_id", engram.pad_token_id.into()),
        (
            "engram_compressed_vocab_size",
            engram.compressed_vocab_size.into(),
        ),
    ]
}

fn object(keys: impl IntoIterator<Item = (&'static str, Value)>) -> Map<String, Value> {
    let keys = keys.into_iter();
    keys.map(|(key, value)| (key.to_owned(), value)).collect()
}

/// JSON has no infinity and no NaN: as text they are refused, and quoted.
fn number(value: f64) -> Value {
    Number::from_f64(value).map_or_else(|| value.to_string().into(), Value::Number)
}
