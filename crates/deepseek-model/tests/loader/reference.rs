//! The storage formats once more, value by value and without regard to speed, as an oracle.

use std::collections::BTreeMap;

use candle_core::{DType, Tensor};
use deepseek_model::weights::Weights;
use half::{bf16, f16};
use safetensors::Dtype;

use crate::checkpoint::{Raw, Tensors};

/// Value (i, j) of the matrix `name`.
pub(crate) fn value(tensors: &Tensors, name: &str, i: usize, j: usize) -> f32 {
    decode(&tensors[name], scale(tensors, name), i, j)
}

fn scale<'a>(tensors: &'a Tensors, name: &str) -> Option<&'a Raw> {
    tensors.get(&format!("{}.scale", name.strip_suffix(".weight")?))
}

/// Value (i, j) of a matrix or, with i = 0, element j of a vector.
fn decode(raw: &Raw, scale: Option<&Raw>, i: usize, j: usize) -> f32 {
    match (raw.dtype, scale) {
        (Dtype::F8_E4M3, Some(scale)) => {
            let by_row = scale.shape[0] == raw.shape[0];
            let row = if by_row { i } else { i / 32 };
            e4m3(raw.bytes[i * raw.shape[1] + j]) * plain(scale, row, j / 32)
        }
        (Dtype::I8 | Dtype::U8 | Dtype::F4, Some(scale)) => {
            let bytes_per_row = raw.bytes.len() / raw.shape[0];
            let byte = raw.bytes[i * bytes_per_row + j / 2];
            let nibble = if j.is_multiple_of(2) {
                byte & 0x0f
            } else {
                byte >> 4
            };
            let magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][(nibble & 7) as usize];
            let value = if nibble & 8 == 0 {
                magnitude
            } else {
                -magnitude
            };
            value * plain(scale, i, j / 32)
        }
        (_, None) => plain(raw, i, j),
        (dtype, Some(_)) => panic!("{dtype} with scales"),
    }
}

fn plain(raw: &Raw, i: usize, j: usize) -> f32 {
    let at = i * raw.shape.last().unwrap() + j;
    let half = || [raw.bytes[2 * at], raw.bytes[2 * at + 1]];
    match raw.dtype {
        Dtype::F8_E8M0 | Dtype::U8 => 2_f64.powi(i32::from(raw.bytes[at]) - 127) as f32,
        Dtype::F32 => f32::from_le_bytes(raw.bytes[4 * at..4 * at + 4].try_into().unwrap()),
        Dtype::BF16 => bf16::from_le_bytes(half()).to_f32(),
        Dtype::F16 => f16::from_le_bytes(half()).to_f32(),
        other => panic!("{other} is not plain"),
    }
}

fn e4m3(byte: u8) -> f32 {
    let sign = if byte & 0x80 == 0 { 1.0 } else { -1.0 };
    let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f32::from(byte & 7));
    assert_ne!(byte & 0x7f, 0x7f, "NaN in a test checkpoint");
    if exponent == 0 {
        return sign * mantissa * 2_f32.powi(-9);
    }
    sign * (1.0 + mantissa / 8.0) * 2_f32.powi(exponent - 7)
}

/// Shape of the values of a stored tensor.
pub(crate) fn shape(raw: &Raw) -> Vec<usize> {
    match (raw.dtype, &raw.shape[..]) {
        (Dtype::I8 | Dtype::U8, &[rows, bytes]) => vec![rows, 2 * bytes],
        (_, shape) => shape.to_vec(),
    }
}

/// All values of a stored tensor, row-major.
pub(crate) fn values(tensors: &Tensors, name: &str) -> Vec<f32> {
    let (raw, scale) = (&tensors[name], scale(tensors, name));
    let shape = shape(raw);
    let (rows, columns) = match shape[..] {
        [columns] => (1, columns),
        [rows, columns] => (rows, columns),
        _ => panic!("{name} has {} axes", shape.len()),
    };
    (0..rows * columns)
        .map(|at| decode(raw, scale, at / columns, at % columns))
        .collect()
}

