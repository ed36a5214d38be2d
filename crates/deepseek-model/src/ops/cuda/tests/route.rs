//! The router.

use std::path::Path;

use candle_core::{Device, Tensor};

use super::{Draw, gpu, plain, small, values};
use crate::{
    config::{Config, Scoring},
    ops::{Act, FaultWord, Faults, Site, route},
};

const SCORINGS: [Scoring; 3] = [Scoring::SqrtSoftplus, Scoring::Sigmoid, Scoring::Softmax];

/// Experts and choices: fewer experts than a warp has lanes, about as many, the released number.
const CHOICES: [(usize, usize); 8] = [
    (1, 1),
    (2, 1),
    (6, 2),
    (31, 6),
    (33, 3),
    (64, 6),
    (384, 6),
    (512, 8),
];

fn config(k: usize, scoring: Scoring, norm_topk_prob: bool) -> Config {
    let mut config = Config::load(Path::new("tests/data/bf16-s1")).unwrap();
    config.experts_per_token = k;
    (config.scoring, config.norm_topk_prob) = (scoring, norm_topk_prob);
    config
}

/// Ids and weights on the GPU, and what the fault word says then.
fn on_gpu(
    device: &Device,
    logits: &Tensor,
    bias: &Tensor,
    config: &Config,
) -> (Vec<u32>, Vec<f32>, Option<(usize, Site)>) {
    let word = FaultWord::new(device).unwrap();
    let faults = Faults::new(Some(&word), 3, Site::Router);
    let there = (plain(device, logits), plain(device, bias));
    let (ids, weights) = route(&there.0, &there.1, config, faults).unwrap();
    let shape = [logits.dims()[0], config.experts_per_token];
    assert_eq!((ids.dims(), weights.dims()), (&shape[..], &shape[..]));
    let ids = ids.flatten_all().unwrap().to_vec1().unwrap();
    (ids, values(&weights), word.take().unwrap())
}

fn on_cpu(logits: &Tensor, bias: &Tensor, config: &Config) -> (Vec<u32>, Vec<f32>) {
    let nowhere = Faults::new(None, 3, Site::Router);
    let (ids, weights) = route(logits, bias, config, nowhere).unwrap();
    let ids = ids.flatten_all().unwrap().to_vec1().unwrap();
    (ids, values(&weights))
}

fn assert_weights(what: &str, got: &[f32], expected: &[f32]) {
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        assert!(
            (got - expected).abs() <= 1e-5 * expected.abs() + 1e-12,
            "{what}: weight {i}: expected {expected}, got {got}"
        );
    }
}

/// What experts of a row are chosen by.
fn choice_values(logits: &[f32], bias: &[f32], scoring: Scoring) -> Vec<f64> {
    let exp = |x: &f32| f64::from(*x).exp();
    let sum: f64 = logits.iter().map(exp).sum();
    let score = |x: &f32| match scoring {
        Scoring::SqrtSoftplus => exp(x).ln_1p().sqrt(),
        Scoring::Sigmoid => exp(x) / (1.0 + exp(x)),
        Scoring::Softmax => exp(x) / sum,
    };
    let pairs = logits.iter().zip(bias);
    pairs.map(|(x, b)| score(x) + f64::from(*b)).collect()
}

/// The functions of both sides differ by units in the last place, so experts whose values differ by
/// no more may change places.
#[test]
fn gpu_route_chooses_as_the_cpu() {
    let (device, mut draw) = (gpu(), Draw::new());
    for scoring in SCORINGS {
        for (experts, k) in CHOICES {
            for rows in [1, 2, 7, 64, 65, 300, if small() { 3 } else { 2000 }] {
                let logits = (draw.values(&[rows, experts], Act::F32) * 6.0).unwrap();
                let bias = (draw.values(&[experts], Act::F32) * 0.3).unwrap();
                let config = config(k, scoring, rows % 2 == 1);
                let (ids, weights, fault) = on_gpu(&device, &logits, &bias, &config);
                let expected = on_cpu(&logits, &bias, &config);
                let what = format!("{scoring:?}, {rows} rows, {k} of {experts}");
                assert_eq!(fault, None, "{what}");
                let (logits, bias) = (values(&logits), values(&bias));
                for row in 0..rows {
                    let at = row * k..(row + 1) * k;
                    let (got, expected_ids) = (&ids[at.clone()], &expected.0[at.clone()]);
                    if got == expected_ids {
                        assert_weights(&what, &weights[at.clone()], &expected.1[at]);
                        continue;
                    }
                    let logits = &logits[row * experts..][..experts];
                    let value = choice_values(logits, &bias, scoring);
                    for (got, expected) in got.iter().zip(expected_ids) {
                        let off = (value[*got as usize] - value[*expected as usize]).abs();
                        assert!(
                            off <= 1e-6,
                            "{what}, row {row}: {got}, not {expected}: {off}"
                        );
                    }
                }
            }
        }
    }
}

/// Few distinct logits, so that most choices are among equals: the lower index has to win.
#[test]
fn gpu_route_breaks_ties_to_the_lower_expert() {
    let (device, mut draw) = (gpu(), Draw::new());
    for scoring in SCORINGS {
        for (experts, k) in CHOICES {
            for (rows, levels) in [(1, 1), (65, 2), (65, 5)] {
                let mut level = || draw.below(levels) as f32 - 2.0;
                let logits: Vec<f32> = (0..rows * experts).map(|_| level()).collect();
                let logits = Tensor::from_vec(logits, (rows, experts), &Device::Cpu).unwrap();
                // More than scores differ by, so that equals are apart.
                let bias: Vec<f32> = (0..experts).map(|e| (e / 3 % 2) as f32 * 4.0).collect();
                let bias = Tensor::from_vec(bias, experts, &Device::Cpu).unwrap();
                let config = config(k, scoring, true);
                let (ids, weights, fault) = on_gpu(&device, &logits, &bias, &config);
                let expected = on_cpu(&logits, &bias, &config);
                let what = format!("{scoring:?}, {rows} rows, {k} of {experts}");
                assert_eq!((&ids, fault), (&expected.0, None), "{what}");
                assert_weights(&what, &weights, &expected.1);
            }
        }
    }
}

/// Logits that are no numbers are reported with layer and site, once, and the ids stay in range.
#[test]
fn gpu_route_reports_rows_without_enough_candidates() {
    let device = gpu();
    for scoring in SCORINGS {
        for (experts, k) in CHOICES {
            for bad in [0, 2] {
                let mut logits = vec![0.5f32; 3 * experts];
                // All but the last expert of one row: a candidate is left, which is enough for k = 1
                // unless the scores depend on each other.
                logits[bad * experts..][..experts - 1].fill(f32::NAN);
                let logits = Tensor::from_vec(logits, (3, experts), &Device::Cpu).unwrap();
                let bias = Tensor::zeros(experts, candle_core::DType::F32, &Device::Cpu).unwrap();
                let config = config(k, scoring, true);
                let (ids, weights, fault) = on_gpu(&device, &logits, &bias, &config);
                let candidates = match scoring {
                    Scoring::Softmax if experts > 1 => 0,
                    _ => 1,
                };
                let expected = (candidates < k).then_some((3, Site::Router));
                assert_eq!(fault, expected, "{scoring:?}, {k} of {experts}");
                assert!(ids.iter().all(|&id| (id as usize) < experts), "{ids:?}");
                assert!(weights.iter().all(|w| w.is_finite()), "{weights:?}");
            }
        }
    }
}
