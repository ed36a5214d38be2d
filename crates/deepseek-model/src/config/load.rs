//! From `config.json` to a [`Config`].

use std::path::Path;

use serde_json::{Map, Value};

use super::{
    Config, ConfigError, LayerSchedule, Violation, check,
    fields::Fields,
    file::{self, MAX_JSON},
    json,
    parts::Parts,
    raw,
    raw::Raw,
    schedule,
};
use crate::memory::check_json;

impl Config {
    /// Reads `config.json` of a checkpoint directory, and the stop tokens of `generation_config.json`
    /// if that is there. The first token of texts must be the same in both.
    ///
    /// # Errors
    ///
    /// A file cannot be read, is no regular file or longer than 64 MiB ([`FileError`]), takes more memory than
    /// there is, is no JSON object, or breaks rules, which are then all listed.
    ///
    /// [`FileError`]: super::FileError
    pub fn load(dir: &Path) -> Result<Self, ConfigError> {
        let path = dir.join("config.json");
        let mut config = Self::from_json(&read(&path)?, &path)?;

        let path = dir.join("generation_config.json");
        if file::is_there(&path) {
            let (json, mut violations) = object(&read(&path)?, &path)?;
            let stops = raw::stop_tokens(&mut Fields::new(&json, &mut violations));
            config.add_stops(&stops, &mut violations);
            config.check_first(&mut Fields::new(&json, &mut violations));
            if !violations.is_empty() {
                return Err(ConfigError::Invalid { path, violations });
            }
        }
        Ok(config)
    }

    /// Reads a configuration from the text of a `config.json`: the decoder's keys under
    /// `text_config`, or at the top of a flat file.
    ///
    /// `origin` names the text in errors.
    ///
    /// # Errors
    ///
    /// The text is no JSON object, or breaks rules, which are then all listed.
    pub fn from_json(json: &str, origin: &Path) -> Result<Self, ConfigError> {
        let (top, mut violations) = object(json, origin)?;
        let parts = match Parts::of(&top) {
            Ok(parts) => parts,
            Err(violation) => {
                violations.push(violation);
                return Err(ConfigError::Invalid {
                    path: origin.into(),
                    violations,
                });
            }
        };
        let raw = Raw::read(parts, &mut violations);
        let mut noted = Vec::new();
        check::check(&raw, &mut noted);
        let schedule = schedule::resolve(&raw, &mut noted);
        violations.extend(parts.named(noted));
        let config = schedule.and_then(|layers| assemble(raw, layers));
        match config {
            Some(config) if violations.is_empty() => Ok(config),
            // Keys are left unread only where a violation was noted, so there is at least one.
            _ => Err(ConfigError::Invalid {
                path: origin.into(),
                violations,
            }),
        }
    }

    /// Texts begin with the token that `config.json` has: the other file's would be passed over.
    fn check_first(&self, f: &mut Fields<'_>) {
        let expected = match self.bos_token_id {
            Some(id) => format!("{id}, as config.json has it"),
            None => "null, as config.json has none".to_owned(),
        };
        f.optional("bos_token_id", &expected, (), |v| {
            (v.as_u64() == self.bos_token_id.map(u64::from)).then_some(())
        });
    }

    fn add_stops(&mut self, ids: &[u32], violations: &mut Vec<Violation>) {
        for &id in ids {
            if id as usize >= self.vocab_size {
                let expected = format!("an id below vocab_size ({})", self.vocab_size);
                violations.push(Violation::new("eos_token_id", expected, id));
            } else if !self.eos_token_ids.contains(&id) {
                self.eos_token_ids.push(id);
            }
        }
    }
}

fn read(path: &Path) -> Result<String, ConfigError> {
    check_json(path)?;
    file::read_text(path, MAX_JSON).map_err(|source| ConfigError::Read {
        path: path.into(),
        source,
    })
}

/// The object that a text holds, and its repeated keys: of two values there is none to trust.
fn object(json: &str, origin: &Path) -> Result<(Map<String, Value>, Vec<Violation>), ConfigError> {
    let stopped = |key, source| ConfigError::Json {
        path: origin.into(),
        key,
        source,
    };
    let json = json::parse(json.as_bytes()).map_err(|s| stopped(s.key, s.source))?;
    let object = serde_json::from_value(json.value).map_err(|e| stopped(String::new(), e))?;
    let repeated = json.repeated.into_iter().map(|key| key.violation);
    Ok((object, repeated.collect()))
}

/// `None` if a key is unread.
fn assemble(raw: Raw, layers: Vec<LayerSchedule>) -> Option<Config> {
    Some(Config {
        vocab_size: raw.vocab_size?,
        hidden_size: raw.hidden_size?,
        num_heads: raw.num_heads?,
        head_dim: raw.head_dim?,
        rope_dim: raw.rope_dim?,
        q_lora_rank: raw.q_lora_rank?,
        o_groups: raw.o_groups?,
        o_lora_rank: raw.o_lora_rank?,
        moe_intermediate_size: raw.moe_intermediate_size?,
        num_experts: raw.num_experts?,
        experts_per_token: raw.experts_per_token?,
        scoring: raw.scoring?,
        norm_topk_prob: raw.norm_topk_prob?,
        routed_scaling_factor: raw.routed_scaling_factor?,
        swiglu_limit: raw.swiglu_limit?,
        rms_norm_eps: raw.rms_norm_eps?,
        sliding_window: raw.sliding_window?,
        hc_mult: raw.hc_mult?,
        hc_sinkhorn_iters: raw.hc_sinkhorn_iters?,
        hc_eps: raw.hc_eps?,
        index_heads: raw.index_heads?,
        index_dim: raw.index_dim?,
        index_topk: raw.index_topk?,
        candidates: raw.candidates,
        rope_theta: raw.rope_theta?,
        compress_rope_theta: raw.compress_rope_theta?,
        yarn: raw.yarn,
        max_positions: raw.max_positions?,
        bos_token_id: raw.bos_token_id,
        eos_token_ids: raw.eos_token_ids,
        engram: raw.engram,
        expert_dtype: raw.expert_dtype,
        layers,
    })
}
