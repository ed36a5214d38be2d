//! Rotation: its bases and `YaRN`, wherever a file says them.
//!
//! Released files have `rope_theta`, `compress_rope_theta` and `rope_scaling`. Newer tools write
//! `rope_parameters`, with the bases in it: either flat, or as `main` for window KV and `compress` for
//! compressed KV, which alone is stretched. What is said twice must be the same, and what has no meaning
//! where it stands is refused: it would be passed over.

use serde_json::{Map, Value};

use super::{Violation, Yarn, fields::Fields, json, neutral};

/// Keys that one violation lists at most.
const MAX_NAMES: usize = 8;

/// What a file says of rotation; `None` where a violation was noted.
pub(super) struct Rope {
    pub(super) theta: Option<f64>,
    pub(super) compress_theta: Option<f64>,
    /// `None` also if off.
    pub(super) yarn: Option<Yarn>,
}

impl Rope {
    /// Reads the decoder's keys: those of `text`.
    pub(super) fn read(f: &mut Fields<'_>, text: &Map<String, Value>) -> Self {
        let mut said = Said::default();
        said.bases(f);
        for key in ["rope_scaling", "rope_parameters"] {
            let Some(mut f) = f.object(key) else { continue };
            if f.has("main") || f.has("compress") {
                said.parts(&mut f, text);
            } else if let Some(names) = objects(&f) {
                let expected = "the keys of one rotation, or \"main\" and \"compress\"";
                f.note(Violation::new(key, expected, names));
            } else {
                said.bases(&mut f);
                said.stretch(&mut f, text);
            }
        }
        Self {
            theta: said.theta.one(f, "rope_theta"),
            compress_theta: said.compress_theta.one(f, "compress_rope_theta"),
            yarn: one_yarn(f, said.stretches),
        }
    }
}

/// The base of window KV and the key that says it first, of what the decoder's part holds.
pub(super) fn theta(text: &Map<String, Value>) -> Option<(String, f64)> {
    let paths = [
        "rope_theta",
        "rope_scaling.rope_theta",
        "rope_scaling.main.rope_theta",
        "rope_parameters.rope_theta",
        "rope_parameters.main.rope_theta",
    ];
    paths.into_iter().find_map(|path| {
        let (first, rest) = path.split_once('.').unwrap_or((path, ""));
        let keys = rest.split('.').filter(|key| !key.is_empty());
        let value = keys.fold(text.get(first), |value, key| value?.get(key));
        Some((path.to_owned(), value?.as_f64()?))
    })
}

/// The object that says how positions are stretched, if any does, and its key, of what the decoder's part
/// holds.
pub(super) fn stretching(text: &Map<String, Value>) -> Option<(&str, &Map<String, Value>)> {
    let paths = [
        "rope_scaling",
        "rope_scaling.compress",
        "rope_parameters",
        "rope_parameters.compress",
    ];
    paths.into_iter().find_map(|path| {
        let (first, part) = path.split_once('.').unwrap_or((path, ""));
        let object = match part {
            "" => text.get(first)?,
            part => text.get(first)?.get(part)?,
        };
        let object = object.as_object()?;
        let kind = TYPES.into_iter().find_map(|key| object.get(key)?.as_str());
        (kind? != "default").then_some((path, object))
    })
}

/// Everything that is said, in its order.
#[derive(Default)]
struct Said {
    theta: Bases,
    compress_theta: Bases,
    stretches: Vec<Stretch>,
}

/// What an object says of stretching.
struct Stretch {
    /// The object's key.
    path: String,
    /// The key of its type.
    kind_key: &'static str,
    /// `None` for the type `default`.
    yarn: Option<Yarn>,
}

const BASES: [&str; 2] = ["rope_theta", "compress_rope_theta"];
const TYPES: [&str; 2] = ["rope_type", "type"];
const YARN: [&str; 4] = [
    "factor",
    "beta_fast",
    "beta_slow",
    "original_max_position_embeddings",
];

