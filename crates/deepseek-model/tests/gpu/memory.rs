//! Memory that runs out, what is said of it, and what comes after.

use std::num::{NonZeroU32, NonZeroUsize};

use candle_core::{DType, Device, Tensor};
use deepseek_model::{
    CacheError, CacheOptions, Error, GenerateOptions, Generator, KvCache, LogitRows, Model,
    ReplayPolicy, Runner, RunnerOptions, SequenceOptions, StepRequest,
    device::{self, DeviceError, DeviceMemory},
    memory::{Bytes, Demand, Place},
    sampler::SamplingConfig,
};

use crate::common::recovery::check_failed_steps;
use crate::common::{FIXTURES, flat, load_on};
use crate::drive::{decode, start};
use crate::gpu;

const MIB: u64 = 1 << 20;

fn memory(device: &Device) -> DeviceMemory {
    device::memory(device).unwrap().expect("a GPU has memory")
}

/// The GPU opens with the checks that say why one does not, and a number beyond the last is refused.
#[test]
fn a_gpu_opens_by_its_number() {
    let device = device::open_cuda(0).unwrap();
    let memory = memory(&device);
    assert!(0 < memory.free && memory.free < memory.total, "{memory:?}");
    let refused = device::open_cuda(4096).unwrap_err();
    println!("{refused}");
    let is_ordinal =
        |error: &DeviceError| matches!(error, DeviceError::Ordinal { ordinal: 4096, .. });
    assert!(matches!(&refused, Error::Device(error) if is_ordinal(error)));
}

/// A refused step and one of values that are no numbers, in f32 and bf16.
#[test]
fn a_failed_step_leaves_the_next_request_alone() {
    for dtype in [DType::F32, DType::BF16] {
        for name in FIXTURES {
            check_failed_steps(&load_on(&gpu(), dtype, name, true));
        }
    }
}

/// A cache of twice the device's memory is refused before any of it is taken, with the tokens that
/// would fit; and the model serves on.
#[test]
fn a_cache_beyond_the_device_is_refused_with_what_would_fit() {
    let device = gpu();
    let model = load_on(&device, DType::F32, "v41-demo", true);
    let before = memory(&device);
    let options = |max_tokens| CacheOptions {
        max_sequences: 1,
        max_tokens,
        page_tokens: CacheOptions::PAGE_TOKENS,
        policy: ReplayPolicy::PromptTail,
        sampled_rows: NonZeroU32::MIN,
    };
    let bytes = |tokens| options(tokens).bytes(model.config(), DType::F32).unwrap();
    let of_page = bytes(256) - bytes(128);
    let tokens = (2 * before.total / of_page * 128) as usize;
    let refused = model.new_cache(options(tokens)).unwrap_err();
    println!("{refused}");
    let Error::Cache(CacheError::NoMemory {
        needed,
        available,
        fits,
        ..
    }) = refused
    else {
        panic!("{refused}");
    };
    assert!(needed > before.total && available <= before.total);
    assert!(0 < fits && fits < tokens && bytes(fits) <= available);
    assert_eq!(memory(&device).free, before.free, "nothing was taken");
    check_failed_steps(&load_on(&device, DType::F32, "bf16-s1", true));
}

/// Logits of every row of one long prompt, which takes hundreds of MiB.
fn long_prefill(model: &Model, cache: &mut KvCache) -> deepseek_model::Result<Vec<f32>> {
    let tokens: Vec<u32> = (0..4000).map(|t| 3 + (t * 7) % 2000).collect();
    let options = SequenceOptions {
        prompt_len: tokens.len(),
        keeps_rows: true,
    };
    let sequence = cache.add(options)?;
    let request = StepRequest {
        sequence,
        tokens: &tokens,
        logits: LogitRows::All,
    };
    let logits = model
        .forward(&[request], cache)
        .map(|output| flat(&output.logits));
    // As must be done after a step that failed.
    cache.remove(sequence)?;
    logits
}

/// Takes all memory of the device but about so many bytes, in as few pieces as there is room for: what other
/// tests have left may lie in the way of a single one.
fn ballast(device: &Device, left: u64) -> Vec<Tensor> {
    let mut pieces = Vec::new();
    let mut piece = u64::MAX;
    loop {
        let free = memory(device).free.saturating_sub(left);
        piece = piece.min(free);
        if piece < MIB {
            return pieces;
        }
        match Tensor::zeros(piece as usize, DType::U8, device) {
            Ok(tensor) => pieces.push(tensor),
            Err(_) => piece /= 2,
        }
    }
}

