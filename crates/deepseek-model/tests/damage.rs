//! Files that are damaged anywhere: a checkpoint is refused or it loads and runs. No panic, no
//! abort, and no memory beyond what an intact one takes many times over.

mod common;

use std::{
    fs,
    num::NonZeroU32,
    path::Path,
    sync::{LazyLock, Mutex, PoisonError},
};

use common::checkpoint;
use deepseek_model::{
    CacheOptions, Config, KvCache, LogitRows, Model, ModelOptions, ReplayPolicy, SequenceOptions,
    StepRequest, tokenizer::Tokenizer,
};
use proptest::{prelude::*, sample::Index};
use serde_json::Value;
use tempfile::TempDir;

/// A checkpoint with every kind of part: n-gram tables, 8-bit matrices, three shards.
const FIXTURE: &str = "engram-s1";

/// A copy whose files are damaged and restored, one case after the other.
static COPY: LazyLock<Mutex<TempDir>> = LazyLock::new(|| {
    let dir = TempDir::new().unwrap();
    for entry in fs::read_dir(checkpoint(FIXTURE)).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
    }
    Mutex::new(dir)
});

/// Loads the copy with `bytes` in place of `file`, and runs it if it loads.
fn load_damaged(file: &str, bytes: &[u8]) {
    let copy = COPY.lock().unwrap_or_else(PoisonError::into_inner);
    let path = copy.path().join(file);
    // A new file: the old one may still be mapped.
    fs::remove_file(&path).unwrap();
    fs::write(&path, bytes).unwrap();
    if let Ok(config) = Config::load(copy.path()) {
        let (device, dtype) = (candle_core::Device::Cpu, candle_core::DType::F32);
        drop(KvCache::new(&config, OPTIONS, &device, dtype));
    }
    match Model::load(copy.path(), ModelOptions::default(), &|_| {}) {
        Ok(model) => run(&model),
        Err(error) => assert_ne!(error.to_string(), ""),
    }
    if let Ok(tokenizer) = Tokenizer::load(copy.path()) {
        tokenizer.encode("the café 日本\r\n").map(drop).ok();
        tokenizer.decode(&[0, 7, 287, u32::MAX]).map(drop).ok();
    }
    fs::remove_file(&path).unwrap();
    fs::copy(checkpoint(FIXTURE).join(file), &path).unwrap();
}

const OPTIONS: CacheOptions = CacheOptions {
    max_sequences: 2,
    max_tokens: 64,
    page_tokens: CacheOptions::PAGE_TOKENS,
    policy: ReplayPolicy::PromptTail,
    sampled_rows: NonZeroU32::MAX,
};

/// One step of a prompt; it may fail, too.
fn run(model: &Model) {
    let Ok(mut cache) = model.new_cache(OPTIONS) else {
        return;
    };
    let prompt = SequenceOptions {
        prompt_len: 12,
        keeps_rows: false,
    };
    let Ok(sequence) = cache.add(prompt) else {
        return;
    };
    let tokens: Vec<u32> = (3..15).collect();
    let step = [StepRequest {
        sequence,
        tokens: &tokens,
        logits: LogitRows::Last,
    }];
    model.forward(&step, &mut cache).map(drop).ok();
}

/// Memory that the process has held at most, where the system tells.
fn assert_little_memory() {
    let Ok(status) = fs::read_to_string("/proc/self/status") else {
        return;
    };
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib: Option<u64> = peak.and_then(|text| text.split_whitespace().next()?.parse().ok());
    assert!(
        kib.is_none_or(|kib| kib < 1 << 20),
        "held {kib:?} KiB, expected less than 1 GiB"
    );
}

fn read(file: &str) -> Vec<u8> {
    fs::read(checkpoint(FIXTURE).join(file)).unwrap()
}

/// What a file may hold where something else is expected, as it stands in JSON.
const VALUES: &[&str] = &[
    "0",
    "-1",
    "-0",
    "1",
    "2",
    "3",
    "7",
    "8",
    "9",
    "31",
    "32",
    "64",
    "288",
    "1024",
    "4096",
    "4097",
    "1000003",
    "16777216",
    "2147483647",
    "2147483648",
    "9223372036854775807",
    "18446744073709551615",
    "18446744073709551616",
    "1e400",
    "-1e400",
    "1e-400",
    "1e308",
    "1e39",
    "1.5",
    "0.0",
    "null",
    "true",
    "false",
    "\"\"",
    "\"x\"",
    "[]",
    "{}",
    "[0]",
    "[-1]",
    "[1e400]",
    "[1,1]",
    "[2,5,8]",
    "[8,5,2]",
    "[[]]",
    "{\"type\":\"yarn\"}",
    "[2147483647]",
    "[0,0,1000003,2,2,1,1,1,1]",
    "[0,0,2,2,2,1,1,1,2147483647]",
];

