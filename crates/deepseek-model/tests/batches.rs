//! A packed batch gives each request the result of its lone run, whatever it is packed with: up to
//! summation order, and without cache rounding, which turns a difference in the last bit into a step
//! to the next value of a format now and then.

mod common;

use std::sync::LazyLock;

use common::scripts::{Script, TOLERANCE, lone, packed, script};
use common::{assert_close, load};
use deepseek_model::{Model, ReplayPolicy};
use proptest::prelude::*;

static MODEL: LazyLock<Model> = LazyLock::new(|| load("engram-s1", false));

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Prefill chunks, decode rows and kept prompts in any mix and order, in a cache full of NaN.
    #[test]
    fn any_mix_of_requests_gives_each_its_own_result(
        scripts in prop::collection::vec(script(), 1..5),
        schedule in prop::collection::vec(1u8..16, 0..8),
    ) {
        for policy in ReplayPolicy::ALL {
            let got = packed(&MODEL, &scripts, policy, &schedule);
            for (i, script) in scripts.iter().enumerate() {
                for (step, want) in lone(&MODEL, script, policy).iter().enumerate() {
                    assert_close(&format!("{policy} request {i} step {step}"), &got[i][step], want, TOLERANCE);
                }
            }
        }
    }
}

/// The order of the requests in a step changes nothing, and neither does taking turns.
#[test]
fn every_order_of_three_requests_gives_the_same() {
    let tokens: Vec<u32> = (0..48).map(|i| 3 + i * 5 % 270).collect();
    let scripts = [
        Script {
            tokens: tokens.clone(),
            steps: vec![20, 1, 1],
            prompt_len: 20,
            keeps_rows: false,
        },
        Script {
            tokens: tokens[7..].to_vec(),
            steps: vec![6, 1],
            prompt_len: 6,
            keeps_rows: true,
        },
        Script {
            tokens: tokens[3..].to_vec(),
            steps: vec![16, 9, 1],
            prompt_len: 25,
            keeps_rows: false,
        },
    ];
    for policy in ReplayPolicy::ALL {
        let want: Vec<_> = scripts.iter().map(|s| lone(&MODEL, s, policy)).collect();
        for order in [
            [0, 1, 2],
            [0, 2, 1],
            [1, 0, 2],
            [1, 2, 0],
            [2, 0, 1],
            [2, 1, 0],
        ] {
            let permuted: Vec<Script> = order.iter().map(|&i| scripts[i].clone()).collect();
            for schedule in [&[7u8, 7, 7][..], &[1, 2, 4, 1, 2, 4, 1, 4]] {
                let got = packed(&MODEL, &permuted, policy, schedule);
                for (at, &i) in order.iter().enumerate() {
                    for (step, want) in want[i].iter().enumerate() {
                        assert_close(
                            &format!("{policy} {order:?} {i}.{step}"),
                            &got[at][step],
                            want,
                            TOLERANCE,
                        );
                    }
                }
            }
        }
    }
}
