//! Gather, scatter and write against the CPU.

use std::collections::BTreeSet;

use candle_core::{DType, Device, Tensor};
use replay_cuda::{
    PAD_ROW, Result, gather_rows, gather_rows_into, scatter_rows, scatter_rows_into,
    write_rows_into,
};

use crate::gpu::{Gpu, gpu, small};
use crate::tensors::{DTYPES, Random, assert_same, bytes_of, poisoned, view};

type IntoBuffers = fn(&[&Tensor], &Tensor, &[&Tensor]) -> Result<()>;

/// Runs one operation on a GPU and on the CPU, each on views with the given offsets in elements, and
/// compares the outputs and what lies around them.
#[track_caller]
fn check(
    gpu: &Gpu,
    run: IntoBuffers,
    dtype: DType,
    width: usize,
    (n_source, n_output): (usize, usize),
    rows: &[u32],
    (source_offset, output_offset): (usize, usize),
) {
    let size = dtype.size_in_bytes();
    let bytes = Random::new(rows.len() as u64 + width as u64).bytes(n_source * width * size);
    let on = |device: &Device| {
        // The list is a view, too; a list of no rows has no memory of its own.
        let mut list = vec![7; 3];
        list.extend_from_slice(rows);
        let rows = Tensor::new(list, device)
            .unwrap()
            .narrow(0, 3, rows.len())
            .unwrap();
        let source = view(&bytes, dtype, (n_source, width), source_offset, device);
        let around = (n_output * width + output_offset + 5, 1);
        let around = poisoned(dtype, around, 0, device).flatten_all().unwrap();
        let output = around.narrow(0, output_offset, n_output * width).unwrap();
        let output = output.reshape((n_output, width)).unwrap();
        run(&[&source], &rows, &[&output]).unwrap();
        around
    };
    let (got, expected) = (on(&gpu.device), on(&Device::Cpu));
    gpu.synchronize();
    let what = format!(
        "{dtype:?}, rows of {} bytes, {n_source} to {n_output} by {} listed, offsets \
         {source_offset} and {output_offset}",
        width * size,
        rows.len()
    );
    assert_same(&got, &expected, &what);
}

/// Widths in bytes: one unit of each kind, odd ones, narrow and wide ones, and around the cuts.
const ROW_BYTES: [usize; 16] = [
    1, 2, 3, 4, 8, 16, 17, 64, 100, 1000, 4096, 8191, 8192, 10_240, 16_400, 40_960,
];

/// Row numbers in any order, some twice, and some that no tensor has.
fn any_rows(random: &mut Random, n: usize, n_source: usize) -> Vec<u32> {
    let mut row = |_| match random.below(12) {
        0 => PAD_ROW,
        1 => n_source as u32 + random.below(3) as u32,
        _ => random.below(n_source) as u32,
    };
    (0..n).map(&mut row).collect()
}

/// Calls `case` with every dtype, width in elements and number of listed rows.
fn for_each_case(mut case: impl FnMut(DType, usize, usize)) {
    let dtypes = if small() { &DTYPES[..2] } else { &DTYPES };
    for &dtype in dtypes {
        let size = dtype.size_in_bytes();
        for bytes in ROW_BYTES.into_iter().filter(|bytes| bytes % size == 0) {
            let most = match bytes {
                0..=1000 if !small() => 1000,
                _ => 128,
            };
            for n in [0, 1, 21, 128, 1000].into_iter().filter(|n| *n <= most) {
                case(dtype, bytes / size, n);
            }
        }
    }
}

/// Where sources and outputs begin in their storages, in elements.
const OFFSETS: [(usize, usize); 4] = [(0, 0), (1, 0), (0, 3), (2, 2)];

/// Every dtype, width and number of rows, aligned and not.
#[test]
fn gather_equals_the_cpu() {
    let gpu = gpu();
    let mut random = Random::new(21);
    for_each_case(|dtype, width, n| {
        let n_source = 1 + random.below(200);
        let rows = any_rows(&mut random, n, n_source);
        for offsets in OFFSETS {
            check(
                &gpu,
                gather_rows_into,
                dtype,
                width,
                (n_source, n),
                &rows,
                offsets,
            );
        }
    });
}

