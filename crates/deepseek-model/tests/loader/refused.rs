//! Checkpoints that must be refused, and in which words.

use std::{collections::BTreeMap, error::Error, fmt::Write, fs, path::Path};

use candle_core::DType;
use deepseek_model::{
    Config,
    config::ExpertDtype,
    weights::{Problem, WeightsError},
};
use safetensors::Dtype;

use crate::checkpoint::{self, Raw, Tensors, fixture, load, sharded, single, write_index};

fn config() -> Config {
    Config::load(&fixture("engram-s1")).unwrap()
}

fn tensors() -> Tensors {
    checkpoint::read(&fixture("engram-s1"))
}

/// An error and what caused it, as programs print them.
fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

/// The error of loading `dir`, which it calls `CHECKPOINT`.
#[track_caller]
fn refusal(dir: &Path) -> String {
    let error = load(dir, &config(), DType::F32).unwrap_err();
    chain(&error).replace(dir.to_str().unwrap(), "CHECKPOINT")
}

/// The error of loading the fixture after `change`.
#[track_caller]
fn refusal_of(change: impl FnOnce(&mut Tensors)) -> String {
    let mut tensors = tensors();
    change(&mut tensors);
    refusal(single(&tensors).path())
}

/// The error of a single file with these bytes.
#[track_caller]
fn refusal_of_bytes(bytes: &[u8]) -> String {
    let dir = tempfile::TempDir::new().unwrap();
    fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
    refusal(dir.path())
}

/// A file with this header and `data` bytes after it.
fn file(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    bytes
}

#[test]
fn directories_without_a_checkpoint() {
    let dir = tempfile::TempDir::new().unwrap();
    insta::assert_snapshot!("no_checkpoint", refusal(dir.path()));
    fs::write(dir.path().join("file"), "").unwrap();
    insta::assert_snapshot!("no_directory", refusal(&dir.path().join("absent")));
    insta::assert_snapshot!("file_as_directory", refusal(&dir.path().join("file")));
}

#[test]
fn broken_indexes() {
    let dir = tempfile::TempDir::new().unwrap();
    for (name, text) in [
        ("index_no_json", "{\"weight_map\": {"),
        ("index_no_object", "[]"),
        ("index_no_map", "{\"metadata\": {}}"),
        (
            "index_bad_map",
            "{\"weight_map\": {\"norm.weight\": 3, \"a\": \"b\", \"c\": null}}",
        ),
        ("index_map_of_wrong_type", "{\"weight_map\": []}"),
        ("index_bad_number", "{\"weight_map\": {\"a\": 1e400}}"),
        (
            "index_twice",
            "{\"weight_map\": {\"a\": \"1.safetensors\", \"a\": \"2.safetensors\"}}",
        ),
    ] {
        fs::write(dir.path().join("model.safetensors.index.json"), text).unwrap();
        insta::assert_snapshot!(name, refusal(dir.path()));
    }
}

/// Damaged shards are reported together; their tensors are not reported as missing on top.
#[test]
fn shards_that_are_not_what_the_index_says() {
    let dir = sharded(&tensors());
    let path = |file: &str| dir.path().join(file);
    fs::write(path("empty.safetensors"), "").unwrap();
    let bytes = fs::read(path("b.safetensors")).unwrap();
    fs::write(path("b.safetensors"), &bytes[..bytes.len() - 100]).unwrap();
    fs::create_dir(path("directory.safetensors")).unwrap();
    let map = BTreeMap::from([
        ("a.weight".into(), "a.safetensors"),
        ("norm.weight".into(), "b.safetensors"),
        ("c.weight".into(), "c.safetensors"),
        ("d.weight".into(), "../d.safetensors"),
        ("e.weight".into(), "empty.safetensors"),
        ("f.weight".into(), "/f.safetensors"),
        ("g.weight".into(), ""),
    ]);
    write_index(dir.path(), &map);
    insta::assert_snapshot!("shards", refusal(dir.path()));
}

