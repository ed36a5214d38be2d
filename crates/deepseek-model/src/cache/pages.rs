//! Pages: the free list, and the lists of a step's requests.

use std::sync::OnceLock;

use candle_core::{Device, Result as CandleResult, Tensor};

use super::{CacheError, prefix::PrefixIndex};

/// Pages not in use, and what those hold that were. A page is a number; storage of every KV source is
/// indexed by it.
#[derive(Debug)]
pub(crate) struct PagePool {
    /// Pages whose entries are of no text that is known.
    free: Vec<u32>,
    pub(super) prefixes: PrefixIndex,
    page_tokens: usize,
}

impl PagePool {
    pub(crate) fn new(pages: usize, page_tokens: usize) -> Self {
        // Popped from the end: low numbers first, so that a lone sequence is contiguous.
        Self {
            free: (0..pages as u32).rev().collect(),
            prefixes: PrefixIndex::default(),
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

    /// Pages that no sequence holds.
    pub(crate) fn available(&self) -> usize {
        self.free.len() + self.prefixes.idle()
    }

    /// Whether `needed` pages are available.
    pub(crate) fn check(&self, needed: usize) -> Result<(), CacheError> {
        if needed > self.available() {
            return Err(CacheError::NoPages {
                needed,
                free: self.available(),
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
        let prefixes = &mut self.prefixes;
        let mut next = || self.free.pop().or_else(|| prefixes.evict());
        pages.extend((0..needed).map(|_| next().expect("pages were checked")));
    }

    /// Forgets what pages hold that no sequence holds.
    pub(crate) fn forget_idle(&mut self) {
        while let Some(page) = self.prefixes.evict() {
            self.free.push(page);
        }
    }

    /// Takes the pages of a sequence back. Those whose text is known stay so until they are needed.
    pub(crate) fn free(&mut self, pages: Vec<u32>) {
        for page in pages.into_iter().rev() {
            if !self.prefixes.release(page) {
                self.free.push(page);
            }
        }
    }
}

/// The pages of each request of a step, in order of the text.
#[derive(Debug)]
pub(crate) struct PageLists<'a> {
    lists: Vec<&'a [u32]>,
    on_device: OnceLock<Tensor>,
}

impl<'a> PageLists<'a> {
    pub(crate) fn new(lists: impl IntoIterator<Item = &'a [u32]>) -> Self {
        Self {
            lists: lists.into_iter().collect(),
            on_device: OnceLock::new(),
        }
    }

    /// Lists of a captured step, which are on the device only: u32 `[requests, most pages]`.
    pub(crate) fn fixed(table: Tensor) -> Self {
        Self {
            lists: Vec::new(),
            on_device: OnceLock::from(table),
        }
    }

    /// Pages of a request.
    #[inline]
    pub(crate) fn of(&self, request: usize) -> &'a [u32] {
        self.lists[request]
    }

    /// All lists on a device, uploaded at first use: u32 `[requests, most pages]`, the rest of a list
    /// filled with a page that there is not.
    #[allow(
        dead_code,
        reason = "kernels read it, which a build without CUDA lacks"
    )]
    pub(crate) fn on_device(&self, device: &Device) -> CandleResult<&Tensor> {
        if let Some(table) = self.on_device.get() {
            return Ok(table);
        }
        let width = self.lists.iter().map(|list| list.len()).max().unwrap_or(0);
        let mut table = Vec::with_capacity(self.lists.len() * width);
        for list in &self.lists {
            table.extend_from_slice(list);
            table.resize(table.len() + width - list.len(), u32::MAX);
        }
        let table = Tensor::from_vec(table, (self.lists.len(), width), device)?;
        Ok(self.on_device.get_or_init(|| table))
    }
}
