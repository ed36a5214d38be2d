//! The KV cache of many sequences: window rings, compressed entries in pages, open groups.

mod assumed;
mod budget;
mod error;
mod hit;
mod owner;
mod pages;
mod prefix;
mod sequence;
mod size;
mod step;
mod storage;

use std::{num::NonZeroU32, sync::Arc};

use candle_core::{DType, Device, Tensor};
use replay_core::ReplayPolicy;

pub use budget::KvBudget;
pub use error::CacheError;
pub use hit::{CachedPrefix, PrefixOptions};
pub(crate) use owner::ModelId;
pub(crate) use pages::{PageLists, PagePool};
pub(crate) use sequence::{Sequence, Sequences};
pub use sequence::{SequenceId, SequenceOptions};
pub(crate) use size::Paging;
pub(crate) use storage::{PagedRows, RowRing};

use crate::{Config, Error, Result, ops::FaultWord, replay::ReplayPlanner};

/// What a cache is made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheOptions {
    /// Sequences it holds at once.
    pub max_sequences: usize,
    /// Tokens over all sequences.
    ///
    /// Room is given out in pages, and a page holds tokens of one sequence only, or of several that
    /// begin alike. There are as many pages as
    /// `max_tokens` fill, the last one begun, and one more for each sequence but the first: any
    /// sequences whose tokens add up to `max_tokens` have room, however they are shared out. So it
    /// is enough to add up what each sequence may reach: prompt, and tokens to generate.
    pub max_tokens: usize,
    /// Tokens of a page at least: it has the smallest multiple of the least common multiple of the model's
    /// compression ratios that is this or more. [`Self::PAGE_TOKENS`], if there is no reason for another
    /// number: a text finds the beginning that it shares with others by whole pages.
    pub page_tokens: usize,
    /// How prefill is cut short. One policy for the life of a cache: window KV written under one
    /// is not what another expects.
    pub policy: ReplayPolicy,
    /// Rows at the end of a prompt whose outputs are read: 1 to sample what follows it. The policies
    /// keep as many rows as these need, and a step that reads others is refused, except under `Off`.
    pub sampled_rows: NonZeroU32,
}

/// Window KV of a layer and, if it is a KV source, what later layers read of it.
#[derive(Debug)]
pub(crate) struct LayerCache {
    /// `[sequences · W, D]`.
    pub(crate) window: RowRing,
    /// Compressed entries, for KV sources.
    pub(crate) source: Option<SourceCache>,
}

/// What a KV source writes for every row.
#[derive(Debug)]
pub(crate) struct SourceCache {
    /// Compressed KV, `D` wide.
    pub(crate) entries: PagedRows,
    /// Index keys, `index_dim` wide.
    pub(crate) index_keys: PagedRows,
    /// Keys and gates of rows whose group is not complete (ratio > 1).
    pub(crate) pending: Option<[RowRing; 2]>,
}

/// Keys and values of every sequence, for all layers.
///
/// Tensors sit on the model's device; lengths and page tables on the host.
#[derive(Debug)]
pub struct KvCache {
    /// Of the model it was made for.
    config: Config,
    /// The model whose values it holds; none before the first step of a cache that no model made.
    owner: Option<ModelId>,
    pub(crate) storage: CacheStorage,
    pub(crate) pool: PagePool,
    pub(crate) sequences: Sequences,
    pub(crate) planner: ReplayPlanner,
}

/// What a step writes to on its device. A clone is the same storage: graphs hold one.
#[derive(Debug, Clone)]
pub(crate) struct CacheStorage {
    pub(crate) layers: Arc<[LayerCache]>,
    /// Of a device other than the CPU.
    pub(crate) faults: Option<FaultWord>,
}

impl CacheOptions {
    /// Tokens of a page that suit most: few enough to waste little on short texts, and enough for the
    /// products over a page's index keys to pay.
    pub const PAGE_TOKENS: usize = 128;
}

impl KvCache {
    /// An empty cache for a model of this configuration, with values held as `dtype`: `F32`, or on a
    /// CUDA device that or `BF16`. It belongs to
    /// the model that runs its first step; that of [`Model::new_cache`](crate::Model::new_cache)
    /// belongs to that model from the beginning. Every other model is refused.
    ///
    /// # Errors
    /// If the device does not compute with the dtype, an option is 0, a field of `config` was set to
    /// what no file may hold, the model cannot replay and the policy is not `Off` (one named reason),
    /// or memory runs out.
    pub fn new(
        config: &Config,
        options: CacheOptions,
        device: &Device,
        dtype: DType,
    ) -> Result<Self> {
        let held: &[DType] = match device {
            Device::Cpu => &[DType::F32],
            Device::Cuda(_) => &[DType::F32, DType::BF16],
            Device::Metal(_) => &[],
        };
        if !held.contains(&dtype) {
            return Err(CacheError::DType {
                dtype,
                device: format!("{:?}", device.location()),
            }
            .into());
        }
        Self::allocate(config, options, device, dtype)
    }

    /// The same with any dtype.
    fn allocate(
        config: &Config,
        options: CacheOptions,
        device: &Device,
        dtype: DType,
    ) -> Result<Self> {
        options.check_counts()?;
        config.check_bounds()?;
        let planner = ReplayPlanner::new(config, options.policy, options.sampled_rows)?;
        let (pages, page_tokens) = size::plan_pages(config, options, device, dtype)?;
        let layers = (0..config.layers.len())
            .map(|layer| {
                LayerCache::new(
                    config,
                    layer,
                    options.max_sequences,
                    (pages, page_tokens),
                    (dtype, device),
                )
            })
            .collect::<candle_core::Result<_>>()?;
        Ok(Self {
            config: config.clone(),
            owner: None,
            storage: CacheStorage {
                layers,
                faults: match device {
                    Device::Cpu => None,
                    _ => Some(FaultWord::new(device)?),
                },
            },
            pool: PagePool::new(pages, page_tokens),
            sequences: Sequences::new(options.max_sequences, config.max_positions),
            planner,
        })
    }

