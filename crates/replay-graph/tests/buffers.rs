//! Fixed buffers: one address for good, and nothing beyond their rows.

use candle_core::{DType, Device, Tensor};
use replay_graph::{BufferSpec, Error, FixedBuffers};

fn buffers() -> FixedBuffers {
    let specs = [
        BufferSpec::new("hidden", [2, 3], DType::F32),
        BufferSpec::new("slots", [], DType::I64),
    ];
    FixedBuffers::new(&specs, 8, &Device::Cpu).unwrap()
}

/// Views of fewer rows share the memory of views of more: what one writes the other reads.
#[test]
fn views_share_their_rows() {
    let buffers = buffers();
    let ones = Tensor::ones((2, 2, 3), DType::F32, &Device::Cpu).unwrap();
    buffers
        .rows("hidden", 2)
        .unwrap()
        .slice_set(&ones, 0, 0)
        .unwrap();
    let all = buffers.rows("hidden", 8).unwrap();
    let sums = all.flatten_from(1).unwrap().sum(1).unwrap();
    assert_eq!(
        sums.to_vec1::<f32>().unwrap(),
        [6.0, 6.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    );
    // Another handle is the same memory.
    buffers.clone().set_zero(1).unwrap();
    let first = all.narrow(0, 0, 2).unwrap().flatten_all().unwrap();
    assert_eq!(first.to_vec1::<f32>().unwrap()[5..7], [0.0, 1.0]);
}

/// Rows that are not there are an error, not memory of something else.
#[test]
fn too_many_rows_are_refused() {
    let buffers = buffers();
    assert_eq!(buffers.rows("slots", 8).unwrap().dims(), [8]);
    assert_eq!(buffers.all_rows(0).unwrap()[0].dims(), [0, 2, 3]);
    for error in [
        buffers.rows("slots", 9).unwrap_err(),
        buffers.all_rows(9).unwrap_err(),
        buffers.set_zero(9).unwrap_err(),
    ] {
        assert!(
            matches!(
                error,
                Error::TooManyRows {
                    rows: 9,
                    max_rows: 8
                }
            ),
            "{error}"
        );
    }
    assert_eq!(buffers.bytes(), 8 * (6 * 4 + 8));
}

/// Sizes whose bytes no number counts: a product that wraps would allocate little and hand out
/// rows past it.
#[test]
fn buffers_past_all_memory_are_refused() {
    let most = usize::MAX;
    for (row_shape, max_rows) in [
        (vec![2], most),
        (vec![], most / 4),
        (vec![most, 2], 1),
        (vec![most, 2, 0], 1),
        (vec![most], 0),
    ] {
        let spec = BufferSpec::new("x", row_shape.clone(), DType::F32);
        let error = FixedBuffers::new(&[spec], max_rows, &Device::Cpu).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("buffer \"x\": no memory for {max_rows} rows of {row_shape:?} of F32")
        );
    }
    assert_eq!(
        BufferSpec::new("x", [most, 2], DType::F32).row_bytes(),
        most
    );
    assert_eq!(BufferSpec::new("x", [most, 0], DType::F32).row_bytes(), 0);
}

/// Every refusal in its words.
#[test]
fn refusals_say_why() {
    let buffers = buffers();
    let tensor = |dims: &[usize], dtype| Tensor::zeros(dims, dtype, &Device::Cpu).unwrap();
    let hidden = tensor(&[4, 2, 3], DType::F32);
    let twice = [
        BufferSpec::new("x", [1], DType::F32),
        BufferSpec::new("x", [2], DType::F32),
    ];
    let refusals = [
        buffers.rows("positions", 1).unwrap_err(),
        FixedBuffers::new(&twice, 1, &Device::Cpu).unwrap_err(),
        buffers.check(std::slice::from_ref(&hidden)).unwrap_err(),
        buffers
            .check(&[hidden.clone(), tensor(&[4], DType::U32)])
            .unwrap_err(),
        buffers
            .check(&[hidden.clone(), tensor(&[4, 1], DType::I64)])
            .unwrap_err(),
        buffers
            .check(&[hidden.clone(), tensor(&[], DType::I64)])
            .unwrap_err(),
        buffers
            .check(&[tensor(&[4, 3, 2], DType::F32), tensor(&[4], DType::I64)])
            .unwrap_err(),
    ];
    buffers.check(&[hidden, tensor(&[4], DType::I64)]).unwrap();
    let text: Vec<_> = refusals.iter().map(ToString::to_string).collect();
    insta::assert_snapshot!(text.join("\n"), @r#"
    no fixed buffer is called "positions"
    two fixed buffers are called "x"
    expected one tensor for each of 2 buffers, got 1
    buffer "slots" takes [rows] of I64, got [4] of U32
    buffer "slots" takes [rows] of I64, got [4, 1] of I64
    buffer "slots" takes [rows] of I64, got [] of I64
    buffer "hidden" takes [rows, 2, 3] of F32, got [4, 3, 2] of F32
    "#);
}

/// The host's allocator ends the program; a buffer that it has no room for must not get there.
#[test]
fn buffers_beyond_the_hosts_memory_are_refused() {
    let specs = [BufferSpec::new("hidden", [4], DType::F32)];
    let max_rows = 1 << 58;
    let error = FixedBuffers::new(&specs, max_rows, &Device::Cpu).unwrap_err();
    assert_eq!(
        error.to_string(),
        format!("buffer \"hidden\": no memory for {max_rows} rows of [4] of F32")
    );
}
