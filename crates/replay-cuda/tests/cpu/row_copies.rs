//! Gather, scatter and write.

use candle_core::{DType, Device, Tensor};
use proptest::prelude::*;
use replay_cuda::{
    PAD_ROW, gather_rows, gather_rows_into, row_list, scatter_rows, scatter_rows_into,
    write_rows_into,
};

type Rows = Vec<Vec<u8>>;

/// A tensor with these rows, which begins `offset` elements into its storage.
fn tensor(rows: &Rows, width: usize, dtype: DType, offset: usize) -> Tensor {
    let size = dtype.size_in_bytes();
    let bytes: Vec<u8> = std::iter::repeat_n(0xa5, offset * size)
        .chain(rows.concat())
        .chain(vec![0xa5; size])
        .collect();
    let all = Tensor::from_raw_buffer(&bytes, dtype, &[bytes.len() / size], &Device::Cpu).unwrap();
    let part = all.narrow(0, offset, rows.len() * width).unwrap();
    part.reshape((rows.len(), width)).unwrap()
}

/// The rows of a tensor of one of the dtypes that the cases use.
fn rows_of(tensor: &Tensor) -> Rows {
    let n_rows = tensor.dims()[0];
    let flat = tensor.flatten_all().unwrap();
    let bytes: Vec<u8> = match tensor.dtype() {
        DType::U8 => flat.to_vec1::<u8>().unwrap(),
        DType::U32 => flat
            .to_vec1::<u32>()
            .unwrap()
            .into_iter()
            .flat_map(u32::to_le_bytes)
            .collect(),
        DType::I64 => flat
            .to_vec1::<i64>()
            .unwrap()
            .into_iter()
            .flat_map(i64::to_le_bytes)
            .collect(),
        _ => flat
            .to_vec1::<f32>()
            .unwrap()
            .into_iter()
            .flat_map(|x| x.to_bits().to_le_bytes())
            .collect(),
    };
    let row_bytes = bytes.len() / n_rows.max(1);
    (0..n_rows)
        .map(|row| bytes[row * row_bytes..(row + 1) * row_bytes].to_vec())
        .collect()
}

#[derive(Clone, Debug)]
struct Case {
    dtype: DType,
    width: usize,
    batch: Rows,
    /// Rows of the batch, ascending.
    kept: Vec<u32>,
    /// Rows of it in any order, some twice, some that it lacks.
    any: Vec<u32>,
    offset: usize,
}

impl Case {
    /// A row without a value, as poison.
    fn poison(&self) -> Vec<u8> {
        vec![0xff; self.width * self.dtype.size_in_bytes()]
    }

    fn zero(&self) -> Vec<u8> {
        vec![0; self.poison().len()]
    }

    fn tensor(&self, rows: &Rows) -> Tensor {
        tensor(rows, self.width, self.dtype, self.offset)
    }

    fn kept_rows(&self) -> Rows {
        self.kept
            .iter()
            .map(|row| self.batch[*row as usize].clone())
            .collect()
    }

    /// The batch with `other` in place of every row that is not kept.
    fn only_kept(&self, other: &[u8]) -> Rows {
        let row = |row: usize| {
            let kept = self.kept.contains(&(row as u32));
            if kept {
                self.batch[row].clone()
            } else {
                other.to_vec()
            }
        };
        (0..self.batch.len()).map(row).collect()
    }
}

fn case() -> impl Strategy<Value = Case> {
    let dtype = prop_oneof![
        Just(DType::U8),
        Just(DType::U32),
        Just(DType::I64),
        Just(DType::F32)
    ];
    (dtype, 1usize..6, 1usize..30, 0usize..4).prop_flat_map(|(dtype, width, n, offset)| {
        let row = prop::collection::vec(any::<u8>(), width * dtype.size_in_bytes());
        let rows: Vec<u32> = (0..n as u32).collect();
        (
            prop::collection::vec(row, n),
            prop::sample::subsequence(rows, 0..=n),
            prop::collection::vec(prop_oneof![0..n as u32 + 2, Just(PAD_ROW)], 0..40),
        )
            .prop_map(move |(batch, kept, any)| Case {
                dtype,
                width,
                batch,
                kept,
                any,
                offset,
            })
    })
}

