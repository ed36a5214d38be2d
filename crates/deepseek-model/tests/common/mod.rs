//! What the integration tests share: the checkpoints, their expected tensors, and short ways to run
//! a model.
#![allow(
    dead_code,
    unreachable_pub,
    reason = "each test program uses its own part"
)]

pub mod quantised;
pub mod recovery;
pub mod reference;
pub mod schedules;
pub mod scripts;

use std::{
    cell::RefCell,
    collections::{BTreeSet, HashMap},
    num::NonZeroU32,
    path::PathBuf,
};

use candle_core::{DType, Device, Tensor};
use deepseek_model::{
    CacheOptions, KvCache, LogitRows, Model, ModelOptions, ReplayPolicy, SequenceId,
    SequenceOptions, StepRequest,
};

/// The fixture checkpoints.
pub const FIXTURES: [&str; 3] = ["bf16-s1", "fp4-s1", "engram-s1"];

/// The folder of the crate, or where its test data lie on a machine that runs packed tests.
fn root() -> PathBuf {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    if root.is_dir() { root } else { ".".into() }
}

/// Where a checkpoint of the repository lies.
pub fn checkpoint(name: &str) -> PathBuf {
    let root = root();
    if name == "v41-demo" {
        root.join("../../models/v41-demo")
    } else {
        root.join("tests/data").join(name)
    }
}

/// Loads a checkpoint in f32, with or without cache rounding.
pub fn load(name: &str, round_cache: bool) -> Model {
    load_on(&Device::Cpu, DType::F32, name, round_cache)
}

/// Loads a checkpoint on a device.
pub fn load_on(device: &Device, dtype: DType, name: &str, round_cache: bool) -> Model {
    let options = ModelOptions {
        device: device.clone(),
        dtype,
        round_cache,
    };
    Model::load(&checkpoint(name), options, &|_| {}).unwrap_or_else(|e| panic!("{name}: {e}"))
}

/// Expected tensors of a checkpoint.
pub struct Expected {
    tensors: HashMap<String, Tensor>,
    /// Names that were asked for.
    used: RefCell<BTreeSet<String>>,
}

impl Expected {
    /// Reads `expected.safetensors` of a fixture, or `demo-expected.safetensors`.
    pub fn load(name: &str) -> Self {
        let data = root().join("tests/data");
        let file = if name == "v41-demo" {
            data.join("demo-expected.safetensors")
        } else {
            data.join(name).join("expected.safetensors")
        };
        let tensors = candle_core::safetensors::load(file, &Device::Cpu).expect("expected tensors");
        Self {
            tensors,
            used: RefCell::default(),
        }
    }

    /// Names of all tensors, sorted.
    pub fn names(&self) -> BTreeSet<String> {
        self.tensors.keys().cloned().collect()
    }

    /// Fails if a tensor was never asked for: nothing that the reference computed may go unchecked.
    #[track_caller]
    pub fn assert_all_used(&self) {
        let unused: Vec<_> = self
            .names()
            .difference(&self.used.borrow())
            .cloned()
            .collect();
        assert!(
            unused.is_empty(),
            "expected tensors that no check used: {unused:?}"
        );
    }

    /// A tensor.
    pub fn tensor(&self, name: &str) -> &Tensor {
        self.used.borrow_mut().insert(name.into());
        self.tensors
            .get(name)
            .unwrap_or_else(|| panic!("no expected tensor {name}"))
    }

    /// A tensor, flat, as f32.
    pub fn f32s(&self, name: &str) -> Vec<f32> {
        self.tensor(name)
            .flatten_all()
            .unwrap()
            .to_dtype(DType::F32)
            .unwrap()
            .to_vec1()
            .unwrap()
    }

    /// A tensor of token ids.
    pub fn ids(&self, name: &str) -> Vec<u32> {
        let ids: Vec<i64> = self.tensor(name).flatten_all().unwrap().to_vec1().unwrap();
        ids.into_iter()
            .map(|id| u32::try_from(id).unwrap())
            .collect()
    }
}

