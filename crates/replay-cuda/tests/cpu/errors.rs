//! What is refused: by name, and before anything is written.

use candle_core::{DType, Device, Tensor};
use replay_cuda::{
    Error, ReplayRows, gather_rows, gather_rows_into, load_kernels, row_list, scatter_rows,
    scatter_rows_into, write_rows_into,
};

fn f32s(dims: &[usize]) -> Tensor {
    Tensor::ones(dims, DType::F32, &Device::Cpu).unwrap()
}

fn list(rows: &[u32]) -> Tensor {
    Tensor::from_vec(rows.to_vec(), rows.len(), &Device::Cpu).unwrap()
}

#[track_caller]
fn refused<T>(result: Result<T, Error>, message: &str) {
    match result {
        Ok(_) => panic!("expected: {message}"),
        Err(error) => assert_eq!(error.to_string(), message),
    }
}

#[test]
fn lists_on_the_host() {
    let batch = f32s(&[4, 2]);
    refused(
        gather_rows(&[&batch, &f32s(&[3])], &[1, 3]),
        "gather-rows: row 3 is asked of tensor 1, which has 3",
    );
    refused(
        gather_rows(&[&f32s(&[])], &[]),
        "gather-rows: tensor 0 is a scalar, expected a row axis",
    );
    refused(
        scatter_rows(&batch, &[0, 2, 2, 3], 9),
        "scatter-rows: expected ascending rows, got 2 after 2",
    );
    refused(
        scatter_rows(&batch, &[0, 1, 2, 9], 9),
        "scatter-rows: row 9 is listed, but the result has 9 rows",
    );
    refused(
        scatter_rows(&batch, &[0, 1, 2], 9),
        "scatter-rows: 4 rows of values for 3 row numbers",
    );
    refused(
        row_list(&[1, 2], 1, &Device::Cpu),
        "row-list: 2 rows are listed, expected at most the 1 that the list is padded to",
    );
}

#[test]
fn lists_as_tensors() {
    let (values, output) = (f32s(&[3, 2]), f32s(&[5, 2]));
    for (rows, message) in [
        (
            [2, 1, 4],
            "scatter-rows: expected ascending rows, got 1 after 2",
        ),
        (
            [1, 1, 4],
            "scatter-rows: expected ascending rows, got 1 after 1",
        ),
        (
            [1, u32::MAX, 4],
            "scatter-rows: expected ascending rows, got 4 after 4294967295",
        ),
    ] {
        refused(
            scatter_rows_into(&[&values], &list(&rows), &[&output]),
            message,
        );
    }
    let rows = list(&[4, 0, 4]);
    refused(
        write_rows_into(&[&values], &rows, &[&output]),
        "write-rows: row 4 is listed twice",
    );
    assert_eq!(output.to_vec2::<f32>().unwrap(), [[1.0; 2]; 5]);
}

#[test]
fn tensors_that_do_not_fit() {
    let (batch, output, rows) = (f32s(&[4, 2]), f32s(&[3, 2]), list(&[0, 1, 2]));
    let gather = |source: &Tensor, rows: &Tensor, output: &Tensor| {
        gather_rows_into(&[source], rows, &[output])
    };
    refused(
        gather(&batch, &rows, &f32s(&[3, 3])),
        "gather-rows: output 0 is of shape [3, 3], expected [3, 2]",
    );
    refused(
        gather(&batch, &rows.reshape((3, 1)).unwrap(), &output),
        "gather-rows: the row list is of shape [3, 1], expected [3]",
    );
    refused(
        gather(&batch, &rows.to_dtype(DType::U8).unwrap(), &output),
        "gather-rows: the row list is U8, expected U32",
    );
    refused(
        gather(&batch, &rows, &output.to_dtype(DType::F64).unwrap()),
        "gather-rows: output 0 is F64, expected F32",
    );
    refused(
        gather(&f32s(&[2, 4]).t().unwrap(), &rows, &output),
        "gather-rows: tensor 0 is not contiguous",
    );
    refused(
        gather(&batch, &rows, &batch.narrow(0, 0, 3).unwrap()),
        "gather-rows: output 0 shares memory with tensor 0",
    );
    refused(
        scatter_rows_into(&[&output, &output], &rows, &[&batch, &batch]),
        "scatter-rows: output 0 shares memory with output 1",
    );
    refused(
        gather_rows_into(&[&batch], &rows, &[]),
        "gather-rows: 0 outputs for 1 tensors",
    );
    refused(
        gather(&f32s(&[]), &rows, &output),
        "gather-rows: tensor 0 is a scalar, expected a row axis",
    );
}

#[test]
fn buffers_of_other_dtypes() {
    let dtypes = (DType::F32, DType::I64);
    refused(
        ReplayRows::new(4, 1, dtypes, &Device::Cpu),
        "replay-rows: positions is F32, expected U32 or I32 or I64",
    );
}

/// Buffers that hold nothing: a step would be refused, or cut short to no row.
#[test]
fn buffers_for_nothing() {
    let dtypes = (DType::U32, DType::I64);
    refused(
        ReplayRows::new(0, 1, dtypes, &Device::Cpu),
        "replay-rows: buffers for 0 rows of 1 requests, expected room for one of each",
    );
    refused(
        ReplayRows::new(4, 0, dtypes, &Device::Cpu),
        "replay-rows: buffers for 4 rows of 0 requests, expected room for one of each",
    );
}

/// Sizes whose bytes no number counts: a multiplication that wraps would ask for little memory and
/// then write past it.
#[test]
fn sizes_past_all_memory() {
    let most = usize::MAX;
    let dtypes = (DType::U32, DType::I64);
    refused(
        scatter_rows(&f32s(&[1, 2]), &[0], most),
        &format!("scatter-rows: no memory for {most} rows of 8 bytes"),
    );
    // Countable, and still more than there is.
    let rows = 1 << 55;
    let error = scatter_rows(&f32s(&[1, 2]), &[0], rows).unwrap_err();
    // A backtrace may follow.
    let message = format!("scatter-rows: no memory for {rows} rows of 8 bytes");
    assert!(error.to_string().starts_with(&message), "{error}");
    refused(
        row_list(&[1], most, &Device::Cpu),
        &format!("row-list: no memory for {most} rows of 4 bytes"),
    );
    refused(
        row_list(&[1], rows, &Device::Cpu),
        &format!("row-list: no memory for {rows} rows of 4 bytes"),
    );
    let too_large =
        |name| format!("replay-rows: {name} has too many or too long rows for one launch");
    refused(
        ReplayRows::new(most, 1, dtypes, &Device::Cpu),
        &too_large("rows"),
    );
    refused(
        ReplayRows::new(1, most, dtypes, &Device::Cpu),
        &too_large("kv_start"),
    );
}

/// There are no kernels on the CPU, and none are needed.
#[test]
fn loading_on_the_cpu_does_nothing() {
    load_kernels(&Device::Cpu).unwrap();
}
