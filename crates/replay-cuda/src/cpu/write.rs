//! Reading and overwriting lists of whole numbers, whichever of three dtypes they are.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, InplaceOp1, Layout, Tensor, bail};

use crate::Result;

/// The entries of a u32, i32 or i64 list, u32 without sign.
pub(super) fn read(list: &Tensor) -> Result<Vec<i64>> {
    Ok(match list.dtype() {
        DType::U32 => list.to_vec1::<u32>()?.into_iter().map(i64::from).collect(),
        DType::I32 => list.to_vec1::<i32>()?.into_iter().map(i64::from).collect(),
        _ => list.to_vec1::<i64>()?,
    })
}

/// Overwrites a u32, i32 or i64 list with the low bits of these entries.
pub(super) fn write(list: &Tensor, entries: &[i64]) -> Result<()> {
    Ok(list.inplace_op1(&Entries(entries))?)
}

struct Entries<'a>(&'a [i64]);

impl InplaceOp1 for Entries<'_> {
    fn name(&self) -> &'static str {
        "write-entries"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        let Some((start, end)) = layout.contiguous_offsets() else {
            bail!("write-entries: expected a contiguous list");
        };
        if end - start != self.0.len() {
            bail!(
                "write-entries: {} entries for a list of {}",
                self.0.len(),
                end - start
            );
        }
        let entries = self.0.iter();
        match storage {
            CpuStorage::U32(list) => {
                list[start..end]
                    .iter_mut()
                    .zip(entries)
                    .for_each(|(to, from)| *to = *from as u32);
            }
            CpuStorage::I32(list) => {
                list[start..end]
                    .iter_mut()
                    .zip(entries)
                    .for_each(|(to, from)| *to = *from as i32);
            }
            CpuStorage::I64(list) => list[start..end].copy_from_slice(self.0),
            other => bail!(
                "write-entries: {:?} is no list of whole numbers",
                other.dtype()
            ),
        }
        Ok(())
    }
}
