//! Choosing tokens: what is certain, what is refused, and whether chance is fair.

use deepseek_model::sampler::{
    Sampler, SamplerError, SamplingConfig, argmax, log_softmax_at, top_logprobs,
};
use proptest::prelude::*;

const PLAIN: SamplingConfig = SamplingConfig {
    temperature: 1.0,
    top_k: None,
    top_p: 1.0,
    seed: 7,
};

fn draws(config: SamplingConfig, logits: &[f32], count: usize) -> Vec<u32> {
    let mut sampler = Sampler::new(config).unwrap();
    (0..count)
        .map(|_| sampler.sample(logits).unwrap())
        .collect()
}

/// How often each id came.
fn counts(config: SamplingConfig, logits: &[f32], count: usize) -> Vec<usize> {
    let mut counts = vec![0; logits.len()];
    for id in draws(config, logits, count) {
        counts[id as usize] += 1;
    }
    counts
}

/// Logits of the given probabilities.
fn logits_of(probabilities: &[f64]) -> Vec<f32> {
    probabilities.iter().map(|p| p.ln() as f32).collect()
}

/// Compares `counts` with the expected shares by Pearson's chi-square. The limit is four standard
/// deviations above the mean; the seed is fixed, so the outcome is too.
#[track_caller]
fn check_distribution(counts: &[usize], expected: &[f64]) {
    let total: usize = counts.iter().sum();
    let scale = total as f64 / expected.iter().sum::<f64>();
    let (mut chi_square, mut classes) = (0.0, 0.0);
    for (&count, share) in counts.iter().zip(expected) {
        if *share == 0.0 {
            assert_eq!(count, 0, "an excluded token was drawn");
            continue;
        }
        let mean = share * scale;
        assert!(mean >= 5.0, "too few draws for the test");
        chi_square += (count as f64 - mean).powi(2) / mean;
        classes += 1.0;
    }
    let freedom: f64 = classes - 1.0;
    let limit = freedom + 4.0 * (2.0 * freedom).sqrt();
    assert!(
        chi_square <= limit,
        "chi-square {chi_square} of {freedom} degrees of freedom"
    );
}

#[test]
fn greedy_takes_the_lowest_of_equal_ids() {
    assert_eq!(
        draws(SamplingConfig::GREEDY, &[1.0, 3.0, 3.0, 2.0], 2),
        [1, 1]
    );
    assert_eq!(argmax(&[-0.0, 0.0]).unwrap(), 0);
    assert_eq!(argmax(&[f32::NEG_INFINITY, f32::MIN]).unwrap(), 1);
}

#[test]
fn top_k_of_one_is_greedy() {
    let config = SamplingConfig {
        top_k: Some(1),
        ..PLAIN
    };
    assert_eq!(draws(config, &[0.0, 0.1, 0.1], 20), [1; 20]);
}

#[test]
fn plain_sampling_follows_the_softmax() {
    let shares = [0.4, 0.3, 0.2, 0.06, 0.04];
    check_distribution(&counts(PLAIN, &logits_of(&shares), 20_000), &shares);
}

#[test]
fn temperature_sharpens_and_flattens() {
    let logits = logits_of(&[0.5, 0.3, 0.2]);
    let cold = SamplingConfig {
        temperature: 0.5,
        ..PLAIN
    };
    check_distribution(&counts(cold, &logits, 20_000), &[0.25, 0.09, 0.04]);
    let hot = SamplingConfig {
        temperature: 1e30,
        ..PLAIN
    };
    check_distribution(&counts(hot, &logits, 20_000), &[1.0, 1.0, 1.0]);
}

#[test]
fn a_temperature_near_zero_is_as_good_as_greedy() {
    for temperature in [1e-9, f64::MIN_POSITIVE, 5e-324] {
        let config = SamplingConfig {
            temperature,
            ..PLAIN
        };
        assert_eq!(draws(config, &[-1e30, 4.0, 3.9, 1.0], 20), [1; 20]);
    }
}

