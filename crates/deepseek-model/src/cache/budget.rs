//! Caches by the memory that they may take.

use std::num::NonZeroU32;

use candle_core::DType;
use replay_core::ReplayPolicy;

use super::{CacheError, CacheOptions, size::Sizes};
use crate::{Config, Result};

/// The memory that a cache may take, and what it must hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvBudget {
    /// Bytes on the device: what weights, graphs and the workspace of a step leave.
    pub bytes: u64,
    /// As [`CacheOptions::max_sequences`].
    pub max_sequences: usize,
    /// Tokens over all sequences that there must be room for at least.
    pub min_tokens: usize,
    /// As [`CacheOptions::page_tokens`].
    pub page_tokens: usize,
    /// As [`CacheOptions::policy`].
    pub policy: ReplayPolicy,
    /// As [`CacheOptions::sampled_rows`].
    pub sampled_rows: NonZeroU32,
}

impl CacheOptions {
    /// A cache for as many tokens as the budget holds, in whole pages, but no more than its
    /// sequences can have. Values are held as `dtype`, as by [`KvCache::new`](super::KvCache::new).
    ///
    /// # Errors
    /// [`CacheError::NoMemory`] if the budget does not hold the tokens that it must; it says how many
    /// it holds. Or a count is 0, or a field of `config` was set to what no file may hold.
    pub fn for_budget(config: &Config, dtype: DType, budget: KvBudget) -> Result<Self> {
        let mut options = Self {
            max_sequences: budget.max_sequences,
            max_tokens: budget.min_tokens,
            page_tokens: budget.page_tokens,
            policy: budget.policy,
            sampled_rows: budget.sampled_rows,
        };
        let needed = options.bytes(config, dtype)?;
        let sizes = Sizes::new(config, dtype, options.page_tokens)
            .ok_or_else(|| options.unaddressable(|_| false))?;
        if needed > budget.bytes {
            return Err(options.no_memory(&sizes, needed, budget.bytes).into());
        }
        let fits = sizes.tokens_in(budget.bytes, budget.max_sequences);
        let most = budget.max_sequences.saturating_mul(config.max_positions);
        options.max_tokens = fits.min(most).max(budget.min_tokens);
        Ok(options)
    }

    /// Bytes of the device that such a cache takes for a model of this configuration, with values
    /// held as `dtype`: window rings, pages of compressed entries and index keys, and open groups.
    ///
    /// # Errors
    /// If an option is 0, a field of `config` was set to what no file may hold, or there are more
    /// rows or bytes than can be addressed.
    pub fn bytes(&self, config: &Config, dtype: DType) -> Result<u64> {
        self.check_counts()?;
        config.check_bounds()?;
        let sized = |tokens| {
            let sizes = Sizes::new(config, dtype, self.page_tokens)?;
            let pages = sizes.pages(self.max_sequences, tokens)?;
            sizes.tensors(self.max_sequences, pages)
        };
        let bytes = sized(self.max_tokens);
        Ok(bytes.ok_or_else(|| self.unaddressable(|tokens| sized(tokens).is_some()))?)
    }

    /// Refuses counts of 0.
    pub(super) fn check_counts(&self) -> Result<(), CacheError> {
        let counts = [
            ("max_sequences", self.max_sequences),
            ("max_tokens", self.max_tokens),
            ("page_tokens", self.page_tokens),
        ];
        match counts.into_iter().find(|(_, value)| *value == 0) {
            Some((field, _)) => Err(CacheError::Empty { field }),
            None => Ok(()),
        }
    }
}
