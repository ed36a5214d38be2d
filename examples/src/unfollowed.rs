//! What a checkpoint asks for of texts and is not followed, to tell of it.

use std::path::Path;

use serde_json::{Map, Value};

use crate::io::{self, shown};
use crate::values::quoted;

/// A key, the numbers that change nothing, and whether it matters only where tokens are drawn. What is empty,
/// `false` or `null` changes nothing either.
type Key = (&'static str, &'static [f64], bool);

/// Keys that change which text comes, in whatever file.
const KEYS: &[Key] = &[
    ("repetition_penalty", &[1.0], false),
    ("encoder_repetition_penalty", &[1.0], false),
    ("no_repeat_ngram_size", &[0.0], false),
    ("encoder_no_repeat_ngram_size", &[0.0], false),
    ("presence_penalty", &[0.0], false),
    ("frequency_penalty", &[0.0], false),
    ("exponential_decay_length_penalty", &[0.0], false),
    ("sequence_bias", &[0.0], false),
    ("bad_words_ids", &[0.0], false),
    ("suppress_tokens", &[0.0], false),
    ("begin_suppress_tokens", &[0.0], false),
    ("forced_bos_token_id", &[-1.0], false),
    ("forced_eos_token_id", &[-1.0], false),
    ("force_words_ids", &[0.0], false),
    ("constraints", &[0.0], false),
    ("forced_decoder_ids", &[0.0], false),
    ("dola_layers", &[0.0], false),
    ("token_healing", &[0.0], false),
    ("watermarking_config", &[0.0], false),
    ("stop_strings", &[0.0], false),
    ("stop", &[0.0], false),
    ("stop_token_ids", &[0.0], false),
    // What the library that writes the file takes where nobody says otherwise.
    ("max_length", &[20.0], false),
    ("max_new_tokens", &[-1.0], false),
    ("max_time", &[-1.0], false),
    ("min_length", &[0.0], false),
    ("min_new_tokens", &[0.0], false),
    ("guidance_scale", &[1.0], false),
    ("penalty_alpha", &[0.0], false),
    ("num_return_sequences", &[1.0], false),
    ("num_beams", &[1.0], false),
    ("num_beam_groups", &[1.0], false),
    ("repeat_penalty", &[1.0], false),
    ("logit_bias", &[0.0], false),
    ("min_tokens", &[0.0], false),
    ("max_tokens", &[-1.0], false),
    ("ignore_eos", &[0.0], false),
    ("bad_words", &[0.0], false),
    ("allowed_token_ids", &[0.0], false),
    // Of repetitions. Without it, its other keys change nothing; so it is with `mirostat`.
    ("dry_multiplier", &[0.0], false),
    ("min_p", &[0.0], true),
    ("typical_p", &[1.0], true),
    ("epsilon_cutoff", &[0.0], true),
    ("eta_cutoff", &[0.0], true),
    ("top_h", &[1.0], true),
    ("xtc_probability", &[0.0], true),
    ("top_n_sigma", &[0.0, -1.0], true),
    ("top_a", &[0.0], true),
    ("mirostat", &[0.0], true),
    ("mirostat_mode", &[0.0], true),
    ("tfs", &[1.0], true),
    ("tfs_z", &[1.0], true),
    ("dynamic_temperature", &[0.0], true),
    ("dynatemp_range", &[0.0], true),
    ("smoothing_factor", &[0.0], true),
];

/// Keys that are followed in `generation_config.json`, and not in `config.json`, where old checkpoints have
/// them. Their numbers are those that the library writes where nobody says otherwise.
const MISPLACED: &[Key] = &[
    ("do_sample", &[], false),
    ("temperature", &[1.0], true),
    ("top_k", &[50.0, 0.0], true),
    ("top_p", &[1.0], true),
];

/// What is not followed of one file.
#[derive(Debug, Default)]
pub(crate) struct Unfollowed {
    asked: Vec<Asked>,
}

/// A key that asks for something.
#[derive(Debug)]
struct Asked {
    key: &'static str,
    /// The key with its value.
    text: String,
    /// Whether it changes only what is drawn.
    of_drawing: bool,
}

impl Unfollowed {
    /// Of `generation_config.json`.
    pub(crate) fn of_recommendations(recommended: &Map<String, Value>) -> Self {
        let asked = KEYS
            .iter()
            .filter_map(|key| asks(key, recommended.get(key.0)?));
        Self {
            asked: asked.collect(),
        }
    }

    /// Of `config.json` of the checkpoint in `dir`, but for what `generation_config.json` says, whatever that
    /// is. Nothing where the file cannot be read, which is for who loads the model to tell.
    pub(crate) fn of_config(dir: &Path, recommended: &Map<String, Value>) -> Self {
        let read = || -> Option<Map<String, Value>> {
            let bytes = std::fs::read(dir.join("config.json")).ok()?;
            let json = bytes.strip_prefix(io::BYTE_ORDER_MARK).unwrap_or(&bytes);
            serde_json::from_slice(json).ok()
        };
        let top = read().unwrap_or_default();
        let part = top.get("text_config").and_then(Value::as_object);
        let keys = MISPLACED.iter().chain(KEYS);
        let asked = keys.filter_map(|key| {
            let held = |map: &'_ Map<String, Value>| map.get(key.0).is_some_and(|v| !v.is_null());
            let map = part.filter(|part| held(part)).unwrap_or(&top);
            if held(recommended) {
                return None;
            }
            asks(key, map.get(key.0)?)
        });
        Self {
            asked: asked.collect(),
        }
    }

    /// What to tell of it, where tokens are drawn or not, but for keys that are `decided` otherwise. `file` is
    /// where it stands.
    pub(crate) fn note(&self, file: &Path, drawn: bool, decided: &[&str]) -> Option<String> {
        let matters = self
            .asked
            .iter()
            .filter(|asked| (drawn || !asked.of_drawing) && !decided.contains(&asked.key));
        let texts: Vec<&str> = matters.map(|asked| asked.text.as_str()).collect();
        (!texts.is_empty()).then(|| {
            let (file, texts) = (shown(file), texts.join(", "));
            format!("note: {file} asks for {texts}, which is not followed")
        })
    }
}

/// A key, if its value changes something.
fn asks(&(key, plain, of_drawing): &Key, value: &Value) -> Option<Asked> {
    let off = match value {
        Value::Null => true,
        Value::Bool(on) => !on,
        Value::Array(list) => list.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        Value::String(text) => text.is_empty(),
        Value::Number(number) => number.as_f64().is_some_and(|n| plain.contains(&n)),
    };
    (!off).then(|| Asked {
        key,
        text: format!("{key} {}", quoted(value)),
        of_drawing,
    })
}