#[test]
fn scatter_equals_the_cpu() {
    let gpu = gpu();
    let mut random = Random::new(22);
    for_each_case(|dtype, width, n| {
        let n_output = n + random.below(100);
        // Some past the output, and padding.
        let mut rows = random.ascending(n, n_output + 2);
        rows.resize(n, PAD_ROW);
        for offsets in OFFSETS {
            check(
                &gpu,
                scatter_rows_into,
                dtype,
                width,
                (n, n_output),
                &rows,
                offsets,
            );
        }
    });
}

#[test]
fn write_equals_the_cpu() {
    let gpu = gpu();
    let mut random = Random::new(20);
    for_each_case(|dtype, width, n| {
        let n_output = n + random.below(100);
        let mut rows = random.ascending(n, n_output + 2);
        rows.resize(n, PAD_ROW);
        random.shuffle(&mut rows);
        for offsets in OFFSETS {
            check(
                &gpu,
                write_rows_into,
                dtype,
                width,
                (n, n_output),
                &rows,
                offsets,
            );
        }
    });
}

/// As many rows as a replay batch has, and rows as long as any: 160 KiB, and one byte more.
#[test]
fn many_rows_and_long_rows() {
    let gpu = gpu();
    let mut random = Random::new(4);
    let n = if small() { 512 } else { 8192 };
    for width in [1, 16, 2560] {
        let rows = any_rows(&mut random, n, 32_768);
        check(
            &gpu,
            gather_rows_into,
            DType::U8,
            width,
            (32_768, n),
            &rows,
            (0, 0),
        );
        let mut rows = random.ascending(n, 32_768);
        check(
            &gpu,
            scatter_rows_into,
            DType::U8,
            width,
            (n, 32_768),
            &rows,
            (0, 0),
        );
        random.shuffle(&mut rows);
        check(
            &gpu,
            write_rows_into,
            DType::U8,
            width,
            (n, 32_768),
            &rows,
            (0, 0),
        );
    }
    for width in [160 << 10, (160 << 10) + 1] {
        for n in [1, 21, 128] {
            let rows = random.ascending(n, 150);
            for offsets in [(0, 0), (1, 0)] {
                check(
                    &gpu,
                    gather_rows_into,
                    DType::U8,
                    width,
                    (150, n),
                    &rows,
                    offsets,
                );
                check(
                    &gpu,
                    scatter_rows_into,
                    DType::U8,
                    width,
                    (n, 150),
                    &rows,
                    offsets,
                );
            }
        }
    }
}

/// Tensors of many dtypes and widths by one list, in one launch up to 32 and in several past it.
#[test]
fn many_tensors_follow_one_list() {
    let gpu = gpu();
    let mut random = Random::new(5);
    for n_tensors in [1, 7, 32, 33, 70] {
        let n_batch = 60;
        let rows = random.ascending(21, n_batch);
        let shapes: Vec<_> = (0..n_tensors)
            .map(|i| (DTYPES[i % DTYPES.len()], [0, 1, 4, 33, 700][i % 5]))
            .collect();
        let batch: Vec<Vec<u8>> = shapes
            .iter()
            .map(|(dtype, width)| random.bytes(n_batch * width * dtype.size_in_bytes()))
            .collect();
        let on = |device: &Device| {
            let list = Tensor::new(rows.as_slice(), device).unwrap();
            let tensors = |n_rows: usize, bytes: Option<&Vec<Vec<u8>>>| -> Vec<Tensor> {
                let make = |(i, (dtype, width)): (usize, &(DType, usize))| match bytes {
                    Some(bytes) => view(&bytes[i], *dtype, (n_rows, *width), i % 3, device),
                    None => poisoned(*dtype, (n_rows, *width), i % 2, device),
                };
                shapes.iter().enumerate().map(make).collect()
            };
            let sources = tensors(n_batch, Some(&batch));
            let kept = tensors(rows.len(), None);
            let back = tensors(n_batch, None);
            let written = tensors(n_batch, None);
            gather_rows_into(&refs(&sources), &list, &refs(&kept)).unwrap();
            scatter_rows_into(&refs(&kept), &list, &refs(&back)).unwrap();
            write_rows_into(&refs(&kept), &list, &refs(&written)).unwrap();
            [kept, back, written]
        };
        let (got, expected) = (on(&gpu.device), on(&Device::Cpu));
        gpu.synchronize();
        for (got, expected) in got.iter().flatten().zip(expected.iter().flatten()) {
            assert_same(got, expected, &format!("of {n_tensors} tensors"));
        }
    }
}

