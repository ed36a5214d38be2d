//! Checkpoints stored in ways the fixtures are not.

use candle_core::DType;
use deepseek_model::Config;
use half::{bf16, f16};
use safetensors::Dtype;

use crate::{
    checkpoint::{self, Raw, Tensors, fixture, load, sharded, single},
    reference,
};

/// The quantised fixture after `change`, loaded and compared with the oracle.
#[track_caller]
fn check(change: impl Fn(&mut Tensors)) {
    let dir = fixture("fp4-s1");
    let config = Config::load(&dir).unwrap();
    let mut tensors = checkpoint::read(&dir);
    change(&mut tensors);
    check_config(&config, &tensors);
}

#[track_caller]
fn check_config(config: &Config, tensors: &Tensors) {
    for dir in [single(tensors), sharded(tensors)] {
        for dtype in [DType::F32, DType::BF16] {
            reference::check(load(dir.path(), config, dtype).unwrap(), tensors, dtype);
        }
    }
}

fn of_dtype(tensors: &mut Tensors, dtype: Dtype) -> impl Iterator<Item = &mut Raw> {
    tensors.values_mut().filter(move |raw| raw.dtype == dtype)
}

/// The same values in a plain format.
fn plain(raw: &Raw, values: &[f32], dtype: Dtype) -> Raw {
    let bytes = match dtype {
        Dtype::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        Dtype::BF16 => values
            .iter()
            .flat_map(|&v| bf16::from_f32(v).to_le_bytes())
            .collect(),
        Dtype::F16 => values
            .iter()
            .flat_map(|&v| f16::from_f32(v).to_le_bytes())
            .collect(),
        other => panic!("{other} is not plain"),
    };
    Raw {
        dtype,
        shape: reference::shape(raw),
        bytes,
    }
}

#[test]
fn scales_as_raw_exponents() {
    check(|tensors| of_dtype(tensors, Dtype::F8_E8M0).for_each(|raw| raw.dtype = Dtype::U8));
}

/// F16 reaches down to 2^-24 and the fixture's scales no further.
#[test]
fn scales_as_floats() {
    for dtype in [Dtype::F32, Dtype::BF16, Dtype::F16] {
        check(|tensors| {
            for raw in of_dtype(tensors, Dtype::F8_E8M0) {
                let powers: Vec<f32> = raw
                    .bytes
                    .iter()
                    .map(|&b| 2_f32.powi(i32::from(b) - 127))
                    .collect();
                // The shape of scales is not that of packed values.
                let shape = raw.shape.clone();
                *raw = Raw {
                    shape,
                    ..plain(raw, &powers, dtype)
                };
            }
        });
    }
}

/// Scales that are no powers of two round once, in f32.
#[test]
fn scales_of_any_value() {
    check(|tensors| {
        for raw in of_dtype(tensors, Dtype::F8_E8M0) {
            let values: Vec<f32> = (0..raw.bytes.len())
                .map(|i| 0.001 * (i + 1) as f32)
                .collect();
            let shape = raw.shape.clone();
            *raw = Raw {
                shape,
                ..plain(raw, &values, Dtype::F32)
            };
        }
    });
}

/// BR-27: exponents at the ends of their range. The smallest and the largest power of two, and the smallest that is a normal f32.
#[test]
fn extreme_exponents() {
    check(|tensors| {
        let raw = tensors.get_mut("layers.0.attn.wkv.scale").unwrap();
        raw.bytes
            .iter_mut()
            .zip([0, 1, 254].into_iter().cycle())
            .for_each(|(b, e)| *b = e);
        // Values below 2, which the largest power does not take out of f32.
        let raw = tensors.get_mut("layers.0.attn.wkv.weight").unwrap();
        assert_eq!(raw.dtype, Dtype::F8_E4M3);
        raw.bytes.iter_mut().for_each(|b| *b &= !0x40);
    });
}

#[test]
fn packed_values_as_unsigned_bytes() {
    check(|tensors| of_dtype(tensors, Dtype::I8).for_each(|raw| raw.dtype = Dtype::U8));
}

/// The F4 dtype counts values where the integer dtypes count bytes.
#[test]
fn packed_values_as_f4() {
    check(|tensors| {
        for raw in of_dtype(tensors, Dtype::I8) {
            raw.dtype = Dtype::F4;
            raw.shape[1] *= 2;
        }
    });
}

#[test]
fn half_precision_where_plain_is_allowed() {
    check(|tensors| {
        let names: Vec<String> = tensors.keys().cloned().collect();
        for name in names {
            if matches!(tensors[&name].dtype, Dtype::F32 | Dtype::BF16) {
                let values = reference::values(tensors, &name);
                tensors.insert(name.clone(), plain(&tensors[&name], &values, Dtype::F16));
            }
        }
    });
}

/// One matrix plain among quantised ones: its scales are gone, too.
#[test]
fn a_single_matrix_unquantised() {
    check(|tensors| {
        for name in ["layers.1.ffn.experts.3.w2", "layers.4.attn.wq_b"] {
            let weight = format!("{name}.weight");
            let values = reference::values(tensors, &weight);
            tensors.insert(
                weight.clone(),
                plain(&tensors[&weight], &values, Dtype::F32),
            );
            tensors.remove(&format!("{name}.scale"));
        }
    });
}

