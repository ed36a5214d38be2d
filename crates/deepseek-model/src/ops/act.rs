//! The activation dtype, as it acts on a CPU.

use candle_core::DType;

/// Where activations are stored between operations: as they are, or rounded to bf16.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Act {
    /// Full f32.
    F32,
    /// f32 values rounded to the nearest bf16.
    Bf16,
}

impl Act {
    /// The dtype in which a device holds activations; a CPU holds them in f32.
    pub(crate) fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::Bf16 => DType::BF16,
        }
    }

    /// One value as it would read back after being stored.
    #[inline]
    pub(crate) fn store(self, x: f32) -> f32 {
        match self {
            Self::F32 => x,
            Self::Bf16 => half::bf16::from_f32(x).to_f32(),
        }
    }

    /// Rounds a whole row in place.
    pub(crate) fn store_all(self, xs: &mut [f32]) {
        if self == Self::Bf16 {
            for x in xs {
                *x = self.store(*x);
            }
        }
    }
}