#[test]
fn top_k_keeps_the_highest_and_of_equals_the_lowest_ids() {
    let config = SamplingConfig {
        top_k: Some(3),
        ..PLAIN
    };
    let logits = logits_of(&[0.1, 0.1, 0.4, 0.1, 0.3]);
    check_distribution(&counts(config, &logits, 20_000), &[0.1, 0.0, 0.4, 0.0, 0.3]);
}

/// A sign of 0 is no difference: ordered by its bits, -0 would lose to 0 of a higher id.
#[test]
fn top_k_takes_both_zeros_for_equal() {
    let config = SamplingConfig {
        top_k: Some(2),
        ..PLAIN
    };
    let logits = [-0.0, 0.0, 0.0, -5.0];
    check_distribution(&counts(config, &logits, 20_000), &[0.5, 0.5, 0.0, 0.0]);
    let ids: Vec<u32> = top_logprobs(&logits, 2)
        .unwrap()
        .iter()
        .map(|(id, _)| *id)
        .collect();
    assert_eq!(ids, [0, 1]);
}

#[test]
fn top_p_keeps_the_smallest_set_that_reaches_it() {
    let logits = logits_of(&[0.05, 0.5, 0.15, 0.3]);
    let keep = |top_p| counts(SamplingConfig { top_p, ..PLAIN }, &logits, 20_000);
    check_distribution(&keep(0.75), &[0.0, 0.5, 0.0, 0.3]);
    check_distribution(&keep(0.9), &[0.0, 0.5, 0.15, 0.3]);
    check_distribution(&keep(1e-12), &[0.0, 1.0, 0.0, 0.0]);
}

/// Top-p looks at what top-k left: of 0.5, 0.3, the first makes up 0.625.
#[test]
fn top_p_shares_out_what_top_k_left() {
    let logits = logits_of(&[0.2, 0.5, 0.3]);
    let config = SamplingConfig {
        top_k: Some(2),
        top_p: 0.6,
        ..PLAIN
    };
    check_distribution(&counts(config, &logits, 1000), &[0.0, 1.0, 0.0]);
    let config = SamplingConfig {
        top_k: Some(2),
        top_p: 0.65,
        ..PLAIN
    };
    check_distribution(&counts(config, &logits, 20_000), &[0.0, 0.5, 0.3]);
}

#[test]
fn minus_infinity_is_never_drawn() {
    let logits = [f32::NEG_INFINITY, 0.0, f32::NEG_INFINITY, 0.0];
    check_distribution(&counts(PLAIN, &logits, 10_000), &[0.0, 1.0, 0.0, 1.0]);
    let config = SamplingConfig {
        top_k: Some(3),
        top_p: 0.99,
        ..PLAIN
    };
    check_distribution(&counts(config, &logits, 10_000), &[0.0, 1.0, 0.0, 1.0]);
}

#[test]
fn a_seed_and_a_sequence_number_fix_the_stream() {
    let logits = vec![0.0; 1000];
    let draw = |seed, sequence| {
        let config = SamplingConfig { seed, ..PLAIN };
        let mut sampler = Sampler::for_sequence(config, sequence).unwrap();
        (0..8)
            .map(|_| sampler.sample(&logits).unwrap())
            .collect::<Vec<_>>()
    };
    // Written down: a seed keeps its meaning from release to release.
    assert_eq!(draw(7, 3)[..2], [982, 60]);
    assert_eq!(draw(7, 0), draw(7, 0));
    let streams = [
        draw(7, 0),
        draw(7, 1),
        draw(8, 0),
        draw(8, 1),
        draw(1 << 32, 0),
    ];
    for (i, one) in streams.iter().enumerate() {
        assert!(
            streams[..i].iter().all(|other| other != one),
            "stream {i} is taken twice"
        );
    }
}