/// A tensor's elements, flat.
pub fn flat(tensor: &Tensor) -> Vec<f32> {
    tensor
        .flatten_all()
        .unwrap()
        .to_dtype(DType::F32)
        .unwrap()
        .to_vec1()
        .unwrap()
}

/// Largest absolute difference; infinite where shapes differ or a value is NaN.
pub fn difference(a: &[f32], b: &[f32]) -> f32 {
    if a.len() != b.len() {
        return f32::INFINITY;
    }
    let worst = |worst: f32, (a, b): (&f32, &f32)| {
        let d = if a == b { 0.0 } else { (a - b).abs() };
        if d.is_nan() {
            f32::INFINITY
        } else {
            worst.max(d)
        }
    };
    a.iter().zip(b).fold(0.0, worst)
}

/// Fails unless two lists are within `tolerance` of each other.
#[track_caller]
pub fn assert_close(what: &str, got: &[f32], want: &[f32], tolerance: f32) {
    let d = difference(got, want);
    assert!(
        d <= tolerance,
        "{what}: largest difference {d}, allowed {tolerance} ({} and {} values)",
        got.len(),
        want.len()
    );
}

/// Highest logit, lowest id on ties.
pub fn greedy(logits: &[f32]) -> u32 {
    let best = |best: usize, i: usize| if logits[i] > logits[best] { i } else { best };
    (0..logits.len()).fold(0, best) as u32
}

/// One sequence in a cache of its own.
pub struct Lone<'a> {
    pub model: &'a Model,
    pub cache: KvCache,
    pub id: SequenceId,
}

impl<'a> Lone<'a> {
    /// A sequence with a prompt of `prompt_len` tokens.
    pub fn new(model: &'a Model, policy: ReplayPolicy, prompt_len: usize) -> Self {
        Self::with(
            model,
            policy,
            SequenceOptions {
                prompt_len,
                keeps_rows: false,
            },
        )
    }

    pub fn with(model: &'a Model, policy: ReplayPolicy, options: SequenceOptions) -> Self {
        let max_tokens = model.config().max_positions;
        let mut cache = model
            .new_cache(CacheOptions {
                max_sequences: 1,
                max_tokens,
                page_tokens: CacheOptions::PAGE_TOKENS,
                policy,
                sampled_rows: NonZeroU32::MIN,
            })
            .unwrap();
        let id = cache.add(options).unwrap();
        Self { model, cache, id }
    }

    /// One step; gives the logits `[read rows, V]`, flat.
    pub fn step(&mut self, tokens: &[u32], logits: LogitRows) -> Vec<f32> {
        let requests = [StepRequest {
            sequence: self.id,
            tokens,
            logits,
        }];
        flat(
            &self
                .model
                .forward(&requests, &mut self.cache)
                .unwrap()
                .logits,
        )
    }

    /// A prompt in chunks; gives the logits of its last row.
    pub fn prefill(&mut self, tokens: &[u32], chunks: &[usize]) -> Vec<f32> {
        assert_eq!(
            chunks.iter().sum::<usize>(),
            tokens.len(),
            "chunks must add up to the prompt"
        );
        let (mut start, mut last) = (0, Vec::new());
        for (i, &n) in chunks.iter().enumerate() {
            let read = if i + 1 == chunks.len() {
                LogitRows::Last
            } else {
                LogitRows::None
            };
            last = self.step(&tokens[start..start + n], read);
            start += n;
        }
        last
    }

    /// Greedy continuation from the logits of the prompt's last row: ids, and the logits each came
    /// from.
    pub fn generate(&mut self, mut last: Vec<f32>, new: usize) -> (Vec<u32>, Vec<f32>) {
        let (mut ids, mut steps) = (Vec::new(), Vec::new());
        for n in 0..new {
            ids.push(greedy(&last));
            steps.extend_from_slice(&last);
            if n + 1 < new {
                last = self.step(&[ids[n]], LogitRows::Last);
            }
        }
        (ids, steps)
    }
}
