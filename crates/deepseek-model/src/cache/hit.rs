//! Sequences that find the entries of their first pages in the cache, and leave theirs to later ones.
//!
//! Compressed KV and index keys are found again, window KV is not: the last rows before the end of the
//! hit are computed once more, with no window KV below them, and write window KV alone.

use replay_core::ReplayPolicy;

use super::{KvCache, PagePool, Sequence, SequenceId, SequenceOptions, prefix::Parent};
use crate::Result;

/// What is known of a sequence's text.
#[derive(Debug, Clone)]
pub(crate) struct Published {
    /// The last page that is known, or what stands for it.
    last: Parent,
    /// Tokens behind that page.
    tokens: Vec<u32>,
}

/// Which cached entries a prompt may take over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrefixOptions {
    /// Whatever else the entries depend on: texts of different salts share nothing.
    pub salt: u64,
    /// Tokens that are taken over at most; 0 finds nothing, but is found later.
    pub at_most: usize,
}

impl Default for PrefixOptions {
    fn default() -> Self {
        Self {
            salt: 0,
            at_most: usize::MAX,
        }
    }
}

/// Entries that a new sequence found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CachedPrefix {
    /// Tokens at the beginning of the text whose compressed KV and index keys are there.
    pub tokens: usize,
    /// The position that its first step begins at: rows from here to `tokens` are computed again.
    pub start: usize,
}

impl KvCache {
    /// Adds a sequence that may read what other sequences have written of the same text, and whose
    /// own pages others may read: `prompt` are the tokens of its prompt.
    ///
    /// [`Self::len`] of the new sequence is [`CachedPrefix::start`]; its first step takes the tokens
    /// from there on.
    ///
    /// Whole pages are found, and no row is among them that may be read: the last
    /// [`CacheOptions::sampled_rows`](super::CacheOptions::sampled_rows) of the prompt. How many rows are
    /// computed again depends on the policy:
    ///
    /// - Under `StepTail` and `PromptTail` it is a window's, `W`. They are computed without the window
    ///   KV that was below them, so results are close to those of a sequence that found nothing, and
    ///   the pages that they lead to are too. A hit of `W` tokens or fewer is not adopted.
    /// - Under `Off` and `Exact` it is as many as it takes for results to equal those of a sequence
    ///   that found nothing, up to rounding. A row of a layer reads the `W - 1` rows before it; so the
    ///   first layer runs `W - 1` rows more than the second, and so on, down to the first row that a
    ///   layer's results are needed of. Through `n` layers that is `n · (W - 1)` rows.
    ///
    /// A sequence of which every row is read finds nothing.
    ///
    /// # Errors
    /// As [`Self::add`].
    pub fn add_prompt(
        &mut self,
        prompt: &[u32],
        keeps_rows: bool,
        prefix: PrefixOptions,
    ) -> Result<(SequenceId, CachedPrefix)> {
        let PrefixOptions { salt, at_most } = prefix;
        let options = SequenceOptions {
            prompt_len: prompt.len(),
            keeps_rows,
        };
        let id = self.sequences.add(options)?;
        let page_tokens = self.pool.page_tokens();
        let mut pages = Vec::new();
        if !keeps_rows {
            let whole = &prompt[..at_most.min(self.findable(prompt.len()))];
            pages = self.pool.prefixes.find(salt, whole, page_tokens);
        }
        let hit = pages.len() * page_tokens;
        let start = self.rerun_from(hit, prompt.len()).unwrap_or(0);
        // Without a row that is spared, a hit is not worth the rows' being computed apart.
        if start == 0 {
            pages.clear();
        }
        let found = CachedPrefix {
            tokens: pages.len() * page_tokens,
            start,
        };
        self.pool.prefixes.hold(&pages);
        let lookback = self.lookback();
        let sequence = self.sequences.get_mut(id)?;
        sequence.published = Some(Published {
            last: pages
                .last()
                .map_or(Parent::Salt(salt), |&p| Parent::Page(p)),
            tokens: Vec::new(),
        });
        sequence.tail = prompt[start.saturating_sub(lookback)..start].to_vec();
        sequence.pages = pages;
        (sequence.len, sequence.kv_start) = (start, start);
        sequence.shared = found.tokens;
        Ok((id, found))
    }

    /// Pages that no sequence holds, each of [`Self::page_tokens`] tokens.
    pub fn free_pages(&self) -> usize {
        self.pool.available()
    }

