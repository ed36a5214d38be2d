//! Writing rows into a cache in place.

use candle_core::{CpuStorage, InplaceOp2, Layout, Result, Tensor, bail};

/// Copies rows of the source over rows of the destination; `(source row, destination row)` pairs.
struct WriteRows<'a>(&'a [(usize, usize)]);

impl InplaceOp2 for WriteRows<'_> {
    fn name(&self) -> &'static str {
        "write-rows"
    }

    fn cpu_fwd(
        &self,
        dst: &mut CpuStorage,
        dst_layout: &Layout,
        src: &CpuStorage,
        src_layout: &Layout,
    ) -> Result<()> {
        let (CpuStorage::F32(dst), CpuStorage::F32(src)) = (dst, src) else {
            bail!("write-rows: expected two f32 tensors");
        };
        let (Some((d0, d1)), Some((s0, s1))) = (
            dst_layout.contiguous_offsets(),
            src_layout.contiguous_offsets(),
        ) else {
            bail!("write-rows: expected contiguous tensors");
        };
        let (dst, src) = (&mut dst[d0..d1], &src[s0..s1]);
        let width = dst_layout.shape().dims2()?.1;
        for &(from, to) in self.0 {
            dst[to * width..(to + 1) * width]
                .copy_from_slice(&src[from * width..(from + 1) * width]);
        }
        Ok(())
    }
}

/// Writes `src` rows into `dst`; both are `[rows, width]` of equal width, f32, on the CPU.
///
/// # Errors
/// If a pair names a row that is not there, or shapes or dtypes do not fit; nothing is written then.
pub(crate) fn write_rows(dst: &Tensor, src: &Tensor, pairs: &[(usize, usize)]) -> Result<()> {
    let ((dst_rows, width), (src_rows, src_width)) = (dst.dims2()?, src.dims2()?);
    if width != src_width {
        bail!("write-rows: expected rows of {width} elements, got {src_width}");
    }
    if let Some((from, to)) = pairs
        .iter()
        .find(|(from, to)| *from >= src_rows || *to >= dst_rows)
    {
        bail!("write-rows: row {from} of {src_rows} to row {to} of {dst_rows}");
    }
    dst.inplace_op2(src, &WriteRows(pairs))
}