/// Whether a key of an object is about rotation alone, not about how it is stretched.
fn unstretching(key: &str) -> bool {
    BASES.contains(&key) || neutral::CHANNELS.contains(&key)
}

impl Said {
    fn bases(&mut self, f: &mut Fields<'_>) {
        self.theta.add(f, "rope_theta");
        self.compress_theta.add(f, "compress_rope_theta");
    }

    /// An object with an object for window KV, one for compressed KV, or both.
    fn parts(&mut self, f: &mut Fields<'_>, text: &Map<String, Value>) {
        if let Some(mut main) = f.object("main") {
            self.bases(&mut main);
            unstretched(&mut main, text);
        }
        if let Some(mut compress) = f.object("compress") {
            for key in BASES {
                self.compress_theta.add(&mut compress, key);
            }
            self.stretch(&mut compress, text);
        }
        self.bases(f);
        neutral::rotated_channels(f, text);
        let known = |key: &str| ["main", "compress"].contains(&key) || unstretching(key);
        f.only(known, "beside \"main\" and \"compress\"");
    }

    /// An object that says how rotation is stretched, if it says so at all.
    fn stretch(&mut self, f: &mut Fields<'_>, text: &Map<String, Value>) {
        neutral::rotated_channels(f, text);
        if f.names().any(|key| !unstretching(key)) {
            self.stretches.extend(stretch(f));
        }
    }
}

/// The keys of an object that hold objects, where there are any: other families have one for each type
/// of layer.
fn objects(f: &Fields<'_>) -> Option<String> {
    let objects = f.names().filter(|key| f.holds_object(key));
    let names: Vec<String> = objects.map(|key| json::dotted("", key)).collect();
    let more = names.len().saturating_sub(MAX_NAMES);
    let mut text = names[..names.len() - more].join(", ");
    if more > 0 {
        text += ", ..";
    }
    (!names.is_empty()).then_some(text)
}

/// A base by each key that says it; `None` for one that is no base.
#[derive(Default)]
struct Bases(Vec<(String, Option<f64>)>);

const BASE: &str = "a number above 1";

impl Bases {
    fn add(&mut self, f: &mut Fields<'_>, key: &str) {
        if f.has(key) {
            self.0.push((f.name(key), f.number(key, BASE, |x| x > 1.0)));
        }
    }

    /// The base. `key` is the one that is missed if there is none.
    fn one(self, f: &mut Fields<'_>, key: &str) -> Option<f64> {
        let mut said = self.0.into_iter();
        let Some((first, base)) = said.next() else {
            return f.number(key, BASE, |x| x > 1.0);
        };
        let base = base?;
        for (other, found) in said {
            if found? != base {
                f.note(Violation::new(
                    &other,
                    format!("{base}, as {first} has it"),
                    found?,
                ));
                return None;
            }
        }
        Some(base)
    }
}

/// Window KV is rotated as it is.
fn unstretched(f: &mut Fields<'_>, text: &Map<String, Value>) {
    neutral::rotated_channels(f, text);
    let expected = "\"default\" (window KV is not stretched)";
    let default = |v: &Value| (v == "default").then_some(());
    let types = TYPES.map(|key| f.optional(key, expected, (), default));
    // What another type needs is no fault of its own.
    if types.iter().all(Option::is_some) {
        let known = |key: &str| TYPES.contains(&key) || unstretching(key);
        f.only(known, "(window KV is not stretched)");
    }
}

fn stretch(f: &mut Fields<'_>) -> Option<Stretch> {
    let kind_key = if f.has("rope_type") {
        "rope_type"
    } else {
        "type"
    };
    let kind = f.required(kind_key, "\"yarn\" or \"default\"", |value| {
        value
            .as_str()
            .filter(|kind| ["yarn", "default"].contains(kind))
    })?;
    if kind_key == "rope_type" {
        // The older name of the key; files may have both.
        let expected = format!("{kind:?}, as rope_type has it");
        f.optional("type", &expected, kind, |v| {
            v.as_str().filter(|&name| name == kind)
        });
    }
    let yarn = if kind == "default" {
        let known = |key: &str| TYPES.contains(&key) || unstretching(key);
        f.only(known, "with the type \"default\"");
        None
    } else {
        Some(yarn(f)?)
    };
    Some(Stretch {
        path: f.path().to_owned(),
        kind_key,
        yarn,
    })
}