#[test]
fn damaged_files() {
    let whole = safetensors::serialize(&tensors(), None).unwrap();
    let header = u64::from_le_bytes(*whole.first_chunk().unwrap()) as usize;
    for (name, bytes) in [
        ("file_empty", &whole[..0]),
        ("file_cut_in_length", &whole[..5]),
        ("file_cut_in_header", &whole[..100]),
        ("file_cut_after_header", &whole[..8 + header]),
        ("file_cut_in_data", &whole[..whole.len() - 1]),
        ("file_with_tail", &[&whole[..], &[0; 3]].concat()),
        (
            "file_of_text",
            b"version https://example.org/pointer\noid 1\nsize 2\n",
        ),
        (
            "file_of_git_lfs",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 2\n",
        ),
        ("file_no_json", &file("{\"norm.weight\": ", 0)),
        (
            "file_no_utf8",
            &[&1_u64.to_le_bytes()[..], &[0xff]].concat(),
        ),
    ] {
        insta::assert_snapshot!(name, refusal_of_bytes(bytes));
    }
}

/// Every bad entry of a header is named, though the format's own reader stops at the first.
#[test]
fn damaged_headers() {
    let bad = r#"{
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "I4", "shape": [6], "data_offsets": [0, 3]},
        "b": {"dtype": "F4", "shape": [1, 7], "data_offsets": [3, 7]},
        "c": {"dtype": "F32", "shape": [2, 2], "data_offsets": [7, 15]},
        "d": {"dtype": "F32", "shape": [1], "data_offsets": [9, 5]},
        "e": {"dtype": "F32", "shape": [4294967296, 4294967296], "data_offsets": [15, 19]},
        "f": {"dtype": "F32", "shape": "4", "data_offsets": [19, 23]},
        "g": {"dtype": 5, "shape": [1], "data_offsets": [23, 27]},
        "h": {"shape": [1], "data_offsets": [27, 31]},
        "i": 3
    }"#;
    insta::assert_snapshot!("header_entries", refusal_of_bytes(&file(bad, 31)));

    let gaps = r#"{
        "a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]},
        "b": {"dtype": "U8", "shape": [2], "data_offsets": [3, 5]},
        "c": {"dtype": "U8", "shape": [2], "data_offsets": [4, 6]}
    }"#;
    insta::assert_snapshot!("header_gaps", refusal_of_bytes(&file(gaps, 6)));

    // Either entry fits the bytes.
    let twice = r#"{
        "a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]},
        "a": {"dtype": "I8", "shape": [2], "data_offsets": [0, 2]}
    }"#;
    insta::assert_snapshot!("header_twice", refusal_of_bytes(&file(twice, 2)));
    let number = r#"{"a": {"dtype": "U8", "shape": [1e400], "data_offsets": [0, 2]}}"#;
    insta::assert_snapshot!("header_number", refusal_of_bytes(&file(number, 2)));
}

/// One of each kind, all in one error.
#[test]
fn all_differences_are_reported_together() {
    let text = refusal_of(|t| {
        t.remove("norm.weight");
        t.remove("layers.4.ffn.experts.2.w2.weight");
        t.insert(
            "layers.9.attn_norm.weight".into(),
            t["layers.0.attn_norm.weight"].clone(),
        );
        t.insert("norm.scale".into(), t["layers.0.attn.wkv.scale"].clone());
        t.get_mut("head.weight").unwrap().shape = vec![64, 288];
        t.get_mut("layers.0.ffn.experts.0.w1.weight").unwrap().shape = vec![16, 64];
        t.get_mut("layers.2.attn.wkv.scale").unwrap().shape = vec![4, 1];
        t.get_mut("layers.0.ffn.gate.bias").unwrap().dtype = Dtype::I32;
        t.get_mut("layers.1.attn.wkv.weight").unwrap().dtype = Dtype::F8_E5M2;
        t.get_mut("layers.0.ffn.experts.1.w2.scale").unwrap().dtype = Dtype::I8;
        t.remove("layers.3.attn.wq_a.scale");
        t.insert("layers.5.attn.wq_a.weight".into(), bf16_zeros(&[32, 64]));
        t.get_mut("layers.6.attn.wkv.scale").unwrap().bytes[3] = 255;
        t.get_mut("layers.8.ffn.experts.5.w1.scale").unwrap().bytes[5..8].fill(255);
    });
    insta::assert_snapshot!("all_kinds", text);
}