    /// Pages that a sequence needs beyond its own to have so many tokens.
    ///
    /// # Errors
    /// If the cache does not hold it.
    pub(crate) fn missing_pages(&self, id: SequenceId, tokens: usize) -> Result<usize> {
        let held = self.held_pages(id)?;
        Ok(self.pool.missing(tokens, held))
    }

    /// Pages of a sequence.
    ///
    /// # Errors
    /// If the cache does not hold it.
    pub(crate) fn held_pages(&self, id: SequenceId) -> Result<usize> {
        Ok(self.sequences.get(id)?.pages.len())
    }

    /// Tokens of a page.
    pub fn page_tokens(&self) -> usize {
        self.pool.page_tokens()
    }

    /// Whether a sequence that finds entries gives what one gives that finds none.
    pub(crate) fn rebuilds_exactly(&self) -> bool {
        matches!(self.policy(), ReplayPolicy::Off | ReplayPolicy::Exact)
    }

    /// Whether others may find the pages that a sequence fills; `false` for one that is not there.
    pub(crate) fn publishes(&self, id: SequenceId) -> bool {
        let sequence = self.sequences.get(id);
        sequence.is_ok_and(|sequence| sequence.published.is_some())
    }

    /// Tokens that a prompt is spared whose first `known` tokens others have computed; what
    /// [`CachedPrefix::start`] would be.
    pub(crate) fn spared(&self, known: usize, prompt_len: usize) -> usize {
        let known = known.min(self.findable(prompt_len));
        let hit = known - known % self.page_tokens();
        self.rerun_from(hit, prompt_len).unwrap_or(0)
    }

    /// Tokens of a prompt that may be found: none is among them of which a row may be read.
    fn findable(&self, prompt_len: usize) -> usize {
        prompt_len.saturating_sub(self.planner.sampled_rows())
    }

    /// Where a prompt has to be computed from after a hit of so many tokens; `None` if that is before
    /// its beginning.
    fn rerun_from(&self, hit: usize, prompt_len: usize) -> Option<usize> {
        let reach = self.config.sliding_window - 1;
        match self.policy() {
            ReplayPolicy::StepTail | ReplayPolicy::PromptTail => hit.checked_sub(reach + 1),
            ReplayPolicy::Off => hit.checked_sub(self.config.layers.len() * reach),
            ReplayPolicy::Exact => {
                // What the cut reads: all rows that run in it, and the window before the first.
                let tail = self
                    .planner
                    .first_row_of_cut(prompt_len)
                    .checked_sub(reach)?;
                let layers = self.config.replay_layers().ok()?.first() as usize;
                hit.min(tail).checked_sub(layers * reach)
            }
        }
    }

    /// Token ids that a step's n-grams reach back to.
    pub(super) fn lookback(&self) -> usize {
        self.config.engram.as_ref().map_or(0, |e| e.max_ngram - 1)
    }
}

impl PagePool {
    /// Makes the pages known that a step's tokens fill, before they are counted. `exact`: whether
    /// entries of the same text are the same whatever was found in the cache.
    pub(super) fn publish(&mut self, sequence: &mut Sequence, tokens: &[u32], exact: bool) {
        let Some(published) = &mut sequence.published else {
            return;
        };
        let page_tokens = self.page_tokens();
        // Tokens of shared pages were known before.
        let rebuilt = sequence.shared.saturating_sub(sequence.len);
        let mut page = (sequence.len.max(sequence.shared)) / page_tokens;
        for &token in tokens.get(rebuilt..).unwrap_or_default() {
            published.tokens.push(token);
            if published.tokens.len() < page_tokens {
                continue;
            }
            let own = sequence.pages[page];
            let same = self
                .prefixes
                .publish(published.last, &published.tokens, own);
            match same {
                Ok(()) => {}
                // Another sequence was first: what it wrote is the same.
                Err(known) if exact => {
                    self.prefixes.hold(&[known]);
                    self.free(vec![own]);
                    sequence.pages[page] = known;
                }
                // What it wrote comes close, and this text would change by it. What follows would hang
                // on a page that this sequence does not hold.
                Err(_) => {
                    sequence.published = None;
                    return;
                }
            }
            published.last = Parent::Page(sequence.pages[page]);
            published.tokens.clear();
            page += 1;
        }
    }
}
