//! The driver's status inside an error.

use std::error::Error as StdError;

use candle_core::cuda_backend::CudaError;
use candle_core::cuda_backend::cudarc::driver::DriverError;

use crate::cause::{innermost, is_refused_copy};
use crate::{DriverStatus, Error};

pub(super) fn status(error: DriverError) -> DriverStatus {
    DriverStatus::new(error.0 as u32)
}

/// What an error says of itself.
#[derive(Clone, Copy)]
pub(super) enum Evidence {
    /// A driver call failed.
    Status(DriverStatus),
    /// A copy of host memory was refused.
    RefusedCopy,
    /// It is about something else, or has been explained.
    Nothing,
}

pub(super) fn evidence(error: &Error) -> Evidence {
    match error {
        Error::Candle(error) | Error::Rows(replay_cuda::Error::Candle(error)) => of_candle(error),
        Error::Driver { status, .. } => Evidence::Status(*status),
        Error::Program(error) => {
            let mut next: Option<&(dyn StdError + 'static)> = Some(&**error);
            while let Some(error) = next {
                if let Some(error) = error.downcast_ref::<candle_core::Error>() {
                    return of_candle(error);
                }
                if let Some(error) = error.downcast_ref::<DriverError>() {
                    return Evidence::Status(status(*error));
                }
                if let Some(error) = error.downcast_ref::<Error>() {
                    return evidence(error);
                }
                next = error.source();
            }
            Evidence::Nothing
        }
        _ => Evidence::Nothing,
    }
}

fn of_candle(error: &candle_core::Error) -> Evidence {
    if is_refused_copy(error) {
        return Evidence::RefusedCopy;
    }
    let candle_core::Error::Cuda(error) = innermost(error) else {
        return Evidence::Nothing;
    };
    match error.downcast_ref::<CudaError>() {
        Some(CudaError::Cuda(error) | CudaError::Load { cuda: error, .. }) => {
            Evidence::Status(status(*error))
        }
        _ => Evidence::Nothing,
    }
}
