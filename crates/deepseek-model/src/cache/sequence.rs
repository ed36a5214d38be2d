//! The sequences of a cache: their slots, lengths and pages.

use std::{
    fmt,
    sync::atomic::{AtomicU64, Ordering},
};

use super::{CacheError, hit::Published};

/// Names a sequence of one cache; every other cache refuses it. An id of a removed sequence stays
/// invalid when its slot is reused.
///
/// It prints as `sequence 3.1`: slot 3, and before this sequence 1 other was in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SequenceId {
    /// The cache that gave the id out: slots and generations of any two caches are alike.
    cache: u64,
    slot: u32,
    generation: u32,
}

impl SequenceId {
    pub(crate) fn slot(self) -> usize {
        self.slot as usize
    }
}

impl fmt::Display for SequenceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sequence {}.{}", self.slot, self.generation)
    }
}

/// What a sequence is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SequenceOptions {
    /// Tokens of its prompt; rows at or after this position are decode rows.
    pub prompt_len: usize,
    /// Someone reads the outputs of every prompt row (prompt log-probabilities), so none may be
    /// dropped.
    pub keeps_rows: bool,
}

/// The host's side of a sequence.
#[derive(Debug, Clone)]
pub(crate) struct Sequence {
    pub(crate) options: SequenceOptions,
    /// Tokens whose KV is written.
    pub(crate) len: usize,
    /// Pages of compressed entries, in order.
    pub(crate) pages: Vec<u32>,
    /// The last token ids, oldest first, for n-gram hashes.
    pub(crate) tail: Vec<u32>,
    /// Tokens whose entries were found in the cache and stay as they are.
    pub(crate) shared: usize,
    /// The first position whose window KV it holds or will: what is below is not read.
    pub(crate) kv_start: usize,
    /// What is known of its text, if later ones may find it.
    pub(super) published: Option<Published>,
    /// Whether a step of it has begun and not ended. After a failure, what its layers hold is of
    /// different lengths.
    pub(crate) unfinished: bool,
}

/// Slots and what is in them.
#[derive(Debug)]
pub(crate) struct Sequences {
    /// Of the cache, and of no other in this process.
    cache: u64,
    /// With the generation of the sequence that is there or comes next.
    slots: Vec<(u32, Option<Sequence>)>,
    max_positions: usize,
}

impl Sequences {
    /// Memory of one slot.
    pub(crate) const SLOT_BYTES: usize = size_of::<(u32, Option<Sequence>)>();

    pub(crate) fn new(max: usize, max_positions: usize) -> Self {
        // In 64 bits: a program that makes caches all its life never sees a number twice.
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self {
            // Nothing but the number is shared, so no order with other memory is needed.
            cache: NEXT.fetch_add(1, Ordering::Relaxed),
            slots: vec![(0, None); max],
            max_positions,
        }
    }

    /// Positions of the model.
    pub(crate) fn max_positions(&self) -> usize {
        self.max_positions
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.slots.iter().all(|(_, sequence)| sequence.is_none())
    }

    pub(crate) fn add(&mut self, options: SequenceOptions) -> Result<SequenceId, CacheError> {
        let max_positions = self.max_positions;
        match options.prompt_len {
            0 => return Err(CacheError::EmptyPrompt),
            prompt_len if prompt_len > max_positions => {
                return Err(CacheError::PromptTooLong {
                    prompt_len,
                    max_positions,
                });
            }
            _ => {}
        }
        let max = self.slots.len();
        let slot = self
            .slots
            .iter()
            .position(|(_, s)| s.is_none())
            .ok_or(CacheError::NoSlot { max })?;
        self.slots[slot].1 = Some(Sequence {
            options,
            len: 0,
            pages: Vec::new(),
            tail: Vec::new(),
            shared: 0,
            kv_start: 0,
            published: None,
            unfinished: false,
        });
        Ok(SequenceId {
            cache: self.cache,
            slot: slot as u32,
            generation: self.slots[slot].0,
        })
    }

    pub(crate) fn remove(&mut self, id: SequenceId) -> Result<Sequence, CacheError> {
        self.check(id)?;
        let (generation, sequence) = &mut self.slots[id.slot()];
        // Only an id kept while one slot was reused four thousand million times comes round again.
        *generation = generation.wrapping_add(1);
        sequence.take().ok_or(CacheError::UnknownSequence { id })
    }

    pub(crate) fn get(&self, id: SequenceId) -> Result<&Sequence, CacheError> {
        self.check(id)?;
        let sequence = self.slots[id.slot()].1.as_ref();
        sequence.ok_or(CacheError::UnknownSequence { id })
    }

    pub(crate) fn get_mut(&mut self, id: SequenceId) -> Result<&mut Sequence, CacheError> {
        self.check(id)?;
        let sequence = self.slots[id.slot()].1.as_mut();
        sequence.ok_or(CacheError::UnknownSequence { id })
    }

    /// Whether the id is one of this cache, and of what is in its slot now.
    fn check(&self, id: SequenceId) -> Result<(), CacheError> {
        if id.cache != self.cache {
            return Err(CacheError::OtherCache { id });
        }
        match self.slots.get(id.slot()) {
            Some((generation, Some(_))) if *generation == id.generation => Ok(()),
            _ => Err(CacheError::UnknownSequence { id }),
        }
    }
}
