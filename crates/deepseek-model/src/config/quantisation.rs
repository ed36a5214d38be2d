//! `quantization_config`: which formats the weights have. They are read as their tensors say, which do not
//! tell formats of one width from each other, nor how many values share a scale.

use serde_json::{Map, Value};

use super::{ExpertDtype, error::quoted, fields::Fields, other_names::same, parts::Parts};

/// The object's own key.
const OBJECT: &str = "quantization_config";

/// The same in the decoder's part of a file.
const OBJECT_OF_PART: &str = "text_config.quantization_config";

/// Names that other tools have for the object. It is not read there, so that it must say nothing else.
const OTHER_OBJECTS: [&str; 3] = ["quantization", "compression_config", "quant_config"];

/// The key that says how routed experts are stored.
pub(super) const EXPERT_DTYPE: &str = "expert_dtype";

/// What a key may hold. It may also be absent or `null`.
enum Format {
    /// One of these names.
    Name(&'static [&'static str]),
    /// Rows and columns of a matrix in fp8 that share a scale.
    Block([u64; 2]),
    /// Nothing: no format that is read has it.
    Null,
    /// `false`: no format that is read is of that kind.
    False,
}

/// The object's keys, which some files have outside of it, too.
const KEYS: [(&str, Format); 11] = [
    ("activation_scheme", Format::Name(&["dynamic"])),
    ("quant_method", Format::Name(&["fp8"])),
    ("fmt", Format::Name(&["e4m3"])),
    ("scale_fmt", Format::Name(&["ue8m0"])),
    (EXPERT_DTYPE, Format::Name(&["fp4", "fp8", "bf16"])),
    ("bits", Format::Null),
    ("group_size", Format::Null),
    ("quant_algo", Format::Null),
    ("load_in_4bit", Format::False),
    ("load_in_8bit", Format::False),
    ("weight_block_size", Format::Block([32, 32])),
];

/// Keys that mean a format in such an object alone.
const KEYS_OF_OBJECTS: [(&str, Format); 4] = [
    ("format", Format::Null),
    ("mode", Format::Null),
    ("config_groups", Format::Null),
    ("sparsity_config", Format::Null),
];

impl Format {
    fn is(&self, value: &Value) -> bool {
        match self {
            Self::Name(names) => value.as_str().is_some_and(|name| names.contains(&name)),
            Self::Block(block) => value
                .as_array()
                .is_some_and(|sizes| sizes.iter().map(Value::as_u64).eq(block.map(Some))),
            Self::Null => false,
            Self::False => value.as_bool() == Some(false),
        }
    }

    /// All that it may be.
    fn shown(&self) -> String {
        match self {
            Self::Name(names) => {
                let quoted: Vec<String> = names.iter().map(|n| format!("\"{n}\"")).collect();
                match &quoted[..] {
                    [rest @ .., last] if !rest.is_empty() => {
                        format!("{} or {last}", rest.join(", "))
                    }
                    names => names.concat(),
                }
            }
            Self::Block([rows, columns]) => format!("[{rows},{columns}]"),
            Self::Null => "null".to_owned(),
            Self::False => "false".to_owned(),
        }
    }
}

/// Such an object that others must not contradict, and its name in the file.
pub(super) type Read<'a> = (&'a Map<String, Value>, &'static str);

/// The object that is read of those of a file.
pub(super) fn of_file(parts: Parts<'_>) -> Option<Read<'_>> {
    let holder = parts.holder(OBJECT);
    let name = if parts.are_two() && std::ptr::eq(holder, parts.text) {
        OBJECT_OF_PART
    } else {
        OBJECT
    };
    Some((holder.get(OBJECT)?.as_object()?, name))
}

/// Notes every key of the object that asks for a format that is not read, or for another than `read`, which
/// may be the object itself.
pub(super) fn check(f: &mut Fields<'_>, read: Option<Read<'_>>) {
    compare(f, &KEYS, read);
    compare(f, &KEYS_OF_OBJECTS, read);
    // Some tools have an object for each layer in it, which may ask for a format where the whole does not.
    for name in f.names() {
        if f.holds_object(name)
            && let Some(mut f) = f.object(name)
        {
            check(&mut f, read);
        }
    }
}

/// Notes the same of an object of this kind among the keys.
pub(super) fn check_object(f: &mut Fields<'_>, read: Option<Read<'_>>) {
    if let Some(mut f) = f.object(OBJECT) {
        check(&mut f, read);
    }
}

/// Notes every key outside of the object that asks for a format that is not read, or for another than the
/// object that is `read`.
pub(super) fn check_outside(f: &mut Fields<'_>, read: Option<Read<'_>>) {
    compare(f, &KEYS, read);
    for key in OTHER_OBJECTS {
        if let Some(mut f) = f.object(key) {
            check(&mut f, read);
        }
    }
}

/// How a file says that routed experts are stored, in any of its places: they must not contradict each other.
/// `None` also for what is no format, which is [noted](check).
pub(super) fn expert_dtype(parts: Parts<'_>) -> Option<ExpertDtype> {
    let maps = [parts.text, parts.top];
    let objects = [OBJECT].into_iter().chain(OTHER_OBJECTS);
    let inside = objects.flat_map(|object| maps.map(|map| map.get(object)?.get(EXPERT_DTYPE)));
    let outside = maps.map(|map| map.get(EXPERT_DTYPE));
    let name = inside.chain(outside).flatten().find_map(Value::as_str)?;
    ExpertDtype::ALL
        .into_iter()
        .find(|dtype| dtype.name() == name)
}

fn compare(f: &mut Fields<'_>, keys: &[(&str, Format)], read: Option<Read<'_>>) {
    let (read, name) = read.unzip();
    let name = name.unwrap_or(OBJECT);
    for (key, format) in keys {
        let inside = read.and_then(|read| read.get(*key));
        // One that is none itself is noted there.
        let inside = inside.filter(|value| format.is(value));
        let expected = match inside {
            Some(value) => format!("{}, as {name} has it", quoted(value)),
            None => format!("{} (nothing else is supported)", format.shown()),
        };
        f.optional(key, &expected, (), |v| {
            let fits = inside.map_or_else(|| format.is(v), |inside| same(v, inside));
            fits.then_some(())
        });
    }
}
