//! Checks of runs with cache rounding against the reference, the same on every device.

use std::num::NonZeroU32;

use deepseek_model::{CacheOptions, LogitRows, Model, ReplayPolicy, SequenceOptions, StepRequest};

use super::reference::{CHUNKINGS, POLICIES, keeping};
use super::{Expected, Lone, assert_close, difference, flat};

/// Ways to cut the prompt whose sums run in different orders, so that each is another draw of the
/// last bits.
const DRAWS: [&[usize]; 6] = [&[80], &[20; 4], &[5; 16], &[1; 80], &[40; 2], &[10; 8]];

/// Rows of another request in each chunk's step: with them it has few rows, or more than that.
const BESIDE: [usize; 3] = [1, 8, 33];

/// Whether a run reproduces every row `[row, width]` to within its spread: how far the reference itself
/// moves under last-bit noise on the weights. A row whose spread is infinite follows a changed id, and
/// nothing can be said of it.
///
/// With cache rounding a difference in the last bit can flip a rounding bin, and from there a choice
/// of entries or experts: about one flip in two runs of this size, in the reference as in any other f32
/// implementation, and on every kind of CPU in others of them. So of several runs that round
/// differently one must reproduce all rows; rows are not taken from here and there.
fn reproduces(got: &[f32], want: &[f32], spread: &[f32], tolerance: f32) -> bool {
    let width = want.len() / spread.len();
    let rows = want.chunks(width).zip(got.chunks(width)).zip(spread);
    rows.filter(|(_, spread)| spread.is_finite())
        .all(|((want, got), spread)| difference(got, want) <= tolerance + 3.0 * spread)
}

/// Every row of `quant.*`, to `tolerance` beside its spread.
pub fn check_quantised(model: &Model, expected: &Expected, tolerance: f32) {
    let tokens = expected.ids("tokens");
    let (want, spread) = (
        expected.f32s("quant.off.logits"),
        expected.f32s("quant.spread.off.logits"),
    );
    let found = DRAWS.iter().any(|chunks| {
        let mut run = keeping(model, tokens.len());
        let (mut start, mut logits) = (0, Vec::new());
        for n in *chunks {
            logits.extend(run.step(&tokens[start..start + n], LogitRows::All));
            start += n;
        }
        reproduces(&logits, &want, &spread, tolerance)
    });
    assert!(found, "quant.off.logits: no run reproduces every row");
    let short = expected.ids("short_tokens");
    let logits = keeping(model, short.len()).step(&short, LogitRows::All);
    assert_close(
        "quant.short",
        &logits,
        &expected.f32s("quant.short.logits"),
        tolerance,
    );
    for (policy_name, policy) in POLICIES {
        for (label, chunks) in CHUNKINGS {
            let policy = (policy_name, policy);
            check_quantised_policy((model, tolerance), expected, policy, (label, chunks));
        }
    }
}

/// 16 greedy steps with cache rounding, and where the reference has them, their logits: one run gives
/// its ids and its rows.
fn check_quantised_policy(
    (model, tolerance): (&Model, f32),
    expected: &Expected,
    (policy_name, policy): (&str, ReplayPolicy),
    (label, chunks): (&str, &[usize]),
) {
    let what = format!("quant.{policy_name}.{label}");
    let tokens = expected.ids("tokens");
    let last = expected.f32s(&format!("{what}.last"));
    let ids = expected.ids(&format!("{what}.ids"));
    let spread = expected.f32s(&format!("quant.spread.{policy_name}.{label}"));
    let has_steps = expected.names().contains(&format!("{what}.steps"));
    let steps = if has_steps {
        expected.f32s(&format!("{what}.steps"))
    } else {
        last.clone()
    };
    let sure = spread.iter().take_while(|s| s.is_finite()).count();
    let spread = if has_steps { &spread } else { &spread[..1] };
    // Other chunkings are other draws of the same value, except under `StepTail`, where one chunk
    // is `PromptTail` in any chunking and several chunks are a value of their own. Those are drawn
    // again beside rows of another request, with which products sum in another order.
    let draws: Vec<(ReplayPolicy, &[usize])> = match (policy, label) {
        (ReplayPolicy::StepTail, "one") => {
            DRAWS.map(|draw| (ReplayPolicy::PromptTail, draw)).to_vec()
        }
        (ReplayPolicy::StepTail, _) => Vec::new(),
        _ => DRAWS.map(|draw| (policy, draw)).to_vec(),
    };
    let beside = if draws.is_empty() { &BESIDE[..] } else { &[] };
    let alone = std::iter::once((policy, chunks)).chain(draws);
    let mut runs = alone
        .map(|(policy, chunks)| (policy, chunks, 0))
        .chain(beside.iter().map(|others| (policy, chunks, *others)));
    let found = runs.any(|(policy, chunks, others)| {
        let (mut run, first) = prefill_beside(model, policy, &tokens, chunks, others);
        let (got_ids, got) = run.generate(first, 16);
        got_ids[..sure] == ids[..sure] && reproduces(&got[..steps.len()], &steps, spread, tolerance)
    });
    assert!(found, "{what}: no run gives the reference's ids and rows");
}

/// A prompt in chunks, `others` rows of another request beside each; the logits of its last row.
fn prefill_beside<'a>(
    model: &'a Model,
    policy: ReplayPolicy,
    tokens: &[u32],
    chunks: &[usize],
    others: usize,
) -> (Lone<'a>, Vec<f32>) {
    let cache = model.new_cache(CacheOptions {
        max_sequences: 2,
        max_tokens: 2 * model.config().max_positions,
        page_tokens: CacheOptions::PAGE_TOKENS,
        policy,
        sampled_rows: NonZeroU32::MIN,
    });
    let mut cache = cache.unwrap();
    let options = |prompt_len| SequenceOptions {
        prompt_len,
        keeps_rows: false,
    };
    let id = cache.add(options(tokens.len())).unwrap();
    let other = cache.add(options(others.max(1) * chunks.len())).unwrap();
    let beside: Vec<_> = tokens.iter().rev().copied().cycle().take(others).collect();
    let (mut start, mut last) = (0, Vec::new());
    for &n in chunks {
        let mut requests = vec![StepRequest {
            sequence: id,
            tokens: &tokens[start..start + n],
            logits: LogitRows::None,
        }];
        start += n;
        if start == tokens.len() {
            requests[0].logits = LogitRows::Last;
        }
        if others > 0 {
            requests.push(StepRequest {
                sequence: other,
                tokens: &beside,
                logits: LogitRows::None,
            });
        }
        last = flat(&model.forward(&requests, &mut cache).unwrap().logits);
    }
    (Lone { model, cache, id }, last)
}