fn bf16_zeros(shape: &[usize]) -> Raw {
    let bytes = vec![0; 2 * shape.iter().product::<usize>()];
    Raw {
        dtype: Dtype::BF16,
        shape: shape.into(),
        bytes,
    }
}

/// Problems come in the model's order, and can be told apart by a program.
#[test]
fn problems_are_data() {
    let mut tensors = tensors();
    tensors.remove("embed.weight");
    tensors.get_mut("layers.0.attn.wkv.scale").unwrap().bytes[0] = 255;
    let dir = single(&tensors);
    let error = load(dir.path(), &config(), DType::F32).unwrap_err();
    let WeightsError::Checkpoint { problems, .. } = error else {
        panic!("{error}")
    };
    assert_eq!(
        problems.as_slice(),
        [
            Problem::Missing {
                tensor: "embed.weight".into(),
                shape: vec![288, 64]
            },
            Problem::BadScale {
                tensor: "layers.0.attn.wkv.scale".into(),
                file: "model.safetensors".into(),
                count: 1,
                first: [0, 0],
            },
        ]
    );
}

/// The checkpoint of another model: thousands of differences, the first twenty in print.
#[test]
fn a_long_list_is_cut() {
    let text = refusal_of(|tensors| {
        tensors.retain(|name, _| !name.starts_with("layers.1."));
        let more: Tensors = tensors
            .iter()
            .filter(|(name, _)| name.starts_with("layers.8.attn."))
            .map(|(name, raw)| (name.replace("layers.8", "layers.10"), raw.clone()))
            .collect();
        tensors.extend(more);
    });
    insta::assert_snapshot!("long_list", text);
}

/// BR-27: dtypes of scales and 4-bit values that a loader does not know, or takes for another's. A
/// matrix of the right shape in every dtype there is: either it loads or the error names it.
#[test]
fn every_dtype_loads_or_is_named() {
    let name = "layers.0.attn.wkv.weight";
    let mut report = String::new();
    for dtype in ALL_DTYPES {
        let mut tensors = tensors();
        let columns = if [Dtype::I8, Dtype::U8].contains(&dtype) {
            32
        } else {
            64
        };
        let bytes = vec![0; 64 * columns * dtype.bitsize() / 8];
        tensors.insert(
            name.into(),
            Raw {
                dtype,
                shape: vec![64, columns],
                bytes,
            },
        );
        let scale = match dtype {
            Dtype::F32 | Dtype::BF16 | Dtype::F16 => None,
            Dtype::F8_E4M3 => Some([2, 2]),
            _ => Some([64, 2]),
        };
        tensors.remove("layers.0.attn.wkv.scale");
        if let Some(shape) = scale {
            let scale = Raw {
                dtype: Dtype::F8_E8M0,
                shape: shape.into(),
                bytes: vec![127; shape.iter().product()],
            };
            tensors.insert("layers.0.attn.wkv.scale".into(), scale);
        }
        let dir = single(&tensors);
        let outcome = match load(dir.path(), &config(), DType::F32) {
            Ok(_) => "loads".into(),
            Err(error) => error
                .to_string()
                .replace(dir.path().to_str().unwrap(), "CHECKPOINT"),
        };
        writeln!(report, "{dtype}: {outcome}").unwrap();
    }
    insta::assert_snapshot!("every_dtype", report);
}

const ALL_DTYPES: [Dtype; 21] = [
    Dtype::BOOL,
    Dtype::F4,
    Dtype::F6_E2M3,
    Dtype::F6_E3M2,
    Dtype::U8,
    Dtype::I8,
    Dtype::F8_E5M2,
    Dtype::F8_E4M3,
    Dtype::F8_E8M0,
    Dtype::F8_E4M3FNUZ,
    Dtype::F8_E5M2FNUZ,
    Dtype::I16,
    Dtype::U16,
    Dtype::F16,
    Dtype::BF16,
    Dtype::I32,
    Dtype::U32,
    Dtype::F32,
    Dtype::C64,
    Dtype::F64,
    Dtype::I64,
];