fn refs(list: &[Tensor]) -> Vec<&Tensor> {
    list.iter().collect()
}

/// Lists on the host: the same results, allocated, also of tensors that are not contiguous.
#[test]
fn host_lists_equal_the_cpu() {
    let gpu = gpu();
    let mut random = Random::new(6);
    for rows in [vec![], vec![3], vec![0, 4, 5, 9]] {
        let bytes = random.bytes(10 * 6 * 4);
        let on = |device: &Device| {
            let batch = Tensor::from_raw_buffer(&bytes, DType::F32, &[6, 10], device).unwrap();
            let (columns, wide) = (batch.t().unwrap(), batch.reshape((10, 3, 2)).unwrap());
            let kept = gather_rows(&[&columns, &wide], &rows).unwrap();
            let back = scatter_rows(&kept[1], &rows, 10).unwrap();
            let all = scatter_rows(&kept[0], &rows, 10).unwrap();
            [kept[0].clone(), kept[1].clone(), back, all]
        };
        let (got, expected) = (on(&gpu.device), on(&Device::Cpu));
        for (got, expected) in got.iter().zip(&expected) {
            assert_same(got, expected, &format!("rows {rows:?}"));
        }
    }
    gpu.synchronize();
}

/// A list on the device that breaks the contract moves the wrong rows and touches no other memory:
/// what lies around the outputs stays, and every byte of a scatter is written.
#[test]
fn lists_that_break_the_contract_are_memory_safe() {
    let gpu = gpu();
    let (n, n_output, width) = (40, 64, 24);
    let mut random = Random::new(7);
    let bytes = random.bytes(n * width);
    for (run, zeros) in [
        (scatter_rows_into as IntoBuffers, true),
        (write_rows_into, false),
    ] {
        let rows: Vec<u32> = (0..n)
            .map(|_| [0, 5, 5, 63, 64, 1 << 31, PAD_ROW - 1, PAD_ROW][random.below(8)])
            .collect();
        let listed: BTreeSet<_> = rows.iter().filter(|row| **row < n_output as u32).collect();
        let n_listed = listed.len();
        let list = Tensor::new(rows.as_slice(), &gpu.device).unwrap();
        let source = view(&bytes, DType::U8, (n, width), 0, &gpu.device);
        let around = poisoned(DType::U8, (n_output * width + 32, 1), 0, &gpu.device);
        let around = around.flatten_all().unwrap();
        let output = around.narrow(0, 16, n_output * width).unwrap();
        let output = output.reshape((n_output, width)).unwrap();
        run(&[&source], &list, &[&output]).unwrap();
        gpu.synchronize();
        let after = bytes_of(&around);
        assert!(after[..16].iter().all(|byte| *byte == 0xff));
        assert!(
            after[16 + n_output * width..]
                .iter()
                .all(|byte| *byte == 0xff)
        );
        let poison = vec![0xff; width];
        let rows = after[16..].chunks_exact(width).take(n_output);
        let untouched = rows.filter(|row| *row == poison.as_slice()).count();
        assert_eq!(untouched, if zeros { 0 } else { n_output - n_listed });
    }
}
