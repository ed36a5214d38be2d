//! What is refused, before anything is launched.

use candle_core::{DType, Device, Tensor};
use replay_cuda::{
    Error, Operand, gather_rows, gather_rows_into, scatter_rows, scatter_rows_into, write_rows_into,
};

use crate::gpu::gpu;
use crate::tensors::bytes_of;

/// Rows that a tensor lacks are an error when the list is on the host.
#[test]
fn host_lists_are_checked() {
    let gpu = gpu();
    let batch = Tensor::zeros((4, 2), DType::F32, &gpu.device).unwrap();
    let error = gather_rows(&[&batch], &[0, 4]).unwrap_err();
    assert!(
        matches!(
            error,
            Error::RowOutOfRange {
                row: 4,
                tensor: 0,
                rows: 4,
                ..
            }
        ),
        "{error}"
    );
    let error = scatter_rows(&batch, &[0, 2, 2, 3], 5).unwrap_err();
    assert!(
        matches!(
            error,
            Error::NotAscending {
                previous: 2,
                next: 2,
                ..
            }
        ),
        "{error}"
    );
    let error = scatter_rows(&batch, &[0, 1, 2, 5], 5).unwrap_err();
    assert!(
        matches!(
            error,
            Error::RowPastResult {
                row: 5,
                rows: 5,
                ..
            }
        ),
        "{error}"
    );
}

/// Tensors of another device, whether of another GPU stream or of the CPU.
#[test]
fn devices_are_not_mixed() {
    let gpu = gpu();
    let on = |device: &Device| Tensor::zeros((4, 2), DType::F32, device).unwrap();
    let rows = Tensor::new(&[1u32, 2, 3, 0], &gpu.device).unwrap();
    let (batch, output) = (on(&gpu.device), on(&Device::Cpu));
    let error = gather_rows_into(&[&batch], &rows, &[&output]).unwrap_err();
    let Error::Device {
        operand: Operand::Output(0),
        first: Operand::Rows,
        ..
    } = error
    else {
        panic!("{error}");
    };
    let other = on(&crate::gpu::new_device());
    let error = gather_rows_into(&[&other], &rows, &[&batch]).unwrap_err();
    assert!(
        matches!(
            error,
            Error::Device {
                operand: Operand::Source(0),
                ..
            }
        ),
        "{error}"
    );
    gpu.synchronize();
}

/// Shapes, dtypes, contiguity and overlap: each refused by name, and nothing is written.
#[test]
fn arguments_are_checked() {
    let gpu = gpu();
    let device = &gpu.device;
    let f32s = |n: usize| Tensor::ones((n, 2), DType::F32, device).unwrap();
    let rows = Tensor::new(&[1u32, 2, 3], device).unwrap();
    let (batch, output) = (f32s(4), f32s(3));
    let before = bytes_of(&output);
    let gather = |source: &Tensor, rows: &Tensor, output: &Tensor| {
        gather_rows_into(&[source], rows, &[output]).unwrap_err()
    };

    let halves = Tensor::ones((3, 2), DType::F16, device).unwrap();
    let signed = Tensor::new(&[1i64, 2, 3], device).unwrap();
    let transposed = Tensor::ones((2, 4), DType::F32, device)
        .unwrap()
        .t()
        .unwrap();
    let overlapping = batch.narrow(0, 1, 3).unwrap();
    for (error, expected) in [
        (
            gather(&batch, &rows, &f32s(4)),
            "output 0 is of shape [4, 2], expected [3, 2]",
        ),
        (
            gather(&batch, &rows, &halves),
            "output 0 is F16, expected F32",
        ),
        (
            gather(&batch, &signed, &output),
            "the row list is I64, expected U32",
        ),
        (
            gather(&transposed, &rows, &output),
            "tensor 0 is not contiguous",
        ),
        (
            gather(&batch, &rows, &overlapping),
            "output 0 shares memory with tensor 0",
        ),
        (
            gather_rows_into(&[&batch], &rows, &[]).unwrap_err(),
            "0 outputs for 1 tensors",
        ),
    ] {
        assert_eq!(error.to_string(), format!("gather-rows: {expected}"));
    }
    let outputs = f32s(8);
    let halves = [
        outputs.narrow(0, 0, 4).unwrap(),
        outputs.narrow(0, 3, 5).unwrap(),
    ];
    let error = scatter_rows_into(&[&output, &output], &rows, &[&halves[0], &halves[1]]);
    let error = error.unwrap_err().to_string();
    assert_eq!(error, "scatter-rows: output 0 shares memory with output 1");
    let error = write_rows_into(&[&batch], &rows, &[&outputs])
        .unwrap_err()
        .to_string();
    assert_eq!(error, "write-rows: 4 rows of values for 3 row numbers");
    assert_eq!(bytes_of(&output), before);
    gpu.synchronize();
}

/// Parts of one storage that do not overlap may be read and written in one launch.
#[test]
fn parts_of_one_storage_are_apart() {
    let gpu = gpu();
    let on = |device: &Device| {
        let all = Tensor::arange(0f32, 40.0, device)
            .unwrap()
            .reshape((20, 2))
            .unwrap();
        let rows = Tensor::new(&[4u32, 0, 2], device).unwrap();
        let part = |start, len| all.narrow(0, start, len).unwrap();
        let (first, second) = (part(0, 5), part(5, 5));
        gather_rows_into(&[&first, &second], &rows, &[&part(12, 3), &part(16, 3)]).unwrap();
        all
    };
    crate::tensors::assert_same(&on(&gpu.device), &on(&Device::Cpu), "one storage");
    gpu.synchronize();
}
