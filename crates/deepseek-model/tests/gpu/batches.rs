//! Packed batches: each request gets the result of its lone run on the CPU, up to summation order and
//! without cache rounding.

use candle_core::DType;
use deepseek_model::ReplayPolicy;
use proptest::prelude::*;

use crate::common::scripts::{Script, lone, packed, script};
use crate::common::{assert_close, load, load_on};
use crate::{gpu, small};

/// Two implementations, and sums in other orders.
const TOLERANCE: f32 = 1e-3;

/// Prefill chunks, decode rows and kept prompts in any mix and order, in a cache full of NaN (BR-12).
#[test]
fn any_mix_of_requests_gives_each_its_own_result() {
    let (cpu, model) = (
        load("engram-s1", false),
        load_on(&gpu(), DType::F32, "engram-s1", false),
    );
    let cases = if small() { 1 } else { 12 };
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(cases));
    let inputs = (
        prop::collection::vec(script(), 1..5),
        prop::collection::vec(1u8..16, 0..8),
    );
    let check = |(scripts, schedule): (Vec<Script>, Vec<u8>)| {
        for policy in ReplayPolicy::ALL {
            let got = packed(&model, &scripts, policy, &schedule);
            for (i, script) in scripts.iter().enumerate() {
                for (step, want) in lone(&cpu, script, policy).iter().enumerate() {
                    let what = format!("{policy} request {i} step {step}");
                    assert_close(&what, &got[i][step], want, TOLERANCE);
                }
            }
        }
        Ok(())
    };
    runner.run(&inputs, check).unwrap();
}
