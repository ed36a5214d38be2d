//! Products of groups of columns with a matrix each, by cuBLAS, where the columns lie.
//!
//! candle's matmul takes matrices whose rows are neighbours only; a group's rows are as far apart as
//! all groups are wide, which would cost a copy before the product and one behind it.
#![allow(unsafe_code)]

use candle_core::{
    CpuStorage, CudaStorage, CustomOp2, DType, Layout, Result, Shape, Tensor, bail,
    cuda_backend::{
        CudaDType, WrapErr,
        cudarc::{
            cublas::{result::gemm_strided_batched_ex, sys},
            driver::{DevicePtr, DevicePtrMut, DeviceRepr},
        },
        gemm_reduced_precision_bf16, gemm_reduced_precision_f32,
    },
};
use half::bf16;

/// `x` `[rows, groups · inner]` by `weight` `[groups · out, inner]`, of one dtype: part `g` of the
/// columns by rows `g · out ..`, `[rows, groups · out]`.
pub(super) fn grouped_product(x: &Tensor, weight: &Tensor, groups: usize) -> Result<Tensor> {
    x.apply_op2_no_bwd(weight, &GroupedProduct { groups })
}

struct GroupedProduct {
    groups: usize,
}

/// Lengths of the product. cuBLAS counts in i32 and holds matrices by columns: to it, `x` is
/// `inner` high and `rows` wide, and so on.
#[derive(Clone, Copy)]
struct Lengths {
    rows: usize,
    groups: usize,
    inner: usize,
    out: usize,
}

impl Lengths {
    fn of(x: &Layout, weight: &Layout, groups: usize) -> Result<Self> {
        let (rows, x_width) = x.shape().dims2()?;
        let (w_rows, inner) = weight.shape().dims2()?;
        let lengths = Self {
            rows,
            groups,
            inner,
            out: w_rows / groups.max(1),
        };
        let Self { out, .. } = lengths;
        let fit = x_width == groups * inner && w_rows == groups * out;
        let some = [rows, groups, inner, out].iter().all(|n| *n > 0);
        let counted = [rows, x_width, w_rows]
            .iter()
            .all(|n| i32::try_from(*n).is_ok());
        if !fit || !some || !counted {
            bail!(
                "{NAME}: cannot multiply [{rows}, {x_width}] by {groups} groups of [{w_rows}, {inner}]"
            );
        }
        if !x.is_contiguous() || !weight.is_contiguous() {
            bail!("{NAME}: expected contiguous tensors");
        }
        Ok(lengths)
    }
}

const NAME: &str = "grouped-product";

impl GroupedProduct {
    fn multiply<T: CudaDType + DeviceRepr>(
        &self,
        (x, x_layout): (&CudaStorage, &Layout),
        (weight, w_layout): (&CudaStorage, &Layout),
        (dtype, compute): (sys::cudaDataType, sys::cublasComputeType_t),
    ) -> Result<(CudaStorage, Shape)> {
        let lengths = Lengths::of(x_layout, w_layout, self.groups)?;
        let Lengths {
            rows,
            groups,
            inner,
            out,
        } = lengths;
        let device = x.device.clone();
        let (stream, blas) = (device.cuda_stream(), device.cublas_handle());
        let x = x.as_cuda_slice::<T>()?;
        let x = x.slice(x_layout.start_offset()..x_layout.start_offset() + rows * groups * inner);
        let weight = weight.as_cuda_slice::<T>()?;
        let weight =
            weight.slice(w_layout.start_offset()..w_layout.start_offset() + groups * out * inner);
        // SAFETY: the product below writes every element.
        let mut y = unsafe { device.alloc::<T>(rows * groups * out) }?;
        {
            let (x, _x_use) = x.device_ptr(&stream);
            let (weight, _weight_use) = weight.device_ptr(&stream);
            let (y, _y_use) = y.device_ptr_mut(&stream);
            let (one, zero) = (1f32, 0f32);
            // SAFETY: the addresses are those of the slices above, which live until the product is
            // queued on the stream of the handle, where memory is also freed. Matrix g of the batch
            // begins g parts into a row (x and y) or g matrices on (weight), and with the leading
            // dimensions, a whole row each, its last element lies within its slice; all lengths fit
            // i32. The factors are f32, as this computation takes them, and read before the call
            // returns.
            unsafe {
                gemm_strided_batched_ex(
                    *blas.handle(),
                    sys::cublasOperation_t::CUBLAS_OP_T,
                    sys::cublasOperation_t::CUBLAS_OP_N,
                    out as i32,
                    rows as i32,
                    inner as i32,
                    (&raw const one).cast(),
                    weight as *const _,
                    dtype,
                    inner as i32,
                    (out * inner) as i64,
                    x as *const _,
                    dtype,
                    (groups * inner) as i32,
                    inner as i64,
                    (&raw const zero).cast(),
                    y as *mut _,
                    dtype,
                    (groups * out) as i32,
                    out as i64,
                    groups as i32,
                    compute,
                    sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT_TENSOR_OP,
                )
            }
            .w()?;
        }
        Ok((
            CudaStorage::wrap_cuda_slice(y, device),
            Shape::from((rows, groups * out)),
        ))
    }
}

impl CustomOp2 for GroupedProduct {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        bail!("{NAME}: expected CUDA tensors")
    }

    fn cuda_fwd(
        &self,
        x: &CudaStorage,
        x_layout: &Layout,
        weight: &CudaStorage,
        w_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        use sys::cublasComputeType_t as Compute;
        use sys::cudaDataType as Data;
        let (x, weight) = ((x, x_layout), (weight, w_layout));
        // As candle's matmul computes, with f32 sums unless its settings say otherwise.
        match candle_core::backend::BackendStorage::dtype(x.0) {
            DType::F32 => {
                let compute = if gemm_reduced_precision_f32() {
                    Compute::CUBLAS_COMPUTE_32F_FAST_TF32
                } else {
                    Compute::CUBLAS_COMPUTE_32F
                };
                self.multiply::<f32>(x, weight, (Data::CUDA_R_32F, compute))
            }
            DType::BF16 => {
                let compute = if gemm_reduced_precision_bf16() {
                    Compute::CUBLAS_COMPUTE_32F_FAST_16BF
                } else {
                    Compute::CUBLAS_COMPUTE_32F
                };
                self.multiply::<bf16>(x, weight, (Data::CUDA_R_16BF, compute))
            }
            other => bail!("{NAME}: expected f32 or bf16, got {}", other.as_str()),
        }
    }
}