/// A step that finds no memory is an error, not the end of the process, and once there is memory the
/// same request gets the same bits, in the same cache.
#[test]
fn a_step_without_memory_leaves_the_next_request_alone() {
    let device = gpu();
    let model = load_on(&device, DType::F32, "v41-demo", true);
    let options = CacheOptions {
        max_sequences: 1,
        max_tokens: 4096,
        page_tokens: CacheOptions::PAGE_TOKENS,
        policy: ReplayPolicy::Off,
        sampled_rows: NonZeroU32::MIN,
    };
    let mut cache = model.new_cache(options).unwrap();
    let want = long_prefill(&model, &mut cache).unwrap();
    for left in [48, 16, 4] {
        let ballast = ballast(&device, left * MIB);
        let failed = long_prefill(&model, &mut cache).unwrap_err();
        println!("{left} MiB left: {failed}");
        let text = format!("{failed:?}").to_lowercase();
        assert!(text.contains("memory") || text.contains("alloc"), "{text}");
        drop(ballast);
        let got = long_prefill(&model, &mut cache).unwrap();
        assert!(
            got == want,
            "{left} MiB left: other logits after the failure"
        );
    }
}

/// A capture that finds no memory gives the graphs of its mode up, those of the replay layers with
/// them, and says why; the runner serves on, and with memory again it captures.
#[test]
fn a_capture_without_memory_leaves_the_runner_as_it_was() {
    let device = gpu();
    let model = std::sync::Arc::new(load_on(&device, DType::F32, "v41-demo", false));
    let cache = CacheOptions {
        max_sequences: 2,
        max_tokens: 4096,
        page_tokens: CacheOptions::PAGE_TOKENS,
        policy: ReplayPolicy::PromptTail,
        sampled_rows: NonZeroU32::MIN,
    };
    let options = RunnerOptions {
        trim_threshold: Some(33),
        profile: true,
        ..RunnerOptions::default()
    };
    let mut runner = Runner::new(model, cache, &options).unwrap();
    let prompt: Vec<u32> = (0..300).map(|t| 3 + (t * 7) % 2000).collect();
    let ids = |runner: &mut Runner| {
        let mut batch = [start(runner, &prompt).0];
        let next = |_| {
            decode(runner, &mut batch);
            batch[0].1
        };
        let ids: Vec<u32> = (0..8).map(next).collect();
        runner.remove(batch[0].0).unwrap();
        ids
    };
    let want = ids(&mut runner);
    let ballast = ballast(&device, 48 * MIB);
    let failed = runner.capture(|_, _| ()).unwrap_err();
    drop(ballast);
    let Error::Capture { source, .. } = &failed else {
        panic!("{failed}");
    };
    println!("{failed}: {source}");
    let text = format!("{source:?}").to_lowercase();
    assert!(text.contains("memory") || text.contains("alloc"), "{text}");
    assert!(runner.profile().unwrap().is_none(), "a capture is no step");
    assert_eq!(ids(&mut runner), want, "after a failed capture");
    // Graphs of decode steps may have found room; none of another mode is left.
    let left = runner.captured();
    let second = runner.capture(|_, _| ()).unwrap();
    assert_eq!(second.already, left.already);
    assert!(second.captured > second.already, "{second:?}");
    assert_eq!(ids(&mut runner), want, "in graphs");
}

/// What a generation was estimated to take covers what it takes at its most.
#[test]
fn estimates_are_upper_bounds() {
    let device = gpu();
    for (dtype, chunk, logprobs) in [
        (DType::BF16, 512, false),
        (DType::BF16, 4096, false),
        (DType::F32, 1024, true),
    ] {
        device::reset_peak(&device).unwrap();
        let model = std::sync::Arc::new(load_on(&device, dtype, "v41-demo", true));
        let prompts: Vec<Vec<u32>> = [2000, 900, 40]
            .iter()
            .map(|&len| (0..len).map(|t| 3 + (t * 11) % 2000).collect())
            .collect();
        let options = GenerateOptions {
            policy: ReplayPolicy::PromptTail,
            chunk: NonZeroUsize::new(chunk).unwrap(),
            max_new_tokens: 4,
            stop_ids: Vec::new(),
            sampling: SamplingConfig::GREEDY,
            logprobs,
            runner: RunnerOptions::default(),
        };
        let lengths: Vec<usize> = prompts.iter().map(Vec::len).collect();
        let place = Place { gpu: true, dtype };
        let demand = Demand::of_generation(model.config(), place, &options, &lengths);
        let estimate = demand.estimate().unwrap();
        let mut generator = Generator::new(model.clone(), prompts, options.clone()).unwrap();
        let captured = generator.capture(|_, _| ()).unwrap();
        while !generator.is_finished() {
            generator.step().unwrap();
        }
        let peak = memory(&device).peak;
        let workspace = peak.saturating_sub(estimate.weights + estimate.kv);
        let graphs = captured.memory.bytes();
        println!(
            "{dtype:?}, chunk {chunk}: workspace {} of {}, graphs {} of {}",
            Bytes(workspace),
            Bytes(estimate.workspace),
            Bytes(graphs),
            Bytes(estimate.graphs)
        );
        assert!(
            peak >= estimate.weights + estimate.kv,
            "weights and cache are held"
        );
        // Which of them the libraries' memory counts among depends on what ran first.
        assert!(workspace + graphs <= estimate.workspace + estimate.graphs);
    }
}
