//! Judges keys of other families of models by their value: what asks for another computation over the
//! same tensors, so that no missing tensor would tell, is refused.
//!
//! Sizes are not among them: a tensor of another shape is refused by itself.

use serde_json::{Map, Value};

use super::{families::KEYS, fields::Fields, flat_rope, other_names, per_layer, rope};

/// What a key may hold. It may also be absent or `null`.
pub(super) enum Neutral {
    /// Nothing but `null`.
    Null,
    /// 0, or `false` for a feature that is off.
    Zero,
    /// 1.
    One,
    /// 1, or two of them, one for each of a layer's parts.
    Ones,
    False,
    True,
    /// An empty list.
    Empty,
    /// One of these names.
    Name(&'static [&'static str]),
}

/// Notes every key of an object that asks for something else. `text` is the decoder's part, whose
/// sizes and schedule say what some keys may hold.
pub(super) fn check(f: &mut Fields<'_>, text: &Map<String, Value>) {
    for (neutral, why, keys) in KEYS.into_iter().flatten() {
        for key in *keys {
            neutral.check(f, key, why);
        }
    }
    other_names::check(f, text);
    // The families that cap spell it in many ways.
    for key in f.names().filter(|key| caps(key)) {
        Neutral::Zero.check(f, key, "nothing is capped");
    }
    scales(f, text);
    rotated_channels(f, text);
    resting_channels(f, text);
    base(f, text, &["rotary_emb_base", "rotary_base", "rope_base"]);
    flat_rope::check(f, text);
    per_layer::check(f, text);
    for part in ["attn_config", "ffn_config"] {
        if let Some(mut f) = f.object(part) {
            check(&mut f, text);
            base(&mut f, text, &["rope_theta"]);
        }
    }
}

impl Neutral {
    fn check(&self, f: &mut Fields<'_>, key: &str, why: &str) {
        let value = match self {
            Self::Null => "null".to_owned(),
            Self::Zero => "0 or null".to_owned(),
            Self::One => "1".to_owned(),
            Self::Ones => "1, or a list of two ones".to_owned(),
            Self::False => "false".to_owned(),
            Self::True => "true".to_owned(),
            Self::Empty => "an empty list".to_owned(),
            Self::Name(names) => format!("{:?}", names[0]),
        };
        let expected = format!("{value} ({why})");
        f.optional(key, &expected, (), |value| self.is(value).then_some(()));
    }

    fn is(&self, value: &Value) -> bool {
        match self {
            Self::Null => false,
            Self::Zero => value.as_f64() == Some(0.0) || value == &Value::Bool(false),
            Self::One => value.as_f64() == Some(1.0),
            Self::Ones => match value {
                Value::Array(all) => all.len() == 2 && all.iter().all(|value| Self::One.is(value)),
                value => Self::One.is(value),
            },
            Self::False => value == &Value::Bool(false),
            Self::True => value == &Value::Bool(true),
            Self::Empty => value.as_array().is_some_and(Vec::is_empty),
            Self::Name(names) => {
                // Some families have an object for it.
                let name = value.get("name").unwrap_or(value).as_str();
                name.is_some_and(|name| names.contains(&name))
            }
        }
    }
}

/// `attn_logit_softcapping`, `logits_soft_cap`, `final_logit_cap` and others.
fn caps(key: &str) -> bool {
    let key = key.replace('_', "").to_lowercase();
    key.contains("softcap") || key.ends_with("logitcap") || key.ends_with("logitscap")
}

/// Other names of the base that `rope_theta` has here.
fn base(f: &mut Fields<'_>, text: &Map<String, Value>, keys: &[&str]) {
    let Some((name, theta)) = rope::theta(text) else {
        return;
    };
    let expected = format!("{theta}, as {name} has it");
    for key in keys {
        f.optional(key, &expected, (), |v| (v.as_f64()? == theta).then_some(()));
    }
}

/// Keys that replace the factor of attention scores, which is that of `head_dim` here.
fn scales(f: &mut Fields<'_>, text: &Map<String, Value>) {
    let Some(dim) = text.get("head_dim").and_then(Value::as_f64) else {
        return;
    };
    let factor = format!("1 / sqrt(head_dim) ({})", 1.0 / dim.sqrt());
    let is_factor = |x: f64| (x * dim.sqrt() - 1.0).abs() < 1e-4;
    for key in [
        "attention_multiplier",
        "attention_scale",
        "attn_scale",
        "softmax_scale",
    ] {
        f.optional(key, &factor, (), |v| is_factor(v.as_f64()?).then_some(()));
    }
    let expected = format!("head_dim ({dim})");
    f.optional("query_pre_attn_scalar", &expected, (), |v| {
        (v.as_f64()? == dim).then_some(())
    });
}

/// The keys that say which channels rotate.
pub(super) const CHANNELS: [&str; 5] = [
    "partial_rotary_factor",
    "rotary_pct",
    "rotary_percent",
    "rope_pct",
    "rotary_dim",
];

/// Keys that say which channels rotate, as a number or as a share: `qk_rope_head_dim` says it here. A
/// share of 1 is that of the channels that rotate.
pub(super) fn rotated_channels(f: &mut Fields<'_>, text: &Map<String, Value>) {
    let width = |key| text.get(key).and_then(Value::as_f64);
    let (Some(rotated), Some(all)) = (width("qk_rope_head_dim"), width("head_dim")) else {
        return;
    };
    let share = rotated / all;
    let expected = format!("qk_rope_head_dim / head_dim ({share}), or 1");
    let is_share = |v: &Value| {
        let found = v.as_f64();
        found.is_some_and(|found| found == 1.0 || (found - share).abs() < 1e-6)
    };
    let [shares @ .., width] = CHANNELS;
    for key in shares {
        f.optional(key, &expected, (), |v| is_share(v).then_some(()));
    }
    per_layer::all(f, "partial_rotary_factors", &expected, text, is_share);
    let expected = format!("qk_rope_head_dim ({rotated})");
    f.optional(width, &expected, (), |v| {
        (v.as_f64()? == rotated).then_some(())
    });
}

/// The number of channels that do not rotate, which follows from those that do.
fn resting_channels(f: &mut Fields<'_>, text: &Map<String, Value>) {
    let width = |key| text.get(key).and_then(Value::as_f64);
    let (Some(all), Some(rotated)) = (width("head_dim"), width("qk_rope_head_dim")) else {
        return;
    };
    let rest = all - rotated;
    let expected = format!("head_dim - qk_rope_head_dim ({rest})");
    for key in ["qk_nope_head_dim", "nope_head_dim"] {
        f.optional(key, &expected, (), |v| (v.as_f64()? == rest).then_some(()));
    }
}
