//! Values that are no numbers, found on a device that nobody waits for.

use std::fmt;

use candle_core::{DType, Device, Result, Tensor};

/// What a device found, read at the end of a step. A clone is the same word.
#[derive(Debug, Clone)]
pub(crate) struct FaultWord(Tensor);

/// Where in a layer something is chosen by values that may be no numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Site {
    /// The indexer.
    Index,
    /// The router.
    Router,
}

/// Where a kernel of one layer and site reports; nowhere on a CPU, where an operation fails at once.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Faults<'a> {
    word: Option<&'a FaultWord>,
    code: u32,
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Index => "the indexer",
            Self::Router => "the router",
        })
    }
}

impl FaultWord {
    const NONE: u32 = u32::MAX;

    pub(crate) fn new(device: &Device) -> Result<Self> {
        let word = Self(Tensor::zeros(1, DType::U32, device)?);
        word.clear()?;
        Ok(word)
    }

    /// The first layer that reported since the last call, and where. Waits for the device.
    pub(crate) fn take(&self) -> Result<Option<(usize, Site)>> {
        let code = self.0.to_vec1::<u32>()?[0];
        if code == Self::NONE {
            return Ok(None);
        }
        self.clear()?;
        let site = if code % 2 == 0 {
            Site::Index
        } else {
            Site::Router
        };
        Ok(Some((code as usize / 2, site)))
    }

    fn clear(&self) -> Result<()> {
        self.0.const_set(Self::NONE.into())
    }
}

impl<'a> Faults<'a> {
    pub(crate) fn new(word: Option<&'a FaultWord>, layer: usize, site: Site) -> Self {
        let code = layer as u32 * 2 + u32::from(site == Site::Router);
        Self { word, code }
    }

    /// The word that a kernel takes the minimum of with the code, u32 `[1]`.
    #[allow(
        dead_code,
        reason = "kernels read it, which a build without CUDA lacks"
    )]
    pub(crate) fn target(&self) -> Result<(&'a Tensor, u32)> {
        match self.word {
            Some(word) => Ok((&word.0, self.code)),
            None => candle_core::bail!("expected a place on the device for faults"),
        }
    }
}
