//! How much memory a cache takes, before there is one.

use candle_core::{DType, Device};

use super::{CacheError, CacheOptions, Sequences};
use crate::{
    Config, Result, device,
    memory::{Shortage, fits::largest_below, host},
};

/// Bytes of a cache's storage, part by part. What it takes is linear in slots and pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sizes {
    /// Tokens of a page.
    pub(super) page_tokens: usize,
    /// Of tensors, for each slot: rings and open groups.
    slot_bytes: u64,
    /// Of tensors, for each page: compressed entries and index keys.
    page_bytes: u64,
    /// Rows of the longest tensor, for each slot and page. Rows are numbered in u32.
    slot_rows: usize,
    page_rows: usize,
}

impl Sizes {
    /// Sizes for values held as `dtype`, in pages of so many tokens at least; `None` if one exceeds what can be addressed.
    pub(super) fn new(config: &Config, dtype: DType, page_tokens: usize) -> Option<Self> {
        // A page covers the same tokens in every source, so it holds whole groups of each ratio.
        let mut ratios = config.layers.iter().map(|l| l.ratio.max(1));
        let step = ratios.try_fold(1, lcm)?;
        let page_tokens = step.checked_mul(page_tokens.div_ceil(step))?;
        let mut sizes = Self {
            page_tokens,
            slot_bytes: 0,
            page_bytes: 0,
            slot_rows: 0,
            page_rows: 0,
        };
        let (values, sums) = (dtype.size_in_bytes(), DType::F32.size_in_bytes());
        for (index, layer) in config.layers.iter().enumerate() {
            sizes.add_ring(config.sliding_window, config.head_dim, values)?;
            if layer.kv_source == Some(index) {
                let per_page = page_tokens / layer.ratio;
                sizes.add_pages(per_page, config.head_dim, values)?;
                sizes.add_pages(per_page, config.index_dim, values)?;
                if layer.ratio > 1 {
                    // Keys and gates of an open group are summed in f32.
                    sizes.add_ring(layer.ratio, config.head_dim, sums)?;
                    sizes.add_ring(layer.ratio, config.head_dim, sums)?;
                }
            }
        }
        Some(sizes)
    }

    fn add_ring(&mut self, rows: usize, width: usize, value: usize) -> Option<()> {
        self.slot_rows = self.slot_rows.max(rows);
        self.slot_bytes = self.slot_bytes.checked_add(tensor(rows, width, value)?)?;
        Some(())
    }

    fn add_pages(&mut self, rows: usize, width: usize, value: usize) -> Option<()> {
        self.page_rows = self.page_rows.max(rows);
        self.page_bytes = self.page_bytes.checked_add(tensor(rows, width, value)?)?;
        Some(())
    }

    /// Pages for `tokens`, however they are shared out among the sequences.
    pub(super) fn pages(&self, sequences: usize, tokens: usize) -> Option<usize> {
        let pages = tokens.div_ceil(self.page_tokens);
        pages.checked_add(sequences.saturating_sub(1))
    }

    /// Bytes of all tensors; `None` if they cannot be addressed.
    pub(super) fn tensors(&self, sequences: usize, pages: usize) -> Option<u64> {
        let numbered = |count: usize, rows| u32::try_from(count.checked_mul(rows)?).ok();
        numbered(sequences, self.slot_rows)?;
        numbered(pages, self.page_rows)?;
        let slots = self.slot_bytes.checked_mul(sequences as u64)?;
        slots.checked_add(self.page_bytes.checked_mul(pages as u64)?)
    }

    /// Bytes of the lists on the host.
    fn lists(sequences: usize, pages: usize) -> Option<u64> {
        let slots = (sequences as u64).checked_mul(Sequences::SLOT_BYTES as u64)?;
        let numbers = (pages as u64).checked_mul(size_of::<u32>() as u64)?;
        slots.checked_add(numbers)
    }