fn yarn(f: &mut Fields<'_>) -> Option<Yarn> {
    variants(f);
    let known = |key: &str| {
        let variant = VARIANTS.iter().any(|(name, _)| *name == key) || key == TRUNCATE;
        TYPES.contains(&key) || YARN.contains(&key) || variant || unstretching(key)
    };
    f.only(known, "with the type \"yarn\"");
    let factor = f.number("factor", "a number, 1 or above", |x| x >= 1.0);
    let beta_fast = f.number("beta_fast", "a number above 0", |x| x > 0.0);
    let beta_slow = f.number("beta_slow", "a number above 0", |x| x > 0.0);
    let original_max_position = f.width("original_max_position_embeddings");
    let yarn = Yarn {
        factor: factor?,
        beta_fast: beta_fast?,
        beta_slow: beta_slow?,
        original_max_position: original_max_position?,
    };
    if yarn.beta_fast < yarn.beta_slow {
        let expected = format!("beta_slow ({}) or above", yarn.beta_slow);
        f.note(Violation::new(
            &f.name("beta_fast"),
            expected,
            yarn.beta_fast,
        ));
    }
    Some(yarn)
}

/// What the `YaRN` of other models has, each with the value that changes nothing. `mscale` and
/// `mscale_all_dim` weigh the logarithm of the factor, so that 0 stands for none.
const VARIANTS: [(&str, f64); 5] = [
    ("mscale", 0.0),
    ("mscale_all_dim", 0.0),
    ("attention_factor", 1.0),
    ("attn_factor", 1.0),
    ("extrapolation_factor", 1.0),
];
const TRUNCATE: &str = "truncate";

fn variants(f: &mut Fields<'_>) {
    for (key, only) in VARIANTS {
        let expected = format!("{only} (nothing else is supported)");
        f.optional(key, &expected, only, |v| v.as_f64().filter(|&x| x == only));
    }
    let expected = "true (the ramp is between whole channels)";
    f.optional(TRUNCATE, expected, true, |v| v.as_bool().filter(|&set| set));
}

/// The one stretching that all objects name; two of them can be `rope_scaling` and `rope_parameters`.
fn one_yarn(f: &mut Fields<'_>, said: Vec<Stretch>) -> Option<Yarn> {
    let mut said = said.into_iter();
    let first = said.next()?;
    for other in said {
        if let Some(([of_first, of_other], expected, found)) = difference(&first, &other) {
            let expected = format!("{expected}, as {}.{} has it", first.path, of_first);
            let key = format!("{}.{}", other.path, of_other);
            f.note(Violation::new(&key, expected, found));
        }
    }
    first.yarn
}

/// The keys that two objects hold differently, and what they hold.
fn difference(a: &Stretch, b: &Stretch) -> Option<([&'static str; 2], String, String)> {
    let (Some(one), Some(two)) = (&a.yarn, &b.yarn) else {
        let kind = |of: &Stretch| if of.yarn.is_some() { "yarn" } else { "default" };
        let (one, two) = (kind(a), kind(b));
        let keys = [a.kind_key, b.kind_key];
        return (one != two).then(|| (keys, format!("{one:?}"), format!("{two:?}")));
    };
    let numbers = |yarn: &Yarn| {
        [
            ("factor", yarn.factor),
            ("beta_fast", yarn.beta_fast),
            ("beta_slow", yarn.beta_slow),
            (
                "original_max_position_embeddings",
                yarn.original_max_position as f64,
            ),
        ]
    };
    let mut pairs = numbers(one).into_iter().zip(numbers(two));
    let ((key, one), (_, two)) = pairs.find(|(one, two)| one != two)?;
    Some(([key, key], one.to_string(), two.to_string()))
}