/// BR-27: an odd row of 4-bit values loses its last one. Rows of seven: refused also where all rows together fill whole bytes.
#[test]
fn rows_of_odd_length_cannot_be_packed() {
    let json = fs::read_to_string(fixture("engram-s1").join("config.json")).unwrap();
    let mut json: serde_json::Value = serde_json::from_str(&json).unwrap();
    json["text_config"]["moe_intermediate_size"] = 7.into();
    let config = Config::from_json(&json.to_string(), "config.json".as_ref()).unwrap();
    let mut tensors = tensors();
    let f4 = |shape: [usize; 2]| Raw {
        dtype: Dtype::F4,
        shape: shape.into(),
        bytes: vec![0; shape.iter().product::<usize>() / 2],
    };
    let scale = |rows, columns| Raw {
        dtype: Dtype::F8_E8M0,
        shape: vec![rows, columns],
        bytes: vec![127; rows * columns],
    };
    let names: Vec<String> = tensors
        .keys()
        .filter(|n| n.contains("experts."))
        .cloned()
        .collect();
    for name in names {
        let (stem, kind) = name.rsplit_once('.').unwrap();
        let raw = match (stem.rsplit_once('.').unwrap().1 == "w2", kind) {
            (true, "weight") => f4([64, 7]),
            (true, _) => scale(64, 1),
            (false, "weight") => f4([7, 64]),
            (false, _) => scale(7, 2),
        };
        tensors.insert(name, raw);
    }
    let dir = single(&tensors);
    let error = load(dir.path(), &config, DType::F32)
        .unwrap_err()
        .to_string();
    insta::assert_snapshot!(
        "odd_rows",
        error.replace(dir.path().to_str().unwrap(), "CHECKPOINT")
    );
}

/// Scales that are floats can be infinite, too.
#[test]
fn float_scales_must_be_finite() {
    let text = refusal_of(|tensors| {
        let scale = tensors.get_mut("layers.0.attn.wq_b.scale").unwrap();
        scale.dtype = Dtype::F32;
        scale.bytes = scale
            .bytes
            .iter()
            .flat_map(|_| f32::INFINITY.to_le_bytes())
            .collect();
    });
    insta::assert_snapshot!("infinite_scales", text);
}

/// The scales of a table are too many to read at load: a bad one is found when its row is.
#[test]
fn table_rows_that_cannot_be_had() {
    let mut tensors = tensors();
    tensors
        .get_mut("layers.1.engram.embed.scale")
        .unwrap()
        .bytes[9] = 255;
    let dir = single(&tensors);
    let mut weights = load(dir.path(), &config(), DType::F32).unwrap();
    let table = weights.take_table(1).unwrap();
    let refused: Vec<String> = [9, 760, -1]
        .map(|row| {
            table
                .gather(&[0, row, 1], &mut [0.0; 96])
                .unwrap_err()
                .to_string()
        })
        .into();
    let refused = refused.join("\n");
    let dir = dir.path().to_str().unwrap();
    insta::assert_snapshot!("table_rows", refused.replace(dir, "CHECKPOINT"));
    table.gather(&[8, 10], &mut [0.0; 64]).unwrap();

    let none = weights.take_table(2).unwrap_err();
    insta::assert_snapshot!("no_table", none.to_string());
}

/// Stored plain, in 8 and in 4 bits (by an overflowing scale): every tensor is named.
#[test]
fn values_must_be_finite() {
    let text = refusal_of(|tensors| {
        let norm = tensors.get_mut("norm.weight").unwrap();
        let size = norm.dtype.bitsize() / 8;
        norm.bytes[3 * size..4 * size].fill(0xff);
        let matrix = tensors.get_mut("layers.0.attn.wkv.weight").unwrap();
        matrix.bytes[64 + 5] = 0x7f;
        let scale = tensors.get_mut("layers.2.ffn.experts.1.w2.scale").unwrap();
        scale.bytes.fill(254);
    });
    insta::assert_snapshot!("values", text);
}

