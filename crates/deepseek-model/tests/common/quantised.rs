//! Checks of runs with cache rounding against the reference, the same on every device.

use deepseek_model::{LogitRows, Model, ReplayPolicy};

use super::reference::{CHUNKINGS, POLICIES, keeping};
use super::{Expected, Lone, assert_close, difference};

/// Ways to cut the prompt whose sums run in different orders, so that each is another draw of the
/// last bits.
const DRAWS: [&[usize]; 6] = [&[80], &[20; 4], &[5; 16], &[1; 80], &[40; 2], &[10; 8]];

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
    // is `PromptTail` in any chunking and several chunks are a value of their own.
    let draws: Vec<(ReplayPolicy, &[usize])> = match (policy, label) {
        (ReplayPolicy::StepTail, "one") => {
            DRAWS.map(|draw| (ReplayPolicy::PromptTail, draw)).to_vec()
        }
        (ReplayPolicy::StepTail, _) => Vec::new(),
        _ => DRAWS.map(|draw| (policy, draw)).to_vec(),
    };
    let mut runs = std::iter::once((policy, chunks)).chain(draws);
    let found = runs.any(|(policy, chunks)| {
        let mut run = Lone::new(model, policy, tokens.len());
        let first = run.prefill(&tokens, chunks);
        let (got_ids, got) = run.generate(first, 16);
        got_ids[..sure] == ids[..sure] && reproduces(&got[..steps.len()], &steps, spread, tolerance)
    });
    assert!(found, "{what}: no run gives the reference's ids and rows");
}
