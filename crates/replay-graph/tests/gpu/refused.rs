//! What a capture refuses: by a name that says what was done, and with the device as usable as
//! before.

use std::thread;

use candle_core::cuda_backend::cudarc::driver::sys::CUstreamCaptureMode;
use candle_core::{DType, Device, Tensor};
use replay_graph::{BreakableGraph, Error, Result, Scope};

use crate::gpu::{Gpu, gpu};

/// Captures a program that behaves in its warm-up alone, then checks that the device is well.
#[track_caller]
fn refusal<T: std::fmt::Debug>(
    gpu: &Gpu,
    mut program: impl FnMut(&mut Scope<'_>) -> Result<T>,
) -> Error {
    let error = BreakableGraph::capture(gpu, |scope| program(scope)).unwrap_err();
    println!("{error}");
    gpu.works();
    assert!(gpu.as_cuda_device().unwrap().is_event_tracking());
    // The stream is free: a good program is captured right after.
    let input = Tensor::new(&[1f32, 2.0], &gpu.device).unwrap();
    let graph = BreakableGraph::capture(gpu, |_| Ok(input.sqr()?)).unwrap();
    assert_eq!(graph.output().to_vec1::<f32>().unwrap(), [1.0, 4.0]);
    error
}

/// Shapes that the warm-up did not upload.
#[test]
fn an_operation_that_was_not_warmed_up() {
    let gpu = gpu();
    let input = gpu.tensor(&[13, 29], 1);
    let error = refusal(&gpu, |scope| {
        if scope.is_warm_up() {
            Ok(input.clone())
        } else {
            Ok(input.t()?.contiguous()?)
        }
    });
    assert!(
        matches!(
            error,
            Error::HostCopy {
                segment: 0,
                source: Some(_),
                ..
            }
        ),
        "{error:?}"
    );
}

/// A large upload: a launch would copy from memory that the program has freed.
#[test]
fn an_upload() {
    let gpu = gpu();
    // More than the 4 KiB that candle keeps on the device after the warm-up.
    let values = vec![7f32; 64 * 64];
    let error = refusal(&gpu, |_| {
        Ok(Tensor::from_vec(values.clone(), (64, 64), &gpu.device)?)
    });
    assert!(
        matches!(
            error,
            Error::HostCopy {
                source: Some(_),
                ..
            }
        ),
        "{error:?}"
    );
}

/// A download waits for the device, which in a capture never comes.
#[test]
fn a_download() {
    let gpu = gpu();
    let input = gpu.tensor(&[4], 1);
    // In the warm-up it is legal.
    let error = refusal(&gpu, |_| Ok(input.sqr()?.to_vec1::<f32>()?));
    assert!(
        matches!(
            error,
            Error::HostCopy {
                source: Some(_),
                ..
            }
        ),
        "{error:?}"
    );
}

/// An upload past candle is recorded by the address of the host memory, which is soon another's.
#[test]
fn an_upload_past_candle() {
    let gpu = gpu();
    let stream = gpu.stream();
    let error = refusal(&gpu, |scope| {
        if !scope.is_warm_up() {
            let uploaded = stream.clone_htod(&[1f32, 2.0, 3.0]);
            uploaded.map_err(Error::program)?;
        }
        Ok(())
    });
    assert!(
        matches!(error, Error::HostCopy { source: None, .. }),
        "{error:?}"
    );
}

/// A tensor from outside that is dropped inside is never freed, and the error surfaces in whatever
/// call comes next.
#[test]
fn a_drop_before_another_operation() {
    let gpu = gpu();
    let input = gpu.tensor(&[4], 1);
    let mut outside = Some(gpu.tensor(&[4], 2));
    let error = refusal(&gpu, |scope| {
        if !scope.is_warm_up() {
            outside = None;
        }
        Ok(input.sqr()?.sqr()?)
    });
    assert!(
        matches!(error, Error::DroppedInside { segment: 0, .. }),
        "{error:?}"
    );
}

/// The same with nothing after it: the error would surface after the capture.
#[test]
fn a_drop_at_the_end() {
    let gpu = gpu();
    let input = gpu.tensor(&[4], 1);
    let mut outside = Some(gpu.tensor(&[4], 2));
    let error = refusal(&gpu, |scope| {
        let x = input.sqr()?;
        if !scope.is_warm_up() {
            outside = None;
        }
        Ok(x)
    });
    assert!(
        matches!(error, Error::DroppedInside { segment: 0, .. }),
        "{error:?}"
    );
}

/// The same in the segment after a break, which is to be told by its number.
#[test]
fn a_drop_after_a_break() {
    let gpu = gpu();
    let input = gpu.tensor(&[4], 1);
    let mut outside = Some(gpu.tensor(&[4], 2));
    let error = refusal(&gpu, |scope| {
        let x = input.sqr()?;
        scope.eager_break(|()| Ok(()))?;
        if !scope.is_warm_up() {
            outside = None;
        }
        Ok(x.sqr()?)
    });
    assert!(
        matches!(error, Error::DroppedInside { segment: 1, .. }),
        "{error:?}"
    );
}

/// Waiting for the stream that is being captured.
#[test]
fn a_synchronisation() {
    let gpu = gpu();
    let input = gpu.tensor(&[4], 1);
    // In the warm-up it is legal.
    let error = refusal(&gpu, |_| {
        let x = input.sqr()?;
        gpu.synchronize()?;
        Ok(x)
    });
    assert!(
        matches!(error, Error::Forbidden { segment: 0, .. }),
        "{error:?}"
    );
}

/// Two captures of one stream end up in one graph.
#[test]
fn a_capture_in_a_segment() {
    let gpu = gpu();
    let input = gpu.tensor(&[4], 1);
    let error = refusal(&gpu, |scope| {
        if scope.is_warm_up() {
            return Ok(input.clone());
        }
        let inner = BreakableGraph::capture(&gpu, |_| Ok(input.sqr()?))?;
        Ok(inner.output().clone())
    });
    assert!(matches!(error, Error::Nested { .. }), "{error:?}");
}

/// Another thread with a handle of the same device queues its work into the capture.
#[test]
fn a_capture_from_another_thread() {
    let gpu = gpu();
    let input = gpu.tensor(&[4], 1);
    let (device, shared) = (gpu.device.clone(), input.clone());
    let error = refusal(&gpu, |scope| {
        if scope.is_warm_up() {
            return Ok(input.clone());
        }
        thread::scope(|threads| {
            let other = threads.spawn(|| {
                let captured = BreakableGraph::capture(&device, |_| Ok(shared.sqr()?));
                captured.map(|_| ())
            });
            other.join().expect("it does not panic")
        })?;
        Ok(input.sqr()?)
    });
    assert!(matches!(error, Error::OtherThread { .. }), "{error:?}");
}

/// A graph launched into another's segment becomes part of it, memory and all.
#[test]
fn a_launch_in_a_segment() {
    let gpu = gpu();
    let input = gpu.tensor(&[4], 1);
    let mut inner = BreakableGraph::capture(&gpu, |_| Ok(input.sqr()?)).unwrap();
    let error = refusal(&gpu, |scope| {
        if scope.is_warm_up() {
            Ok(input.clone())
        } else {
            Ok(inner.launch()?.clone())
        }
    });
    assert!(matches!(error, Error::LaunchInCapture { .. }), "{error:?}");
    inner.launch().unwrap();
}

/// A stream that someone else captures.
#[test]
fn a_stream_that_is_being_captured() {
    let gpu = gpu();
    let input = gpu.tensor(&[4], 1);
    let stream = gpu.stream();
    let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    gpu.synchronize().unwrap();
    stream.begin_capture(mode).unwrap();
    let refused = BreakableGraph::capture(&gpu, |_| Ok(input.sqr()?));
    end_capture(&gpu);
    let error = refused.unwrap_err();
    assert!(matches!(error, Error::ForeignCapture { .. }), "{error:?}");
    gpu.works();
}

fn end_capture(gpu: &Gpu) {
    use candle_core::cuda_backend::cudarc::driver::sys::CUgraphInstantiate_flags as Flags;
    gpu.stream().end_capture(Flags(0)).unwrap();
}

/// The default stream cannot be captured, or is another on every thread.
#[test]
fn a_default_stream() {
    let gpu = gpu();
    let device = Device::new_cuda(0).unwrap();
    let input = Tensor::zeros(4, DType::F32, &device).unwrap();
    let refused = BreakableGraph::capture(&device, |_| Ok(input.sqr()?));
    let error = refused.unwrap_err();
    assert!(matches!(error, Error::SharedStream), "{error:?}");
    gpu.works();
}

/// The program's own error is given as it is.
#[test]
fn an_error_of_the_program() {
    let gpu = gpu();
    let (a, b) = (gpu.tensor(&[2, 3], 1), gpu.tensor(&[2, 3], 2));
    let error = refusal(&gpu, |scope| {
        if scope.is_warm_up() {
            Ok(a.clone())
        } else {
            Ok(a.matmul(&b)?)
        }
    });
    assert!(matches!(error, Error::Candle(_)), "{error:?}");
}