#[test]
fn impossible_configurations_are_refused() {
    let refuse = |config| Sampler::new(config).unwrap_err().to_string();
    for (temperature, shown) in [(-0.1, "-0.1"), (f64::NAN, "NaN"), (f64::INFINITY, "inf")] {
        assert_eq!(
            refuse(SamplingConfig {
                temperature,
                ..PLAIN
            }),
            format!("temperature is {shown}: expected a finite number, 0 (greedy) or above")
        );
    }
    for (top_p, shown) in [(0.0, "0"), (1.5, "1.5"), (-1.0, "-1"), (f64::NAN, "NaN")] {
        assert_eq!(
            refuse(SamplingConfig { top_p, ..PLAIN }),
            format!("top_p is {shown}: expected above 0 and at most 1")
        );
    }
    assert_eq!(
        refuse(SamplingConfig {
            top_k: Some(0),
            ..PLAIN
        }),
        "top_k is 0: expected 1 or above, or none for all tokens"
    );
}

/// A NaN compares with nothing: a maximum search may skip it or stick to it. Neither is an answer.
#[test]
fn broken_logits_are_refused_by_every_method() {
    for config in [
        SamplingConfig::GREEDY,
        PLAIN,
        SamplingConfig {
            top_k: Some(1),
            ..PLAIN
        },
    ] {
        let mut sampler = Sampler::new(config).unwrap();
        let error = sampler.sample(&[0.0, f32::NAN, 9.0]).unwrap_err();
        assert!(
            matches!(error, SamplerError::BadLogit { id: 1, .. }),
            "{error}"
        );
        let error = sampler.sample(&[0.0, 1.0, f32::INFINITY]).unwrap_err();
        assert!(
            matches!(error, SamplerError::BadLogit { id: 2, .. }),
            "{error}"
        );
        assert_eq!(sampler.sample(&[]), Err(SamplerError::NoLogits));
        let error = sampler.sample(&[f32::NEG_INFINITY; 2]).unwrap_err();
        assert_eq!(error, SamplerError::NothingAllowed { tokens: 2 });
    }
}

#[test]
fn log_probabilities_are_exact_at_the_extremes() {
    let log_probability = |logits: &[f32], id| log_softmax_at(logits, id).unwrap();
    assert!((log_probability(&[0.0, 0.0], 1) + std::f32::consts::LN_2).abs() < 1e-7);
    assert!(log_probability(&[3e38, -3e38], 0).abs() < 1e-30);
    assert!((log_probability(&[1000.0, 0.0], 1) + 1000.0).abs() < 1e-3);
    assert_eq!(
        log_probability(&[0.0, f32::NEG_INFINITY], 1),
        f32::NEG_INFINITY
    );
    // A million equal terms: a sum in f32 would be off in the third digit.
    let even = vec![-5.0; 1_000_000];
    assert!((log_probability(&even, 9) + 1e6_f32.ln()).abs() < 1e-6);
}

#[test]
fn broken_logits_have_no_log_probabilities() {
    insta::assert_snapshot!(log_softmax_at(&[0.0, f32::NAN], 0).unwrap_err(), @"the logit of token 1 is NaN: expected a number below infinity");
    insta::assert_snapshot!(log_softmax_at(&[f32::INFINITY, 0.0], 1).unwrap_err(), @"the logit of token 0 is inf: expected a number below infinity");
    insta::assert_snapshot!(log_softmax_at(&[0.0, 1.0], 2).unwrap_err(), @"expected a token below 2, one of those with a logit, got 2");
    insta::assert_snapshot!(log_softmax_at(&[f32::NEG_INFINITY; 2], 0).unwrap_err(), @"the logits of all 2 tokens are minus infinity: no token is allowed");
    for broken in [
        &[1.0, f32::NAN, 2.0][..],
        &[f32::INFINITY, 0.0],
        &[f32::NEG_INFINITY; 2],
        &[],
    ] {
        let refused = log_softmax_at(broken, 0).unwrap_err();
        // Compared as text: a NaN is not equal to itself.
        let also = top_logprobs(broken, 2).unwrap_err();
        assert_eq!(also.to_string(), refused.to_string());
    }
}

