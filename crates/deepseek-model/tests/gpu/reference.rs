//! The checkpoints against an independent f32 reference, and bf16 against f32.

use candle_core::DType;
use deepseek_model::{LogitRows, Model, ReplayPolicy, SequenceOptions, sampler::log_softmax_at};

use crate::common::quantised::check_quantised;
use crate::common::reference::{CHUNKINGS, check_chunking, check_demo, check_off, check_policies};
use crate::common::{Expected, FIXTURES, Lone, load, load_on};
use crate::gpu;

/// Sums of a GPU run in another order than the reference's.
const TOLERANCE: f32 = 1e-3;

/// Logits, caches, intermediate tensors and chosen entries of one chunk; then every policy and
/// chunking, with 16 greedy steps each.
#[test]
fn fixtures_match_the_reference_in_f32() {
    for name in FIXTURES {
        let expected = Expected::load(name);
        let model = load_on(&gpu(), DType::F32, name, false);
        check_off(&model, &expected, TOLERANCE);
        check_policies(&model, &expected, TOLERANCE);
    }
}

/// The same with cache rounding, each row by one of several runs that round differently, as on the
/// CPU.
#[test]
fn rounded_fixtures_match_the_reference_in_f32() {
    for name in FIXTURES {
        let model = load_on(&gpu(), DType::F32, name, true);
        check_quantised(&model, &Expected::load(name), TOLERANCE);
    }
}

/// `PromptTail` and `Exact` do not depend on how a prompt is cut.
#[test]
fn no_chunking_changes_prompt_tail_or_exact() {
    for name in FIXTURES {
        let expected = Expected::load(name);
        let model = load_on(&gpu(), DType::F32, name, false);
        check_chunking(&model, &expected, &[1; 80], TOLERANCE);
        check_chunking(&model, &expected, &[7, 31, 1, 1, 40], TOLERANCE);
        for (_, chunks) in CHUNKINGS {
            check_chunking(&model, &expected, chunks, TOLERANCE);
        }
    }
}

/// 48 greedy ids of each policy, with and without rounding of the cache: those of the reference,
/// which the CPU gives as well.
#[test]
fn the_demo_writes_the_cpu_s_text() {
    let device = gpu();
    check_demo(
        |round_cache| load_on(&device, DType::F32, "v41-demo", round_cache),
        TOLERANCE,
    );
}

/// Mean negative log-likelihood of the demo's tokens after the first 100, in nats.
fn nll(model: &Model, policy: ReplayPolicy) -> f32 {
    let tokens = Expected::load("v41-demo").ids("tokens");
    let options = SequenceOptions {
        prompt_len: tokens.len(),
        keeps_rows: policy == ReplayPolicy::Off,
    };
    let mut run = Lone::with(model, policy, options);
    let width = model.config().vocab_size;
    let logits = run.step(&tokens, LogitRows::All);
    let rows = logits.chunks_exact(width).zip(&tokens[1..]).skip(100);
    let losses: Vec<f32> = rows
        .map(|(row, id)| {
            let top = row.iter().fold(f32::NEG_INFINITY, |m, x| m.max(*x));
            let total: f32 = row.iter().map(|x| (x - top).exp()).sum();
            top + total.ln() - row[*id as usize]
        })
        .collect();
    losses.iter().sum::<f32>() / losses.len() as f32
}

/// bf16 loses what bf16 loses, and no more.
#[test]
fn bf16_predicts_as_well_as_f32() {
    let device = gpu();
    for round_cache in [false, true] {
        let [f32, bf16] = [DType::F32, DType::BF16].map(|dtype| {
            nll(
                &load_on(&device, dtype, "v41-demo", round_cache),
                ReplayPolicy::Off,
            )
        });
        println!("nll: f32 {f32:.4}, bf16 {bf16:.4}");
        assert!((f32 - bf16).abs() <= 0.02, "f32 {f32}, bf16 {bf16}");
    }
}

/// Rows that are scored of a text.
const SCORED: usize = 512;

/// Mean negative log-likelihood, in nats, of the last [`SCORED`] tokens of the demo's text: all before
/// them are prefilled in two chunks, so that a policy drops rows, and they follow one by one.
fn decoded_nll(model: &Model, policy: ReplayPolicy) -> f64 {
    let tokens = Expected::load("v41-demo").ids("tokens");
    let (prompt, rest) = tokens.split_at(tokens.len() - SCORED);
    let mut run = Lone::new(model, policy, prompt.len());
    let mut logits = run.prefill(prompt, &[prompt.len() - 50, 50]);
    let mut sum = 0.0;
    for (i, id) in rest.iter().enumerate() {
        sum -= f64::from(log_softmax_at(&logits, *id).unwrap());
        if i + 1 < rest.len() {
            logits = run.step(&[*id], LogitRows::Last);
        }
    }
    sum / SCORED as f64
}

/// What a policy predicts in bf16 on a GPU is as good as in f32 on the CPU.
#[test]
fn bf16_predicts_as_well_as_f32_on_the_cpu_under_every_policy() {
    let device = gpu();
    for round_cache in [false, true] {
        let cpu = load("v41-demo", round_cache);
        let model = load_on(&device, DType::BF16, "v41-demo", round_cache);
        for policy in ReplayPolicy::ALL {
            let (want, got) = (decoded_nll(&cpu, policy), decoded_nll(&model, policy));
            println!("{policy}, round_cache {round_cache}: cpu {want:.4}, gpu {got:.4}");
            assert!(
                (want - got).abs() <= 0.02,
                "{policy}: cpu {want}, gpu {got}"
            );
        }
    }
}

/// A released checkpoint runs in bf16; every policy must write text there, too.
#[test]
fn bf16_generates_under_every_policy() {
    let device = gpu();
    let model = load_on(&device, DType::BF16, "v41-demo", true);
    let tokens = Expected::load("v41-demo").ids("tokens");
    for policy in ReplayPolicy::ALL {
        let mut run = Lone::new(&model, policy, tokens.len());
        let last = run.prefill(&tokens, &[256, 256, tokens.len() - 512]);
        let (_, steps) = run.generate(last, 8);
        assert!(steps.iter().all(|x| x.is_finite()), "{policy}");
    }
}