    /// The cache, which belongs to this model.
    pub(crate) fn owned_by(mut self, model: ModelId) -> Self {
        self.owner = Some(model);
        self
    }

    /// Adds a sequence of no tokens yet. Its pages are taken step by step, so that a step can find
    /// too few of them although the sequence was added.
    ///
    /// # Errors
    /// If every slot is taken, or the prompt is empty or exceeds the model's positions.
    pub fn add(&mut self, options: SequenceOptions) -> Result<SequenceId> {
        Ok(self.sequences.add(options)?)
    }

    /// Forgets a sequence and frees its pages.
    ///
    /// # Errors
    /// If the cache does not hold it.
    pub fn remove(&mut self, id: SequenceId) -> Result<()> {
        let sequence = self.sequences.remove(id)?;
        self.pool.free(sequence.pages);
        Ok(())
    }

    /// Tokens the sequence holds.
    ///
    /// # Errors
    /// If the cache does not hold it.
    pub fn len(&self, id: SequenceId) -> Result<usize> {
        Ok(self.sequences.get(id)?.len)
    }

    /// Whether the cache holds no sequence.
    pub fn is_empty(&self) -> bool {
        self.sequences.is_empty()
    }

    /// The policy all sequences are filled under.
    pub fn policy(&self) -> ReplayPolicy {
        self.planner.policy()
    }

    /// The newest window KV of a layer, oldest row first: `[min(len, W), D]`.
    ///
    /// Rows that the policy did not run in this layer hold whatever was there before.
    ///
    /// # Errors
    /// If the cache does not hold the sequence, or the model has no such layer.
    pub fn window_kv(&self, id: SequenceId, layer: usize) -> Result<Tensor> {
        let sequence = self.sequences.get(id)?;
        let ring = &self.layer(layer)?.window;
        let first = sequence.len.saturating_sub(ring.capacity());
        select(
            ring.data(),
            (first..sequence.len).map(|pos| ring.row(id.slot(), pos)),
        )
    }

    /// Compressed KV `[entries, D]` and index keys `[entries, index_dim]` of a KV source.
    ///
    /// # Errors
    /// If the cache does not hold the sequence, or the layer is no KV source.
    pub fn compressed(&self, id: SequenceId, layer: usize) -> Result<(Tensor, Tensor)> {
        let sequence = self.sequences.get(id)?;
        let source = self.layer(layer)?.source.as_ref();
        let source = source.ok_or(CacheError::NoSource { layer })?;
        let entries = sequence.len * source.entries.per_page() / self.pool.page_tokens();
        let rows = |pages: &PagedRows| {
            select(
                pages.data(),
                (0..entries).map(|e| pages.row(&sequence.pages, e)),
            )
        };
        Ok((rows(&source.entries)?, rows(&source.index_keys)?))
    }

    fn layer(&self, layer: usize) -> Result<&LayerCache, CacheError> {
        let layers = self.storage.layers.len();
        let found = self.storage.layers.get(layer);
        found.ok_or(CacheError::NoLayer { layer, layers })
    }

    /// Overwrites every slot of every layer, used or not. Filled with NaN before the first
    /// sequence, the cache shows any read of a slot that nobody wrote.
    ///
    /// # Errors
    /// If a device operation fails.
    pub fn fill(&mut self, value: f32) -> Result<()> {
        self.pool.forget_idle();
        for layer in self.storage.layers.iter() {
            layer.window.fill(value)?;
            if let Some(source) = &layer.source {
                source.entries.fill(value)?;
                source.index_keys.fill(value)?;
                for ring in source.pending.iter().flatten() {
                    ring.fill(value)?;
                }
            }
        }
        Ok(())
    }
}

impl LayerCache {
    fn new(
        config: &Config,
        layer: usize,
        sequences: usize,
        (pages, page_tokens): (usize, usize),
        place: (DType, &Device),
    ) -> candle_core::Result<Self> {
        let schedule = config.layers[layer];
        let source = (schedule.kv_source == Some(layer)).then(|| -> candle_core::Result<_> {
            let per_page = page_tokens / schedule.ratio;
            let pending = (DType::F32, place.1);
            let ring = || RowRing::new(sequences, schedule.ratio, config.head_dim, pending);
            Ok(SourceCache {
                entries: PagedRows::new(pages, per_page, config.head_dim, place)?,
                index_keys: PagedRows::new(pages, per_page, config.index_dim, place)?,
                pending: (schedule.ratio > 1)
                    .then(|| Ok::<_, candle_core::Error>([ring()?, ring()?]))
                    .transpose()?,
            })
        });
        Ok(Self {
            window: RowRing::new(sequences, config.sliding_window, config.head_dim, place)?,
            source: source.transpose()?,
        })
    }
}

fn select(data: &Tensor, rows: impl Iterator<Item = usize>) -> Result<Tensor> {
    let rows: Vec<u32> = rows.map(|row| row as u32).collect();
    let rows = Tensor::new(rows.as_slice(), data.device())?;
    data.index_select(&rows, 0).map_err(Error::from)
}