/// Expert matrices in 8 bits with row scales, dense ones in 4 bits: the shape of the scales tells.
#[test]
fn kinds_may_be_swapped() {
    check(|tensors| {
        let (rows, columns) = (32, 64);
        let bytes = (0..rows * columns).map(|i| (i % 0x7f) as u8).collect();
        tensors.insert(
            "layers.0.ffn.experts.0.w1.weight".into(),
            Raw {
                dtype: Dtype::F8_E4M3,
                shape: vec![rows, columns],
                bytes,
            },
        );
        let bytes = (0..rows * columns / 2).map(|i| (i % 256) as u8).collect();
        tensors.insert(
            "layers.0.attn.wq_a.weight".into(),
            Raw {
                dtype: Dtype::I8,
                shape: vec![rows, columns / 2],
                bytes,
            },
        );
        let bytes = (0..rows * 2).map(|i| 120 + (i % 8) as u8).collect();
        tensors.insert(
            "layers.0.attn.wq_a.scale".into(),
            Raw {
                dtype: Dtype::F8_E8M0,
                shape: vec![rows, 2],
                bytes,
            },
        );
    });
}

/// Extents that no scale group divides: the last tile, row or column is partly outside.
#[test]
fn odd_sizes() {
    for (m, latent) in [(1, 63), (31, 1), (33, 65), (37, 45)] {
        let json = std::fs::read_to_string(fixture("fp4-s1").join("config.json")).unwrap();
        let mut json: serde_json::Value = serde_json::from_str(&json).unwrap();
        json["text_config"]["moe_intermediate_size"] = m.into();
        json["text_config"]["q_lora_rank"] = latent.into();
        json["quantization_config"]["expert_dtype"] = "fp8".into();
        let config = Config::from_json(&json.to_string(), "config.json".as_ref()).unwrap();
        let mut tensors = checkpoint::read(&fixture("fp4-s1"));
        resize(&mut tensors, m, latent);
        check_config(&config, &tensors);
    }
}

/// New values for all tensors with an axis of the expert width or of the query latent. An odd number
/// of columns cannot be packed, so experts are stored in 8 bits, too.
fn resize(tensors: &mut Tensors, m: usize, latent: usize) {
    let names: Vec<String> = tensors
        .keys()
        .filter(|name| name.ends_with(".weight"))
        .cloned()
        .collect();
    for name in names {
        let mut shape = reference::shape(&tensors[&name]);
        match name.rsplit('.').nth(1).unwrap() {
            "w1" | "w3" => shape[0] = m,
            "w2" => shape[1] = m,
            "wq_a" | "q_norm" => shape[0] = latent,
            "wq_b" => shape[1] = latent,
            _ => continue,
        }
        let scale = name.replace(".weight", ".scale");
        let values: usize = shape.iter().product();
        if tensors.contains_key(&scale) {
            let tiles = vec![shape[0].div_ceil(32), shape[1].div_ceil(32)];
            let bytes = (0..tiles[0] * tiles[1])
                .map(|i| 120 + (i % 16) as u8)
                .collect();
            tensors.insert(
                scale,
                Raw {
                    dtype: Dtype::F8_E8M0,
                    shape: tiles,
                    bytes,
                },
            );
            let bytes = (0..values).map(|i| (i * 7 % 0x7f) as u8).collect();
            tensors.insert(
                name,
                Raw {
                    dtype: Dtype::F8_E4M3,
                    shape,
                    bytes,
                },
            );
        } else {
            let bytes = vec![0x3f; 2 * values];
            tensors.insert(
                name,
                Raw {
                    dtype: Dtype::BF16,
                    shape,
                    bytes,
                },
            );
        }
    }
}

/// Nothing is read as if it were aligned: the header may be of any length, and the data follows it.
#[test]
fn unaligned_tensors() {
    let dir = fixture("fp4-s1");
    let config = Config::load(&dir).unwrap();
    let tensors = checkpoint::read(&dir);
    let mut bytes = safetensors::serialize(&tensors, None).unwrap();
    let header = u64::from_le_bytes(*bytes.first_chunk().unwrap());
    bytes.insert(8 + header as usize, b' ');
    bytes[..8].copy_from_slice(&(header + 1).to_le_bytes());

    let dir = tempfile::TempDir::new().unwrap();
    std::fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
    reference::check(
        load(dir.path(), &config, DType::F32).unwrap(),
        &tensors,
        DType::F32,
    );
}

/// A table may be plain, like every tensor of an unquantised checkpoint.
#[test]
fn plain_tables() {
    for dtype in [Dtype::F32, Dtype::BF16, Dtype::F16] {
        let dir = fixture("engram-s1");
        let config = Config::load(&dir).unwrap();
        let mut tensors = checkpoint::read(&dir);
        let name = "layers.3.engram.embed.weight";
        let values = reference::values(&tensors, name);
        let table = plain(&tensors[name], &values, dtype);
        tensors.insert(name.into(), table);
        tensors.remove("layers.3.engram.embed.scale");

        let dir = single(&tensors);
        let mut weights = load(dir.path(), &config, DType::BF16).unwrap();
        let mut out = vec![0.0; 64];
        weights
            .take_table(3)
            .unwrap()
            .gather(&[1139, 5], &mut out)
            .unwrap();
        let expected = [1139, 5]
            .into_iter()
            .flat_map(|i| (0..32).map(move |j| (i, j)));
        let expected: Vec<f32> = expected
            .map(|(i, j)| reference::value(&tensors, name, i, j))
            .collect();
        assert_eq!(out, expected);
    }
}
