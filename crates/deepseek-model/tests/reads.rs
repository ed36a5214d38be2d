//! Reading more than a prompt's last output: which rows are there under which policy.

mod common;

use std::num::NonZeroU32;
use std::sync::LazyLock;

use common::{Expected, assert_close, flat, load};
use deepseek_model::{
    CacheOptions, Error, KvCache, LogitRows, Model, ReplayPolicy, SequenceId, SequenceOptions,
    StepError, StepRequest,
};

static MODEL: LazyLock<Model> = LazyLock::new(|| load("fp4-s1", false));

/// The window of the checkpoint.
const WINDOW: usize = 8;

/// Rows of its prompt.
const PROMPT: usize = 80;

const CHUNKINGS: [&[usize]; 3] = [&[80], &[25, 1, 30, 11, 4, 2, 7], &[23, 8, 38, 11]];

fn cache(policy: ReplayPolicy, sampled_rows: u32) -> (KvCache, SequenceId) {
    let options = CacheOptions {
        max_sequences: 1,
        max_tokens: 2 * PROMPT,
        page_tokens: CacheOptions::PAGE_TOKENS,
        policy,
        sampled_rows: NonZeroU32::new(sampled_rows).unwrap(),
    };
    let mut cache = MODEL.new_cache(options).unwrap();
    // Whoever reads a row that was dropped reads this.
    cache.fill(f32::NAN).unwrap();
    let sequence = SequenceOptions {
        prompt_len: PROMPT,
        keeps_rows: false,
    };
    let id = cache.add(sequence).unwrap();
    (cache, id)
}

/// The logits that the last chunk of a prefill gives.
fn prefill(
    policy: ReplayPolicy,
    sampled_rows: u32,
    chunks: &[usize],
    read: LogitRows,
) -> anyhow::Result<Vec<f32>> {
    let tokens = Expected::load("fp4-s1").ids("tokens");
    let (mut cache, sequence) = cache(policy, sampled_rows);
    let (mut start, mut last) = (0, Vec::new());
    for &rows in chunks {
        let tokens = &tokens[start..start + rows];
        start += rows;
        let logits = if start == PROMPT {
            read
        } else {
            LogitRows::None
        };
        let requests = [StepRequest {
            sequence,
            tokens,
            logits,
        }];
        last = flat(&MODEL.forward(&requests, &mut cache)?.logits);
    }
    Ok(last)
}

/// The last `rows` of the reference's logits of all rows.
fn reference(rows: usize) -> Vec<f32> {
    let all = Expected::load("fp4-s1").f32s("plain.off.logits");
    let width = all.len() / PROMPT;
    all[(PROMPT - rows) * width..].to_vec()
}

#[test]
fn a_tail_is_the_end_of_all_rows() {
    for rows in [1, 5, PROMPT] {
        let tail = prefill(ReplayPolicy::Off, 1, &[PROMPT], LogitRows::Tail(rows)).unwrap();
        assert_close(&format!("{rows} rows"), &tail, &reference(rows), 1e-4);
    }
    let more = prefill(ReplayPolicy::Off, 1, &[PROMPT], LogitRows::Tail(1000)).unwrap();
    assert_eq!(more.len(), reference(PROMPT).len());
    let none = prefill(ReplayPolicy::Off, 1, &[PROMPT], LogitRows::Tail(0)).unwrap();
    assert!(none.is_empty());
}

/// `Exact` widens its halo by the rows that are read, more than a window of them too.
#[test]
fn exact_rows_are_right_however_many_are_read() {
    for rows in [2, WINDOW, 13] {
        for chunks in CHUNKINGS {
            let rows = rows.min(*chunks.last().unwrap());
            let what = format!("{rows} rows of {chunks:?}");
            let tail = LogitRows::Tail(rows);
            let read = prefill(ReplayPolicy::Exact, rows as u32, chunks, tail).unwrap();
            assert_close(&what, &read, &reference(rows), 1e-4);
        }
    }
}

#[test]
fn the_rows_of_a_prompt_tail_do_not_depend_on_the_chunks() {
    // As many as the shortest last chunk has.
    let tail = LogitRows::Tail(7);
    let read = |chunks| prefill(ReplayPolicy::PromptTail, 7, chunks, tail).unwrap();
    let one = read(CHUNKINGS[0]);
    for chunks in &CHUNKINGS[1..] {
        assert_close(&format!("{chunks:?}"), &read(chunks), &one, 1e-4);
    }
}

/// A bounded policy keeps a window of rows for their KV. Those before the sampled ones have no window of
/// their own to read, so that their logits look right and are not.
#[test]
fn rows_before_the_sampled_ones_cannot_be_read() {
    use ReplayPolicy::{Exact, PromptTail, StepTail};
    let read = |policy, sampled: usize, rows| {
        let tail = LogitRows::Tail(rows);
        prefill(policy, sampled as u32, &[40, 40], tail).map(drop)
    };
    for (policy, sampled) in [
        (Exact, 1),
        (Exact, 3),
        (PromptTail, 1),
        (PromptTail, WINDOW),
        (PromptTail, 13),
        (StepTail, 1),
        (StepTail, 13),
    ] {
        read(policy, sampled, sampled).unwrap();
        let error = read(policy, sampled, sampled + 1).unwrap_err();
        let refusal = error.downcast_ref::<Error>();
        assert!(
            matches!(
                refusal,
                Some(Error::Step(StepError::ReadsDroppedRows { request: 0, .. }))
            ),
            "{policy} with {sampled} sampled rows: {error}"
        );
    }
}

/// A chunk that ends before the prompt has sampled rows if it ends among the prompt's last ones, and
/// these are there.
#[test]
fn sampled_rows_can_lie_in_a_chunk_before_the_last() {
    let tokens = Expected::load("fp4-s1").ids("tokens");
    let sampled = WINDOW as u32;
    let first_chunk = |policy, rows, logits| {
        let (mut cache, sequence) = cache(policy, sampled);
        let requests = [StepRequest {
            sequence,
            tokens: &tokens[..rows],
            logits,
        }];
        let output = MODEL.forward(&requests, &mut cache).ok()?;
        Some(flat(&output.logits))
    };
    for policy in [
        ReplayPolicy::Exact,
        ReplayPolicy::PromptTail,
        ReplayPolicy::StepTail,
    ] {
        let of = |rows, logits| first_chunk(policy, rows, logits);
        let read = of(PROMPT - 2, LogitRows::Tail(WINDOW - 2)).unwrap();
        assert!(read.iter().all(|logit| logit.is_finite()), "{policy}");
        of(PROMPT - WINDOW + 1, LogitRows::Last).unwrap();
        assert_eq!(of(PROMPT - WINDOW, LogitRows::Last), None, "{policy}");
        assert_eq!(of(PROMPT - 2, LogitRows::Tail(WINDOW - 1)), None);
        assert_eq!(of(PROMPT - 2, LogitRows::All), None, "{policy}");
        of(PROMPT - WINDOW, LogitRows::None).unwrap();
    }
}
