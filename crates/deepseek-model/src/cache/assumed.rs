//! Contexts that nobody computed, for benchmarks of what comes after them.

use super::{CacheError, KvCache, SequenceId};
use crate::{Result, draw::Draw};

impl KvCache {
    /// Overwrites every slot of every layer with random values of the order of 1, as keys and values
    /// are.
    ///
    /// # Errors
    /// If a device operation fails.
    pub fn fill_random(&mut self, seed: u64) -> Result<()> {
        self.pool.forget_idle();
        let mut tensors = Vec::new();
        for layer in self.storage.layers.iter() {
            tensors.push(layer.window.data());
            if let Some(source) = &layer.source {
                tensors.extend([source.entries.data(), source.index_keys.data()]);
                tensors.extend(source.pending.iter().flatten().map(super::RowRing::data));
            }
        }
        if let Some(first) = tensors.first() {
            let mut draw = Draw::new(first.device(), seed)?;
            for tensor in tensors {
                draw.fill(tensor, (0.0, 1.0))?;
            }
        }
        Ok(())
    }

    /// Lets a sequence of no tokens have `len` of them, without a step: their keys and values are what
    /// the cache holds in their places, random after [`Self::fill_random`]. A model with n-gram tables
    /// takes the places before the next token for ones before the text.
    ///
    /// # Errors
    /// If the cache does not hold the sequence, the sequence has tokens, or `len` exceeds the model's
    /// positions or the free pages.
    pub fn assume(&mut self, id: SequenceId, len: usize) -> Result<()> {
        let max_positions = self.sequences.max_positions();
        let sequence = self.sequences.get_mut(id)?;
        if sequence.len > 0 {
            let len = sequence.len;
            return Err(CacheError::NotEmpty { id, len }.into());
        }
        if len > max_positions {
            return Err(CacheError::PromptTooLong {
                prompt_len: len,
                max_positions,
            }
            .into());
        }
        self.pool.check(self.pool.missing(len, 0))?;
        self.pool.grow(&mut sequence.pages, len);
        sequence.len = len;
        // Nobody knows of which text.
        sequence.published = None;
        Ok(())
    }
}
