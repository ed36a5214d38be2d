//! The free list of pages.

use super::CacheError;

/// Pages not in use. A page is a number; storage of every KV source is indexed by it.
#[derive(Debug)]
pub(crate) struct PagePool {
    free: Vec<u32>,
    page_tokens: usize,
}

impl PagePool {
    pub(crate) fn new(pages: usize, page_tokens: usize) -> Self {
        // Popped from the end: low numbers first, so that a lone sequence is contiguous.
        Self {
            free: (0..pages as u32).rev().collect(),
            page_tokens,
        }
    }

    /// Tokens of one page.
    pub(crate) fn page_tokens(&self) -> usize {
        self.page_tokens
    }

    /// Pages that `tokens` tokens need beyond the `held` ones.
    pub(crate) fn missing(&self, tokens: usize, held: usize) -> usize {
        tokens.div_ceil(self.page_tokens).saturating_sub(held)
    }

    /// Whether `needed` pages are free.
    pub(crate) fn check(&self, needed: usize) -> Result<(), CacheError> {
        if needed > self.free.len() {
            return Err(CacheError::NoPages {
                needed,
                free: self.free.len(),
                page_tokens: self.page_tokens,
            });
        }
        Ok(())
    }

    /// Extends `pages` to hold `tokens` tokens.
    ///
    /// # Panics
    /// If [`Self::check`] would have failed.
    pub(crate) fn grow(&mut self, pages: &mut Vec<u32>, tokens: usize) {
        let needed = self.missing(tokens, pages.len());
        pages.extend((0..needed).map(|_| self.free.pop().expect("pages were checked")));
    }

    /// Takes pages back.
    pub(crate) fn free(&mut self, pages: Vec<u32>) {
        self.free.extend(pages.into_iter().rev());
    }
}
