//! A file mapped into memory, and the one `unsafe` call of this module.

use std::{io, ops::Range, path::Path};

use memmap2::Mmap;

use crate::config::file;

/// A file's bytes, read by the system when they are first touched.
#[derive(Debug)]
pub(super) struct Mapping(Mmap);

impl Mapping {
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let file = file::open(path)?;
        // SAFETY: the mapping is private and read only, so nothing in this process changes the
        // bytes. Another process could, by writing to or truncating the file: that no mapping can
        // rule out. Checkpoints are files that are written once, and reading them any other way
        // costs their size in memory, so the risk is taken. Bytes are only ever decoded as numbers,
        // of which every bit pattern is one, and all offsets are checked against the mapped length.
        let map = unsafe { Mmap::map(&file)? };
        Ok(Self(map))
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Tells the system that `range` will be read here and there, so that it does not read ahead:
    /// by default a touched page brings in up to 128 KiB around it.
    #[cfg(unix)]
    pub(super) fn expect_scattered_reads(&self, range: Range<usize>) {
        // A hint: without it reads are slower, not wrong.
        let advice = memmap2::Advice::Random;
        drop(self.0.advise_range(advice, range.start, range.len()));
    }

    /// Nothing: there is no such hint on this system.
    #[cfg(not(unix))]
    pub(super) fn expect_scattered_reads(&self, _range: Range<usize>) {}
}