/// The text of `config.json` with the values at some of its keys replaced, or the keys doubled.
fn mutated(edits: &[(Index, Index, bool)]) -> String {
    let mut json: Value = serde_json::from_slice(&read("config.json")).unwrap();
    let mut slots = Vec::new();
    collect(&mut json, &mut slots);
    let mut replaced = Vec::new();
    for (at, (slot, value, doubled)) in edits.iter().enumerate() {
        let value = VALUES[value.index(VALUES.len())];
        let slot = slot.index(slots.len());
        let (key, old) = &mut slots[slot];
        let mark = format!("@{at}@");
        let text = if *doubled {
            format!("{value},{}:{old}", Value::from(key.as_str()))
        } else {
            value.to_owned()
        };
        **old = Value::from(mark.as_str());
        replaced.push((Value::from(mark).to_string(), text));
    }
    let mut text = json.to_string();
    // The last edit first: it may hold the mark of one before it.
    for (mark, value) in replaced.iter().rev() {
        text = text.replace(mark, value);
    }
    text
}

/// Every value that has a key, with the key.
fn collect<'a>(json: &'a mut Value, slots: &mut Vec<(String, &'a mut Value)>) {
    let Value::Object(map) = json else {
        return;
    };
    for (key, value) in map {
        if value.is_object() {
            collect(value, slots);
        } else {
            slots.push((key.clone(), value));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn any_value_under_any_key_is_refused_or_runs(
        edits in prop::collection::vec(any::<(Index, Index, bool)>(), 1..4),
    ) {
        load_damaged("config.json", mutated(&edits).as_bytes());
        assert_little_memory();
    }
}

const FILES: [&str; 5] = [
    "config.json",
    "tokenizer.json",
    "model.safetensors.index.json",
    "model-00001-of-00003.safetensors",
    "model-00003-of-00003.safetensors",
];

/// Where a damage is: half of them in the first bytes, where lengths, names and shapes are.
fn place() -> impl Strategy<Value = (Index, bool)> {
    any::<(Index, bool)>()
}

fn at((index, early): (Index, bool), len: usize) -> usize {
    let end = if early { len.min(20_000) } else { len };
    index.index(end.max(1))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn a_file_cut_anywhere_is_refused_or_runs(file in 0..FILES.len(), end in place()) {
        let bytes = read(FILES[file]);
        load_damaged(FILES[file], &bytes[..at(end, bytes.len())]);
        assert_little_memory();
    }

    #[test]
    fn bytes_changed_anywhere_are_refused_or_run(
        file in 0..FILES.len(),
        changes in prop::collection::vec((place(), prop_oneof![any::<u8>(), b'0'..=b'9']), 1..4),
    ) {
        let mut bytes = read(FILES[file]);
        for (place, byte) in changes {
            let at = at(place, bytes.len());
            bytes[at] = byte;
        }
        load_damaged(FILES[file], &bytes);
        assert_little_memory();
    }
}

/// Ends of tensors are numbers out of the file: sums of them must not overflow.
#[test]
fn a_header_of_more_bytes_than_can_be_addressed_is_refused() {
    let part = 1_u64 << 60;
    let entries: Vec<String> = (0..15)
        .map(|i| {
            let (from, to) = (i * part, (i + 1) * part);
            format!(r#""t{i}":{{"dtype":"U8","shape":[{part}],"data_offsets":[{from},{to}]}}"#)
        })
        .chain([format!(
            r#""last":{{"dtype":"U8","shape":[{}],"data_offsets":[{},{}]}}"#,
            part - 1,
            15 * part,
            u64::MAX
        )])
        .collect();
    let header = format!("{{{}}}", entries.join(","));
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    let dir = TempDir::new().unwrap();
    fs::write(dir.path().join("model.safetensors"), &bytes).unwrap();
    fs::copy(
        checkpoint("bf16-s1").join("config.json"),
        dir.path().join("config.json"),
    )
    .unwrap();
    let error = refusal(dir.path());
    insta::assert_snapshot!(error, @r"
    CHECKPOINT has 1 problem:
      model.safetensors: the header lists more bytes than can be addressed, the file has 1725
    ");
}

/// The error of loading `dir`, which it calls `CHECKPOINT`.
fn refusal(dir: &Path) -> String {
    let error = Model::load(dir, ModelOptions::default(), &|_| {}).unwrap_err();
    error
        .to_string()
        .replace(dir.to_str().unwrap(), "CHECKPOINT")
}
