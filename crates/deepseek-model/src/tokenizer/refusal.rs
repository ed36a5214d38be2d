//! Which part of a file the library refuses: its own message does not say.

use std::path::Path;

use serde_json::Value;
use tokenizers::{
    DecoderWrapper, ModelWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper,
};

use super::{TokenizerError, keys, panics::caught};
use crate::plain::Plain;

/// Says which part of a syntactically sound file the library refuses: its own message does not.
pub(super) fn refusal(file: &Value, path: &Path, reason: String) -> TokenizerError {
    fn probe<T: serde::de::DeserializeOwned>(part: &Value) -> Result<(), String> {
        caught(|| serde_json::from_value::<Option<T>>(part.clone()).map(drop))
    }
    type Probe = fn(&Value) -> Result<(), String>;
    let parts: [(&str, Probe); 5] = [
        ("normalizer", probe::<NormalizerWrapper>),
        ("pre_tokenizer", probe::<PreTokenizerWrapper>),
        ("post_processor", probe::<PostProcessorWrapper>),
        ("decoder", probe::<DecoderWrapper>),
        ("model", probe::<ModelWrapper>),
    ];
    let refused = parts.into_iter().find_map(|(name, probe)| {
        let part = &file[name];
        let reason = probe(part).err()?;
        Some((describe(name, part), reason))
    });
    let (part, reason) = refused
        .or_else(|| keys::of_file(file))
        .unwrap_or_else(|| ("tokenizer".to_owned(), reason));
    TokenizerError::Unsupported {
        path: path.to_owned(),
        part,
        reason,
    }
}

/// The part's name with its type: `normalizer "NFC"`. Of a sequence, the types of its members
/// follow, since the refused one is among them.
pub(super) fn describe(name: &str, part: &Value) -> String {
    let Some(kind) = part["type"].as_str() else {
        return name.to_owned();
    };
    let members = [
        &part["normalizers"],
        &part["pretokenizers"],
        &part["processors"],
        &part["decoders"],
    ];
    let kinds: Vec<String> = members
        .into_iter()
        .filter_map(Value::as_array)
        .flatten()
        .map(|member| Plain(member["type"].as_str().unwrap_or("?")).to_string())
        .collect();
    let kind = Plain(kind);
    let more = match kinds.len().saturating_sub(MAX_MEMBERS) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    match &kinds[..kinds.len().min(MAX_MEMBERS)] {
        [] => format!("{name} \"{kind}\""),
        kinds => format!("{name} \"{kind}\" of {}{more}", kinds.join(", ")),
    }
}

/// Members of a sequence that are named at most.
const MAX_MEMBERS: usize = 32;