proptest! {
    /// Row `i` is row `rows[i]`, zero where there is no such row.
    #[test]
    fn gather_restated(case in case()) {
        let expected: Rows = case
            .any
            .iter()
            .map(|row| case.batch.get(*row as usize).cloned().unwrap_or_else(|| case.zero()))
            .collect();
        let output = case.tensor(&vec![case.poison(); case.any.len()]);
        let rows = Tensor::from_vec(case.any.clone(), case.any.len(), &Device::Cpu).unwrap();
        gather_rows_into(&[&case.tensor(&case.batch)], &rows, &[&output]).unwrap();
        prop_assert_eq!(rows_of(&output), expected);

        let kept = gather_rows(&[&case.tensor(&case.batch)], &case.kept).unwrap().remove(0);
        prop_assert_eq!(rows_of(&kept), case.kept_rows());
    }

    /// Listed rows come back, others are zero; written without zeros, others keep what they held.
    #[test]
    fn scatter_restated(case in case(), pads in 0usize..4) {
        let mut values = case.kept_rows();
        let scattered = scatter_rows(&case.tensor(&values), &case.kept, case.batch.len()).unwrap();
        prop_assert_eq!(rows_of(&scattered), case.only_kept(&case.zero()));

        // The list and its values padded, as a graph pads them.
        values.extend(vec![case.poison(); pads]);
        let values = case.tensor(&values);
        let rows = row_list(&case.kept, case.kept.len() + pads, &Device::Cpu).unwrap();
        for (zeros, other) in [(true, case.zero()), (false, case.poison())] {
            let output = case.tensor(&vec![case.poison(); case.batch.len()]);
            let run = if zeros { scatter_rows_into } else { write_rows_into };
            run(&[&values], &rows, &[&output]).unwrap();
            prop_assert_eq!(rows_of(&output), case.only_kept(&other));
        }
    }

    /// What is around a view stays.
    #[test]
    fn views_are_kept_to(case in case()) {
        let all = vec![case.poison(); case.batch.len() + 4];
        let all = tensor(&all, case.width, case.dtype, 0);
        let output = all.narrow(0, 2, case.kept.len()).unwrap();
        let rows = Tensor::from_vec(case.kept.clone(), case.kept.len(), &Device::Cpu).unwrap();
        gather_rows_into(&[&case.tensor(&case.batch)], &rows, &[&output]).unwrap();
        let after = rows_of(&all);
        let end = 2 + case.kept.len();
        prop_assert_eq!(&after[2..end], case.kept_rows());
        prop_assert!(after[..2].iter().chain(&after[end..]).all(|row| *row == case.poison()));
    }
}

/// Every dtype whose rows are moved, and those that candle holds as raw bytes.
#[test]
fn dtypes() {
    use DType::{BF16, F4, F8E4M3, F8E8M0, F16, F32, F64, I16, I32, I64, U8, U32};
    for dtype in [U8, U32, I16, I32, I64, BF16, F16, F32, F64, F8E4M3] {
        let bytes: Vec<u8> = (0..6 * dtype.size_in_bytes()).map(|i| i as u8).collect();
        let batch = Tensor::from_raw_buffer(&bytes, dtype, &[3, 2], &Device::Cpu).unwrap();
        let kept = gather_rows(&[&batch], &[2, 0]).unwrap().remove(0);
        assert_eq!((kept.dtype(), kept.dims()), (dtype, [2, 2].as_slice()));
        let back = scatter_rows(&kept, &[0, 2], 4).unwrap();
        assert_eq!((back.dtype(), back.dims()), (dtype, [4, 2].as_slice()));
    }
    for dtype in [F4, F8E8M0] {
        let batch = Tensor::from_raw_buffer(&[1, 2, 3], dtype, &[3], &Device::Cpu).unwrap();
        let error = gather_rows(&[&batch], &[0]).unwrap_err().to_string();
        assert!(error.starts_with(&format!(
            "gather-rows: tensor 0 is {dtype:?}, expected U8 or"
        )));
    }
}

/// Tensors without a row, of rows without an element, and lists without an entry.
#[test]
fn nothing_to_move() {
    let zeros = |dims: &[usize]| Tensor::zeros(dims, DType::F32, &Device::Cpu).unwrap();
    let none = Tensor::from_vec(Vec::<u32>::new(), 0, &Device::Cpu).unwrap();
    gather_rows_into(&[&zeros(&[0, 3])], &none, &[&zeros(&[0, 3])]).unwrap();
    gather_rows_into(&[], &none, &[]).unwrap();
    let rows = Tensor::new(&[1u32, 0], &Device::Cpu).unwrap();
    gather_rows_into(&[&zeros(&[2, 0])], &rows, &[&zeros(&[2, 0])]).unwrap();
    // Of a tensor without rows, every row is zero.
    let output = Tensor::ones((2, 3), DType::F32, &Device::Cpu).unwrap();
    gather_rows_into(&[&zeros(&[0, 3])], &rows, &[&output]).unwrap();
    assert_eq!(output.to_vec2::<f32>().unwrap(), [[0.0; 3]; 2]);
    let output = Tensor::ones((2, 3), DType::F32, &Device::Cpu).unwrap();
    scatter_rows_into(&[&zeros(&[0, 3])], &none, &[&output]).unwrap();
    assert_eq!(output.to_vec2::<f32>().unwrap(), [[0.0; 3]; 2]);
    assert_eq!(
        scatter_rows(&zeros(&[0, 3]), &[], 2).unwrap().dims(),
        [2, 3]
    );
}

/// Sources and outputs may be parts of one storage, apart from each other.
#[test]
fn parts_of_one_storage() {
    let all = Tensor::arange(0u32, 8, &Device::Cpu).unwrap();
    let rows = Tensor::new(&[2u32, 1], &Device::Cpu).unwrap();
    gather_rows_into(
        &[&all.narrow(0, 0, 3).unwrap()],
        &rows,
        &[&all.narrow(0, 4, 2).unwrap()],
    )
    .unwrap();
    assert_eq!(all.to_vec1::<u32>().unwrap(), [0, 1, 2, 3, 2, 1, 6, 7]);
}