/// The tensors that a loader must give, by name: matrices of experts stacked, nothing else changed.
/// N-gram tables are not among them.
pub(crate) fn expected(tensors: &Tensors) -> BTreeMap<String, (Vec<usize>, Vec<f32>)> {
    let mut out = BTreeMap::new();
    for (name, raw) in tensors {
        let skipped = ["vision.", "aligner.", "image_", "mtp."]
            .iter()
            .any(|p| name.starts_with(p));
        let table = name.ends_with(".engram.embed.weight");
        let last = name.rsplit('.').next().unwrap();
        let other = ["scale", "bias_vl"].contains(&last) || name.contains("experts.");
        if !(skipped || table || other) {
            out.insert(name.clone(), (shape(raw), values(tensors, name)));
        }
    }
    for layer in (0..).take_while(|i| tensors.contains_key(&format!("layers.{i}.attn_norm.weight")))
    {
        stack(tensors, &format!("layers.{layer}.ffn"), &mut out);
    }
    out
}

fn stack(tensors: &Tensors, ffn: &str, out: &mut BTreeMap<String, (Vec<usize>, Vec<f32>)>) {
    let routed = (0..).map(|e| format!("{ffn}.experts.{e}"));
    let routed: Vec<_> = routed
        .take_while(|p| tensors.contains_key(&format!("{p}.w1.weight")))
        .collect();
    let [m, h] = shape(&tensors[&format!("{}.w1.weight", routed[0])])[..] else {
        panic!()
    };
    let stacked = |experts: &[String], matrices: &[&str]| -> Vec<f32> {
        let names = experts
            .iter()
            .flat_map(|e| matrices.iter().map(move |w| format!("{e}.{w}.weight")));
        names.flat_map(|name| values(tensors, &name)).collect()
    };
    let (e, shared) = (routed.len(), [format!("{ffn}.shared_experts")]);
    let mut add = |name: &str, shape: &[usize], values| {
        out.insert(format!("{ffn}.{name}"), (shape.to_vec(), values));
    };
    add(
        "experts.w13",
        &[e, 2 * m, h],
        stacked(&routed, &["w1", "w3"]),
    );
    add("experts.w2", &[e, h, m], stacked(&routed, &["w2"]));
    add(
        "shared_experts.w13",
        &[2 * m, h],
        stacked(&shared, &["w1", "w3"]),
    );
    add("shared_experts.w2", &[h, m], stacked(&shared, &["w2"]));
}

/// Takes every tensor and checks shape, dtype and bits.
#[track_caller]
pub(crate) fn check(mut weights: Weights, tensors: &Tensors, dtype: DType) {
    for (name, (shape, values)) in expected(tensors) {
        let tensor = weights.take(&name).unwrap();
        assert_eq!(tensor.dims(), shape, "{name}");
        let held = if is_matrix(&name) { dtype } else { DType::F32 };
        assert_eq!(tensor.dtype(), held, "{name}");
        let rounded = values.iter().map(|&v| match held {
            DType::BF16 => bf16::from_f32(v).to_f32(),
            _ => v,
        });
        let wrong = flat(&tensor)
            .into_iter()
            .zip(rounded)
            .position(|(a, b)| a.to_bits() != b.to_bits());
        assert_eq!(wrong, None, "{name}: first wrong value");
    }
    assert!(weights.names().is_empty(), "left: {:?}", weights.names());
}

/// Whether a tensor is of the dtype that was asked for, as the loader's documentation lists them.
fn is_matrix(name: &str) -> bool {
    let f32_always = [
        "norm.weight",
        "head.weight",
        "gate.weight",
        "gate.bias",
        "attn_sink",
        "q_weight",
        "k_weight",
    ];
    let f32_part = [".hc_", ".compressor."];
    !(f32_always.iter().any(|end| name.ends_with(end))
        || f32_part.iter().any(|part| name.contains(part)))
}

pub(crate) fn flat(tensor: &Tensor) -> Vec<f32> {
    tensor
        .to_dtype(DType::F32)
        .unwrap()
        .flatten_all()
        .unwrap()
        .to_vec1()
        .unwrap()
}