    /// Most tokens whose pages fit into `bytes` beside the slots of the sequences; 0 if none do.
    pub(super) fn tokens_in(&self, bytes: u64, sequences: usize) -> usize {
        let slots = self.slot_bytes.saturating_mul(sequences as u64);
        let left = bytes.saturating_sub(slots);
        let fit = match self.page_bytes {
            0 => usize::MAX,
            page => usize::try_from(left / page).unwrap_or(usize::MAX),
        };
        let numbered = u32::MAX as usize / self.page_rows.max(1);
        // One page for each sequence but the first is there for tokens that fill none.
        let pages = fit.min(numbered);
        let pages = pages.saturating_sub(sequences.saturating_sub(1));
        pages.saturating_mul(self.page_tokens)
    }
}

/// How a cache shares out its tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Paging {
    /// Tokens of a page.
    pub(crate) page_tokens: usize,
    /// Tokens that one sequence can have, of the model's positions and all pages.
    pub(crate) sequence_tokens: usize,
}

/// Number of pages and tokens of each.
///
/// # Errors
/// If the storage they make cannot be addressed or allocated.
pub(super) fn plan_pages(
    config: &Config,
    options: CacheOptions,
    device: &Device,
    dtype: DType,
) -> Result<(usize, usize)> {
    let sequences = options.max_sequences;
    let sized = |tokens| {
        let sizes = Sizes::new(config, dtype, options.page_tokens)?;
        let pages = sizes.pages(sequences, tokens)?;
        let (tensors, lists) = (
            sizes.tensors(sequences, pages)?,
            Sizes::lists(sequences, pages)?,
        );
        Some((sizes, pages, tensors, lists, tensors.checked_add(lists)?))
    };
    // The host would end the program where it has no room.
    let of_host = |lists, all| if device.is_cpu() { all } else { lists };
    let fits =
        |tokens| sized(tokens).is_some_and(|(_, _, _, lists, all)| host::fits(of_host(lists, all)));
    let (sizes, pages, tensors, lists, all) =
        sized(options.max_tokens).ok_or_else(|| options.unaddressable(|t| sized(t).is_some()))?;
    host::check(of_host(lists, all))
        .map_err(|shortage| options.too_large(Some(all), shortage, fits))?;
    if let Some(free) = device::memory(device)?.map(|memory| memory.free)
        && tensors > free
    {
        return Err(options.no_memory(&sizes, tensors, free).into());
    }
    Ok((pages, sizes.page_tokens))
}

impl CacheOptions {
    /// Whether the host has memory for such a cache of its own, beside as many bytes more, with some to spare:
    /// what is said to fit must fit in another run, too. Values are held as `dtype`.
    pub fn fits_host(&self, config: &Config, dtype: DType, beside: u64) -> bool {
        let sized = || {
            let sizes = Sizes::new(config, dtype, self.page_tokens)?;
            let pages = sizes.pages(self.max_sequences, self.max_tokens)?;
            let tensors = sizes.tensors(self.max_sequences, pages)?;
            let all = tensors.checked_add(Sizes::lists(self.max_sequences, pages)?)?;
            all.checked_add(beside)
        };
        sized().is_some_and(host::fits)
    }

    /// How such a cache shares out its tokens.
    ///
    /// # Errors
    /// If its pages cannot be counted.
    pub(crate) fn paging(&self, config: &Config) -> Result<Paging, CacheError> {
        let sized = |tokens| {
            // Pages hold as many tokens in every dtype.
            let sizes = Sizes::new(config, DType::F32, self.page_tokens)?;
            let pages = sizes.pages(self.max_sequences, tokens)?;
            let held = pages.saturating_mul(sizes.page_tokens);
            Some(Paging {
                page_tokens: sizes.page_tokens,
                sequence_tokens: held.min(config.max_positions),
            })
        };
        let paging = sized(self.max_tokens);
        paging.ok_or_else(|| self.unaddressable(|tokens| sized(tokens).is_some()))
    }

    /// Of storage that cannot be addressed. Asks which smaller numbers of tokens could be.
    pub(super) fn unaddressable(&self, could_be: impl Fn(usize) -> bool) -> CacheError {
        self.too_large(None, Shortage::UNKNOWN, could_be)
    }

