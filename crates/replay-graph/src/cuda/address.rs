//! Addresses of device storage.

use candle_core::CudaStorage;
use candle_core::cuda_backend::CudaStorageSlice;
use candle_core::cuda_backend::cudarc::driver::DevicePtr;

use crate::Result;

/// The address of a storage's first element.
#[expect(
    clippy::unnecessary_wraps,
    reason = "builds without CUDA have no address to give"
)]
pub(crate) fn address(storage: &CudaStorage) -> Result<u64> {
    let stream = storage.device.cuda_stream();
    // Where uses are tracked by events, the guard beside the address records one more use.
    macro_rules! base {
        ($slice:expr) => {
            $slice.device_ptr(&stream).0
        };
    }
    Ok(match &storage.slice {
        CudaStorageSlice::U8(slice)
        | CudaStorageSlice::F6E2M3(slice)
        | CudaStorageSlice::F6E3M2(slice)
        | CudaStorageSlice::F4(slice)
        | CudaStorageSlice::F8E8M0(slice) => base!(slice),
        CudaStorageSlice::U32(slice) => base!(slice),
        CudaStorageSlice::I16(slice) => base!(slice),
        CudaStorageSlice::I32(slice) => base!(slice),
        CudaStorageSlice::I64(slice) => base!(slice),
        CudaStorageSlice::BF16(slice) => base!(slice),
        CudaStorageSlice::F16(slice) => base!(slice),
        CudaStorageSlice::F32(slice) => base!(slice),
        CudaStorageSlice::F64(slice) => base!(slice),
        CudaStorageSlice::F8E4M3(slice) => base!(slice),
    })
}