#[test]
fn top_log_probabilities_are_in_order() {
    let logits = logits_of(&[0.1, 0.4, 0.1, 0.4]);
    let ids = |k| {
        top_logprobs(&logits, k)
            .unwrap()
            .iter()
            .map(|(id, _)| *id)
            .collect::<Vec<_>>()
    };
    assert_eq!(ids(3), [1, 3, 0]);
    assert_eq!(ids(9), [1, 3, 0, 2]);
    assert!(ids(0).is_empty());
    for (id, value) in top_logprobs(&logits, 4).unwrap() {
        assert!((value - log_softmax_at(&logits, id).unwrap()).abs() < 1e-7);
    }
}

fn any_logits() -> impl Strategy<Value = Vec<f32>> {
    let logit = prop_oneof![8 => -30.0..30.0_f32, 1 => Just(0.0), 1 => Just(f32::NEG_INFINITY)];
    prop::collection::vec(logit, 1..80).prop_filter("a token must be allowed", |row| {
        row.iter().any(|logit| logit.is_finite())
    })
}

proptest! {
    /// Filters that keep every token leave each single draw as it is.
    #[test]
    fn filters_that_keep_everything_change_nothing(logits in any_logits(), seed: u64) {
        let plain = SamplingConfig { seed, ..PLAIN };
        let wide = SamplingConfig { top_k: Some(logits.len()), top_p: 1.0, ..plain };
        prop_assert_eq!(draws(plain, &logits, 20), draws(wide, &logits, 20));
    }

    /// Whatever is drawn ranks among the k highest, and the tokens ranked above it make up less
    /// than the share.
    #[test]
    fn drawn_tokens_pass_the_filters(
        logits in any_logits(),
        seed: u64,
        k in 1..20_usize,
        top_p in 0.01..=1.0_f64,
        temperature in 0.1..4.0_f64,
    ) {
        let config = SamplingConfig { temperature, top_k: Some(k), top_p, seed };
        let scaled: Vec<f32> = logits.iter().map(|l| (f64::from(*l) / temperature) as f32).collect();
        let kept = top_logprobs(&scaled, k).unwrap();
        let total: f64 = kept.iter().map(|(_, log)| f64::from(*log).exp()).sum();
        for id in draws(config, &logits, 20) {
            let place = kept.iter().position(|(other, _)| *other == id);
            let place = place.expect("the token is among the k highest");
            let above: f64 = kept[..place].iter().map(|(_, log)| f64::from(*log).exp()).sum();
            prop_assert!(above < top_p * total + 1e-5, "{above} of {total} rank higher");
        }
    }

    #[test]
    fn log_probabilities_add_up_to_one(logits in any_logits()) {
        let sum: f64 = top_logprobs(&logits, logits.len()).unwrap().iter().map(|(_, l)| f64::from(*l).exp()).sum();
        prop_assert!((sum - 1.0).abs() < 1e-5, "{sum}");
    }
}

/// Logits are compared many at a time: the first of the highest is found wherever it stands, and so is the
/// first that is no number.
#[test]
fn the_highest_logit_is_found_in_any_place() {
    let value = prop_oneof![
        8 => (-3i8..3).prop_map(f32::from),
        4 => Just(f32::NEG_INFINITY),
        1 => Just(f32::NAN),
        1 => Just(f32::INFINITY),
    ];
    let finite = (-3i8..3).prop_map(f32::from);
    let some = prop::collection::vec(finite, 1..300);
    let few_odd = prop::collection::vec((any::<prop::sample::Index>(), value), 0..3);
    proptest!(|(mut logits in some, odd in few_odd)| {
        for (at, value) in odd {
            let at = at.index(logits.len());
            logits[at] = value;
        }
        let bad = logits.iter().position(|x| x.is_nan() || *x == f32::INFINITY);
        let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        match (argmax(&logits), bad) {
            (Err(SamplerError::BadLogit { id, .. }), Some(bad)) => prop_assert_eq!(id as usize, bad),
            (Err(SamplerError::NothingAllowed { .. }), None) => prop_assert_eq!(highest, f32::NEG_INFINITY),
            (Ok(id), None) => {
                prop_assert_eq!(Some(id as usize), logits.iter().position(|x| *x == highest));
            }
            (got, bad) => prop_assert!(false, "{got:?}, {bad:?}"),
        }
    });
}