    fn too_large(
        &self,
        bytes: Option<u64>,
        shortage: Shortage,
        fit: impl Fn(usize) -> bool,
    ) -> CacheError {
        CacheError::TooLarge {
            bytes,
            shortage,
            max_sequences: self.max_sequences,
            max_tokens: self.max_tokens,
            fits: largest_below(self.max_tokens, fit),
        }
    }

    pub(super) fn no_memory(&self, sizes: &Sizes, needed: u64, available: u64) -> CacheError {
        CacheError::NoMemory {
            needed,
            available,
            max_sequences: self.max_sequences,
            max_tokens: self.max_tokens,
            fits: sizes.tokens_in(available, self.max_sequences),
        }
    }
}

fn tensor(rows: usize, width: usize, value: usize) -> Option<u64> {
    let bytes = rows.checked_mul(width)?.checked_mul(value)?;
    u64::try_from(bytes).ok()
}

fn lcm(a: usize, b: usize) -> Option<usize> {
    let (mut x, mut y) = (a, b);
    while y != 0 {
        (x, y) = (y, x % y);
    }
    (a / x).checked_mul(b)
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use replay_core::ReplayPolicy;

    use super::*;
    use crate::{KvCache, Model};

    fn options(max_sequences: usize, max_tokens: usize) -> CacheOptions {
        CacheOptions {
            max_sequences,
            max_tokens,
            page_tokens: CacheOptions::PAGE_TOKENS,
            policy: ReplayPolicy::Off,
            sampled_rows: NonZeroU32::MIN,
        }
    }

    /// Bytes of everything that a cache has allocated.
    fn allocated(cache: &KvCache) -> u64 {
        let layer = |layer: &crate::cache::LayerCache| {
            let mut tensors = vec![layer.window.data().clone()];
            if let Some(source) = &layer.source {
                tensors.extend([
                    source.entries.data().clone(),
                    source.index_keys.data().clone(),
                ]);
                let open = source.pending.iter().flatten();
                tensors.extend(open.map(|ring| ring.data().clone()));
            }
            let bytes = tensors
                .iter()
                .map(|t| t.elem_count() * t.dtype().size_in_bytes());
            bytes.sum::<usize>() as u64
        };
        cache.storage.layers.iter().map(layer).sum()
    }

    #[test]
    fn the_size_is_that_of_the_tensors() {
        for name in ["bf16-s1", "engram-s1"] {
            let config = Config::load(format!("tests/data/{name}").as_ref()).unwrap();
            for dtype in [DType::F32, DType::BF16] {
                for (sequences, tokens) in [(1, 1), (1, 128), (1, 129), (5, 1000)] {
                    let options = options(sequences, tokens);
                    let cache = KvCache::allocate(&config, options, &Device::Cpu, dtype).unwrap();
                    let said = options.bytes(&config, dtype).unwrap();
                    assert_eq!(allocated(&cache), said, "{name} {dtype:?} {options:?}");
                }
            }
        }
    }

    /// A sequence can have all pages, but no more tokens than the model has positions.
    #[test]
    fn a_sequence_can_have_every_page() {
        let mut config = Config::load("tests/data/bf16-s1".as_ref()).unwrap();
        let longest = |config: &Config, sequences, tokens| {
            let paging = options(sequences, tokens).paging(config).unwrap();
            assert_eq!(paging.page_tokens, 128);
            paging.sequence_tokens
        };
        assert_eq!(longest(&config, 1, 100), 128);
        assert_eq!(longest(&config, 3, 129), 512);
        config.max_positions = 300;
        assert_eq!(longest(&config, 3, 129), 300);
        options(usize::MAX, usize::MAX).paging(&config).unwrap_err();
    }

    /// The model's own caches, in the dtype that its device holds.
    #[test]
    fn a_model_s_cache_is_of_that_size() {
        let dir = "tests/data/engram-s1".as_ref();
        let model = Model::load(dir, crate::ModelOptions::default(), &|_| {}).unwrap();
        let cache = model.new_cache(options(2, 300)).unwrap();
        let said = options(2, 300).bytes(model.config(), DType::F32).unwrap();
        assert_eq!(allocated(&cache), said);
    }
}