/// In one error, since both are found in one reading; of a matrix with a bad scale the scale alone,
/// although its values are no numbers either.
#[test]
fn scales_and_values_that_are_not_finite_are_reported_together() {
    let text = refusal_of(|tensors| {
        for name in ["layers.0.attn.wkv.scale", "layers.6.attn.wkv.scale"] {
            tensors.get_mut(name).unwrap().bytes[0] = 255;
        }
        for name in ["norm.weight", "layers.0.attn.q_norm.weight", "embed.weight"] {
            tensors.get_mut(name).unwrap().bytes[..4].fill(0xff);
        }
    });
    insta::assert_snapshot!("not_finite", text);
}

/// Values are not read while anything else is wrong: that would take all of a checkpoint's bytes.
#[test]
fn values_wait_for_the_differences() {
    let text = refusal_of(|tensors| {
        tensors.get_mut("norm.weight").unwrap().bytes[..4].fill(0xff);
        tensors.get_mut("layers.0.attn.wkv.scale").unwrap().bytes[0] = 255;
        tensors.remove("embed.weight");
    });
    insta::assert_snapshot!("differences_first", text);
}

/// Nothing else would tell weights from those of another file: a tensor's dtype says how it is read.
#[test]
fn experts_of_another_dtype_than_the_configuration_says() {
    let (tensors, mut texts) = (checkpoint::read(&fixture("fp4-s1")), String::new());
    let mut config = Config::load(&fixture("fp4-s1")).unwrap();
    for said in [ExpertDtype::Fp8, ExpertDtype::Bf16] {
        config.expert_dtype = Some(said);
        let error = load(single(&tensors).path(), &config, DType::F32).unwrap_err();
        let WeightsError::Checkpoint { problems, .. } = &error else {
            panic!("{error}")
        };
        writeln!(texts, "{}", problems.as_slice()[0]).unwrap();
        assert_eq!(problems.as_slice().len(), 1);
    }
    insta::assert_snapshot!(texts, @"
    layers.0.ffn.experts.0.w1.weight in model.safetensors: expected fp8, as expert_dtype of config.json says of the experts, found fp4 (I8), and no expert in fp8
    layers.0.ffn.experts.0.w1.weight in model.safetensors: expected bf16, as expert_dtype of config.json says of the experts, found fp4 (I8), and no expert in bf16
    ");
}

#[test]
fn a_table_value_must_be_finite() {
    let mut tensors = tensors();
    let table = tensors.get_mut("layers.1.engram.embed.weight").unwrap();
    let width = table.bytes.len() / table.shape[0];
    table.bytes[9 * width..10 * width].fill(0x7f);
    let dir = single(&tensors);
    let mut weights = load(dir.path(), &config(), DType::F32).unwrap();
    let table = weights.take_table(1).unwrap();
    let error = table.gather(&[9], &mut [0.0; 32]).unwrap_err();
    let (error, dir) = (error.to_string(), dir.path().to_str().unwrap());
    insta::assert_snapshot!("table_value", error.replace(dir, "CHECKPOINT"));
    let error = table.gather(&[8, 10], &mut [0.0; 32]).unwrap_err();
    insta::assert_snapshot!("table_buffer", error.to_string());
}

/// A configuration of millions of tensors is refused before they are named.
#[test]
fn far_too_few_tensors() {
    let mut config = config();
    config.num_experts = 4096;
    config.layers = vec![config.layers[0]; 1024];
    config.candidates = None;
    config.engram = None;
    let dir = single(&tensors());
    let error = load(dir.path(), &config, DType::F32).unwrap_err();
    insta::assert_snapshot!(
        "too_few",
        chain(&error).replace(dir.path().to_str().unwrap(), "CHECKPOINT")
    );
}

#[test]
fn names_are_printed_safely() {
    let text = refusal_of(|tensors| {
        for name in ["a\u{1b}[2J\nb".to_owned(), "c".repeat(1000)] {
            tensors.insert(name, bf16_zeros(&[1]));
        }
    });
    insta::assert_snapshot!("names", text);
}

#[test]
fn matrices_are_held_in_two_dtypes() {
    let error = load(&fixture("engram-s1"), &config(), DType::F16).unwrap_err();
    insta::assert_snapshot!("held_dtype", error.to_string());
}
